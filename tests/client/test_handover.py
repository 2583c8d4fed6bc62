"""The handover socket: tickets, and one clear sentence for everything that can be wrong (F15)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvhost_client import handover as client
from kvhost_client.errors import (
    DeadlineExceeded,
    HandoverFailed,
    InvalidArgument,
    KVHostError,
    NotKVHost,
    Refused,
    Unavailable,
    VersionMismatch,
)
from kvhost_client.session import Session
from kvhost_proto.v1 import handover_pb2
from tests.client.fakes import FakeHandover, FakePeer, sealed_file
from tests.support import Daemon

INSTANCE = b"0123456789abcdef"


def serve(server: FakeHandover, act: Callable[[FakePeer], object]) -> threading.Thread:
    """One connection is answered by `act`, after its HELLO."""

    def run() -> None:
        peer = server.accept()
        peer.expect("hello")
        act(peer)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def fetch(server: FakeHandover, act: Callable[[FakePeer], object], deadline_s: float = 2.0) -> client.Ticket:
    thread = serve(server, act)
    try:
        return client.fetch_ticket(server.path, INSTANCE, deadline_s)
    finally:
        thread.join()


def complaint(server: FakeHandover, act: Callable[[FakePeer], object]) -> KVHostError:
    with pytest.raises(KVHostError) as caught:
        fetch(server, act)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_ticket_comes_back(handover: FakeHandover) -> None:
    ticket = fetch(handover, lambda peer: peer.ticket(b"x" * 32, boot_id=2**63 + 5))
    assert ticket == client.Ticket(b"x" * 32, 30, 2**63 + 5)


def test_hello_says_who_and_what_version(handover: FakeHandover) -> None:
    heard: list[handover_pb2.Hello] = []

    def run() -> None:
        peer = handover.accept()
        heard.append(peer.expect("hello").hello)
        peer.ticket()

    thread = threading.Thread(target=run)
    thread.start()
    client.fetch_ticket(handover.path, INSTANCE, 2.0)
    thread.join()
    (hello,) = heard
    assert hello.instance_id == INSTANCE
    assert hello.role == handover_pb2.ROLE_SCHEDULER
    assert hello.version.major == 1
    assert hello.version.program.startswith("kvhost ")
    assert not hello.with_pidfd  # this kernel tells the daemon by itself


def test_where_the_kernel_does_not_name_the_process_its_pidfd_is_sent(
    handover: FakeHandover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_SO_PEERPIDFD", 9999)
    links: list[tuple[bool, str, str]] = []

    def run() -> None:
        peer = handover.accept()
        data, descriptors, _, _ = socket.recv_fds(peer.socket, 65536, 4)
        hello = handover_pb2.ToDaemon.FromString(data[4:]).hello
        (pidfd,) = descriptors
        links.append(
            (
                hello.with_pidfd,
                os.readlink(f"/proc/self/fd/{pidfd}"),
                Path(f"/proc/self/fdinfo/{pidfd}").read_text(),
            )
        )
        os.close(pidfd)
        peer.ticket()

    thread = threading.Thread(target=run)
    thread.start()
    client.fetch_ticket(handover.path, INSTANCE, 2.0)
    thread.join()
    ((with_pidfd, link, info),) = links
    assert with_pidfd
    assert "pidfd" in link
    assert f"Pid:\t{os.getpid()}\n" in info


def test_nobody_there(folder: Path) -> None:
    with pytest.raises(Unavailable, match="kvhostd is not running"):
        client.fetch_ticket(str(folder / "k-handover.sock"), INSTANCE, 2.0)


def test_a_socket_that_a_dead_daemon_left(handover: FakeHandover) -> None:
    handover.close()
    with pytest.raises(Unavailable, match=r"nobody listens .* is gone"):
        client.fetch_ticket(handover.path, INSTANCE, 2.0)


def test_a_file_that_is_no_socket(folder: Path) -> None:
    (folder / "plain").write_text("hello")
    with pytest.raises(NotKVHost, match="is a file, not a socket"):
        client.fetch_ticket(str(folder / "plain"), INSTANCE, 2.0)


def test_a_socket_of_another_kind(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(folder / "other"))
        other.listen()
        with pytest.raises(NotKVHost, match="socket of another kind"):
            client.fetch_ticket(str(folder / "other"), INSTANCE, 2.0)


def test_a_refusal_says_why(handover: FakeHandover) -> None:
    error = complaint(handover, lambda peer: peer.refuse(7, "uid 1000 may not use this daemon"))
    assert isinstance(error, Refused)
    assert error.code == 7
    assert "uid 1000 may not use this daemon" in str(error)


@pytest.mark.parametrize(
    "act",
    [
        lambda peer: peer.ticket(major=2),
        lambda peer: peer.refuse(9, "kvhost 0.1.0 speaks 1.0, kvhostd 2.0 speaks 2.0"),
        lambda peer: peer.send_raw(b"KVH2 something new"),
    ],
)
def test_a_newer_daemon_is_named_as_one(handover: FakeHandover, act: Callable[[FakePeer], object]) -> None:
    error = complaint(handover, act)
    assert isinstance(error, VersionMismatch)
    assert "2" in str(error)


@pytest.mark.parametrize(
    "act",
    [
        lambda peer: peer.send_raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda peer: peer.send_raw(b"K"),
        lambda peer: peer.send_raw(b"KVH1\xff\xff\xff"),
        lambda peer: peer.send_raw(b"KVH1" + b"\0" * 70_000),
        lambda peer: peer.send(handover_pb2.ToClient()),
        lambda peer: peer.welcome(),
    ],
)
def test_what_no_kvhostd_says_is_not_believed(
    handover: FakeHandover, act: Callable[[FakePeer], object]
) -> None:
    error = complaint(handover, act)
    assert isinstance(error, NotKVHost)
    assert handover.path in str(error)


def test_a_daemon_that_hangs_up(handover: FakeHandover) -> None:
    assert isinstance(complaint(handover, lambda peer: peer.close()), Unavailable)


def test_a_daemon_that_says_nothing(handover: FakeHandover) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="did not answer within"):
        fetch(handover, lambda peer: peer.expect_end(), deadline_s=0.2)
    assert time.monotonic() - started < 1.0


def test_a_daemon_that_accepts_no_more_connections(folder: Path) -> None:
    path = str(folder / "busy")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting = []
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="accepts no connection"):
            while True:
                waiting.append(client.HandoverSocket(path, 0.1))
        assert time.monotonic() - started < 2.0
        for connection in waiting:
            connection.close()


def test_an_instance_id_has_sixteen_bytes(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="16 bytes, found 3"):
        client.fetch_ticket(str(folder / "none"), b"abc", 1.0)


def test_no_descriptor_is_left_by_any_of_this(handover: FakeHandover) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = sealed_file(4096)
    for act in (
        lambda peer: peer.ticket(),
        lambda peer: peer.send_raw(b"KVH1\xff", [file, file]),
        lambda peer: peer.send_raw(b"nonsense", [file]),
        lambda peer: peer.segments(1, 2, descriptors=[file]),
        lambda peer: peer.refuse(7, "no"),
    ):
        thread = serve(handover, partial(act_and_hang_up, act))
        with contextlib.suppress(KVHostError):
            client.fetch_ticket(handover.path, INSTANCE, 2.0)
        thread.join()
    os.close(file)
    assert len(os.listdir("/proc/self/fd")) == before


def test_missing_descriptors_name_the_usual_causes(handover: FakeHandover) -> None:
    file = sealed_file(4096)
    error = complaint(handover, lambda peer: peer.segments(1, 2, descriptors=[file]))
    os.close(file)
    assert isinstance(error, HandoverFailed)
    assert "sent 2 segments, but 1 file descriptors arrived" in str(error)
    assert "ulimit -n" in str(error)


def test_at_the_limit_of_open_files_the_error_says_so(handover: FakeHandover) -> None:
    """The kernel cuts the descriptors (MSG_CTRUNC); those that came are closed."""
    program = textwrap.dedent(
        """
        import json, os, resource, sys
        from kvhost_client import handover
        from kvhost_client.errors import KVHostError
        connection = handover.HandoverSocket(sys.argv[1], 1.0)
        connection.hello(handover.handover_pb2.Hello(instance_id=b"i" * 16))
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, used + 1))
        try:
            connection.receive(5.0)
        except KVHostError as error:
            print(json.dumps([type(error).__name__, str(error), len(os.listdir("/proc/self/fd")) - used]))
        """
    )
    files = [sealed_file(4096) for _ in range(8)]
    thread = serve(handover, lambda peer: peer.segments(*range(8), descriptors=files))
    done = subprocess.run(
        [sys.executable, "-c", program, handover.path], capture_output=True, text=True, check=True, timeout=30
    )
    thread.join()
    for file in files:
        os.close(file)
    kind, sentence, left = json.loads(done.stdout)
    assert kind == "HandoverFailed"
    assert "ulimit -n" in sentence
    assert left == 0


def act_and_hang_up(act: Callable[[FakePeer], object], peer: FakePeer) -> None:
    act(peer)
    peer.expect_end()
    peer.close()


class TestWrongPairing:
    """F15: three distinct one-line errors, each within two seconds."""

    def open(self, socket: str) -> tuple[type[KVHostError], str, float]:
        started = time.monotonic()
        with pytest.raises(KVHostError) as caught:
            Session.open(socket, instance_id=INSTANCE, label="x", deadline_s=2.0)
        return type(caught.value), str(caught.value), time.monotonic() - started

    def test_nothing(self, folder: Path) -> None:
        kind, sentence, took = self.open(str(folder / "k.sock"))
        assert kind is Unavailable
        assert "kvhostd is not running" in sentence
        assert took < 1.0

    def test_an_http_server(self, folder: Path) -> None:
        path = str(folder / "web.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen()

            def answer() -> None:
                connection, _ = listener.accept()
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
                connection.close()

            thread = threading.Thread(target=answer)
            thread.start()
            kind, sentence, took = self.open(path)
            thread.join()
        assert kind is NotKVHost
        assert "an HTTP/1 server" in sentence
        assert took < 2.0

    def test_a_newer_daemon(self, handover: FakeHandover) -> None:
        thread = serve(handover, lambda peer: peer.ticket(major=2))
        kind, sentence, took = self.open(handover.socket)
        thread.join()
        assert kind is VersionMismatch
        assert "2.0 (fake 1.0)" in sentence
        assert "this client 1.1 (kvhost " in sentence
        assert took < 2.0

    def test_another_socket_of_the_same_daemon(self, daemon: Daemon) -> None:
        kind, sentence, took = self.open(daemon.admin_socket)
        assert kind is NotKVHost
        assert "a gRPC server without a handover socket" in sentence
        assert took < 2.0
