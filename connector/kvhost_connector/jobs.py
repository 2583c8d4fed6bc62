"""The life of a worker's jobs, whatever device they copy for: planned, queued, run, awaited, reported.

Every job is reported exactly once, whatever happens to it: vLLM's native half has no notion of a failed job,
so a failed one is reported to it as finished, and as failed on a list that the connector reads (contract 12,
19, 20). `JobBook` keeps the books and leaves it to the class that derives how a job comes to run; `JobWorker`
runs jobs in a few threads of their own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvhost_client.errors import KVHostError
from kvhost_connector.faults import CopyFault, Direction, FaultPlane, no_faults
from kvhost_connector.metadata import Epoch, SlotSpec, TransferReport
from kvhost_connector.pages import CacheMoved, Piece
from kvhost_connector.planning import JobRefused, Plan, plan_job

logger = logging.getLogger("vllm.kvhost.worker")

# How long `wait` lets stores that have not begun stay in the queue. One that has begun is always awaited.
FLUSH_DEADLINE_S = 0.1


class Mapping(Protocol):
    """The part of kvhost_client's WorkerMapping that copies need."""

    @property
    def boot_id(self) -> int: ...

    def begin(self, session_number: int, store_ids: Sequence[int] = ()) -> Any: ...

    def end(self, copy: Any) -> None: ...

    def shard(self, slot: int, rank: int) -> tuple[int, int]: ...

    def addresses(self, slots: Sequence[int], rank: int, nbytes: int) -> list[int]: ...

    def prefault(self, slots: Sequence[int], rank: int) -> None: ...


class MappingSource(Protocol):
    """The part of kvhost_client's WorkerLink that the worker needs."""

    @property
    def mapping(self) -> Mapping | None: ...

    def close(self, timeout: float) -> Any: ...


class Layout(Protocol):
    """The part of a worker's pages that planning needs: a block number must exist, a group must be known."""

    @property
    def groups(self) -> Sequence[Any]: ...

    @property
    def blocks(self) -> int: ...

    def shard_bytes(self, blocks_per_chunk: int) -> int: ...


class JobState(Enum):
    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()


@dataclass
class Job:
    """One load or store of this rank."""

    job_id: int
    direction: Direction
    spec: SlotSpec
    plan: Plan
    state: JobState = JobState.QUEUED
    # Set by `wait`: a job that has not begun must not begin, one that runs stops before its next chunk.
    stop: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The plan, an object for each chunk."""
        return self.plan.pieces


class Ended(NamedTuple):
    """A job that is over. `copied`: bytes, None when it failed; it took `seconds`."""

    job_id: int
    epoch: Epoch
    copied: int | None
    seconds: float


class JobBook(OffloadingWorker):
    """Takes the jobs of one rank, has each copied, and reports it.

    With a `problem` (or without pages) it copies nothing and reports every job failed: the engine then runs
    without a cache, and says why once.
    """

    def __init__(
        self,
        pages: Layout | None,
        source: MappingSource | None,
        *,
        rank: int = 0,
        blocks_per_chunk: int = 1,
        plane: FaultPlane = no_faults,
        problem: str = "",
    ) -> None:
        self.pages = pages
        self.problem = problem
        # What moves the bytes, for people.
        self.copies_by = "device"
        self._source = source
        self._rank = rank
        self._blocks_per_chunk = blocks_per_chunk
        self._plane = plane
        self._pid = os.getpid()
        self._epoch = Epoch(0)
        self._news = threading.Condition()
        self._jobs: dict[int, Job] = {}
        self._ended: list[Ended] = []
        self._reports: list[TransferReport] = []
        self._failed: set[int] = set()
        self._closed = False
        self._told: set[str] = set()

    # What native calls, on the engine's thread.

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._submit(job_id, "store", src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_: Any) -> bool:
        # 0.33 adds `expedited`: loads are given the way over stores in any case.
        self._submit(job_id, "load", dst_spec, src_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call, failed ones included: native only knows success."""
        with self._news:
            ended, self._ended = self._ended, []
            # Weights may have changed after the copy and before this call.
            stale = {
                job_id for job_id, epoch, copied, _ in ended if copied is not None and epoch < self._epoch
            }
            self._failed.update(stale, (job_id for job_id, _, copied, _ in ended if copied is None))
        return [
            TransferResult(job_id=job_id, success=True)
            if copied is None or job_id in stale
            else TransferResult(job_id=job_id, success=True, transfer_size=copied, transfer_time=seconds)
            for job_id, _, copied, seconds in ended
        ]

    # What the connector asks.

    def set_epoch(self, epoch: Epoch) -> None:
        """Jobs of an older epoch no longer count, even if their bytes were copied (I12)."""
        with self._news:
            self._epoch = epoch

    def take_reports(self) -> list[TransferReport]:
        """What became of transfers since the last call, for the scheduler half."""
        with self._news:
            reports, self._reports = self._reports, []
        return reports

    def take_failed(self) -> set[int]:
        """Jobs among all those given out by `get_finished` that failed, since the last call."""
        with self._news:
            failed, self._failed = self._failed, set()
        return failed

    # The life of a job.

    def _submit(self, job_id: int, direction: Direction, device: Any, host: Any) -> None:
        spec = host if isinstance(host, SlotSpec) else None
        try:
            if spec is None:
                raise JobRefused(f"a job for {type(host).__name__}, which is not kvhost's")
            job = Job(job_id, direction, spec, self._plan(device, spec, direction))
        except Exception as error:  # contract 19: nothing raised here may reach native
            if not isinstance(error, JobRefused):
                logger.exception("kvhost: a %s cannot be planned", direction)
            with self._news:
                self._finish_unplanned(job_id, spec, str(error))
            return
        self._accept(job)

    @abstractmethod
    def _accept(self, job: Job) -> None:
        """Enters the job in `_jobs` and sees to it that it is copied and finished. Raises nothing."""

    def _plan(self, device: Any, spec: SlotSpec, direction: Direction) -> Plan:
        if spec.problem:
            raise JobRefused(spec.problem)
        if self.problem or self.pages is None or self._source is None:
            raise JobRefused(self.problem or "this worker has no KV cache registered")
        if self._closed or os.getpid() != self._pid:
            raise JobRefused("this worker has ended")
        plan = plan_job(device, spec.slots, self._blocks_per_chunk, direction)
        if len(device.group_sizes) != len(self.pages.groups):
            raise JobRefused(
                f"the job has {len(device.group_sizes)} KV cache groups, this worker {len(self.pages.groups)}"
            )
        blocks = plan.blocks
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self.pages.blocks:
            wrong = next(block for block in blocks.tolist() if not 0 <= block < self.pages.blocks)
            raise JobRefused(f"block {wrong} does not exist: the KV cache has {self.pages.blocks} blocks")
        return plan

    def _finish_unplanned(self, job_id: int, spec: SlotSpec | None, why: str) -> None:
        """Caller holds the lock."""
        self._ended.append(Ended(job_id, spec.epoch if spec is not None else self._epoch, None, 0.0))
        if spec is not None:
            self._reports.append(TransferReport(spec.transfer_id, self._rank, False))
        self._tell(why)

    def _finish(
        self,
        job: Job,
        copied: int | None,
        why: str = "",
        *,
        seconds: float | None = None,
        quiet: bool = True,
    ) -> None:
        """`copied`: bytes, None when the job failed. Caller holds the lock.

        `seconds` that the copy took; without, since it began. Not `quiet`: a device may still write its
        slots. Then the scheduler half hears nothing of it, and the daemon keeps them until this process is
        proven ended (I4).
        """
        if copied is not None and job.spec.epoch < self._epoch:
            copied, why = None, "the engine's weights changed meanwhile"
        job.state = JobState.DONE
        del self._jobs[job.job_id]
        took = time.monotonic() - job.started if seconds is None else seconds
        self._ended.append(Ended(job.job_id, job.spec.epoch, copied, took))
        self._tell(why)
        if quiet:
            self._reports.append(TransferReport(job.spec.transfer_id, self._rank, copied is not None))
        self._news.notify_all()

    def _tell(self, why: str) -> None:
        """Each reason once: a sick daemon would otherwise fill the log."""
        if why and why not in self._told and len(self._told) < 100:
            self._told.add(why)
            logger.warning("kvhost: a transfer was given up: %s", why)

    def _before_chunk(self, job: Job, chunk: int) -> None:
        """Asks the fault plane, then raises `JobRefused` if the job was told to stop."""
        # A hand on the copy comes first: what it delays must see a stop.
        self._plane(job.direction, self._rank, job.job_id, chunk)
        if job.stop:
            raise JobRefused("its blocks were needed before it was done")

    def _hold(self, spec: SlotSpec) -> tuple[Mapping, Any]:
        """The mapping that the job was made for, and what to give its `end` when the copy is over (I4, I6).
        Raises `JobRefused`."""
        mapping = self._source.mapping if self._source is not None else None
        if mapping is None or mapping.boot_id != spec.boot_id:
            raise JobRefused("the daemon it was made for is gone")
        copy = mapping.begin(spec.session, spec.store_ids)
        if not copy:
            raise JobRefused("the daemon took its slots back")
        return mapping, copy

    @contextmanager
    def _mapping(self, spec: SlotSpec) -> Iterator[Mapping]:
        """The mapping that the job was made for, held for one copy."""
        mapping, copy = self._hold(spec)
        try:
            yield mapping
        finally:
            mapping.end(copy)


class JobWorker(JobBook):
    """Runs each job in one of `threads` threads; loads go before stores."""

    def __init__(
        self,
        pages: Layout | None,
        source: MappingSource | None,
        *,
        threads: int = 2,
        flush_deadline_s: float = FLUSH_DEADLINE_S,
        **arguments: Any,
    ) -> None:
        super().__init__(pages, source, **arguments)
        self._flush_deadline_s = flush_deadline_s
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvhost-copy-{number}", daemon=True)
            for number in range(threads if pages is not None and source is not None else 0)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, job_ids: set[int]) -> None:
        """Returns when no copy of these jobs runs or will run.

        A begun copy is awaited: it depends on no other process, and its blocks are about to be reused. Jobs
        that have not begun within the flush deadline are given up (contract 21).
        """
        with self._news:
            jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
            until = time.monotonic() + self._flush_deadline_s
            while any(job.state is not JobState.DONE for job in jobs):
                left = until - time.monotonic()
                if left > 0:
                    self._news.wait(left)
                    continue
                for job in jobs:
                    self._give_up(job)
                if any(job.state is not JobState.DONE for job in jobs):
                    self._news.wait()

    def shutdown(self) -> None:
        """Gives up what waits, lets what runs end, and takes leave of the daemon."""
        with self._news:
            self._closed = True
            for job in list(self._jobs.values()):
                self._give_up(job)
            self._news.notify_all()
        if os.getpid() == self._pid:
            for thread in self._threads:
                thread.join()
        if self._source is not None:
            self._source.close(timeout=2.0)

    # The life of a job.

    def _accept(self, job: Job) -> None:
        with self._news:
            self._jobs[job.job_id] = job
            (self._loads if job.direction == "load" else self._stores).append(job)
            self._news.notify_all()

    def _give_up(self, job: Job) -> None:
        """A queued job ends here, a running one before its next chunk. Caller holds the lock."""
        job.stop = True
        if job.state is JobState.QUEUED:
            (self._loads if job.direction == "load" else self._stores).remove(job)
            self._finish(job, None, "it had not begun when its blocks were needed")

    # The copying threads.

    def _work(self) -> None:
        while (job := self._next()) is not None:
            copied: int | None = None
            why = ""
            try:
                copied = self._copy(job)
            except (JobRefused, CopyFault, CacheMoved, KVHostError) as error:
                why = str(error)
            except Exception as error:  # the job must be reported whatever happened
                logger.exception("kvhost: a %s failed", job.direction)
                why = f"{type(error).__name__}: {error}"
            with self._news:
                self._finish(job, copied, why)

    def _next(self) -> Job | None:
        with self._news:
            while not self._loads and not self._stores:
                if self._closed:
                    return None
                self._news.wait()
            job = (self._loads or self._stores).popleft()
            job.state = JobState.RUNNING
            job.started = time.monotonic()
            return job

    @abstractmethod
    def _copy(self, job: Job) -> int:
        """Copies the whole job within `self._mapping(job.spec)` and returns its bytes.

        Calls `_before_chunk` ahead of every chunk. When it returns or raises, no device and no thread reads
        or writes the job's blocks and slots any more. Raises without having published anything.
        """
