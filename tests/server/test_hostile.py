"""Peers that send anything and go away anyhow: typed errors, books unchanged, no descriptor lost (I13, G2,
G4)."""

import os
import random
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvhost_proto.v1 import cache_pb2, cache_pb2_grpc, handover_pb2
from kvhost_server.packets import MAGIC
from tests.client.engine import Engine
from tests.server.rawclient import RawClient, hello, scheduler_hello
from tests.support import Daemon, fd_count, fork_child, in_child, wait_for

ROUNDS = 5_000
HALF_OPEN = 2_000


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("16MiB", ["--segment-size", "2MiB"]) as running:
        yield running


def settled(daemon: Daemon, before: int) -> None:
    """The daemon answers, its books agree, and its descriptors are back (a ticket's pidfd lives 30 s at
    most)."""
    wait_for(lambda: fd_count(daemon.pid) <= before + 2, 40, f"{before} descriptors again")
    daemon.check_integrity()
    assert "Traceback" not in daemon.log


def test_two_thousand_half_open_connections(daemon: Daemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = fd_count(daemon.pid)
    silent = [RawClient(daemon.handover_socket) for _ in range(HALF_OPEN)]
    try:
        wait_for(lambda: daemon.status().anomalies["handover_no_hello"] >= HALF_OPEN - 256, 20)
        assert fd_count(daemon.pid) <= before + 2 * 256 + 4  # a socket and a pidfd each
        with Engine(daemon.socket) as engine:  # who says HELLO is served meanwhile
            engine.session.ping()
        wait_for(lambda: daemon.status().anomalies["handover_no_hello"] == HALF_OPEN, 10)
        settled(daemon, before)
    finally:
        for connection in silent:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_random_and_mutated_packets(daemon: Daemon) -> None:
    with Engine(daemon.socket) as engine:
        engine.session.ping()
        before = fd_count(daemon.pid)
        in_child(lambda: _send_anything(daemon.handover_socket))
        settled(daemon, before)
        engine.session.ping()


def _send_anything(path: str) -> None:
    """A process of its own: the tickets it wins hold its pidfd until it ends."""
    dice = random.Random(1)
    good = [
        MAGIC + message.SerializeToString()
        for message in (
            hello(),
            hello(access=handover_pb2.ACCESS_DEVICE_DMA, rank=7),
            hello(with_pidfd=True),
            scheduler_hello(),
            handover_pb2.ToDaemon(bye=handover_pb2.Bye()),
            handover_pb2.ToDaemon(mapped=handover_pb2.MappedSegments(segment_ids=[1, 2, 2**32 - 1])),
            handover_pb2.ToDaemon(fenced=handover_pb2.FenceDone(fence=2**64 - 1)),
            handover_pb2.ToDaemon(retired=handover_pb2.Retired(segment_ids=[0])),
        )
    ]
    sent = 0
    while sent < ROUNDS:
        with RawClient(path) as client:
            try:
                for _ in range(dice.randrange(1, 6)):
                    sent += 1
                    client.send_bytes(_mutated(dice, good), [0] * dice.choice((0, 0, 0, 1, 2, 100)))
            except (BrokenPipeError, ConnectionResetError):
                continue  # it hung up on us: as it should


def _mutated(dice: random.Random, good: list[bytes]) -> bytes:
    kind = dice.randrange(4)
    if kind == 0:
        return dice.randbytes(dice.choice((1, 3, 4, 5, 100, 4096, 65536, 65537, 100_000)))
    packet = bytearray(dice.choice(good))
    if kind == 1:
        for _ in range(dice.randrange(1, 4)):
            packet[dice.randrange(len(packet))] = dice.randrange(256)
    elif kind == 2:
        del packet[dice.randrange(1, len(packet) + 1) :]
    else:
        packet += dice.randbytes(dice.randrange(1, 64))
    return bytes(packet)


def test_a_worker_that_lies_changes_nothing(daemon: Daemon) -> None:
    with RawClient(daemon.handover_socket) as client:
        client.send(hello())
        welcome = client.receive_blocking()
        assert welcome is not None and welcome.HasField("welcome")
        client.send(handover_pb2.ToDaemon(mapped=handover_pb2.MappedSegments(segment_ids=[1, 2, 3])))
        client.send(handover_pb2.ToDaemon(retired=handover_pb2.Retired(segment_ids=[1, 2, 3])))
        client.send(handover_pb2.ToDaemon(fenced=handover_pb2.FenceDone(fence=12)))
        refusal = client.receive_blocking()
        assert refusal is not None and refusal.refused.code in (3, 5, 9)
    daemon.check_integrity()


def test_sessions_cannot_be_opened_without_a_fresh_ticket(daemon: Daemon) -> None:
    with RawClient(daemon.handover_socket) as client:
        client.send(scheduler_hello())
        answer = client.receive_blocking()
    assert answer is not None
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        stub = cache_pb2_grpc.CacheStub(channel)

        def opened(ticket: bytes) -> object:
            request = cache_pb2.OpenSessionRequest(ticket=ticket, version=answer.ticket.version)
            stream = stub.OpenSession(request, timeout=5)
            try:
                return next(stream).WhichOneof("kind")
            except grpc.RpcError as error:
                return error.code()
            finally:
                stream.cancel()

        assert opened(bytes(32)) is grpc.StatusCode.UNAUTHENTICATED
        assert opened(b"") is grpc.StatusCode.UNAUTHENTICATED
        assert opened(answer.ticket.ticket) == "opened"
        assert opened(answer.ticket.ticket) is grpc.StatusCode.UNAUTHENTICATED


def test_another_user_is_refused_unless_allowed(daemon: Daemon) -> None:
    os.chmod(daemon.folder, 0o755)
    os.chmod(daemon.handover_socket, 0o666)

    def as_stranger() -> None:
        os.setgroups([])
        os.setgid(4242)
        os.setuid(4242)
        with RawClient(daemon.handover_socket) as client:
            client.send(scheduler_hello())
            answer = client.receive_blocking()
        assert answer is not None and answer.refused.code == 7, answer
        assert "uid 4242, gid 4242 may not use this daemon" in answer.refused.message

    in_child(as_stranger)
    assert daemon.status().anomalies["handover_peer_refused"] == 1


@pytest.mark.parametrize(
    "options", [("--allow-uid", "4242"), ("--allow-gid", "4343"), ("--socket-group", "4343")]
)
def test_an_allowed_user_is_served(options: tuple[str, ...], tmp_path: Path) -> None:
    with Daemon("4MiB", options) as daemon:
        os.chmod(daemon.folder, 0o755)
        os.chmod(daemon.handover_socket, 0o666)

        def as_stranger() -> None:
            os.setgroups([4343])
            os.setgid(4242)
            os.setuid(4242)
            with RawClient(daemon.handover_socket) as client:
                client.send(scheduler_hello())
                answer = client.receive_blocking()
            assert answer is not None and answer.HasField("ticket"), answer

        in_child(as_stranger)


def test_a_user_namespace_gives_no_other_identity(daemon: Daemon) -> None:
    """Root inside a user namespace of uid 4242 is uid 4242 to the daemon, whatever it calls itself."""
    os.chmod(daemon.folder, 0o755)
    os.chmod(daemon.handover_socket, 0o666)
    read, write = os.pipe()

    def as_root_of_nothing() -> None:
        os.setgroups([])
        os.setgid(4242)
        os.setuid(4242)
        if _unshare(_CLONE_NEWUSER):
            os.write(write, b"none")  # user namespaces are switched off here
            return
        with RawClient(daemon.handover_socket) as client:
            client.send(scheduler_hello())
            answer = client.receive_blocking()
        assert answer is not None
        os.write(write, answer.refused.message.encode())

    in_child(as_root_of_nothing)
    os.close(write)
    message = os.read(read, 4096).decode()
    os.close(read)
    assert message == "none" or "uid 4242" in message


def test_an_engine_in_another_pid_namespace_is_known_by_its_pidfd(tmp_path: Path) -> None:
    """Containers share the socket's folder and no PID namespace: the daemon sees pid 0 and watches a
    pidfd."""
    prefix = ["unshare", "--pid", "--fork", "--kill-child"]
    with (
        Daemon("16MiB", ["--segment-size", "2MiB"], prefix=prefix) as daemon,
        Engine(daemon.socket) as engine,
    ):
        engine.session.ping()
        (session,) = daemon.status().sessions
        assert session.pid == 0
        child = fork_child(lambda: _hold_a_worker(daemon.handover_socket))
        wait_for(lambda: "worker 2 arrived" in daemon.log)
        os.kill(child, 9)
        os.waitpid(child, 0)
        daemon.wait_log("worker 2 ended")


def _hold_a_worker(path: str) -> None:
    with RawClient(path) as client:
        client.send(hello(token=os.urandom(32)))
        client.receive_blocking()
        client.receive_blocking(60)


_CLONE_NEWUSER = 0x10000000


def _unshare(flags: int) -> int:
    import ctypes

    return ctypes.CDLL(None).unshare(flags)  # type: ignore[no-any-return]


def test_garbage_on_the_grpc_sockets(daemon: Daemon) -> None:
    before = fd_count(daemon.pid)
    dice = random.Random(2)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for round_number in range(300):
        path = daemon.socket if round_number % 2 else daemon.admin_socket
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(path)
            try:
                client.sendall(dice.choice((b"", preface, b"GET / HTTP/1.1\r\n\r\n")))
                client.sendall(
                    struct.pack(">I", dice.randrange(2**32))[1:] + dice.randbytes(dice.randrange(600))
                )
            except (BrokenPipeError, ConnectionResetError):
                continue
    settled(daemon, before)
