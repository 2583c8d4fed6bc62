"""The daemon's side of the populate helper: starts it, reads its steps, ends it."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from types import TracebackType

from kvhost_server import populate
from kvhost_server.populate import Job, Step


class HelperFailed(Exception):
    """The helper process ended without finishing its job. The message goes on after "the helper"."""


class Helper:
    """A running helper process. Leaving the `async with` ends it if it still runs."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "Helper":
        # The event loop's thread starts it: the kernel sends the parent-death signal when that *thread* ends.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            populate.__file__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=[fd for _, fd, _ in self._job.segments],
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    @property
    def pid(self) -> int:
        """Of the helper process."""
        assert self._process is not None
        return self._process.pid

    async def steps(self) -> AsyncIterator[Step]:
        """Every step, as it happens. A step of kind "short" or "failed" is the last one.

        Raises:
            HelperFailed: the process was killed, or ended with an error of its own.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        last_kind = last_words = ""
        try:
            process.stdin.write(self._job.to_json().encode() + b"\n")
            await process.stdin.drain()
            process.stdin.close()
        except (BrokenPipeError, ConnectionResetError):
            last_words = "it did not read its job"
        while line := (await process.stdout.readline()).decode(errors="replace").strip():
            if line.startswith("{"):
                step = Step.from_json(line)
                last_kind = step.kind
                yield step
            else:
                last_words = line
        code = await process.wait()
        if code < 0:
            raise HelperFailed(f"was ended by signal {-code}")
        if code and last_kind not in ("short", "failed"):
            raise HelperFailed(f"ended with exit code {code} ({last_words or 'no reason given'})")


def job_for(
    segments: list[tuple[int, int, int]],
    *,
    piece: int,
    page: int,
    wait_s: float,
    cgroup_root: str,
    zero: bool = False,
) -> Job:
    """A job whose parent is this process; see `Job` for the meaning of each part."""
    return Job(tuple(segments), piece, page, wait_s, zero, os.getpid(), cgroup_root)
