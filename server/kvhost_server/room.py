"""How much memory can still be had on this host, and which file says so (I9).

Memory is bounded by MemAvailable and by every cgroup from our own up to the root, in the v1 and the v2
hierarchy. Standard library only: the populate helper measures with this room before each piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # v1 writes "no limit" as the largest page-aligned long
_LARGEST_RESERVE = 256 << 20


@dataclass(frozen=True)
class Limit:
    """One bound on memory, in bytes."""

    source: str
    """The file that states it."""
    total: int
    """What may be used in all."""
    room: int
    """What of it is not in use, or is page cache that the kernel gives back at once."""
    reserve: int = 0
    """What of the room is left alone: page tables and other processes need some too."""

    @property
    def spare(self) -> int:
        """What of the room the pool may take."""
        return max(0, self.room - self.reserve)


@dataclass(frozen=True)
class Room:
    """All bounds that hold for this process; there is always at least the host's."""

    limits: tuple[Limit, ...]

    @property
    def tightest(self) -> Limit:
        """The bound that leaves least room now."""
        return min(self.limits, key=lambda limit: limit.spare)

    @property
    def hardest(self) -> Limit:
        """The bound that allows least in all, however long one waits."""
        return min(self.limits, key=lambda limit: limit.total)


class Surveyor:
    """Measures the room. The roots are arguments so that tests can lay out a host of their own.

    Args:
        cgroup_root: where the cgroup file systems are mounted.
        proc_root: where procfs is mounted; its `self/cgroup` names our own cgroups.
        sys_root: where sysfs is mounted.
    """

    def __init__(
        self, cgroup_root: str = "/sys/fs/cgroup", proc_root: str = "/proc", sys_root: str = "/sys"
    ) -> None:
        self._cgroup_root = Path(cgroup_root)
        self._proc_root = Path(proc_root)
        self._sys_root = Path(sys_root)

    def measure(self) -> Room:
        """Reads every bound anew (some ten small files).

        Raises:
            OSError: /proc/meminfo cannot be read.
        """
        return Room((self._host(), *self._cgroups()))

    def huge_pages(self, page: int) -> Limit:
        """The huge pages of `page` bytes that the host has set aside; none where it has not heard of them."""
        folder = self._sys_root / f"kernel/mm/hugepages/hugepages-{page // 1024}kB"
        free = (_number(folder / "free_hugepages") or 0) - (_number(folder / "resv_hugepages") or 0)
        total = _number(folder / "nr_hugepages") or 0
        return Limit(str(folder / "free_hugepages"), total * page, max(0, free) * page)

    def _host(self) -> Limit:
        path = self._proc_root / "meminfo"
        fields = {}
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = int(value.split()[0]) * 1024
        available = fields.get("MemAvailable", fields["MemFree"])
        return _limit(str(path), fields["MemTotal"], available)

    def _cgroups(self) -> Iterator[Limit]:
        own_v1, own_v2 = self._own_paths()
        for folder in _ancestors(self._cgroup_root / "memory", own_v1):
            yield from _v1_limit(folder)
        for mount in (self._cgroup_root, self._cgroup_root / "unified"):
            for folder in _ancestors(mount, own_v2):
                yield from _v2_limits(folder)

    def _own_paths(self) -> tuple[str, str]:
        """Our cgroup in the v1 memory hierarchy and in the v2 hierarchy ("/" where there is none)."""
        v1 = v2 = "/"
        try:
            lines = (self._proc_root / "self/cgroup").read_text().splitlines()
        except OSError:
            return v1, v2
        for line in lines:
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                v2 = path
            elif "memory" in controllers.split(","):
                v1 = path
        return v1, v2


def _ancestors(mount: Path, own: str) -> Iterator[Path]:
    """The folders from our own cgroup up to the mount, as far as they are visible.

    In a container the mount often *is* our own cgroup while /proc names it by the host's path: then only
    the mount itself exists, and it is the right one.
    """
    parts = [part for part in own.split("/") if part not in ("", ".", "..")]
    for length in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:length])
        if folder.is_dir():
            yield folder


def _v1_limit(folder: Path) -> Iterator[Limit]:
    path = folder / "memory.limit_in_bytes"
    total = _number(path)
    used = _number(folder / "memory.usage_in_bytes")
    if total is None or used is None or total >= _UNLIMITED:
        return
    stat = _stat(folder)
    # Usage counts the children too, so the page cache must be the children's too: the total_ fields.
    cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
    yield _limit(str(path), total, total - used + cache)


def _v2_limits(folder: Path) -> Iterator[Limit]:
    used = _number(folder / "memory.current")
    if used is None:
        return
    stat = _stat(folder)
    # The "file" field counts shared memory, which nobody can reclaim; the two LRU lists do not.
    cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    if "inactive_file" not in stat:
        cache = max(0, stat.get("file", 0) - stat.get("shmem", 0))
    for name in ("memory.max", "memory.high"):  # beyond "high" the kernel stalls whoever allocates
        path = folder / name
        total = _number(path)
        if total is not None:
            yield _limit(str(path), total, total - used + cache)


def _limit(source: str, total: int, room: int) -> Limit:
    return Limit(source, total, max(0, room), min(total // 64, _LARGEST_RESERVE))


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None where the file is absent, unreadable, or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(folder: Path) -> dict[str, int]:
    try:
        text = (folder / "memory.stat").read_text()
    except OSError:
        return {}
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
