"""From a request's arrival to a hit: lookup, advice, pins (design section 3, I3, I8).

What a request was told to be loadable is pinned already. Nobody waits longer than the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvhost_client.types import ChainQuery, Found
from kvhost_connector.beliefs import Beliefs
from kvhost_connector.board import Board
from kvhost_connector.namespace import Group
from kvhost_connector.orders import Ticket, TicketState
from kvhost_connector.requests import MAX_ASKS, Phase, RequestView

# An answer is advice; older advice is asked for again.
ADVICE_LASTS_S = 1.0
# After an answer that did not come, so long nothing is asked for the request.
BLIND_S = 0.5

HELD_PART = 16
"""One in so many chunks that there is room for may be held for requests that only arrived: their hits can be
loaded a step earlier, but a long queue must not hold the pool."""


class Matching:
    """Moves requests from phase to phase; see `requests` for the phases."""

    def __init__(
        self,
        board: Board,
        beliefs: Beliefs,
        may_attach: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._beliefs = beliefs
        self._may_attach = may_attach
        self._clock = clock
        # Requests whose hits are (to be) held since they arrived -> their chunks.
        self._held: dict[str, int] = {}

    def ask(self, view: RequestView) -> bool:
        """Starts a lookup of all keys. False when there is none, or nobody would answer."""
        chains = view.all_chains()
        if not chains:
            return False
        chunks = sum(map(len, view.chains))
        hold = self._may_hold(view, chunks)
        view.ticket = self._board.ask(chains, pin=False, hold=hold, request=view.req_id)
        if view.ticket is None:
            return False
        view.phase = Phase.ASKED
        if hold:
            view.held_at_once = True
            self._held[view.req_id] = chunks
        return True

    def _may_hold(self, view: RequestView, chunks: int) -> bool:
        """Whether hits are held as soon as they are found: once for a request, whose groups are all looked up
        by prefix, so that what is found is what would be loaded."""
        if view.held_at_once or not view.prefix_only:
            return False
        return sum(self._held.values()) + chunks <= self._board.room // HELD_PART

    def still_waits(self, view: RequestView) -> bool:
        """Whether an answer is on its way and may be: nothing else about the request matters before."""
        ticket = view.ticket
        return ticket is not None and ticket.state is TicketState.WAITING and not self._board.overdue(ticket)

    def must_wait(self, view: RequestView, computed: int) -> bool:
        """Whether native must not be asked yet: an answer is on its way. `computed`: tokens on the device."""
        self._settle(view)
        if view.phase in (Phase.ASKED, Phase.PINNING):
            return True
        now = self._clock()
        if view.phase is Phase.PINNED:
            view.asks += 1
            moved = view.computed is not None and view.computed != computed
            if moved or view.asks > MAX_ASKS or view.authority != self._board.authority:
                self.let_go(view)
        if view.phase is Phase.KNOWN and now - view.answered_at > ADVICE_LASTS_S:
            view.phase = Phase.IDLE
        if view.phase is Phase.IDLE and now >= view.blind_until:
            if self.ask(view):
                return True
            if not self._board.usable and self._may_attach():
                return True
        view.hits.clear()
        return False

    def is_hit(self, view: RequestView, key: bytes) -> bool:
        """What native is told of one key: what is pinned, or, before pins are taken, what is believed."""
        if key in view.failed:
            return False
        if view.phase is Phase.PINNED:
            hit = key in view.pins
        else:
            hit = view.phase is Phase.KNOWN and self._is_believed(view, key)
        if hit:
            view.hits[key] = None
        return hit

    def _is_believed(self, view: RequestView, key: bytes) -> bool:
        return key not in view.failed and (key in view.found or view.wire(key) in self._beliefs.stored)

    def foresee(self, view: RequestView, computed: int, loading: Collection[bytes]) -> bool:
        """Pins what native would find by advice alone, without asking it: all groups are looked up by prefix.
        False where nothing would be found, or it is not so simple; then native must be asked.

        `loading`: keys that native is loading for another request, for which it would have this one wait.
        """
        if view.phase is not Phase.KNOWN or not view.prefix_only:
            return False
        end: int | None = None
        # Failed keys are few, if any: most requests need no second look.
        sure = view.found if not view.failed else frozenset()
        for group, keys in zip(view.groups, view.chains, strict=True):
            reach = computed // group.tokens_per_chunk
            for key in keys[reach:]:
                if key not in sure and not self._is_believed(view, key):
                    break
                reach += 1
            end = reach * group.tokens_per_chunk if end is None else min(end, reach * group.tokens_per_chunk)
        wanted: list[tuple[Group, list[bytes]]] = []
        for group, keys in zip(view.groups, view.chains, strict=True):
            size = group.tokens_per_chunk
            if end is None or end - computed < size:
                return False
            wanted.append((group, keys[computed // size : -(-end // size)]))
        if loading and any(key in loading for _, keys in wanted for key in keys):
            return False
        self._touch_once(view, computed)
        self._pin(view, [view.query(group, keys) for group, keys in wanted], computed)
        view.hits = dict.fromkeys(key for _, keys in wanted for key in keys)
        return True

    def must_pin(self, view: RequestView, context: ReqContext, computed: int, found: int) -> bool:
        """Native found `found` tokens behind `computed`: whether they must still be pinned before it may say
        so (I3)."""
        self._touch_once(view, computed)
        if found == 0:
            self.let_go(view)
            return False
        if view.phase is Phase.PINNED:
            return False
        keys = [key for key in view.hits if _covers(view, context, key, computed, computed + found)]
        self._pin(view, view.grouped(keys), computed)
        view.hits = dict.fromkeys(keys)
        return True

    def _pin(self, view: RequestView, chains: Sequence[ChainQuery], computed: int) -> None:
        view.ticket = self._board.ask(chains, pin=True, request=view.req_id)
        if view.ticket is None:
            view.phase = Phase.IDLE
            view.blind_until = self._clock() + BLIND_S
        else:
            view.phase = Phase.PINNING
            view.computed = computed

    def let_go(self, view: RequestView) -> None:
        """Back to the beginning; what is held or asked for goes back."""
        self._held.pop(view.req_id, None)
        if view.phase is Phase.IDLE and view.ticket is None and not view.pins:
            return
        if view.ticket is not None:
            self._board.drop(view.ticket)
        if view.pins and view.authority is not None:
            self._board.release(view.authority, [pin.pin_id for pin in view.pins.values()])
        view.ticket = None
        view.pins = {}
        view.authority = None
        view.phase = Phase.IDLE

    def _settle(self, view: RequestView) -> None:
        """Takes an answer that came, gives up one that is overdue."""
        ticket = view.ticket
        if ticket is None or view.phase not in (Phase.ASKED, Phase.PINNING):
            return
        pinning = view.phase is Phase.PINNING
        if ticket.state is TicketState.ANSWERED:
            view.ticket = None
            if pinning:
                self._take_pins(view, ticket)
            else:
                self._take_advice(view, ticket)
                if ticket.hold:
                    self._take_held(view, ticket)
        elif ticket.state is not TicketState.WAITING or self._board.overdue(ticket):
            if ticket.state is TicketState.WAITING:
                self._board.counters.add("pin_deadlines" if pinning else "lookup_deadlines")
            self.let_go(view)
            view.blind_until = self._clock() + BLIND_S

    def _take_advice(self, view: RequestView, ticket: Ticket) -> None:
        view.phase = Phase.KNOWN
        view.answered_at = self._clock()
        hits = {wire for wire, at in ticket.found.items() if at == Found.HIT}
        self._beliefs.found(hits)
        if view.adapter:
            view.found = {key for chain in view.chains for key in chain if view.wire(key) in hits}
        else:
            view.found = hits

    def _take_held(self, view: RequestView, ticket: Ticket) -> None:
        """What was found is pinned already, from the first chunk on."""
        if not ticket.pins:
            self._held.pop(view.req_id, None)
            return
        view.computed = None
        _pinned(view, ticket, (key for chain in view.chains for key in chain))

    def _take_pins(self, view: RequestView, ticket: Ticket) -> None:
        _pinned(view, ticket, view.hits)
        for key in view.hits:
            if key not in view.pins:
                view.found.discard(key)
                wire = view.wire(key)
                if ticket.found.get(wire) != Found.BOUND:
                    self._beliefs.missed(wire)

    def _touch_once(self, view: RequestView, computed: int) -> None:
        """Chunks whose blocks the device still had: used, though not loaded."""
        if view.touched or not computed:
            return
        view.touched = True
        self._board.touch(
            view.query(group, keys[: computed // group.tokens_per_chunk])
            for group, keys in zip(view.groups, view.chains, strict=True)
            if group.prefix and computed >= group.tokens_per_chunk
        )


def _pinned(view: RequestView, ticket: Ticket, keys: Iterable[bytes]) -> None:
    """Moves a request to PINNED, with what the ticket holds of these keys."""
    view.phase = Phase.PINNED
    view.authority = ticket.authority
    view.asks = 0
    view.pins = {key: ticket.pins[wire] for key in keys if (wire := view.wire(key)) in ticket.pins}


def _covers(view: RequestView, context: ReqContext, key: bytes, start: int, end: int) -> bool:
    """Whether a key's chunk covers any of the tokens from `start` to `end`."""
    last = context.get_offload_key_position(OffloadKey(key)) or 0
    position, _ = view.place(key, last)
    return last > start and last - view.groups[position].tokens_per_chunk < end
