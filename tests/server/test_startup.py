"""Every start that fails says why in one line: what was asked, found, allowed, and what to do (E4, E5, F2,
H6)."""

import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.server.hosts import MIB, cgroup_v2
from tests.support import Daemon, map_count
from tests.support.limits import limited, memory_cgroup


def refused(daemon: Daemon, code: int, *parts: str) -> None:
    """It ended soon (2 s where nothing else runs; tests share their cores), with this code, no socket left,
    and one last line with these parts."""
    assert daemon.wait_end(6.0) == code, daemon.log
    lines = daemon.log.splitlines()
    assert [line.startswith("kvhostd: ") for line in lines].count(True) == 1, daemon.log
    assert lines[-1].startswith("kvhostd: ")
    for part in parts:
        assert part in lines[-1]
    assert not [p for p in daemon.folder.iterdir() if p.suffix == ".sock" and p.is_socket()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.parametrize(
    ("memory", "options", "code", "parts"),
    [
        ("none", [], 64, ["--memory", "'none' is not a size"]),
        ("1MiB", ["--segment-size", "2MiB"], 64, ["--memory 1MiB is too little for a segment of 2MiB"]),
        ("8GiB", ["--segment-size", "4KiB"], 64, ["2097152 of them", "at most 4096", "--segment-size"]),
        ("900TiB", [], 71, ["asks for 900TiB", "/proc/meminfo allows", "ask for less"]),
        (
            "4MiB",
            ["--hugepages", "2MiB"],
            71,
            ["needs 2 huge pages", "vm.nr_hugepages=2", "--hugepages auto"],
        ),
        ("4MiB", ["--hugepages", "1GiB"], 64, ["too little for one page of 1GiB"]),
        ("4MiB", ["--config", "/no/file.toml"], 78, ["--config /no/file.toml cannot be read"]),
        ("4MiB", ["--admin-socket", "/no/such/a.sock"], 69, ["/no/such", "cannot be made: No such file"]),
        ("4MiB", ["--admin-socket", "/tmp/" + "x" * 120], 64, ["125 bytes and at most 107 are allowed"]),
        ("4MiB", ["--handover-socket", "/dev/null"], 69, ["/dev/null exists and is no socket", "remove it"]),
        ("4MiB", ["--admin-socket", "/proc/self/a.sock"], 69, ["/proc/self/a.sock cannot be made"]),
    ],
)
def test_a_start_that_cannot_succeed(
    folder: Path, memory: str, options: list[str], code: int, parts: list[str]
) -> None:
    with Daemon(memory, options, folder=folder, wait=False) as daemon:
        refused(daemon, code, *parts)


def test_a_pool_beyond_the_cgroup_limit(folder: Path) -> None:
    cgroup = cgroup_v2(folder / "cgroup", limit=100 * MIB, current=40 * MIB, file=30 * MIB)
    options = ["--cgroup-root", str(cgroup)]
    with Daemon("120MiB", options, folder=folder, wait=False) as daemon:
        refused(daemon, 71, "asks for 120MiB", f"{cgroup}/memory.max allows 100MiB", "90MiB of it unused")
    with Daemon("80MiB", options, folder=folder) as daemon:
        assert daemon.stop() == 0


def test_less_than_asked_now_is_refused_when_strict(folder: Path) -> None:
    cgroup = cgroup_v2(folder / "cgroup", limit=100 * MIB, current=99 * MIB)
    options = ["--cgroup-root", str(cgroup), "--memory-wait", "0.2", "--strict-memory"]
    with Daemon("64MiB", options, folder=folder, wait=False) as daemon:
        refused(daemon, 75, "of 64MiB (--memory) could be had within 0.2 s", f"{cgroup}/memory.max leaves")


class TestLock:
    def test_auto_serves_unlocked_and_says_what_to_do(self, folder: Path) -> None:
        prefix = limited(memlock=8 * MIB)
        with Daemon("32MiB", ["--lock", "auto"], folder=folder, prefix=prefix) as daemon:
            memory = daemon.status().memory
            assert memory.locked_bytes == 0
            for part in (
                "32MiB were to be locked",
                "RLIMIT_MEMLOCK is 8MiB",
                "LimitMEMLOCK=infinity",
                "--ulimit",
            ):
                assert part in memory.notes[0]
            assert daemon.stop() == 0

    def test_required_ends(self, folder: Path) -> None:
        prefix = limited(memlock=8 * MIB)
        with Daemon("32MiB", ["--lock", "required"], folder=folder, prefix=prefix, wait=False) as daemon:
            refused(daemon, 78, "--lock required: 32MiB were to be locked", "RLIMIT_MEMLOCK is 8MiB")

    def test_within_the_limit_everything_is_locked(self, folder: Path) -> None:
        prefix = limited(memlock=8 * MIB)
        with Daemon("4MiB", ["--lock", "required"], folder=folder, prefix=prefix) as daemon:
            assert daemon.status().memory.locked_bytes == 4 * MIB
            assert map_count(daemon.pid, "memfd:kvhost") == 4
            assert daemon.stop() == 0


def test_huge_pages_that_are_absent_are_reported_with_auto(folder: Path) -> None:
    with Daemon("4MiB", ["--hugepages", "auto"], folder=folder) as daemon:
        memory = daemon.status().memory
        if memory.hugepages == "off":  # a host that has none set aside
            assert "0 of 2 huge pages are free" in memory.notes[0]
        assert daemon.stop() == 0


def test_too_few_open_files_for_the_segments(folder: Path) -> None:
    prefix = limited(nofile=1024)
    with Daemon("64MiB", ["--segment-size", "64KiB"], folder=folder, prefix=prefix, wait=False) as daemon:
        refused(daemon, 78, "1024 segments", "hard limit of 1024", "LimitNOFILE", "--segment-size")


def test_a_small_dev_shm_does_not_matter(folder: Path) -> None:
    """Containers have 64 MB there; segments are memfds, which no mount limits (F1)."""
    script = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        prefix = []  # we may not mount here: then the daemon is started without it
    with Daemon("64MiB", folder=folder, prefix=prefix) as daemon:
        assert daemon.status().memory.populated_bytes == 64 * MIB
        assert daemon.stop() == 0


class TestRealCgroup:
    """With a real memory cgroup where we may make one; the fake ones above test the same decisions
    anywhere."""

    def test_a_pool_beyond_the_limit_is_refused_and_not_killed(self, folder: Path) -> None:
        with memory_cgroup(128 * MIB) as prefix:
            if prefix is None:
                return
            with Daemon("256MiB", folder=folder, prefix=prefix, wait=False) as daemon:
                refused(daemon, 71, "asks for 256MiB", "allows 128MiB in all")

    def test_what_fits_below_the_limit_is_served(self, folder: Path) -> None:
        with memory_cgroup(256 * MIB) as prefix:
            if prefix is None:
                return
            options = ["--memory-wait", "0.2", "--segment-size", "4MiB"]
            with Daemon("240MiB", options, folder=folder, prefix=prefix) as daemon:
                memory = daemon.status().memory
                assert 120 * MIB <= memory.capacity_bytes < 240 * MIB
                assert memory.populated_bytes == memory.capacity_bytes == memory.segments * 4 * MIB
                assert memory.free_segments == memory.segments
                assert "of 240MiB (--memory) could be had within 0.2 s" in memory.notes[0]
                daemon.check_integrity()
                assert daemon.stop() == 0

    def test_a_restart_waits_for_the_memory_that_old_workers_still_map(self, folder: Path) -> None:
        with memory_cgroup(200 * MIB) as prefix:
            if prefix is None:
                return
            options = ["--memory-wait", "60"]
            with Daemon("128MiB", folder=folder, prefix=prefix) as first:
                fds = [f"/proc/{first.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{first.pid}/fd")]
                kept = [os.open(fd, os.O_RDONLY) for fd in fds if "memfd:kvhost-" in os.readlink(fd)]
                first.kill()
            with Daemon("128MiB", options, folder=folder, prefix=prefix, wait=False) as second:
                second.wait_log("waiting for room", 10)
                while kept:
                    os.close(kept.pop())
                second.wait_serving()
                memory = second.status().memory
                assert (memory.capacity_bytes, list(memory.notes)) == (128 * MIB, [])
                assert second.stop() == 0

    def test_a_limit_that_kills_kills_the_helper(self, folder: Path) -> None:
        """The room is hidden from the daemon, as by a cgroup that it cannot see: the kernel steps in."""
        blind = folder / "blind"
        blind.mkdir()
        with memory_cgroup(128 * MIB) as prefix:
            if prefix is None:
                return
            options = ["--cgroup-root", str(blind)]
            with Daemon("256MiB", options, folder=folder, prefix=prefix, wait=False) as daemon:
                assert daemon.wait_end() == 71, daemon.log
                last = daemon.log.splitlines()[-1]
                assert last.startswith("kvhostd: populating --memory 256MiB ")
                assert "was ended by signal 9" in last or "fallocate: Cannot allocate memory" in last
                assert "ask for less, or raise that limit" in last


class TestSocketFiles:
    @pytest.fixture(params=[0o077, 0o000])
    def umask(self, request: pytest.FixtureRequest) -> Iterator[None]:
        before = os.umask(request.param)
        yield
        os.umask(before)

    def test_mode_and_group_are_as_configured_under_any_umask(self, folder: Path, umask: None) -> None:
        inside = folder / "run"
        options = ["--socket-mode", "0660", "--socket-group", "4242", "--admin-group", "4343"]
        inside.mkdir()
        with Daemon("4MiB", options, folder=inside) as daemon:
            for path, group in (
                (daemon.socket, 4242),
                (daemon.handover_socket, 4242),
                (daemon.admin_socket, 4343),
            ):
                found = os.stat(path)
                assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, group)
            assert daemon.stop() == 0

    def test_who_is_not_in_the_group_cannot_connect(self, folder: Path) -> None:
        folder.chmod(0o755)
        for parent in folder.parents:
            if not parent.stat().st_mode & 0o001:
                folder = Path(os.path.realpath("/tmp")) / f"kvhost-group-{os.getpid()}"
                folder.mkdir(mode=0o755)
                break
        with Daemon("4MiB", ["--socket-group", "4242"], folder=folder) as daemon:
            paths = {socket.SOCK_STREAM: daemon.socket, socket.SOCK_SEQPACKET: daemon.handover_socket}
            for kind, path in paths.items():
                assert _connect_as(path, kind, uid=12345, gid=12345) == 13
                assert _connect_as(path, kind, uid=12345, gid=4242) == 0
            assert daemon.stop() == 0


def _connect_as(path: str, kind: socket.SocketKind, uid: int, gid: int) -> int:
    """The errno with which that user's connect ends; 0 when it succeeds."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 255
    try:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        with closing(socket.socket(socket.AF_UNIX, kind)) as client:
            code = client.connect_ex(path)
    finally:
        os._exit(code)
