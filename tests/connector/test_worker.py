"""The host worker: right bytes or a failed job, each job reported once, blocks never reused under a copy."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec

from kvhost_client.errors import NotMapped
from kvhost_connector.config import CopyBy
from kvhost_connector.copying import choose_copier
from kvhost_connector.faults import CopyFault, Direction
from kvhost_connector.metadata import Epoch, SlotSpec, TransferId, TransferReport
from kvhost_connector.pages import PageTable
from kvhost_connector.planning import JobRefused, plan_job
from kvhost_connector.worker import HostWorker
from tests.connector.caches import Cache, layered, two_groups
from tests.support.waiting import wait_for

BOOT, SESSION = 77, 5


@pytest.fixture(autouse=True, params=["auto", "numpy"])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here holds whatever copies; auto is the compiled copying where there is one."""
    chosen = choose_copier(CopyBy(request.param))
    monkeypatch.setattr("kvhost_connector.worker.choose_copier", lambda setting: chosen)


class Pool:
    """Slots in ordinary memory, in the place of a mapping."""

    def __init__(self, slots: int = 16, slot_bytes: int = 1024) -> None:
        self.boot_id = BOOT
        self.bytes = np.full((slots, slot_bytes), 0xEE, dtype=np.uint8)
        self.session_below = 0
        self.fenced: set[int] = set()
        self.running = 0
        self.prefaulted: set[int] = set()

    def begin(self, session_number: int, store_ids: Any = ()) -> int:
        if session_number < self.session_below or self.fenced & set(store_ids):
            return 0
        self.running += 1
        return 1

    def end(self, copy: int) -> None:
        self.running -= 1

    def shard(self, slot: int, rank: int) -> tuple[int, int]:
        if not 0 <= slot < len(self.bytes):
            raise NotMapped(f"slot {slot} is not mapped here")
        row = self.bytes[slot]
        return row.ctypes.data, row.size

    def addresses(self, slots: Sequence[int], rank: int, nbytes: int) -> list[int]:
        if slots and nbytes > self.bytes.shape[1]:
            raise NotMapped(f"a place has {self.bytes.shape[1]} bytes, {nbytes} are needed")
        return [self.shard(slot, rank)[0] for slot in slots]

    def prefault(self, slots: Sequence[int], rank: int) -> None:
        self.prefaulted.update(slots)


class Source:
    """In the place of a link."""

    def __init__(self, pool: Pool | None) -> None:
        self.mapping: Any = pool
        self.closed = False

    def close(self, timeout: float) -> None:
        self.closed = True


class Plane:
    """Holds copies until told to go on; fails those named."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = 0
        self.fail: set[tuple[int, int]] = set()

    def __call__(self, direction: Direction, rank: int, job_id: int, chunk: int) -> None:
        self.entered += 1
        assert self.gate.wait(10)
        if (job_id, chunk) in self.fail:
            raise CopyFault(f"chunk {chunk} of job {job_id} fails on purpose")


class Bench:
    """A worker over a patterned cache and a pool."""

    def __init__(self, cache: Cache, **arguments: Any) -> None:
        self.cache = cache
        cache.fill()
        self.pool = Pool()
        self.source = Source(self.pool)
        self.plane = Plane()
        self.worker = HostWorker(PageTable.of(cache.canonical), self.source, plane=self.plane, **arguments)
        self.done: dict[int, Any] = {}
        self.failed: set[int] = set()

    def spec(self, number: int, *slots: int, epoch: int = 0, **more: Any) -> SlotSpec:
        fields = {"session": SESSION, "boot_id": BOOT, "generation": 1, **more}
        return SlotSpec(TransferId(number), Epoch(epoch), slots=slots, **fields)

    def store(self, job: int, blocks: list[int], *slots: int, **more: Any) -> None:
        spec = self.spec(job, *slots, store_ids=tuple(100 + slot for slot in slots), **more)
        assert self.worker.submit_store(job, device(blocks), spec)

    def load(self, job: int, blocks: list[int], *slots: int, **more: Any) -> None:
        assert self.worker.submit_load(job, self.spec(job, *slots, **more), device(blocks))

    def settle(self, *jobs: int) -> None:
        """Waits until these jobs are reported."""

        def all_there() -> bool:
            for result in self.worker.get_finished():
                assert result.job_id not in self.done, f"job {result.job_id} was reported twice"
                assert result.success, "native asserts success"
                self.done[result.job_id] = result
            self.failed |= self.worker.take_failed()
            return set(jobs) <= set(self.done)

        wait_for(all_there, 5.0, f"jobs {jobs} to end")

    def slot(self, number: int, size: int | None = None) -> bytes:
        return bytes(self.pool.bytes[number][:size])


def device(
    blocks: list[int], sizes: list[int] | None = None, first: list[int] | None = None
) -> GPULoadStoreSpec:
    sizes = sizes or [len(blocks)]
    return GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=first or [0] * len(sizes))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(layered(3, blocks=8))
    yield made
    made.plane.gate.set()
    made.worker.shutdown()


def test_a_stored_chunk_comes_back_bit_exact(bench: Bench) -> None:
    images = {block: bench.cache.image(0, block) for block in (3, 5)}
    bench.store(1, [3, 5], 0, 7)
    bench.settle(1)
    assert bench.slot(0, 192) == images[3]
    assert bench.slot(7, 192) == images[5]
    assert bench.slot(0)[192:] == b"\xee" * 832
    assert bench.pool.prefaulted == {0, 7}
    bench.cache.fill(salt=1)
    bench.load(2, [6, 1], 7, 0)
    bench.settle(2)
    assert bench.cache.image(0, 6) == images[5]
    assert bench.cache.image(0, 1) == images[3]
    assert not bench.failed
    assert bench.done[2].transfer_size == 2 * 192
    assert bench.worker.take_reports() == [
        TransferReport(TransferId(1), 0, True),
        TransferReport(TransferId(2), 0, True),
    ]


def test_groups_go_to_their_own_slots() -> None:
    bench = Bench(two_groups())
    wanted = [bench.cache.image(0, 3), bench.cache.image(0, 4), bench.cache.image(1, 5)]
    spec = bench.spec(1, 2, 3, 4)
    assert bench.worker.submit_store(1, device([3, 4, 5], [2, 1]), spec)
    bench.settle(1)
    assert [bench.slot(2, 192), bench.slot(3, 192), bench.slot(4, 112)] == wanted
    bench.worker.shutdown()


def test_chunks_of_several_blocks_and_a_load_from_the_middle_of_one() -> None:
    bench = Bench(layered(2, blocks=10), blocks_per_chunk=3)
    images = [bench.cache.image(0, block) for block in range(10)]
    bench.store(1, [1, 2, 3, 4, 5, 6], 0, 1)
    bench.settle(1)
    assert bench.slot(0, 3 * 128) == images[1] + images[2] + images[3]
    bench.cache.fill(salt=2)
    # Block indices 2 to 4: the last block of the first chunk, the first two of the second.
    spec = bench.spec(2, 0, 1)
    assert bench.worker.submit_load(2, spec, device([7, 8, 9], first=[2]))
    bench.settle(2)
    assert [bench.cache.image(0, block) for block in (7, 8, 9)] == [images[3], images[4], images[5]]
    bench.worker.shutdown()


def test_the_null_block_is_never_written(bench: Bench) -> None:
    bench.store(1, [3], 0)
    bench.settle(1)
    before = bench.cache.image(0, 0)
    bench.load(2, [0], 0)
    bench.settle(2)
    assert bench.cache.image(0, 0) == before
    assert not bench.failed


REFUSED: dict[str, dict[str, Any]] = {
    "another boot": {"boot_id": BOOT + 1},
    "a problem": {"problem": "its chunks are not held"},
}


@pytest.mark.parametrize("more", REFUSED.values(), ids=list(REFUSED))
def test_what_must_not_be_copied_is_reported_failed_and_touches_nothing(
    bench: Bench, more: dict[str, Any]
) -> None:
    before = bench.cache.image(0, 3)
    bench.load(1, [3], 0, **more)
    bench.store(2, [4], 1, **more)
    bench.settle(1, 2)
    assert bench.failed == {1, 2}
    assert bench.cache.image(0, 3) == before
    assert bench.slot(1) == b"\xee" * 1024
    assert not any(report.ok for report in bench.worker.take_reports())


def test_a_job_without_a_mapping_fails(bench: Bench) -> None:
    bench.source.mapping = None
    bench.load(1, [3], 0)
    bench.settle(1)
    assert bench.failed == {1}


def test_a_fenced_session_and_a_fenced_store_are_refused(bench: Bench) -> None:
    bench.pool.fenced = {101}
    bench.store(1, [3], 1)
    bench.store(2, [3], 2)
    bench.settle(1, 2)
    assert bench.failed == {1}
    bench.pool.session_below = SESSION + 1
    bench.load(3, [3], 2)
    bench.settle(3)
    assert bench.failed == {1, 3}
    assert bench.pool.running == 0


@pytest.mark.parametrize(
    ("blocks", "slots"), [([3], ()), ([3], (0, 1)), ([3, 8], (0, 1)), ([-1], (0,)), ([3], (99,))]
)
def test_jobs_that_do_not_fit_are_failed(bench: Bench, blocks: list[int], slots: tuple[int, ...]) -> None:
    bench.store(1, blocks, *slots)
    bench.load(2, blocks, *slots)
    bench.settle(1, 2)
    assert bench.failed == {1, 2}


def test_a_foreign_spec_is_failed(bench: Bench) -> None:
    assert bench.worker.submit_load(1, LoadStoreSpec(), device([3]))
    bench.settle(1)
    assert bench.failed == {1}


def test_a_shard_too_small_for_the_chunk_is_failed() -> None:
    bench = Bench(layered(17))
    bench.store(1, [3], 0)
    bench.settle(1)
    assert bench.failed == {1}
    assert bench.slot(0) == b"\xee" * 1024
    bench.worker.shutdown()


def test_a_store_that_is_not_whole_chunks_is_refused() -> None:
    with pytest.raises(JobRefused, match="not a whole number of chunks of 2 blocks"):
        plan_job(device([1, 2, 3]), (0, 1), 2, "store")
    with pytest.raises(JobRefused, match="not a whole number"):
        plan_job(device([1, 2], first=[1]), (0,), 2, "store")


def test_a_copy_that_fails_half_way_is_failed_once(bench: Bench) -> None:
    bench.plane.fail = {(1, 1)}
    bench.store(1, [3, 4, 5], 0, 1, 2)
    bench.store(2, [6], 3)
    bench.settle(1, 2)
    assert bench.failed == {1}
    assert bench.slot(2) == b"\xee" * 1024
    assert bench.done[1].transfer_size is None


# Reuse of blocks: A1.


def test_wait_does_not_return_while_a_store_still_reads_its_blocks() -> None:
    bench = Bench(layered(3, blocks=8), threads=1)
    image = bench.cache.image(0, 3)
    bench.plane.gate.clear()
    bench.store(1, [3], 0)
    bench.store(2, [4], 1)
    wait_for(lambda: bench.plane.entered == 1)
    waiter = threading.Thread(target=bench.worker.wait, args=({1, 2},))
    waiter.start()
    waiter.join(3 * 0.1)
    assert waiter.is_alive(), "the first store has begun and must be awaited"
    bench.plane.gate.set()
    waiter.join(5)
    assert not waiter.is_alive()
    # From here on the blocks belong to somebody else.
    bench.cache.fill(salt=9)
    bench.settle(1, 2)
    # The first was stopped before its chunk or copied it whole; the second never began.
    assert 2 in bench.failed
    assert bench.slot(0, 192) == image if 1 not in bench.failed else bench.slot(0) == b"\xee" * 1024
    assert bench.slot(1) == b"\xee" * 1024
    bench.worker.shutdown()


def test_wait_lets_queued_stores_finish_within_the_deadline() -> None:
    bench = Bench(layered(3, blocks=8), flush_deadline_s=10)
    for job in range(20):
        bench.store(job, [job % 7 + 1], job % 16)
    bench.worker.wait(set(range(20)))
    bench.settle(*range(20))
    assert not bench.failed
    bench.worker.shutdown()


def test_wait_knows_nothing_of_jobs_that_are_over_or_were_never_given(bench: Bench) -> None:
    bench.store(1, [3], 0)
    bench.settle(1)
    bench.worker.wait({1, 2, 3})


def test_loads_go_before_stores() -> None:
    bench = Bench(layered(3, blocks=8), threads=1)
    bench.store(1, [3], 0)
    bench.settle(1)
    bench.plane.gate.clear()
    order: list[tuple[str, int]] = []
    inner = bench.plane.__call__

    def noting(direction: Direction, rank: int, job_id: int, chunk: int) -> None:
        order.append((direction, job_id))
        inner(direction, rank, job_id, chunk)

    bench.worker._plane = noting
    bench.store(2, [3], 1)
    wait_for(lambda: order)
    bench.store(3, [3], 2)
    bench.load(4, [5], 0)
    bench.plane.gate.set()
    bench.settle(2, 3, 4)
    assert order == [("store", 2), ("load", 4), ("store", 3)]
    bench.worker.shutdown()


# Weights: I12.


def test_a_load_of_older_weights_is_failed_even_when_it_was_copied(bench: Bench) -> None:
    bench.store(1, [3], 0)
    bench.settle(1)
    bench.load(2, [4], 0)
    wait_for(lambda: bench.plane.entered == 2 and bench.pool.running == 0)
    bench.worker.set_epoch(Epoch(1))
    bench.load(3, [5], 0, epoch=0)
    bench.load(4, [6], 0, epoch=1)
    bench.settle(2, 3, 4)
    assert bench.failed == {2, 3}


# Ends.


def test_shutdown_gives_up_what_waits_and_lets_what_runs_end() -> None:
    bench = Bench(layered(3, blocks=8), threads=1)
    bench.plane.gate.clear()
    bench.store(1, [3], 0)
    wait_for(lambda: bench.plane.entered == 1)
    bench.store(2, [4], 1)
    ending = threading.Thread(target=bench.worker.shutdown)
    ending.start()
    wait_for(lambda: bench.worker._closed)
    assert ending.is_alive()
    bench.plane.gate.set()
    ending.join(5)
    assert not ending.is_alive()
    assert bench.source.closed
    assert bench.pool.running == 0
    bench.settle(1, 2)
    bench.store(3, [4], 1)
    bench.settle(3)
    assert {2, 3} <= bench.failed


def test_a_worker_with_a_problem_reports_every_job_failed() -> None:
    worker = HostWorker(None, None, problem="found device cuda")
    assert worker.submit_load(1, SlotSpec(TransferId(9), Epoch(0), 1, 2, 3, (0,)), device([1]))
    assert worker.submit_store(2, device([1]), SlotSpec(TransferId(10), Epoch(0), 1, 2, 3, (0,)))
    assert [result.job_id for result in worker.get_finished()] == [1, 2]
    assert worker.take_failed() == {1, 2}
    assert worker.take_reports() == [
        TransferReport(TransferId(9), 0, False),
        TransferReport(TransferId(10), 0, False),
    ]
    worker.wait({1, 2})
    worker.shutdown()


def test_a_cache_that_moved_is_neither_read_nor_written() -> None:
    """As after a sleep: the old memory is gone, and touching it would kill the process (C11)."""
    old = mmap.mmap(-1, 8 * 4096)
    tensor = torch.frombuffer(old, dtype=torch.int8).view(8, 4096)
    bench = Bench(Cache([tensor], [[(0, 64)]]))
    bench.store(1, [3], 0)
    bench.settle(1)
    tensor.set_(torch.zeros((8, 4096), dtype=torch.int8))
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(old))
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(8 * 4096), 0) == 0
    bench.load(2, [4], 0)
    bench.store(3, [4], 1)
    bench.settle(2, 3)
    assert bench.failed == {2, 3}
    bench.worker.shutdown()


def test_many_jobs_from_many_threads_stay_bit_exact() -> None:
    bench = Bench(layered(5, blocks=16), threads=4)
    images = [bench.cache.image(0, block) for block in range(16)]
    for round_ in range(20):
        for job in range(1, 16):
            bench.store(round_ * 100 + job, [job], job)
        bench.settle(*(round_ * 100 + job for job in range(1, 16)))
        for job in range(1, 16):
            assert bench.slot(job, 320) == images[job]
    bench.worker.shutdown()
