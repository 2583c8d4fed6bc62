"""Segments: about 128 of them, none too small; what the host can never give is refused before anything is
made."""

from pathlib import Path

import pytest

from kvhost_server.exits import ExitCode, StartupError
from kvhost_server.room import Surveyor
from kvhost_server.sizing import HugePages, default_segment_bytes, plan_pool
from kvhost_server.units import exact_size, format_size, parse_size
from tests.server.hosts import MIB, cgroup_v2, huge_pages, proc

GIB = 1 << 30


@pytest.fixture
def host(tmp_path: Path) -> Surveyor:
    proc(tmp_path / "proc", total=1024 * GIB, available=900 * GIB)
    return Surveyor(str(tmp_path / "cgroup"), str(tmp_path / "proc"), str(tmp_path / "sys"))


@pytest.mark.parametrize(
    ("memory", "segment"),
    [
        (1 * MIB, 256 * 1024),
        (63 * MIB, 63 * MIB // 4),
        (64 * MIB, 4 * MIB),
        (256 * MIB, 16 * MIB),
        (1 * GIB, 64 * MIB),
        (8 * GIB, 64 * MIB),
        (10 * GIB, 80 * MIB),
        (600 * GIB, 4800 * MIB),
        (601 * GIB + 1, 4810 * MIB),
    ],
)
def test_default_segment_size(memory: int, segment: int) -> None:
    assert default_segment_bytes(memory) == segment


@pytest.mark.parametrize(
    "memory", [4096, 65536, 1 * MIB, 5 * MIB + 1, 100 * MIB, GIB - 1, 3 * GIB + 12345, 600 * GIB]
)
def test_segments_are_whole_pages_and_nearly_fill_the_memory(memory: int, host: Surveyor) -> None:
    plan = plan_pool(memory, None, HugePages.OFF, host)
    assert plan.segment_bytes % 4096 == 0
    assert memory - plan.segment_bytes < plan.total_bytes <= memory
    assert plan.segments <= 130


def test_a_limit_smaller_than_the_pool_is_refused_with_asked_allowed_and_source(
    host: Surveyor, tmp_path: Path
) -> None:
    cgroup_v2(tmp_path / "cgroup", limit=100 * MIB, current=40 * MIB, file=30 * MIB)
    assert plan_pool(80 * MIB, None, HugePages.OFF, host).total_bytes == 80 * MIB
    with pytest.raises(StartupError) as caught:
        plan_pool(120 * MIB, None, HugePages.OFF, host)
    assert caught.value.code is ExitCode.MEMORY
    for part in ("120MiB", "100MiB", "90MiB", f"{tmp_path}/cgroup/memory.max", "ask for less"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("memory", "segment", "text"),
    [
        (8 * MIB, 5000, "--segment-size 4.9 KiB is not a whole number of pages"),
        (8 * MIB, 16 * MIB, "--memory 8MiB is too little for a segment of 16MiB"),
        (100, None, "--memory 100 B is too little for one page of 4KiB"),
        (
            8 * GIB,
            4096,
            "makes 2097152 of them, and at most 4096 are allowed; give a --segment-size of at least 2MiB",
        ),
    ],
)
def test_sizes_that_do_not_go_together(memory: int, segment: int | None, text: str, host: Surveyor) -> None:
    with pytest.raises(StartupError, match=text) as caught:
        plan_pool(memory, segment, HugePages.OFF, host)
    assert caught.value.code is ExitCode.USAGE


def test_huge_pages_that_are_there_are_used(host: Surveyor, tmp_path: Path) -> None:
    huge_pages(tmp_path / "sys", 2 * MIB, total=64, free=64)
    for asked in (HugePages.TWO_MIB, HugePages.AUTO):
        plan = plan_pool(100 * MIB, None, asked, host)
        assert (plan.huge_page, plan.hugepages, plan.notes) == (2 * MIB, HugePages.TWO_MIB, ())
        assert plan.segment_bytes % (2 * MIB) == 0


def test_huge_pages_that_are_not_there_are_refused_with_the_remedy(host: Surveyor, tmp_path: Path) -> None:
    huge_pages(tmp_path / "sys", 2 * MIB, total=12, free=10)
    with pytest.raises(StartupError) as caught:
        plan_pool(64 * MIB, None, HugePages.TWO_MIB, host)
    assert caught.value.code is ExitCode.MEMORY
    for part in ("needs 32 huge pages", "has 12, 10 of them free", "vm.nr_hugepages=32", "--hugepages auto"):
        assert part in str(caught.value)
    with pytest.raises(StartupError, match=r"needs 2 huge pages of 1GiB.*hugepagesz=1G hugepages=2"):
        plan_pool(2 * GIB, None, HugePages.ONE_GIB, host)


def test_auto_falls_back_to_ordinary_pages_and_says_so(host: Surveyor, tmp_path: Path) -> None:
    huge_pages(tmp_path / "sys", 2 * MIB, total=12, free=10)
    plan = plan_pool(64 * MIB, None, HugePages.AUTO, host)
    assert (plan.huge_page, plan.hugepages) == (0, HugePages.OFF)
    assert "10 of 32 huge pages are free" in plan.notes[0]


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * GIB), ("1.5 GiB", 3 * GIB // 2), ("4096", 4096), ("2mb", 2_000_000), ("3Ki", 3072)],
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(exact_size(size)) == size


@pytest.mark.parametrize("text", ["", "GiB", "8G", "-1GiB", "1e9", "0", "9" * 30, "1GiB1", "٣GiB", "2000TiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_sizes_are_written_for_people() -> None:
    assert [format_size(n) for n in (512, 3 * MIB, 1536 * MIB)] == ["512 B", "3MiB", "1.5 GiB"]
    assert exact_size(1536 * MIB + 1) == str(1536 * MIB + 1)
