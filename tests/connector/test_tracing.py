"""Spans of what the cache does for a request, seen by OpenTelemetry's in-memory exporter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvhost_client.admin import AdminClient
from kvhost_connector.config import ConfigError, ConnectorConfig
from kvhost_connector.tracing import REQUEST_ID, Tracing, spans
from tests.connector.sim import Sim
from tests.e2e.models import prompt
from tests.support.daemon import Daemon

Make = Callable[..., Sim]


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    spans.turn_on(provider)
    yield made
    spans.turn_off()
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_a_request_that_stores_and_one_that_loads(
    engine: Make, daemon: Daemon, exporter: InMemorySpanExporter
) -> None:
    asked = prompt(100)
    first = engine()
    first.ask(asked)
    stored = by_name(exporter)
    for name in ("kvhost.lookup", "kvhost.reserve", "kvhost.store", "kvhost.commit"):
        assert stored[name], f"{name} of {sorted(stored)}"
    [request] = {span.attributes[REQUEST_ID] for span in stored["kvhost.lookup"]}
    assert {span.attributes[REQUEST_ID] for span in stored["kvhost.store"]} == {request}
    assert {span.attributes[REQUEST_ID] for span in stored["kvhost.commit"]} == {request}
    assert sum(span.attributes["kvhost.chunks"] for span in stored["kvhost.commit"]) == 6
    assert all(span.attributes["kvhost.ok"] for span in stored["kvhost.store"])
    assert REQUEST_ID not in stored["kvhost.reserve"][0].attributes
    assert stored["kvhost.reserve"][0].attributes["kvhost.granted"] > 0

    exporter.clear()
    second = engine()
    assert second.ask(asked).cached_tokens == 96
    loaded = by_name(exporter)
    for name in ("kvhost.lookup", "kvhost.pin", "kvhost.load"):
        [span] = loaded[name]
        assert span.attributes[REQUEST_ID] == request  # both engines count their requests from one
        assert span.attributes["kvhost.chunks"] >= 6
        assert span.end_time >= span.start_time
    assert loaded["kvhost.pin"][0].attributes["kvhost.hits"] == 6
    with AdminClient(daemon.socket) as admin:
        explained = admin.explain(request=request)
    assert explained.request == request
    assert explained.chains[0].usable == 6


def test_off_by_default_and_nothing_is_imported() -> None:
    assert not ConnectorConfig.parse({}).tracing
    program = (
        "import sys\nfrom kvhost_connector.tracing import spans\n"
        "with spans.reserving(4) as facts:\n    facts['x'] = 1\n"
        "assert not spans.on and not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_without_opentelemetry_it_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvhost\[otel\]'"):
        Tracing().turn_on()
