"""The worker of an engine whose KV cache lies in a device's memory: gives copies to the device, and hears.

A copy is given to the device on the engine's own thread, at the moment native submits it: only there is it
ordered behind the work that produced a store's blocks, and behind the running step that may still read a
load's. The rest is waiting: completion is polled, by the engine's thread when it comes by and by a thread of
this worker meanwhile, so that an idle engine answers fences too. The transfers themselves are vLLM's own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvhost_client.errors import KVHostError
from kvhost_connector.device.driver import Driver
from kvhost_connector.device.pages import CopyPlan, DevicePages, plan_copy
from kvhost_connector.device.pinning import Pinning, PinState
from kvhost_connector.device.region import blocks_of, rows_at
from kvhost_connector.faults import CopyFault, no_faults
from kvhost_connector.jobs import Job, JobBook, JobState, Mapping, MappingSource
from kvhost_connector.pages import CacheMoved
from kvhost_connector.planning import JobRefused

logger = logging.getLogger("vllm.kvhost.worker")

# Between two looks at the device while a copy runs.
POLL_S = 0.001
_WAIT_POLL_S = 0.0002

COPY_DEADLINE_S = 30.0
"""A copy that the device has not finished by then: no further one is given to it."""

# Failures in a row that leave the device alive and are not its own; then the cache is turned off.
_STRIKES = 3


@dataclass
class Flight:
    """One job that the device has: its mapping is held until the device is done with it."""

    job: Job
    mapping: Mapping
    copy: Any
    native: OffloadingWorker
    overdue_at: float


class DeviceWorker(JobBook):
    """Copies for one rank. Arguments beyond `JobBook`'s: the device's `driver`, and what is pinned. Raises
    what vLLM's transfer worker raises that does not take this KV cache.

    When the device fails, or does not finish a copy in time, `problem` says so, and every further job is
    reported failed: the engine goes on without the cache.
    """

    pages: DevicePages | None

    def __init__(
        self,
        pages: DevicePages,
        source: MappingSource | None,
        *,
        driver: Driver,
        pinning: Pinning,
        copy_deadline_s: float = COPY_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
        **arguments: Any,
    ) -> None:
        super().__init__(pages, source, **arguments)
        self._driver = driver
        self._pinning = pinning
        self._copy_deadline_s = copy_deadline_s
        self._clock = clock
        # vLLM's workers: for pinned rows and for others (its kernels read only pinned ones by themselves).
        self._natives: dict[bool, OffloadingWorker] = {}
        self._flights: dict[int, Flight] = {}
        self._strikes = 0
        self._native(pinned=pinning.state is not PinState.OFF)
        self._poller = threading.Thread(target=self._attend, name="kvhost-device", daemon=True)
        self._poller.start()

    # What native calls, on the engine's thread.

    def get_finished(self) -> list[TransferResult]:
        with self._news:
            self._poll()
        return super().get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Returns when the device copies nothing of these jobs any more.

        There is no deadline: a copy that the device has been given cannot be taken back, and its blocks are
        about to be reused (contract 21).
        """
        with self._news:
            while self._poll() and not job_ids.isdisjoint(self._flights):
                self._news.wait(_WAIT_POLL_S)

    def shutdown(self) -> None:
        """Lets what runs end, within the deadline of a copy, and takes leave of the daemon.

        What still runs then keeps its mapping: the segments stay mapped and registered, nothing is said to
        the daemon of their end, and the end of this process proves it.
        """
        with self._news:
            self._closed = True
            until = time.monotonic() + self._copy_deadline_s
            while os.getpid() == self._pid and self._poll() and time.monotonic() < until:
                self._news.wait(_WAIT_POLL_S)
            quiet = not self._flights
            self._news.notify_all()
        if os.getpid() == self._pid:
            self._poller.join()
            if quiet:
                for native in self._natives.values():
                    self._shut(native)
        if self._source is not None:
            self._source.close(timeout=2.0)

    # A job's way to the device.

    def _accept(self, job: Job) -> None:
        with self._news:
            self._jobs[job.job_id] = job
            try:
                self._launch(job)
            except (JobRefused, CopyFault, CacheMoved, KVHostError) as error:
                self._finish(job, None, str(error))
            except Exception as error:  # the job must be reported whatever happened
                logger.exception("kvhost: a %s failed", job.direction)
                self._finish(job, None, f"{type(error).__name__}: {error}")
            self._news.notify_all()

    def _launch(self, job: Job) -> None:
        """Gives the job to the device. Raises when it was not given. Caller holds the lock."""
        if self.pages is None:
            raise JobRefused("this worker has no KV cache registered")
        mapping, copy = self._hold(job.spec)
        try:
            if self._plane is not no_faults:
                for number in range(len(job.plan.slots)):
                    self._before_chunk(job, number)
            self.pages.check_in_place()
            plan = plan_copy(
                self.pages, job.plan, lambda slots, nbytes: mapping.addresses(slots, self._rank, nbytes)
            )
            native = self._native_for(plan) if len(plan.rows) else None
        except BaseException:
            mapping.end(copy)
            raise
        if native is None:  # null blocks only
            mapping.end(copy)
            self._finish(job, 0)
            return
        job.state = JobState.RUNNING
        job.started = time.monotonic()
        overdue_at = self._clock() + self._copy_deadline_s
        self._flights[job.job_id] = Flight(job, mapping, copy, native, overdue_at)
        try:
            self._submit_to(native, job, plan)
        except Exception as error:
            self._failed_natively(native, error)

    def _submit_to(self, native: OffloadingWorker, job: Job, plan: CopyPlan) -> None:
        blocks, rows = blocks_of(plan), rows_at(plan)
        if job.direction == "store":
            taken = native.submit_store(job.job_id, blocks, rows)
        else:
            taken = native.submit_load(job.job_id, rows, blocks)
        if not taken:
            raise RuntimeError(f"vLLM's worker did not take a {job.direction}")

    def _native_for(self, plan: CopyPlan) -> OffloadingWorker:
        try:
            return self._native(pinned=self._pinning.covers(plan.starts, plan.ends))
        except Exception as error:
            why = f"vLLM's worker cannot be made: {_line(error)}"
            self._strike(why)
            raise JobRefused(why) from error

    def _native(self, *, pinned: bool) -> OffloadingWorker:
        if pinned not in self._natives:
            if self.pages is None:
                raise JobRefused("this worker has no KV cache registered")
            self._natives[pinned] = self._driver.transfers(self.pages, pinned=pinned)
        return self._natives[pinned]

    # What the device says.

    def _poll(self) -> bool:
        """Finishes what is done; whether anything still runs. Caller holds the lock."""
        if os.getpid() != self._pid:
            return False
        for native in list(self._natives.values()):
            if not any(native is other for other in self._natives.values()):
                continue  # given up because of the one before
            try:
                results = native.get_finished()
            except Exception as error:
                self._failed_natively(native, error)
                continue
            for result in results:
                self._landed(result)
        now = self._clock()
        late = [flight for flight in self._flights.values() if flight.overdue_at <= now]
        if late:
            self._turn_off(
                f"the device has not finished a {late[0].job.direction} within {self._copy_deadline_s:g} s"
            )
        return bool(self._flights)

    def _landed(self, result: TransferResult) -> None:
        flight = self._flights.pop(result.job_id, None)
        if flight is None:
            return  # failed before, with others
        flight.mapping.end(flight.copy)
        if result.success:
            self._strikes = 0
            self._finish(flight.job, result.transfer_size or 0, seconds=result.transfer_time)
        else:
            self._finish(flight.job, None, f"vLLM's worker reported the {flight.job.direction} failed")

    def _failed_natively(self, native: OffloadingWorker, error: Exception) -> None:
        """vLLM's worker raised: nobody knows which of its copies are done. All of them fail, once each.

        A device that can say that it is done with everything goes on, with another worker. One that cannot
        (CUDA's errors stay, for every later call) is not used again: what it may still write is not reported,
        so that the daemon keeps those slots until this process is proven ended (I4).
        """
        why = _line(error)
        quiet = True
        try:
            self._driver.settle()
        except Exception as answer:
            quiet = False
            logger.debug("kvhost: the device does not settle", exc_info=answer)
        self._natives = {pinned: other for pinned, other in self._natives.items() if other is not native}
        if not quiet:
            self._natives = {}
            self._turn_off(f"the device reports an error that stays: {why}")
        else:
            self._strike(why)
        for flight in list(self._flights.values()):
            if flight.native is native or not quiet:
                del self._flights[flight.job.job_id]
                if quiet:
                    flight.mapping.end(flight.copy)
                lost = self.problem or f"the device's copies failed ({why})"
                self._finish(flight.job, None, lost, quiet=quiet)
        if quiet:
            self._shut(native)

    def _strike(self, why: str) -> None:
        self._strikes += 1
        if self._strikes >= _STRIKES:
            self._turn_off(f"vLLM's block copies failed {self._strikes} times in a row: {why}")

    def _turn_off(self, why: str) -> None:
        """One line; what every further job is failed with is not said again."""
        if not self.problem:
            self.problem = why
            self._told.add(why)
            logger.error("kvhost: this worker goes on without the cache: %s", why)

    def _shut(self, native: OffloadingWorker) -> None:
        try:
            native.shutdown()
        except Exception:
            logger.exception("kvhost: the end of vLLM's worker")

    def _attend(self) -> None:
        """The thread that looks after copies while the engine does not."""
        entered = False
        with self._news:
            while not self._closed:
                if not self._flights:
                    self._news.wait()
                    continue
                if not entered:
                    try:
                        self._driver.enter()
                    except Exception:
                        # The engine's thread looks by itself, whenever it steps.
                        logger.exception("kvhost: copies are not looked after while the engine is idle")
                        return
                    entered = True
                self._poll()
                self._news.wait(POLL_S)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
