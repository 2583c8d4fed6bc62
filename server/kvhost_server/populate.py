"""The populate helper: a short-lived process that allocates every page of the segments it inherits (I9).

It runs apart from the daemon so that a memory limit kills it and not the daemon (oom_score_adj 1000), and
dies with the daemon. Started as `python -I -S populate.py`, with the standard library alone; reads one job
from stdin and says what it did on stdout, one line of JSON a step. Must never free a page.
"""

import ctypes
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

if __name__ == "__main__":  # -I and -S leave only the standard library on the path
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from kvhost_server.room import Limit, Surveyor

LARGEST_PIECE = 64 << 20
_POLL_S = 0.05
_BLOCK = 512  # the unit of st_blocks
_MADV_POPULATE_WRITE = 23
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What the daemon asks of one helper process.

    Args:
        segments: (index in the pool, file descriptor, bytes) of each, in the order to do them.
        piece: bytes allocated between two looks at the room; a multiple of the page size.
        page: bytes of a huge page, or 0 for ordinary pages.
        wait_s: seconds that may be spent waiting for room, in all.
        zero: also overwrite every byte with zeros.
        parent: pid of the daemon.
    """

    segments: tuple[tuple[int, int, int], ...]
    piece: int
    page: int
    wait_s: float
    zero: bool
    parent: int
    cgroup_root: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        fields = json.loads(text)
        fields["segments"] = tuple((index, fd, size) for index, fd, size in fields["segments"])
        return cls(**fields)


@dataclass(frozen=True)
class Step:
    """One line of the helper's report.

    Args:
        kind: "piece" (done so far), "ready" (the segment is complete), "waiting" (for room), "short" (no
        room came
            in time: the end), "failed" (a system call failed: the end).
        segment: index in the pool.
        done: bytes of the segment that are allocated.
        room: for "waiting" and "short": bytes that could still be had.
        source: for those: the file that says so.
        error: for "failed": the system call and its error.
    """

    kind: str
    segment: int
    done: int
    room: int = 0
    source: str = ""
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Step":
        return cls(**json.loads(text))


class Populator:
    """Does one job. Iterate over `steps` to the end."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._surveyor = Surveyor(job.cgroup_root)
        self._wait_left_s = job.wait_s

    def steps(self) -> Iterator[Step]:
        """Allocates piece by piece; yields after each. Ends early after "short" or "failed"."""
        for index, fd, size in self._job.segments:
            done = 0
            while done < size:
                length = min(self._job.piece, size - done)
                # Pages that are there already need no room: only a hole does, or a fresh segment.
                missing = size - os.fstat(fd).st_blocks * _BLOCK
                for step in self._wait_for(index, done, min(length, missing)):
                    yield step
                    if step.kind == "short":
                        return
                try:
                    _allocate(fd, done, length, self._job.zero)
                except OSError as error:
                    reason = f"{error.filename}: {error.strerror} (errno {error.errno})"
                    yield Step("failed", index, done, error=reason)
                    return
                done += length
                yield Step("piece", index, done)
            yield Step("ready", index, done)

    def _wait_for(self, index: int, done: int, length: int) -> Iterator[Step]:
        """Waits until `length` bytes fit. Says once that it waits, and at the end if it was in vain."""
        limit = self._short_of(length) if length > 0 else None
        if limit is None:
            return
        yield Step("waiting", index, done, limit.spare, limit.source)
        while limit is not None:
            if self._wait_left_s <= 0:
                yield Step("short", index, done, limit.spare, limit.source)
                return
            time.sleep(_POLL_S)
            self._wait_left_s -= _POLL_S
            limit = self._short_of(length)

    def _short_of(self, length: int) -> Limit | None:
        page = self._job.page
        limit = self._surveyor.huge_pages(page) if page else self._surveyor.measure().tightest
        return limit if limit.spare < length else None


def _allocate(fd: int, offset: int, length: int, zero: bool) -> None:
    """Allocates and zeroes the pages of one piece.

    fallocate first: where memory is short it answers with an error, and a write fault would answer with
    SIGBUS. The madvise then clears the pages, which fallocate leaves for the first touch. (`mmap.madvise`
    would hold the GIL; here nobody minds, but it also does not know POPULATE_WRITE.)

    Raises:
        OSError: `filename` holds the name of the system call.
    """
    try:
        os.posix_fallocate(fd, offset, length)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "fallocate") from error
    try:
        with mmap.mmap(fd, length, offset=offset) as view:
            _touch(view, length, zero)
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or "mmap") from error


def _touch(view: mmap.mmap, length: int, zero: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    anchor = ctypes.c_char.from_buffer(view)
    try:
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        # EINVAL: Linux before 5.14 has no POPULATE_WRITE; fallocate has reserved the pages there.
        if libc.madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE) and ctypes.get_errno() != 22:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "madvise(MADV_POPULATE_WRITE)")
        if zero:
            ctypes.memset(address, 0, length)
    finally:
        del anchor  # the view cannot be closed while somebody points into it


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def main() -> int:
    """Entry of the helper process. Returns 0 when every segment is complete, 1 when not."""
    job = Job.from_json(sys.stdin.readline())
    _die_with(job.parent)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    complete = 0
    for step in Populator(job).steps():
        print(step.to_json(), flush=True)
        complete += step.kind == "ready"
    return 0 if complete == len(job.segments) else 1


if __name__ == "__main__":
    sys.exit(main())
