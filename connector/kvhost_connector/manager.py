"""The scheduler half's manager: decides for every request what is looked up, pinned, loaded and stored.

Native code asks it and is answered at once, from what is known here; the daemon is talked to elsewhere. No
exception leaves it: one raised into native would cost the engine its life (contract 19).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvhost_client.types import Found, StoreOf
from kvhost_connector import stats
from kvhost_connector.board import Board
from kvhost_connector.events import EventLog
from kvhost_connector.holds import Authority, PinnedSlot, Transfer, TransferTable
from kvhost_connector.metadata import Epoch, SlotSpec, TransferId, TransferReport
from kvhost_connector.orders import NewsKind, TicketState
from kvhost_connector.requests import MAX_ASKS, Phase, RequestView, StoredKeys

logger = logging.getLogger("vllm.kvhost")

# An answer is advice; older advice is asked for again.
_ADVICE_LASTS_S = 1.0
# After an answer that did not come, so long nothing is asked for the request.
_BLIND_S = 0.5

# So many removed keys are remembered, to store nothing that builds on them.
_REMOVED_LIMIT = 1 << 16

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _never_raises(
    default: Callable[[], _Result],
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """What native calls: a fault of ours is logged and answered as if there were no cache."""

    def decorate(method: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(method)
        def guarded(*arguments: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
            try:
                return method(*arguments, **named)
            except Exception:
                logger.exception("kvhost: %s failed; the request is computed", method.__name__)
                return default()

        return guarded

    return decorate


class Shortfall(NamedTuple):
    """A request whose chunks from `chunk` on, in this group, found no grant and must be offered again."""

    req_id: str
    position: int
    chunk: int


def refusal(why: str) -> SlotSpec:
    """The host side of a job that must be reported failed."""
    return SlotSpec(TransferId(0), Epoch(0), 0, 0, 0, (), problem=why)


class HostManager(OffloadingManager):
    """Manager of one engine. Without a board (before `attach`, or for good) everything is a miss."""

    def __init__(self, *, events: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """`events`: keep what KV events need."""
        super().__init__()
        self.spec: Any = None
        self._events = EventLog(events)
        self._clock = clock
        self._board: Board | None = None
        self._may_attach: Callable[[], bool] = lambda: False
        self._table = TransferTable(0, ())
        self._views: dict[str, RequestView] = {}
        self._stored = StoredKeys()
        # Keys that were removed and not stored again, and how often this changed.
        self._removed = StoredKeys(_REMOVED_LIMIT)
        self._removals = 0
        self.epoch = Epoch(0)
        # (request, group) -> first chunk that found no grant.
        self._owed: dict[tuple[str, int], int] = {}

    def attach(
        self, board: Board, *, ranks: int, writers: Sequence[int], may_attach: Callable[[], bool]
    ) -> None:
        """From now on the cache may be used. `may_attach` says whether a new engine's first requests should
        wait for its first connection."""
        self._board = board
        self._may_attach = may_attach
        self._table = TransferTable(ranks, writers)

    # The course of a request; the connector calls these around native's own hooks.

    def begin(self, view: RequestView) -> None:
        """A request arrived: its lookup starts before the scheduler asks (I8)."""
        self._views[view.req_id] = view
        if self._board is not None:
            self._board.engine_active()
            self._ask(view)

    def view(self, req_id: str) -> RequestView | None:
        return self._views.get(req_id)

    def must_wait(self, view: RequestView, computed: int) -> bool:
        """Whether native must not be asked yet: an answer is on its way. `computed`: tokens on the device."""
        board = self._board
        if board is None:
            return False
        self._absorb_news(board)
        self._settle(view, board)
        if view.phase in (Phase.ASKED, Phase.PINNING):
            return True
        now = self._clock()
        if view.phase is Phase.PINNED:
            view.asks += 1
            if view.computed != computed or view.asks > MAX_ASKS or view.authority != board.authority:
                self._let_go(view)
        if view.phase is Phase.KNOWN and now - view.answered_at > _ADVICE_LASTS_S:
            view.phase = Phase.IDLE
        if view.phase is Phase.IDLE and now >= view.blind_until:
            if self._ask(view):
                return True
            if not board.usable and self._may_attach():
                return True
        view.hits.clear()
        return False

    def must_pin(self, view: RequestView, context: ReqContext, computed: int, found: int) -> bool:
        """Native found `found` tokens behind `computed`: whether they must still be pinned before it may say
        so (I3)."""
        board = self._board
        if board is None:
            return found > 0
        if not view.touched and computed:
            view.touched = True
            self._touch(view, board, computed)
        if found == 0:
            self._let_go(view)
            return False
        if view.phase is Phase.PINNED:
            return False
        keys = [key for key in view.hits if self._needed(view, context, key, computed, computed + found)]
        view.ticket = board.ask(view.grouped(keys), pin=True)
        if view.ticket is None:
            view.phase = Phase.IDLE
            view.blind_until = self._clock() + _BLIND_S
        else:
            view.phase = Phase.PINNING
            view.computed = computed
            view.hits = dict.fromkeys(keys)
        return True

    def allocated(self, view: RequestView) -> None:
        """Blocks were allocated, and `prepare_load` took what is loaded: the rest goes back (B1)."""
        self._let_go(view)
        view.found.clear()

    def end(self, view: RequestView) -> None:
        """The request finished or was aborted. A load in flight keeps its pins until all ranks reported."""
        self._let_go(view)

    def forget(self, req_id: str) -> None:
        """Native asks for this request no more."""
        view = self._views.pop(req_id, None)
        if view is not None:
            self._let_go(view)

    def reported(self, reports: Iterable[TransferReport]) -> None:
        """What ranks said about transfers: the only ground for a commit (I2)."""
        for report in reports:
            transfer = self._table.report(report.transfer_id, report.rank, report.ok)
            if transfer is not None:
                self._finish(transfer)

    def take_shortfalls(self, *, windowed: bool) -> list[Shortfall]:
        """What native should offer again, of groups with windowed (or state) layers or of the others.

        Blocks of full attention stay with their request: they may be offered whenever a grant is there. Those
        of a window may be given to somebody else: only in the very next step.
        """
        board = self._board
        if board is None or not self._owed or not (board.grants_to_come if windowed else len(board.stock)):
            return []
        due = [
            Shortfall(req_id, position, chunk)
            for (req_id, position), chunk in self._owed.items()
            if (view := self._views.get(req_id)) is not None and view.groups[position].prefix != windowed
        ]
        for req_id, position, _ in due:
            del self._owed[req_id, position]
        return due

    def drop_shortfalls(self) -> None:
        """Windowed chunks that were not offered again in time are not stored."""
        self._owed = {
            (req_id, position): chunk
            for (req_id, position), chunk in self._owed.items()
            if (view := self._views.get(req_id)) is not None and view.groups[position].prefix
        }

    def flush(self) -> None:
        """The step is over: its changes go as one message."""
        if self._board is not None:
            self._board.engine_active()
            self._board.flush()

    def reset(self, weights_version: str) -> None:
        """The weights changed: nothing from before takes effect any more (I12). At once, whatever the daemon
        does."""
        self.epoch = Epoch(self.epoch + 1)
        for view in self._views.values():
            self._let_go(view)
            view.found.clear()
            view.failed.clear()
        self._abandon_stores()
        self._forget_stored()
        if self._board is not None:
            self._board.reset(weights_version)

    def delivered(self) -> None:
        """The step's jobs are on their way to the workers."""
        self._table.delivered()

    def drop_undelivered(self) -> None:
        """The step's jobs will never reach a worker: nobody reads or writes their slots."""
        for transfer in self._table.take_undelivered():
            if self._board is not None:
                self._board.release(transfer.authority, [pin.pin_id for pin in transfer.pins])
                self._board.abort(transfer.authority, [grant.store_id for grant in transfer.grants])

    def open_transfers(self) -> int:
        return len(self._table)

    # What native asks.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Local knowledge only. HIT for what is pinned, or, before pins are taken, for what is believed."""
        view = self._views.get(req_context.req_id)
        if view is None or key in view.failed:
            return LookupResult.MISS
        if view.phase is Phase.PINNED:
            hit = key in view.pins
        elif view.phase is Phase.KNOWN:
            hit = key in view.found or view.wire(key) in self._stored
        else:
            hit = False
        if not hit:
            return LookupResult.MISS
        view.hits[key] = None
        return LookupResult.HIT

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    @_never_raises(lambda: refusal("the load could not be prepared"))
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """The slots of pinned keys. A key that is not pinned makes a job that its workers report failed."""
        view = self._views.get(req_context.req_id)
        authority = self._board.authority if self._board is not None else None
        if view is None or authority is None or view.authority != authority:
            if view is not None:
                view.failed.update(keys)
            return refusal("the session in which its chunks were held is over")
        missing = sum(key not in view.pins for key in keys)
        if missing:
            view.failed.update(keys)
            return refusal(f"{missing} of {len(keys)} chunks to load are not held")
        pins = [view.pins.pop(key) for key in keys]
        transfer = self._table.open_load(
            authority, self.epoch, req_id=view.req_id, keys=tuple(keys), pins=tuple(pins)
        )
        return self._spec(transfer, [pin.slot for pin in pins])

    @_never_raises(lambda: PrepareStoreOutput([], refusal("the store could not be prepared"), []))
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Slots for the chunks that nobody has: at once, for as many as grants are at hand.

        Never None: native would log a warning a step. What must be offered again is a shortfall instead.
        """
        nothing = PrepareStoreOutput([], refusal("nothing is stored"), [])
        view, board = self._views.get(req_context.req_id), self._board
        if view is None or board is None:
            return nothing
        self._absorb_news(board)
        authority = board.authority
        ends = {key: req_context.get_offload_key_position(key) or 0 for key in keys}
        view.find_cuts(self._removed, self._removals)
        wanted = [
            key for key in keys if not self._is_stored(view.wire(key)) and not view.is_cut_off(key, ends[key])
        ]
        if not wanted or authority is None:
            return nothing
        grants = board.stock.take(authority.serial, len(wanted))
        accepted = set(wanted)
        if len(grants) < len(wanted):
            # A prefix of every group, as far as possible to the same token: a hit needs all groups.
            accepted = set(sorted(wanted, key=lambda key: ends[key])[: len(grants)])
            self._fall_short(view, board, [key for key in wanted if key not in accepted], ends)
        if not grants:
            return nothing
        chosen = [key for key in wanted if key in accepted]
        chunks = [view.chunk(key, ends[key]) for key in chosen]
        self._restored(chunk.key for chunk in chunks)
        self._events.learn(dict(zip((chunk.key for chunk in chunks), chosen, strict=True)))
        transfer = self._table.open_store(
            authority,
            self.epoch,
            req_id=view.req_id,
            keys=tuple(chosen),
            chunks=tuple(chunks),
            grants=tuple(grants),
        )
        board.assign(authority, list(map(StoreOf, (grant.store_id for grant in grants), chunks)))
        slots = [grant.slot for grant in grants]
        spec = self._spec(transfer, slots, [grant.store_id for grant in grants])
        return PrepareStoreOutput(chosen, spec, [])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing: pins end with the ranks' own reports."""

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Nothing: native takes every job for a success, a commit needs the ranks' own word (I2)."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.forget(req_context.req_id)

    @_never_raises(lambda: [])
    def take_events(self) -> list[OffloadingEvent]:
        if self._board is not None:
            self._absorb_news(self._board)
        return self._events.take()

    def has_pending_work(self) -> bool:
        """Never: the agent's thread works without steps, and native would spin (contract 18)."""
        return False

    def reset_cache(self) -> None:
        """Nothing: the connector resets by `reset`, also where native must not be asked (contract 22)."""

    @_never_raises(lambda: None)
    def get_stats(self) -> Any:
        if self._board is None:
            return None
        return stats.collect(self._board.counters, self._board.usable)

    # Asking.

    def _ask(self, view: RequestView) -> bool:
        """Starts a lookup of all keys. False when there is none, or nobody would answer."""
        chains = view.all_chains()
        view.ticket = self._board.ask(chains, pin=False) if self._board is not None and chains else None
        if view.ticket is None:
            return False
        view.phase = Phase.ASKED
        return True

    def _settle(self, view: RequestView, board: Board) -> None:
        """Takes an answer that came, gives up one that is overdue."""
        ticket = view.ticket
        if ticket is None or view.phase not in (Phase.ASKED, Phase.PINNING):
            return
        pinning = view.phase is Phase.PINNING
        if ticket.state is TicketState.ANSWERED:
            view.ticket = None
            if pinning:
                self._take_pins(view, ticket.found, ticket.pins, ticket.authority)
            else:
                self._take_advice(view, ticket.found)
        elif ticket.state is not TicketState.WAITING or board.overdue(ticket):
            if ticket.state is TicketState.WAITING:
                board.counters.add("pin_deadlines" if pinning else "lookup_deadlines")
            board.drop(ticket)
            view.ticket = None
            view.phase = Phase.IDLE
            view.blind_until = self._clock() + _BLIND_S

    def _take_advice(self, view: RequestView, found: dict[bytes, int]) -> None:
        view.phase = Phase.KNOWN
        view.answered_at = self._clock()
        hits = {key for key, at in found.items() if at == Found.HIT}
        for key in hits:
            self._stored.add(key)
        self._restored(hits)
        view.found = {key for chain in view.chains for key in chain if view.wire(key) in hits}

    def _take_pins(
        self,
        view: RequestView,
        found: dict[bytes, int],
        pins: dict[bytes, PinnedSlot],
        authority: Authority | None,
    ) -> None:
        view.phase = Phase.PINNED
        view.authority = authority
        view.asks = 0
        view.pins = {}
        for key in view.hits:
            wire = view.wire(key)
            if wire in pins:
                view.pins[key] = pins[wire]
            else:
                view.found.discard(key)
                if found.get(wire) != Found.BOUND:
                    self._stored.discard(wire)

    def _let_go(self, view: RequestView) -> None:
        """Back to the beginning; what is held or asked for goes back."""
        if view.ticket is not None and self._board is not None:
            self._board.drop(view.ticket)
        if view.pins and view.authority is not None and self._board is not None:
            self._board.release(view.authority, [pin.pin_id for pin in view.pins.values()])
        view.ticket = None
        view.pins = {}
        view.authority = None
        view.phase = Phase.IDLE

    def _needed(self, view: RequestView, context: ReqContext, key: bytes, start: int, end: int) -> bool:
        """Whether a key's chunk covers any of the tokens from `start` to `end`."""
        last = context.get_offload_key_position(OffloadKey(key)) or 0
        position, _ = view.place(key, last)
        return last > start and last - view.groups[position].tokens_per_chunk < end

    def _touch(self, view: RequestView, board: Board, computed: int) -> None:
        """Chunks whose blocks the device still had: used, though not loaded."""
        used = [
            view.query(group, keys[: computed // group.tokens_per_chunk])
            for group, keys in zip(view.groups, view.chains, strict=True)
            if group.prefix and computed >= group.tokens_per_chunk
        ]
        board.touch(used)

    # Storing.

    def _restored(self, wires: Iterable[bytes]) -> None:
        for wire in wires:
            if wire in self._removed:
                self._removed.discard(wire)
                self._removals += 1

    def _is_stored(self, wire: bytes) -> bool:
        return wire in self._stored or wire in self._table.storing

    def _fall_short(
        self, view: RequestView, board: Board, left: Sequence[bytes], ends: dict[OffloadKey, int]
    ) -> None:
        board.counters.add("stores_without_grant", len(left))
        for key in left:
            position, index = view.place(key, ends[OffloadKey(key)])
            place = (view.req_id, position)
            self._owed[place] = min(self._owed.get(place, index), index)

    def _spec(self, transfer: Transfer, slots: Sequence[int], store_ids: Sequence[int] = ()) -> SlotSpec:
        return SlotSpec(
            transfer.transfer_id,
            transfer.epoch,
            transfer.authority.session,
            transfer.authority.boot_id,
            transfer.authority.generation,
            tuple(slots),
            tuple(store_ids),
        )

    def _finish(self, transfer: Transfer) -> None:
        board = self._board
        if board is None:
            return
        if transfer.direction == "load":
            board.release(transfer.authority, [pin.pin_id for pin in transfer.pins])
            if not transfer.ok:
                board.counters.add("failed_loads")
                view = self._views.get(transfer.req_id)
                if view is not None:
                    view.failed.update(transfer.keys)
            return
        stores = [grant.store_id for grant in transfer.grants]
        if transfer.ok and not transfer.aborted and transfer.epoch == self.epoch:
            board.commit(transfer.authority, list(map(StoreOf, stores, transfer.chunks)))
            return
        board.counters.add("failed_stores")
        if not transfer.aborted:
            board.abort(transfer.authority, stores)

    def _abandon_stores(self) -> None:
        """Stores on their way will not be committed; ranks that have not reported may still write (I4)."""
        for transfer in self._table.stores():
            if not transfer.aborted and self._board is not None:
                transfer.aborted = True
                self._table.unmark_storing(transfer)
                stores = [grant.store_id for grant in transfer.grants]
                self._board.abort(transfer.authority, stores, sorted(transfer.waiting))

    # News.

    def _absorb_news(self, board: Board) -> None:
        for news in board.take_news():
            if news.kind is NewsKind.STORED:
                for key in news.keys:
                    self._stored.add(key)
                self._restored(news.keys)
                self._events.stored(news.keys)
            elif news.kind is NewsKind.REMOVED:
                self._removals += 1
                for key in news.keys:
                    self._stored.discard(key)
                    self._removed.add(key)
                self._events.removed(news.keys)
            else:
                self._forget_stored()
                if news.kind is NewsKind.STALE:
                    self.epoch = Epoch(self.epoch + 1)
                    self._abandon_stores()

    def _forget_stored(self) -> None:
        self._stored.clear()
        self._removed.clear()
        self._removals += 1
        self._events.all_removed()
