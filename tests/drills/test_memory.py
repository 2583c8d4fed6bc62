"""Drill 10: memory that is not there, not allowed, taken away or still held by somebody else.

A start that cannot succeed is one line on stderr and a documented exit code, before READY; a fallback is
reported. Nobody dies of SIGBUS: a stage fails when one of its actors does (I9, E4, E5, F1, F2, F14, H6).
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvhost_server.exits import ExitCode
from tests.drills.scale import Record, rounds
from tests.drills.stage import Process, Stage
from tests.server.hosts import MIB, cgroup_v1, cgroup_v2
from tests.support import Daemon, children, process_state, wait_for
from tests.support.cgroups import MemoryCgroup
from tests.support.limits import limited
from tests.support.users import as_user, open_folder

STRANGER = 4243
END_WITHIN_S = 8.0
"""Two seconds where nothing else runs; tests share their cores."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as open_stage:
        yield open_stage


@pytest.fixture
def engine(stage: Stage) -> Iterator[Process]:
    actor = stage.start()
    yield actor
    actor.close()


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder of the stranger's own, for sockets."""
    folder = open_folder()
    if os.geteuid() == 0:
        os.chown(folder, STRANGER, STRANGER)
    yield folder
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Failure:
    """A start that cannot succeed, and the four things its one line must say."""

    memory: str
    options: list[str]
    code: ExitCode
    asked: str
    available: str
    fix: str
    prefix: tuple[str, ...] = ()
    folder: Path | None = None


def _nested_limit(root: Path) -> Path:
    """A host whose limit stands not in our own cgroup but two levels above it, as /proc names our place."""
    own = next(
        (
            line.split(":", 2)[2].strip("/")
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        ),
        "",
    )
    cgroup_v2(root, limit=64 * MIB, current=MIB)
    if own:
        cgroup_v2(root, own, limit="max", current=MIB)
    return root


def _huge_pages_of_the_host(size: str) -> int:
    try:
        return int(Path(f"/sys/kernel/mm/hugepages/hugepages-{size}kB/nr_hugepages").read_text())
    except OSError:
        return 0


FAILURES: dict[str, Callable[[Path], Failure]] = {
    "cgroup v2 limit below the pool": lambda folder: Failure(
        "120MiB",
        ["--cgroup-root", str(cgroup_v2(folder / "c", limit=100 * MIB, current=40 * MIB, file=30 * MIB))],
        ExitCode.MEMORY,
        "--memory asks for 120MiB",
        f"{folder}/c/memory.max allows 100MiB in all (90MiB of it unused)",
        "ask for less, or raise that limit",
    ),
    "cgroup v1 limit below the pool": lambda folder: Failure(
        "120MiB",
        ["--cgroup-root", str(cgroup_v1(folder / "c", limit=64 * MIB).parent)],
        ExitCode.MEMORY,
        "--memory asks for 120MiB",
        f"{folder}/c/memory/memory.limit_in_bytes allows 64MiB",
        "ask for less, or raise that limit",
    ),
    "a limit further up the tree": lambda folder: Failure(
        "100MiB",
        ["--cgroup-root", str(_nested_limit(folder / "c"))],
        ExitCode.MEMORY,
        "--memory asks for 100MiB",
        f"{folder}/c/memory.max allows 64MiB",
        "raise that limit",
    ),
    "memory.high, beyond which the kernel stalls": lambda folder: Failure(
        "100MiB",
        ["--cgroup-root", str(cgroup_v2(folder / "c", limit=200 * MIB, high=50 * MIB))],
        ExitCode.MEMORY,
        "--memory asks for 100MiB",
        f"{folder}/c/memory.high allows 50MiB",
        "raise that limit",
    ),
    "no room now, and less is not accepted": lambda folder: Failure(
        "64MiB",
        [
            *("--cgroup-root", str(cgroup_v2(folder / "c", limit=100 * MIB, current=99 * MIB))),
            *("--memory-wait", "0.2", "--strict-memory"),
        ],
        ExitCode.MEMORY_NOW,
        "of 64MiB (--memory) could be had within 0.2 s (--memory-wait)",
        f"{folder}/c/memory.max leaves",
        "free memory, ask for less, or wait longer",
    ),
    "no room at all now": lambda folder: Failure(
        "64MiB",
        [
            *("--cgroup-root", str(cgroup_v2(folder / "c", limit=100 * MIB, current=100 * MIB))),
            *("--memory-wait", "0"),
        ],
        ExitCode.MEMORY_NOW,
        "0 B of 64MiB (--memory) could be had",
        f"{folder}/c/memory.max leaves 0 B",
        "free memory, ask for less, or wait longer",
    ),
    "more than the host has": lambda folder: Failure(
        "900TiB",
        [],
        ExitCode.MEMORY,
        "--memory asks for 900TiB",
        "/proc/meminfo allows",
        "ask for less, or raise that limit",
    ),
    "huge pages of 2 MiB that are not set aside": lambda folder: Failure(
        f"{2 * (_huge_pages_of_the_host('2048') + 8)}MiB",
        ["--hugepages", "2MiB", "--segment-size", "2MiB"],
        ExitCode.MEMORY,
        "--hugepages 2MiB with --memory",
        f"the host has {_huge_pages_of_the_host('2048')}",
        "reserve them with 'sysctl vm.nr_hugepages=",
    ),
    "huge pages of 1 GiB that are not set aside": lambda folder: Failure(
        f"{_huge_pages_of_the_host('1048576') + 1}GiB",
        ["--hugepages", "1GiB", "--segment-size", "1GiB"],
        ExitCode.MEMORY,
        "--hugepages 1GiB with --memory",
        f"the host has {_huge_pages_of_the_host('1048576')}",
        "'hugepagesz=1G hugepages=",
    ),
    "locking required, as a user who may lock little": lambda folder: Failure(
        "32MiB",
        ["--lock", "required"],
        ExitCode.CONFIG,
        "--lock required: 32MiB were to be locked",
        "RLIMIT_MEMLOCK is 8MiB",
        "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 for a container, or use --lock off",
        (*limited(memlock=8 * MIB), *as_user(STRANGER, STRANGER)),
        folder,
    ),
    "a segment larger than the pool": lambda folder: Failure(
        "1MiB",
        ["--segment-size", "2MiB"],
        ExitCode.USAGE,
        "--memory 1MiB",
        "too little for a segment of 2MiB",
        "give more",
    ),
    "more segments than there may be": lambda folder: Failure(
        "8GiB",
        ["--segment-size", "4KiB"],
        ExitCode.USAGE,
        "--memory 8GiB in segments of 4KiB",
        "at most 4096 are allowed",
        "give a --segment-size of at least",
    ),
    "fewer open files than segments": lambda folder: Failure(
        "64MiB",
        ["--segment-size", "64KiB"],
        ExitCode.CONFIG,
        "1024 segments",
        "the hard limit of 1024 allows",
        "raise it (LimitNOFILE), or give a larger --segment-size",
        tuple(limited(nofile=1024)),
    ),
    "a folder in which a user may not write": lambda folder: Failure(
        "4MiB",
        ["--socket", "/proc/1/kvhostd.sock"],
        ExitCode.UNAVAILABLE,
        "/proc/1/kvhostd.sock",
        "cannot be opened",
        "",
        tuple(as_user(STRANGER, STRANGER)),
        folder,
    ),
}


class TestStarts:
    @pytest.mark.parametrize("name", FAILURES)
    def test_a_start_that_fails_is_one_line(self, name: str, theirs: Path) -> None:
        failure = FAILURES[name](theirs)
        with Daemon(
            failure.memory, failure.options, folder=theirs, prefix=failure.prefix, wait=False
        ) as daemon:
            assert daemon.wait_end(END_WITHIN_S) == failure.code, daemon.log
            line = the_one_line(daemon)
            for part in (failure.asked, failure.available, failure.fix):
                assert part in line
        assert not [path for path in theirs.iterdir() if path.is_socket()]

    def test_a_real_limit_below_the_pool(self) -> None:
        """Never killed (137), never more than one line, whatever the ratio."""
        if not MemoryCgroup.may_be_made():
            return
        with MemoryCgroup(128 * MIB) as cgroup, Record("10 real limit") as record:
            for memory in (129, 192, 256, 4096):
                with Daemon(f"{memory}MiB", prefix=cgroup.prefix, wait=False) as daemon:
                    assert daemon.wait_end(END_WITHIN_S) == ExitCode.MEMORY, daemon.log
                    line = the_one_line(daemon)
                    assert f"--memory asks for {memory}MiB" in line or f"{memory // 1024}GiB" in line
                    assert f"{cgroup.folder.name}/memory" in line and "allows 128MiB in all" in line
                record.rounds += 1

    def test_a_limit_that_nobody_can_see_kills_the_helper_and_not_the_daemon(self, tmp_path: Path) -> None:
        if not MemoryCgroup.may_be_made():
            return
        with MemoryCgroup(128 * MIB) as cgroup, Record("10 unseen limit") as record:
            for _ in range(rounds(1, 12)):
                options = ["--cgroup-root", str(tmp_path)]
                with Daemon("192MiB", options, prefix=cgroup.prefix, wait=False) as daemon:
                    assert daemon.wait_end(20.0) == ExitCode.MEMORY, daemon.log
                    line = the_one_line(daemon)
                    assert "populating --memory 192MiB" in line
                    assert "was ended by signal 9" in line or "fallocate: Cannot allocate memory" in line
                record.rounds += 1


class TestFallbacks:
    def test_locking_if_it_can_be_had(self, theirs: Path, engine: Process) -> None:
        """As a real user without CAP_IPC_LOCK: unlocked, with a note that says what to do, and serving."""
        prefix = [*limited(memlock=8 * MIB), *as_user(STRANGER, STRANGER)]
        with Daemon("32MiB", ["--lock", "auto"], folder=theirs, prefix=prefix) as daemon:
            memory = daemon.status().memory
            assert memory.locked_bytes == 0
            (note,) = memory.notes
            for part in ("32MiB were to be locked", "RLIMIT_MEMLOCK is 8MiB", "LimitMEMLOCK=infinity"):
                assert part in note
            use(engine, daemon)
            assert daemon.stop() == 0
        prefix = [*limited(memlock=8 * MIB), *as_user(STRANGER, STRANGER)]
        with Daemon("4MiB", ["--lock", "required"], folder=theirs, prefix=prefix) as daemon:
            assert daemon.status().memory.locked_bytes == 4 * MIB
            assert daemon.stop() == 0

    def test_huge_pages_if_they_can_be_had(self, engine: Process) -> None:
        memory = f"{2 * (_huge_pages_of_the_host('2048') + 8)}MiB"
        with Daemon(memory, ["--hugepages", "auto"]) as daemon:
            shown = daemon.status().memory
            assert shown.hugepages == "off"
            (note,) = shown.notes
            assert "--hugepages auto: ordinary pages, because" in note
            assert "huge pages are free (/sys/kernel/mm/hugepages/" in note
            use(engine, daemon)
            assert daemon.stop() == 0

    @pytest.mark.parametrize(
        "script",
        [
            pytest.param('mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', id="64 MiB"),
            pytest.param('umount -l /dev/shm; exec "$@"', id="absent"),
            pytest.param('mount -t tmpfs -o size=4k,ro none /dev/shm && exec "$@"', id="read only"),
        ],
    )
    def test_dev_shm_does_not_matter(self, script: str, engine: Process) -> None:
        """Containers have 64 MiB there, or nothing. Segments are memfds, which no mount limits (F1)."""
        prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
            prefix = []  # we may not mount here: then the same without
        with Daemon("128MiB", ["--segment-size", "8MiB"], prefix=prefix) as daemon:
            assert daemon.status().memory.populated_bytes == 128 * MIB
            use(engine, daemon)
            assert daemon.stop() == 0


class TestHalfWay:
    def test_a_helper_that_is_killed(self, tmp_path: Path) -> None:
        """Room is there, then taken away when a part is populated; then the helper is killed."""
        with Record("10 helper killed") as record:
            for number in range(rounds(2, 24)):
                host = cgroup_v2(tmp_path / str(number), limit=1024 * MIB, current=1024 * MIB)
                options = ["--cgroup-root", str(host), "--segment-size", "4MiB", "--memory-wait", "60"]
                with Daemon("768MiB", options, wait=False) as daemon:
                    daemon.wait_log("waiting for room", 30.0)
                    (helper,) = children(daemon.pid, "populate.py")
                    (host / "memory.current").write_text("0")
                    part = record.random.randrange(1, 200) * MIB
                    wait_for(lambda d=daemon, p=part: d.status().memory.populated_bytes >= p, 20.0)  # type: ignore[misc]
                    (host / "memory.current").write_text(str(1024 * MIB))
                    wait_for(lambda d=daemon: d.log.count("waiting for room") > 1, 20.0)  # type: ignore[misc]
                    os.kill(helper, record.random.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)))
                    assert daemon.wait_end(END_WITHIN_S) == ExitCode.MEMORY, daemon.log
                    line = the_one_line(daemon)
                    assert "populating --memory 768MiB was ended by signal" in line
                    assert "after 0 B" not in line
                    assert f"{host}/memory.max leaves 0 B" in line
                    assert "ask for less, or raise that limit" in line
                record.rounds += 1

    def test_a_helper_that_hangs_does_not_keep_the_daemon(self, tmp_path: Path) -> None:
        host = cgroup_v2(tmp_path / "c", limit=128 * MIB, current=128 * MIB)
        with Daemon("96MiB", ["--cgroup-root", str(host)], wait=False) as daemon:
            (helper,) = wait_for(lambda: children(daemon.pid, "populate.py"), 10.0)
            os.kill(helper, signal.SIGSTOP)
            assert daemon.stop() == 0
            wait_for(lambda: process_state(helper) in ("", "Z"), 5.0, "the helper to be gone")

    def test_a_daemon_that_is_killed_takes_its_helper_along(self, tmp_path: Path) -> None:
        host = cgroup_v2(tmp_path / "c", limit=128 * MIB, current=128 * MIB)
        with Daemon("96MiB", ["--cgroup-root", str(host)], wait=False) as daemon:
            (helper,) = wait_for(lambda: children(daemon.pid, "populate.py"), 10.0)
            daemon.kill()
            wait_for(lambda: process_state(helper) in ("", "Z"), 5.0, "the helper to be gone")


class TestCharge:
    def test_the_pool_is_charged_to_the_daemon(self, stage: Stage) -> None:
        """An engine with a small limit writes all of a large pool: its pages are there already (F14)."""
        if not MemoryCgroup.may_be_made():
            return
        actor = stage.start()
        with MemoryCgroup(256 * MIB) as ours, MemoryCgroup(32 * MIB) as engines:
            engines.take(actor.pid)
            with Daemon("192MiB", ["--segment-size", "8MiB"], prefix=ours.prefix) as daemon:
                assert ours.usage >= 192 * MIB
                actor.call("engine", socket=daemon.socket)
                written = actor.call("store", names=[f"c{n}" for n in range(1500)], timeout_s=60.0)
                assert (
                    written == 1500
                )  # 92 MiB of them, and what else it needs, in 96 MiB: not if they counted
                assert engines.usage < 90 * MIB
                assert actor.call("wrong", names=[f"c{n}" for n in range(1000, 1500)]) == []
            actor.close()

    def test_a_squeeze_after_ready_hurts_no_engine(self, stage: Stage) -> None:
        """The limit sinks below what is in use: the kernel refuses (v1) or kills the daemon (v2), and engines
        go on (I8, I9)."""
        if not MemoryCgroup.may_be_made():
            return
        actor = stage.start()
        with MemoryCgroup(256 * MIB) as cgroup, Daemon("96MiB", prefix=cgroup.prefix) as daemon:
            actor.call("engine", socket=daemon.socket)
            actor.call("store", names=["a", "b", "c"])
            squeezed = True
            try:
                cgroup.limit(48 * MIB)
            except OSError:
                squeezed = False
            if not squeezed or daemon.returncode is None:
                assert actor.call("wrong", names=["a", "b", "c"]) == []
                daemon.check_integrity()
            actor.close()


class TestRestart:
    """A daemon comes back while a worker still maps the old pool, and there is memory for one pool only."""

    @pytest.mark.parametrize("patient", [True, False], ids=["the worker lets go in time", "it is stopped"])
    def test_with_memory_for_one_pool(self, stage: Stage, patient: bool) -> None:
        if not MemoryCgroup.may_be_made():
            return
        options = ["--segment-size", "8MiB", "--memory-wait", "20" if patient else "0.5"]
        with MemoryCgroup(224 * MIB) as cgroup, Record(f"10 restart, {patient=}") as record:
            for _ in range(rounds(1, 12)):
                with Daemon("128MiB", ["--segment-size", "128MiB"], prefix=cgroup.prefix) as first:
                    old = attached(stage, first)
                    old.stop()
                    first.kill()
                    assert cgroup.usage >= 128 * MIB
                    with Daemon(
                        "128MiB", options, folder=first.folder, prefix=cgroup.prefix, wait=False
                    ) as second:
                        if patient:
                            second.wait_log("waiting for room", 30.0)
                            assert second.returncode is None
                            old.go_on()
                        second.wait_serving()
                        memory = second.status().memory
                        assert memory.populated_bytes == memory.capacity_bytes
                        assert memory.segments == memory.free_segments > 0
                        if patient:
                            assert memory.capacity_bytes == 128 * MIB
                            assert not memory.notes
                        else:
                            assert memory.capacity_bytes < 128 * MIB
                            (note,) = memory.notes
                            assert "of 128MiB (--memory) could be had within 0.5 s" in note
                            old.go_on()
                        # The old worker unmaps by itself, and nobody is hurt.
                        unmapped(old)
                        new = stage.start()
                        use(new, second)
                        new.close()
                        second.check_integrity()
                    old.close()
                wait_for(lambda: cgroup.usage < 32 * MIB, 10.0, "the memory of both pools to be back")
                record.rounds += 1

    def test_strict_does_not_start_beside_a_pool_that_is_held(self, stage: Stage) -> None:
        if not MemoryCgroup.may_be_made():
            return
        options = ["--memory-wait", "0.3", "--strict-memory"]
        with (
            MemoryCgroup(160 * MIB) as cgroup,
            Daemon("96MiB", ["--segment-size", "96MiB"], prefix=cgroup.prefix) as first,
        ):
            old = attached(stage, first)
            old.stop()
            first.kill()
            with Daemon("96MiB", options, folder=first.folder, prefix=cgroup.prefix, wait=False) as second:
                assert second.wait_end(END_WITHIN_S) == ExitCode.MEMORY_NOW, second.log
                line = the_one_line(second)
                assert "of 96MiB (--memory) could be had within 0.3 s" in line
                assert "free memory, ask for less, or wait longer" in line
            old.close()


def attached(stage: Stage, daemon: Daemon) -> Process:
    """An engine that maps the one segment of this daemon, and has stored something in it."""
    actor = stage.start()
    actor.call("engine", socket=daemon.socket)
    assert actor.call("store", names=["old1", "old2"]) == 2
    assert actor.call("maps") == 1
    return actor


def unmapped(actor: Process) -> None:
    wait_for(lambda: actor.call("maps") == 0, 10.0, "the old pool to be unmapped")


def use(actor: Process, daemon: Daemon) -> None:
    """An engine stores and reads: every page of what it uses is really there."""
    names = [f"used{n}" for n in range(8)]
    actor.call("engine", socket=daemon.socket)
    assert actor.call("store", names=names) == len(names)
    assert actor.call("wrong", names=names) == []
    actor.call("close_engine")


def the_one_line(daemon: Daemon) -> str:
    """What the daemon said when it gave up: one line, the last, and no traceback; it had not served."""
    lines = daemon.log.splitlines()
    said = [line for line in lines if line.startswith("kvhostd: ")]
    assert len(said) == 1 and lines[-1] == said[0], daemon.log
    assert "Traceback" not in daemon.log
    assert "state: serving" not in daemon.log
    return said[0]
