"""Copies on a device: ordered behind the work before them, awaited before reuse, each job reported once.

vLLM's real transfer worker on a fake device that runs nothing before it is told to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LoadStoreSpec

from kvhost_connector.config import Pin
from kvhost_connector.device.worker import DeviceWorker
from kvhost_connector.faults import CopyFault
from kvhost_connector.metadata import Epoch, TransferId, TransferReport
from tests.connector.caches import layered
from tests.connector.device import Sticky
from tests.connector.devicebench import BOOT, SESSION, Bench, Pool, blocks_of
from tests.support.waiting import wait_for

Benches = Callable[..., Bench]


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Benches]:
    with ExitStack() as stack:

        def make(**arguments: Any) -> Bench:
            bench = Bench(monkeypatch, layered(3), **arguments)
            stack.callback(bench.close)
            return bench

        yield make


@pytest.fixture
def slow(benches: Benches) -> Bench:
    """A device that runs nothing by itself."""
    return benches(eager=False)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("vllm")
    before, logger.propagate = logger.propagate, True
    caplog.set_level(logging.INFO, "vllm")
    yield caplog
    logger.propagate = before


# Ordering.


def test_a_store_reads_what_the_step_before_it_wrote(slow: Bench) -> None:
    """The step that computes the block was given to the device and has not run."""
    slow.device.kernel(lambda: slow.cache.fill(salt=3), "forward")
    slow.store(1, [3], 0)
    assert slow.untouched(0)
    slow.device.run()
    slow.settle(1)
    assert slow.slot(0, 192) == slow.cache.image(0, 3)
    assert slow.device.log[1][1] == "waits for compute"


def test_a_load_lands_after_the_step_that_still_reads_its_block(slow: Bench) -> None:
    slow.store(1, [3], 0)
    slow.device.run()
    slow.settle(1)
    read: list[bytes] = []
    before = slow.cache.image(0, 5)
    slow.device.kernel(lambda: read.append(slow.cache.image(0, 5)), "forward")
    slow.load(2, [5], 0)
    slow.device.run()
    slow.settle(2)
    assert read == [before]
    assert slow.cache.image(0, 5) == slow.slot(0, 192)


def test_nothing_is_reported_before_it_is_done(slow: Bench) -> None:
    slow.store(1, [3], 0)
    slow.load(2, [5], 1)
    slow.collect()
    assert not slow.done
    assert slow.worker.take_reports() == []
    assert slow.pool.mapping.running == 2
    # Both are done before the worker's own thread may look: then they are reported in one order.
    with slow.worker._news:
        slow.device.run()
    slow.settle(1, 2)
    assert slow.pool.mapping.running == 0
    assert slow.worker.take_reports() == [
        TransferReport(TransferId(1), 0, True),
        TransferReport(TransferId(2), 0, True),
    ]


def test_wait_returns_when_the_device_has_left_the_blocks(slow: Bench) -> None:
    """Preemption: the blocks are given to somebody else right afterwards (A1)."""
    image = slow.cache.image(0, 3)
    slow.store(1, [3], 0)
    waiter = threading.Thread(target=slow.worker.wait, args=({1, 99},))
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    slow.device.run()
    waiter.join(5)
    assert not waiter.is_alive()
    slow.cache.fill(salt=9)
    slow.settle(1)
    assert slow.slot(0, 192) == image
    slow.worker.wait({1, 2})


def test_an_idle_engine_answers_fences(slow: Bench) -> None:
    """No step comes, nobody asks for finished jobs: the worker looks at the device by itself."""
    slow.store(1, [3], 0)
    epoch = slow.pool.mapping.fence(SESSION + 1, [])
    assert not slow.pool.mapping.quiet(epoch)
    slow.device.run()
    wait_for(lambda: slow.pool.mapping.quiet(epoch), what="the copy to be noticed")
    poller = slow.worker._poller.ident
    assert poller in slow.device.entered, "it chose its device before it asked it anything"
    slow.store(2, [4], 1)
    slow.settle(1, 2)
    assert slow.failed == {2}, "the session is fenced"


# Authority: I4, I6, I12.


@pytest.mark.parametrize("more", [{"boot_id": BOOT + 1}, {"problem": "its chunks are not held"}])
def test_what_must_not_be_copied_is_not_given_to_the_device(benches: Benches, more: dict[str, Any]) -> None:
    bench = benches()
    bench.load(1, [3], 0, **more)
    bench.store(2, [4], 1, **more)
    assert bench.worker.submit_load(3, LoadStoreSpec(), blocks_of([3]))
    bench.settle(1, 2, 3)
    assert bench.failed == {1, 2, 3}
    assert bench.device.idle
    assert not bench.device.copies


def test_fenced_stores_are_refused_and_hold_nothing(benches: Benches) -> None:
    bench = benches()
    bench.pool.mapping.fence(0, [101])
    bench.store(1, [3], 1)
    bench.store(2, [3], 2)
    bench.settle(1, 2)
    assert bench.failed == {1}
    assert bench.pool.mapping.running == 0


def test_transfers_of_older_weights_are_failed_even_when_copied(slow: Bench) -> None:
    slow.store(1, [3], 0)
    slow.device.run()
    slow.worker.set_epoch(Epoch(1))
    slow.load(2, [4], 0, epoch=0)
    slow.load(3, [5], 0, epoch=1)
    slow.device.run()
    slow.settle(1, 2, 3)
    assert slow.failed == {1, 2}
    assert [report.ok for report in slow.worker.take_reports()] == [False, False, True]


def test_a_fault_before_the_copy_fails_the_job_alone(benches: Benches) -> None:
    def plane(direction: str, rank: int, job_id: int, chunk: int) -> None:
        if (job_id, chunk) == (1, 1):
            raise CopyFault("on purpose")

    bench = benches(plane=plane)
    bench.store(1, [3, 4], 0, 1)
    bench.store(2, [5], 2)
    bench.settle(1, 2)
    assert bench.failed == {1}
    assert bench.untouched(0)


# Pinned and not.


def test_the_devices_own_kernel_reads_registered_memory_only(benches: Benches) -> None:
    """A kernel that reads memory which is not registered kills the engine's device context."""
    bench = benches(kernels=True, pin=Pin.AUTO)
    bench.register(bench.pool.segments[0])
    bench.store(1, [3, 4, 5], 0, 1, 9)
    bench.settle(1)
    bench.load(2, [6, 7], 0, 1)
    bench.settle(2)
    bench.load(3, [6, 7], 0, 9)
    bench.settle(3)
    assert not bench.failed
    by_kernel = [copy.by_kernel for copy in bench.device.copies if copy.direction == "load"]
    assert by_kernel == [True] * 6 + [False] * 6
    assert sorted(bench.driver.made) == [False, True]
    # A segment that comes later and is registered is covered without a new worker.
    bench.register(bench.pool.grow())
    bench.load(4, [6], 17)
    bench.settle(4)
    assert bench.device.copies[-1].by_kernel
    assert sorted(bench.driver.made) == [False, True]


# Failure.


def test_an_error_that_stays_turns_the_cache_off_with_one_line(
    slow: Bench, lines: pytest.LogCaptureFixture
) -> None:
    slow.store(1, [3], 0)
    slow.load(2, [5], 1)
    slow.device.sticky = Sticky("CUDA error: an illegal memory access was encountered\nSee the manual.")
    slow.settle(1, 2)
    assert slow.failed == {1, 2}
    # Nobody knows what the device still writes: the daemon is told nothing, and its fences wait (I4).
    assert slow.worker.take_reports() == []
    assert slow.pool.mapping.running == 2
    slow.store(3, [3], 0)
    slow.load(4, [3], 0)
    slow.settle(3, 4)
    assert slow.failed == {1, 2, 3, 4}
    assert [report.ok for report in slow.worker.take_reports()] == [False, False]
    slow.worker.wait({1, 2, 3, 4})
    said = [record.getMessage() for record in lines.records if record.levelno >= logging.WARNING]
    assert said == [
        "kvhost: this worker goes on without the cache: the device reports an error that stays: "
        "Sticky: CUDA error: an illegal memory access was encountered"
    ]
    assert slow.worker.problem in said[0]


def test_an_error_that_stays_is_found_when_a_copy_is_given(slow: Bench) -> None:
    slow.store(1, [3], 0)
    slow.device.sticky = Sticky("CUDA error: unspecified launch failure")
    slow.load(2, [5], 1)
    slow.settle(1, 2)
    assert slow.failed == {1, 2}
    assert "unspecified launch failure" in slow.worker.problem


def test_a_failure_that_the_device_survives_costs_the_jobs_of_that_worker(benches: Benches) -> None:
    bench = benches(eager=False)
    bench.store(1, [3], 0)
    bench.device.refuse_next.append(RuntimeError("out of pinned memory"))
    bench.store(2, [4], 1)
    bench.settle(1, 2)
    assert bench.failed == {1, 2}
    # The device said that it is done with everything: slots and mapping are free again.
    assert bench.device.idle
    assert bench.pool.mapping.running == 0
    assert [report.ok for report in bench.worker.take_reports()] == [False, False]
    bench.device.eager = True
    bench.store(3, [3], 0)
    bench.settle(3)
    assert bench.failed == {1, 2}
    assert not bench.worker.problem
    assert bench.driver.made == [False, False]


def test_failures_in_a_row_turn_the_cache_off(benches: Benches) -> None:
    bench = benches()
    for job in range(3):
        bench.device.refuse_next.append(ValueError("something else"))
        bench.store(job, [3], job)
    bench.settle(0, 1, 2)
    assert bench.failed == {0, 1, 2}
    assert "failed 3 times in a row: ValueError: something else" in bench.worker.problem


def test_vllms_worker_is_made_at_the_start(benches: Benches) -> None:
    """A vLLM whose transfer code does not take this KV cache is told of there, not at the first job."""
    assert benches().driver.made == [False]
    bench = benches(pin=Pin.AUTO)
    assert bench.driver.made == [True]
    threads = threading.active_count()

    def refuse(*_: object, pinned: bool) -> Any:
        raise TypeError("an argument that is new")

    bench.driver.transfers = refuse  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="an argument that is new"):
        DeviceWorker(bench.pages, bench.pool, driver=bench.driver, pinning=bench.pinning)
    assert threading.active_count() == threads
    # The one for memory that is not registered is made when it is needed; here it cannot be.
    for job in range(3):
        bench.store(job, [3], job)
        bench.settle(job)
    assert bench.failed == {0, 1, 2}
    assert bench.pool.mapping.running == 0
    assert bench.worker.problem == (
        "vLLM's block copies failed 3 times in a row: vLLM's worker cannot be made: TypeError: an argument "
        "that is new"
    )


def test_a_success_between_failures_starts_the_count_again(benches: Benches) -> None:
    bench = benches()
    for job in range(0, 8, 2):
        bench.device.refuse_next.append(ValueError("now and then"))
        bench.store(job, [3], 0)
        bench.store(job + 1, [3], 0)
        bench.settle(job, job + 1)
    assert bench.failed == {0, 2, 4, 6}
    assert not bench.worker.problem


def test_a_copy_that_does_not_end_turns_the_cache_off_and_is_still_awaited(
    benches: Benches, lines: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    bench = benches(eager=False, copy_deadline_s=5.0, clock=lambda: now[0])
    bench.store(1, [3], 0)
    now[0] += 4.9
    bench.collect()
    assert not bench.worker.problem
    now[0] += 0.2
    bench.collect()
    assert bench.worker.problem == "the device has not finished a store within 5 s"
    assert not bench.done
    bench.store(2, [3], 1)
    bench.settle(2)
    assert bench.failed == {2}
    # Its slot may still be written: it is not given back before it is done.
    assert [report.transfer_id for report in bench.worker.take_reports()] == [2]
    bench.device.run()
    bench.settle(1)
    assert bench.failed == {2}
    assert bench.pool.mapping.running == 0
    errors = [record for record in lines.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1


# Ends.


def test_shutdown_lets_what_runs_end_first(slow: Bench) -> None:
    slow.store(1, [3], 0)
    ending = threading.Thread(target=slow.worker.shutdown)
    ending.start()
    ending.join(0.1)
    assert ending.is_alive()
    assert not hasattr(slow.pool, "closed")
    slow.device.run()
    ending.join(5)
    assert not ending.is_alive()
    assert slow.pool.closed
    slow.collect()
    slow.store(2, [3], 0)
    slow.settle(1, 2)
    assert slow.failed == {2}


def test_shutdown_does_not_wait_for_ever_and_leaves_the_mapping_held(benches: Benches) -> None:
    bench = benches(eager=False, copy_deadline_s=0.05)
    bench.store(1, [3], 0)
    bench.worker.shutdown()
    assert bench.pool.closed
    assert bench.pool.mapping.running == 1


def test_a_worker_whose_daemon_came_back_goes_on_with_the_new_segments(benches: Benches) -> None:
    bench = benches(eager=False)
    bench.store(1, [3], 0)
    old, new = bench.pool.mapping, Pool(boot_id=BOOT + 1)
    old.die()
    bench.pool.mapping = new.mapping
    spans = bench.pool.spans
    bench.device.mapped = lambda: spans() + new.spans()
    bench.store(2, [4], 1)
    bench.store(3, [5], 1, boot_id=BOOT + 1)
    bench.device.run()
    bench.settle(1, 2, 3)
    assert bench.failed == {2}
    assert old.running == new.mapping.running == 0
    assert bytes(new.bytes(1)[:192]) == bench.cache.image(0, 5)
    bench.pool.mapping = old
    new.unmap()
