"""Questions as messages of one stream: in order, one reply each, and nothing lives by the stream."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from kvhost_proto.v1 import cache_pb2, cache_pb2_grpc, common_pb2
from kvhost_server.errors import Code
from kvhost_server.exchange import answer
from tests.client.engine import KEY_BYTES, Engine, keys
from tests.support import Daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as running:
        yield running


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    with Engine(daemon.socket) as attached:
        yield attached


@pytest.fixture
def stub(daemon: Daemon) -> Iterator[cache_pb2_grpc.CacheStub]:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        yield cache_pb2_grpc.CacheStub(channel)


def lookup(engine: Engine, names: list[bytes], pin: bool = False) -> cache_pb2.LookupRequest:
    chain = cache_pb2.Chain(semantics=common_pb2.SEMANTICS_PREFIX, key_bytes=KEY_BYTES, keys=b"".join(names))
    query = cache_pb2.LookupQuery(tag=9, chains=[chain])
    return cache_pb2.LookupRequest(session_id=engine.session._connection.session_id, queries=[query], pin=pin)


def test_every_message_gets_one_reply_in_order(engine: Engine, stub: cache_pb2_grpc.CacheStub) -> None:
    names = keys("exchanged", 3)
    engine.store(names)
    secret = engine.session._connection.session_id
    questions = [
        cache_pb2.ExchangeRequest(id=7, lookup=lookup(engine, names, pin=True)),
        cache_pb2.ExchangeRequest(id=3),
        cache_pb2.ExchangeRequest(id=4, reserve=cache_pb2.ReserveRequest(session_id=secret, count=1)),
        cache_pb2.ExchangeRequest(id=4, update=cache_pb2.UpdateRequest(session_id=secret, releases=[424242])),
    ]
    replies = list(stub.Exchange(iter(questions), timeout=10))
    assert [reply.id for reply in replies] == [7, 3, 4, 4]
    assert [reply.WhichOneof("kind") for reply in replies] == ["lookup", None, "reserve", "update"]
    assert {reply.stamp.boot_id for reply in replies} == {engine.session.boot_id}
    (found,) = replies[0].lookup.answers
    assert (found.tag, found.chains[0].found, len(found.chains[0].slots)) == (9, b"\1\1\1", 3)
    assert len(replies[2].reserve.store_ids) == 1
    assert [error.id for error in replies[3].update.errors] == [424242]
    # The stream is over; what was pinned and granted by it is the session's.
    assert engine.session.update(releases=[found.chains[0].first_pin_id]).errors == []


def test_a_refused_message_does_not_end_the_stream(engine: Engine, stub: cache_pb2_grpc.CacheStub) -> None:
    stranger = cache_pb2.LookupRequest(session_id=b"x" * 16)
    wrong = lookup(engine, [b"short"])
    messages = [
        cache_pb2.ExchangeRequest(id=n, lookup=question) for n, question in enumerate((stranger, wrong))
    ]
    first, second, third = stub.Exchange(iter([*messages, cache_pb2.ExchangeRequest(id=5)]), timeout=10)
    assert (first.refused.code, second.refused.code) == (Code.NOT_FOUND, Code.INVALID_ARGUMENT)
    assert "no such session" in first.refused.message
    assert (third.id, third.WhichOneof("kind")) == (5, None)


def test_bytes_that_are_no_message_end_the_stream_and_nothing_else(daemon: Daemon, engine: Engine) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        send = channel.stream_stream("/kvhost.v1.Cache/Exchange")
        replies = send(iter([b"\x08\x01", b"\xff" * 40]), timeout=10)
        assert cache_pb2.ExchangeReply.FromString(next(replies)).id == 1
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    engine.session.ping()
    daemon.check_integrity()
    assert "Traceback" not in daemon.log


def test_a_failure_in_the_daemon_is_that_message_s_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(request: object) -> object:
        raise ZeroDivisionError

    question = cache_pb2.ExchangeRequest(id=2, lookup=cache_pb2.LookupRequest())
    reply = asyncio.run(answer(question, {"lookup": fails}, boot_id=7))
    assert (reply.id, reply.refused.code, reply.stamp.boot_id) == (2, Code.UNKNOWN, 7)
    assert "ZeroDivisionError" in caplog.text
