"""The room is the least that MemAvailable and every visible cgroup leave (E4)."""

from pathlib import Path

from kvhost_server.room import Surveyor
from tests.server.hosts import MIB, cgroup_v1, cgroup_v2, huge_pages, proc


def surveyor(tmp_path: Path, **host: object) -> Surveyor:
    proc(tmp_path / "proc", **{"total": 1000 * MIB, "available": 600 * MIB, **host})  # type: ignore[arg-type]
    return Surveyor(str(tmp_path / "cgroup"), str(tmp_path / "proc"), str(tmp_path / "sys"))


def test_without_cgroups_the_host_is_the_limit(tmp_path: Path) -> None:
    room = surveyor(tmp_path).measure()
    assert room.tightest.room == 600 * MIB
    assert room.hardest.total == 1000 * MIB
    assert room.tightest.source == f"{tmp_path}/proc/meminfo"


def test_v2_page_cache_counts_as_room(tmp_path: Path) -> None:
    cgroup_v2(tmp_path / "cgroup", limit=100 * MIB, current=40 * MIB, file=30 * MIB)
    room = surveyor(tmp_path).measure()
    assert room.tightest.room == 90 * MIB
    assert room.tightest.source == f"{tmp_path}/cgroup/memory.max"
    assert 80 * MIB <= room.tightest.spare < 90 * MIB
    assert room.hardest.total == 100 * MIB


def test_v2_shared_memory_is_no_page_cache(tmp_path: Path) -> None:
    folder = cgroup_v2(tmp_path / "cgroup", limit=100 * MIB, current=40 * MIB)
    (folder / "memory.stat").write_text(f"file {30 * MIB}\nshmem {20 * MIB}\n")
    assert surveyor(tmp_path).measure().tightest.room == 70 * MIB


def test_v2_every_ancestor_counts_and_high_is_a_limit(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    cgroup_v2(root / "unified", "a/b", limit=500 * MIB)
    cgroup_v2(root / "unified", "a", high=200 * MIB, current=50 * MIB)
    cgroup_v2(root / "unified", "other", limit=1 * MIB)
    tightest = surveyor(tmp_path, cgroup="0::/a/b\n").measure().tightest
    assert (tightest.source, tightest.room) == (f"{root}/unified/a/memory.high", 150 * MIB)


def test_v1_limit_with_the_childrens_page_cache(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    cgroup_v1(root, limit=0x7FFFFFFFFFFFF000)
    cgroup_v1(root, "slice/unit", limit=300 * MIB, usage=200 * MIB, file=50 * MIB)
    tightest = surveyor(tmp_path, cgroup="4:cpu,memory:/slice/unit\n0::/x\n").measure().tightest
    assert (tightest.source, tightest.room) == (f"{root}/memory/slice/unit/memory.limit_in_bytes", 150 * MIB)


def test_in_a_container_the_mount_itself_is_our_cgroup(tmp_path: Path) -> None:
    cgroup_v1(tmp_path / "cgroup", limit=64 * MIB, usage=16 * MIB)
    room = surveyor(tmp_path, cgroup="7:memory:/docker/0123\n").measure()
    assert room.tightest.room == 48 * MIB


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    cgroup_v2(tmp_path / "cgroup", limit=10 * MIB, current=11 * MIB)
    assert surveyor(tmp_path).measure().tightest.spare == 0


def test_reserved_huge_pages_are_not_free(tmp_path: Path) -> None:
    huge_pages(tmp_path / "sys", 2 * MIB, total=10, free=6, reserved=2)
    limit = surveyor(tmp_path).huge_pages(2 * MIB)
    assert (limit.total, limit.room, limit.spare) == (20 * MIB, 8 * MIB, 8 * MIB)
    assert surveyor(tmp_path).huge_pages(1 << 30).total == 0


def test_the_real_host_can_be_measured() -> None:
    room = Surveyor().measure()
    assert 0 < room.tightest.room <= room.hardest.total
