"""The scheduler half's manager, as native code sees it and as the connector uses it around native.

It answers at once, from what is known here; the daemon is talked to elsewhere. No exception leaves it: one
raised into native would cost the engine its life (contract 19). Hits are `matching`'s, loads and stores
`transferring`'s.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

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

from kvhost_connector import stats
from kvhost_connector.beliefs import Beliefs
from kvhost_connector.board import Board
from kvhost_connector.matching import Matching
from kvhost_connector.metadata import Epoch, TransferReport
from kvhost_connector.requests import Phase, RequestView
from kvhost_connector.transferring import Shortfall, Transferring, refusal

logger = logging.getLogger("vllm.kvhost")

# Native asks for thousands of keys a step.
HIT, MISS = LookupResult.HIT, LookupResult.MISS

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


class HostManager(OffloadingManager):
    """Manager of one engine. Before `attach`, and for good where there is none, everything is a miss."""

    def __init__(self, *, events: bool = False) -> None:
        """`events`: keep what KV events need."""
        super().__init__()
        self.spec: Any = None
        # Set by the scheduler half: exported with what is counted here.
        self.gauges: stats.Gauges = {}
        # Gauges as they were exported last: they keep their values.
        self._told: tuple[bool, stats.Gauges] | None = None
        self._views: dict[str, RequestView] = {}
        self._beliefs = Beliefs(events=events)
        self._board: Board | None = None
        self._matching: Matching | None = None
        self._transferring: Transferring | None = None

    def attach(
        self, board: Board, *, ranks: int, writers: Sequence[int], may_attach: Callable[[], bool]
    ) -> None:
        """From now on the cache may be used. `writers`: ranks that write stores. `may_attach` says whether a
        new engine's first requests should wait for its first connection."""
        self._board = board
        self._matching = Matching(board, self._beliefs, may_attach)
        self._transferring = Transferring(board, self._beliefs, self.view, ranks=ranks, writers=writers)

    @property
    def epoch(self) -> Epoch:
        """Counts the engine's weights."""
        return self._transferring.epoch if self._transferring is not None else Epoch(0)

    # The course of a request; the connector calls these around native's own hooks.

    def begin(self, view: RequestView) -> None:
        """A request arrived: its lookup starts before the scheduler asks (I8)."""
        self._views[view.req_id] = view
        if self._board is not None and self._matching is not None:
            self._board.engine_active()
            self._matching.ask(view)

    def view(self, req_id: str) -> RequestView | None:
        """What is known of a request; None when it never began, or is forgotten."""
        return self._views.get(req_id)

    def grants_at_hand(self) -> int:
        """How many chunks could be stored at once."""
        return len(self._board.stock) if self._board is not None else 0

    def still_waits(self, view: RequestView) -> bool:
        """Whether an answer is on its way, and nothing else is to be done."""
        return self._matching is not None and self._matching.still_waits(view)

    def must_wait(self, view: RequestView, computed: int) -> bool:
        """Whether native must not be asked yet: an answer is on its way. `computed`: tokens on the device."""
        self._absorb_news()
        return self._matching is not None and self._matching.must_wait(view, computed)

    def foresee(self, view: RequestView, computed: int, loading: Collection[bytes]) -> bool:
        """Whether what native would find is being pinned now, so that it need not be asked before that.
        `loading`: keys that native is loading already."""
        return self._matching is not None and self._matching.foresee(view, computed, loading)

    def must_pin(self, view: RequestView, context: ReqContext, computed: int, found: int) -> bool:
        """Native found `found` tokens behind `computed`: whether they must still be pinned before it may say
        so (I3)."""
        if self._matching is None:
            return found > 0
        return self._matching.must_pin(view, context, computed, found)

    def allocated(self, view: RequestView) -> None:
        """Blocks were allocated, and `prepare_load` took what is loaded: the rest goes back (B1)."""
        self.end(view)
        view.found.clear()

    def end(self, view: RequestView) -> None:
        """The request finished or was aborted. A load in flight keeps its pins until all ranks reported."""
        if self._matching is not None:
            self._matching.let_go(view)

    def forget(self, req_id: str) -> None:
        """Native asks for this request no more."""
        view = self._views.pop(req_id, None)
        if view is not None:
            self.end(view)

    # Steps.

    def reported(self, reports: Iterable[TransferReport]) -> None:
        """What ranks said about transfers: the only ground for a commit (I2)."""
        if self._transferring is not None:
            self._transferring.reported(reports)

    def take_shortfalls(self, *, windowed: bool) -> list[Shortfall]:
        """What native should offer again, of windowed (and state) groups or of the others."""
        return self._transferring.take_shortfalls(windowed=windowed) if self._transferring is not None else []

    def drop_shortfalls(self) -> None:
        """What was not offered again in time is not stored."""
        if self._transferring is not None:
            self._transferring.drop_shortfalls()

    def delivered(self) -> None:
        """The step's jobs are on their way to the workers."""
        if self._transferring is not None:
            self._transferring.delivered()

    def drop_undelivered(self, req_id: str | None = None) -> None:
        """The step's jobs (of one request) will never reach a worker."""
        if self._transferring is not None:
            self._transferring.drop_undelivered(req_id)

    def flush(self, *, urgent: bool = False) -> None:
        """The step is over: its changes go as one message. `urgent`: before that, only what cannot wait."""
        if self._board is not None:
            self._board.engine_active()
            self._board.flush(urgent=urgent)

    def reset(self, weights_version: str) -> None:
        """The weights changed: nothing from before takes effect any more (I12). At once, whatever the daemon
        does."""
        for view in self._views.values():
            self.end(view)
            view.found.clear()
            view.failed.clear()
        if self._transferring is not None:
            self._transferring.new_epoch()
        self._beliefs.forget()
        if self._board is not None:
            self._board.reset(weights_version)

    def open_transfers(self) -> int:
        """Loads and stores that some rank has still to report."""
        return self._transferring.open if self._transferring is not None else 0

    def _absorb_news(self) -> None:
        if self._board is None or self._transferring is None:
            return
        news = self._board.take_news()
        if news and self._beliefs.absorb(news):
            self._transferring.new_epoch()

    # What native asks.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Local knowledge only: native asks for thousands of keys a step."""
        view = self._views.get(req_context.req_id)
        if view is not None and view.phase is Phase.PINNED:
            return HIT if key in view.pins and key not in view.failed else MISS
        hit = view is not None and self._matching is not None and self._matching.is_hit(view, key)
        return HIT if hit else MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    @_never_raises(lambda: refusal("the load could not be prepared"))
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        view = self._views.get(req_context.req_id)
        if view is None or self._transferring is None:
            return refusal("nothing is known of its request")
        return self._transferring.load(view, keys)

    @_never_raises(lambda: PrepareStoreOutput([], refusal("the store could not be prepared"), []))
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Never None: native would log a warning in every step."""
        self._absorb_news()
        view = self._views.get(req_context.req_id)
        if view is None or self._transferring is None:
            return PrepareStoreOutput([], refusal("nothing is stored"), [])
        return self._transferring.store(view, keys, req_context)

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
        self._absorb_news()
        return self._beliefs.take_events()

    def has_pending_work(self) -> bool:
        """Never: the agent's thread works without steps, and native would spin (contract 18)."""
        return False

    def reset_cache(self) -> None:
        """Nothing: the connector resets by `reset`, also where native must not be asked (contract 22)."""

    @_never_raises(lambda: None)
    def get_stats(self) -> Any:
        if self._board is None:
            return None
        told = self._board.usable, self.gauges
        if told == self._told and not self._board.counters.any:
            return None
        self._told = told
        return stats.collect(self._board.counters, *told)
