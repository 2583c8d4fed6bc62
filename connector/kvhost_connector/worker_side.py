"""What the connector does in each worker's process, around vLLM's native half.

The worker's link to the daemon starts when the KV caches are registered: no fork follows then (contract 1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvhost_client.types import Access
from kvhost_client.worker import WorkerLink
from kvhost_connector import compat
from kvhost_connector.config import ConnectorConfig
from kvhost_connector.jobs import JobBook
from kvhost_connector.metadata import StepMetadata, WorkerMetadata, WorkerReport
from kvhost_connector.report import describe_backends, describe_device, describe_pages, host_identity
from kvhost_connector.scheduler_side import instance_id
from kvhost_connector.worker import HostWorker

logger = logging.getLogger("vllm.kvhost.worker")


class WorkerSide:
    """The worker half of one rank."""

    def __init__(self, half: Any, spec: Any, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig):
        self._native = compat.WorkerHalf(half)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._blocks_per_chunk = int(spec.blocks_per_chunk)
        self._rank = int(vllm_config.parallel_config.rank)
        self._link = WorkerLink(config.socket, instance_id(vllm_config), self._rank, Access.CPU)
        self._started = False
        spec.source = self._link
        self._pages = ""
        self._problem = ""
        # The token that the scheduler half was told, and what else.
        self._told = b""
        self._described: WorkerReport | None = None
        # Requests whose load failed before it began, by the scheduler half's word.
        self._failed_requests: set[str] = set()
        self._bound: Any = None

    @property
    def worker(self) -> JobBook | None:
        worker = self._native.worker
        return worker if isinstance(worker, JobBook) else None

    def register(self, kv_caches: Mapping[str, Any], native: Callable[[], None]) -> None:
        try:
            native()
            self._pages = describe_pages(kv_caches, self._kv_cache_config)
            worker = self.worker
            self._problem = worker.problem if worker is not None else "the native half made no worker"
        except Exception as error:
            # Native must have a worker: its hooks assert it. This one reports every job failed.
            self._problem = f"its KV cache cannot be used: {error}"
            logger.exception("kvhost: this worker runs without the cache")
            self._native.set_worker(HostWorker(None, None, rank=self._rank, problem=self._problem))
        if not self._problem and not self._started:
            self._started = True
            self._link.start()

    def report(self) -> WorkerReport:
        """What the scheduler half needs to know of this rank, and the token to name to the daemon."""
        self._told = self._link.token
        if self._described is None:
            worker = self.worker
            pages = worker.pages if worker is not None else None
            self._described = WorkerReport(
                rank=self._rank,
                token=self._told,
                shard_bytes=pages.shard_bytes(self._blocks_per_chunk) if pages is not None else 0,
                pages=self._pages,
                backends=describe_backends(self._vllm_config, self._kv_cache_config),
                device=describe_device(),
                host=host_identity(),
                problem=self._problem,
            )
        # Described once: a report that read otherwise would move the engine to another namespace.
        return replace(self._described, token=self._told)

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
        # Not told at start (no handshake on this platform), or attached anew with another token.
        workers = [self.report()] if self._started and self._link.token != self._told else []
        if native is None and not reports and not workers:
            return None
        return WorkerMetadata.of(native, reports, workers)
