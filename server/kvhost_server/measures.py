"""What is counted where calls come in: how long they took, which failed and why, what lookups found.

Kept as plain numbers in objects that are looked up once, not once a call or a key; `metrics` reads them when
somebody asks.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import TypeVar

from kvhost_proto.v1 import admin_pb2, cache_pb2
from kvhost_server.errors import Refused
from kvhost_server.histogram import Histogram
from kvhost_server.lookups import Answered, QueryAsked
from kvhost_server.namespace import Namespace
from kvhost_server.reading import Found

LATENCY_BOUNDS_S = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
REASONS = (
    *("invalid_argument", "not_found", "permission_denied", "unauthenticated", "resource_exhausted"),
    *("failed_precondition", "aborted", "unavailable", "cancelled", "other"),
)
"""Why a call failed: gRPC's names where kvhost uses them."""

DROPS = ("notices", "watch_events")
"""What was thrown away because somebody read too slowly; whoever it was is told to start anew."""

_BY_CODE = {
    3: "invalid_argument",
    5: "not_found",
    7: "permission_denied",
    8: "resource_exhausted",
    9: "failed_precondition",
    10: "aborted",
    14: "unavailable",
    16: "unauthenticated",
    1: "cancelled",
}
CANCELLED = 1
_YES, _PIN_BOUND = bytes([Found.YES]), bytes([Found.PIN_BOUND])

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class CallMeasure:
    """One method: the seconds its handler took (a stream's are not counted), and the calls that failed."""

    __slots__ = ("_reasons", "failures", "seconds")

    def __init__(self, reasons: Counter[str]) -> None:
        self.seconds = Histogram(LATENCY_BOUNDS_S)
        self.failures = 0
        self._reasons = reasons

    def failed(self, code: int) -> None:
        """A call ended with this gRPC status."""
        self.failures += 1
        self._reasons[_BY_CODE.get(code, "other")] += 1

    def timing(
        self, handler: Callable[[_Request], Awaitable[_Reply]]
    ) -> Callable[[_Request], Awaitable[_Reply]]:
        """The same handler of a message, measured; what it refuses it raises as `Refused`."""

        async def timed(request: _Request) -> _Reply:
            began = perf_counter()
            try:
                return await handler(request)
            except Refused as refused:
                self.failed(refused.code)
                raise
            finally:
                self.seconds.observe(perf_counter() - began)

        return timed


class Measures:
    """Everything of one daemon."""

    def __init__(self) -> None:
        self.reasons = Counter(dict.fromkeys(REASONS, 0))
        self.calls: dict[tuple[str, str], CallMeasure] = {}
        for described in (cache_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR):
            for service in described.services_by_name.values():
                for method in service.methods:
                    self.calls[service.name, method.name] = CallMeasure(self.reasons)
        self.lookups = Counter(
            dict.fromkeys(("queries", "hit_chunks", "miss_chunks", "hit_tokens", "miss_tokens"), 0)
        )
        self.pin_bound = 0
        self.drops = Counter(dict.fromkeys(DROPS, 0))

    def of(self, path: str) -> CallMeasure | None:
        """The measure of a method, by the path that gRPC calls it by; None for other people's services."""
        _, _, rest = path.rpartition(".")
        service, _, method = rest.partition("/")
        return self.calls.get((service, method)) if path.startswith("/kvhost.") else None

    def looked_up(
        self, namespace: Namespace, asked: Sequence[QueryAsked], answered: Answered, pin: bool
    ) -> None:
        """What an engine asked for, and what was there. Pins follow a lookup of the same keys, and are no
        second hit."""
        if pin:
            self.pin_bound += sum(
                [chain.found.count(_PIN_BOUND) for answers in answered for chain in answers]
            )
            return
        size = namespace.spec.layout.key_bytes
        tokens = namespace.tokens_per_chunk
        hits = hit_tokens = chunks = asked_tokens = 0
        for query, answers in zip(asked, answered, strict=True):
            for chain, found in zip(query.chains, answers, strict=True):
                each = tokens.get(chain.group, 0)
                here, all_of_them = found.found.count(_YES), len(chain.keys) // size
                hits += here
                chunks += all_of_them
                hit_tokens += here * each
                asked_tokens += all_of_them * each
        for counters in (self.lookups, namespace.counters):
            counters["queries"] += len(asked)
            counters["hit_tokens"] += hit_tokens
            counters["miss_tokens"] += asked_tokens - hit_tokens
            counters["miss_chunks"] += chunks - hits
        self.lookups["hit_chunks"] += hits
