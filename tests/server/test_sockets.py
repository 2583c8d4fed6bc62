"""One daemon a path, the right mode and group from the first moment, nothing left behind (F6, F8)."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvhost_server.exits import ExitCode, StartupError
from kvhost_server.sockets import LONGEST_PATH, SocketFile, SocketLock

MODE = 0o660
GROUP = 4242


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def bound(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(str(path))
    made.listen()
    return made


def test_a_second_lock_names_the_first_ones_pid(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    first = SocketLock(path)
    with pytest.raises(
        StartupError, match=f"already running, pid {os.getpid()}, on --socket {path}"
    ) as caught:
        SocketLock(path)
    assert caught.value.code is ExitCode.UNAVAILABLE
    first.release()
    first.release()
    SocketLock(path).release()
    assert path.with_name("a.sock.lock").exists()  # a removed lock file could be locked twice


def test_a_lock_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sock.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="cannot be opened"):
        SocketLock(tmp_path / "a.sock")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mask", [0, 0o077, 0o777])
def test_mode_and_group_do_not_depend_on_the_umask(tmp_path: Path, umask: None, mask: int) -> None:
    os.umask(mask)
    seen: list[int] = []
    file = SocketFile(tmp_path / "a.sock", MODE, GROUP)

    def bind() -> None:
        listeners.append(bound(file.path))
        seen.append(stat.S_IMODE(file.path.stat().st_mode))

    listeners: list[socket.socket] = []
    file.bind(bind)
    found = file.path.stat()
    assert seen == [0o600]  # nobody else may connect before the group is set
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (MODE, GROUP)
    assert os.umask(mask) == mask
    file.remove()
    assert not file.path.exists()
    listeners[0].close()


def test_a_group_that_cannot_be_given_leaves_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    file = SocketFile(tmp_path / "a.sock", MODE, GROUP)
    listeners: list[socket.socket] = []
    with pytest.raises(StartupError, match="cannot be given to group 4242: Operation not permitted"):
        file.bind(lambda: listeners.append(bound(file.path)))
    assert not file.path.exists()
    listeners[0].close()


def test_the_folder_is_made_when_only_it_is_missing(tmp_path: Path, umask: None) -> None:
    os.umask(0o077)
    file = SocketFile(tmp_path / "run" / "a.sock", MODE, GROUP)
    file.prepare()
    found = file.path.parent.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o750, GROUP)
    with pytest.raises(StartupError, match="does not exist and cannot be made: No such file"):
        SocketFile(tmp_path / "no" / "such" / "a.sock", MODE, None).prepare()
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="is no directory"):
        SocketFile(tmp_path / "file" / "a.sock", MODE, None).prepare()


def test_a_folder_for_two_groups_can_be_passed_and_not_read(tmp_path: Path, umask: None) -> None:
    file = SocketFile(tmp_path / "run" / "a.sock", MODE, GROUP)
    file.prepare(passable=True)
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o751


def test_a_folder_that_anybody_may_write_into_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who may rename there may put a socket of his own in the place of ours."""
    folder = tmp_path / "run"
    folder.mkdir()
    file = SocketFile(folder / "a.sock", MODE, GROUP)
    folder.chmod(0o1777)  # as /tmp: nobody may rename what is another's
    file.prepare()
    assert not caplog.text
    folder.chmod(0o777)
    file.prepare()
    assert f"every user may write into {folder} (mode 0777)" in caplog.text


def test_a_path_that_is_too_long_is_named_with_its_length(tmp_path: Path) -> None:
    longest = tmp_path / ("x" * (LONGEST_PATH - len(str(tmp_path)) - 1))
    SocketFile(longest, MODE, None).prepare()
    bound(longest).close()
    with pytest.raises(StartupError, match="has 108 bytes and at most 107 are allowed") as caught:
        SocketFile(longest.with_name(longest.name + "x"), MODE, None).prepare()
    assert caught.value.code is ExitCode.USAGE


def test_a_stale_socket_is_removed(tmp_path: Path) -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        file = SocketFile(tmp_path / "a.sock", MODE, None)
        bound(file.path, kind).close()
        assert file.path.exists()
        file.clear()
        assert not file.path.exists()
        file.clear()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_living_socket_is_left_alone(tmp_path: Path, kind: socket.SocketKind) -> None:
    file = SocketFile(tmp_path / "a.sock", MODE, None)
    with closing(bound(file.path, kind)):
        with pytest.raises(StartupError, match="another process listens on"):
            file.clear()
        assert file.path.exists()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    file = SocketFile(tmp_path / "a.sock", MODE, None)
    file.path.write_text("precious")
    with pytest.raises(StartupError, match="exists and is no socket"):
        file.clear()
    assert file.path.read_text() == "precious"


def test_only_our_own_socket_is_removed_at_the_end(tmp_path: Path) -> None:
    file = SocketFile(tmp_path / "a.sock", MODE, None)
    listeners: list[socket.socket] = []
    file.bind(lambda: listeners.append(bound(file.path)))
    os.rename(file.path, tmp_path / "moved.sock")
    with closing(bound(file.path)), closing(listeners[0]):
        file.remove()
        assert file.path.exists()


def test_a_path_with_odd_characters_reaches_grpc_unchanged(tmp_path: Path) -> None:
    file = SocketFile(Path("/run/a%41 b?c#d.sock"), MODE, None)
    assert file.grpc_target == "unix:/run/a%2541%20b%3Fc%23d.sock"
