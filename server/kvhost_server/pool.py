"""The segments: sealed memfds, allocated before anybody sees them (I9), locked on request, zeroed between
loans, given back whole when the pool shrinks.

Owns every segment's file descriptor. Bytes are never read here, and no hole is ever made: pages that a device
driver has pinned would be detached from the file.
"""

import asyncio
import errno
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvhost_server.exits import ExitCode, StartupError
from kvhost_server.helper import Helper, HelperFailed, job_for
from kvhost_server.locking import Lock, LockedMap, lock_advice, sure_refusal
from kvhost_server.populate import Job, Step
from kvhost_server.room import Surveyor
from kvhost_server.sizing import Plan
from kvhost_server.units import format_size

_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3
_MFD_HUGE_SHIFT = 26
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ZEROS = bytes(1 << 20)
_BLOCK = 512  # the unit of st_blocks
_TELL_EVERY_S = 10.0
_NO_FD = -1

_Result = TypeVar("_Result")

log = logging.getLogger(__name__)


@dataclass
class _Segment:
    """One segment; without a file when it is above the pool's budget."""

    index: int
    fd: int = _NO_FD
    allocated: int = 0
    ready: bool = False
    locked: LockedMap | None = None
    hole_seen: bool = False

    def leave(self) -> "_Segment":
        """Empties it. What it had is the result, for the caller to free."""
        left = _Segment(self.index, self.fd, locked=self.locked)
        self.fd, self.locked, self.allocated, self.ready = _NO_FD, None, 0, False
        return left


class Pool:
    """All segments of one daemon.

    Args:
        plan: how many, how large, which pages.
        lock: whether to keep them in memory.
        wait_s: seconds to wait for room, in all, while populating.
        strict: less than the plan is an error.
        cgroup_root: where the cgroup file systems are mounted.

    Raises:
        StartupError: memfds cannot be made, or locking is required and cannot succeed.
    """

    def __init__(self, plan: Plan, lock: Lock, *, wait_s: float, strict: bool, cgroup_root: str) -> None:
        self.plan = plan
        self._lock = lock
        self._wait_s = wait_s
        self._strict = strict
        self._cgroup_root = cgroup_root
        self._asked_bytes = plan.asked_bytes
        self._notes = list(plan.notes)
        self._check_lock()
        self._segments: list[_Segment] = []
        try:
            for index in range(plan.segments):
                self._segments.append(_Segment(index, _make_segment(index, plan)))
        except OSError as error:
            for segment in self._segments:
                os.close(segment.fd)
            raise StartupError(
                f"segment {len(self._segments) + 1} of {plan.segments} ({format_size(plan.segment_bytes)} "
                f"each) cannot be made: {error.strerror}; raise the limit on open files (LimitNOFILE), or "
                "give a larger --segment-size",
                ExitCode.MEMORY,
            ) from error
        # One thread: zeroing and locking are bound by memory speed, and must not take the engines' cores.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvhost-pool")
        self._tasks: set[asyncio.Task[None]] = set()

    # What people see.

    @property
    def asked_bytes(self) -> int:
        """What --memory asked for, or the last `resize`."""
        return self._asked_bytes

    @property
    def segment_bytes(self) -> int:
        return self.plan.segment_bytes

    @property
    def segments(self) -> int:
        """Segments that exist: as planned, fewer once it is known that not all fit."""
        return sum(segment.fd != _NO_FD for segment in self._segments)

    @property
    def capacity_bytes(self) -> int:
        return self.segments * self.plan.segment_bytes

    @property
    def populated_bytes(self) -> int:
        return sum(segment.allocated for segment in self._segments)

    @property
    def populated(self) -> float:
        """Progress of populating, 0 to 1."""
        return self.populated_bytes / self.capacity_bytes

    @property
    def locked_bytes(self) -> int:
        return sum(self.plan.segment_bytes for segment in self._segments if segment.locked)

    @property
    def hugepages(self) -> str:
        """ "off", or the size got."""
        return self.plan.hugepages.value

    @property
    def notes(self) -> list[str]:
        """What is not as asked, one line each."""
        return list(self._notes)

    def fd(self, index: int) -> int:
        """The segment's file descriptor, to be sent to a worker. Stays the pool's own."""
        return self._segments[index].fd

    # What the pool does.

    async def populate(self, on_ready: Callable[[int], None]) -> None:
        """Allocates (and locks) segment after segment; calls `on_ready(index)` after each.

        Raises:
            StartupError: nothing fits, or less than asked when strict; a system call failed; locking is
                required and failed.
        """
        short: Step | None = None
        last = Step("piece", 0, 0)
        told = time.monotonic()
        try:
            async with Helper(self._job(self._segments, self._wait_s)) as helper:
                async for step in helper.steps():
                    last = step
                    self._segments[step.segment].allocated = step.done
                    if time.monotonic() - told > _TELL_EVERY_S:
                        told = time.monotonic()
                        log.info("populated %s so far", format_size(self.populated_bytes))
                    if step.kind == "ready":
                        await self._finish(self._segments[step.segment], on_ready)
                    elif step.kind == "waiting":
                        log.info("waiting for room: %s spare (%s)", format_size(step.room), step.source)
                    elif step.kind == "short":
                        short = step
                    elif step.kind == "failed":
                        raise self._failure(f"failed: {step.error}")
        except HelperFailed as error:
            raise self._failure(str(error)) from error
        if short is not None:
            await self._settle_for_less(short)
        elif last.kind != "ready":
            raise self._failure("ended early")

    def resize(
        self,
        asked_bytes: int,
        fresh: Sequence[int],
        on_ready: Callable[[int], None],
        on_missing: Callable[[Sequence[int]], None],
    ) -> None:
        """Another size was asked for. Allocates (and locks) these further segments in the background: calls
        `on_ready(index)` after each; `on_missing` with those that cannot be had, and a note says why."""
        self._asked_bytes = asked_bytes
        for index in range(len(self._segments), max(fresh, default=-1) + 1):
            self._segments.append(_Segment(index))
        if fresh:
            self._spawn(self._grow([self._segments[index] for index in fresh], on_ready, on_missing))

    def release(self, index: int) -> None:
        """Gives a segment's memory back, in the background. Nobody else may have it mapped."""
        self._spawn(self._off_loop(partial(_free, self._segments[index].leave())))

    def clean(self, index: int, on_clean: Callable[[int], None]) -> None:
        """Zeroes a segment off the loop, then calls `on_clean(index)`. A segment that cannot be zeroed is
        never called clean: it is out of use, and a note says so."""
        self._spawn(self._clean(self._segments[index], on_clean))

    async def watch_holes(self, on_hole: Callable[[int], None], interval_s: float = 1.0) -> None:
        """Looks at every ready segment's allocated pages for ever; calls `on_hole(index)` when some went
        missing.

        A member of a namespace can punch a hole into a segment (I13). The pages are allocated anew, as zeros.
        """
        while True:
            await asyncio.sleep(interval_s)
            for segment in self._segments:
                missing = self._missing(segment)
                if missing and not segment.hole_seen:
                    log.warning("segment %d lost %s: a hole was punched", segment.index, format_size(missing))
                    on_hole(segment.index)
                    segment.hole_seen = True
                if missing:
                    segment.hole_seen = not await self._repair(segment)

    async def close(self) -> None:
        """Ends running work and closes every segment."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._worker.shutdown(wait=True, cancel_futures=True)
        for segment in self._segments:
            _free(segment)
        self._segments.clear()

    # How.

    async def _finish(self, segment: _Segment, on_ready: Callable[[int], None]) -> None:
        try:
            await self._lock_segment(segment)
        except OSError as error:
            for other in self._segments:
                if other.locked:
                    await self._off_loop(other.locked.close)
                    other.locked = None
            self._lock_refused(error)
        segment.ready = True
        on_ready(segment.index)

    async def _lock_segment(self, segment: _Segment) -> None:
        if self._lock is not Lock.OFF:
            segment.locked = await self._off_loop(
                partial(LockedMap, segment.fd, self.segment_bytes, self.plan.piece)
            )

    async def _grow(
        self,
        segments: list[_Segment],
        on_ready: Callable[[int], None],
        on_missing: Callable[[Sequence[int]], None],
    ) -> None:
        waiting = {segment.index: segment for segment in segments}
        try:
            for segment in segments:
                segment.fd = _make_segment(segment.index, self.plan)
            async for step in self._steps(segments, self._wait_s):
                segment = self._segments[step.segment]
                segment.allocated = step.done
                if step.kind == "ready":
                    # Unlike at the start: what is locked stays so, and the pool grows by less.
                    await self._lock_segment(segment)
                    segment.ready = True
                    del waiting[segment.index]
                    on_ready(segment.index)
        except (OSError, HelperFailed) as error:
            for segment in waiting.values():
                await self._off_loop(partial(_free, segment.leave()))
            self._note(
                f"the pool did not grow to {format_size(self.asked_bytes)}, it has "
                f"{format_size(self.capacity_bytes)}: {error}"
            )
            on_missing([*waiting])

    async def _settle_for_less(self, short: Step) -> None:
        """Room for all of it did not come in time: keep the segments that are complete."""
        got = [segment for segment in self._segments if segment.ready]
        what = (
            f"{format_size(len(got) * self.segment_bytes)} of {format_size(self.asked_bytes)} (--memory) "
            "could be had within "
            f"{self._wait_s:g} s (--memory-wait): {short.source} leaves {format_size(short.room)}"
        )
        if self._strict or not got:
            raise StartupError(f"{what}; free memory, ask for less, or wait longer", ExitCode.MEMORY_NOW)
        unfinished = self._segments[len(got) :]
        self._segments = got
        for segment in unfinished:
            await self._off_loop(partial(_free, segment))
        self._note(what)

    async def _clean(self, segment: _Segment, on_clean: Callable[[int], None]) -> None:
        try:
            if self.plan.huge_page:  # they cannot be written with pwrite, and a fault at a hole would kill us
                await self._complete(segment, zero=True)
            else:
                await self._off_loop(partial(_zero, segment.fd, self.segment_bytes))
        except (OSError, HelperFailed) as error:
            self._note(f"segment {segment.index} is out of use: zeroing it failed: {error}")
            return
        on_clean(segment.index)

    def _missing(self, segment: _Segment) -> int:
        if not segment.ready:
            return 0
        return max(0, self.segment_bytes - os.fstat(segment.fd).st_blocks * _BLOCK)

    async def _repair(self, segment: _Segment) -> bool:
        try:
            await self._complete(segment)
        except (OSError, HelperFailed) as error:
            log.error("segment %d could not be populated again: %s", segment.index, error)
            return False
        return True

    async def _complete(self, segment: _Segment, *, zero: bool = False) -> None:
        """Populates, and with `zero` overwrites, one segment that was ready before."""
        async for _ in self._steps([segment], 0.0, zero=zero):
            pass

    async def _steps(
        self, segments: list[_Segment], wait_s: float, *, zero: bool = False
    ) -> AsyncIterator[Step]:
        """What a helper does for these segments. Raises `HelperFailed` where it ends before all are ready."""
        async with Helper(self._job(segments, wait_s, zero=zero)) as helper:
            async for step in helper.steps():
                if step.kind in ("short", "failed"):
                    raise HelperFailed(step.error or f"{step.source} leaves {format_size(step.room)}")
                yield step

    def _job(self, segments: list[_Segment], wait_s: float, *, zero: bool = False) -> Job:
        return job_for(
            [(segment.index, segment.fd, self.segment_bytes) for segment in segments],
            piece=self.plan.piece,
            page=self.plan.huge_page,
            wait_s=wait_s,
            cgroup_root=self._cgroup_root,
            zero=zero,
        )

    def _failure(self, how: str) -> StartupError:
        limit = Surveyor(self._cgroup_root).measure().tightest
        return StartupError(
            f"populating --memory {format_size(self.asked_bytes)} {how} after "
            f"{format_size(self.populated_bytes)}; {limit.source} leaves {format_size(limit.room)}; ask "
            "for less, or raise that limit",
            ExitCode.MEMORY,
        )

    def _check_lock(self) -> None:
        if self._lock is not Lock.OFF:
            refusal = sure_refusal(self.plan.total_bytes)
            if refusal is not None:
                self._lock_refused(refusal)

    def _lock_refused(self, error: OSError) -> None:
        advice = lock_advice(self.plan.total_bytes, error)
        if self._lock is Lock.REQUIRED:
            raise StartupError(f"--lock required: {advice}", ExitCode.CONFIG) from error
        self._lock = Lock.OFF
        self._note(f"--lock auto: nothing is locked: {advice}")

    def _note(self, note: str) -> None:
        log.warning("%s", note)
        self._notes.append(note)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _off_loop(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def _make_segment(index: int, plan: Plan) -> int:
    """A sealed memfd without pages. It has no name in any file system: a crash leaves nothing behind (C5)."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if plan.huge_page:
        flags |= os.MFD_HUGETLB | (plan.huge_page.bit_length() - 1) << _MFD_HUGE_SHIFT
    try:
        fd = os.memfd_create(f"kvhost-{index}", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(f"kvhost-{index}", flags)
    try:
        os.ftruncate(fd, plan.segment_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # nobody can shrink it under a reader: no SIGBUS (E8)
    except OSError:
        os.close(fd)
        raise
    return fd


def _zero(fd: int, size: int) -> None:
    """Overwrites a segment with zeros; a megabyte at a time, so that the loop's thread gets its turn.

    A descriptor that was sent shares its flags with all its receivers: one that set O_APPEND would make every
    write fail. So it is opened anew.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        offset = 0
        while offset < size:
            offset += os.pwrite(own, _ZEROS[: size - offset], offset)
    finally:
        os.close(own)


def _free(segment: _Segment) -> None:
    """Gives a segment back. May block: the last close frees its pages."""
    if segment.locked:
        segment.locked.close()
        segment.locked = None
    if segment.fd != _NO_FD:
        os.close(segment.fd)
