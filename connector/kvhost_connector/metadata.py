"""What the two halves of the connector tell each other, through vLLM's own channels.

Down with every step: `StepMetadata` with jobs whose host side is a `SlotSpec`. Up with every step:
`WorkerMetadata`. Up once at start, before any step: `WorkerReport`. All plain data.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import NewType

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

TransferId = NewType("TransferId", int)
"""Names one load or store of this engine; counted by the scheduler half, never used twice."""

Epoch = NewType("Epoch", int)
"""Counts the engine's weights: a reset raises it. Jobs of an older epoch must not take effect (I12)."""


@dataclass(frozen=True)
class WorkerReport(KVConnectorHandshakeMetadata):
    """What one worker knows and the scheduler half cannot: the namespace depends on it (design section 6).

    Attributes:
        rank: the worker's rank in its engine.
        token: 32 random bytes that the worker presents on the handover socket.
        shard_bytes: bytes this rank writes for one chunk.
        pages: canonical JSON: for each group, shapes and strides inside one page of its layers.
        backends: canonical JSON: for each group, attention backend and page variant (CPU: instruction set).
        device: architecture of the device that computes.
        host: boot id of the kernel; ranks on other hosts cannot map the pool.
        platform: which kind of worker it is, see `platforms`.
        memory: what is known of the pool's memory here, see `device.pinning.PinState`; "host" where no
            device reaches it.
        copies_by: what moves the bytes, for people; see `copying`.
        problem: why this worker cannot copy; empty when it can.
    """

    rank: int
    token: bytes
    shard_bytes: int
    pages: str
    backends: str
    device: str
    host: str
    platform: str = "host"
    memory: str = "host"
    copies_by: str = ""
    problem: str = ""

    def declares_as(self, other: WorkerReport | None) -> bool:
        """Whether nothing of it differs that the daemon is told."""
        return other is not None and self == replace(other, memory=self.memory, problem=self.problem)


@dataclass(frozen=True)
class SlotSpec(LoadStoreSpec):
    """Host side of one job: which slots, and under whose authority (I6).

    `slots` follow the chunks of the device side in order, groups one after another. `store_ids` are in the
    same order and empty for loads. With a `problem` nothing may be copied: the job must be reported failed.
    """

    transfer_id: TransferId
    epoch: Epoch
    session: int
    boot_id: int
    generation: int
    slots: tuple[int, ...]
    store_ids: tuple[int, ...] = ()
    problem: str = ""


NATIVE_FIELDS = tuple(entry.name for entry in fields(OffloadingConnectorMetadata))
"""What native's own metadata holds."""


@dataclass
class StepMetadata(OffloadingConnectorMetadata):
    """A step's jobs, the current epoch, and requests whose promised load cannot happen."""

    epoch: Epoch = Epoch(0)
    failed_requests: tuple[str, ...] = ()


@dataclass(frozen=True)
class TransferReport:
    """One rank has finished with a transfer; `ok` only if every byte was copied."""

    transfer_id: TransferId
    rank: int
    ok: bool


@dataclass
class WorkerMetadata(OffloadingWorkerMetadata):
    """What the ranks finished since the last step, and reports of ranks that attach anew."""

    reports: list[TransferReport] = field(default_factory=list)
    workers: list[WorkerReport] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        native: OffloadingWorkerMetadata | None,
        reports: list[TransferReport],
        workers: list[WorkerReport],
    ) -> WorkerMetadata:
        if native is None:
            return cls(reports=reports, workers=workers)
        return cls(
            completed_jobs=native.completed_jobs,
            transfer_stats=native.transfer_stats,
            reports=reports,
            workers=workers,
        )

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both ranks' metadata as one. The base class would drop what is ours."""
        native = super().aggregate(other)
        theirs = other if isinstance(other, WorkerMetadata) else WorkerMetadata()
        return WorkerMetadata.of(native, self.reports + theirs.reports, self.workers + theirs.workers)
