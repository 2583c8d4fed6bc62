"""Where the engine's thread leaves orders for kvhostd and reads what came of them, without ever waiting.

Three threads meet here: the engine's, the agent's (it talks to the daemon, see `agent`), and the link's (it
opens sessions and hears notices). A daemon that does not answer costs the engine nothing: `usable` turns
false, and what a late answer brings is given back (I8).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvhost_client.types import (
    Abort,
    ChainQuery,
    Declared,
    Grant,
    ServiceState,
    StoreOf,
)
from kvhost_connector.holds import NOBODY, Authority, Owner
from kvhost_connector.orders import Answered, Changes, Counters, News, NewsKind, Round, Ticket, TicketState
from kvhost_connector.session import Session
from kvhost_connector.supply import Supply
from kvhost_proto.v1 import cache_pb2

logger = logging.getLogger("vllm.kvhost")

# Between two questions to a daemon that did not answer the last one.
SILENT_PAUSE_S = 0.25


class Board:
    """The orders, what came of them, and what is known of the connection."""

    def __init__(
        self,
        *,
        deadline_s: float,
        stock_target: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline_s`: how long a request may wait for an answer. `stock_target`: slots to hold granted
        ahead; the daemon gives fewer where the pool is small (I5)."""
        self._deadline_s = deadline_s
        self._clock = clock
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._closing = False
        self._working = False
        # The connection.
        self._session: Session | None = None
        self._authority: Authority | None = None
        self._serial = 0
        self._mapped = False
        self._state = ServiceState.UNSPECIFIED
        self._calling_since: float | None = None
        self._silent = False
        self._probe_after = 0.0
        self.ever_mapped = False
        # Chunks that the namespace has room for.
        self.room = 0
        # Orders.
        self._rebase: str | None = None
        self._declare = False
        self._flush = False
        self._changes = Changes(NOBODY)
        self._lookups: list[Ticket] = []
        self._pins: list[Ticket] = []
        self.stock = Supply(stock_target, clock)
        # What came of it.
        self._news: deque[News] = deque()
        self.counters = Counters()

    # For the engine's thread: what is known.

    @property
    def authority(self) -> Authority | None:
        """Under which grants and pins can be used now; None while there is no usable session."""
        return self._authority if self._mapped and os.getpid() == self._pid else None

    @property
    def has_session(self) -> bool:
        """A session is open, usable or not."""
        return self._session is not None

    @property
    def connected(self) -> bool:
        """A session is open, and its daemon serves or is about to."""
        return self._session is not None and self._state is not ServiceState.STARTING

    @property
    def usable(self) -> bool:
        """Whether a question asked now can be expected to be answered in time."""
        return self.authority is not None and not self.silent

    @property
    def silent(self) -> bool:
        """The daemon owes an answer for longer than anybody waits: it is stopped, or very slow."""
        since = self._calling_since
        return self._silent or (since is not None and self._clock() - since > self._deadline_s)

    @property
    def idle(self) -> bool:
        """Nothing waits to be sent, and no answer is awaited."""
        with self._wake:
            return not (self._working or self._changes or self._lookups or self._pins)

    @property
    def grants_to_come(self) -> bool:
        """Whether a store that found no grant may find one soon."""
        return self.stock.has_hope and self.usable and self._state is ServiceState.SERVING

    def overdue(self, ticket: Ticket) -> bool:
        """Whether a request has waited for this answer for as long as it may."""
        return self._clock() - ticket.asked_at > self._deadline_s

    def take_news(self) -> list[News]:
        """What is new about stored keys since the last call, in order."""
        news: list[News] = []
        while self._news:
            news.append(self._news.popleft())
        return news

    # For the engine's thread: orders.

    def engine_active(self) -> None:
        """The engine works: grants are worth holding."""
        self.stock.engine_active()

    def ask(
        self, chains: Sequence[ChainQuery], *, pin: bool, hold: bool = False, request: str = ""
    ) -> Ticket | None:
        """Asks which of these keys are there, and holds them with `pin`. None when nobody would answer.

        `hold`: a lookup, and a pin of what it finds. `request` is vLLM's id of the request, by which people
        ask the daemon why it missed.
        """
        with self._wake:
            authority = self.authority
            if authority is None or self.silent or self._closing:
                return None
            ticket = Ticket(tuple(chains), pin, authority.serial, self._clock(), hold=hold, request=request)
            (self._pins if pin else self._lookups).append(ticket)
            self.stock.engine_active()
            self._wake.notify_all()
        self.counters.add("lookups")
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more; what it holds, or will bring, goes back."""
        with self._wake:
            if ticket.state is TicketState.ANSWERED and ticket.authority is not None:
                self._changes_of(ticket.authority).releases.extend(pin.pin_id for pin in ticket.pins.values())
            ticket.pins = {}
            ticket.state = TicketState.DROPPED

    def assign(self, authority: Authority, stores: Sequence[StoreOf]) -> None:
        """These grants have chunks now."""
        with self._wake:
            self._changes_of(authority).assigns.extend(stores)

    def commit(self, authority: Authority, stores: Sequence[StoreOf]) -> None:
        """These chunks are written by every rank (I2)."""
        with self._wake:
            self._changes_of(authority).commits.extend(stores)

    def abort(self, authority: Authority, stores: Iterable[int], unquiet_ranks: Sequence[int] = ()) -> None:
        """These stores do not happen; `unquiet_ranks` may still write them (I4)."""
        aborts = [Abort(store, tuple(unquiet_ranks)) for store in stores]
        ended = {abort.store_id for abort in aborts}
        with self._wake:
            changes = self._changes_of(authority)
            changes.aborts.extend(aborts)
            # In one message aborts count before assigns: one that waits would name a store that is over.
            changes.assigns = [store for store in changes.assigns if store.store_id not in ended]

    def release(self, authority: Authority, pins: Iterable[int]) -> None:
        """These pins are not needed any more."""
        with self._wake:
            self._changes_of(authority).releases.extend(pins)

    def touch(self, chains: Iterable[ChainQuery]) -> None:
        """These chunks were used without a load."""
        with self._wake:
            if self._authority is not None:
                self._changes_of(self._authority).touches.extend(chains)

    def flush(self, *, urgent: bool = False) -> None:
        """The step's changes are complete: send them as one batch. `urgent`: unless they can wait for the
        step's second half, when copies have been reported."""
        if not (self._changes.urgent if urgent else self._changes) and not self._missing():
            # Without the lock: orders come from the caller's own thread, the agent flushes its own.
            return
        with self._wake:
            self._flush = self._flush or bool(self._changes)
            if self._flush or self._missing():
                self._wake.notify_all()

    def declare_again(self) -> None:
        """A worker attaches anew: name its token."""
        with self._wake:
            self._declare = True
            self._wake.notify_all()

    def reset(self, weights_version: str) -> None:
        """The engine's weights changed: leave the namespace for another one, now or as soon as a daemon is
        there (I12). Until then nothing hits and nothing is granted."""
        with self._wake:
            self._rebase = weights_version
            self._fail_tickets()
            self._renew(None)
            self._wake.notify_all()

    def close(self) -> None:
        """No more orders: the agent sends what waits, gives grants back, and ends."""
        with self._wake:
            self._closing = True
            self.stock.close()
            self._wake.notify_all()

    # For the link's thread.

    def up(self, session: Session, declared: Declared, rebase: str | None = None) -> None:
        """A session is open and its namespace declared. `rebase`: with weights that have changed meanwhile
        to these, so that nothing may be looked up or stored before it is in the right namespace."""
        with self._wake:
            self._session = session
            self._state = session.state
            self.room = declared.slots
            self._rebase = rebase
            self._changes = Changes(_owner(session))
            self._silent = False
            self._fail_tickets()
            self._renew(session if rebase is None else None)
            self.counters.add("attached")
            self._wake.notify_all()
        logger.info(
            "kvhost: session %d with kvhostd %016x, namespace %d, room for %d chunks",
            session.number,
            session.boot_id,
            declared.namespace_number,
            declared.slots,
        )

    def down(self, why: str) -> None:
        """The session is over, and with it everything granted and pinned."""
        with self._wake:
            known = self._session is not None and not self._closing
            self._session = None
            self._mapped = self._silent = False
            self._state = ServiceState.UNSPECIFIED
            self._fail_tickets()
            self._renew(None)
            self._changes = Changes(NOBODY)
            self._flush = False
        if known:
            logger.warning("kvhost: session ended: %s; the engine computes without the cache meanwhile", why)

    def notice(self, notice: cache_pb2.Notice) -> None:
        """Something the daemon says of itself."""
        kind = notice.WhichOneof("kind")
        with self._wake:
            if kind == "mapped":
                self._mapped = notice.mapped.ready
                self.ever_mapped = self.ever_mapped or self._mapped
            elif kind == "state":
                self._state = ServiceState(notice.state.state)
            elif kind == "recall":
                self.stock.recall(notice.recall.grants)
            elif kind == "removed" and notice.removed.key_bytes:
                size, keys = notice.removed.key_bytes, notice.removed.keys
                cut = tuple(keys[at : at + size] for at in range(0, len(keys), size))
                self._news.append(News(NewsKind.REMOVED, cut))
            elif kind == "resync":
                self._news.append(News(NewsKind.FORGET))
            if kind != "removed":
                # Room may have become free, or the workers are ready.
                self.stock.freed()
                self._wake.notify_all()

    # For the agent's thread.

    def next_round(self) -> Round | None:
        """Waits for work; None when the board is closed and everything was handed out."""
        with self._wake:
            self._working = False
            while True:
                work = self._collect() if self._session is not None else None
                if work is not None:
                    self._working = True
                    return work
                if self._closing:
                    return None
                self._wake.wait(self._pause())

    def call_begins(self) -> None:
        self._calling_since = self._clock()

    def call_ends(self, *, answered: bool) -> None:
        """`answered`: the daemon is there, whatever it said."""
        self._calling_since = None
        self._silent = not answered
        self._probe_after = self._clock() + SILENT_PAUSE_S

    def stored(self, keys: Sequence[bytes]) -> None:
        """These chunks are published."""
        if keys:
            self._news.append(News(NewsKind.STORED, tuple(keys)))

    def freed(self) -> None:
        """Grants of ours were used or ended: there is room below our own bounds."""
        self.stock.freed()

    def answered(self, tickets: Iterable[Answered], session: Session) -> None:
        """Answers to questions: what is found, and what is held."""
        with self._wake:
            for ticket, found, pins in tickets:
                current = self._authority is not None and self._authority.serial == ticket.serial
                if ticket.state is TicketState.WAITING and current:
                    ticket.found, ticket.pins, ticket.authority = found, pins, self._authority
                    ticket.state = TicketState.ANSWERED
                    continue
                # Too late, or for other weights: what it holds goes back (I8).
                if ticket.state is TicketState.WAITING:
                    ticket.state = TicketState.FAILED
                if pins and _owner(session) == self._changes.owner:
                    self._changes.releases.extend(pin.pin_id for pin in pins.values())
                    self._flush = True
                    self.counters.add("late_pins_given_back", len(pins))

    def granted(self, work: Round, grants: Sequence[Grant], *, pending: bool) -> None:
        """Slots to write into; fewer than asked for with `pending` means that more are on their way."""
        with self._wake:
            if not self.stock.put(work.serial, grants) and _owner(work.session) == self._changes.owner:
                self._changes.aborts.extend(Abort(grant.store_id) for grant in grants)
                self._flush = True
                self.counters.add("grants_given_back", len(grants))
            if len(grants) < work.reserve:
                self.stock.fell_short(len(grants), pending=pending)

    def rebased(self, work: Round) -> None:
        """The session is in its new namespace."""
        with self._wake:
            # A further reset, or the end of the session, may have come while this one was under way.
            if self._serial == work.serial and self._session is work.session:
                self._renew(work.session)

    def note_generation(self, session: Session) -> None:
        """The namespace's content became invalid (an operator, or an anomaly): so did all that we hold."""
        with self._wake:
            authority = self._authority
            if authority is None or self._session is not session:
                return
            if session.generation != authority.generation:
                self._renew(session)
                self._news.append(News(NewsKind.STALE))

    def unsent(self, work: Round) -> None:
        """The changes of this round never left: they go with the next."""
        with self._wake:
            if _owner(work.session) == self._changes.owner:
                self._changes = work.changes.followed_by(self._changes)
                self._flush = True

    def put_off(self, work: Round, *, unheard: bool) -> None:
        """The round broke off before its orders: they go with the next. A declaration only if it was
        `unheard`; one that was refused would be refused again."""
        with self._wake:
            if self._session is not work.session:
                return
            self._declare = self._declare or (work.declare and unheard)
            # A later reset stands on the board itself.
            if self._rebase is None and self._serial == work.serial:
                self._rebase = work.rebase

    def failed(self, work: Round) -> None:
        """The round broke off: answers that are not there will not come."""
        with self._wake:
            for ticket in (*work.lookups, *work.pins):
                if ticket.state is TicketState.WAITING:
                    ticket.state = TicketState.FAILED
            self.stock.failed()

    # Shared; the caller holds the lock.

    def _changes_of(self, authority: Authority) -> Changes:
        """Where changes under this authority go: nowhere when its session is over."""
        return self._changes if authority.owner == self._changes.owner else Changes(NOBODY)

    def _renew(self, session: Session | None) -> None:
        """Another authority, or none: nothing is known to be stored, and grants of the old one go back."""
        self._serial += 1
        for grant in self.stock.renew(self._serial):
            self._changes.aborts.append(Abort(grant.store_id))
            self._flush = True
        self._authority = (
            Authority(self._serial, session.number, session.boot_id, session.generation)
            if session is not None
            else None
        )
        self._news.append(News(NewsKind.FORGET))

    def _fail_tickets(self) -> None:
        for ticket in (*self._lookups, *self._pins):
            if ticket.state is TicketState.WAITING:
                ticket.state = TicketState.FAILED
        self._lookups, self._pins = [], []

    def _missing(self) -> int:
        """How many slots to ask for now."""
        serves = self.usable and self._state is ServiceState.SERVING
        return self.stock.missing() if serves else 0

    def _pause(self) -> float | None:
        """Seconds until there is something to do without an order; None: nothing."""
        if self._session is None:
            return None
        due = [self._probe_after] if self._silent else self.stock.due()
        return max(0.001, min(due) - self._clock()) if due else None

    def _collect(self) -> Round | None:
        assert self._session is not None
        if self._silent:
            if self._clock() < self._probe_after or self._closing:
                return None
            return Round(self._session, self._serial, Changes(NOBODY), False, None, [], [], 0, probe=True)
        self._give_grants_back()
        reserve = self._missing()
        send = self._changes and (self._flush or self._closing)
        ordered = self._declare or self._rebase is not None
        if not (send or ordered or self._lookups or self._pins or reserve):
            return None
        work = Round(
            self._session,
            self._serial,
            self._changes,
            self._declare,
            self._rebase,
            self._lookups,
            self._pins,
            reserve,
        )
        self._changes = Changes(self._changes.owner)
        self._declare, self._rebase, self._flush = False, None, False
        self._lookups, self._pins = [], []
        return work

    def _give_grants_back(self) -> None:
        grants = self.stock.surplus()
        if grants:
            self._changes.aborts.extend(Abort(grant.store_id) for grant in grants)
            self._flush = True
            self.counters.add("grants_given_back", len(grants))


def _owner(session: Session) -> Owner:
    return Owner(session.boot_id, session.number)
