"""What travels between the halves: it survives being sent, and adding up loses nothing (contract 15)."""

from __future__ import annotations

import pickle

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

from kvhost_connector.metadata import (
    Epoch,
    SlotSpec,
    StepMetadata,
    TransferId,
    TransferReport,
    WorkerMetadata,
    WorkerReport,
)


def metadata(rank: int) -> WorkerMetadata:
    native = OffloadingWorkerMetadata()
    native.mark_completed(7)
    native.transfer_stats.load.record(100, 0.5)
    reports = [TransferReport(TransferId(3), rank, True)]
    workers = [WorkerReport(rank, bytes(32), 4096, "[]", "[]", "[]", "host")]
    return WorkerMetadata.of(native, reports, workers)


def test_metadata_of_ranks_add_up_with_reports_and_workers() -> None:
    total = metadata(0).aggregate(metadata(1)).aggregate(metadata(2))
    assert isinstance(total, WorkerMetadata)
    assert total.completed_jobs == {7: 3}
    assert total.transfer_stats.load.bytes == 300
    assert [report.rank for report in total.reports] == [0, 1, 2]
    assert [report.rank for report in total.workers] == [0, 1, 2]


def test_a_rank_without_anything_of_ours_adds_up_too() -> None:
    native = OffloadingWorkerMetadata()
    native.mark_completed(7)
    total = metadata(0).aggregate(native)
    assert isinstance(total, WorkerMetadata)
    assert total.completed_jobs == {7: 2}
    assert len(total.reports) == 1


def test_reports_without_native_completions_are_metadata() -> None:
    alone = WorkerMetadata.of(None, [TransferReport(TransferId(1), 0, False)], [])
    assert alone.completed_jobs == {}
    assert alone.reports


def test_everything_survives_vllms_own_channel() -> None:
    spec = SlotSpec(TransferId(1), Epoch(2), 3, 4, 5, (6, 7), (8, 9))
    step = StepMetadata({1: spec}, {}, None, epoch=Epoch(2), failed_requests=("r1",))
    # vLLM pickles what it sends to its workers; kvhost itself never does.
    for thing in (spec, step, metadata(0)):
        assert pickle.loads(pickle.dumps(thing)) == thing
