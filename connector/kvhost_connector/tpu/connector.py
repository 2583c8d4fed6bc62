"""TPUOffloadConnector: the class that a tpu-inference engine loads, by `kvhost_connector.tpu`.

The scheduler half is that of every platform. Differences of this one: one worker process drives all devices,
so the native half is told of one worker; the worker half is given a runner; and flush orders, which the
platform never passes on, are carried out when a step's metadata arrives, before its forward pass
(contract 24): a save must be out of its blocks before they are computed anew.
"""

from __future__ import annotations

import copy
import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from kvhost_connector.config import ConfigError, prepare
from kvhost_connector.connector import KVHostConnector
from kvhost_connector.namespace import refuse_unsupported
from kvhost_connector.platforms import Platform
from kvhost_connector.tpu.settings import take_over
from kvhost_connector.tpu.side import RunnerSide, take_report

LAYOUT = "NHD"
"""The only layout that tpu-inference has; its name for blocks of tokens of heads."""


class TPUOffloadConnector(KVHostConnector):
    """Keeps the KV cache of a tpu-inference engine in kvhostd. Settings: docs/configuration.md."""

    PLATFORM = Platform.JAX

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        take_over(vllm_config.kv_transfer_config.kv_connector_extra_config)
        refuse(vllm_config)
        seen = one_worker(vllm_config)
        super().__init__(seen, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            if (report := take_report(vllm_config)) is not None:
                self.scheduling.workers_reported([report])
        else:
            half, extra = self.connector_worker, vllm_config.kv_transfer_config.kv_connector_extra_config
            self._worker_side = RunnerSide(half, half.spec, seen, kv_cache_config, prepare(extra))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        take_over(extra)
        refuse(vllm_config)
        refuse_unsupported(vllm_config, None, prepare(extra))
        return LAYOUT

    # The worker's half.

    @property
    def running(self) -> RunnerSide:
        """The worker half; an error in the scheduler's."""
        side = self.working
        if not isinstance(side, RunnerSide):
            raise RuntimeError("this worker half has no runner")
        return side

    def register_runner(self, runner: Any) -> None:
        """Called by the platform when the KV cache is there."""
        self.running.register_runner(runner)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Hands over the saves of the step before and carries out flush orders; the platform does neither.
        self.handle_preemptions(connector_metadata)
        self.running.pump()

    def start_load_kv(self, forward_context: Any, **arguments: Any) -> None:
        super().start_load_kv(forward_context, **arguments)
        self.running.pump()


def one_worker(vllm_config: Any) -> Any:
    """The configuration as the native half must see it: its jobs are done when one worker says so, and not
    as many as there are devices."""
    seen = copy.copy(vllm_config)
    seen.parallel_config = copy.copy(vllm_config.parallel_config)
    seen.parallel_config.world_size = 1
    return seen


def refuse(vllm_config: Any) -> None:
    """Raises `ConfigError` for set-ups of this platform that kvhost does not serve (docs/tpu.md)."""
    backend = os.environ.get("TPU_MULTIHOST_BACKEND", "")
    if backend:
        raise ConfigError(
            f"kvhost serves TPU engines of one host, found TPU_MULTIHOST_BACKEND={backend}: unset it, or "
            f"leave kvhost out"
        )
    sharding = getattr(vllm_config, "sharding_config", None)
    spread = int(getattr(sharding, "total_dp_size", 1) or 1)
    if spread > 1:
        raise ConfigError(
            f"kvhost does not serve attention data parallelism, found {spread} parts in one engine: set "
            f"enable_dp_attention to false and data_parallel_size to 1, or run one engine for each part; "
            f"these share one kvhostd"
        )
