"""A daemon that answers what no kvhostd answers: the session ends, nothing of it is believed (I6, I13)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvhost_client.errors import (
    BadReply,
    DeadlineExceeded,
    KVHostError,
    NotKVHost,
    Refused,
    SessionEnded,
    Unavailable,
    VersionMismatch,
)
from kvhost_client.session import Session
from kvhost_client.types import ServiceState
from kvhost_proto.v1 import cache_pb2, cache_pb2_grpc, common_pb2
from tests.client.engine import keys, prefix, spec
from tests.client.fakes import FakeHandover, version
from tests.support import wait_for

BOOT = 7


def stamp(boot_id: int = BOOT, generation: int = 1) -> common_pb2.Stamp:
    return common_pb2.Stamp(boot_id=boot_id, generation=generation)


class FakeCache(cache_pb2_grpc.CacheServicer):
    """Answers what the test has put here; the stream lasts until `stop`."""

    def __init__(self) -> None:
        self.first: Callable[[Any], cache_pb2.Notice] = lambda context: opened()
        self.more: list[cache_pb2.Notice] = []
        self.go = threading.Event()
        self.stop = threading.Event()
        self.answer: Callable[[Any], Any] = lambda context: cache_pb2.PingReply(stamp=stamp())

    def OpenSession(self, request: cache_pb2.OpenSessionRequest, context: Any) -> Iterator[cache_pb2.Notice]:
        context.add_callback(self.stop.set)
        yield self.first(context)
        if self.more:
            self.go.wait(20.0)
        yield from self.more
        self.stop.wait(20.0)

    def Ping(self, request: Any, context: Any) -> Any:
        return self.answer(context)

    Lookup = Reserve = Update = DeclareNamespace = Reset = Ping


def opened(boot_id: int = BOOT, major: int = 1) -> cache_pb2.Notice:
    return cache_pb2.Notice(
        stamp=stamp(boot_id, 0),
        opened=cache_pb2.Opened(
            session_id=b"s" * 16, number=3, version=version(major), state=common_pb2.SERVICE_STATE_SERVING
        ),
    )


class Fake:
    """A gRPC server and a handover socket that hands out a ticket for every session asked."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "kvhostd.sock")
        self.cache = FakeCache()
        self.handover = FakeHandover(folder)
        self.server = grpc.server(ThreadPoolExecutor(4))
        cache_pb2_grpc.add_CacheServicer_to_server(self.cache, self.server)
        self.server.add_insecure_port(f"unix:{self.socket}")
        self.server.start()

    def open(self, **options: Any) -> Session:
        def hand_out() -> None:
            peer = self.handover.accept()
            peer.expect("hello")
            peer.ticket(boot_id=BOOT)

        thread = threading.Thread(target=hand_out)
        thread.start()
        try:
            return Session.open(self.socket, instance_id=bytes(16), label="x", deadline_s=2.0, **options)
        finally:
            thread.join()

    def close(self) -> None:
        self.cache.stop.set()
        self.server.stop(None).wait()
        self.handover.close()


@pytest.fixture
def fake(folder: Path) -> Iterator[Fake]:
    made = Fake(folder)
    yield made
    made.close()


def abort(code: grpc.StatusCode, details: str) -> Callable[[Any], Any]:
    return lambda context: context.abort(code, details)


class TestOpening:
    @pytest.mark.parametrize(
        ("first", "kind"),
        [
            (lambda context: opened(major=2), VersionMismatch),
            (lambda context: opened(boot_id=8), Unavailable),
            (lambda context: cache_pb2.Notice(stamp=stamp(), mapped=cache_pb2.Mapped()), BadReply),
            (lambda context: cache_pb2.Notice(), BadReply),
            (abort(grpc.StatusCode.FAILED_PRECONDITION, "the client speaks protocol 1.0"), VersionMismatch),
            (abort(grpc.StatusCode.UNAUTHENTICATED, "the ticket is unknown"), Refused),
            (abort(grpc.StatusCode.PERMISSION_DENIED, "another user's"), Refused),
            (abort(grpc.StatusCode.UNAVAILABLE, "going down"), Unavailable),
            (abort(grpc.StatusCode.UNIMPLEMENTED, "no such method"), NotKVHost),
            (abort(grpc.StatusCode.INTERNAL, "a fault"), Unavailable),
        ],
    )
    def test_it_fails_with_one_sentence_and_leaves_nothing(
        self, fake: Fake, first: Callable[[Any], cache_pb2.Notice], kind: type[KVHostError]
    ) -> None:
        fake.cache.first = first
        ended: list[str] = []
        with pytest.raises(kind) as caught:
            fake.open(on_end=ended.append)
        assert "\n" not in str(caught.value)
        wait_for(lambda: not [t for t in threading.enumerate() if t.name == "kvhost-notices"])

    def test_a_daemon_that_gives_a_ticket_and_then_no_session(self, fake: Fake) -> None:
        def never(context: Any) -> cache_pb2.Notice:
            fake.cache.stop.wait(20.0)
            return opened()

        fake.cache.first = never
        with pytest.raises(DeadlineExceeded, match="did not open a session in time"):
            fake.open()


class TestAnotherDaemonAnswers:
    """The channel reconnects by itself: every reply must be looked at (I6)."""

    @pytest.mark.parametrize(
        ("ask", "reply"),
        [
            (lambda s: s.ping(), cache_pb2.PingReply(stamp=stamp(8))),
            (lambda s: s.lookup([prefix(keys("a", 1))]), cache_pb2.LookupReply(stamp=stamp(8))),
            (lambda s: s.lookup([prefix(keys("a", 1))], pin=True), cache_pb2.LookupReply(stamp=stamp(8))),
            (lambda s: s.reserve(1), cache_pb2.ReserveReply(stamp=stamp(8))),
            (lambda s: s.update(releases=[1]), cache_pb2.UpdateReply(stamp=stamp(8))),
            (lambda s: s.declare(spec(), {}), cache_pb2.DeclareNamespaceReply(stamp=stamp(8))),
            (lambda s: s.reset(), cache_pb2.ResetReply(stamp=stamp(8))),
            (lambda s: s.ping(), cache_pb2.PingReply()),
        ],
    )
    def test_any_reply_of_another_boot_ends_the_session(
        self, fake: Fake, ask: Callable[[Session], object], reply: Any
    ) -> None:
        ends: list[str] = []
        session = fake.open(on_end=ends.append)
        fake.cache.answer = lambda context: reply
        with pytest.raises(SessionEnded, match="another daemon answers"):
            ask(session)
        assert session.ended
        assert len(ends) == 1

    def test_a_daemon_that_does_not_know_the_session_ends_it(self, fake: Fake) -> None:
        session = fake.open()
        fake.cache.answer = abort(grpc.StatusCode.NOT_FOUND, "no such session")
        with pytest.raises(SessionEnded, match="no such session"):
            session.reserve(1)
        assert session.ended

    def test_a_notice_of_another_boot_ends_it(self, fake: Fake) -> None:
        fake.cache.more = [cache_pb2.Notice(stamp=stamp(8), recall=cache_pb2.Recall(grants=1))]
        ends: list[str] = []
        notices: list[cache_pb2.Notice] = []
        fake.open(on_end=ends.append, on_notice=notices.append)
        fake.cache.go.set()
        wait_for(lambda: ends, what="the end")
        assert "boot 0000000000000008" in ends[0]
        assert notices == []

    def test_a_stream_that_ends_without_a_word_ends_it(self, fake: Fake) -> None:
        ends: list[str] = []
        session = fake.open(on_end=ends.append)
        fake.cache.stop.set()
        wait_for(lambda: ends == ["kvhostd closed its stream"], what="the end")
        assert session.ended


class TestRepliesThatDoNotFit:
    @pytest.mark.parametrize(
        ("ask", "reply"),
        [
            (lambda s: s.lookup([prefix(keys("a", 2))]), cache_pb2.LookupReply(stamp=stamp())),
            (lambda s: s.lookup([prefix(keys("a", 2))], pin=True), cache_pb2.LookupReply(stamp=stamp())),
            (lambda s: s.reserve(1), cache_pb2.ReserveReply(stamp=stamp(), store_ids=[1, 2], slots=[1, 2])),
        ],
    )
    def test_they_end_the_session_so_that_everything_goes_back(
        self, fake: Fake, ask: Callable[[Session], object], reply: Any
    ) -> None:
        session = fake.open()
        fake.cache.answer = lambda context: reply
        with pytest.raises(BadReply):
            ask(session)
        assert session.ended


class TestGenerations:
    def test_they_only_rise_within_a_namespace(self, fake: Fake) -> None:
        session = fake.open()
        for told, expected in ((4, 4), (3, 4), (9, 9)):
            reply = cache_pb2.PingReply(stamp=stamp(generation=told))
            fake.cache.answer = partial(lambda reply, context: reply, reply)
            session.ping()
            assert session.generation == expected

    def test_another_namespace_has_its_own(self, fake: Fake) -> None:
        session = fake.open()
        fake.cache.answer = lambda context: cache_pb2.PingReply(stamp=stamp(generation=9))
        session.ping()
        fake.cache.answer = lambda context: cache_pb2.ResetReply(stamp=stamp(generation=1), digest=b"d")
        session.reset()
        assert session.generation == 1

    def test_a_late_reply_of_the_namespace_that_was_left_does_not_count(self, fake: Fake) -> None:
        session = fake.open()
        go, asked = threading.Event(), threading.Event()

        def slow(context: Any) -> cache_pb2.PingReply:
            asked.set()
            go.wait(10.0)
            return cache_pb2.PingReply(stamp=stamp(generation=50))

        fake.cache.answer = slow
        thread = threading.Thread(target=session.ping)
        thread.start()
        assert asked.wait(5.0)
        fake.cache.answer = lambda context: cache_pb2.ResetReply(stamp=stamp(generation=2))
        session.reset()
        go.set()
        thread.join()
        assert session.generation == 2


def test_a_state_nobody_knows_is_unspecified(fake: Fake) -> None:
    session = fake.open()
    fake.cache.answer = lambda context: cache_pb2.PingReply(stamp=stamp(), state=77)  # type: ignore[arg-type]
    assert session.ping().state is ServiceState.UNSPECIFIED


def test_a_notice_callback_that_fails_stops_nothing(fake: Fake) -> None:
    heard: list[str] = []

    def fail(notice: cache_pb2.Notice) -> None:
        heard.append(str(notice.WhichOneof("kind")))
        raise ValueError("a fault of the engine")

    fake.cache.more = [cache_pb2.Notice(stamp=stamp(), recall=cache_pb2.Recall(grants=n)) for n in (1, 2)]
    session = fake.open(on_notice=fail)
    fake.cache.go.set()
    wait_for(lambda: heard == ["recall", "recall"], what="both notices")
    assert not session.ended
    session.close()
