"""Running a program with less than we have: capabilities, memory to lock, open files, a memory cgroup."""

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.support.waiting import wait_for

_CAP_IPC_LOCK = 14
_PR_CAPBSET_DROP = 24

# Root without CAP_IPC_LOCK is bound by RLIMIT_MEMLOCK as any user; the capability is gone with the exec.
_UNDER = f"""
import ctypes, os, resource, sys
memlock, nofile = map(int, sys.argv[1:3])
if memlock >= 0:
    ctypes.CDLL(None).prctl({_PR_CAPBSET_DROP}, {_CAP_IPC_LOCK}, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
if nofile >= 0:
    resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, nofile))
os.execvp(sys.argv[3], sys.argv[3:])
"""


def limited(*, memlock: int = -1, nofile: int = -1) -> list[str]:
    """The start of a command line that runs the rest under these limits (bytes, descriptors; -1: as we
    have it)."""
    return [sys.executable, "-I", "-c", _UNDER, str(memlock), str(nofile)]


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[list[str] | None]:
    """A memory cgroup below our own, as the start of a command line that runs the rest inside it.

    None where we may not make one, or the host has no memory controller: callers then test less, and say so.
    """
    for parent, limit_file in _candidates():
        folder = parent / f"kvhost-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            try:
                (folder / limit_file).write_text(str(limit))
            except OSError:
                continue
            script = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
            yield ["sh", "-c", script, "sh"]
            return
        finally:
            wait_for(partial(_is_empty, folder / "cgroup.procs"), 10, "the cgroup to be empty")
            folder.rmdir()
    yield None


def _is_empty(procs: Path) -> bool:
    return not procs.read_text()


def _candidates() -> Iterator[tuple[Path, str]]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        elif number == "0":
            yield Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"
