"""The link: a session with whichever daemon runs, without anybody waiting for it (C1, C3, C6, I6)."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvhost_client.admin import AdminClient
from kvhost_client.errors import BreakerOpen, DeadlineExceeded, KVHostError
from kvhost_client.link import Link
from kvhost_client.session import Session
from kvhost_client.types import Declared
from kvhost_client.worker import WorkerLink
from kvhost_proto.v1 import cache_pb2, common_pb2
from tests.client.engine import spec
from tests.support import Daemon, thread_count, wait_for

OPTIONS = ["--segment-size", "1MiB"]


class Engine:
    """A scheduler and one worker, each with its link; notes everything that it is told."""

    def __init__(self, socket: str, deadline_s: float = 0.2) -> None:
        self.instance_id = secrets.token_bytes(16)
        self.told: list[str] = []
        self.ready = False
        self.number = 0
        self.spec: common_pb2.NamespaceSpec | None = spec()
        self.worker = WorkerLink(socket, self.instance_id, 0, on_change=self.changed)
        self.link = Link(
            socket,
            self.instance_id,
            "engine under test",
            declare=self.declare,
            on_up=self.up,
            on_down=self.down,
            on_notice=self.notice,
            deadline_s=deadline_s,
        )

    def start(self) -> Engine:
        self.worker.start()
        self.link.start()
        return self

    def declare(self) -> tuple[common_pb2.NamespaceSpec, Mapping[int, bytes]] | None:
        return None if self.spec is None else (self.spec, {0: self.worker.token})

    def changed(self) -> None:
        self.link.declare_again()

    def up(self, session: Session, declared: Declared) -> None:
        assert declared.slot_bytes
        self.number = session.number
        self.told.append("up")

    def down(self, reason: str) -> None:
        self.ready = False
        self.told.append(f"down: {reason}")

    def notice(self, notice: cache_pb2.Notice) -> None:
        kind = notice.WhichOneof("kind")
        if kind == "mapped":
            self.ready = notice.mapped.ready
        self.told.append(str(kind))

    def usable(self) -> bool:
        """Slots are granted, and the worker may write into them."""
        session, mapping = self.link.session, self.worker.mapping
        if session is None or mapping is None or not self.ready:
            return False
        try:
            reserved = session.reserve(1)
            for grant in reserved.grants:
                mapping.shard(grant.slot, 0)
                session.abort(grant.store_id)
        except KVHostError:
            return False
        return bool(reserved.grants)

    def wait_usable(self, deadline_s: float = 5.0) -> float:
        """Seconds until it is."""
        started = time.monotonic()
        wait_for(self.usable, deadline_s, "the cache to be used")
        return time.monotonic() - started

    def close(self) -> None:
        assert self.link.close()
        assert self.worker.close()


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    made = Engine(daemon.socket).start()
    yield made
    made.close()


def test_it_opens_declares_and_tells_in_order(engine: Engine) -> None:
    engine.wait_usable()
    assert engine.told[0] == "up"
    assert "mapped" in engine.told
    assert engine.link.problem == ""


def test_nothing_is_opened_before_the_start(daemon: Daemon) -> None:
    threads = thread_count(threading.get_native_id())
    engine = Engine(daemon.socket)
    assert thread_count(threading.get_native_id()) == threads
    assert engine.link.session is None
    assert engine.link.close()
    assert engine.told == []


def test_it_starts_once(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="started before"):
        engine.link.start()


def test_it_waits_until_there_is_something_to_declare(daemon: Daemon) -> None:
    engine = Engine(daemon.socket)
    engine.spec = None
    engine.start()
    wait_for(lambda: engine.worker.problem == "", what="the worker to run")
    assert engine.link.session is None
    assert engine.told == []
    engine.spec = spec()
    started = time.monotonic()
    engine.link.declare_again()
    wait_for(lambda: engine.told, what="the session")
    assert time.monotonic() - started < 0.4
    engine.wait_usable()
    engine.close()


def test_a_daemon_that_comes_later_is_found(folder: Path) -> None:
    engine = Engine(str(folder / "kvhostd.sock")).start()
    wait_for(lambda: "kvhostd is not running" in engine.link.problem, what="the absence to be noticed")
    with Daemon("4MiB", OPTIONS, folder=folder):
        assert engine.wait_usable() < 2.0
        engine.close()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_daemon_that_is_back_at_once_is_used_again(folder: Path, how: str) -> None:
    with Daemon("4MiB", OPTIONS, folder=folder) as first:
        engine = Engine(first.socket).start()
        engine.wait_usable()
        boot = engine.worker.mapping.boot_id if engine.worker.mapping else 0
        token = engine.worker.token
        getattr(first, how)()
        with Daemon("4MiB", OPTIONS, folder=folder):
            assert engine.wait_usable() < 2.0
            assert engine.worker.mapping is not None
            assert engine.worker.mapping.boot_id != boot
            assert engine.worker.token == token
            downs = [one for one in engine.told if one.startswith("down")]
            assert len(downs) == 1
            assert engine.told.index(downs[0]) < len(engine.told) - 1
            engine.close()


def test_a_daemon_that_was_away_for_long_is_used_again_within_two_seconds(folder: Path) -> None:
    """All pauses have grown to their longest, as after any longer absence."""
    with Daemon("4MiB", OPTIONS, folder=folder) as first:
        engine = Engine(first.socket).start()
        engine.wait_usable()
    until = time.monotonic() + 4.0
    sessions = []
    while time.monotonic() < until:  # an engine that goes on asking
        sessions.append(engine.link.session)
        threading.Event().wait(0.1)
    assert sessions[-1] is None
    with Daemon("4MiB", OPTIONS, folder=folder):
        assert engine.wait_usable() < 2.0
        engine.close()


def test_a_stopped_daemon_opens_the_breaker_and_is_used_again_within_two_seconds(
    daemon: Daemon, engine: Engine
) -> None:
    engine.wait_usable()
    session = engine.link.session
    assert session is not None
    daemon.freeze()
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            session.reserve(1)
    assert engine.link.breaker.is_open
    started = time.monotonic()
    refusals = questions = 0
    while time.monotonic() - started < 2.5:  # longer than a probe's deadline and the pause between probes
        try:
            session.reserve(1)
        except BreakerOpen:
            refusals += 1
        except DeadlineExceeded:
            questions += 1
        threading.Event().wait(0.01)
    assert questions <= 3, "at most one a second, the link's own included"
    assert refusals > questions
    daemon.thaw()
    assert engine.wait_usable() < 2.0
    assert engine.link.session is session, "its grants and pins were never lost"
    assert not [one for one in engine.told if one.startswith("down")]
    wait_for(lambda: daemon.status().sessions[0].grants == 0, what="late grants to go back")


def test_an_operator_who_ends_the_session_gets_the_next_one(daemon: Daemon, engine: Engine) -> None:
    engine.wait_usable()
    first = engine.number
    with AdminClient(daemon.socket) as admin:
        admin.end_session(first)
    wait_for(lambda: any("ended by an operator" in one for one in engine.told), what="on_down")
    engine.wait_usable()
    assert engine.number > first


def test_a_session_that_its_user_gives_up_is_replaced_at_once(engine: Engine) -> None:
    engine.wait_usable()
    session = engine.link.session
    assert session is not None
    started = time.monotonic()
    session.close()
    wait_for(lambda: engine.link.session not in (None, session), what="the next session")
    assert time.monotonic() - started < 0.9, "sooner than the link looks by itself"
    assert "down: it was closed" in engine.told


def test_a_worker_that_must_attach_again_is_named_again(daemon: Daemon, engine: Engine) -> None:
    """Its connection to a living daemon broke: the token is a new one, the session stays."""
    engine.wait_usable()
    number, token = engine.number, engine.worker.token
    break_connection(engine.worker)
    wait_for(lambda: engine.worker.token != token, what="a new token")
    engine.wait_usable()
    assert engine.number == number


def test_a_namespace_that_the_daemon_refuses_is_a_problem_and_no_storm(daemon: Daemon) -> None:
    engine = Engine(daemon.socket)
    assert engine.spec is not None
    engine.spec.layout.ranks = 0
    engine.start()
    wait_for(lambda: "layout.ranks is 0" in engine.link.problem, what="the reason")
    before = daemon.status().counters["sessions_opened"]
    threading.Event().wait(1.0)
    assert daemon.status().counters["sessions_opened"] - before <= 4
    engine.spec.layout.ranks = 1
    engine.link.declare_again()
    engine.wait_usable()
    engine.close()


def test_callbacks_that_fail_stop_nothing(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(daemon.socket)

    def fail(*arguments: object) -> None:
        raise ValueError("a fault of the engine")

    engine.link._on_up = fail
    engine.start()
    engine.wait_usable()
    assert "a callback of the link failed" in caplog.text
    engine.close()


def test_closing_tells_down_and_leaves_no_thread(daemon: Daemon) -> None:
    Engine(daemon.socket).start().close()
    before = thread_count(threading.get_native_id())
    engine = Engine(daemon.socket).start()
    engine.wait_usable()
    engine.close()
    assert engine.told[-1] == "down: the link was closed"
    assert engine.link.session is None
    wait_for(lambda: thread_count(threading.get_native_id()) <= before, what="the threads to end")
    wait_for(lambda: not daemon.status().sessions, what="the session to end")


def test_closing_does_not_wait_for_a_stopped_daemon(daemon: Daemon) -> None:
    engine = Engine(daemon.socket).start()
    engine.wait_usable()
    daemon.freeze()
    started = time.monotonic()
    assert engine.link.close()
    assert engine.worker.close()
    assert time.monotonic() - started < 3.0
    daemon.thaw()


def test_reading_the_session_costs_nothing(daemon: Daemon, engine: Engine) -> None:
    engine.wait_usable()
    daemon.freeze()
    spans = []
    for _ in range(1000):
        started = time.monotonic()
        engine.link.session  # noqa: B018
        spans.append(time.monotonic() - started)
    daemon.thaw()
    assert max(spans) < 0.05


def break_connection(worker: WorkerLink) -> None:
    """As if the network had failed, if there were one: both ends read end-of-file."""
    import gc
    import socket

    from kvhost_client.handover import HandoverSocket

    for one in gc.get_objects():
        if isinstance(one, HandoverSocket) and one.fileno() >= 0:
            one._socket.shutdown(socket.SHUT_RDWR)
