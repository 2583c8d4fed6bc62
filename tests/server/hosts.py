"""Hosts made of files: cgroup trees, /proc and /sys as the room sees them, with the numbers a test wants."""

from pathlib import Path

MIB = 1 << 20


def cgroup_v2(
    root: Path,
    path: str = "",
    *,
    limit: int | str = "max",
    current: int = 0,
    file: int = 0,
    high: int | str = "max",
) -> Path:
    """A v2 cgroup below `root`; sizes in bytes. Returns its folder."""
    folder = root / path if path else root
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(
        f"anon 4096\nfile {file}\nshmem 0\ninactive_file {file}\nactive_file 0\n"
    )
    return folder


def cgroup_v1(root: Path, path: str = "", *, limit: int, usage: int = 0, file: int = 0) -> Path:
    """A v1 memory cgroup below `root`/memory; sizes in bytes. Returns its folder."""
    folder = root / "memory" / path if path else root / "memory"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(
        f"cache 0\ninactive_file 0\ntotal_inactive_file {file}\ntotal_active_file 0\n"
    )
    return folder


def proc(root: Path, *, total: int, available: int, cgroup: str = "0::/\n") -> Path:
    """A /proc with meminfo and our own cgroups; sizes in bytes."""
    (root / "self").mkdir(parents=True, exist_ok=True)
    (root / "meminfo").write_text(
        f"MemTotal: {total // 1024} kB\nMemFree: 1024 kB\nMemAvailable: {available // 1024} "
        "kB\nHugePages_Total: 0\n"
    )
    (root / "self/cgroup").write_text(cgroup)
    return root


def huge_pages(root: Path, page: int, *, total: int, free: int, reserved: int = 0) -> Path:
    """A /sys with huge pages of one size."""
    folder = root / f"kernel/mm/hugepages/hugepages-{page // 1024}kB"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nr_hugepages").write_text(f"{total}\n")
    (folder / "free_hugepages").write_text(f"{free}\n")
    (folder / "resv_hugepages").write_text(f"{reserved}\n")
    return root
