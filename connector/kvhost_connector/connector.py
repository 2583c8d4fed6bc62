"""KVHostConnector: the class that vLLM loads. It only hands hooks on to the half it is.

Built on vLLM's native OffloadingConnector, whose two halves keep the books of chunks, jobs and fences; the
spec makes them use kvhost's manager and worker, and the two sides here close what native leaves open.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvhost_connector import compat, platforms
from kvhost_connector.config import prepare
from kvhost_connector.metadata import StepMetadata, WorkerMetadata, WorkerReport
from kvhost_connector.namespace import refuse_unsupported
from kvhost_connector.platforms import Platform
from kvhost_connector.scheduler_side import Matched, SchedulerSide
from kvhost_connector.tracing import spans
from kvhost_connector.worker_side import WorkerSide


class KVHostConnector(OffloadingConnector):
    """Keeps an engine's KV cache in kvhostd. Its settings stand in docs/configuration.md."""

    _cache_hit_source = CacheHitSource.HOST

    PLATFORM: ClassVar[Platform | None] = None
    """The platform of a class that is made for one; without, vLLM's own decides."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        compat.check()
        compat.log_as_vllm("kvhost_client")
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = prepare(extra)
        platform = self._platform()
        if platform is not Platform.JAX:
            platforms.refuse_layout(getattr(kv_cache_config, "kv_cache_layout", None))
        platforms.refuse_sleep_mode(vllm_config, platform)
        if platform.has_driver and role == KVConnectorRole.WORKER:
            compat.check_transfers()
        refuse_unsupported(vllm_config, kv_cache_config, config)
        platforms.announce(platform, f"{role.name.lower()}'s half")
        super().__init__(vllm_config, role, kv_cache_config)
        self._extra_config = extra
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            if config.tracing:
                spans.turn_on()
            half = self.connector_scheduler
            spec = half.manager.spec
            self._scheduler_side = SchedulerSide(half, spec, vllm_config, kv_cache_config, config)
        else:
            half = self.connector_worker
            self._worker_side = WorkerSide(
                half, half.spec, vllm_config, kv_cache_config, config, platform=platform
            )

    @classmethod
    def _platform(cls) -> Platform:
        if cls.PLATFORM is not None:
            return cls.PLATFORM
        from vllm.platforms import current_platform

        return platforms.choose(current_platform)

    # Class methods: also run where no connector is built, as in the API server (contract 5).

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        config = prepare(vllm_config.kv_transfer_config.kv_connector_extra_config)
        refuse_unsupported(vllm_config, None, config)
        if config.cross_layer_blocks and cls._platform().has_driver:
            return platforms.CROSS_LAYER
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
        prepare(vllm_config.kv_transfer_config.kv_connector_extra_config)
        metrics = super().build_prom_metrics(vllm_config, *arguments, **named)
        compat.show_metrics(metrics)
        return metrics

    # Both halves.

    def shutdown(self) -> None:
        super().shutdown()
        if self._scheduler_side is not None:
            self._scheduler_side.shutdown()

    # The scheduler's half.

    @property
    def scheduling(self) -> SchedulerSide:
        """The scheduler half; an error in a worker."""
        if self._scheduler_side is None:
            raise RuntimeError("this KVHostConnector is a worker's, the scheduler's half is elsewhere")
        return self._scheduler_side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.scheduling.bind_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.scheduling.workers_reported(
            report for report in metadata.values() if isinstance(report, WorkerReport)
        )

    def on_new_request(self, request: Any) -> None:
        self.scheduling.new_request(request, super().on_new_request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched:
        return self.scheduling.match(request, num_computed_tokens, super().get_num_new_matched_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        native = super().update_state_after_alloc
        self.scheduling.allocated(
            request, num_external_tokens, lambda: native(request, blocks, num_external_tokens)
        )

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        native = super().get_external_cache_hit_sources
        return self.scheduling.hit_sources(
            request, num_external_tokens, lambda: native(request, num_external_tokens)
        )

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self.scheduling.build_metadata(scheduler_output, super().build_connector_meta)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduling.output(connector_output, super().update_connector_output)

    def has_pending_push_work(self) -> bool:
        return self.scheduling.has_work(super().has_pending_push_work)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        native = super().request_finished
        return self.scheduling.finished(request, lambda: native(request, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        native = super().request_finished_all_groups
        return self.scheduling.finished(request, lambda: native(request, block_ids))

    def take_events(self) -> Iterable[Any]:
        return list(super().take_events())

    def reset_cache(self) -> bool:
        """The weights changed. With another `weights_version` in the settings than ever before, engines that
        name the same one share again; without, this engine's cache is its own until it restarts."""
        version = str(self._extra_config.get("weights_version") or "")
        return self.scheduling.reset(super().reset_cache, version)

    # The worker's half.

    @property
    def working(self) -> WorkerSide:
        """The worker half; an error in the scheduler."""
        if self._worker_side is None:
            raise RuntimeError("this KVHostConnector is the scheduler's, the workers' halves are elsewhere")
        return self._worker_side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        native = super().register_kv_caches
        self.working.register(kv_caches, lambda: native(kv_caches))

    def get_handshake_metadata(self) -> WorkerReport:
        return self.working.report()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.working.begin_step(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self.working.begin_step(connector_metadata)
        super().bind_connector_metadata(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        native = super().get_transfer_results
        return self.working.transfer_results(lambda: native(finished_req_ids))

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        return self.working.metadata(super().build_connector_worker_meta())
