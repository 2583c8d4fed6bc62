"""OpenTelemetry spans of what the cache does for a request, when somebody asked for them.

Spans are `kvhost.lookup`, `kvhost.pin`, `kvhost.load`, `kvhost.store`, `kvhost.reserve` and `kvhost.commit`.
They carry vLLM's id of the request under the name that vLLM's own spans give it, so that both are found
together. Where it is off, which it is by default, nothing of OpenTelemetry is imported and nothing measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvhost_connector.config import ConfigError

if TYPE_CHECKING:
    from kvhost_connector.holds import Transfer
    from kvhost_connector.orders import Changes

REQUEST_ID = "gen_ai.request.id"
_MOST_COMMITS = 65_536
_NS = 1_000_000_000


class Tracing:
    """Makes the spans; one for the process, see `spans`. Every method is called from any thread, and does
    nothing while tracing is off."""

    def __init__(self) -> None:
        self._tracer: Any = None
        # By store id: the request whose chunk waits to be committed.
        self._committing: dict[int, str] = {}
        self._began: dict[int, int] = {}

    @property
    def on(self) -> bool:
        return self._tracer is not None

    def turn_on(self, provider: Any = None) -> None:
        """Spans go to this provider; without one to the process's own, which vLLM sets up when it traces;
        where there is none, to an OTLP exporter that the usual OTEL_ variables configure.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ConfigError(
                f"tracing is true and OpenTelemetry cannot be imported ({error}); "
                "pip install 'kvhost[otel]', or leave it out"
            ) from error
        provider = provider or _provider(trace)
        self._tracer = provider.get_tracer("kvhost")

    def turn_off(self) -> None:
        """No more spans."""
        self._tracer = None
        self._committing.clear()
        self._began.clear()

    # What happens.

    def looked_up(self, request: str, keys: int, hits: int, since: float, *, pin: bool) -> None:
        """A question was answered now, of so many keys, that was asked at `since` on the monotonic clock."""
        if self._tracer is not None:
            took_ns = int((time.monotonic() - since) * _NS)
            self._span(
                "kvhost.pin" if pin else "kvhost.lookup",
                time.time_ns() - took_ns,
                request,
                {"kvhost.chunks": keys, "kvhost.hits": hits},
            )

    def transfer_begins(self, transfer: Transfer) -> None:
        """A load or store goes to the workers."""
        if self._tracer is not None:
            self._began[transfer.transfer_id] = time.time_ns()

    def transfer_ends(self, transfer: Transfer, heard: bool = True) -> None:
        """Every rank reported it; or, not `heard`, no worker ever learns of it."""
        began = self._began.pop(transfer.transfer_id, None)
        if self._tracer is None or began is None:
            return
        if transfer.direction == "store" and transfer.ok and len(self._committing) < _MOST_COMMITS:
            self._committing.update(dict.fromkeys((g.store_id for g in transfer.grants), transfer.req_id))
        facts = {"kvhost.chunks": len(transfer.keys), "kvhost.ok": transfer.ok and heard}
        self._span(f"kvhost.{transfer.direction}", began, transfer.req_id, facts)

    @contextmanager
    def reserving(self, count: int) -> Iterator[dict[str, Any]]:
        """Around a call that takes slots ahead, for no request in particular; say in what it yields what came
        of it."""
        facts: dict[str, Any] = {"kvhost.slots": count}
        began = time.time_ns() if self._tracer is not None else 0
        yield facts
        self._span("kvhost.reserve", began, "", facts)

    @contextmanager
    def committing(self, changes: Changes) -> Iterator[None]:
        """Around a call that publishes chunks: one span a request."""
        if self._tracer is None:
            yield
            return
        chunks: dict[str, int] = {}
        for store in changes.commits:
            request = self._committing.pop(store.store_id, "")
            chunks[request] = chunks.get(request, 0) + 1
        for abort in changes.aborts:
            self._committing.pop(abort.store_id, None)
        began = time.time_ns()
        ok = False
        try:
            yield
            ok = True
        finally:
            for request, count in chunks.items():
                self._span("kvhost.commit", began, request, {"kvhost.chunks": count, "kvhost.ok": ok})

    def _span(self, name: str, began_ns: int, request: str, facts: Mapping[str, Any]) -> None:
        tracer = self._tracer
        if tracer is not None:
            attributes = {REQUEST_ID: request, **facts} if request else dict(facts)
            tracer.start_span(name, start_time=began_ns, attributes=attributes).end()


def _provider(trace: Any) -> Any:
    """The process's provider of tracers, made where nobody has made one."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        return provider
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"tracing is true and OpenTelemetry's exporter cannot be imported ({error}); "
            "pip install 'kvhost[otel]', or leave it out"
        ) from error
    made = TracerProvider(resource=Resource.create({"service.name": "kvhost"}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


spans = Tracing()
"""Of this process."""
