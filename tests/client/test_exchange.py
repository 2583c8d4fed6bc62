"""The stream for questions: used where the daemon knows it, done without where it does not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvhost_client.errors import BadReply, DeadlineExceeded, InvalidArgument, SessionEnded
from kvhost_client.session import Session
from kvhost_proto.v1 import cache_pb2
from tests.client.engine import Engine, key, keys, prefix
from tests.client.test_replies import Fake, FakeCache, stamp
from tests.support import Daemon, wait_for

# A kvhostd of before there was such a stream.
OLD_DAEMON = """
import sys
from kvhost_proto.v1 import cache_pb2_grpc
from kvhost_server import cli, service

class WithoutExchange:
    def __init__(self, server):
        self.server = server
    def add_generic_rpc_handlers(self, handlers):
        for handler in handlers:
            del handler._method_handlers["/kvhost.v1.Cache/Exchange"]
        self.server.add_generic_rpc_handlers(handlers)
    def add_registered_method_handlers(self, service, handlers):
        del handlers["Exchange"]
        self.server.add_registered_method_handlers(service, handlers)

add = cache_pb2_grpc.add_CacheServicer_to_server
cache_pb2_grpc.add_CacheServicer_to_server = lambda servicer, server: add(servicer, WithoutExchange(server))
sys.argv = ["kvhostd", *sys.argv[4:]]
cli.main()
"""


Answer = Callable[[cache_pb2.ExchangeRequest], cache_pb2.ExchangeReply]
Opened = Callable[[Answer], Session]


def has_stream(session: Session) -> bool:
    exchange = session._connection._exchange
    return exchange is not None and exchange.ready


def stream_has_ended(session: Session) -> bool:
    exchange = session._connection._exchange
    return exchange is not None and exchange.ended


def test_an_old_daemon_is_asked_by_calls() -> None:
    with Daemon("8MiB", ["--segment-size", "1MiB"], prefix=(sys.executable, "-c", OLD_DAEMON)) as daemon:
        with Engine(daemon.socket) as engine:
            wait_for(lambda: stream_has_ended(engine.session), what="the daemon to refuse the stream")
            assert not has_stream(engine.session)
            engine.store(keys("a", 4))
            assert engine.wrong_bytes(keys("a", 4)) == []
            assert not engine.session.ended
            with pytest.raises(InvalidArgument):
                engine.session.lookup([prefix([b"short"])])
        daemon.check_integrity()


def test_a_new_daemon_is_asked_by_the_stream(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for(lambda: has_stream(engine.session))

    def no_calls(*arguments: object) -> None:
        raise AssertionError("a call of its own")

    monkeypatch.setattr(engine.session._connection, "call", no_calls)
    engine.store(keys("a", 4))
    assert engine.wrong_bytes(keys("a", 4)) == []
    with pytest.raises(InvalidArgument, match="5 bytes of keys"):
        engine.session.lookup([prefix([b"short"])])
    assert not engine.session.ended


def test_many_threads_get_their_own_answers(engine: Engine) -> None:
    wait_for(lambda: has_stream(engine.session))
    engine.store(keys("a", 8))
    wrong: list[object] = []

    def ask(count: int) -> None:
        for _ in range(50):
            (answer,) = engine.session.lookup([prefix([*keys("a", count), key(f"absent {count}")], count)])
            if (answer.tag, answer.chains[0].hits) != (count, count):
                wrong.append(answer)

    threads = [threading.Thread(target=ask, args=(count,)) for count in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_late_answer_is_not_the_next_one_s(daemon: Daemon, engine: Engine) -> None:
    wait_for(lambda: has_stream(engine.session))
    engine.store(keys("a", 2))
    daemon.freeze()
    with pytest.raises(DeadlineExceeded):
        engine.session.lookup([prefix(keys("a", 2))], deadline_s=0.05)
    daemon.thaw()
    (answer,) = engine.session.lookup([prefix([key("absent")])])
    assert answer.chains[0].hits == 0


class TestADaemonThatIsNone:
    """Streams that no kvhostd has."""

    @pytest.fixture
    def opened(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
        """Opens a session with a daemon that answers so."""
        fakes: list[Fake] = []

        def opened(answer: Answer) -> Session:
            def exchange(
                cache: FakeCache, requests: Iterator[cache_pb2.ExchangeRequest], context: object
            ) -> Iterator[cache_pb2.ExchangeReply]:
                yield cache_pb2.ExchangeReply(id=next(requests).id, stamp=stamp())
                yield from map(answer, requests)

            monkeypatch.setattr(FakeCache, "Exchange", exchange)
            fakes.append(Fake(folder))
            session = fakes[0].open()
            wait_for(lambda: has_stream(session), what="the stream to be answered")
            return session

        yield opened
        for fake in fakes:
            fake.close()

    def test_a_stream_that_breaks_ends_the_session(self, opened: Opened) -> None:
        def breaks(request: cache_pb2.ExchangeRequest) -> cache_pb2.ExchangeReply:
            raise ZeroDivisionError

        session = opened(breaks)
        with pytest.raises(SessionEnded):
            session.update(releases=[1], deadline_s=5.0)
        wait_for(lambda: session.ended)
        assert "stream for questions" in session.end_reason

    def test_an_answer_of_another_kind(self, opened: Opened) -> None:
        def other(request: cache_pb2.ExchangeRequest) -> cache_pb2.ExchangeReply:
            return cache_pb2.ExchangeReply(
                id=request.id, stamp=stamp(), update=cache_pb2.UpdateReply(stamp=stamp())
            )

        session = opened(other)
        with pytest.raises(BadReply, match="answered Reserve with update"):
            session.reserve(1, deadline_s=5.0)
        assert session.ended

    def test_an_answer_of_another_boot(self, opened: Opened) -> None:
        def foreign(request: cache_pb2.ExchangeRequest) -> cache_pb2.ExchangeReply:
            return cache_pb2.ExchangeReply(
                id=request.id, stamp=stamp(8), refused=cache_pb2.Refusal(code=3, message="no")
            )

        session = opened(foreign)
        with pytest.raises(SessionEnded, match="another daemon"):
            session.reserve(1, deadline_s=5.0)

    def test_a_code_that_grpc_does_not_have(self, opened: Opened) -> None:
        def odd(request: cache_pb2.ExchangeRequest) -> cache_pb2.ExchangeReply:
            return cache_pb2.ExchangeReply(
                id=request.id, stamp=stamp(), refused=cache_pb2.Refusal(code=99, message="odd")
            )

        session = opened(odd)
        with pytest.raises(Exception, match="odd"):
            session.reserve(1, deadline_s=5.0)
        assert not session.ended


def test_a_question_too_large_for_the_stream_is_a_call(engine: Engine) -> None:
    wait_for(lambda: has_stream(engine.session))
    many = keys("a", 1) * 500_000
    assert sum(map(len, many)) > 16 << 20
    with pytest.raises(InvalidArgument):
        engine.session.update(touches=[prefix(many).chains[0]], deadline_s=10.0)
    assert not engine.session.ended
    assert has_stream(engine.session)


def test_grpc_s_error_for_an_unknown_method_is_what_we_take_it_for(daemon: Daemon) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        replies = channel.stream_stream("/kvhost.v1.Cache/Nonsense")(iter([b""]))
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
