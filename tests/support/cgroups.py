"""A real memory cgroup for a test, in either hierarchy, where we may make one."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.support.waiting import wait_for


class _Names(NamedTuple):
    limit: str
    usage: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes")
_V2 = _Names("memory.max", "memory.current")


class MemoryCgroup:
    """A cgroup below our own, with a limit in bytes. Use it in a `with`; its processes must end before.

    `MemoryCgroup.may_be_made()` says whether this machine lets us.
    """

    _made = 0

    def __init__(self, limit: int) -> None:
        MemoryCgroup._made += 1
        name = f"kvhost-drill-{os.getpid()}-{MemoryCgroup._made}"
        for parent, names in _candidates():
            self.folder, self._names = parent / name, names
            try:
                self.folder.mkdir()
                self.limit(limit)
            except OSError:
                if self.folder.exists():
                    self.folder.rmdir()
                continue
            return
        raise OSError("no memory cgroup can be made here")

    @classmethod
    def may_be_made(cls) -> bool:
        try:
            with cls(1 << 30):
                return True
        except OSError:
            return False

    def __enter__(self) -> "MemoryCgroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wait_for(lambda: not (self.folder / "cgroup.procs").read_text(), 10.0, "the cgroup to be empty")
        self.folder.rmdir()

    @property
    def prefix(self) -> Sequence[str]:
        """The start of a command line that runs the rest inside."""
        return ("sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh")

    @property
    def usage(self) -> int:
        """Bytes charged."""
        return int((self.folder / self._names.usage).read_text())

    def limit(self, limit: int) -> None:
        """Sets the limit. Raises OSError when more than that is in use and cannot be given back (v1)."""
        (self.folder / self._names.limit).write_text(str(limit))

    def take(self, pid: int) -> None:
        """Moves a process inside: what it allocates from now on is charged here."""
        (self.folder / "cgroup.procs").write_text(str(pid))


def _candidates() -> Iterator[tuple[Path, _Names]]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield Path("/sys/fs/cgroup/memory") / path.lstrip("/"), _V1
        elif number == "0":
            yield Path("/sys/fs/cgroup") / path.lstrip("/"), _V2
