"""Every metric of the daemon: one table with name, kind, meaning, and where the number is read.

Nothing is kept here. `gather` reads the books on the loop, in one go and fast; `render` turns what it read
into the text that Prometheus wants, and may run in a thread. prometheus_client is imported there, when the
first scrape comes: a daemon that nobody scrapes does without.
"""

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhost_server import __version__
from kvhost_server.books import ANOMALIES, Books, ServiceState
from kvhost_server.census import Census, census_of
from kvhost_server.fates import EVICTIONS
from kvhost_server.histogram import Histogram
from kvhost_server.lag import LoopLag
from kvhost_server.lending import SegmentState
from kvhost_server.locking import Lock
from kvhost_server.measures import DROPS, REASONS, Measures
from kvhost_server.pool import Pool

MOST_NAMESPACES = 128
"""Namespaces with series of their own: those that use the most. The totals count all."""


class Kind(enum.StrEnum):
    """What Prometheus calls them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Sources:
    """Where the numbers are.

    Args:
        anomalies: those of the shell, by name: refused peers, bad packets.
        lock: what was asked of mlock.
    """

    books: Books
    pool: Pool
    measures: Measures
    lag: LoopLag
    anomalies: Callable[[], Mapping[str, int]]
    lock: Lock
    started: float = field(default_factory=time.time)


class Reading:
    """What one scrape sees. The census is taken once."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.books = sources.books
        self.pool = sources.pool
        self.measures = sources.measures
        self.census = census_of(sources.books)
        self.named = sorted(self.census, key=lambda one: -one.used)[:MOST_NAMESPACES]


Label = tuple[str, ...]
Value = float | Histogram


@dataclass(frozen=True)
class Metric:
    """One line of the table. `read` gives the values by the values of the labels."""

    name: str
    kind: Kind
    meaning: str
    read: Callable[[Reading], Iterable[tuple[Label, Value]]]
    labels: tuple[str, ...] = ()


Gathered = Sequence[tuple[Metric, list[tuple[Label, float | tuple[list[tuple[str, int]], float]]]]]


def _one(read: Callable[[Reading], float]) -> Callable[[Reading], Iterable[tuple[Label, Value]]]:
    return lambda at: [((), read(at))]


def _counter(name: str, meaning: str, read: Callable[[Reading], float]) -> Metric:
    return Metric(name, Kind.COUNTER, meaning, _one(read))


def _gauge(name: str, meaning: str, read: Callable[[Reading], float]) -> Metric:
    return Metric(name, Kind.GAUGE, meaning, _one(read))


def _of_namespaces(name: str, kind: Kind, meaning: str, read: Callable[[Census], float]) -> Metric:
    return Metric(
        f"kvhost_namespace_{name}",
        kind,
        meaning,
        lambda at: [((str(one.namespace.number),), read(one)) for one in at.named],
        ("namespace",),
    )


def _states(at: Reading) -> Iterable[tuple[Label, float]]:
    return [((state.name.lower(),), float(at.books.state is state)) for state in ServiceState]


def _segments(at: Reading) -> Iterable[tuple[Label, float]]:
    states = at.books.lending.states
    return [((state.value,), states.count(state)) for state in SegmentState]


def _lock(at: Reading) -> Iterable[tuple[Label, float]]:
    return [((lock.value,), float(at.sources.lock is lock)) for lock in Lock]


def _refusals(at: Reading) -> Iterable[tuple[Label, float]]:
    counters, reasons = at.books.counters, at.measures.reasons
    yield ("no_space",), counters["no_space"]
    yield ("grant_bound",), counters["bound_reached"]
    yield ("pin_bound",), at.measures.pin_bound
    for reason in REASONS:
        yield (reason,), reasons[reason]


def _anomalies(at: Reading) -> Iterable[tuple[Label, float]]:
    happened = {**dict.fromkeys(ANOMALIES, 0), **at.books.anomalies, **at.sources.anomalies()}
    return [((name,), count) for name, count in sorted(happened.items())]


def _info(at: Reading) -> Iterable[tuple[Label, float]]:
    return [
        (
            (
                str(one.namespace.number),
                one.namespace.digest.hex()[:12],
                one.namespace.spec.model[:128],
                one.namespace.spec.name[:128],
            ),
            1.0,
        )
        for one in at.named
    ]


def _counted(name: str) -> Callable[[Reading], float]:
    return lambda at: at.books.counters[name]


def _counted_in(name: str) -> Callable[[Census], float]:
    return lambda one: one.namespace.counters[name]


def _looked_up(name: str) -> Callable[[Reading], float]:
    return lambda at: at.measures.lookups[name]


def _total(what: str) -> Callable[[Reading], float]:
    return lambda at: sum(getattr(one, what) for one in at.census)


def _bytes_of(counter: str) -> Callable[[Reading], float]:
    """Chunks of this counter times what a chunk takes; namespaces that are gone are kept in the books."""
    return lambda at: at.books.bytes_of(counter)


METRICS: tuple[Metric, ...] = (
    # Is it up?
    Metric(
        "kvhost_build_info",
        Kind.GAUGE,
        "Always 1; the label says which version runs.",
        lambda at: [((__version__,), 1.0)],
        ("version",),
    ),
    _gauge(
        "kvhost_start_time_seconds",
        "When this daemon started, in seconds since 1970.",
        lambda at: at.sources.started,
    ),
    Metric(
        "kvhost_state", Kind.GAUGE, "1 for what the daemon does now, 0 for the others.", _states, ("state",)
    ),
    _gauge(
        "kvhost_populated_ratio",
        "How much of the pool is populated, 0 to 1.",
        lambda at: at.pool.populated,
    ),
    # Memory.
    _gauge("kvhost_asked_bytes", "What --memory asked for.", lambda at: at.pool.asked_bytes),
    _gauge(
        "kvhost_capacity_bytes",
        "The pool as it is: less than asked where that did not fit.",
        lambda at: at.pool.capacity_bytes,
    ),
    _gauge("kvhost_populated_bytes", "Allocated memory of the pool.", lambda at: at.pool.populated_bytes),
    _gauge("kvhost_locked_bytes", "Memory of the pool that is locked.", lambda at: at.pool.locked_bytes),
    Metric("kvhost_lock_mode", Kind.GAUGE, "1 for what --lock asks for, 0 for the others.", _lock, ("mode",)),
    _gauge(
        "kvhost_segment_bytes",
        "Size of one segment of the pool.",
        lambda at: at.books.lending.segment_bytes,
    ),
    Metric("kvhost_segments", Kind.GAUGE, "Segments by where they stand.", _segments, ("state",)),
    _gauge("kvhost_used_bytes", "What stored chunks take, in whole slots.", _total("used")),
    _gauge(
        "kvhost_pinned_bytes", "Slots that engines are reading, or operators have pinned.", _total("pinned")
    ),
    _gauge("kvhost_reserved_bytes", "Slots that engines may write now.", _total("reserved")),
    _gauge(
        "kvhost_quarantined_bytes",
        "Slots whose former writers are not yet proven quiet.",
        _total("quarantined"),
    ),
    _gauge(
        "kvhost_chunks",
        "Stored chunks.",
        lambda at: sum(len(one.namespace.table.index) for one in at.census),
    ),
    # Does it hit?
    _counter("kvhost_lookups_total", "Requests that engines looked up.", _looked_up("queries")),
    _counter("kvhost_lookup_hit_chunks_total", "Chunks looked up that were there.", _looked_up("hit_chunks")),
    _counter(
        "kvhost_lookup_miss_chunks_total",
        "Chunks looked up that were not, or came after one that was not.",
        _looked_up("miss_chunks"),
    ),
    _counter("kvhost_lookup_hit_tokens_total", "The same in tokens.", _looked_up("hit_tokens")),
    _counter("kvhost_lookup_miss_tokens_total", "The same in tokens.", _looked_up("miss_tokens")),
    _counter(
        "kvhost_advised_chunks_total", "Chunks asked for without a session.", _counted("advised_chunks")
    ),
    _counter("kvhost_load_chunks_total", "Chunks pinned to be loaded.", _counted("pinned_chunks")),
    _counter("kvhost_load_bytes_total", "The same in bytes.", _bytes_of("pinned_chunks")),
    # What is stored.
    _counter("kvhost_stores_total", "Slots given to engines to write.", _counted("granted_slots")),
    _counter("kvhost_commits_total", "Chunks stored.", _counted("committed_chunks")),
    _counter("kvhost_commit_bytes_total", "The same in bytes.", _bytes_of("committed_chunks")),
    _counter(
        "kvhost_superseded_commits_total",
        "Chunks that another engine had stored first.",
        _counted("superseded_chunks"),
    ),
    _counter("kvhost_aborted_stores_total", "Stores that engines gave up.", _counted("aborted_stores")),
    Metric(
        "kvhost_evictions_total",
        Kind.COUNTER,
        "Chunks evicted, by why: for room in their namespace, with their segment for another namespace, "
        "for a lower limit, by an operator.",
        lambda at: [((cause.name.lower(),), at.books.fates.evicted[cause]) for cause in EVICTIONS],
        ("cause",),
    ),
    Metric(
        "kvhost_eviction_age_seconds",
        Kind.HISTOGRAM,
        "How long ago what was evicted had last been used.",
        lambda at: [((), at.books.fates.ages)],
    ),
    _counter(
        "kvhost_segments_retired_total",
        "Segments taken from one namespace for another.",
        _counted("segments_retired"),
    ),
    Metric(
        "kvhost_refusals_total",
        Kind.COUNTER,
        "What was refused, by why: no slot, the bounds of one session, or the gRPC status of a call.",
        _refusals,
        ("reason",),
    ),
    Metric(
        "kvhost_drops_total",
        Kind.COUNTER,
        "Times that messages were dropped because somebody read too slowly; he is told to start anew.",
        lambda at: [((kind,), at.measures.drops[kind]) for kind in DROPS],
        ("kind",),
    ),
    # Is it slow?
    Metric(
        "kvhost_rpc_duration_seconds",
        Kind.HISTOGRAM,
        "Time in the handler of a call; of streams only whether they failed is counted.",
        lambda at: [(names, measure.seconds) for names, measure in at.measures.calls.items()],
        ("service", "method"),
    ),
    Metric(
        "kvhost_rpc_failures_total",
        Kind.COUNTER,
        "Calls that ended with an error.",
        lambda at: [(names, measure.failures) for names, measure in at.measures.calls.items()],
        ("service", "method"),
    ),
    Metric(
        "kvhost_loop_lag_seconds",
        Kind.HISTOGRAM,
        "How late the event loop woke, ten times a second.",
        lambda at: [((), at.sources.lag.seconds)],
    ),
    _gauge(
        "kvhost_loop_lag_max_seconds",
        "The largest lag since the start.",
        lambda at: at.sources.lag.largest_s,
    ),
    # Who uses it?
    _gauge("kvhost_namespaces", "Namespaces.", lambda at: len(at.census)),
    _gauge("kvhost_sessions", "Engines that are connected.", lambda at: len(at.books.sessions)),
    _counter("kvhost_sessions_opened_total", "Sessions opened.", _counted("sessions_opened")),
    _gauge("kvhost_mappings", "Worker processes known.", lambda at: len(at.books.custody.mappings)),
    Metric(
        "kvhost_anomalies_total",
        Kind.COUNTER,
        "What should not happen, by kind.",
        _anomalies,
        ("kind",),
    ),
    Metric(
        "kvhost_namespace_info",
        Kind.GAUGE,
        "Always 1; the labels say what a namespace is.",
        _info,
        ("namespace", "digest", "model", "name"),
    ),
    _of_namespaces(
        "capacity_bytes", Kind.GAUGE, "Segments of the namespace, in bytes.", lambda one: one.capacity
    ),
    _of_namespaces("used_bytes", Kind.GAUGE, "What its stored chunks take.", lambda one: one.used),
    _of_namespaces("pinned_bytes", Kind.GAUGE, "Its slots that are read or pinned.", lambda one: one.pinned),
    _of_namespaces(
        "reserved_bytes", Kind.GAUGE, "Its slots that engines may write.", lambda one: one.reserved
    ),
    _of_namespaces("quarantined_bytes", Kind.GAUGE, "Its slots in quarantine.", lambda one: one.quarantined),
    _of_namespaces("sessions", Kind.GAUGE, "Its connected engines.", lambda one: len(one.namespace.sessions)),
    *(
        _of_namespaces(f"{name}_total", Kind.COUNTER, meaning, _counted_in(key))
        for name, key, meaning in (
            ("lookups", "queries", "Requests looked up in it."),
            ("lookup_hit_chunks", "hit_chunks", "Chunks looked up that were there."),
            ("lookup_miss_chunks", "miss_chunks", "Chunks looked up that were not."),
            ("lookup_hit_tokens", "hit_tokens", "Tokens looked up that were there."),
            ("lookup_miss_tokens", "miss_tokens", "Tokens looked up that were not."),
            ("commits", "committed_chunks", "Chunks stored in it."),
            ("evictions", "evicted", "Chunks evicted from it."),
        )
    ),
)
"""In the order in which they are shown and documented."""


def gather(sources: Sources) -> Gathered:
    """All values as they are now. On the loop: nothing changes meanwhile."""
    at = Reading(sources)
    return [
        (
            metric,
            [
                (labels, (value.buckets(), value.sum) if isinstance(value, Histogram) else value)
                for labels, value in metric.read(at)
            ],
        )
        for metric in METRICS
    ]


def render(gathered: Gathered) -> bytes:
    """The text for Prometheus, with the usual metrics of a process behind ours."""
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    class Ours:
        def collect(self) -> Iterable[Any]:
            for metric, values in gathered:
                if metric.kind is Kind.HISTOGRAM:
                    histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
                    for labels, value in values:
                        if isinstance(value, tuple):
                            histogram.add_metric(labels, value[0], value[1])
                    yield histogram
                else:
                    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                    family = kind(metric.name, metric.meaning, labels=metric.labels)
                    for labels, value in values:
                        if not isinstance(value, tuple):
                            family.add_metric(labels, value)
                    yield family

    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(Ours())
    prometheus_client.ProcessCollector(registry=registry)
    return prometheus_client.generate_latest(registry)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
