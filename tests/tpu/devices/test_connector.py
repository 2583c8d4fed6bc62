"""The connector class of the platform: what it refuses, and what it tells vLLM's native half."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import kvhost_connector.tpu as package
from kvhost_connector.config import ConfigError, ConnectorConfig
from kvhost_connector.metadata import WorkerReport
from kvhost_connector.platforms import Platform
from kvhost_connector.tpu import side as side_module
from kvhost_connector.tpu.connector import TPUOffloadConnector, one_worker, refuse
from kvhost_connector.tpu.side import RunnerSide, take_report
from kvhost_connector.tpu.worker import JaxWorker
from tests.tpu.devices.rig import Layer, Rig, mesh_of


@dataclass
class Parallel:
    tensor_parallel_size: int = 4
    world_size: int = 4
    rank: int = 0


@dataclass
class Config:
    """The part of VllmConfig that these functions read."""

    parallel_config: Parallel = field(default_factory=Parallel)
    instance_id: str = "one"
    kv_transfer_config: Any = field(default_factory=lambda: SimpleNamespace(engine_id="engine"))
    sharding_config: Any = None


@dataclass
class Native:
    """The part of the native worker half that is used."""

    worker: Any = None
    _load_jobs: dict[int, str] = field(default_factory=dict)
    _unsubmitted_store_jobs: list[Any] = field(default_factory=list)
    _is_store_writer: bool = True


@pytest.fixture
def quiet_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon is looked for."""
    monkeypatch.setattr("kvhost_client.worker.WorkerLink.start", lambda link: None)


def made(
    rig: Rig, names: list[str], places: dict[str, int], **settings: Any
) -> tuple[RunnerSide, Any, Native]:
    """The worker half over the rig's arrays, with one group of these layers."""
    groups = [SimpleNamespace(layer_names=names, kv_cache_spec=SimpleNamespace(prefix_cacheable=True))]
    config = ConnectorConfig.parse({"socket": "/nowhere.sock", "compile_ahead": False, **settings}, {})
    native = Native()
    spec = SimpleNamespace(blocks_per_chunk=1)
    seen = one_worker(Config())
    side = RunnerSide(native, spec, seen, SimpleNamespace(kv_cache_groups=groups), config)
    runner = SimpleNamespace(kv_caches=rig.runner.kv_caches, layer_name_to_kvcache_index=places)
    return side, runner, native


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(side_module.compat, "offloaded_groups", lambda config: (0,))
    return Rig(
        mesh_of(model=4), [Layer((4, 8, 2, 16), jnp.bfloat16, P(None, None, "model"))] * 2, [[0, 1]], 8
    )


def test_the_platform_finds_the_class_by_its_name() -> None:
    assert package.TPUOffloadConnector is TPUOffloadConnector
    assert TPUOffloadConnector.__name__ == "TPUOffloadConnector"
    assert TPUOffloadConnector.PLATFORM is Platform.JAX
    with pytest.raises(AttributeError):
        package.Other  # noqa: B018


def test_one_host_without_data_parallel_attention_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_MULTIHOST_BACKEND", raising=False)
    refuse(Config())
    refuse(Config(sharding_config=SimpleNamespace(total_dp_size=1)))
    with pytest.raises(ConfigError, match="attention data parallelism, found 2 parts"):
        refuse(Config(sharding_config=SimpleNamespace(total_dp_size=2)))
    monkeypatch.setenv("TPU_MULTIHOST_BACKEND", "ray")
    with pytest.raises(ConfigError, match="one host, found TPU_MULTIHOST_BACKEND=ray"):
        refuse(Config())


def test_native_is_told_of_one_worker_and_the_engine_keeps_its_own() -> None:
    config = Config()
    seen = one_worker(config)
    assert seen.parallel_config.world_size == 1
    assert seen.parallel_config.tensor_parallel_size == 4
    assert config.parallel_config.world_size == 4
    assert seen.instance_id == config.instance_id


def test_a_runner_is_taken_and_reported_once(rig: Rig, quiet_link: None) -> None:
    side, runner, native = made(rig, ["a", "b"], {"a": 0, "b": 1})
    side.register_runner(runner)
    assert isinstance(native.worker, JaxWorker)
    report = take_report(Config())
    assert isinstance(report, WorkerReport)
    assert (report.rank, report.problem, report.platform) == (0, "", "jax")
    assert report.shard_bytes == 2 * 4 * 8 * 2 * 16 * 2
    assert '"local":[4,2,2,16]' in report.pages
    assert take_report(Config()) is None
    # Not told a second time with the first step.
    assert side.metadata(None) is None
    native.worker.shutdown()


def test_compiling_ahead_leaves_the_cache_alone(rig: Rig, quiet_link: None) -> None:
    before = rig.layer_bits(1)
    side, runner, native = made(rig, ["a", "b"], {"a": 0, "b": 1}, compile_ahead=True, block_buckets=[1, 2])
    side.register_runner(runner)
    assert np.array_equal(rig.layer_bits(1), before)
    native.worker.shutdown()


@pytest.mark.parametrize(
    ("places", "settings", "says"),
    [
        ({"a": 0}, {}, "layer b of group 0 has no array"),
        ({"a": 0, "b": 1}, {"staging_bytes": 10}, "staging_bytes must hold one block"),
    ],
)
def test_a_runner_that_cannot_be_used_costs_the_cache_only(
    rig: Rig, quiet_link: None, places: dict[str, int], settings: dict[str, Any], says: str
) -> None:
    side, runner, native = made(rig, ["a", "b"], places, **settings)
    side.register_runner(runner)
    report = take_report(Config())
    assert report is not None
    assert says in report.problem
    assert native.worker.problem == report.problem
    side.pump()
