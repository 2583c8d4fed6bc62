"""Who reaches which socket: modes, groups and folders of a running daemon, tried as other users (F8).

Root alone can become somebody else; elsewhere only what does not need that is tried.
"""

import errno
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvhost_client import probe
from tests.server.rawclient import RawClient, scheduler_hello
from tests.support import Daemon, wait_for
from tests.support.users import as_user, fork_as, open_folder

ENGINES, PEOPLE, STRANGERS = 4242, 4343, 4444
USER = 12345
TIME_S = 5.0


@pytest.fixture(params=[0o000, 0o077, 0o177], ids=["umask 000", "umask 077", "umask 177"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@contextmanager
def daemon_in(folder: Path, *options: str) -> Iterator[Daemon]:
    """A daemon whose sockets stand in `folder`/run, which it makes itself."""
    main = folder / "run" / "k.sock"
    with Daemon("4MiB", ["--socket", str(main), *options], folder=folder, wait=False) as daemon:
        daemon.socket, daemon.admin_socket, daemon.handover_socket = (
            str(main.with_name(name)) for name in ("k.sock", "k-admin.sock", "k-handover.sock")
        )
        daemon.wait_serving()
        yield daemon


@pytest.fixture
def folder() -> Iterator[Path]:
    made = open_folder()
    yield made
    shutil.rmtree(made)


def connects(path: str) -> int:
    kind = socket.SOCK_SEQPACKET if "handover" in path else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as client:
        return client.connect_ex(path)


def tried_as(user: int, groups: list[int], work: Callable[[], object]) -> None:
    child = fork_as(user, groups[0], work, groups[1:])
    assert os.waitpid(child, 0)[1] == 0, "see stderr"


def speaks_grpc(path: str) -> None:
    """It can be connected to, and what answers there is a gRPC server."""
    assert connects(path) == 0
    assert probe.foreign(path, TIME_S) is None
    assert "HTTP" not in str(probe.foreign(path, TIME_S, but="that answers"))


def is_shut(path: str) -> None:
    assert connects(path) == errno.EACCES


def gets_a_ticket(path: str) -> None:
    with RawClient(path) as client:
        client.send(scheduler_hello())
        answer = client.receive_blocking(TIME_S)
    assert answer is not None and answer.HasField("ticket"), answer


def test_nobody_but_us_without_groups(folder: Path, umask: int) -> None:
    with daemon_in(folder) as daemon:
        run = folder / "run"
        assert stat.S_IMODE(run.stat().st_mode) == 0o750
        for path in (daemon.socket, daemon.admin_socket, daemon.handover_socket):
            found = os.stat(path)
            assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, os.getegid())
            if os.geteuid() == 0:
                tried_as(USER, [STRANGERS], lambda p=path: is_shut(p))  # type: ignore[misc]
        assert daemon.stop() == 0


def test_each_group_reaches_its_own_sockets(folder: Path, umask: int) -> None:
    """Also where they share a folder, which belongs to one of the groups only."""
    if os.geteuid() != 0:
        return
    options = ["--socket-group", str(ENGINES), "--admin-group", str(PEOPLE)]
    with daemon_in(folder, *options) as daemon:
        cache, admin, handover = daemon.socket, daemon.admin_socket, daemon.handover_socket
        for path, group in ((cache, ENGINES), (admin, PEOPLE), (handover, ENGINES)):
            found = os.stat(path)
            assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, group)
        run = (folder / "run").stat()
        assert (stat.S_IMODE(run.st_mode), run.st_gid) == (0o751, ENGINES)

        def engine() -> None:
            speaks_grpc(cache)
            gets_a_ticket(handover)
            is_shut(admin)

        def person() -> None:
            speaks_grpc(admin)
            is_shut(cache)
            is_shut(handover)
            with pytest.raises(PermissionError):
                os.listdir(folder / "run")

        def stranger() -> None:
            for path in (cache, admin, handover):
                is_shut(path)

        for groups, work in (
            ([ENGINES], engine),
            ([STRANGERS, ENGINES], engine),  # by a supplementary group
            ([PEOPLE], person),
            ([STRANGERS, PEOPLE], person),
            ([STRANGERS], stranger),
        ):
            tried_as(USER, groups, work)
        assert daemon.stop() == 0


def test_one_group_for_both_keeps_the_folder_shut(folder: Path) -> None:
    if os.geteuid() != 0:
        return
    with daemon_in(folder, "--socket-group", str(ENGINES), "--admin-group", str(ENGINES)) as daemon:
        run = (folder / "run").stat()
        assert (stat.S_IMODE(run.st_mode), run.st_gid) == (0o750, ENGINES)
        tried_as(USER, [ENGINES], lambda: speaks_grpc(daemon.admin_socket))
        assert daemon.stop() == 0


def test_the_mode_can_be_narrowed(folder: Path, umask: int) -> None:
    options = ["--socket-mode", "0600", *(["--socket-group", str(ENGINES)] if os.geteuid() == 0 else [])]
    with daemon_in(folder, *options) as daemon:
        for path in (daemon.socket, daemon.admin_socket, daemon.handover_socket):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            if os.geteuid() == 0:
                tried_as(USER, [ENGINES], lambda p=path: is_shut(p))  # type: ignore[misc]
        assert daemon.stop() == 0


def test_there_is_no_moment_at_which_others_could_connect(folder: Path, umask: int) -> None:
    """A stranger tries without pause from before the start until the daemon serves."""
    if os.geteuid() != 0:
        return
    ready, done = os.pipe(), os.pipe()
    run = folder / "run"
    run.mkdir()
    run.chmod(0o755)  # so that only the sockets' own modes count
    paths = [str(run / name) for name in ("k.sock", "k-admin.sock", "k-handover.sock")]

    def besiege() -> None:
        os.set_blocking(done[0], False)
        os.write(ready[1], b"x")
        seen: set[int] = set()
        while True:
            seen.update(map(connects, paths))
            try:
                os.read(done[0], 1)
                break
            except BlockingIOError:
                continue
        assert seen == {errno.ENOENT, errno.EACCES}, seen

    child = fork_as(USER, STRANGERS, besiege)
    os.read(ready[0], 1)
    for _ in range(3):
        with daemon_in(folder, "--socket-group", str(ENGINES)) as daemon:
            assert daemon.stop() == 0
    os.write(done[1], b"x")
    assert os.waitpid(child, 0)[1] == 0, "a stranger got in; see stderr"
    for fd in (*ready, *done):
        os.close(fd)


def test_a_group_that_a_user_may_not_give_is_one_line(folder: Path) -> None:
    if os.geteuid() != 0:
        return
    os.chown(folder, USER, USER)
    options = ["--socket-group", str(ENGINES)]
    with Daemon("4MiB", options, folder=folder, prefix=as_user(USER, USER), wait=False) as daemon:
        assert daemon.wait_end() == 69
        assert "cannot be given to group 4242: Operation not permitted" in daemon.log
        assert daemon.log.count("\n") == 1
        assert not list(folder.glob("*.sock"))


def test_a_member_of_the_group_may_run_the_daemon(folder: Path) -> None:
    """Without root and without any capability: its own folder, its own groups."""
    if os.geteuid() != 0:
        return
    os.chown(folder, USER, USER)
    prefix = as_user(USER, USER, [ENGINES])
    with Daemon("4MiB", ["--socket-group", str(ENGINES)], folder=folder, prefix=prefix) as daemon:
        assert os.stat(daemon.socket).st_gid == ENGINES
        tried_as(USER + 1, [ENGINES], lambda: gets_a_ticket(daemon.handover_socket))
        tried_as(USER, [USER], lambda: gets_a_ticket(daemon.handover_socket))
        tried_as(USER + 1, [STRANGERS], lambda: is_shut(daemon.handover_socket))
        assert daemon.stop() == 0


def test_a_daemon_that_is_nobody_says_so(folder: Path) -> None:
    """The overflow uid names nobody: its own engines could not be told from strangers."""
    if os.geteuid() != 0:
        return
    os.chown(folder, 65534, 65534)
    with Daemon("4MiB", folder=folder, prefix=as_user(65534, 65534)) as daemon:
        wait_for(lambda: "kvhostd runs as uid 65534, the kernel's overflow uid" in daemon.log, TIME_S)
        assert daemon.stop() == 0
