"""Segments are sealed, allocated before they are used, zeroed between loans, and watched for holes (I9,
I13)."""

import asyncio
import ctypes
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvhost_server.exits import ExitCode, StartupError
from kvhost_server.locking import Lock
from kvhost_server.pool import Pool
from kvhost_server.populate import Job, Step
from kvhost_server.sizing import Plan
from tests.server.hosts import MIB, cgroup_v2
from tests.support.patterns import pat
from tests.support.processes import children, fd_count
from tests.support.waiting import wait_for_async

SIZE = 2 * MIB
SEGMENTS = 4

MakePool = Callable[..., Pool]


@pytest.fixture
async def make_pool(tmp_path: Path) -> AsyncIterator[MakePool]:
    made: list[Pool] = []

    def make(segments: int = SEGMENTS, **options: object) -> Pool:
        settings = {"lock": Lock.OFF, "wait_s": 0.0, "strict": False, **options}
        lock = settings.pop("lock")
        made.append(
            Pool(Plan(SIZE * segments, SIZE, segments, 0), lock, cgroup_root=str(tmp_path), **settings)  # type: ignore[arg-type]
        )
        return made[-1]

    yield make
    for pool in made:
        await pool.close()


@pytest.fixture
async def pool(make_pool: MakePool) -> Pool:
    """A populated one."""
    pool = make_pool()
    await pool.populate(lambda index: None)
    return pool


def punch_hole(fd: int, offset: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    assert libc.fallocate(fd, 3, offset, length) == 0, os.strerror(ctypes.get_errno())


async def test_segments_become_ready_one_after_the_other_with_all_their_pages(make_pool: MakePool) -> None:
    pool = make_pool()
    assert (pool.populated, pool.capacity_bytes, pool.asked_bytes) == (0.0, SIZE * 4, SIZE * 4)
    ready = []

    def on_ready(index: int) -> None:
        ready.append((index, os.fstat(pool.fd(index)).st_blocks * 512))

    await pool.populate(on_ready)
    assert ready == [(index, SIZE) for index in range(4)]
    assert (pool.populated, pool.populated_bytes, pool.notes) == (1.0, SIZE * 4, [])


async def test_nobody_can_change_a_segments_size_or_its_seals(pool: Pool) -> None:
    for size in (0, SIZE // 2, SIZE * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd(0), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.fd(0), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(pool.fd(0)).st_size == SIZE
    assert not os.get_inheritable(pool.fd(0))


class ScriptedHelper:
    """Says what a helper would that has room for two segments and a half."""

    def __init__(self, job: Job) -> None:
        self._steps = [
            *(Step(kind, index, SIZE) for index in (0, 1) for kind in ("piece", "ready")),
            Step("piece", 2, SIZE // 2),
            Step("waiting", 2, SIZE // 2, 4096, "/some/memory.max"),
            Step("short", 2, SIZE // 2, 8192, "/some/memory.max"),
        ]

    async def __aenter__(self) -> "ScriptedHelper":
        return self

    async def __aexit__(self, *error: object) -> None:
        self._steps.clear()

    async def steps(self) -> AsyncIterator[Step]:
        for step in list(self._steps):
            yield step


async def test_what_fits_in_time_is_kept_and_said(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhost_server.pool.Helper", ScriptedHelper)
    pool = make_pool(wait_s=0.2)
    before = fd_count(os.getpid())
    ready: list[int] = []
    await pool.populate(ready.append)
    assert ready == [0, 1]
    assert (pool.segments, pool.capacity_bytes, pool.populated) == (2, 2 * SIZE, 1.0)
    assert fd_count(os.getpid()) == before - 2
    assert pool.notes == [
        "4MiB of 8MiB (--memory) could be had within 0.2 s (--memory-wait): /some/memory.max leaves 8KiB"
    ]


async def test_less_than_asked_is_an_error_when_strict(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhost_server.pool.Helper", ScriptedHelper)
    with pytest.raises(
        StartupError, match=r"4MiB of 8MiB .* free memory, ask for less, or wait longer"
    ) as caught:
        await make_pool(strict=True).populate(lambda index: None)
    assert caught.value.code is ExitCode.MEMORY_NOW


@pytest.mark.parametrize("strict", [False, True])
async def test_nothing_fits(make_pool: MakePool, tmp_path: Path, strict: bool) -> None:
    cgroup_v2(tmp_path, limit=100 * MIB, current=99 * MIB)
    pool = make_pool(wait_s=0.1, strict=strict)
    with pytest.raises(StartupError) as caught:
        await pool.populate(lambda index: None)
    assert caught.value.code is ExitCode.MEMORY_NOW
    for part in ("0 B of 8MiB (--memory)", "0.1 s (--memory-wait)", f"{tmp_path}/memory.max", "ask for less"):
        assert part in str(caught.value)


async def test_room_that_comes_in_time_is_used(make_pool: MakePool, tmp_path: Path) -> None:
    folder = cgroup_v2(tmp_path, limit=100 * MIB, current=99 * MIB)
    pool = make_pool(wait_s=60.0)
    populating = asyncio.create_task(pool.populate(lambda index: None))
    await wait_for_async(lambda: _helper_of_this_process() is not None, what="the helper")
    (folder / "memory.current").write_text("0")
    await populating
    assert pool.populated == 1.0


async def test_a_helper_that_is_killed_half_way(make_pool: MakePool, tmp_path: Path) -> None:
    cgroup_v2(tmp_path, limit=100 * MIB, current=99 * MIB)
    pool = make_pool(wait_s=60.0)
    populating = asyncio.create_task(pool.populate(lambda index: None))
    helper = await wait_for_async(_helper_of_this_process, what="the helper")
    assert helper is not None
    os.kill(helper, 9)
    with pytest.raises(StartupError) as caught:
        await populating
    assert caught.value.code is ExitCode.MEMORY
    for part in (
        "--memory 8MiB",
        "was ended by signal 9 after 0 B",
        f"{tmp_path}/memory.max",
        "ask for less",
    ):
        assert part in str(caught.value)


async def test_populating_can_be_called_off(make_pool: MakePool, tmp_path: Path) -> None:
    cgroup_v2(tmp_path, limit=100 * MIB, current=99 * MIB)
    pool = make_pool(wait_s=60.0)
    populating = asyncio.create_task(pool.populate(lambda index: None))
    await wait_for_async(_helper_of_this_process, what="the helper")
    populating.cancel()
    with suppress(asyncio.CancelledError):
        await populating
    assert _helper_of_this_process() is None


async def test_a_segment_is_zeroed_without_a_hole_before_it_is_called_clean(pool: Pool) -> None:
    os.pwrite(pool.fd(2), pat("old", 1, SIZE), 0)
    clean: list[tuple[int, bytes, int]] = []

    def on_clean(index: int) -> None:
        clean.append((index, os.pread(pool.fd(2), SIZE, 0), os.fstat(pool.fd(2)).st_blocks * 512))

    pool.clean(2, on_clean)
    assert clean == []  # it happens off the loop
    await wait_for_async(lambda: clean)
    assert clean == [(2, bytes(SIZE), SIZE)]


async def test_flags_that_a_worker_set_do_not_keep_a_segment_from_being_zeroed(pool: Pool) -> None:
    """A descriptor that was sent is the same open file as ours: O_APPEND sends every write to its end."""
    os.pwrite(pool.fd(1), pat("old", 1, SIZE), 0)
    fcntl.fcntl(pool.fd(1), fcntl.F_SETFL, os.O_APPEND)
    clean: list[int] = []
    pool.clean(1, clean.append)
    await wait_for_async(lambda: clean)
    assert os.pread(pool.fd(1), SIZE, 0) == bytes(SIZE)
    assert not pool.notes


async def test_a_hole_is_found_told_once_and_filled(pool: Pool) -> None:
    found: list[int] = []
    watching = asyncio.create_task(pool.watch_holes(found.append, interval_s=0.01))
    try:
        punch_hole(pool.fd(3), 4096, 8192)
        await wait_for_async(lambda: found)
        await wait_for_async(lambda: os.fstat(pool.fd(3)).st_blocks * 512 == SIZE)
        await wait_for_async(lambda: _helper_of_this_process() is None)
        assert found == [3]
        punch_hole(pool.fd(3), 0, SIZE)
        await wait_for_async(lambda: len(found) == 2)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def test_a_hole_that_cannot_be_filled_is_told_once(pool: Pool, tmp_path: Path) -> None:
    found: list[int] = []
    folder = cgroup_v2(tmp_path, limit=100 * MIB, current=100 * MIB)
    watching = asyncio.create_task(pool.watch_holes(found.append, interval_s=0.01))
    try:
        punch_hole(pool.fd(0), 0, SIZE)
        await _next_helper()
        await _next_helper()
        assert found == [0]
        (folder / "memory.current").write_text("0")
        await wait_for_async(lambda: os.fstat(pool.fd(0)).st_blocks * 512 == SIZE)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def test_locked_segments_are_counted_and_unlocked_at_the_end(make_pool: MakePool) -> None:
    before = _locked_kib()
    pool = make_pool(lock=Lock.REQUIRED)
    await pool.populate(lambda index: None)
    assert pool.locked_bytes == SIZE * 4
    assert _locked_kib() - before == SIZE * 4 // 1024
    await pool.close()
    assert _locked_kib() == before


async def test_when_mlock_fails_half_way_nothing_stays_locked(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _locked_kib()
    _fail_mlock_after(2, monkeypatch)
    pool = make_pool(lock=Lock.AUTO)
    await pool.populate(lambda index: None)
    assert (pool.locked_bytes, pool.populated) == (0, 1.0)
    assert _locked_kib() == before
    for part in ("nothing is locked", "8MiB were to be locked", "RLIMIT_MEMLOCK", "LimitMEMLOCK=infinity"):
        assert part in pool.notes[0]


async def test_required_locking_that_fails_ends_the_start(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_mlock_after(1, monkeypatch)
    pool = make_pool(lock=Lock.REQUIRED)
    with pytest.raises(StartupError, match="--lock required: 8MiB were to be locked") as caught:
        await pool.populate(lambda index: None)
    assert caught.value.code is ExitCode.CONFIG


async def test_closing_gives_everything_back(make_pool: MakePool) -> None:
    before = fd_count(os.getpid())
    pool = make_pool()
    assert fd_count(os.getpid()) == before + 4
    await pool.populate(lambda index: None)
    await pool.close()
    assert fd_count(os.getpid()) == before


async def test_without_descriptors_there_is_one_sentence(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.memfd_create
    made: list[int] = []

    def scarce(name: str, flags: int) -> int:
        if len(made) == 2:
            raise OSError(24, "Too many open files")
        made.append(real(name, flags))
        return made[-1]

    monkeypatch.setattr(os, "memfd_create", scarce)
    before = fd_count(os.getpid())
    with pytest.raises(
        StartupError, match=r"segment 3 of 4 .2MiB each. cannot be made: Too many open files; raise"
    ):
        make_pool()
    assert fd_count(os.getpid()) == before


async def test_an_old_kernel_without_noexec_seal_is_served(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & 0x8:
            raise OSError(22, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    pool = make_pool()
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd(0), 0)


def _helper_of_this_process() -> int | None:
    """pid of our populate helper, if one runs."""
    return next(iter(children(os.getpid(), "populate.py")), None)


async def _next_helper() -> None:
    await wait_for_async(lambda: _helper_of_this_process() is not None, what="a helper")
    await wait_for_async(lambda: _helper_of_this_process() is None, what="the helper's end")


def _locked_kib() -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmLck")).split()[1])


def _fail_mlock_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvhost_server import locking

    class Libc:
        left = calls

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def mlock(self, address: int, size: int) -> int:
            if not self.left:
                ctypes.set_errno(12)
                return -1
            self.left -= 1
            result: int = real.mlock(address, size)
            return result

    real = locking._libc
    monkeypatch.setattr(locking, "_libc", Libc())
