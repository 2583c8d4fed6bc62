"""Identity is what the kernel says of a socket; the allow-list knows nothing else (I13)."""

import os
import socket
from pathlib import Path

import pytest

from kvhost_server.identity import (
    AllowList,
    Credentials,
    ProcessGone,
    check_sent_pidfd,
    credentials_of,
    pidfd_of,
)
from tests.support.forks import in_child

OVERFLOW = 65534


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def test_credentials_are_those_of_the_process() -> None:
    ours, theirs = pair()
    with ours, theirs:
        assert credentials_of(ours) == Credentials(
            os.getpid(), os.getuid(), os.getgid(), tuple(os.getgroups())
        )


def test_many_groups_are_read(tmp_path: Path) -> None:
    groups = list(range(1000, 2000))
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def connect() -> None:
            os.setgroups(groups)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(path)

        in_child(connect)
        accepted, _ = listener.accept()
        with accepted:
            assert sorted(credentials_of(accepted).groups) == groups


def test_a_process_that_has_ended_has_no_pidfd(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def connect() -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(path)

        in_child(connect)
        accepted, _ = listener.accept()
        with accepted:
            try:
                pidfd = pidfd_of(accepted)
            except ProcessGone:
                return
            # Newer kernels hand out a pidfd of the dead: it is readable at once, which says the same.
            assert pidfd is not None
            os.close(pidfd)


def test_a_sent_pidfd_must_be_the_peers_own() -> None:
    own = os.pidfd_open(os.getpid())
    other = os.pidfd_open(os.getppid())
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        assert check_sent_pidfd(own, os.getpid()) is None
        assert f"is of process {os.getppid()}, but process {os.getpid()} is connected" in str(
            check_sent_pidfd(other, os.getpid())
        )
        assert "'/dev/null'; send pidfd_open(getpid())" in str(check_sent_pidfd(null, os.getpid()))
        assert "not visible from the daemon's PID namespace" in str(check_sent_pidfd(own, 0))
        assert "cannot be looked at" in str(check_sent_pidfd(987654, os.getpid()))
    finally:
        for fd in (own, other, null):
            os.close(fd)


def test_a_pidfd_of_one_thread_is_no_proof() -> None:
    try:
        thread = os.pidfd_open(os.getpid(), os.O_EXCL)
    except OSError:
        return  # before Linux 6.9 there are none
    try:
        assert "of one thread" in str(check_sent_pidfd(thread, os.getpid()))
    finally:
        os.close(thread)


@pytest.mark.parametrize(
    ("peer", "allowed"),
    [
        (Credentials(9, 0, 0, ()), True),
        (Credentials(9, os.geteuid(), 5, ()), True),
        (Credentials(9, 1001, 5, ()), True),
        (Credentials(9, 1002, 5, ()), False),
        (Credentials(9, 1002, 200, ()), True),
        (Credentials(9, 1002, 5, (7, 200)), True),
        (Credentials(9, 1002, 5, (7, 0)), False),
        (Credentials(9, OVERFLOW, 200, (200,)), False),
    ],
)
def test_the_allow_list(peer: Credentials, allowed: bool) -> None:
    listed = AllowList.of([1001, OVERFLOW], [200])
    assert listed.overflow_uid == OVERFLOW
    refusal = listed.refusal(peer)
    assert (refusal is None) is allowed
    if refusal is not None:
        assert str(peer.uid) in refusal


def test_groups_without_a_number_here_match_nothing() -> None:
    """In a user namespace all of them look like the overflow gid, even if the list has that."""
    listed = AllowList.of([], [OVERFLOW, 200])
    assert listed.refusal(Credentials(1, 1001, OVERFLOW, (OVERFLOW,))) is not None
    assert listed.refusal(Credentials(1, 1001, OVERFLOW, (OVERFLOW, 200))) is None
