"""Board and agent: the engine's thread never waits, no change is lost, no late gift is kept (I8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvhost_client.errors import BreakerOpen, DeadlineExceeded, NotServing, SessionEnded
from kvhost_client.types import ChainQuery, Chunk, Found, Semantics, ServiceState, StoreOf
from kvhost_connector import supply as supply_module
from kvhost_connector.agent import Agent
from kvhost_connector.board import Board
from kvhost_connector.holds import Authority
from kvhost_connector.orders import News, NewsKind, Ticket, TicketState
from kvhost_proto.v1 import cache_pb2
from tests.connector.fakes import FakeSession, mapped, recall, removed, resync
from tests.support.waiting import wait_for

KEYS = [bytes([number]) * 8 for number in range(1, 9)]


class Desk:
    """A board with its agent and a session, ready to work."""

    def __init__(
        self, session: FakeSession | None = None, *, target: int = 4, deadline_s: float = 0.1
    ) -> None:
        self.session = session or FakeSession()
        self.declared = 0
        self.board = Board(deadline_s=deadline_s, stock_target=target)
        self.agent = Agent(self.board, self._declaration)
        self.agent.start()

    def _declaration(self) -> Any:
        self.declared += 1
        return None, {}

    def up(self, *, ready: bool = True) -> Authority:
        self.board.up(self.session, self.session.declared())
        self.board.notice(mapped(ready))
        if ready:
            assert self.board.authority is not None
            return self.board.authority
        return Authority(0, 0, 0, 0)

    def asked(self) -> list[str]:
        """Calls so far, those for grants left out."""
        return [call for call in self.session.calls if call != "reserve"]

    def stock(self, count: int) -> None:
        self.board.engine_active()
        self.board.flush()
        wait_for(lambda: len(self.board.stock) == count, what=f"{count} grants")

    def answered(self, ticket: Ticket | None) -> Ticket:
        assert ticket is not None
        wait_for(lambda: ticket.state is not TicketState.WAITING, what="an answer")
        return ticket


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.session.gate.set()
    made.agent.close()


def chain(keys: Sequence[bytes] = KEYS, semantics: Semantics = Semantics.PREFIX) -> list[ChainQuery]:
    return [ChainQuery(0, semantics, list(keys))]


def news(board: Board) -> list[News]:
    return [entry for entry in board.take_news() if entry.kind is not NewsKind.FORGET]


# Questions.


def test_a_lookup_is_answered_and_holds_nothing(desk: Desk) -> None:
    desk.up()
    desk.session.stored = {KEYS[0]: 1, KEYS[1]: 2}
    ticket = desk.answered(desk.board.ask(chain(), pin=False))
    assert ticket.found == {KEYS[0]: Found.HIT, KEYS[1]: Found.HIT, KEYS[2]: Found.MISS}
    assert not desk.session.pins


def test_a_pin_names_slots_and_its_authority(desk: Desk) -> None:
    authority = desk.up()
    desk.session.stored = {KEYS[0]: 11, KEYS[1]: 12}
    ticket = desk.answered(desk.board.ask(chain(KEYS[:2]), pin=True))
    assert [ticket.pins[key].slot for key in KEYS[:2]] == [11, 12]
    assert ticket.authority == authority
    assert len(desk.session.pins) == 2


def test_many_questions_go_in_one_call(desk: Desk) -> None:
    desk.up()
    desk.stock(4)
    desk.session.gate.clear()
    first = desk.board.ask(chain(), pin=False)
    wait_for(lambda: desk.asked() == ["lookup"])
    more = [desk.board.ask(chain(), pin=False) for _ in range(20)]
    desk.session.gate.set()
    for ticket in [first, *more]:
        assert desk.answered(ticket).state is TicketState.ANSWERED
    assert desk.session.calls.count("lookup") == 2


@pytest.mark.parametrize("reason", ["no session", "not mapped", "closed"])
def test_nobody_is_asked_who_cannot_answer(desk: Desk, reason: str) -> None:
    if reason == "not mapped":
        desk.up(ready=False)
    elif reason == "closed":
        desk.up()
        desk.agent.close()
    assert desk.board.ask(chain(), pin=False) is None


def test_a_pin_dropped_after_its_answer_is_released(desk: Desk) -> None:
    desk.up()
    desk.session.stored = {KEYS[0]: 1}
    ticket = desk.answered(desk.board.ask(chain(KEYS[:1]), pin=True))
    desk.board.drop(ticket)
    desk.board.flush()
    wait_for(lambda: not desk.session.pins)


def test_a_pin_that_comes_after_its_request_gave_up_is_released_at_once(desk: Desk) -> None:
    desk.up()
    desk.session.stored = {KEYS[0]: 1}
    desk.stock(4)
    desk.session.gate.clear()
    ticket = desk.board.ask(chain(KEYS[:1]), pin=True)
    assert ticket is not None
    wait_for(lambda: desk.asked() == ["pin"])
    wait_for(lambda: desk.board.overdue(ticket))
    desk.board.drop(ticket)
    desk.session.gate.set()
    # No step and no flush of the engine is needed.
    wait_for(lambda: "update" in desk.session.calls and not desk.session.pins)
    assert desk.board.counters.take()["late_pins_given_back"] == 1


# Silence.


def test_a_silent_daemon_is_not_asked_and_noticed_when_it_is_back(desk: Desk) -> None:
    desk.up()
    desk.session.gate.clear()
    began = time.monotonic()
    ticket = desk.board.ask(chain(), pin=False)
    assert ticket is not None
    assert desk.board.usable
    wait_for(lambda: not desk.board.usable)
    assert 0.05 < time.monotonic() - began < 1.0
    assert desk.board.ask(chain(), pin=False) is None
    desk.session.gate.set()
    wait_for(lambda: desk.board.usable, 2.0)
    desk.answered(desk.board.ask(chain(), pin=False))


def test_a_call_that_timed_out_leaves_the_daemon_silent_until_it_answers_a_ping(desk: Desk) -> None:
    desk.up()
    desk.stock(4)
    desk.session.calls.clear()
    desk.session.fail_next = [DeadlineExceeded("no answer"), DeadlineExceeded("no answer")]
    ticket = desk.answered(desk.board.ask(chain(), pin=False))
    assert ticket.state is TicketState.FAILED
    assert not desk.board.usable
    wait_for(lambda: desk.board.usable, 2.0)
    assert desk.session.calls[:3] == ["lookup", "ping", "ping"]


def test_the_engines_thread_never_waits_for_a_stopped_daemon(desk: Desk) -> None:
    authority = desk.up()
    desk.stock(4)
    desk.session.gate.clear()
    desk.board.ask(chain(), pin=False)
    wait_for(lambda: desk.asked() == ["lookup"])
    slowest = 0.0
    for number in range(200):
        began = time.monotonic()
        desk.board.ask(chain(), pin=number % 2 == 0)
        desk.board.commit(authority, [StoreOf(number, Chunk(0, KEYS[0]))])
        desk.board.release(authority, [number])
        desk.board.flush()
        desk.board.engine_active()
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 0.05


# Changes.


def test_a_steps_changes_are_one_message(desk: Desk) -> None:
    authority = desk.up()
    desk.stock(4)
    desk.session.calls.clear()
    grants = desk.board.stock.take(authority.serial, 2)
    stores = [StoreOf(grant.store_id, Chunk(0, key)) for grant, key in zip(grants, KEYS, strict=False)]
    desk.board.assign(authority, stores)
    desk.board.commit(authority, stores[:1])
    desk.board.abort(authority, [stores[1].store_id], [0, 1])
    desk.board.touch(chain())
    desk.board.flush()
    wait_for(lambda: KEYS[0] in desk.session.stored)
    assert desk.session.calls.count("update") == 1
    # The one that was aborted in the same step was never said to be written.
    assert {store: chunk.key for store, chunk in desk.session.assigned.items()} == {
        grants[0].store_id: KEYS[0]
    }
    assert desk.session.aborts[0].unquiet_ranks == (0, 1)
    assert desk.session.touched == chain()
    wait_for(lambda: news(desk.board) == [News(NewsKind.STORED, (KEYS[0],))])


def test_changes_wait_for_the_end_of_the_step(desk: Desk) -> None:
    authority = desk.up()
    desk.board.release(authority, [5])
    desk.answered(desk.board.ask(chain(), pin=False))
    wait_for(lambda: not desk.board._changes)


def test_a_refused_commit_is_no_news_and_is_counted(desk: Desk) -> None:
    authority = desk.up()
    desk.board.commit(authority, [StoreOf(999, Chunk(0, KEYS[0]))])
    desk.board.flush()
    wait_for(lambda: desk.board.counters.take().get("refused_updates") == 1)
    assert news(desk.board) == []


def test_changes_that_were_not_sent_are_sent_later_and_in_order(desk: Desk) -> None:
    authority = desk.up()
    desk.session.pins = {1: KEYS[0], 2: KEYS[1]}
    desk.session.fail_next = [BreakerOpen("asked a moment ago")]
    desk.board.release(authority, [1])
    desk.board.flush()
    wait_for(lambda: "update" in desk.session.calls)
    desk.board.release(authority, [2])
    desk.board.flush()
    wait_for(lambda: not desk.session.pins, 3.0)
    assert not desk.session.closed


def test_an_update_with_unknown_fate_ends_the_session(desk: Desk) -> None:
    authority = desk.up()
    desk.session.fail_next = [SessionEnded("the stream broke")]
    desk.board.release(authority, [1])
    desk.board.flush()
    wait_for(lambda: desk.session.closed)


def test_a_late_update_is_not_sent_again(desk: Desk) -> None:
    authority = desk.up()
    desk.session.fail_next = [DeadlineExceeded("late")]
    desk.board.release(authority, [1])
    desk.board.flush()
    wait_for(lambda: desk.board.usable and "ping" in desk.session.calls, 3.0)
    assert desk.session.calls.count("update") == 1
    assert not desk.session.closed


def test_a_refused_reserve_does_not_end_the_session(desk: Desk) -> None:
    def draining(*_: Any, **__: Any) -> Any:
        raise NotServing("draining")

    desk.session.reserve = draining  # type: ignore[method-assign]
    authority = desk.up()
    desk.session.pins = {1: KEYS[0]}
    desk.board.engine_active()
    desk.board.release(authority, [1])
    desk.board.flush()
    wait_for(lambda: not desk.session.pins)
    assert not desk.session.closed


def test_close_sends_what_waits_and_gives_grants_back(desk: Desk) -> None:
    authority = desk.up()
    desk.stock(4)
    desk.session.pins = {1: KEYS[0]}
    desk.board.release(authority, [1])
    desk.agent.close()
    assert not desk.session.pins
    assert not desk.session.grants


# Grants.


def test_grants_are_held_ahead_and_refilled_when_half_is_used(desk: Desk) -> None:
    authority = desk.up()
    desk.stock(4)
    desk.board.stock.take(authority.serial, 1)
    desk.session.calls.clear()
    desk.board.flush()
    desk.answered(desk.board.ask(chain(), pin=False))
    assert "reserve" not in desk.session.calls
    desk.board.stock.take(authority.serial, 1)
    desk.stock(4)


def test_no_more_is_held_than_the_daemon_gives_and_it_is_not_pestered(desk: Desk) -> None:
    desk.session.grant_bound = 1
    desk.up()
    desk.stock(1)
    for _ in range(50):
        desk.board.engine_active()
        desk.board.flush()
    assert desk.session.calls.count("reserve") <= 2


def test_an_engine_that_does_not_work_holds_no_grants(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.up()
    assert len(desk.board.stock) == 0
    desk.stock(4)
    monkeypatch.setattr(supply_module, "IDLE_GIVES_BACK_S", 0.1)
    with desk.board._wake:
        desk.board._wake.notify_all()
    wait_for(lambda: not desk.session.grants)
    assert desk.board.counters.take()["grants_given_back"] == 4


def test_recalled_grants_go_back(desk: Desk) -> None:
    desk.up()
    desk.stock(4)
    desk.board.notice(recall(3))
    wait_for(lambda: len(desk.session.grants) == 1)


def test_grants_of_a_busy_pool_are_asked_for_again_but_not_at_once(desk: Desk) -> None:
    desk.session.grant_bound = 0
    desk.up()
    desk.board.engine_active()
    desk.board.flush()
    wait_for(lambda: desk.session.calls.count("reserve") == 2, 3.0)
    assert not desk.board.grants_to_come
    desk.session.grant_bound = 100
    desk.stock(4)
    assert desk.session.calls.count("reserve") < 10


def test_grants_on_their_way_are_to_come(desk: Desk) -> None:
    desk.session.unready = True
    desk.up()
    desk.board.engine_active()
    desk.board.flush()
    wait_for(lambda: desk.session.calls.count("reserve") >= 3)
    assert desk.board.grants_to_come


# Sessions and weights.


def test_the_end_of_a_session_fails_questions_and_forgets_everything(desk: Desk) -> None:
    authority = desk.up()
    desk.stock(4)
    desk.session.gate.clear()
    ticket = desk.board.ask(chain(), pin=True)
    desk.board.release(authority, [1])
    desk.board.down("the daemon went away")
    desk.session.gate.set()
    assert desk.answered(ticket).state is TicketState.FAILED
    assert desk.board.authority is None
    assert desk.board.take_news()[-1].kind is NewsKind.FORGET
    following = FakeSession(number=2, boot_id=8)
    desk.session = following
    later = desk.up()
    assert later.boot_id == 8
    # What belonged to the old session is not said to the new one.
    desk.board.release(authority, [1])
    desk.board.commit(authority, [StoreOf(1, Chunk(0, KEYS[0]))])
    desk.board.flush()
    desk.stock(4)
    assert "update" not in following.calls
    assert all(number in following.grants for number in (1, 2, 3, 4))


def test_a_pin_of_the_old_session_that_comes_late_is_not_used(desk: Desk) -> None:
    desk.up()
    desk.session.stored = {KEYS[0]: 1}
    desk.stock(4)
    desk.session.gate.clear()
    ticket = desk.board.ask(chain(KEYS[:1]), pin=True)
    wait_for(lambda: desk.asked() == ["pin"])
    old = desk.session
    desk.board.down("gone")
    desk.session = FakeSession(number=2)
    desk.up()
    old.gate.set()
    assert desk.answered(ticket).state is TicketState.FAILED
    desk.board.flush()
    desk.stock(4)
    assert "update" not in desk.session.calls


def test_a_reset_leaves_the_namespace_before_anything_else_is_asked(desk: Desk) -> None:
    authority = desk.up()
    desk.stock(4)
    desk.session.gate.clear()
    waiting = desk.board.ask(chain(), pin=True)
    wait_for(lambda: desk.session.calls[-1] == "pin")
    desk.board.reset("v2")
    assert desk.board.authority is None
    assert desk.board.ask(chain(), pin=False) is None
    desk.session.gate.set()
    assert desk.answered(waiting).state is TicketState.FAILED
    wait_for(lambda: desk.board.authority is not None)
    assert desk.session.resets == ["v2"]
    assert desk.board.authority is not None
    assert desk.board.authority.serial > authority.serial
    # The grants of before went back; new ones come under the new authority.
    desk.stock(4)
    assert len(desk.session.grants) == 4


def test_a_reset_that_fails_ends_the_session(desk: Desk) -> None:
    desk.up()
    desk.session.fail_next = [DeadlineExceeded("no answer")]
    desk.board.reset("v2")
    wait_for(lambda: desk.session.closed)
    assert desk.board.authority is None


def test_a_reset_without_a_daemon_is_made_good_when_one_is_there(desk: Desk) -> None:
    desk.board.reset("v2")
    desk.board.up(desk.session, desk.session.declared(), "v2")
    desk.board.notice(mapped())
    wait_for(lambda: desk.board.authority is not None)
    assert desk.session.resets == ["v2"]


def test_another_generation_makes_everything_held_worthless(desk: Desk) -> None:
    authority = desk.up()
    desk.stock(4)
    desk.board.take_news()
    desk.session.generation += 1
    desk.answered(desk.board.ask(chain(), pin=False))
    wait_for(lambda: desk.board.authority not in (None, authority))
    assert NewsKind.STALE in {entry.kind for entry in desk.board.take_news()}


def test_new_tokens_are_declared_in_the_open_session(desk: Desk) -> None:
    desk.up()
    desk.board.declare_again()
    wait_for(lambda: "declare" in desk.session.calls)
    assert desk.declared == 1


# Notices.


@pytest.mark.parametrize(
    ("notice", "expected"),
    [
        (lambda: removed(KEYS[:2]), News(NewsKind.REMOVED, tuple(KEYS[:2]))),
        (resync, News(NewsKind.FORGET)),
    ],
)
def test_notices_about_keys_are_news(
    desk: Desk, notice: Callable[[], cache_pb2.Notice], expected: News
) -> None:
    desk.up()
    desk.board.take_news()
    desk.board.notice(notice())
    assert desk.board.take_news() == [expected]


def test_a_daemon_that_starts_or_drains_grants_nothing(desk: Desk) -> None:
    desk.session.state = ServiceState.STARTING
    desk.board.up(desk.session, desk.session.declared())
    assert not desk.board.connected
    desk.board.notice(cache_pb2.Notice(state=cache_pb2.StateChanged(state="SERVICE_STATE_SERVING")))
    assert desk.board.connected
    desk.board.notice(mapped())
    desk.stock(4)
    desk.board.notice(cache_pb2.Notice(state=cache_pb2.StateChanged(state="SERVICE_STATE_DRAINING")))
    assert not desk.board.grants_to_come
    assert desk.board.usable


def test_a_round_that_raises_costs_its_answers_and_nothing_else(desk: Desk) -> None:
    desk.up()

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    desk.session.lookup = broken  # type: ignore[method-assign]
    assert desk.answered(desk.board.ask(chain(), pin=False)).state is TicketState.FAILED
    del desk.session.lookup
    wait_for(lambda: desk.board.usable, 2.0)
    assert desk.answered(desk.board.ask(chain(), pin=False)).state is TicketState.ANSWERED
