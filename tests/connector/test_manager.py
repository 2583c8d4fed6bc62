"""The manager: a hit is a pin in hand, a commit needs every rank, nothing raises into native (I2, I3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kvhost_client.errors import Unavailable
from kvhost_client.types import Semantics
from kvhost_connector import matching as matching_module
from kvhost_connector import requests as requests_module
from kvhost_connector.agent import Agent
from kvhost_connector.board import Board
from kvhost_connector.manager import HostManager
from kvhost_connector.metadata import Epoch, SlotSpec, TransferId, TransferReport
from kvhost_connector.namespace import Group
from kvhost_connector.requests import Phase, RequestView
from tests.connector.fakes import FakeSession, mapped, removed, resync
from tests.support.waiting import wait_for

FULL, WINDOW = Group(0, True, 16), Group(1, False, 16)


def key(number: int, group: int = 0) -> OffloadKey:
    return OffloadKey(bytes([number]) * 32 + group.to_bytes(4, "big"))


KEYS = [key(number) for number in range(1, 9)]


class Scene:
    """A manager with its board, an agent, a session that is up, and requests."""

    def __init__(self, *, ranks: int = 1, writers: Sequence[int] | None = None, events: bool = False) -> None:
        self.session = FakeSession()
        self.board = Board(deadline_s=0.2, stock_target=8)
        self.agent = Agent(self.board, lambda: None)
        self.agent.start()
        self.manager = HostManager(events=events)
        self.may_attach = False
        self.manager.attach(
            self.board,
            ranks=ranks,
            writers=range(ranks) if writers is None else writers,
            may_attach=lambda: self.may_attach,
        )

    def up(self, session: FakeSession | None = None) -> None:
        self.session = session or self.session
        self.board.up(self.session, self.session.declared())
        self.board.notice(mapped())

    def stock(self, count: int = 8) -> None:
        self.manager.flush()
        wait_for(lambda: len(self.board.stock) >= count, what=f"{count} grants")

    def request(
        self, name: str = "r", keys: Sequence[OffloadKey] = KEYS, groups: Sequence[Group] = (FULL,)
    ) -> tuple[RequestView, ReqContext]:
        context = ReqContext(req_id=name)
        chains: list[list[bytes]] = []
        for group in groups:
            chain = [key for key in keys if int.from_bytes(key[-4:], "big") == group.id]
            for index, entry in enumerate(chain):
                context.set_offload_key_position(entry, (index + 1) * group.tokens_per_chunk)
            chains.append(list(chain))
        view = RequestView(name, tuple(groups), chains)
        self.manager.begin(view)
        return view, context

    def native(self, context: ReqContext, keys: Sequence[OffloadKey] = KEYS) -> int:
        """As native looks a full-attention group up: tokens of the leading hits."""
        hits = 0
        for entry in keys:
            if self.manager.lookup(entry, context) is not LookupResult.HIT:
                break
            hits += 1
        return 16 * hits

    def match(self, view: RequestView, context: ReqContext, computed: int = 0) -> int | None:
        """One ask of the scheduler."""
        if self.manager.must_wait(view, computed):
            return None
        found = self.native(context, KEYS[computed // 16 :])
        return None if self.manager.must_pin(view, context, computed, found) else found

    def matched(self, view: RequestView, context: ReqContext, computed: int = 0) -> int:
        """Asks until there is a number."""
        found: list[int] = []

        def there() -> bool:
            answer = self.match(view, context, computed)
            if answer is not None:
                found.append(answer)
            return answer is not None

        wait_for(there, what="a number")
        return found[0]

    def store(self, context: ReqContext, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], SlotSpec]:
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        assert output.evicted_keys == []
        return output.keys_to_store, output.store_spec

    def stored(self, keys: Sequence[OffloadKey]) -> ReqContext:
        """A request whose first chunks are these, which the daemon has now."""
        _, context = self.request()
        _, spec = self.store(context, keys)
        self.report(spec, True)
        wait_for(lambda: len(self.session.stored) == len(keys))
        wait_for(lambda: self.board.idle)
        return context

    def report(self, spec: SlotSpec, *oks: bool) -> None:
        self.manager.reported(TransferReport(spec.transfer_id, rank, ok) for rank, ok in enumerate(oks))
        self.manager.flush()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.session.gate.set()
    made.agent.close()


def put(session: FakeSession, keys: Sequence[bytes]) -> None:
    session.stored.update({entry: 100 + number for number, entry in enumerate(keys)})


# Lookup and pins.


def test_a_number_is_told_for_what_is_pinned_only(scene: Scene) -> None:
    put(scene.session, KEYS[:5])
    scene.up()
    view, context = scene.request()
    assert scene.match(view, context) is None
    assert scene.matched(view, context) == 5 * 16
    assert view.phase is Phase.PINNED
    assert sorted(scene.session.pins.values()) == KEYS[:5]
    # Asked again, as when there were no blocks: the same number, no other pin.
    assert scene.match(view, context) == 5 * 16
    assert len(scene.session.pins) == 5


def test_what_cannot_be_pinned_is_a_miss_and_native_is_asked_again(scene: Scene) -> None:
    put(scene.session, KEYS[:5])
    scene.up()
    view, context = scene.request()
    wait_for(lambda: not scene.manager.must_wait(view, 0))
    assert scene.native(context) == 80
    # Evicted between advice and pin.
    del scene.session.stored[KEYS[3]]
    assert scene.manager.must_pin(view, context, 0, 80)
    assert scene.matched(view, context) == 48
    assert len(scene.session.pins) == 3


def test_a_bound_on_pins_shortens_the_hit(scene: Scene) -> None:
    put(scene.session, KEYS[:5])
    scene.session.pin_bound = 2
    scene.up()
    view, context = scene.request()
    assert scene.matched(view, context) == 32


def test_only_what_is_behind_the_device_is_pinned(scene: Scene) -> None:
    put(scene.session, KEYS)
    scene.up()
    view, context = scene.request()
    assert scene.matched(view, context, computed=48) == 5 * 16
    assert sorted(scene.session.pins.values()) == KEYS[3:]
    scene.manager.flush()
    wait_for(lambda: [touch.keys for touch in scene.session.touched] == [KEYS[:3]])


def test_a_device_hit_that_changed_gives_pins_back(scene: Scene) -> None:
    put(scene.session, KEYS)
    scene.up()
    view, context = scene.request()
    scene.matched(view, context, computed=64)
    assert scene.matched(view, context, computed=32) == 6 * 16
    scene.manager.flush()
    wait_for(lambda: sorted(scene.session.pins.values()) == KEYS[2:])


def test_pins_go_back_after_sixteen_asks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    put(scene.session, KEYS)
    scene.up()
    view, context = scene.request()
    scene.matched(view, context)
    for _ in range(requests_module.MAX_ASKS - 1):
        assert scene.match(view, context) == 128
    assert scene.match(view, context) is None
    scene.manager.flush()
    assert scene.matched(view, context) == 128
    scene.manager.end(view)
    scene.manager.flush()
    wait_for(lambda: not scene.session.pins)


def test_advice_that_is_old_is_asked_for_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.up()
    view, context = scene.request()
    assert scene.matched(view, context) == 0
    put(scene.session, KEYS)
    view2, context2 = scene.request("s")
    wait_for(lambda: not scene.manager.must_wait(view2, 0))
    monkeypatch.setattr(matching_module, "ADVICE_LASTS_S", 0.0)
    assert scene.match(view2, context2) is None


def test_windowed_groups_pin_what_they_reported_inside_the_hit(scene: Scene) -> None:
    windowed = [key(number, 1) for number in range(1, 9)]
    put(scene.session, [*KEYS, *windowed])
    scene.up()
    view, context = scene.request(keys=[*KEYS, *windowed], groups=(FULL, WINDOW))
    wait_for(lambda: not scene.manager.must_wait(view, 0))
    assert scene.native(context) == 128
    for entry in (windowed[7], windowed[6], windowed[5]):
        assert scene.manager.lookup(entry, context) is LookupResult.HIT
    # Two chunks fewer in the end: the last of them is not needed, the others are.
    assert scene.manager.must_pin(view, context, 0, 112)
    assert view.ticket is not None
    asked = {chain.group: (chain.semantics, list(chain.keys)) for chain in view.ticket.chains}
    assert asked == {
        0: (Semantics.PREFIX, KEYS[:7]),
        1: (Semantics.SET, [windowed[6], windowed[5]]),
    }


def test_a_request_that_nobody_announced_misses(scene: Scene) -> None:
    scene.up()
    assert scene.manager.lookup(KEYS[0], ReqContext(req_id="stranger")) is LookupResult.MISS


# A daemon that is not there, or silent.


def test_without_a_session_everything_is_a_miss_at_once(scene: Scene) -> None:
    view, context = scene.request()
    assert scene.match(view, context) == 0


def test_the_first_request_waits_only_while_there_is_hope(scene: Scene) -> None:
    put(scene.session, KEYS)
    scene.may_attach = True
    view, context = scene.request()
    assert scene.match(view, context) is None
    assert scene.match(view, context) is None
    scene.up()
    assert scene.matched(view, context) == 128


def test_a_lookup_that_is_not_answered_in_time_is_a_miss(scene: Scene) -> None:
    put(scene.session, KEYS)
    scene.up()
    scene.session.gate.clear()
    began = time.monotonic()
    view, context = scene.request()
    assert scene.matched(view, context) == 0
    assert 0.15 < time.monotonic() - began < 3
    # The call began a little later than the wait for it.
    wait_for(lambda: scene.board.silent)
    # The next one does not wait at all.
    other, context2 = scene.request("s")
    assert scene.match(other, context2) == 0
    scene.session.gate.set()
    assert scene.board.counters.take()["lookup_deadlines"] == 1


def test_a_pin_that_is_not_confirmed_in_time_is_a_miss_and_goes_back(scene: Scene) -> None:
    put(scene.session, KEYS)
    scene.up()
    view, context = scene.request()
    wait_for(lambda: not scene.manager.must_wait(view, 0))
    scene.session.gate.clear()
    assert scene.match(view, context) is None
    assert scene.matched(view, context) == 0
    scene.session.gate.set()
    wait_for(lambda: "pin" in scene.session.calls and not scene.session.pins)
    assert scene.board.counters.take()["pin_deadlines"] == 1


# Hits that are held with the first answer.


@pytest.fixture
def roomy(scene: Scene) -> Scene:
    """Room for two requests of eight chunks to be held at once."""
    scene.session.slots = 2 * len(KEYS) * matching_module.HELD_PART
    scene.up()
    return scene


def before_pins(session: FakeSession, act: Callable[[], object]) -> None:
    """Does something between a lookup and the pin that follows it."""
    lookup = session.lookup

    def acting(queries: Any, pin: bool = False, deadline_s: float | None = None) -> Any:
        if pin:
            act()
        return lookup(queries, pin, deadline_s)

    session.lookup = acting  # type: ignore[method-assign]


def test_hits_are_held_with_the_first_answer(roomy: Scene) -> None:
    put(roomy.session, KEYS[:5])
    view, context = roomy.request()
    wait_for(lambda: not roomy.manager.still_waits(view))
    assert [call for call in roomy.session.calls if call in ("lookup", "pin")] == ["lookup", "pin"]
    # The first number is there at the first ask.
    assert roomy.match(view, context) == 80
    assert view.phase is Phase.PINNED
    assert sorted(roomy.session.pins.values()) == KEYS[:5]
    # However much the device has, it is held.
    assert roomy.match(view, context, computed=32) == 48
    spec = roomy.manager.prepare_load(KEYS[2:5], context)
    assert spec.slots == (102, 103, 104)  # type: ignore[attr-defined]
    roomy.manager.allocated(view)
    roomy.manager.flush()
    wait_for(lambda: sorted(roomy.session.pins.values()) == KEYS[2:5])


def test_a_miss_is_asked_once(roomy: Scene) -> None:
    view, context = roomy.request()
    wait_for(lambda: not roomy.manager.still_waits(view))
    assert roomy.match(view, context) == 0
    assert "pin" not in roomy.session.calls


def test_a_long_queue_does_not_hold_the_pool(roomy: Scene) -> None:
    put(roomy.session, KEYS)
    waiting = [roomy.request(f"r{number}") for number in range(5)]
    wait_for(lambda: not any(roomy.manager.still_waits(view) for view, _ in waiting))
    assert len(roomy.session.pins) == 2 * len(KEYS)
    # Those that were not held get there by their own pins; one that ends makes room for the next to come.
    assert roomy.matched(*waiting[4]) == 128
    roomy.manager.end(waiting[0][0])
    roomy.manager.flush()
    view, context = roomy.request("later")
    wait_for(lambda: not roomy.manager.still_waits(view))
    assert roomy.match(view, context) == 128


def test_what_was_held_too_long_is_held_when_it_is_asked_for(roomy: Scene) -> None:
    put(roomy.session, KEYS)
    view, context = roomy.request()
    wait_for(lambda: not roomy.manager.still_waits(view))
    for _ in range(requests_module.MAX_ASKS):
        assert roomy.match(view, context) == 128
    assert roomy.match(view, context) is None
    roomy.manager.flush()
    wait_for(lambda: not roomy.manager.still_waits(view))
    wait_for(lambda: not roomy.session.pins)
    assert roomy.matched(view, context) == 128


@pytest.mark.parametrize("when", ["before the answer", "after it"])
def test_what_is_held_for_a_request_that_ended_goes_back(roomy: Scene, when: str) -> None:
    put(roomy.session, KEYS)
    if when == "before the answer":
        roomy.session.gate.clear()
    view, _ = roomy.request()
    if when == "after it":
        wait_for(lambda: not roomy.manager.still_waits(view))
    roomy.manager.forget("r")
    roomy.session.gate.set()
    roomy.manager.flush()
    wait_for(lambda: roomy.board.idle and not roomy.session.pins)


def test_what_was_held_in_another_daemon_is_not_released_in_this_one(roomy: Scene) -> None:
    """Every daemon counts its sessions from 1, and its pins by itself."""
    put(roomy.session, KEYS)
    view, _ = roomy.request()
    wait_for(lambda: not roomy.manager.still_waits(view))
    assert not roomy.manager.must_wait(view, 0)
    assert view.phase is Phase.PINNED
    roomy.board.down("killed")
    following = FakeSession(number=roomy.session.number, boot_id=roomy.session.boot_id + 1)
    following.pins = dict.fromkeys(roomy.session.pins, b"somebody's")
    roomy.up(following)
    roomy.manager.forget("r")
    roomy.stock()
    assert len(following.pins) == len(KEYS)


def test_chunks_evicted_between_lookup_and_hold_shorten_the_hit(roomy: Scene) -> None:
    put(roomy.session, KEYS)
    before_pins(roomy.session, lambda: roomy.session.stored.pop(KEYS[3], None))
    view, context = roomy.request()
    wait_for(lambda: not roomy.manager.still_waits(view))
    assert roomy.match(view, context) == 48
    assert sorted(roomy.session.pins.values()) == KEYS[:3]


def test_a_bound_on_pins_shortens_what_is_held(roomy: Scene) -> None:
    put(roomy.session, KEYS)
    roomy.session.pin_bound = 2
    view, context = roomy.request()
    wait_for(lambda: not roomy.manager.still_waits(view))
    assert roomy.match(view, context) == 32


def test_windows_are_not_held_before_native_was_asked(roomy: Scene) -> None:
    windowed = [key(number, 1) for number in range(1, 4)]
    put(roomy.session, [*KEYS[:3], *windowed])
    view, _ = roomy.request(keys=[*KEYS[:3], *windowed], groups=(FULL, WINDOW))
    wait_for(lambda: not roomy.manager.still_waits(view))
    assert not roomy.session.pins


def test_a_hold_that_fails_is_a_miss(roomy: Scene) -> None:
    put(roomy.session, KEYS)

    def gone() -> None:
        raise Unavailable("gone")

    before_pins(roomy.session, gone)
    view, context = roomy.request()
    assert roomy.matched(view, context) == 0


# Loads.


def test_a_load_takes_its_pins_and_the_rest_goes_back(scene: Scene) -> None:
    put(scene.session, KEYS)
    scene.up()
    view, context = scene.request()
    scene.matched(view, context)
    spec = scene.manager.prepare_load(KEYS[:3], context)
    assert isinstance(spec, SlotSpec)
    assert (spec.problem, spec.session, spec.boot_id) == ("", scene.session.number, scene.session.boot_id)
    assert spec.slots == (100, 101, 102)
    scene.manager.allocated(view)
    scene.manager.flush()
    wait_for(lambda: sorted(scene.session.pins.values()) == KEYS[:3])
    scene.report(spec, True)
    wait_for(lambda: not scene.session.pins)


def test_pins_of_a_load_outlive_the_request_and_end_with_the_last_rank(scene: Scene) -> None:
    scene = Scene(ranks=2)
    put(scene.session, KEYS)
    scene.up()
    view, context = scene.request()
    scene.matched(view, context)
    spec = scene.manager.prepare_load(KEYS, context)
    scene.manager.allocated(view)
    scene.manager.end(view)
    scene.manager.forget("r")
    scene.report(spec, True)
    scene.request("s")
    wait_for(lambda: scene.board.idle)
    assert len(scene.session.pins) == 8
    scene.manager.reported([TransferReport(spec.transfer_id, 1, True)])
    scene.manager.flush()
    wait_for(lambda: not scene.session.pins)
    scene.agent.close()


@pytest.mark.parametrize("why", ["not pinned", "another session", "no session"])
def test_a_load_of_what_is_not_held_is_to_be_reported_failed(scene: Scene, why: str) -> None:
    put(scene.session, KEYS[:4])
    scene.up()
    view, context = scene.request()
    scene.matched(view, context)
    keys = KEYS[:5] if why == "not pinned" else KEYS[:4]
    if why != "not pinned":
        scene.board.down("gone")
    if why == "another session":
        scene.up(FakeSession(number=2))
    spec = scene.manager.prepare_load(keys, context)
    assert isinstance(spec, SlotSpec)
    assert spec.problem
    assert spec.slots == ()
    # And not loaded again by this request.
    assert scene.manager.lookup(KEYS[0], context) is LookupResult.MISS


def test_chunks_of_a_failed_load_are_misses_for_that_request_alone(scene: Scene) -> None:
    put(scene.session, KEYS)
    scene.up()
    view, context = scene.request()
    scene.matched(view, context)
    spec = scene.manager.prepare_load(KEYS, context)
    scene.manager.allocated(view)
    scene.report(spec, False)
    assert scene.matched(view, context) == 0
    other, context2 = scene.request("s")
    assert scene.matched(other, context2) == 128


# Stores.


def test_a_store_is_committed_when_every_writer_said_ok(scene: Scene) -> None:
    scene = Scene(ranks=2)
    scene.up()
    scene.stock()
    _, context = scene.request()
    keys, spec = scene.store(context, KEYS[:3])
    assert keys == KEYS[:3]
    assert len(spec.store_ids) == len(spec.slots) == 3
    scene.manager.reported([TransferReport(spec.transfer_id, 0, True)])
    scene.manager.complete_store(set(KEYS[:3]), context)
    scene.manager.flush()
    wait_for(lambda: len(scene.session.assigned) == 3)
    assert not scene.session.stored
    scene.manager.reported([TransferReport(spec.transfer_id, 1, True)])
    scene.manager.flush()
    wait_for(lambda: set(scene.session.stored) == set(KEYS[:3]))
    chunks = [scene.session.assigned[store] for store in spec.store_ids]
    assert [chunk.parent for chunk in chunks] == [b"", KEYS[0], KEYS[1]]
    scene.agent.close()


def test_one_rank_that_failed_aborts_the_store(scene: Scene) -> None:
    scene = Scene(ranks=2)
    scene.up()
    scene.stock()
    _, context = scene.request()
    _, spec = scene.store(context, KEYS[:2])
    scene.report(spec, True, False)
    wait_for(lambda: len(scene.session.aborts) == 2)
    assert not scene.session.stored
    # They may be stored again.
    wait_for(lambda: scene.store(context, KEYS[:2])[0] == KEYS[:2])
    scene.agent.close()


def test_what_is_stored_or_being_stored_is_not_stored_again(scene: Scene) -> None:
    scene.up()
    scene.stock()
    _, context = scene.request()
    _, spec = scene.store(context, KEYS[:3])
    assert scene.store(context, KEYS[:4])[0] == [KEYS[3]]
    scene.report(spec, True)
    wait_for(lambda: len(scene.session.stored) == 3)
    wait_for(lambda: scene.board.idle)
    assert scene.store(context, KEYS[:3])[0] == []


def test_what_builds_on_a_removed_chunk_is_stored_with_it_or_after_it_only(scene: Scene) -> None:
    scene.up()
    scene.stock()
    context = scene.stored(KEYS[:3])
    scene.board.notice(removed([KEYS[2]]))
    assert scene.store(context, KEYS[3:5])[0] == []
    assert scene.store(context, KEYS[2:4])[0] == KEYS[2:4]
    assert scene.store(context, KEYS[4:5])[0] == KEYS[4:5]


def test_a_prompt_that_was_evicted_is_stored_whole_again(scene: Scene) -> None:
    scene.up()
    scene.stock()
    scene.stored(KEYS[:6])
    scene.board.notice(removed(KEYS[:6]))
    scene.stock()
    _, context = scene.request("s")
    assert scene.store(context, KEYS[:4])[0] == KEYS[:4]
    assert scene.store(context, KEYS[4:6])[0] == KEYS[4:6]


def test_fewer_grants_than_chunks_store_a_prefix_and_owe_the_rest(scene: Scene) -> None:
    scene.session.grant_bound = 3
    scene.up()
    scene.stock(3)
    _, context = scene.request()
    keys, spec = scene.store(context, KEYS)
    assert keys == KEYS[:3]
    assert scene.manager.take_shortfalls(windowed=False) == []
    scene.report(spec, True)
    wait_for(lambda: len(scene.board.stock) == 3)
    assert scene.manager.take_shortfalls(windowed=False) == [("r", 0, 3)]
    assert scene.manager.take_shortfalls(windowed=False) == []


def test_groups_are_stored_up_to_the_same_token(scene: Scene) -> None:
    windowed = [key(number, 1) for number in range(1, 9)]
    scene.session.grant_bound = 6
    scene.up()
    scene.stock(6)
    _, context = scene.request(keys=[*KEYS, *windowed], groups=(FULL, WINDOW))
    keys, spec = scene.store(context, [*KEYS, *windowed])
    assert keys == [*KEYS[:3], *windowed[:3]]
    assert len(spec.slots) == 6


def test_windowed_chunks_are_offered_again_in_the_next_step_or_never(scene: Scene) -> None:
    windowed = [key(number, 1) for number in range(1, 9)]
    scene.session.grant_bound = 2
    scene.up()
    scene.stock(2)
    _, context = scene.request(keys=windowed, groups=(WINDOW,))
    scene.store(context, windowed)
    assert scene.manager.take_shortfalls(windowed=False) == []
    assert scene.manager.take_shortfalls(windowed=True) == [("r", 0, 2)]
    scene.store(context, windowed[2:])
    scene.manager.drop_shortfalls()
    assert scene.manager.take_shortfalls(windowed=True) == []


def test_without_grants_or_a_daemon_nothing_is_stored_and_native_is_never_refused(scene: Scene) -> None:
    _, context = scene.request()
    assert scene.store(context, KEYS)[0] == []
    scene.up()
    scene.session.grant_bound = 0
    assert scene.store(context, KEYS)[0] == []
    assert scene.board.counters.take()["stores_without_grant"] == 8


# Weights, sessions, news.


def test_a_reset_aborts_stores_and_names_ranks_that_may_still_write(scene: Scene) -> None:
    scene = Scene(ranks=2)
    put(scene.session, [key(20)])
    scene.up()
    scene.stock()
    _, context = scene.request()
    _, spec = scene.store(context, KEYS[:2])
    scene.manager.reported([TransferReport(spec.transfer_id, 0, True)])
    scene.manager.reset("v2")
    assert scene.manager.epoch == Epoch(1)
    wait_for(lambda: scene.session.resets == ["v2"])
    unquiet = [abort.unquiet_ranks for abort in scene.session.aborts if abort.store_id in spec.store_ids]
    assert unquiet == [(1,), (1,)]
    # The last rank's word comes too late to be of any use, and does no harm.
    scene.manager.reported([TransferReport(spec.transfer_id, 1, True)])
    scene.manager.flush()
    wait_for(lambda: scene.board.idle)
    assert not scene.session.stored
    assert scene.manager.open_transfers() == 0
    scene.agent.close()


def test_a_reset_keeps_the_pins_of_loads_that_run_and_gives_others_back(scene: Scene) -> None:
    put(scene.session, KEYS)
    scene.up()
    view, context = scene.request()
    scene.matched(view, context)
    spec = scene.manager.prepare_load(KEYS[:2], context)
    scene.manager.reset("v2")
    wait_for(lambda: sorted(scene.session.pins.values()) == KEYS[:2])
    scene.report(spec, True)
    wait_for(lambda: not scene.session.pins)


def test_what_is_believed_ends_with_the_session(scene: Scene) -> None:
    scene.up()
    scene.stock()
    _, context = scene.request()
    _, spec = scene.store(context, KEYS[:3])
    scene.report(spec, True)
    wait_for(lambda: len(scene.session.stored) == 3)
    wait_for(lambda: scene.board.idle)
    scene.board.down("gone")
    scene.up(FakeSession(number=2, boot_id=9))
    scene.stock()
    assert scene.store(context, KEYS[:3])[0] == KEYS[:3]


def test_transfers_that_never_left_are_given_back(scene: Scene) -> None:
    put(scene.session, KEYS[:2])
    scene.up()
    scene.stock()
    view, context = scene.request()
    scene.matched(view, context)
    scene.manager.delivered()
    scene.manager.prepare_load(KEYS[:2], context)
    scene.store(context, KEYS[4:6])
    scene.manager.drop_undelivered()
    scene.manager.flush()
    wait_for(lambda: not scene.session.pins and len(scene.session.aborts) == 2)
    assert all(abort.unquiet_ranks == () for abort in scene.session.aborts)
    assert scene.manager.open_transfers() == 0


def test_events_tell_what_can_be_loaded(scene: Scene) -> None:
    scene = Scene(events=True)
    scene.up()
    scene.stock()
    _, context = scene.request()
    _, spec = scene.store(context, KEYS[:3])
    assert scene.manager.take_events() == []
    scene.report(spec, True)
    wait_for(lambda: len(scene.session.stored) == 3)
    wait_for(lambda: scene.board.idle)
    [stored] = list[Any](scene.manager.take_events())
    assert (list(stored.keys), stored.removed) == (KEYS[:3], False)
    scene.board.notice(removed([KEYS[0], key(50)]))
    [gone] = list[Any](scene.manager.take_events())
    assert (list(gone.keys), gone.removed) == ([KEYS[0]], True)
    scene.board.notice(resync())
    [rest] = list[Any](scene.manager.take_events())
    assert (set(rest.keys), rest.removed) == (set(KEYS[1:3]), True)
    scene.agent.close()


def test_nothing_raises_into_native(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.up()
    view, context = scene.request()

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(view, "chunk", broken)
    monkeypatch.setattr(scene.manager, "_absorb_news", broken)
    assert scene.store(context, KEYS)[0] == []
    assert scene.manager.take_events() == []
    view.pins = None  # type: ignore[assignment]
    view.authority = scene.board.authority
    spec = scene.manager.prepare_load(KEYS, context)
    assert isinstance(spec, SlotSpec)
    assert spec.problem
    assert spec.transfer_id == TransferId(0)
    view.pins = {}


def test_a_manager_without_a_board_answers_everything() -> None:
    manager = HostManager()
    view = RequestView("r", (FULL,), [list(KEYS)])
    context = ReqContext(req_id="r")
    manager.begin(view)
    assert not manager.must_wait(view, 0)
    assert manager.lookup(KEYS[0], context) is LookupResult.MISS
    output = manager.prepare_store(KEYS, context)
    assert output is not None
    assert output.keys_to_store == []
    manager.reset("v2")
    manager.flush()
    assert manager.get_stats() is None
    assert not manager.has_pending_work()


# What native need not be asked.


def foreseen(scene: Scene, view: RequestView, computed: int = 0, loading: Sequence[bytes] = ()) -> bool:
    """Whether pins are asked for without native, once there is advice."""
    wait_for(lambda: not scene.manager.must_wait(view, computed), what="advice")
    return scene.manager.foresee(view, computed, loading)


def test_a_prefix_is_pinned_by_advice_alone(scene: Scene) -> None:
    scene.up()
    put(scene.session, KEYS[:5])
    view, context = scene.request()
    assert foreseen(scene, view, computed=16)
    assert scene.matched(view, context, computed=16) == 64
    assert list(view.pins) == list(KEYS[1:5])


def test_native_is_asked_where_nothing_is_to_be_found_or_somebody_loads_it(scene: Scene) -> None:
    scene.up()
    put(scene.session, KEYS[:2])
    view, _ = scene.request()
    assert not foreseen(scene, view, computed=32)
    assert not foreseen(scene, view, loading=[KEYS[1]])
    assert foreseen(scene, view, loading=[KEYS[2]])


def test_keys_of_a_failed_load_are_not_foreseen(scene: Scene) -> None:
    scene.up()
    put(scene.session, KEYS[:3])
    view, _ = scene.request()
    view.failed.add(KEYS[0])
    assert not foreseen(scene, view)


def test_windows_are_looked_up_by_native(scene: Scene) -> None:
    scene.up()
    put(scene.session, KEYS)
    windowed = Group(FULL.id, False, FULL.tokens_per_chunk)
    view, _ = scene.request(groups=(windowed,))
    assert not foreseen(scene, view)
