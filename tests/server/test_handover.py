"""The handover socket: who may speak, what a worker gets, and what proves its end (I4, I13)."""

import asyncio
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvhost_proto.v1 import handover_pb2
from kvhost_server import handover as handover_module
from kvhost_server.errors import Code, Refused
from kvhost_server.handover import HandoverServer
from kvhost_server.identity import AllowList, Identity, pidfd_of
from kvhost_server.ids import MappingId, SegmentId, SessionNumber, StoreId
from kvhost_server.notices import Assignment
from kvhost_server.packets import LARGEST_PACKET, MAGIC
from tests.server.rawclient import INSTANCE, TOKEN, RawClient, hello, scheduler_hello
from tests.support.forks import fork_child
from tests.support.processes import fd_count
from tests.support.waiting import wait_for_async

BOOT_ID = 0x1234_5678_9ABC_DEF0


@dataclass
class Workers:
    """Plays the manager: remembers what it was told; `on_hello` may refuse, or order segments at once."""

    calls: list[tuple[object, ...]] = field(default_factory=list)
    identities: dict[MappingId, Identity] = field(default_factory=dict)
    on_hello: Callable[[MappingId], None] = lambda mapping: None

    def worker_hello(
        self, instance_id: bytes, rank: int, access: int, token: bytes, identity: Identity
    ) -> MappingId:
        mapping = MappingId(len(self.identities) + 1)
        self.identities[mapping] = identity
        self.calls.append(("hello", mapping, instance_id, rank, access, token))
        self.on_hello(mapping)
        return mapping

    def worker_mapped(self, mapping_id: MappingId, segment_ids: Iterable[SegmentId]) -> None:
        self.calls.append(("mapped", mapping_id, *segment_ids))

    def worker_fenced(self, mapping_id: MappingId, fence: int) -> None:
        if fence == 666:
            raise Refused(Code.INVALID_ARGUMENT, "fence 666 was never sent")
        self.calls.append(("fenced", mapping_id, fence))

    def worker_retired(self, mapping_id: MappingId, segment_ids: Iterable[SegmentId]) -> None:
        self.calls.append(("retired", mapping_id, *segment_ids))

    def worker_ended(self, mapping_id: MappingId) -> None:
        self.calls.append(("ended", mapping_id))

    def worker_disconnected(self, mapping_id: MappingId) -> None:
        self.calls.append(("disconnected", mapping_id))


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def segment() -> Iterator[int]:
    fd = os.memfd_create("segment")
    yield fd
    os.close(fd)


Serve = Callable[..., HandoverServer]


@pytest.fixture
async def serve(tmp_path: Path, workers: Workers, segment: int) -> AsyncIterator[Serve]:
    """Starts a server on `tmp_path`/h.sock with these options."""
    started: list[HandoverServer] = []
    before = fd_count(os.getpid())

    def start(**options: object) -> HandoverServer:
        allow = options.pop("allow", AllowList.of([], []))
        server = HandoverServer(BOOT_ID, workers, lambda index: segment, allow, **options)  # type: ignore[arg-type]
        server.listen(tmp_path / "h.sock")
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()
    assert fd_count(os.getpid()) == before  # every descriptor has one owner, and it closed it


@pytest.fixture
async def server(serve: Serve) -> HandoverServer:
    return serve()


@pytest.fixture
async def client(server: HandoverServer, tmp_path: Path) -> AsyncIterator[RawClient]:
    with RawClient(tmp_path / "h.sock") as connected:
        yield connected


@pytest.fixture
async def worker(client: RawClient) -> RawClient:
    """A worker that was welcomed, as mapping 1."""
    client.send(hello(rank=3))
    message = await client.receive()
    assert message is not None and message.HasField("welcome")
    return client


def assignments(count: int) -> list[Assignment]:
    return [Assignment(SegmentId(100 + n), n, 1 << 20, 256, 4096, 2048, 2, 7) for n in range(count)]


def message(**fields: object) -> handover_pb2.ToDaemon:
    return handover_pb2.ToDaemon(**fields)  # type: ignore[arg-type]


BYE = message(bye=handover_pb2.Bye())
MAPPED = message(mapped=handover_pb2.MappedSegments(segment_ids=[100, 101]))


class TestScheduler:
    async def test_gets_a_ticket_that_names_it_once(self, server: HandoverServer, client: RawClient) -> None:
        client.send(scheduler_hello())
        answer = await client.receive()
        assert answer is not None
        assert (answer.ticket.boot_id, answer.ticket.valid_s, answer.ticket.version.major) == (BOOT_ID, 30, 1)
        assert await client.receive() is None  # nothing more is said here
        identity = server.redeem(answer.ticket.ticket)
        assert identity is not None
        assert (identity.pid, identity.uid, identity.instance_id) == (os.getpid(), os.getuid(), INSTANCE)
        assert server.redeem(answer.ticket.ticket) is None

    async def test_its_death_is_told_to_who_watches(self, server: HandoverServer, tmp_path: Path) -> None:
        read, write = os.pipe()
        child = fork_child(lambda: _fetch_ticket_and_wait(tmp_path, write))
        os.close(write)
        ticket = await asyncio.to_thread(os.read, read, 64)
        os.close(read)
        identity = server.redeem(ticket)
        assert identity is not None and identity.pid == child
        ended: list[str] = []
        server.watch_end(identity, lambda: ended.append("ended"))
        assert ended == []
        os.kill(child, signal.SIGKILL)
        await wait_for_async(lambda: ended)
        os.waitpid(child, 0)
        assert ended == ["ended"]

    async def test_its_death_voids_a_ticket_that_was_not_used(
        self, server: HandoverServer, tmp_path: Path
    ) -> None:
        read, write = os.pipe()
        child = fork_child(lambda: _fetch_ticket_and_wait(tmp_path, write))
        os.close(write)
        ticket = await asyncio.to_thread(os.read, read, 64)
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        await wait_for_async(lambda: server.tickets.waiting == 0)
        assert server.redeem(ticket) is None


class TestWorker:
    async def test_is_introduced_and_welcomed(self, worker: RawClient, workers: Workers) -> None:
        assert workers.calls == [("hello", 1, INSTANCE, 3, 1, TOKEN)]
        assert workers.identities[MappingId(1)].pid == os.getpid()

    async def test_welcome_comes_before_segments_that_were_ordered_at_once(
        self, server: HandoverServer, client: RawClient, workers: Workers
    ) -> None:
        workers.on_hello = lambda mapping: server.offer(mapping, assignments(1))
        client.send(hello())
        kinds = [(await client.receive() or message()).WhichOneof("kind") for _ in range(2)]
        assert kinds == ["welcome", "segments"]

    async def test_segments_come_with_their_descriptors_32_at_a_time(
        self, server: HandoverServer, worker: RawClient, segment: int
    ) -> None:
        server.offer(MappingId(1), assignments(70))
        ids = []
        for count in (32, 32, 6):
            answer = await worker.receive()
            assert answer is not None
            segments = answer.segments
            assert (segments.stamp.boot_id, segments.stamp.generation) == (BOOT_ID, 7)
            assert (segments.slot_bytes, segments.shard_stride, segments.shards) == (4096, 2048, 2)
            assert len(segments.segments) == len(worker.fds) == count
            assert {os.fstat(fd).st_ino for fd in worker.fds} == {os.fstat(segment).st_ino}
            ids += [(s.id, s.bytes, s.slots) for s in segments.segments]
            while worker.fds:
                os.close(worker.fds.pop())
        assert ids == [(100 + n, 1 << 20, 256) for n in range(70)]

    async def test_what_it_says_reaches_the_manager(self, worker: RawClient, workers: Workers) -> None:
        worker.send(MAPPED)
        worker.send(message(fenced=handover_pb2.FenceDone(fence=9)))
        worker.send(message(retired=handover_pb2.Retired(segment_ids=[100])))
        await wait_for_async(lambda: len(workers.calls) == 4)
        assert workers.calls[1:] == [("mapped", 1, 100, 101), ("fenced", 1, 9), ("retired", 1, 100)]

    async def test_a_long_fence_is_answered_once(
        self, server: HandoverServer, worker: RawClient, workers: Workers
    ) -> None:
        ids = [StoreId(2**63 + n) for n in range(10_000)]
        server.fence(MappingId(1), 5, SessionNumber(2), ids)
        fences: list[handover_pb2.Fence] = []
        while not fences or not fences[-1].fence:
            answer = await worker.receive()
            assert answer is not None
            fences.append(answer.fence)
            worker.send(message(fenced=handover_pb2.FenceDone(fence=answer.fence.fence)))
        assert [fence.fence for fence in fences] == [0, 0, 5]
        assert [i for fence in fences for i in fence.store_ids] == ids
        assert {fence.session_below for fence in fences} == {2}
        await wait_for_async(lambda: ("fenced", 1, 5) in workers.calls)
        assert len(workers.calls) == 2

    async def test_a_fence_without_store_ids_is_sent(self, server: HandoverServer, worker: RawClient) -> None:
        server.fence(MappingId(1), 5, SessionNumber(2), [])
        server.retire(MappingId(1), [SegmentId(100)])
        answers = [await worker.receive() for _ in range(2)]
        assert answers[0] is not None and answers[0].fence.fence == 5
        assert answers[1] is not None and list(answers[1].retire.segment_ids) == [100]

    async def test_what_the_manager_refuses_ends_the_connection(
        self, server: HandoverServer, worker: RawClient, workers: Workers
    ) -> None:
        server.offer(MappingId(1), assignments(1))
        await worker.receive()
        worker.send(message(fenced=handover_pb2.FenceDone(fence=666)))
        refusal = await worker.refused()
        assert (refusal.code, refusal.message) == (3, "fence 666 was never sent")
        assert workers.calls[-1] == ("disconnected", 1)  # its process lives, and may still write

    async def test_a_token_that_the_manager_refuses(self, client: RawClient, workers: Workers) -> None:
        def refuse(mapping: MappingId) -> None:
            raise Refused(Code.PERMISSION_DENIED, "this token belongs to another engine")

        workers.on_hello = refuse
        client.send(hello())
        assert (await client.refused()).message == "this token belongs to another engine"
        assert len(workers.calls) == 1

    async def test_one_that_never_reads_is_given_up_and_the_others_are_not(
        self, server: HandoverServer, worker: RawClient, workers: Workers, tmp_path: Path
    ) -> None:
        with RawClient(tmp_path / "h.sock") as other:
            other.send(hello())
            await other.receive()
            server.offer(MappingId(1), assignments(1))
            for number in range(20_000):
                server.fence(MappingId(1), number + 1, SessionNumber(2), [StoreId(1)] * 100)
            assert ("disconnected", 1) not in workers.calls  # not from within the manager's own call
            await wait_for_async(lambda: ("disconnected", 1) in workers.calls)
            server.fence(MappingId(2), 1, SessionNumber(2), [])
            answer = await other.receive()
            assert answer is not None and answer.fence.fence == 1
        assert server.anomalies["handover_slow_worker"] == 1
        assert ("ended", 1) not in workers.calls


class TestProof:
    async def test_bye_is_proof(self, server: HandoverServer, worker: RawClient, workers: Workers) -> None:
        server.offer(MappingId(1), assignments(1))
        worker.send(BYE)
        await wait_for_async(lambda: workers.calls[-1] == ("ended", 1))

    async def test_bye_counts_though_our_packets_were_not_read(
        self, server: HandoverServer, worker: RawClient, workers: Workers
    ) -> None:
        """Closing a socket with unread packets resets the connection; what was sent before still stands."""
        server.offer(MappingId(1), assignments(1))
        server.fence(MappingId(1), 1, SessionNumber(2), [])
        worker.send(BYE)
        worker.close()
        await wait_for_async(lambda: workers.calls[-1] == ("ended", 1))

    async def test_end_of_file_proves_nothing_while_the_process_lives(
        self, server: HandoverServer, worker: RawClient, workers: Workers
    ) -> None:
        server.offer(MappingId(1), assignments(1))
        worker.socket.shutdown(socket.SHUT_RDWR)
        await wait_for_async(lambda: workers.calls[-1] == ("disconnected", 1))
        server.fence(MappingId(1), 1, SessionNumber(1), [])  # reaches nobody, and harms nobody

    async def test_end_of_file_is_enough_for_a_worker_that_was_given_nothing(
        self, worker: RawClient, workers: Workers
    ) -> None:
        worker.close()
        await wait_for_async(lambda: workers.calls[-1] == ("ended", 1))

    async def test_a_killed_worker_has_ended_though_a_forked_child_keeps_its_connection(
        self, server: HandoverServer, workers: Workers, tmp_path: Path
    ) -> None:
        read, write = os.pipe()

        def work() -> None:
            client = RawClient(tmp_path / "h.sock")
            client.send(hello())
            client.receive_blocking()
            grandchild = fork_child(signal.pause)  # inherits the connection
            os.write(write, struct.pack("i", grandchild))
            signal.pause()

        child = fork_child(work)
        (grandchild,) = struct.unpack("i", await asyncio.to_thread(os.read, read, 4))
        os.close(read)
        os.close(write)
        server.offer(MappingId(1), assignments(1))
        assert workers.identities[MappingId(1)].pid == child
        os.kill(child, signal.SIGKILL)
        await wait_for_async(lambda: workers.calls[-1] == ("ended", 1), deadline_s=2.0)
        os.kill(grandchild, signal.SIGKILL)
        os.waitpid(child, 0)

    async def test_death_after_end_of_file_is_noticed(
        self, server: HandoverServer, workers: Workers, tmp_path: Path
    ) -> None:
        def work() -> None:
            client = RawClient(tmp_path / "h.sock")
            client.send(hello())
            client.receive_blocking()
            client.receive_blocking()
            client.close()
            signal.pause()

        child = fork_child(work)
        await wait_for_async(lambda: MappingId(1) in workers.identities)
        server.offer(MappingId(1), assignments(1))
        await wait_for_async(lambda: workers.calls[-1] == ("disconnected", 1))
        os.kill(child, signal.SIGKILL)
        await wait_for_async(lambda: workers.calls[-1] == ("ended", 1), deadline_s=2.0)
        os.waitpid(child, 0)

    async def test_a_forked_childs_bye_is_not_the_workers(
        self, server: HandoverServer, worker: RawClient, workers: Workers
    ) -> None:
        server.offer(MappingId(1), assignments(1))
        child = fork_child(lambda: worker.send(BYE))
        os.waitpid(child, 0)
        await wait_for_async(lambda: server.anomalies["handover_foreign_sender"] == 1)
        worker.send(MAPPED)  # and the worker itself goes on
        await wait_for_async(lambda: workers.calls[-1] == ("mapped", 1, 100, 101))

    async def test_a_forked_childs_hello_is_refused(self, client: RawClient, workers: Workers) -> None:
        child = fork_child(lambda: client.send(hello()))
        os.waitpid(child, 0)
        refusal = await client.refused()
        assert refusal.message.startswith(f"HELLO comes from process {child} on a connection that process ")
        assert workers.calls == []

    async def test_a_packet_without_bytes_is_no_end_of_file(
        self, serve: Serve, workers: Workers, tmp_path: Path
    ) -> None:
        """Where end-of-file is the proof, whoever inherited the connection could give it."""
        server = serve(kernel_pidfd=lambda sock: None)
        with RawClient(tmp_path / "h.sock") as client:
            client.send(hello())
            await client.receive()
            server.offer(MappingId(1), assignments(1))
            await client.receive()
            child = fork_child(lambda: client.send_bytes(b""))
            os.waitpid(child, 0)
            await wait_for_async(lambda: server.anomalies["handover_foreign_sender"] == 1)
            client.send(MAPPED)
            await wait_for_async(lambda: workers.calls[-1] == ("mapped", 1, 100, 101))
            client.send_bytes(b"")
            assert "the packet starts with b''" in (await client.refused()).message
            assert workers.calls[-1] == ("disconnected", 1)

    async def test_without_any_pidfd_end_of_file_is_the_proof_for_cpu_copies(
        self, serve: Serve, workers: Workers, tmp_path: Path
    ) -> None:
        server = serve(kernel_pidfd=lambda sock: None)
        with RawClient(tmp_path / "h.sock") as client:
            client.send(hello())
            await client.receive()
            server.offer(MappingId(1), assignments(1))
            await client.receive()
        await wait_for_async(lambda: workers.calls[-1] == ("ended", 1))

    async def test_without_any_pidfd_our_own_hanging_up_proves_nothing(
        self, serve: Serve, workers: Workers, tmp_path: Path
    ) -> None:
        server = serve(kernel_pidfd=lambda sock: None)
        with RawClient(tmp_path / "h.sock") as client:
            client.send(hello())
            await client.receive()
            server.offer(MappingId(1), assignments(1))
            await client.receive()
            client.send(hello())  # a second one: refused
            refusal = await client.refused()
            assert "may say MAPPED, FENCED, RETIRED or BYE, and said hello" in refusal.message
            assert workers.calls[-1] == ("disconnected", 1)
            client.send(BYE)  # too late to be believed
        await wait_for_async(lambda: workers.calls[-1] == ("ended", 1))

    async def test_device_dma_without_a_pidfd_is_refused(
        self, serve: Serve, workers: Workers, tmp_path: Path
    ) -> None:
        serve(kernel_pidfd=lambda sock: None)
        with RawClient(tmp_path / "h.sock") as client:
            client.send(hello(access=handover_pb2.ACCESS_DEVICE_DMA))
            refusal = await client.refused()
        assert refusal.code == Code.FAILED_PRECONDITION
        assert "needs a pidfd" in refusal.message
        assert workers.calls == []

    @pytest.mark.parametrize("role", ["worker", "scheduler"])
    async def test_a_pidfd_sent_with_hello_does_as_well(
        self, serve: Serve, workers: Workers, tmp_path: Path, role: str
    ) -> None:
        server = serve(kernel_pidfd=lambda sock: None)
        pidfd = os.pidfd_open(os.getpid())
        with RawClient(tmp_path / "h.sock") as client:
            if role == "worker":
                client.send(hello(access=handover_pb2.ACCESS_DEVICE_DMA, with_pidfd=True), [pidfd])
                await client.receive()
                identity = workers.identities[MappingId(1)]
            else:
                client.send(scheduler_hello(with_pidfd=True), [pidfd])
                answer = await client.receive()
                assert answer is not None
                redeemed = server.redeem(answer.ticket.ticket)
                assert redeemed is not None
                identity = redeemed
            assert identity.pidfd is not None
        os.close(pidfd)

    async def test_a_pidfd_of_another_process_is_refused(self, serve: Serve, tmp_path: Path) -> None:
        serve(kernel_pidfd=lambda sock: None)
        pidfd = os.pidfd_open(os.getppid())
        with RawClient(tmp_path / "h.sock") as client:
            client.send(hello(with_pidfd=True), [pidfd])
            assert f"is of process {os.getppid()}" in (await client.refused()).message
        with RawClient(tmp_path / "h.sock") as client:
            client.send(hello(with_pidfd=True))
            assert "none arrived" in (await client.refused()).message
        os.close(pidfd)


class TestBadInput:
    @pytest.mark.parametrize(
        ("fields", "code", "text"),
        [
            ({"version": None}, 9, "the client speaks protocol 0.0, kvhostd 0.1.0 speaks 1.1"),
            ({"instance_id": b"short"}, 3, "instance_id has 5 bytes, and must have 16"),
            ({"instance_id": b"x" * 17}, 3, "instance_id has 17 bytes"),
            ({"role": 0}, 3, "role is 0; allowed are 1 (scheduler), 2 (worker)"),
            ({"role": 77}, 3, "role is 77"),
            ({"access": 0}, 3, "access is 0; allowed are 1 (cpu), 2 (device DMA)"),
            ({"access": -1}, 3, "access is -1"),
            ({"rank": 1024}, 3, "rank is 1024; allowed are 0 to 1023"),
            ({"rank": 2**32 - 1}, 3, "rank is 4294967295"),
            ({"token": b""}, 3, "token has 0 bytes, and must have 32"),
            ({"token": b"x" * 33}, 3, "token has 33 bytes"),
        ],
    )
    async def test_a_wrong_hello(
        self, client: RawClient, workers: Workers, fields: dict[str, object], code: int, text: str
    ) -> None:
        client.send(hello(**fields))
        refusal = await client.refused()
        assert refusal.code == code
        assert text in refusal.message
        assert workers.calls == []

    async def test_a_newer_major_version_names_both(self, client: RawClient) -> None:
        greeting = hello()
        greeting.hello.version.major, greeting.hello.version.minor = 2, 5
        greeting.hello.version.program = "kvhost 2.5.1"
        client.send(greeting)
        refusal = await client.refused()
        assert refusal.message.startswith(
            "kvhost 2.5.1 speaks protocol 2.5, kvhostd 0.1.0 speaks 1.1; install"
        )

    @pytest.mark.parametrize(
        ("data", "code", "parts"),
        [
            (b"GET / HTTP/1.1\r\n\r\n", 9, ["b'GET '", "kvhostd 0.1.0", "b'KVH1'", "protocol 1.1"]),
            (b"KVH2\x0a\x00", 9, ["b'KVH2'", "b'KVH1'"]),
            (b"K", 9, ["b'K'"]),
            (MAGIC, 9, ["must be HELLO, and is nothing known"]),
            (MAGIC + b"\xff\xff\xff", 3, ["no kvhost.v1.ToDaemon message"]),
            (MAGIC + MAPPED.SerializeToString(), 9, ["must be HELLO, and is mapped"]),
            (MAGIC + bytes(LARGEST_PACKET), 3, ["65536 bytes"]),
        ],
    )
    async def test_what_is_no_hello(
        self, client: RawClient, server: HandoverServer, data: bytes, code: int, parts: list[str]
    ) -> None:
        client.send_bytes(data)
        refusal = await client.refused()
        assert refusal.code == code
        for part in parts:
            assert part in refusal.message
        assert server.anomalies["handover_bad_packet"] == 1

    async def test_what_a_peer_sends_after_its_last_packet_does_not_hide_our_answer(
        self, client: RawClient
    ) -> None:
        client.send(hello(rank=5000))
        for _ in range(10):
            client.send(MAPPED)
        assert "rank is 5000" in (await client.refused()).message

    async def test_descriptors_nobody_asked_for_are_closed(
        self, server: HandoverServer, worker: RawClient, workers: Workers
    ) -> None:
        before = fd_count(os.getpid())
        worker.send(MAPPED, [0])
        await wait_for_async(lambda: len(workers.calls) == 2)
        assert fd_count(os.getpid()) == before
        assert server.anomalies["handover_unasked_fd"] == 1
        worker.send(MAPPED, [0] * 200)
        assert "has more" in (await worker.refused()).message
        assert fd_count(os.getpid()) <= before
        assert len(workers.calls) == 3 and workers.calls[2] == ("ended", 1)

    async def test_a_manager_that_fails_costs_one_connection(
        self, worker: RawClient, workers: Workers, caplog: pytest.LogCaptureFixture
    ) -> None:
        workers.worker_mapped = None  # type: ignore[assignment, method-assign]
        worker.send(MAPPED)
        assert "failed to handle this packet" in (await worker.refused()).message
        assert "could not be handled" in caplog.text


class TestPeers:
    async def test_a_user_that_is_not_allowed_is_told_so(
        self, serve: Serve, tmp_path: Path, workers: Workers
    ) -> None:
        server = serve(allow=AllowList(frozenset([4242]), frozenset([4343]), 65534))
        with RawClient(tmp_path / "h.sock") as client:
            client.send(hello())
            refusal = await client.refused()
        assert refusal.code == Code.PERMISSION_DENIED
        assert f"uid {os.getuid()}, gid {os.getgid()} may not use this daemon" in refusal.message
        assert "uid 4242, gid 4343" in refusal.message
        assert workers.calls == []
        assert server.anomalies["handover_peer_refused"] == 1

    async def test_the_overflow_uid_is_nobody(self, serve: Serve, tmp_path: Path) -> None:
        serve(allow=AllowList(frozenset([os.getuid()]), frozenset(), os.getuid()))
        with RawClient(tmp_path / "h.sock") as client:
            client.send(scheduler_hello())
            assert "overflow uid and names nobody" in (await client.refused()).message

    async def test_silence_is_ended_after_the_deadline(self, serve: Serve, tmp_path: Path) -> None:
        server = serve(hello_deadline_s=0.05)
        with RawClient(tmp_path / "h.sock") as silent:
            assert "no HELLO came within 0.05 s" in (await silent.refused()).message
        assert server.anomalies["handover_no_hello"] == 1

    async def test_the_oldest_silent_connection_makes_room_for_a_new_one(
        self, server: HandoverServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handover_module, "MOST_WITHOUT_HELLO", 4)
        silent = [RawClient(tmp_path / "h.sock") for _ in range(6)]
        with RawClient(tmp_path / "h.sock") as client:
            client.send(hello())
            answer = await client.receive()
            assert answer is not None and answer.HasField("welcome")
        for connection in silent[:3]:
            assert "4 others also connected without HELLO" in (await connection.refused()).message
        for connection in silent:
            connection.close()

    async def test_there_is_a_most_of_connections(self, serve: Serve, tmp_path: Path) -> None:
        serve(most_connections=2)
        with RawClient(tmp_path / "h.sock") as one, RawClient(tmp_path / "h.sock") as two:
            for number, client in enumerate((one, two)):
                client.send(hello(rank=number))
                await client.receive()
            with RawClient(tmp_path / "h.sock") as three:
                three.send(hello())
                refusal = await three.refused()
                assert refusal.code == Code.RESOURCE_EXHAUSTED
                assert "2 connections are open, which is the most" in refusal.message

    async def test_out_of_descriptors_it_waits_and_goes_on(
        self, serve: Serve, tmp_path: Path, workers: Workers
    ) -> None:
        failing = [True]

        def scarce(sock: socket.socket) -> int | None:
            if failing:
                raise OSError(24, "Too many open files")
            return pidfd_of(sock)

        server = serve(kernel_pidfd=scarce)
        with RawClient(tmp_path / "h.sock") as unlucky:
            assert await unlucky.receive() is None
        assert server.anomalies["handover_accept_failed"] == 1
        failing.clear()
        with RawClient(tmp_path / "h.sock") as client:
            client.send(hello())
            assert await client.receive() is not None


def _fetch_ticket_and_wait(folder: Path, write: int) -> None:
    with RawClient(folder / "h.sock") as client:
        client.send(scheduler_hello())
        answer = client.receive_blocking()
    assert answer is not None
    os.write(write, answer.ticket.ticket)
    signal.pause()
