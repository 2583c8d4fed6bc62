"""Late answers: what they grant or pin is given back, what was sent takes effect, and nobody waits (I8)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvhost_client.breaker import Breaker
from kvhost_client.errors import BreakerOpen, DeadlineExceeded
from kvhost_client.session import Session
from kvhost_client.types import ChainQuery, Chunk, Found, Query, Semantics, StoreOf, Updated
from tests.client.engine import Engine, key, keys, prefix
from tests.support import Daemon, wait_for


def test_late_grants_go_back(daemon: Daemon, engine: Engine) -> None:
    granted = daemon.status().counters["granted_slots"]
    daemon.freeze()
    with pytest.raises(DeadlineExceeded):
        engine.session.reserve(3, deadline_s=0.1)
    with pytest.raises(DeadlineExceeded):
        engine.session.reserve(chunks=[Chunk(0, key("late"))], deadline_s=0.1)
    daemon.thaw()
    wait_for(lambda: engine.session.late_gifts == 4, what="the late answers")
    assert daemon.status().counters["granted_slots"] == granted + 4, "the daemon did grant them"
    wait_for(lambda: daemon.status().sessions[0].grants == 0, what="the grants to go back")
    assert engine.session.lookup([prefix([key("late")])])[0].chains[0].found == bytes([Found.MISS])


def test_late_pins_go_back(daemon: Daemon, engine: Engine) -> None:
    engine.store(keys("a", 4))
    daemon.freeze()
    with pytest.raises(DeadlineExceeded):
        engine.session.pin(0, keys("a", 4), deadline_s=0.1)
    daemon.thaw()
    wait_for(lambda: engine.session.late_gifts == 4, what="the late answer")
    wait_for(lambda: daemon.status().sessions[0].pins == 0, what="the pins to go back")
    assert daemon.status().anomalies["double_release"] == 0


def test_a_late_update_takes_effect_and_is_told(daemon: Daemon, engine: Engine) -> None:
    ((store, slot),) = engine.grant(1)
    engine.write(slot, key("a"))
    told: list[Updated] = []
    daemon.freeze()
    with pytest.raises(DeadlineExceeded):
        engine.session.update(
            commits=[StoreOf(store, Chunk(0, key("a"))), StoreOf(424242, Chunk(0, key("b")))],
            deadline_s=0.1,
            on_late=told.append,
        )
    daemon.thaw()
    wait_for(lambda: told, what="the late answer")
    assert [error.id for error in told[0].errors] == [424242]
    assert engine.wrong_bytes([key("a")]) == []


def test_all_messages_of_a_late_update_arrive(daemon: Daemon, engine: Engine) -> None:
    """Longer than one message: the second is sent although the first is late."""
    engine.store(keys("a", 1))
    (pin,) = engine.session.pin(0, keys("a", 1))
    daemon.freeze()
    with pytest.raises(DeadlineExceeded):
        engine.session.update(releases=[*range(10**9, 10**9 + 20_000), pin.pin_id], deadline_s=0.1)
    daemon.thaw()
    wait_for(lambda: daemon.status().sessions[0].pins == 0, what="the release to arrive")


def test_a_question_that_changes_nothing_is_taken_back(daemon: Daemon, engine: Engine) -> None:
    engine.store(keys("a", 4))
    daemon.freeze()
    with pytest.raises(DeadlineExceeded):
        engine.session.lookup([prefix(keys("a", 4))], deadline_s=0.1)
    daemon.thaw()
    assert engine.wrong_bytes(keys("a", 4)) == []
    assert engine.session.late_gifts == 0


def test_pins_of_earlier_pages_go_back_when_a_later_one_is_late(
    daemon: Daemon, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.store(keys("a", 1))
    asked = [key("a-0"), *(key(f"none-{n}") for n in range(20_000))]
    pages = threading.Event()
    ask = engine.session._connection.ask

    def freeze_before_the_second(*arguments: Any) -> Any:
        if pages.is_set():
            daemon.freeze()
        pages.set()
        return ask(*arguments)

    monkeypatch.setattr(engine.session._connection, "ask", freeze_before_the_second)
    as_set = [name[:-4] + b"\0\0\0\0" for name in asked]
    with pytest.raises(DeadlineExceeded):
        engine.session.lookup([Query(0, [ChainQuery(0, Semantics.SET, as_set)])], pin=True, deadline_s=1.0)
    daemon.thaw()
    wait_for(lambda: daemon.status().sessions[0].pins == 0, what="the pin of the first page to go back")


class TestWithABreaker:
    def test_three_late_answers_and_nobody_asks(self, daemon: Daemon) -> None:
        breaker = Breaker()
        session = Session.open(
            daemon.socket, instance_id=bytes(16), label="x", deadline_s=0.1, breaker=breaker
        )
        daemon.freeze()
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                session.ping()
        started = time.monotonic()
        for _ in range(100):
            with pytest.raises(BreakerOpen, match="was not sent"):
                session.reserve(1)
        assert time.monotonic() - started < 0.1
        daemon.thaw()

        def answered() -> bool:
            try:
                return bool(session.ping(deadline_s=1.0))
            except (BreakerOpen, DeadlineExceeded):
                return False

        started = time.monotonic()
        wait_for(answered, what="the breaker to let one question through")
        assert time.monotonic() - started < 2.0
        assert not breaker.is_open
        session.close()

    def test_a_late_answer_closes_it(self, daemon: Daemon) -> None:
        breaker = Breaker()
        with Engine(daemon.socket) as engine:
            engine.session._connection._breaker = breaker
            daemon.freeze()
            for _ in range(3):
                with pytest.raises(DeadlineExceeded):
                    engine.session.reserve(1, deadline_s=0.05)
            assert breaker.is_open
            daemon.thaw()
            wait_for(lambda: not breaker.is_open, 2.0, "the late answers")
            wait_for(lambda: daemon.status().sessions[0].grants == 0, what="the grants to go back")
