"""The JAX worker under vLLM's jobs: each reported once, saves out of their blocks before others come."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec

from kvhost_client.errors import NotMapped
from kvhost_connector.faults import CopyFault, Direction
from kvhost_connector.metadata import Epoch, SlotSpec, TransferId, TransferReport
from kvhost_connector.tpu.worker import JaxWorker
from tests.support.waiting import wait_for
from tests.tpu.devices.rig import Layer, Rig, mesh_of

BOOT, SESSION = 77, 5
LAYERS = [Layer((4, 8, 2, 16), jnp.bfloat16, P(None, None, "model"))] * 2


class Pool:
    """The rig's slots in the place of a mapping; also the link that has it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.boot_id = BOOT
        self.fenced: set[int] = set()
        self.session_below = 0
        self.running = 0
        self.closed = False
        self.mapping: Any = self

    def begin(self, session_number: int, store_ids: Sequence[int] = ()) -> int:
        if session_number < self.session_below or self.fenced & set(store_ids):
            return 0
        self.running += 1
        return 1

    def end(self, copy: int) -> None:
        self.running -= 1

    def shard(self, slot: int, rank: int) -> tuple[int, int]:
        if not 0 <= slot < len(self.rig.pool):
            raise NotMapped(f"slot {slot} is not mapped here")
        return self.rig.place(slot)

    def close(self, timeout: float) -> None:
        self.closed = True


class Plane:
    """Holds copies until told to go on; fails those named."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fail: set[tuple[int, int]] = set()

    def __call__(self, direction: Direction, rank: int, job_id: int, chunk: int) -> None:
        assert self.gate.wait(10)
        if (job_id, chunk) in self.fail:
            raise CopyFault(f"chunk {chunk} of job {job_id} fails on purpose")


class Bench:
    def __init__(self, **more: Any) -> None:
        chunk = more.pop("blocks_per_chunk", 1)
        self.rig = Rig(mesh_of(model=2), LAYERS, [[0, 1]], 32, blocks_per_chunk=chunk, **more)
        self.pool, self.plane = Pool(self.rig), Plane()
        self.worker = JaxWorker(
            self.rig.layout, self.pool, self.rig.carrier, plane=self.plane, blocks_per_chunk=chunk
        )
        self.done: dict[int, Any] = {}
        self.failed: set[int] = set()

    def spec(self, number: int, slots: Sequence[int], epoch: int = 0, **more: Any) -> SlotSpec:
        fields = {"session": SESSION, "boot_id": BOOT, "generation": 1, **more}
        return SlotSpec(TransferId(number), Epoch(epoch), slots=tuple(slots), **fields)

    def store(self, job: int, blocks: list[int], *slots: int, **more: Any) -> None:
        spec = self.spec(job, slots, store_ids=tuple(100 + slot for slot in slots), **more)
        assert self.worker.submit_store(job, device(blocks), spec)

    def load(self, job: int, blocks: list[int], *slots: int, first: int = 0, **more: Any) -> None:
        assert self.worker.submit_load(job, self.spec(job, slots, **more), device(blocks, first))

    def settle(self, *jobs: int) -> None:
        def all_there() -> bool:
            for result in self.worker.get_finished():
                assert result.job_id not in self.done, f"job {result.job_id} was reported twice"
                assert result.success, "native asserts success"
                self.done[result.job_id] = result
            self.failed |= self.worker.take_failed()
            return set(jobs) <= set(self.done)

        wait_for(all_there, 10.0, f"jobs {jobs} to end")

    def block(self, number: int, layer: int = 0) -> Any:
        return self.rig.layer_bits(layer)[number].copy()


def device(blocks: list[int], first: int = 0) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.plane.gate.set()
    made.worker.shutdown()


def test_a_stored_chunk_comes_back_bit_by_bit(bench: Bench) -> None:
    want = {block: bench.block(block) for block in (3, 5)}
    bench.store(1, [3, 5], 0, 7)
    bench.settle(1)
    bench.rig.wipe()
    bench.load(2, [6, 1], 7, 0)
    bench.settle(2)
    assert np.array_equal(bench.block(6), want[5])
    assert np.array_equal(bench.block(1), want[3])
    assert not bench.failed
    assert bench.done[2].transfer_size == 2 * bench.rig.layout.groups[0].block_bytes
    assert bench.worker.take_reports() == [
        TransferReport(TransferId(1), 0, True),
        TransferReport(TransferId(2), 0, True),
    ]


def test_a_load_from_the_middle_of_a_chunk() -> None:
    bench = Bench(blocks_per_chunk=3)
    want = [bench.block(number) for number in range(7)]
    bench.store(1, [1, 2, 3, 4, 5, 6], 0, 1)
    bench.settle(1)
    bench.rig.wipe()
    bench.load(2, [7, 8, 9], 0, 1, first=2)
    bench.settle(2)
    for block, source in ((7, 3), (8, 4), (9, 5)):
        assert np.array_equal(bench.block(block), want[source])
    bench.worker.shutdown()


def test_the_null_block_is_never_touched(bench: Bench) -> None:
    before = bench.block(0)
    bench.store(1, [3], 0)
    bench.settle(1)
    bench.load(2, [0], 0)
    bench.settle(2)
    assert np.array_equal(bench.block(0), before)
    assert not bench.failed


def test_what_must_not_be_copied_is_reported_failed(bench: Bench) -> None:
    before = bench.rig.pool.copy()
    bench.load(1, [3], 0, boot_id=BOOT + 1)
    bench.store(2, [4], 1, problem="its chunks are not held")
    bench.pool.fenced = {103}
    bench.store(3, [4], 3)
    bench.load(4, [3], 99)
    bench.store(5, [32], 0)
    assert bench.worker.submit_load(6, LoadStoreSpec(), device([3]))
    bench.settle(1, 2, 3, 4, 5, 6)
    assert bench.failed == {1, 2, 3, 4, 5, 6}
    bench.pool.session_below = SESSION + 1
    bench.load(7, [3], 0)
    bench.settle(7)
    assert 7 in bench.failed
    assert np.array_equal(bench.rig.pool, before)
    assert bench.pool.running == 0
    assert not any(report.ok for report in bench.worker.take_reports())


def test_a_copy_that_fails_half_way_is_failed_once(bench: Bench) -> None:
    bench.plane.fail = {(1, 1)}
    bench.store(1, [3, 4, 5], 0, 1, 2)
    bench.store(2, [6], 3)
    bench.settle(1, 2)
    assert bench.failed == {1}
    assert (bench.rig.pool[2] == 0xEE).all()


def test_after_wait_the_blocks_may_be_computed_anew(bench: Bench) -> None:
    """The copy to the slot may still run: it reads the rows, not the blocks."""
    want = bench.block(3)
    bench.plane.gate.clear()
    bench.store(1, [3], 0)
    bench.worker.wait({1})
    bench.rig.wipe()
    bench.plane.gate.set()
    bench.settle(1)
    assert not bench.failed
    bench.load(2, [4], 0)
    bench.settle(2)
    assert np.array_equal(bench.block(4), want)


def test_wait_gives_up_what_finds_no_device_memory() -> None:
    part = Bench().rig.layout.groups[0].part_bytes
    bench = Bench(staging_bytes=4 * part, buckets=(1, 4))
    bench.plane.gate.clear()
    bench.store(1, [1, 2, 3, 4], 0, 1, 2, 3)
    bench.store(2, [5, 6, 7, 8], 4, 5, 6, 7)
    bench.worker.wait({1, 2})
    bench.rig.wipe()
    bench.plane.gate.set()
    bench.settle(1, 2)
    assert bench.failed == {2}
    assert (bench.rig.pool[4:8] == 0xEE).all()
    bench.worker.shutdown()


def test_wait_awaits_a_load_that_has_begun(bench: Bench) -> None:
    bench.store(1, [3], 0)
    bench.settle(1)
    want = bench.block(3)
    bench.rig.wipe()
    bench.plane.gate.clear()
    bench.load(2, [5], 0)
    bench.worker.pump()
    timer = threading.Timer(0.3, bench.plane.gate.set)
    timer.start()
    bench.worker.wait({2, 99})
    assert bench.plane.gate.is_set()
    bench.settle(2)
    assert 2 in bench.failed or np.array_equal(bench.block(5), want)
    timer.join()


def test_a_load_of_older_weights_is_failed_even_when_it_was_copied(bench: Bench) -> None:
    bench.store(1, [3], 0)
    bench.settle(1)
    bench.load(2, [5], 0)
    bench.worker.set_epoch(Epoch(1))
    bench.settle(2)
    assert bench.failed == {2}


def test_shutdown_reports_what_waits_and_takes_leave() -> None:
    part = Bench().rig.layout.groups[0].part_bytes
    bench = Bench(staging_bytes=part, buckets=(1,))
    bench.store(1, [1, 2, 3], 0, 1, 2)
    bench.worker.shutdown()
    bench.store(2, [1], 3)
    bench.settle(1, 2)
    assert bench.failed == {1, 2}
    assert bench.pool.closed
    bench.worker.shutdown()


def test_many_jobs_stay_bit_by_bit(bench: Bench) -> None:
    want = bench.rig.layer_bits(1).copy()
    for job in range(15):
        bench.store(job, [job + 1], job)
    bench.settle(*range(15))
    bench.rig.wipe()
    for job in range(15):
        bench.load(100 + job, [31 - job], job)
    bench.settle(*range(100, 115))
    for job in range(15):
        assert np.array_equal(bench.block(31 - job, 1), want[job + 1])
    assert not bench.failed
