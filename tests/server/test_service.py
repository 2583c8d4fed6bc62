"""The Cache service over the wire: batches, notices, watching, and what it refuses."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from kvhost_client.admin import AdminClient
from kvhost_client.handover import fetch_ticket
from kvhost_client.types import Chunk, StoreOf
from kvhost_proto.v1 import cache_pb2, cache_pb2_grpc, common_pb2
from tests.client.engine import KEY_BYTES, Engine, key, keys, spec
from tests.support import Daemon, memory_kib, pat, wait_for


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as running:
        yield running


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    with Engine(daemon.socket) as attached:
        yield attached


@contextmanager
def cache(daemon: Daemon) -> Iterator[cache_pb2_grpc.CacheStub]:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        yield cache_pb2_grpc.CacheStub(channel)


@contextmanager
def raw_session(daemon: Daemon) -> Iterator[tuple[cache_pb2_grpc.CacheStub, bytes]]:
    """A session as a client in another language would open it: its stub and its secret id."""
    ticket = fetch_ticket(daemon.handover_socket, pat("raw", 0, 16), 5.0)
    version = common_pb2.Version(major=1)
    with cache(daemon) as stub:
        stream = stub.OpenSession(cache_pb2.OpenSessionRequest(ticket=ticket.ticket, version=version))
        yield stub, next(stream).opened.session_id
        stream.cancel()


class Replica:
    """A router's picture of a namespace, kept by its Watch stream alone."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes] = {}
        self.gaps = 0
        self.synced = 0
        self.sequences: list[int] = []

    def apply(self, event: cache_pb2.WatchEvent) -> None:
        self.sequences.append(event.sequence)
        kind = event.WhichOneof("kind")
        if kind == "gap":
            self.parents.clear()
            self.gaps += 1
        elif kind == "synced":
            self.synced += 1
        else:
            told: cache_pb2.KeyList = getattr(event, kind)
            for at in range(0, len(told.keys), told.key_bytes):
                one = told.keys[at : at + told.key_bytes]
                if kind == "stored":
                    self.parents[one] = told.parents[at : at + told.key_bytes]
                else:
                    del self.parents[one]


def test_replaying_a_watch_gives_exactly_what_is_stored(daemon: Daemon) -> None:
    names = keys("watched", 6)
    with Engine(daemon.socket, model="watched") as engine, cache(daemon) as stub:
        engine.store(names[:3])
        number = str(engine.declared.namespace_number)
        stream = stub.Watch(cache_pb2.WatchRequest(namespace=number), timeout=20)
        replica = Replica()
        events = iter(stream)
        while not replica.synced:
            replica.apply(next(events))
        assert set(replica.parents) == set(names[:3])
        assert replica.parents[names[2]] == names[1]
        assert replica.parents[names[0]] == bytes(KEY_BYTES)
        engine.store(names[3:])
        while len(replica.parents) < 6:
            replica.apply(next(events))
        with AdminClient(daemon.socket) as admin:
            admin.evict([names[5].hex()], namespace=number)
            while len(replica.parents) > 5:
                replica.apply(next(events))
            assert set(replica.parents) == set(names[:5])
            admin.reset(number)
        while replica.synced < 2:
            replica.apply(next(events))
        assert replica.parents == {}
        assert replica.sequences == sorted(set(replica.sequences))
        stream.cancel()


def test_sessions_hear_of_keys_that_left(daemon: Daemon, engine: Engine) -> None:
    names = keys("leaving", 2)
    engine.store(names)
    with AdminClient(daemon.socket) as admin:
        admin.evict([names[1].hex()], namespace=str(engine.declared.namespace_number))
    wait_for(
        lambda: any(names[1] in n.removed.keys for n in engine.notices if n.HasField("removed")),
        what="the notice of a removed key",
    )


def test_one_bad_item_does_not_spoil_a_batch(engine: Engine) -> None:
    good, bad = key("good"), key("bad")
    ((store, slot),) = engine.grant(1)
    engine.write(slot, good, [store])
    result = engine.session.update(
        commits=[StoreOf(store, Chunk(0, good, b"")), StoreOf(store + 1000, Chunk(0, bad, b""))],
        releases=[123456],
    )
    assert {(e.id, e.code) for e in result.errors} == {(store + 1000, 9), (123456, 5)}
    assert engine.wrong_bytes([good]) == []


def code_of(call: object, request: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=5)  # type: ignore[operator]
    return caught.value.code(), caught.value.details()


def test_bad_fields_are_refused_by_name(daemon: Daemon) -> None:
    chain = cache_pb2.Chain(group=0, semantics=1, key_bytes=KEY_BYTES, keys=bytes(KEY_BYTES))
    query = cache_pb2.LookupQuery(tag=1, chains=[chain])
    before = daemon.status()
    with raw_session(daemon) as (stub, secret):
        stub.DeclareNamespace(cache_pb2.DeclareNamespaceRequest(session_id=secret, spec=spec()))
        code, text = code_of(stub.Lookup, cache_pb2.LookupRequest(session_id=b"x" * 16, queries=[query]))
        assert (code, "no such session" in text) == (grpc.StatusCode.NOT_FOUND, True)
        chain.semantics = 9  # type: ignore[assignment]
        query = cache_pb2.LookupQuery(tag=1, chains=[chain])
        code, text = code_of(stub.Lookup, cache_pb2.LookupRequest(session_id=secret, queries=[query]))
        assert (code, "semantics 9" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        chain.semantics, chain.keys = common_pb2.SEMANTICS_PREFIX, bytes(KEY_BYTES * 16385)
        query = cache_pb2.LookupQuery(tag=1, chains=[chain])
        code, text = code_of(stub.Lookup, cache_pb2.LookupRequest(session_id=secret, queries=[query]))
        assert (code, "in pages" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        code, _ = code_of(stub.Reserve, cache_pb2.ReserveRequest(session_id=secret, count=1 << 20))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    after = daemon.status()
    assert before.counters["granted_slots"] == after.counters["granted_slots"]
    daemon.check_integrity()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("shard_bytes", 0, "layout.shard_bytes is 0"),
        ("shard_bytes", 1 << 41, "allowed are 1 to"),
        ("shard_bytes", 2 << 20, "--segment-size"),
        ("ranks", 5000, "layout.ranks is 5000"),
        ("shards", 3, "allowed are 1 and the number of ranks"),
        ("key_bytes", 1, "layout.key_bytes is 1"),
    ],
)
def test_impossible_layouts_are_refused(
    engine: Engine, daemon: Daemon, field: str, value: int, words: str
) -> None:
    wrong = spec("wrong")
    setattr(wrong.layout, field, value)
    with raw_session(daemon) as (stub, secret):
        request = cache_pb2.DeclareNamespaceRequest(session_id=secret, spec=wrong)
        _, text = code_of(stub.DeclareNamespace, request)
    assert words in text


def test_a_ticket_nobody_gave_opens_nothing(daemon: Daemon) -> None:
    with cache(daemon) as stub, pytest.raises(grpc.RpcError) as caught:
        version = common_pb2.Version(major=1)
        next(
            iter(stub.OpenSession(cache_pb2.OpenSessionRequest(ticket=bytes(32), version=version), timeout=5))
        )
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_another_major_version_is_told_both(daemon: Daemon) -> None:
    with cache(daemon) as stub, pytest.raises(grpc.RpcError) as caught:
        version = common_pb2.Version(major=9, program="kvhost 9.0")
        next(iter(stub.OpenSession(cache_pb2.OpenSessionRequest(version=version), timeout=5)))
    assert "speaks protocol 9.0" in caught.value.details()
    assert "speaks 1.1" in caught.value.details()


def test_an_engine_that_resets_often_costs_no_memory() -> None:
    """Every reset makes a namespace and leaves one behind."""
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as daemon, Engine(daemon.socket) as engine:

        def reset(times: int) -> int:
            for _ in range(times):
                engine.session.reset("")
                engine.store(keys("reset", 2))
            return memory_kib(daemon.pid, "RssAnon")

        before = reset(50)
        assert reset(150) - before < 3 * 1024
