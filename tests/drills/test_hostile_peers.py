"""Drill 11: peers that send anything, claim anything, and hold on to whatever they are given.

A victim has chunks, pins and grants all the while. After every attack its books and its bytes are what they
were, every refusal was typed, and the daemon has as many descriptors as before (I5, I13, B5, E8, G2, G4).
"""

import errno
import fcntl
import mmap
import os
import random
import resource
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest

from kvhost_client.errors import KVHostError
from kvhost_client.handover import fetch_ticket
from kvhost_client.types import Chunk, Pin
from kvhost_proto.v1 import admin_pb2, cache_pb2, cache_pb2_grpc, common_pb2, handover_pb2
from tests.client.engine import Engine, key, keys, prefix, spec
from tests.drills.attacker import DEADLINE_S, Member, fresh_instance, mutated, packets, requests
from tests.drills.scale import Record, rounds
from tests.server.rawclient import RawClient, hello, scheduler_hello
from tests.server.test_pool import punch_hole
from tests.support import Daemon, fd_count, in_child, wait_for
from tests.support.limits import limited
from tests.support.users import fork_as, open_folder

STRANGER = 4242
SEGMENT = 1 << 20
TYPED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
}


class Victim:
    """An engine in the middle of its work: chunks stored, some of them pinned, some slots granted."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.engine = Engine(daemon.socket, model="victim")
        self.names = keys("victim", 6)
        self.engine.store(self.names)
        self.pins: list[Pin] = self.engine.session.pin(0, self.names[:3])
        self.grants = self.engine.grant(3)
        self.late = keys("late", 3)
        for (store, _), name in zip(self.grants[:2], self.late, strict=False):
            self.engine.session.assign(store, Chunk(0, name))
        self._books = self.books()

    def books(self) -> dict[str, Any]:
        """What Admin says of it, less what time alone changes."""
        status = self._daemon.status()
        number = self.engine.declared.namespace_number
        (namespace,) = [n for n in status.namespaces if n.number == number]
        (session,) = [s for s in status.sessions if s.number == self.engine.session.number]
        for field in ("age_s", "pin_bound", "grant_bound"):  # bounds follow what other namespaces take
            session.ClearField(field)
        return {"namespace": namespace, "session": session, "memory": status.memory.populated_bytes}

    def check(self) -> None:
        """Nothing of it has changed, and it goes on as if nothing had been."""
        assert self.books() == self._books
        self._daemon.check_integrity()
        assert self.engine.wrong_bytes(self.names) == []
        self._books = self.books()

    def finish(self) -> None:
        """All that it holds is still its own: it commits, releases and leaves."""
        for (store, slot), name in zip(self.grants, self.late, strict=True):
            self.engine.write(slot, name, [store])
            assert self.engine.session.commit(store, Chunk(0, name))
        self.engine.session.release(self.pins)
        assert self.engine.wrong_bytes([*self.names]) == []
        self.engine.close()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    folder = open_folder()
    try:
        with Daemon("16MiB", ["--segment-size", "1MiB"], folder=folder) as running:
            yield running
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def victim(daemon: Daemon) -> Iterator[Victim]:
    attacked = Victim(daemon)
    yield attacked
    attacked.finish()
    daemon.check_integrity()
    assert "Traceback" not in daemon.log


@pytest.fixture
def sockets(daemon: Daemon) -> tuple[str, str]:
    return daemon.socket, daemon.handover_socket


@pytest.fixture(autouse=True)
def unharmed(daemon: Daemon, victim: Victim) -> Iterator[None]:
    """Around every attack: the victim's books and bytes, and the daemon's descriptors, before and after."""
    daemon.status()
    before = fd_count(daemon.pid)
    yield
    victim.check()
    wait_for(lambda: fd_count(daemon.pid) <= before, 60.0, f"{before} descriptors again")
    assert "Traceback" not in daemon.log


@contextmanager
def many_files() -> Iterator[None]:
    """As many open files as we may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestNoise:
    def test_packets_on_the_handover_socket(self, daemon: Daemon) -> None:
        """From a process of its own: with it go the descriptors that prove its end."""
        with Record("11 handover packets") as record:
            record.rounds = rounds(5_000, 100_000)
            in_child(lambda: _send_noise(daemon.handover_socket, record.random, record.rounds))
        assert daemon.status().anomalies["handover_bad_packet"] > record.rounds // 20

    @pytest.mark.parametrize("own", ["no session", "its own session", "a session that ended"])
    def test_messages_to_every_method(self, daemon: Daemon, sockets: tuple[str, str], own: str) -> None:
        with Record(f"11 messages, {own}") as record, ExitStack() as stack:
            ids = [b"", bytes(16), secrets.token_bytes(16), secrets.token_bytes(17), b"x" * 100_000]
            if own != "no session":
                member = stack.enter_context(Member(sockets, "fuzz"))
                ids = [member.session_id]
                if own == "a session that ended":
                    member.end_session()
                    wait_for(lambda: member.number not in _open_sessions(daemon))
            channel = stack.enter_context(
                grpc.insecure_channel(f"unix:{daemon.socket}", [("grpc.use_local_subchannel_pool", 1)])
            )
            good = requests(ids)
            codes: dict[str, int] = {}
            record.rounds = rounds(1_700, 15_000)
            for _ in range(record.rounds):
                method = record.random.choice(list(good))
                code = _call_raw(channel, "Cache", method, mutated(record.random, good[method]))
                codes[code.name] = codes.get(code.name, 0) + 1
                assert code in TYPED, (method, code)
            record.facts["codes"] = codes

    def test_messages_to_the_admin_socket(self, daemon: Daemon) -> None:
        """Those that change something name what is not there; the others are damaged at will."""
        reading = {
            "Status": [b""],
            "ListNamespaces": [b""],
            "ListSessions": [b""],
            "LookupChunks": [
                admin_pb2.LookupChunksRequest(namespace=name, keys=texts).SerializeToString()
                for name, texts in (
                    ("1", ["zz"]),
                    ("", ["00" * 36]),
                    ("1", ["00" * 35] * 2000),
                    ("9" * 4000, []),
                )
            ],
        }
        changing = {
            "Evict": admin_pb2.EvictRequest(namespace="no such", all=True),
            "ResetNamespace": admin_pb2.ResetNamespaceRequest(namespace="ffffffffffffffffff"),
            "EndSession": admin_pb2.EndSessionRequest(number=2**64 - 1),
            "SetLimits": admin_pb2.SetLimitsRequest(namespace="1", floor_bytes=2**63),
        }
        with (
            Record("11 admin messages") as record,
            grpc.insecure_channel(
                f"unix:{daemon.admin_socket}", [("grpc.use_local_subchannel_pool", 1)]
            ) as channel,
        ):
            record.rounds = rounds(1_000, 10_000)
            for _ in range(record.rounds):
                if record.random.random() < 0.3:
                    method = record.random.choice(list(changing))
                    code = _call_raw(channel, "Admin", method, changing[method].SerializeToString())
                    assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT), method
                else:
                    method = record.random.choice(list(reading))
                    code = _call_raw(channel, "Admin", method, mutated(record.random, reading[method]))
                    assert code in TYPED, (method, code)

    def test_bytes_that_are_no_http2(self, daemon: Daemon) -> None:
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        settings = b"\0\0\0\4\0\0\0\0\0"
        with Record("11 no HTTP/2") as record:
            record.rounds = rounds(400, 10_000)
            for _ in range(record.rounds):
                path = record.random.choice((daemon.socket, daemon.admin_socket))
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                    client.connect(path)
                    start = record.random.choice(
                        (b"", preface, preface + settings, b"GET / HTTP/1.1\r\n\r\n")
                    )
                    length = struct.pack(">I", record.random.randrange(2**24))[1:]
                    try:
                        client.sendall(start + length + record.random.randbytes(record.random.randrange(900)))
                    except OSError:
                        continue  # it hung up on us: as it should

    def test_two_thousand_half_open_connections(self, daemon: Daemon) -> None:
        """On each socket; none of them speaks. Who does is served meanwhile, and they are closed by the
        daemon's side within seconds."""
        kinds = {
            daemon.handover_socket: socket.SOCK_SEQPACKET,
            daemon.socket: socket.SOCK_STREAM,
            daemon.admin_socket: socket.SOCK_STREAM,
        }
        before = fd_count(daemon.pid)
        with Record("11 half open") as record, many_files():
            silent: list[socket.socket] = []
            try:
                for path, kind in kinds.items():
                    for _ in range(2_000):
                        client = socket.socket(socket.AF_UNIX, kind)
                        client.connect(path)  # waits where the backlog is full
                        silent.append(client)
                        record.rounds += 1
                record.facts["most descriptors"] = fd_count(daemon.pid)
                with Engine(daemon.socket, model="meanwhile") as engine:
                    engine.store(keys("meanwhile", 2))
                    assert engine.wrong_bytes(keys("meanwhile", 2)) == []
                wait_for(lambda: fd_count(daemon.pid) <= before + 2, 60.0, "the silent ones to be closed")
            finally:
                for client in silent:
                    client.close()

    def test_more_connections_than_the_daemon_may_have_files(self) -> None:
        """Who was there before goes on; who comes is served as soon as the silent ones were closed."""
        with (
            Record("11 out of files") as record,
            many_files(),
            Daemon("16MiB", ["--segment-size", "1MiB"], prefix=limited(nofile=1024)) as small,
            Engine(small.socket) as engine,
            ExitStack() as stack,
        ):
            for _ in range(rounds(1_300, 3_000)):
                client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                client.connect(small.socket)
                record.rounds += 1
            wait_for(lambda: fd_count(small.pid) > 1000, 10.0, "the daemon to be out of descriptors")
            engine.store(keys("before", 3))
            assert engine.wrong_bytes(keys("before", 3)) == []
            began = time.monotonic()
            wait_for(lambda: _attaches(small), 60.0, "a new engine to be served")
            record.worst("seconds until a new engine is served", time.monotonic() - began)
            assert not engine.session.ended
            small.check_integrity()

    def test_descriptors_that_nobody_asked_for(self, daemon: Daemon, sockets: tuple[str, str]) -> None:
        before = daemon.status().anomalies
        with Record("11 unasked descriptors") as record, Member(sockets, "generous") as member:
            held = fd_count(daemon.pid)
            for _ in range(rounds(100, 5_000)):
                message = handover_pb2.ToDaemon(mapped=handover_pb2.MappedSegments())
                member.worker.send(message, [0])
                record.rounds += 1
            wait_for(lambda: daemon.status().anomalies["handover_unasked_fd"] >= record.rounds)
            wait_for(lambda: fd_count(daemon.pid) <= held)
        for count in (1, 253):
            with RawClient(daemon.handover_socket) as client:
                client.send(hello(instance_id=fresh_instance(), token=secrets.token_bytes(32)), [0] * count)
                answer = client.receive_blocking()
                assert answer is not None and answer.HasField("welcome" if count == 1 else "refused")
        assert daemon.status().anomalies["handover_unasked_fd"] > before["handover_unasked_fd"]


class TestIds:
    def test_what_belongs_to_another_session(self, sockets: tuple[str, str], victim: Victim) -> None:
        """Store ids and pin ids are small numbers, easy to guess; they are worth nothing in other hands."""
        stores = [store for store, _ in victim.grants]
        chunk = cache_pb2.Chunk(group=0, key=victim.late[0])
        stores_of = [cache_pb2.StoreOf(store_id=store, chunk=chunk) for store in stores]
        for model in ("thief", "victim"):  # in another namespace, and in the very same one
            with Member(sockets, model) as thief:
                precondition, not_found = 9, 5
                assert {code for _, code in thief.update(commits=stores_of)} == {precondition}
                assert {code for _, code in thief.update(assigns=stores_of)} == {precondition}
                aborts = [cache_pb2.Abort(store_id=store, unquiet_ranks=[0]) for store in stores]
                assert {code for _, code in thief.update(aborts=aborts)} == {not_found}
                pins = [pin.pin_id for pin in victim.pins]
                assert {code for _, code in thief.update(releases=pins * 2)} == {not_found}

    def test_what_was_used_before(self, sockets: tuple[str, str]) -> None:
        with Member(sockets, "replay") as member:
            (store,) = member.reserve(1)
            chunk = cache_pb2.StoreOf(store_id=store, chunk=cache_pb2.Chunk(group=0, key=key("replayed")))
            assert member.update(commits=[chunk]) == []
            assert member.update(commits=[chunk]) == [(cache_pb2.ITEM_KIND_COMMIT, 9)]
            assert member.update(aborts=[cache_pb2.Abort(store_id=store)]) == [(cache_pb2.ITEM_KIND_ABORT, 5)]
            request = cache_pb2.LookupRequest(
                session_id=member.session_id,
                pin=True,
                queries=[
                    cache_pb2.LookupQuery(
                        chains=[
                            cache_pb2.Chain(
                                group=0,
                                semantics=common_pb2.SEMANTICS_PREFIX,
                                key_bytes=36,
                                keys=key("replayed"),
                            )
                        ]
                    )
                ],
            )
            pin = member.stub.Lookup(request, timeout=DEADLINE_S).answers[0].chains[0].first_pin_id
            assert member.update(releases=[pin, pin]) == [(cache_pb2.ITEM_KIND_RELEASE, 5)]
            member.end_session()
            for method, after in (
                ("Lookup", request),
                ("Update", cache_pb2.UpdateRequest(session_id=member.session_id, releases=[pin])),
                ("Reserve", cache_pb2.ReserveRequest(session_id=member.session_id, count=1)),
                ("Reset", cache_pb2.ResetRequest(session_id=member.session_id)),
                ("DeclareNamespace", member.declaration),
            ):
                wait_for(
                    lambda m=method, r=after: member.code(m, r) is grpc.StatusCode.NOT_FOUND,  # type: ignore[misc]
                    DEADLINE_S,
                    f"{method} of an ended session to be refused",
                )

    def test_tickets(self, daemon: Daemon, sockets: tuple[str, str]) -> None:
        with Member(sockets, "tickets") as member:
            read, write = os.pipe()

            def fetch() -> None:
                with RawClient(daemon.handover_socket) as client:
                    client.send(scheduler_hello())
                    answer = client.receive_blocking()
                assert answer is not None
                os.write(write, answer.ticket.ticket)

            in_child(fetch)
            of_the_dead = os.read(read, 64)
            os.close(read)
            os.close(write)
            assert len(of_the_dead) == 32
            for ticket in (
                member.ticket,
                of_the_dead,
                secrets.token_bytes(32),
                b"",
                b"x" * 31,
                b"y" * 100_000,
            ):
                request = cache_pb2.OpenSessionRequest(ticket=ticket, version=common_pb2.Version(major=1))
                with pytest.raises(grpc.RpcError) as caught:
                    next(member.stub.OpenSession(request, timeout=DEADLINE_S))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    def test_tokens(self, daemon: Daemon, sockets: tuple[str, str], victim: Victim) -> None:
        stolen = victim.engine.workers[0].token
        with RawClient(daemon.handover_socket) as client:
            client.send(hello(instance_id=victim.engine.instance_id, token=stolen))
            answer = client.receive_blocking()
            assert answer is not None and answer.refused.code == 6, answer
        with Member(sockets, "tokens") as thief:

            def declares(rank: int, token: bytes) -> grpc.StatusCode:
                request = cache_pb2.DeclareNamespaceRequest()
                request.CopyFrom(thief.declaration)
                request.workers[0].rank, request.workers[0].token = rank, token
                return thief.code("DeclareNamespace", request)

            assert declares(0, stolen) is grpc.StatusCode.PERMISSION_DENIED
            for rank, token in ((0, b""), (0, stolen[:31]), (1, thief.token), (2**32 - 1, thief.token)):
                assert declares(rank, token) is grpc.StatusCode.INVALID_ARGUMENT
            # In the victim's own namespace, too: a token opens the engine's mapping, not the namespace's.
            request = cache_pb2.DeclareNamespaceRequest(
                session_id=thief.session_id,
                spec=spec("victim"),
                workers=[cache_pb2.WorkerToken(rank=0, token=stolen)],
            )
            assert thief.code("DeclareNamespace", request) is grpc.StatusCode.PERMISSION_DENIED

    def test_a_worker_that_lies_about_segments_and_fences(
        self, daemon: Daemon, sockets: tuple[str, str], victim: Victim
    ) -> None:
        foreign = sorted(victim.engine.mapping.segment_ids)
        before = daemon.status().anomalies
        with Member(sockets, "liar") as liar:
            for ids in (foreign, [0], [2**32 - 1], foreign * 1000):
                liar.worker.send(handover_pb2.ToDaemon(mapped=handover_pb2.MappedSegments(segment_ids=ids)))
                liar.worker.send(handover_pb2.ToDaemon(retired=handover_pb2.Retired(segment_ids=ids)))
            wait_for(lambda: daemon.status().anomalies["foreign_segment"] > before["foreign_segment"])
        for fence in (1, 2**64 - 1):  # refused for good: only the end of its process gives its place back
            lie = [sys.executable, "-m", "tests.drills.attacker", *sockets, str(fence)]
            assert subprocess.run(lie, check=True, capture_output=True, text=True).stdout == "3\n"
        assert daemon.status().anomalies["false_fence"] == before["false_fence"] + 2


class TestSegments:
    """What a member can do to the memory that it was given; and what others notice of it."""

    def test_size_and_seals_are_fixed(self, sockets: tuple[str, str]) -> None:
        with Member(sockets, "sealed") as member:
            for fd in member.fds:
                size = os.fstat(fd).st_size
                for attempt in (
                    lambda fd=fd: os.ftruncate(fd, 0),
                    lambda fd=fd, size=size: os.ftruncate(fd, size - 1),
                    lambda fd=fd, size=size: os.ftruncate(fd, 2 * size),
                    lambda fd=fd, size=size: os.posix_fallocate(fd, size, 4096),
                    lambda fd=fd, size=size: os.pwrite(fd, b"x", size),
                    lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
                    lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x10),  # F_SEAL_FUTURE_WRITE
                    lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK),
                    lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x20),  # F_SEAL_EXEC
                ):
                    with pytest.raises(OSError) as caught:
                        attempt()  # type: ignore[no-untyped-call]
                    assert caught.value.errno == errno.EPERM
                again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # a description of its own changes nothing
                with pytest.raises(PermissionError):
                    os.ftruncate(again, 0)
                os.close(again)
                assert os.fstat(fd).st_size == size

    @pytest.mark.parametrize("how", ["fallocate", "madvise"])
    def test_a_hole_is_detected_counted_and_filled(
        self, daemon: Daemon, sockets: tuple[str, str], victim: Victim, how: str
    ) -> None:
        with Member(sockets, "puncher") as member:
            generation = _namespace(daemon, member.namespace).generation
            before = daemon.status().anomalies["hole_detected"]
            if how == "fallocate":
                punch_hole(member.fds[0], 4096, 8192)
            else:
                with mmap.mmap(member.fds[0], SEGMENT) as view:
                    view.madvise(mmap.MADV_REMOVE, 0, 4096)
            wait_for(lambda: daemon.status().anomalies["hole_detected"] == before + 1, DEADLINE_S)
            assert _namespace(daemon, member.namespace).generation == generation + 1
            wait_for(lambda: os.fstat(member.fds[0]).st_blocks * 512 == SEGMENT, DEADLINE_S)

    def test_a_hole_in_a_namespace_that_others_use(self, daemon: Daemon, sockets: tuple[str, str]) -> None:
        """Everything stored before is gone at once for all of its members: a miss, never zeros (I1)."""
        with Engine(daemon.socket, model="shared") as engine:
            names = keys("shared", 4)
            engine.store(names)
            assert _hits(engine, names) == 4
            with Member(sockets, "shared") as member:
                punch_hole(member.fds[0], 0, SEGMENT)
                wait_for(lambda: not _hits(engine, names), DEADLINE_S, "the chunks to be gone")
            engine.store(keys("after", 2))
            assert engine.wrong_bytes(keys("after", 2)) == []

    def test_what_a_member_leaves_behind_is_not_the_next_ones(self) -> None:
        """Flags and modes set on the shared description, and bytes: the next namespace sees zeros."""
        with Daemon("4MiB", ["--segment-size", "1MiB"]) as small, Record("11 heirs") as record:
            sockets = small.socket, small.handover_socket
            for number in range(rounds(12, 200)):  # each takes the segment that was unused for longest
                with Member(sockets, f"vandal {number}") as vandal:
                    for fd in vandal.fds:
                        with mmap.mmap(fd, SEGMENT) as view:
                            assert view[:] == bytes(SEGMENT)
                            view[:] = b"\xee" * SEGMENT
                        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)
                        os.fchmod(fd, 0)
                record.rounds += 1
            assert small.status().counters["segments_retired"] >= record.rounds - 4
            assert not small.status().memory.notes  # none is out of use
            small.check_integrity()


class TestUsers:
    def test_a_user_that_is_not_allowed(self, daemon: Daemon) -> None:
        if os.geteuid() != 0:
            return
        before = daemon.status().anomalies["handover_peer_refused"]
        for path in (daemon.socket, daemon.admin_socket, daemon.handover_socket):
            _as_stranger(lambda p=path: _is_shut_out(p))  # type: ignore[misc]
        os.chmod(daemon.handover_socket, 0o666)  # even if somebody opened the door
        try:
            _as_stranger(
                lambda: _is_refused(daemon.handover_socket, f"uid {STRANGER}, gid {STRANGER} may not use")
            )
        finally:
            os.chmod(daemon.handover_socket, 0o660)
        assert daemon.status().anomalies["handover_peer_refused"] == before + 1

    def test_another_user_that_is_allowed_is_not_another_engine(self, victim: Victim) -> None:
        """It names the instance of an engine that is not its own: refused, and the engine goes on."""
        if os.geteuid() != 0:
            return
        folder = open_folder()
        options = ["--segment-size", "1MiB", "--allow-uid", str(STRANGER), "--socket-mode", "0666"]
        try:
            with Daemon("4MiB", options, folder=folder) as shared, Engine(shared.socket) as engine:
                read, write = os.pipe()

                def fetch() -> None:
                    with RawClient(shared.handover_socket) as client:
                        client.send(scheduler_hello(instance_id=engine.instance_id))
                        answer = client.receive_blocking()
                    assert answer is not None
                    os.write(write, answer.ticket.ticket)
                    os.read(release[0], 1)  # a ticket is good while its process lives

                release = os.pipe()
                child = fork_as(STRANGER, STRANGER, fetch)
                ticket = os.read(read, 64)
                with grpc.insecure_channel(f"unix:{shared.socket}") as channel:
                    request = cache_pb2.OpenSessionRequest(ticket=ticket, version=common_pb2.Version(major=1))
                    with pytest.raises(grpc.RpcError) as caught:
                        next(cache_pb2_grpc.CacheStub(channel).OpenSession(request, timeout=DEADLINE_S))
                os.write(release[1], b"x")
                assert os.waitpid(child, 0)[1] == 0
                for fd in (read, write, *release):
                    os.close(fd)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "belongs to another user" in (caught.value.details() or "")
                engine.session.ping()
                assert shared.status().sessions[0].number == engine.session.number
        finally:
            shutil.rmtree(folder)

    def test_a_user_namespace_gives_no_other_identity(self, daemon: Daemon) -> None:
        """Root inside a namespace that a stranger made is that stranger to the daemon."""
        if os.geteuid() != 0:
            return

        def as_root_of_nothing() -> None:
            if _unshare_user():
                return  # user namespaces are switched off here
            _is_refused(daemon.handover_socket, f"uid {STRANGER}")

        os.chmod(daemon.handover_socket, 0o666)
        try:
            _as_stranger(as_root_of_nothing)
        finally:
            os.chmod(daemon.handover_socket, 0o660)

    def test_a_daemon_in_a_user_namespace_knows_no_user_from_outside(self) -> None:
        """All of them look alike there, as the overflow uid: that is nobody, even if the list has it."""
        if os.geteuid() != 0:
            return
        folder = open_folder()
        options = ["--socket-mode", "0666", "--allow-uid", "65534", "--allow-gid", "65534"]
        prefix = ["unshare", "--user", "--map-root-user"]
        try:
            with Daemon("4MiB", options, folder=folder, prefix=prefix) as rootless:
                _as_stranger(lambda: _is_refused(rootless.handover_socket, "overflow uid and names nobody"))
                with Engine(rootless.socket) as engine:  # uid 0 is mapped
                    engine.store(keys("rootless", 2))
                    assert engine.wrong_bytes(keys("rootless", 2)) == []
                rootless.check_integrity()
        finally:
            shutil.rmtree(folder)


def _send_noise(path: str, dice: random.Random, count: int) -> None:
    good = packets()
    sent = 0
    while sent < count:
        with RawClient(path) as client:
            try:
                if dice.random() < 0.3:  # some of it as a worker that was welcomed
                    client.send(hello(instance_id=dice.randbytes(16), token=dice.randbytes(32)))
                for _ in range(dice.randrange(1, 6)):
                    sent += 1
                    client.send_bytes(mutated(dice, good), [0] * dice.choice((0, 0, 0, 0, 1, 2, 100, 253)))
            except (BrokenPipeError, ConnectionResetError):
                continue  # it hung up on us: as it should


def _call_raw(channel: grpc.Channel, service: str, method: str, message: bytes) -> grpc.StatusCode:
    """The status of a call with these bytes; of a stream, OK when it was not refused."""
    path = f"/kvhost.v1.{service}/{method}"
    if method in ("Watch", "OpenSession"):
        stream = channel.unary_stream(path)(message, timeout=DEADLINE_S)
        try:
            next(stream)
        except grpc.RpcError as error:
            return error.code()
        except StopIteration:
            pass
        stream.cancel()
        return grpc.StatusCode.OK
    try:
        channel.unary_unary(path)(message, timeout=DEADLINE_S)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _attaches(daemon: Daemon) -> bool:
    try:
        fetch_ticket(daemon.handover_socket, fresh_instance(), 1.0)
        with Engine(daemon.socket, model="newcomer") as engine:
            engine.store(keys("newcomer", 1))
            return engine.wrong_bytes(keys("newcomer", 1)) == []
    except (KVHostError, AssertionError):
        return False


def _open_sessions(daemon: Daemon) -> set[int]:
    return {session.number for session in daemon.status().sessions if session.state == "open"}


def _hits(engine: Engine, names: list[bytes]) -> int:
    (answer,) = engine.session.lookup([prefix(names)])
    return answer.chains[0].hits


def _namespace(daemon: Daemon, number: int) -> admin_pb2.NamespaceStatus:
    return next(n for n in daemon.status().namespaces if n.number == number)


def _as_stranger(work: Callable[[], object]) -> None:
    child = fork_as(STRANGER, STRANGER, work)
    assert os.waitpid(child, 0)[1] == 0, "see stderr"


def _is_shut_out(path: str) -> None:
    kind = socket.SOCK_SEQPACKET if "handover" in path else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as client:
        assert client.connect_ex(path) == errno.EACCES


def _is_refused(path: str, text: str) -> None:
    with RawClient(path) as client:
        client.send(scheduler_hello())
        answer = client.receive_blocking()
    assert answer is not None and answer.refused.code == 7, answer
    assert text in answer.refused.message


def _unshare_user() -> int:
    import ctypes

    result: int = ctypes.CDLL(None).unshare(0x10000000)  # CLONE_NEWUSER
    return result
