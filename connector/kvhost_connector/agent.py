"""The one thread of the scheduler half that talks to kvhostd.

It takes what is on the board, in at most one call of each kind a round, and writes back what came of it. It
may be stopped by a daemon that does not answer; nobody waits for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvhost_client.errors import BreakerOpen, DeadlineExceeded, KVHostError, NotServing, Unavailable
from kvhost_client.types import Answer, ChainQuery, Found, ItemKind, Query, Reserved, Updated
from kvhost_connector.board import Board
from kvhost_connector.holds import PinnedSlot
from kvhost_connector.orders import Answered, Changes, Round, Ticket, TicketState
from kvhost_connector.session import Session
from kvhost_connector.tracing import spans

logger = logging.getLogger("vllm.kvhost")

CALL_DEADLINE_S = 5.0
"""For one call. Requests wait much shorter: from their deadline on the daemon counts as silent."""

# The same complaint is logged once in so many seconds.
_LOG_EVERY_S = 30.0


class Asked(NamedTuple):
    """What is asked for a ticket, since when, and what is known of its keys already."""

    ticket: Ticket
    since: float
    chains: Sequence[ChainQuery]
    found: Mapping[bytes, int] = {}


class Agent:
    """Works for one board."""

    def __init__(
        self, board: Board, declaration: Callable[[], tuple[Any, Mapping[int, bytes]] | None]
    ) -> None:
        """`declaration`: the namespace and each rank's token, as they are now."""
        self._board = board
        self._declaration = declaration
        self._pid = os.getpid()
        self._logged: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="kvhost-agent", daemon=True)

    def start(self) -> None:
        """Call it in the process that schedules, where no fork follows."""
        self._thread.start()

    def close(self, timeout: float = 2.0) -> None:
        """Sends what waits, within `timeout` seconds, and ends the thread."""
        self._board.close()
        if os.getpid() == self._pid and self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while (work := self._board.next_round()) is not None:
            try:
                self._work(work)
            except Exception as error:
                self._failed(work, error)

    def _work(self, work: Round) -> None:
        if work.probe:
            self._call(work.session.ping)
            return
        try:
            if work.changes:
                self._update(work)
            if work.declare:
                self._declare(work)
        except KVHostError as error:
            # A reset that waits behind them must not be forgotten: without it nothing is usable again (I12).
            self._board.put_off(work, unheard=isinstance(error, DeadlineExceeded | BreakerOpen))
            raise
        if work.rebase is not None:
            self._leave_namespace(work, work.rebase)
        # A request whose lookup is answered may be computed, and want to be stored, a moment later.
        if work.reserve:
            self._reserve(work)
        lookups = [Asked(ticket, ticket.asked_at, ticket.chains) for ticket in work.lookups]
        pins = [Asked(ticket, ticket.asked_at, ticket.chains) for ticket in work.pins]
        pins += self._look_up(work.session, lookups, pin=False)
        self._look_up(work.session, pins, pin=True)
        self._board.note_generation(work.session)

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """One call. What it raises says whether the daemon is there."""
        self._board.call_begins()
        answered = False
        try:
            result = function(*arguments, deadline_s=CALL_DEADLINE_S, **named)
            answered = True
            return result
        except KVHostError as error:
            # A refusal is an answer. An absent daemon ends the session, which is another matter than silence.
            answered = not isinstance(error, DeadlineExceeded | BreakerOpen)
            raise
        finally:
            self._board.call_ends(answered=answered)

    def _update(self, work: Round) -> None:
        """Sends a step's changes. No change may be lost: a pin that is not released is held for ever."""
        changes = work.changes

        def late(result: Updated) -> None:
            self._updated(changes, result)

        try:
            with spans.committing(changes):
                result: Updated = self._call(
                    work.session.update,
                    assigns=changes.assigns,
                    commits=changes.commits,
                    aborts=changes.aborts,
                    releases=changes.releases,
                    touches=changes.touches,
                    on_late=late,
                )
        except BreakerOpen:
            self._board.unsent(work)
            raise
        except DeadlineExceeded:
            # On its way: it takes effect when the daemon goes on.
            raise
        except BaseException:
            # Nobody knows what became of them. The end of the session settles it: its grants and pins are
            # gone, what may still be written is fenced (I7), and the link opens another one.
            work.session.close()
            raise
        self._updated(changes, result)

    def _updated(self, changes: Changes, result: Updated) -> None:
        refused = {error.id for error in result.errors if error.kind == ItemKind.COMMIT}
        # A commit that somebody else had published before is as good: the chunk is there.
        self._board.stored([store.chunk.key for store in changes.commits if store.store_id not in refused])
        if changes.assigns or changes.commits or changes.aborts:
            self._board.freed()
        if result.errors:
            self._board.counters.add("refused_updates", len(result.errors))
            self._complain(
                f"kvhostd refused {len(result.errors)} changes, the first: {result.errors[0].message}"
            )

    def _reserve(self, work: Round) -> None:
        try:
            with spans.reserving(work.reserve) as facts:
                result: Reserved = self._call(work.session.reserve, work.reserve)
                facts["kvhost.granted"] = len(result.grants)
        except NotServing:
            self._board.granted(work, [], pending=False)
            return
        self._board.granted(work, result.grants, pending=result.pending)

    def _declare(self, work: Round) -> None:
        declaration = self._declaration()
        if declaration is None:
            return
        self._call(work.session.declare, *declaration)

    def _leave_namespace(self, work: Round, weights_version: str) -> None:
        try:
            self._call(work.session.reset, weights_version)
        except BaseException:
            # The old namespace must not be used any more, in no case (I12).
            work.session.close()
            raise
        self._board.rebased(work)

    def _look_up(self, session: Session, asked: list[Asked], *, pin: bool) -> list[Asked]:
        """Answers these tickets, but for those whose hits are to be held first: returns what to pin for
        them."""
        asked = [one for one in asked if one.ticket.state is TicketState.WAITING]
        if not asked:
            return []
        queries = [Query(number, one.chains, one.ticket.request) for number, one in enumerate(asked)]
        answers: list[Answer] = self._call(session.lookup, queries, pin=pin)
        now = time.monotonic()
        done: list[Answered] = []
        to_hold: list[Asked] = []
        for one, answer in zip(asked, answers, strict=True):
            if spans.on:
                keys = sum(len(chain.keys) for chain in one.chains)
                hits = sum(chain.hits for chain in answer.chains)
                spans.looked_up(one.ticket.request, keys, hits, one.since, pin=pin)
            found, pins = _read(one.chains, answer, pin)
            if one.ticket.hold and not pin and Found.HIT in found.values():
                to_hold.append(Asked(one.ticket, now, [_hits(chain, found) for chain in one.chains], found))
            else:
                done.append((one.ticket, {**one.found, **found}, pins))
        self._board.answered(done, session)
        return to_hold

    def _failed(self, work: Round, error: Exception) -> None:
        """The answers of this round will not come: the engine computes instead."""
        self._board.counters.add("failed_calls")
        self._board.failed(work)
        if isinstance(error, KVHostError):
            self._complain(str(error), quiet=isinstance(error, Unavailable | DeadlineExceeded))
        else:
            logger.error("kvhost: talking to kvhostd failed", exc_info=error)

    def _complain(self, what: str, *, quiet: bool = False) -> None:
        """Logs a complaint, the same one at most every half minute (E1)."""
        now = time.monotonic()
        if now - self._logged.get(what, float("-inf")) > _LOG_EVERY_S:
            if len(self._logged) > 100:
                self._logged.clear()
            self._logged[what] = now
            logger.log(logging.INFO if quiet else logging.WARNING, "kvhost: %s", what)


def _hits(chain: ChainQuery, found: Mapping[bytes, int]) -> ChainQuery:
    """A question for those keys of a chain that were found."""
    hits = [key for key in chain.keys if found.get(key) == Found.HIT]
    return ChainQuery(chain.group, chain.semantics, hits)


def _read(
    chains: Sequence[ChainQuery], answer: Answer, pin: bool
) -> tuple[dict[bytes, int], dict[bytes, PinnedSlot]]:
    """What was found and, with `pin`, what is held, by key."""
    found: dict[bytes, int] = {}
    pins: dict[bytes, PinnedSlot] = {}
    for chain, result in zip(chains, answer.chains, strict=True):
        # With prefix semantics the answer ends at the first miss.
        found.update(zip(chain.keys, result.found, strict=False))
        if pin:
            hits = [key for key, at in zip(chain.keys, result.found, strict=False) if at == Found.HIT]
            pins.update(zip(hits, map(PinnedSlot, result.pin_ids, result.slots), strict=True))
    return found, pins
