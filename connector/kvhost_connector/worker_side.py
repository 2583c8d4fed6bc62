"""What the connector does in each worker's process, around vLLM's native half.

The worker's link to the daemon starts when the KV caches are registered: no fork follows then (contract 1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvhost_client.worker import WorkerLink
from kvhost_connector import compat
from kvhost_connector.config import ConnectorConfig
from kvhost_connector.device.pinning import Pinning
from kvhost_connector.jobs import JobBook
from kvhost_connector.metadata import StepMetadata, WorkerMetadata, WorkerReport
from kvhost_connector.platforms import Platform
from kvhost_connector.report import describe_backends, describe_device, describe_pages, host_identity
from kvhost_connector.scheduler_side import instance_id
from kvhost_connector.worker import HostWorker

logger = logging.getLogger("vllm.kvhost.worker")


class _News(NamedTuple):
    """What of a worker's report may change while it lives."""

    token: bytes
    memory: str
    problem: str


class WorkerSide:
    """The worker half of one rank."""

    def __init__(
        self,
        half: Any,
        spec: Any,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        *,
        platform: Platform = Platform.HOST,
    ) -> None:
        self._native = compat.WorkerHalf(half)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._blocks_per_chunk = int(spec.blocks_per_chunk)
        self._rank = int(vllm_config.parallel_config.rank)
        self._platform = platform
        self._pinning = Pinning(config.pin) if platform.has_driver else None
        self._link = WorkerLink(
            config.socket, instance_id(vllm_config), self._rank, platform.access, registrar=self._pinning
        )
        self._started = False
        spec.platform, spec.source, spec.pinning = platform, self._link, self._pinning
        self._pages = ""
        self._unusable = ""
        # What the scheduler half was told that may change.
        self._told = _News(b"", "", "")
        self._described: WorkerReport | None = None
        # Requests whose load failed before it began, by the scheduler half's word.
        self._failed_requests: set[str] = set()
        self._bound: Any = None

    @property
    def worker(self) -> JobBook | None:
        worker = self._native.worker
        return worker if isinstance(worker, JobBook) else None

    def register(self, kv_caches: Mapping[str, Any], native: Callable[[], None]) -> None:
        """The engine's KV cache is there. Raises `ConfigError` where pinned memory is required and the driver
        pins none."""
        try:
            native()
            self._pages = describe_pages(kv_caches, self._kv_cache_config)
            if self.worker is None:
                self._unusable = "the native half made no worker"
        except Exception as error:
            # Native must have a worker: its hooks assert it. This one reports every job failed.
            self._unusable = f"its KV cache cannot be used: {error}"
            logger.exception("kvhost: this worker runs without the cache")
            self._native.set_worker(HostWorker(None, None, rank=self._rank, problem=self._unusable))
        if self._pinning is not None and not self._problem:
            self._pinning.require_driver()
        if not self._problem and not self._started:
            self._started = True
            self._link.start()

    @property
    def _problem(self) -> str:
        """Why this worker copies nothing; empty when it does."""
        worker = self.worker
        found = self._unusable or (worker.problem if worker is not None else "")
        return found or (self._pinning.problem if self._pinning is not None else "")

    def _news(self) -> _News:
        memory = self._pinning.state.value if self._pinning is not None else "host"
        return _News(self._link.token, memory, self._problem)

    def report(self) -> WorkerReport:
        """What the scheduler half needs to know of this rank, and the token to name to the daemon."""
        self._told = self._news()
        if self._described is None:
            worker = self.worker
            pages = worker.pages if worker is not None else None
            self._described = WorkerReport(
                rank=self._rank,
                token=b"",
                shard_bytes=pages.shard_bytes(self._blocks_per_chunk) if pages is not None else 0,
                pages=self._pages,
                backends=describe_backends(self._vllm_config, self._kv_cache_config),
                device=describe_device(),
                host=host_identity(),
                platform=self._platform.value,
                copies_by=worker.copies_by if worker is not None else "",
            )
        # Described once: a report that read otherwise would move the engine to another namespace.
        return replace(self._described, **self._told._asdict())

    def begin_step(self, metadata: Any) -> None:
        """A step's metadata is here: what it says of weights counts before anything else is done."""
        if metadata is self._bound or not isinstance(metadata, StepMetadata):
            return
        self._bound = metadata
        self._failed_requests.update(metadata.failed_requests)
        if self.worker is not None:
            self.worker.set_epoch(metadata.epoch)

    def transfer_results(self, native: Callable[[], Any]) -> Any:
        """Native's results, with the requests whose loads failed (contract 20)."""
        loads = self._native.load_requests()
        results = native()
        failed = {loads[job] for job in self.worker.take_failed() if job in loads} if self.worker else set()
        promised, self._failed_requests = self._failed_requests, set()
        results.finished_recving |= promised
        results.failed_recving |= failed | promised
        return results

    def metadata(self, native: Any) -> WorkerMetadata | None:
        """Native's metadata of this step with ours, None when there is nothing to say."""
        reports = self.worker.take_reports() if self.worker is not None else []
        # Not told at start (no handshake on this platform), attached anew with another token, or its memory
        # or its device are not what they were.
        workers = [self.report()] if self._started and self._news() != self._told else []
        if native is None and not reports and not workers:
            return None
        return WorkerMetadata.of(native, reports, workers)
