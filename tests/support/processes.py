"""Looks into a running process through /proc: what it holds open, maps, runs and uses."""

import contextlib
import os
from pathlib import Path


def fd_count(pid: int) -> int:
    """Open file descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def thread_count(pid: int) -> int:
    """Threads."""
    return len(os.listdir(f"/proc/{pid}/task"))


def map_count(pid: int, containing: str = "") -> int:
    """Mappings whose line in /proc/PID/maps contains the text, as "memfd:kvhost"; all of them without a
    text."""
    return sum(containing in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def children(pid: int, containing: str = "") -> list[int]:
    """Child processes whose command line contains the text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and containing in (folder / "cmdline").read_text().replace("\0", " "):
                found.append(int(folder.name))
    return found


def memory_kib(pid: int, field: str = "VmRSS") -> int:
    """A size of /proc/PID/status in KiB, as "VmRSS" or "RssAnon"."""
    return int(_status(pid)[field].split()[0])


def process_state(pid: int) -> str:
    """The state letter: R, S, D, T (stopped), Z (ended, not yet waited for); "" when there is no such
    process."""
    try:
        return _status(pid)["State"][0]
    except FileNotFoundError:
        return ""


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
