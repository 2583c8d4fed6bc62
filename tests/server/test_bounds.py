"""What one message, and one peer, may cost everybody else: counts are refused before work is done (I13)."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import pytest

import tests.client.engine as engines
from kvhost_client.handover import fetch_ticket
from kvhost_client.types import Abort, ChainQuery, Chunk, Semantics
from kvhost_proto.v1 import cache_pb2, cache_pb2_grpc, common_pb2, handover_pb2
from kvhost_server.errors import Code, Refused
from kvhost_server.manager import Manager
from tests.client.engine import KEY_BYTES, Engine, keys, spec
from tests.server.rawclient import RawClient, hello
from tests.server.world import Identity, Outbox
from tests.support import Daemon, fork_child, wait_for

MANY = 100_000
SEGMENT = 1 << 20


@dataclass
class Raw:
    """A session of a client that may say anything."""

    stub: cache_pb2_grpc.CacheStub
    session_id: bytes

    def refusal(self, method: str, request: object) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            getattr(self.stub, method)(request, timeout=20)
        return caught.value.code(), caught.value.details() or ""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as running:
        yield running


@contextmanager
def raw_session(daemon: Daemon, label: str = "raw") -> Iterator[Raw]:
    ticket = fetch_ticket(daemon.handover_socket, secrets.token_bytes(16), 5.0).ticket
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{daemon.socket}", options) as channel:
        stub = cache_pb2_grpc.CacheStub(channel)
        request = cache_pb2.OpenSessionRequest(
            ticket=ticket, version=common_pb2.Version(major=1), label=label
        )
        stream = stub.OpenSession(request)
        yield Raw(stub, next(stream).opened.session_id)
        stream.cancel()


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[Raw]:
    with raw_session(daemon) as opened:
        opened.stub.DeclareNamespace(
            cache_pb2.DeclareNamespaceRequest(session_id=opened.session_id, spec=spec("bounds")), timeout=5
        )
        yield opened


def chain(count: int, key_bytes: int = KEY_BYTES, group: int = 0) -> cache_pb2.Chain:
    return cache_pb2.Chain(
        group=group,
        semantics=common_pb2.SEMANTICS_SET,
        key_bytes=key_bytes,
        keys=b"".join(keys("one", 1)) * count,
    )


def lookup_of(*chains: cache_pb2.Chain) -> Callable[[bytes], cache_pb2.LookupRequest]:
    return lambda session: cache_pb2.LookupRequest(
        session_id=session, queries=[cache_pb2.LookupQuery(chains=chains)]
    )


@pytest.mark.parametrize(
    ("method", "request_of", "text"),
    [
        ("Lookup", lookup_of(chain(MANY)), "100000 keys in one lookup; allowed are 16384"),
        ("Lookup", lookup_of(*[chain(0)] * MANY), "100000 chains in one lookup"),
        (
            "Lookup",
            lambda session: cache_pb2.LookupRequest(
                session_id=session, queries=[cache_pb2.LookupQuery()] * MANY
            ),
            "100000 queries in one lookup",
        ),
        (
            "Lookup",
            lambda session: cache_pb2.LookupRequest(
                namespace="bounds", queries=[cache_pb2.LookupQuery()] * MANY
            ),
            "100000 queries in one lookup",
        ),
        (
            "Update",
            lambda session: cache_pb2.UpdateRequest(session_id=session, releases=range(MANY)),
            "100000 items in one update; allowed are 16384",
        ),
        (
            "Update",
            lambda session: cache_pb2.UpdateRequest(session_id=session, touches=[chain(0)] * MANY),
            "100000 items in one update",
        ),
        (
            "Update",
            lambda session: cache_pb2.UpdateRequest(session_id=session, touches=[chain(MANY)] * 3),
            "300000 touched keys in one update; allowed are 262144",
        ),
        (
            "Update",
            lambda session: cache_pb2.UpdateRequest(
                session_id=session, aborts=[cache_pb2.Abort(store_id=1, unquiet_ranks=range(MANY))] * 11
            ),
            "1100000 unquiet ranks in one update",
        ),
        (
            "Reserve",
            lambda session: cache_pb2.ReserveRequest(session_id=session, count=2**32 - 1),
            "4294967295 slots in one call; allowed are 16384",
        ),
        (
            "Reserve",
            lambda session: cache_pb2.ReserveRequest(session_id=session, chunks=[cache_pb2.Chunk()] * MANY),
            "100000 slots in one call",
        ),
    ],
)
def test_too_many_in_one_message(
    daemon: Daemon, raw: Raw, method: str, request_of: Callable[[bytes], object], text: str
) -> None:
    request = request_of(raw.session_id)
    if isinstance(request, cache_pb2.LookupRequest) and request.namespace:
        request.namespace = next(str(n.number) for n in daemon.status().namespaces if n.model == "bounds")
    code, details = raw.refusal(method, request)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert text in details
    daemon.check_integrity()


@pytest.mark.parametrize("key_bytes", [0, 1, KEY_BYTES - 1, KEY_BYTES + 1, 2**32 - 1])
def test_a_claimed_key_length_does_not_count(raw: Raw, key_bytes: int) -> None:
    """With a large one, any number of keys would be few."""
    code, details = raw.refusal("Lookup", lookup_of(chain(2, key_bytes))(raw.session_id))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"key_bytes is {key_bytes}; keys of the namespace have {KEY_BYTES} bytes" in details
    reply = raw.stub.Update(
        cache_pb2.UpdateRequest(session_id=raw.session_id, touches=[chain(2, key_bytes)]), timeout=5
    )
    assert [(error.kind, error.code) for error in reply.errors] == [(cache_pb2.ITEM_KIND_TOUCH, 3)]


def test_too_many_tokens(daemon: Daemon, raw: Raw) -> None:
    workers = [cache_pb2.WorkerToken(rank=0, token=secrets.token_bytes(32)) for _ in range(1025)]
    request = cache_pb2.DeclareNamespaceRequest(
        session_id=raw.session_id, spec=spec("bounds"), workers=workers
    )
    code, details = raw.refusal("DeclareNamespace", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "1025 tokens were named; allowed are 1024" in details


def test_a_description_of_any_length(daemon: Daemon, raw: Raw) -> None:
    described = spec("bounds")
    for number in range(5):
        described.parts.add(name=f"part {number}", value="x" * 60_000)
    request = cache_pb2.DeclareNamespaceRequest(session_id=raw.session_id, spec=described)
    code, details = raw.refusal("DeclareNamespace", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "allowed are 0 to 262144" in details


def test_status_fits_into_a_reply_whatever_was_declared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each namespace keeps a segment, and so its description."""
    with Daemon("96MiB", ["--segment-size", "1MiB"]) as daemon, raw_session(daemon) as raw:
        for number in range(96):
            described = spec(f"model {number}")
            for part in range(4):
                described.parts.add(name=f"part {part}", value="x" * 60_000)
            request = cache_pb2.DeclareNamespaceRequest(session_id=raw.session_id, spec=described)
            raw.stub.DeclareNamespace(request, timeout=5)
        status = daemon.status()
        assert len(status.namespaces) == 96
        assert status.namespaces[0].parts and not status.namespaces[95].parts
        assert status.ByteSize() < 8 << 20


def test_a_pin_that_is_refused_holds_nothing(daemon: Daemon) -> None:
    """The caller of a lookup that failed knows no pin ids to give back: none may have been made."""
    with Engine(daemon.socket) as engine, grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        names = keys("partly", 3)
        engine.store(names)
        good = cache_pb2.Chain(
            group=0, semantics=common_pb2.SEMANTICS_PREFIX, key_bytes=KEY_BYTES, keys=b"".join(names)
        )
        for bad in (chain(1, group=7), chain(1, key_bytes=5), cache_pb2.Chain(group=0, semantics=9)):
            request = lookup_of(good, bad)(engine.session._connection.session_id)
            request.pin = True
            with pytest.raises(grpc.RpcError) as caught:
                cache_pb2_grpc.CacheStub(channel).Lookup(request, timeout=5)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert [s.pins for s in daemon.status().sessions] == [0]


def test_touching_more_than_a_slice_keeps_the_head_newest(daemon: Daemon) -> None:
    """A chain of more keys than one slice is touched from its tail on, so the head outlives it (I10)."""
    with Engine(daemon.socket, model="touched") as engine:
        names = keys("chain", 4)
        engine.store(names)
        filler = [names[0]] * 5000
        long = ChainQuery(0, Semantics.PREFIX, [*names[1:3], *filler, names[3]])
        assert not engine.session.update(touches=[long]).errors
        assert engine.wrong_bytes(names) == []
    daemon.check_integrity()


class TestMany:
    def test_watches(self, daemon: Daemon) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"unix:{daemon.socket}", options) as channel:
            stub = cache_pb2_grpc.CacheStub(channel)
            streams = [stub.Watch(cache_pb2.WatchRequest()) for _ in range(257)]
            wait_for(lambda: any(s.done() for s in streams), 20, "the watch that is too much")
            (refused,) = [s for s in streams if s.done()]
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "256 watches are open, which is the limit" in (refused.details() or "")
            for stream in streams:
                stream.cancel()

    def test_parked_workers_of_one_user_bar_no_other(self) -> None:
        with Daemon("8MiB", ["--segment-size", "1MiB", "--allow-uid", "4242"]) as daemon:
            daemon.folder.chmod(0o755)
            os.chmod(daemon.handover_socket, 0o666)
            parked, release = os.pipe(), os.pipe()

            def park() -> None:
                os.setgroups([])
                os.setgid(4242)
                os.setuid(4242)
                clients = [RawClient(daemon.handover_socket) for _ in range(257)]
                answers = []
                for client in clients:
                    client.send(hello(token=os.urandom(32), instance_id=os.urandom(16)))
                    answers.append(client.receive_blocking())
                refused = [a.refused.message for a in answers if a is not None and a.HasField("refused")]
                os.write(parked[1], "\n".join(refused).encode())
                os.read(release[0], 1)

            child = fork_child(park)
            refusals = os.read(parked[0], 4096).decode()
            assert refusals == (
                "256 workers of uid 4242 already wait for their session; is a scheduler missing?"
            )
            with Engine(daemon.socket) as engine:
                engine.store(keys("beside", 2))
            os.write(release[1], b"x")
            assert os.waitpid(child, 0)[1] == 0
            for fd in (*parked, *release):
                os.close(fd)
            wait_for(lambda: not daemon.status().sessions, 5)
            daemon.check_integrity()

    def test_sessions_of_one_engine_whose_workers_hang(self, daemon: Daemon) -> None:
        """Each would leave a fence that nobody answers."""
        with Engine(daemon.socket, model="hanging") as engine:
            engine.store(keys("hanging", 1))
            options = [("grpc.use_local_subchannel_pool", 1)]
            with RawClient(daemon.handover_socket) as deaf:  # a worker that takes segments and says nothing
                token = secrets.token_bytes(32)
                instance = secrets.token_bytes(16)
                deaf.send(hello(token=token, instance_id=instance))
                with grpc.insecure_channel(f"unix:{daemon.socket}", options) as channel:
                    stub = cache_pb2_grpc.CacheStub(channel)
                    code = None
                    for number in range(80):
                        ticket = fetch_ticket(daemon.handover_socket, instance, 5.0).ticket
                        stream = stub.OpenSession(
                            cache_pb2.OpenSessionRequest(ticket=ticket, version=common_pb2.Version(major=1))
                        )
                        try:
                            session = next(stream).opened.session_id
                        except grpc.RpcError as error:
                            code, details = error.code(), error.details() or ""
                            break
                        workers = [] if number else [cache_pb2.WorkerToken(rank=0, token=token)]
                        declaration = cache_pb2.DeclareNamespaceRequest(
                            session_id=session, spec=engine.spec, workers=workers
                        )
                        stub.DeclareNamespace(declaration, timeout=5)
                    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert "64 earlier sessions of this engine still wait" in details
                deaf.send(handover_pb2.ToDaemon(bye=handover_pb2.Bye()))
        wait_for(lambda: not daemon.status().sessions, 5, "every session to be over")
        daemon.check_integrity()


def test_many_aborts_ask_each_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fence a store would be more packets than a worker can read, and it would be given up."""
    monkeypatch.setattr(engines, "SHARD_BYTES", 4000)
    with Daemon("80MiB", ["--segment-size", "40MiB"]) as daemon, Engine(daemon.socket) as engine:
        chunks = [Chunk(0, name) for name in keys("storm", 2_500)]
        stores = [chunk.store_id for chunk in engine.session.reserve(0, chunks).chunks]
        assert all(stores)
        assert not engine.session.update(aborts=[Abort(store, (0,)) for store in stores]).errors
        wait_for(lambda: not daemon.status().sessions[0].quarantined, 5, "the worker's answer to the fence")
        anomalies = daemon.status().anomalies
        assert anomalies["quarantined_slots"] == 2_500
        assert anomalies["handover_slow_worker"] == 0
        engine.store(keys("after", 2))
        assert engine.wrong_bytes(keys("after", 2)) == []
        daemon.check_integrity()


def test_sessions_of_one_user_bar_no_other() -> None:
    manager = Manager(1, SEGMENT, 4, Outbox(), lambda: 0.0)
    for number in range(512):
        manager.open_session(Identity(number.to_bytes(16, "big"), uid=1001), "")
    with pytest.raises(Refused, match="uid 1001 has 512 sessions open") as caught:
        manager.open_session(Identity(b"one too many....", uid=1001), "")
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    manager.open_session(Identity(b"of another user.", uid=1002), "")


def test_a_label_is_one_line(daemon: Daemon) -> None:
    with raw_session(daemon, "evil\n2026-01-01T00:00:00.000Z INFO    forged \x1b[31m" + "x" * 400):
        (label,) = [s.label for s in daemon.status().sessions if "evil" in s.label]
        assert len(label) == 256
        assert label.isprintable()
    assert not [line for line in daemon.log.splitlines() if line.startswith("2026-01-01")]


def test_a_refusal_always_fits_into_a_status(daemon: Daemon) -> None:
    """Longer ones come as another error of gRPC's own, without a word of ours."""
    with raw_session(daemon) as raw:
        with pytest.raises(grpc.RpcError) as caught:
            next(raw.stub.Watch(cache_pb2.WatchRequest(namespace="x" * MANY), timeout=5))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        request = cache_pb2.OpenSessionRequest(version=common_pb2.Version(major=9, program="y" * MANY))
        with pytest.raises(grpc.RpcError) as caught:
            next(raw.stub.OpenSession(request, timeout=5))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "speaks protocol 9.0" in (caught.value.details() or "")
