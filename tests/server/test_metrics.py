"""What Prometheus scrapes from a real daemon, and what it counts when engines work."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvhost_client.types import Chunk
from kvhost_server.config import Config
from kvhost_server.exits import StartupError
from kvhost_server.listener import Address
from kvhost_server.metrics import METRICS, Kind, Sources
from kvhost_server.observation import Observation
from scripts import metrics_page
from tests.client.engine import Engine, keys, prefix
from tests.server.hosts import MIB, cgroup_v2
from tests.support import Daemon, memory_kib, wait_for

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB", "--metrics", "127.0.0.1:0"]) as running:
        yield running


def get(daemon: Daemon, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(daemon.url + path, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(daemon: Daemon) -> Samples:
    status, text = get(daemon, "/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, /, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_the_page_is_what_the_code_says() -> None:
    assert metrics_page.main(["--check"]) == 0


def test_names_and_units_are_the_usual_ones() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("kvhost_") and metric.meaning.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith("_seconds")


def test_all_exist_before_first_use() -> None:
    with Daemon("4MiB", ["--metrics", "127.0.0.1:0"]) as fresh:
        samples = scrape(fresh)
        idle_kib = memory_kib(fresh.pid)
    names = {name for name, _ in samples}
    for metric in METRICS:
        if "namespace" in metric.labels:
            continue  # there is none yet
        ends = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        assert names >= {metric.name + end for end in ends}, metric.name
        if metric.kind is Kind.COUNTER:
            late = ("loop_late",)  # the machine's, not ours
            counts = {labels: n for (name, labels), n in samples.items() if name == metric.name}
            assert not any(n for labels, n in counts.items() if dict(labels).get("kind") not in late), counts
    assert value(samples, "kvhost_capacity_bytes") == 4 * MIB
    assert value(samples, "kvhost_state", state="serving") == 1
    assert value(samples, "kvhost_lock_mode", mode="off") == 1
    assert "process_resident_memory_bytes" in names
    assert idle_kib <= 60 * 1024


def test_it_counts_what_engines_do(daemon: Daemon) -> None:
    before = scrape(daemon)
    with Engine(daemon.socket) as engine:
        engine.store(keys("a", 6))
        engine.session.lookup([prefix(keys("a", 10)), prefix(keys("b", 2))])
        pins = engine.session.pin(0, keys("a", 2))
        [grant] = engine.session.reserve(1).grants
        number = str(engine.declared.namespace_number)
        slot = engine.declared.slot_bytes

        def settled() -> Samples | None:
            at = scrape(daemon)
            return at if value(at, "kvhost_reserved_bytes") == slot else None

        at = wait_for(settled)

        def grown(name: str, /, **labels: str) -> float:
            return value(at, name, **labels) - value(before, name, **labels)

        assert grown("kvhost_lookups_total") == 2
        assert grown("kvhost_lookup_hit_chunks_total") == 6
        assert grown("kvhost_lookup_miss_chunks_total") == 4 + 2
        assert grown("kvhost_lookup_hit_tokens_total") == 6 * 16
        assert grown("kvhost_lookup_miss_tokens_total") == 6 * 16
        assert grown("kvhost_load_chunks_total") == 2
        assert grown("kvhost_load_bytes_total") == 2 * slot
        assert grown("kvhost_stores_total") == 7
        assert grown("kvhost_commits_total") == 6
        assert grown("kvhost_commit_bytes_total") == 6 * slot
        assert grown("kvhost_used_bytes") == 6 * slot
        assert grown("kvhost_pinned_bytes") == 2 * slot
        assert value(at, "kvhost_namespace_used_bytes", namespace=number) == 6 * slot
        assert value(at, "kvhost_namespace_pinned_bytes", namespace=number) == 2 * slot
        assert value(at, "kvhost_namespace_sessions", namespace=number) == 1
        assert value(at, "kvhost_namespace_lookup_hit_tokens_total", namespace=number) == 6 * 16
        digest = engine.declared.digest.hex()[:12]
        info = {"namespace": number, "digest": digest, "model": "test", "name": ""}
        assert value(at, "kvhost_namespace_info", **info) == 1
        assert (grown("kvhost_sessions"), grown("kvhost_mappings")) == (1, 1)
        engine.session.release(pins)
        engine.session.abort(grant.store_id)


def test_it_times_calls_and_counts_refusals(daemon: Daemon) -> None:
    before = scrape(daemon)
    with Engine(daemon.socket) as engine:
        assert engine.session.reserve(10_000).reason
        engine.session.lookup([prefix(keys("z", 1))])
        errors = engine.session.update(commits=[]).errors
        assert not errors
        chunk = Chunk(0, keys("z", 1)[0], b"")
        with pytest.raises(Exception, match="not held"):
            engine.session.commit(77, chunk)
    lookup = {"service": "Cache", "method": "Lookup"}
    name = "kvhost_rpc_duration_seconds_count"

    def counted() -> Samples | None:
        at = scrape(daemon)
        return at if value(at, name, **lookup) - value(before, name, **lookup) == 1 else None

    at = wait_for(counted)
    refused = "kvhost_refusals_total"
    assert value(at, refused, reason="grant_bound") - value(before, refused, reason="grant_bound") == 1
    assert value(at, "kvhost_anomalies_total", kind="stale_commit") >= 1


def test_it_says_how_old_evicted_chunks_were(daemon: Daemon) -> None:
    before = scrape(daemon)
    with Engine(daemon.socket, model="evicting") as engine:
        for round_ in range(20):
            engine.store(keys(f"r{round_}", 8))
    name = "kvhost_eviction_age_seconds_count"

    def counted() -> Samples | None:
        at = scrape(daemon)
        return at if value(at, name) > value(before, name) else None

    at = wait_for(counted)
    evicted = value(at, name) - value(before, name)
    by_cause = sum(
        n - value(before, "kvhost_evictions_total", **dict(labels))
        for (metric, labels), n in at.items()
        if metric == "kvhost_evictions_total"
    )
    assert by_cause == evicted


def test_probes_follow_the_state(tmp_path: Path) -> None:
    cgroup = cgroup_v2(tmp_path / "cgroup", limit=100 * MIB, current=100 * MIB)
    options = ["--cgroup-root", str(cgroup), "--metrics", "127.0.0.1:0"]
    with Daemon("8MiB", options, wait=False) as daemon:
        assert get(daemon, "/livez") == (200, "alive\n")
        assert get(daemon, "/readyz") == (503, "starting, 0% populated\n")
        assert json.loads(get(daemon, "/api/status.json")[1])["state"] == "starting"
        (cgroup / "memory.current").write_text("0")
        daemon.wait_serving()
        assert get(daemon, "/readyz") == (200, "serving\n")


def test_a_flood_of_scrapes_does_not_hold_up_engines(daemon: Daemon) -> None:
    port = int(daemon.url.rpartition(":")[2])
    with Engine(daemon.socket) as engine:
        crowd = [http.client.HTTPConnection("127.0.0.1", port, timeout=5) for _ in range(50)]
        for connection in crowd:
            connection.request("GET", "/metrics")
        began = time.monotonic()
        engine.session.ping()
        assert time.monotonic() - began < 1.0
        for connection in crowd:
            assert connection.getresponse().status == 200
            connection.close()


def test_off_means_no_port() -> None:
    with Daemon("4MiB", ["--metrics", "off"]) as daemon:
        assert "metrics" not in daemon.log


def test_a_port_that_was_asked_for_and_is_taken_ends_the_start(daemon: Daemon) -> None:
    port = daemon.url.rpartition(":")[2]
    with Daemon("4MiB", ["--metrics", f"127.0.0.1:{port}"], wait=False) as second:
        assert second.wait_end() == 69
        assert "--metrics 127.0.0.1" in second.log and "cannot be listened on" in second.log


@pytest.mark.parametrize("source", ["default", "command line"])
async def test_a_default_port_that_is_taken_is_no_reason_not_to_start(daemon: Daemon, source: str) -> None:
    address = Address.parse(daemon.url.removeprefix("http://"))
    config = cast(Config, SimpleNamespace(metrics=address, sources={"metrics": source}))
    observation = Observation(lambda: config, lambda _: cast(Sources, None))
    if source == "default":
        await observation.open()
        assert observation.url == ""
    else:
        with pytest.raises(StartupError, match="cannot be listened on"):
            await observation.open()
