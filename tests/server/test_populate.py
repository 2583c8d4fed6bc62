"""The helper allocates every page, looks at the room before each piece, and says what it did (I9, E5)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost_server import populate
from kvhost_server.helper import Helper, HelperFailed, job_for
from kvhost_server.populate import Job, Step
from tests.server.hosts import MIB, cgroup_v2
from tests.support.patterns import pat
from tests.support.waiting import wait_for

SIZE = 4 * MIB


@pytest.fixture
def segment() -> Iterator[int]:
    fd = os.memfd_create("kvhost-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def job(fd: int, tmp_path: Path, *, wait_s: float = 0.0, zero: bool = False, size: int = SIZE) -> Job:
    return job_for([(7, fd, size)], piece=MIB, page=0, wait_s=wait_s, cgroup_root=str(tmp_path), zero=zero)


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


async def run(job: Job) -> list[Step]:
    async with Helper(job) as helper:
        return [step async for step in helper.steps()]


async def test_every_page_is_allocated_piece_by_piece(segment: int, tmp_path: Path) -> None:
    steps = await run(job(segment, tmp_path))
    assert [(s.kind, s.done) for s in steps] == [*(("piece", n * MIB) for n in (1, 2, 3, 4)), ("ready", SIZE)]
    assert {s.segment for s in steps} == {7}
    assert allocated(segment) == SIZE


async def test_bytes_that_are_there_stay(segment: int, tmp_path: Path) -> None:
    content = pat("there", 0, SIZE)
    os.pwrite(segment, content, 0)
    await run(job(segment, tmp_path))
    assert os.pread(segment, SIZE, 0) == content


async def test_zero_overwrites_and_makes_no_hole(segment: int, tmp_path: Path) -> None:
    os.pwrite(segment, pat("old", 0, SIZE), 0)
    await run(job(segment, tmp_path, zero=True))
    assert os.pread(segment, SIZE, 0) == bytes(SIZE)
    assert allocated(segment) == SIZE


async def test_without_room_it_stops_before_the_piece(segment: int, tmp_path: Path) -> None:
    cgroup_v2(tmp_path, limit=10 * MIB, current=9 * MIB + MIB // 2)
    steps = await run(job(segment, tmp_path))
    assert [s.kind for s in steps] == ["waiting", "short"]
    assert steps[-1].source == f"{tmp_path}/memory.max"
    assert 0 < steps[-1].room < MIB
    assert allocated(segment) == 0


async def test_it_goes_on_when_room_comes(segment: int, tmp_path: Path) -> None:
    folder = cgroup_v2(tmp_path, limit=10 * MIB, current=9 * MIB + MIB // 2)
    kinds = []
    async with Helper(job(segment, tmp_path, wait_s=30.0)) as helper:
        async for step in helper.steps():
            kinds.append(step.kind)
            if step.kind == "waiting":
                (folder / "memory.max").write_text(f"{100 * MIB}")
    assert kinds == ["waiting", *["piece"] * 4, "ready"]


async def test_pages_that_are_there_need_no_room(segment: int, tmp_path: Path) -> None:
    os.posix_fallocate(segment, 0, SIZE)
    cgroup_v2(tmp_path, limit=10 * MIB, current=10 * MIB)
    assert (await run(job(segment, tmp_path, zero=True)))[-1].kind == "ready"


@pytest.mark.parametrize(("flags", "call"), [(os.O_RDONLY, "fallocate: Bad file descriptor (errno 9)")])
async def test_a_failing_system_call_is_named(segment: int, tmp_path: Path, flags: int, call: str) -> None:
    read_only = os.open(f"/proc/self/fd/{segment}", flags)
    try:
        steps = await run(job(read_only, tmp_path))
    finally:
        os.close(read_only)
    assert [(s.kind, s.error) for s in steps] == [("failed", call)]


async def test_a_segment_larger_than_its_file_fails_in_words(segment: int, tmp_path: Path) -> None:
    import fcntl

    fcntl.fcntl(segment, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    steps = await run(job(segment, tmp_path, size=SIZE + MIB))
    assert steps[-1].kind == "failed"
    assert "fallocate: Operation not permitted" in steps[-1].error
    assert steps[-1].done == SIZE


async def test_a_killed_helper_is_noticed(segment: int, tmp_path: Path) -> None:
    cgroup_v2(tmp_path, limit=10 * MIB, current=10 * MIB)
    helper = Helper(job(segment, tmp_path, wait_s=30.0))
    with pytest.raises(HelperFailed, match="was ended by signal 9"):
        async with helper:
            async for step in helper.steps():
                assert step.kind == "waiting"
                os.kill(helper.pid, 9)


async def test_a_helper_is_the_first_to_be_killed_when_memory_runs_out(segment: int, tmp_path: Path) -> None:
    cgroup_v2(tmp_path, limit=10 * MIB, current=10 * MIB)
    async with Helper(job(segment, tmp_path, wait_s=30.0)) as helper:
        async for _ in helper.steps():
            assert Path(f"/proc/{helper.pid}/oom_score_adj").read_text().strip() == "1000"
            break


async def test_leaving_early_ends_the_helper(segment: int, tmp_path: Path) -> None:
    cgroup_v2(tmp_path, limit=10 * MIB, current=10 * MIB)
    async with Helper(job(segment, tmp_path, wait_s=30.0)) as helper:
        async for _ in helper.steps():
            break
    assert not Path(f"/proc/{helper.pid}").exists()


async def test_a_job_that_is_no_job_gives_its_last_words(segment: int, tmp_path: Path) -> None:
    orphan = job(segment, tmp_path)
    with pytest.raises(HelperFailed, match="ended with exit code 1"):
        await run(Job(orphan.segments, orphan.piece, 0, 0.0, False, parent=1, cgroup_root=str(tmp_path)))


def test_the_helper_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed, so that it cannot end the helper itself."""
    cgroup_v2(tmp_path / "cgroup", limit=10 * MIB, current=10 * MIB)
    script = (
        "import os, subprocess, sys\n"
        "from kvhost_server import populate\n"
        "from kvhost_server.helper import job_for\n"
        "fd = os.memfd_create('x'); os.ftruncate(fd, 1 << 20)\n"
        "job = job_for([(0, fd, 1 << 20)], piece=1 << 20, page=0, wait_s=60, "
        f"cgroup_root={str(tmp_path / 'cgroup')!r})\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', populate.__file__], "
        "stdin=subprocess.PIPE, pass_fds=[fd],\n"
        "    stdout=subprocess.PIPE)\n"
        "child.stdin.write(job.to_json().encode() + b'\\n'); child.stdin.close()\n"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        helper = int(parent.stdout.readline())
    assert Path(f"/proc/{helper}").exists()
    parent.kill()
    parent.wait(10)
    wait_for(lambda: not Path(f"/proc/{helper}").exists(), 5, "the helper to die")


def test_the_helper_needs_the_standard_library_alone() -> None:
    script = (
        "import sys; sys.argv = ['populate.py']; sys.path.append(sys.stdin.read())\n"
        "import kvhost_server.populate\n"
        "outside = [n for n in sys.modules if n.split('.')[0] in ('grpc', 'google', 'numpy', 'click', "
        "'site')]\n"
        "sys.exit(str(outside) if outside else 0)\n"
    )
    root = str(Path(populate.__file__).parents[1])
    command = [sys.executable, "-I", "-S", "-c", script]
    ended = subprocess.run(command, input=root, text=True, capture_output=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stderr
