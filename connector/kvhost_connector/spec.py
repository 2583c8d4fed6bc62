"""kvhost's OffloadingSpec: what vLLM's native half asks for a manager and a worker.

The connector fills in what the spec's own configuration does not hold (contract 2); neither method opens
anything before it is called, and both always return an object (contract 19).
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker

from kvhost_connector.config import ConnectorConfig
from kvhost_connector.copying import choose_copier
from kvhost_connector.device.driver import driver_of
from kvhost_connector.device.pinning import Pinning
from kvhost_connector.faults import fault_plane
from kvhost_connector.jobs import MappingSource
from kvhost_connector.manager import HostManager
from kvhost_connector.native import NativeMissing
from kvhost_connector.pages import PageTable, UnusablePages
from kvhost_connector.platforms import Platform
from kvhost_connector.stats import metric_definitions
from kvhost_connector.worker import HostWorker

logger = logging.getLogger("vllm.kvhost")


class KVHostSpec(OffloadingSpec):
    """One engine's offloading to kvhostd. The connector sets `platform`, `source` and, where a device copies,
    `pinning` before caches are registered."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # The base leaves it False: with identical bytes on all ranks (MLA) one copy is stored (contract 6).
        self.replicated_layout = bool(config.replicated_layout)
        self.platform = Platform.HOST
        self.source: MappingSource | None = None
        self.pinning: Pinning | None = None

    @property
    def shard_rank(self) -> int:
        """The rank whose shard this worker reads and writes."""
        return int(self.config.parallel.rank)

    def get_manager(self) -> OffloadingManager:
        manager = HostManager(events=self.kv_events_config.enable_kv_cache_events)
        # The only way from native's scheduler half back to its spec.
        manager.spec = self
        return manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        settings = ConnectorConfig.parse(self.extra_config)
        arguments: dict[str, Any] = {
            "rank": self.shard_rank,
            "blocks_per_chunk": self.blocks_per_chunk,
            "plane": fault_plane(),
        }
        try:
            if self.pinning is not None:
                return self._device_worker(kv_caches, self.pinning, arguments)
            pages = PageTable.of(kv_caches)
            copier = choose_copier(settings.copy)
        except (UnusablePages, NativeMissing) as error:
            logger.error("kvhost: this worker runs without the cache: %s", error)
            return HostWorker(None, None, rank=self.shard_rank, problem=str(error))
        logger.info("kvhost: blocks are copied by %s, %d threads", copier.name, settings.copy_threads)
        return HostWorker(pages, self.source, copier=copier, threads=settings.copy_threads, **arguments)

    def _device_worker(self, kv_caches: Any, pinning: Pinning, arguments: dict[str, Any]) -> OffloadingWorker:
        # Imports vLLM's transfer code, which only engines on devices need.
        from kvhost_connector.device.pages import DevicePages
        from kvhost_connector.device.worker import DeviceWorker

        pages = DevicePages.of(kv_caches)
        driver = driver_of(self.platform, pages.device)
        pinning.use(driver)
        return DeviceWorker(pages, self.source, driver=driver, pinning=pinning, **arguments)
