"""What a daemon costs: start, idle, lookups for a second of its processor, and what very many chunks change.

By itself: `python -m benchmarks.daemon [--full]`.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from types import TracebackType

from benchmarks.alone import run_alone
from benchmarks.load import DIFFERENT, HASHES, load
from benchmarks.report import Plot, Report, Table
from benchmarks.scale import Scale, in_turns
from benchmarks.small import Engine, Usage, chain, keys, small_slots
from kvhost_client.types import Query
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

IDLE_S = 20.0
CHUNKS = (1_000, 4_000_000)
CHUNKS_FULL = (1_000, 100_000, 1_000_000, 4_000_000)
_PINNED = 65_536
_EVICTED = 32_768


def measure(scale: Scale, report: Report) -> None:
    start(scale, report)
    with Idle() as idle:
        # What a process uses is counted for itself: it may be idle while another one works.
        many_chunks(scale, report)
        idle.tell(report)
    requests(scale, report)


def start(scale: Scale, report: Report) -> None:
    """Daemons with a pool of 1 GiB."""
    opened: list[float] = []
    populated: list[float] = []
    for _ in range(scale.rounds if scale.full else 3):
        began = time.monotonic()
        with Daemon("1GiB", wait=False) as daemon:
            wait_for(lambda path=daemon.socket: _listens(path), 10.0, "the port to open")  # type: ignore[misc]
            opened.append(time.monotonic() - began)
            daemon.wait_serving()
            took = re.search(r"populated in ([\d.]+) s", daemon.wait_log("populated in"))
            if took is not None and float(took[1]) > 0:
                populated.append(2**30 / 1e9 / float(took[1]))
    report.figure("port_open_s", opened, "s", "process started to connected, a pool of 1 GiB behind it")
    report.figure("populate_gb_per_s", populated, "GB/s", "1 GiB, as the daemon logs it")


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


class Idle:
    """A daemon with a pool of 1 GiB and one session that asks nothing."""

    def __enter__(self) -> Idle:
        with ExitStack() as stack:
            daemon = stack.enter_context(Daemon("1GiB"))
            stack.enter_context(Engine(daemon.socket))
            time.sleep(1.0)  # what follows from the attaching is not idleness
            self._usage = Usage(daemon.pid)
            self._began = time.monotonic()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def tell(self, report: Report) -> None:
        """What it used, over 20 s at least."""
        time.sleep(max(0.0, self._began + IDLE_S - time.monotonic()))
        seconds = time.monotonic() - self._began
        share = self._usage.cpu_s() / seconds
        report.figure(
            "idle_cpu_pct", 100 * share, "%", f"of one core, over {seconds:.0f} s, one idle session"
        )
        report.figure("idle_rss_mib", self._usage.rss_bytes / 2**20, "MiB", "resident, without shared memory")


def requests(scale: Scale, report: Report) -> None:
    """Lookups of 64 hashes, all found, for each second of the daemon's processor."""
    rounds = scale.rounds if scale.full else 3
    rows = []
    # What 16 busy engines ask, and 16 with little to do; then as fast as they can, so many in a message.
    asked = [(16, "~4"), (16, "~1")]
    if scale.full:
        asked += [(sessions, per) for per in ("1", "4", "16") for sessions in (1, 4, 16)]
    with small_slots(8 * DIFFERENT * HASHES) as daemon, Engine(daemon.socket) as engine:
        engine.store(0, DIFFERENT * HASHES)
        usage = Usage(daemon.pid)
        for sessions, per in asked:
            at_work = per.startswith("~")
            seconds = (3.0 if scale.full else 1.0) * (2 if at_work else 1)
            by_cpu, by_wall, carried = [], [], []
            with load(daemon.socket, sessions, per) as asking:
                asking.run(0.3)
                for _ in range(rounds):
                    usage.cpu_s()
                    lookups, messages = asking.run(seconds)
                    by_cpu.append(lookups / usage.cpu_s())
                    by_wall.append(lookups / seconds)
                    carried.append(lookups / messages)
            each = f"{median(carried):.1f}"
            key, how = f"requests_per_s_{sessions}x{per}", "the next message when the last is answered"
            if at_work:
                key = "requests_per_s" if per == "~4" else "requests_per_s_little_to_do"
                how = f"a step every 20 ms, in each {per[1:]} new requests on average"
            note = f"64 hashes each; {sessions} engines, {how}; {each} lookups in a message"
            report.figure(key, by_cpu, "lookups/CPU-s", note)
            rows.append((sessions, how, each, f"{median(by_cpu):.0f}", f"{median(by_wall):.0f}"))
    columns = ("engines", "asking", "lookups in a message", "lookups per CPU-s", "lookups per s")
    report.table("requests", Table("Lookups of 64 hashes that a daemon answers", columns, rows))


def many_chunks(scale: Scale, report: Report) -> None:
    """The same daemon with few chunks and with very many."""
    sizes = CHUNKS_FULL if scale.full else CHUNKS
    rows, lookups = [], {}
    with ExitStack() as stack:
        filled = {}
        for size in sizes:
            daemon = stack.enter_context(small_slots(size))
            filled[size] = _Filled(daemon, size, stack)
        for number in range(scale.rounds):
            for size in in_turns(sizes, number):
                filled[size].look_up()
        for size in sizes:
            one = filled[size]
            lookups[size] = [median(part) for part in one.lookups]
            one.evict_and_end()
            rows.append(one.row())
    largest, least = max(sizes), min(sizes)
    each = [large / small for large, small in zip(lookups[largest], lookups[least], strict=True)]
    report.figure("lookup_4m_vs_1k", each, note="p50 of a lookup of 64 hashes, at random, 4M chunks / 1k")
    largest_one = filled[largest]
    report.figure(
        "index_bytes_per_chunk",
        largest_one.bytes_per_chunk,
        "B",
        f"growth of the daemon's resident memory, {largest:,} chunks",
    )
    report.figure(
        "loop_lag_ms", largest_one.lag_ms, "ms", "largest since the start, 4M chunks stored and evicted"
    )
    columns = (
        "chunks",
        "bytes a chunk",
        "store, us a chunk",
        "lookup p50 ms",
        "evict and store, us a chunk",
        "end of a session that holds 65,536 pins, s",
        "loop late at most, ms",
    )
    report.table("chunks", Table("What many chunks change", columns, rows))
    report.plot(
        "chunks",
        Plot(
            "Lookup of 64 hashes",
            "chunks stored",
            "round trip p50, ms",
            {"lookup": [(size, median(lookups[size]) * 1e3) for size in sizes]},
            log_x=True,
        ),
    )


class _Filled:
    """A daemon whose pool is full."""

    def __init__(self, daemon: Daemon, size: int, stack: ExitStack) -> None:
        self.daemon, self.size = daemon, size
        self.engine = stack.enter_context(Engine(daemon.socket))
        self.usage = Usage(daemon.pid)
        before = self.usage.rss_bytes
        self.usage.cpu_s()
        self.slots = self.engine.declared.slots
        self.engine.store(0, self.slots)
        self.store_us = self.usage.cpu_s() / self.slots * 1e6
        self.bytes_per_chunk = (self.usage.rss_bytes - before) / self.slots
        self.lookups: list[list[float]] = []
        self._next = self.slots
        self.evict_us = self.end_s = self.lag_ms = 0.0
        # Prompts all over the index: what one asks is not in the processor's cache.
        chains = self.slots // HASHES
        self._asked = [chain(keys(HASHES * (n * 7919 % chains), HASHES)) for n in range(200)]
        _each(self._ask, self._asked)

    def _ask(self, asked: Query) -> None:
        (answer,) = self.engine.session.lookup([asked])
        if answer.chains[0].hits != HASHES:
            raise RuntimeError(f"{answer.chains[0].hits} of {HASHES} chunks were found")

    def look_up(self) -> None:
        self.lookups.append(_each(self._ask, self._asked))

    def evict_and_end(self) -> None:
        """Stores into a full pool, then ends a session that holds many chunks."""
        count = min(_EVICTED, self.slots // 2)
        self.usage.cpu_s()
        self.engine.store(self._next, count)
        self.evict_us = self.usage.cpu_s() / count * 1e6
        pinned = min(_PINNED, self.slots // 4)
        with Engine(self.daemon.socket) as other:
            names = keys(self._next, min(pinned, count))
            for start in range(0, pinned, count):
                other.session.lookup([chain([*names[: min(count, pinned - start)]])], pin=True)
            began = time.monotonic()
            other.session.close()
            wait_for(lambda: not self.daemon.status().namespaces[0].pinned_chunks, 30.0, "the pins to go")
            self.end_s = time.monotonic() - began
        self.lag_ms = self.daemon.status().anomalies["loop_lag_max_us"] / 1e3

    def row(self) -> tuple[object, ...]:
        return (
            f"{self.slots:,}",
            f"{self.bytes_per_chunk:.0f}",
            f"{self.store_us:.1f}",
            f"{median(map(median, self.lookups)) * 1e3:.3f}",
            f"{self.evict_us:.1f}",
            f"{self.end_s:.2f}",
            f"{self.lag_ms:.0f}",
        )


def _each(ask: Callable[[Query], None], asked: list[Query]) -> list[float]:
    took = []
    for query in asked:
        began = time.perf_counter()
        ask(query)
        took.append(time.perf_counter() - began)
    return took


if __name__ == "__main__":
    run_alone(measure)
