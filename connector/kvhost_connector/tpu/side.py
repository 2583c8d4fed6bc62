"""What the connector does in the process of a tpu-inference engine, around vLLM's native worker half.

One process drives all devices of the host and holds both halves of the connector. The platform hands over
its runner instead of tensors, and passes no handshake on: the worker's report lies here for the scheduler
half, which is made later in the same process.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import jax

from kvhost_connector import compat
from kvhost_connector.canonical import canonical
from kvhost_connector.config import ConnectorConfig, HostMemory
from kvhost_connector.faults import fault_plane
from kvhost_connector.metadata import WorkerReport
from kvhost_connector.platforms import Platform
from kvhost_connector.report import host_identity
from kvhost_connector.scheduler_side import instance_id
from kvhost_connector.tpu import settings
from kvhost_connector.tpu.cache import CacheLayout
from kvhost_connector.tpu.carrier import Carrier
from kvhost_connector.tpu.moving import Programs
from kvhost_connector.tpu.worker import JaxWorker
from kvhost_connector.worker import HostWorker
from kvhost_connector.worker_side import WorkerSide

logger = logging.getLogger("vllm.kvhost.worker")

_lock = threading.Lock()
# Reports of worker halves whose scheduler half has not asked yet, by engine.
_reports: dict[bytes, WorkerReport] = {}


def take_report(vllm_config: Any) -> WorkerReport | None:
    """The report of this engine's worker half, once."""
    with _lock:
        return _reports.pop(instance_id(vllm_config), None)


class RunnerSide(WorkerSide):
    """The worker half of an engine whose arrays are JAX's."""

    def __init__(self, half: Any, spec: Any, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig):
        super().__init__(half, spec, vllm_config, kv_cache_config, config, platform=Platform.JAX)
        self._config = config

    def register_runner(self, runner: Any) -> None:
        """The runner has its KV cache. Whatever is wrong with it, the engine starts, without the cache."""
        layout: CacheLayout | None = None
        try:
            worker = self._make_worker(runner)
            self._native.set_worker(worker)
            layout = worker.layout
        except Exception as error:
            # Native must have a worker: its hooks assert it. This one reports every job failed.
            self._unusable = f"its KV cache cannot be used: {error}"
            logger.exception("kvhost: this worker runs without the cache")
            self._native.set_worker(HostWorker(None, None, rank=self._rank, problem=self._unusable))
        self._described = WorkerReport(
            rank=self._rank,
            token=b"",
            shard_bytes=layout.shard_bytes(self._blocks_per_chunk) if layout is not None else 0,
            pages=layout.describe() if layout is not None else "",
            backends=_describe_model(runner),
            device=_describe_device(),
            host=host_identity(),
            platform=self._platform.value,
        )
        if not self._unusable and not self._started:
            self._started = True
            self._link.start()
        with _lock:
            _reports[instance_id(self._vllm_config)] = self.report()

    def pump(self) -> None:
        """Starts transfers that can be started now."""
        if isinstance(self.worker, JaxWorker):
            self.worker.pump()

    def _make_worker(self, runner: Any) -> JaxWorker:
        if jax.process_count() > 1:
            raise RuntimeError(
                f"it is spread over {jax.process_count()} processes, kvhost serves one: see docs/tpu.md"
            )
        layout = CacheLayout.of(runner.kv_caches, self._arrays_of_groups(runner))
        config = self._config
        part = max(group.part_bytes for group in layout.groups)
        platform = layout.mesh.devices.flat[0].platform
        memory = config.host_memory
        if memory is HostMemory.AUTO:
            memory = HostMemory.PINNED if platform == "tpu" else HostMemory.RUNTIME
        programs = Programs(layout)
        carrier = Carrier(
            runner,
            layout,
            programs,
            staging_bytes=settings.staging_bytes(config.staging_bytes, part),
            buckets=config.block_buckets,
            threads=config.copy_threads,
            memory_kind="" if memory is HostMemory.RUNTIME else memory.value,
        )
        if note := settings.warning(max(group.block_bytes for group in layout.groups)):
            logger.warning("kvhost: %s", note)
        if config.compile_ahead:
            programs.compile_ahead(carrier.buckets, _say_progress)
        logger.info(
            "kvhost: %d blocks in %d groups, a block has %d bytes in %d parts; %d MiB of staging memory on "
            "each device, transfers through %s memory",
            layout.blocks,
            len(layout.groups),
            max(group.block_bytes for group in layout.groups),
            max(group.shards for group in layout.groups),
            carrier.staging.total >> 20,
            memory.value,
        )
        return JaxWorker(
            layout,
            self._link,
            carrier,
            rank=self._rank,
            blocks_per_chunk=self._blocks_per_chunk,
            plane=fault_plane(),
        )

    def _arrays_of_groups(self, runner: Any) -> list[list[int]]:
        """For each offloaded KV cache group, the places of its layers in the runner's list."""
        places: dict[str, int] = runner.layer_name_to_kvcache_index
        found = []
        for number in compat.offloaded_groups(self._kv_cache_config):
            names = self._kv_cache_config.kv_cache_groups[number].layer_names
            missing = [name for name in names if name not in places]
            if missing:
                raise RuntimeError(f"layer {missing[0]} of group {number} has no array in the runner")
            found.append([places[name] for name in names])
        return found


def _describe_model(runner: Any) -> str:
    """Canonical JSON of whose code computes the KV."""
    model = getattr(runner, "model", None)
    return canonical(
        {
            "runner": f"tpu-inference {_version()}",
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "implementation": os.environ.get("MODEL_IMPL_TYPE", ""),
        }
    )


def _describe_device() -> str:
    device = jax.devices()[0]
    return canonical([device.platform, device.device_kind])


def _say_progress(done: int, total: int, seconds: float) -> None:
    if done == total or done % 4 == 0:
        logger.info("kvhost: compiled %d of %d programs that move blocks, %.1f s", done, total, seconds)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tpu-inference")
    except PackageNotFoundError:
        return "unknown"
