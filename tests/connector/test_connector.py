"""The class that vLLM loads: lazily, by name, class methods that need no constructor, one clear refusal."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest

from kvhost_connector import compat
from kvhost_connector.config import SPEC_NAME, ConfigError
from kvhost_connector.orders import Counters
from tests.connector.sim import Shape, Sim, kv_transfer, vllm_config

PROBE = """
import sys, threading
import {module}
loaded = sorted(name for name in ("vllm", "torch", "grpc") if name in sys.modules)
print(loaded, threading.active_count())
"""


def probe(module: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["kvhost_connector", "kvhost_connector.config"])
def test_importing_the_package_does_nothing(module: str) -> None:
    assert probe(module) == "[] 1"


def test_the_class_is_there_when_asked_for() -> None:
    import kvhost_connector

    assert kvhost_connector.KVHostConnector.__name__ == "KVHostConnector"
    with pytest.raises(AttributeError, match="no attribute 'KVHostConnecter'"):
        kvhost_connector.KVHostConnecter  # noqa: B018


def test_the_plugin_registers_the_name_once() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import kvhost_connector

    kvhost_connector.register()
    kvhost_connector.register()
    named = KVConnectorFactory.get_connector_class_by_name("KVHostConnector")
    assert named is kvhost_connector.KVHostConnector


@pytest.fixture
def engine() -> Any:
    return vllm_config(Shape(), kv_transfer("/nowhere/kvhostd.sock", attach_wait_ms=0))


def test_class_methods_point_native_at_our_spec(engine: Any) -> None:
    from kvhost_connector import KVHostConnector

    extra = engine.kv_transfer_config.kv_connector_extra_config
    assert "spec_name" not in extra
    assert KVHostConnector.get_required_kvcache_layout(engine) == "LBHNC"
    assert extra["spec_name"] == SPEC_NAME


def test_every_metric_exists_before_its_first_change(engine: Any) -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from kvhost_connector import KVHostConnector

    unregister_vllm_metrics()
    kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    KVHostConnector.build_prom_metrics(engine, kinds, ["model", "engine"], {0: ["tiny", "0"]})
    try:
        found = {sample.name: sample.value for metric in REGISTRY.collect() for sample in metric.samples}
    finally:
        unregister_vllm_metrics()
    for name in Counters.NAMES:
        assert found[f"vllm:kvhost_{name}_total"] == 0
    assert found["vllm:kvhost_usable"] == 0


@pytest.mark.parametrize("extra", [{"dedline_ms": 5}, {"deadline_ms": "soon"}])
def test_a_wrong_setting_is_refused_wherever_it_is_read_first(extra: dict[str, Any]) -> None:
    from kvhost_connector import KVHostConnector

    engine = vllm_config(Shape(), kv_transfer("/nowhere/kvhostd.sock", **extra))
    for method in (
        lambda: KVHostConnector.get_required_kvcache_layout(engine),
        lambda: KVHostConnector.build_prom_metrics(engine, {}, [], {}),
        lambda: Sim(Shape(), kv_transfer("/nowhere/kvhostd.sock", **extra)),
    ):
        with pytest.raises(ConfigError, match="kv_connector_extra_config"):
            method()


def test_another_vllm_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: (0, 31))
    with pytest.raises(compat.IncompatibleVLLM, match=r"extends vLLM 0\.32 and 0\.33, found 0\.31: install"):
        compat.check()


def test_a_vllm_that_lacks_something_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.base import OffloadingManager

    monkeypatch.delattr(OffloadingManager, "take_events")
    with pytest.raises(compat.IncompatibleVLLM, match=r"OffloadingManager\.take_events"):
        compat.check()


def test_a_half_that_lacks_something_is_refused_by_name() -> None:
    with pytest.raises(compat.IncompatibleVLLM, match="_load_jobs"):
        compat.WorkerHalf(object())


def test_this_vllm_has_everything() -> None:
    compat.check()
    assert compat.page_format() == "vllm 0.32"


def test_each_half_refuses_the_other_ones_hooks() -> None:
    with Sim(Shape(), kv_transfer("/nowhere/kvhostd.sock", attach_wait_ms=0)) as sim:
        with pytest.raises(RuntimeError, match="the workers' halves are elsewhere"):
            sim.connector.handle_preemptions(None)
        with pytest.raises(RuntimeError, match="the scheduler's half is elsewhere"):
            sim.workers[0].connector.reset_cache()
        assert not sim.connector.requires_kv_delivery
        assert not sim.connector.has_pending_push_work()


def test_a_load_failure_policy_of_fail_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    logging.getLogger("vllm").propagate = True
    with Sim(Shape(), kv_transfer("/nowhere/kvhostd.sock", "fail", attach_wait_ms=0)):
        assert 'Set "kv_load_failure_policy": "recompute"' in caplog.text


def test_the_clients_log_is_part_of_vllms() -> None:
    import logging

    with Sim(Shape(), kv_transfer("/nowhere/kvhostd.sock", attach_wait_ms=0)):
        assert logging.getLogger("kvhost_client").handlers == logging.getLogger("vllm").handlers


def test_a_worker_describes_its_engine_once_and_names_its_token_each_time() -> None:
    with Sim(Shape(), kv_transfer("/nowhere/kvhostd.sock", attach_wait_ms=0)) as sim:
        side = sim.workers[0].connector.working
        first = side.report()
        sim.workers[0].config.compilation_config.static_forward_context["full.0"] = object()
        side._link._renew_token()
        second = side.report()
        assert second.token != first.token
        assert second.backends == first.backends
        # The scheduler half is told with the next step.
        side._link._renew_token()
        told = side.metadata(None)
        assert [report.token for report in told.workers] == [side._link.token]
        assert side.metadata(None) is None


def test_the_instance_is_the_engines_own() -> None:
    from kvhost_connector.scheduler_side import instance_id

    one = vllm_config(Shape(), {**kv_transfer("/nowhere/kvhostd.sock"), "engine_id": "fixed"})
    other = vllm_config(Shape(), {**kv_transfer("/nowhere/kvhostd.sock"), "engine_id": "fixed"})
    assert instance_id(one) == instance_id(copy.deepcopy(one))
    assert instance_id(one) != instance_id(other)
    assert len(instance_id(one)) == 16
