"""Which segments each engine has mapped, and how a namespace grows: sessions, workers and loans together."""

from kvhost_server.books import Books
from kvhost_server.custody import Mapping
from kvhost_server.fates import Cause
from kvhost_server.ids import SessionNumber, SlotIndex
from kvhost_server.lending import Loan
from kvhost_server.namespace import Namespace
from kvhost_server.notices import Mapped
from kvhost_server.sessions import Session


class Attachment:
    """Pairs workers with sessions, offers them segments, and finds slots that all ranks have mapped."""

    def __init__(self, books: Books) -> None:
        self._books = books
        books.when_let_go = self.grow_the_empty
        # A namespace that could not grow a moment ago, in the same call: looking again costs as much as there
        # are segments, and a call may take thousands of slots.
        self._full: Namespace | None = None

    def pair(self, mapping: Mapping, session: Session) -> None:
        mapping.session = session.number
        session.mapping_of_rank[mapping.rank] = mapping.id
        if session.namespace is not None:
            self.offer_all(mapping, session.namespace)

    def offer_all(self, mapping: Mapping, namespace: Namespace) -> None:
        """The worker gets every segment of this namespace and keeps none of another."""
        others = [s for s in mapping.segments if s not in namespace.row_of_segment]
        if others:
            for segment in others:
                del mapping.segments[segment]
                mapping.retiring.add(segment)
            self._books.outbox.retire(mapping.id, others)
        self._offer(mapping, self._books.lending.loans_of(namespace))

    def _offer(self, mapping: Mapping, loans: list[Loan]) -> None:
        fresh = [loan for loan in loans if loan.segment_id not in mapping.segments]
        for loan in fresh:
            mapping.segments[loan.segment_id] = False
            loan.holders.add(mapping.id)
        if fresh and mapping.connected:
            self._books.outbox.offer(mapping.id, [self._books.lending.assignment(loan) for loan in fresh])

    def left(self, mapping: Mapping) -> None:
        session = self._books.sessions.get(mapping.session) if mapping.session is not None else None
        if session is not None and session.mapping_of_rank.get(mapping.rank) == mapping.id:
            del session.mapping_of_rank[mapping.rank]
            self.refresh(session)

    def refresh_session_of(self, mapping: Mapping) -> None:
        session = self._books.sessions.get(mapping.session) if mapping.session is not None else None
        if session is not None:
            self.refresh(session)

    def refresh_sessions_of(self, namespace: Namespace) -> None:
        """After segments came or went."""
        for number in namespace.sessions:
            self.refresh(self._books.sessions[SessionNumber(number)])

    def refresh(self, session: Session) -> None:
        """Which rows every rank has mapped; tells the session when its readiness changed."""
        namespace = session.namespace
        if namespace is None:
            return
        ranks = namespace.spec.layout.ranks
        workers = [self._books.custody.mappings[m] for m in session.mapping_of_rank.values()]
        rows = {
            row
            for segment, row in namespace.row_of_segment.items()
            if len(workers) == ranks and all(w.segments.get(segment) for w in workers)
        }
        session.usable_rows = rows
        session.all_usable = len(rows) == namespace.segments
        mapped = sum(any(w.segments.values()) for w in workers)
        # Ready once everything there was is mapped; later segments join one by one.
        ready = bool(rows) and (session.ready or session.all_usable)
        if (mapped, ready) != (session.mapped_ranks, session.ready):
            session.mapped_ranks, session.ready = mapped, ready
            self._books.outbox.notice(session.number, Mapped(mapped, ranks, ready))

    # Room.

    def segment_free(self, pool_index: int) -> None:
        loan = self._books.lending.ready(pool_index)
        if loan is not None:
            self._offer_to_sessions(loan)
            return
        self.grow_the_empty(at_most=1)

    def grow_the_empty(self, at_most: int | None = None) -> None:
        """Engines that came before there was room: without a segment to map they would ask for nothing."""
        empty = [n for n in self._books.namespaces.values() if n.sessions and not n.segments]
        for namespace in empty[:at_most]:
            self.grow(namespace)

    def resize(self, asked_bytes: int) -> None:
        """Another size for the pool. What is too much and held goes later, with `settle`."""
        self._books.lending.resize(asked_bytes)
        self.settle()

    def settle(self) -> None:
        """Gives back what is above the pool's budget."""
        with self._books.fates.because(Cause.LIMIT):
            retired = self._books.lending.settle()
        if retired:
            self._retired(retired)

    def take_free(self, session: Session, namespace: Namespace, most: int) -> list[SlotIndex]:
        """Free slots that this session may write, at most so many; the rest is for `take` to find."""
        return namespace.table.take_free(session.usable_rows, most)

    def take(self, session: Session, namespace: Namespace, tail: SlotIndex | None = None) -> SlotIndex | None:
        """A slot that this session may write, or None. `tail` holds the chunk that the new one continues."""
        table = namespace.table
        wants = not table.has_free(session.usable_rows) and session.all_usable
        if wants and self._full is not namespace and not self.grow(namespace):
            self._full = namespace
        if not session.all_usable and self._grows_free(session, namespace):
            return None  # a free segment is being mapped: better than evicting
        slot = table.take(session.usable_rows, tail)
        self._books.tell_evictions(namespace)
        return slot

    def call_begins(self) -> None:
        """Another call: what was full may have room."""
        self._full = None

    def grow(self, namespace: Namespace) -> bool:
        """One more segment for the namespace: a free one, else somebody's oldest, later. False: none."""
        loan = self._books.lending.lend(namespace)
        if loan is not None:
            self._offer_to_sessions(loan)
        elif self._steal_for(namespace):
            self._retired(1)
        else:
            return False
        return True

    def _retired(self, segments: int) -> None:
        self._books.counters["segments_retired"] += segments
        for namespace in self._books.namespaces.values():
            self._books.tell_evictions(namespace)
            self.refresh_sessions_of(namespace)

    def _steal_for(self, namespace: Namespace) -> bool:
        with self._books.fates.because(Cause.SEGMENT, namespace.number):
            return self._books.lending.steal_for(namespace)

    def grow_ahead(self, session: Session, namespace: Namespace, wanted: int) -> None:
        """Takes a free segment before the last slots are gone, so that nobody waits for its mapping."""
        if session.all_usable and self._books.lending.lendable(namespace):
            spare = namespace.table.free_slots(session.usable_rows)
            if spare < max(2 * wanted, namespace.slots_per_segment // 4):
                self.grow(namespace)

    def _offer_to_sessions(self, loan: Loan) -> None:
        for number in loan.namespace.sessions:
            session = self._books.sessions[SessionNumber(number)]
            for mapping_id in session.mapping_of_rank.values():
                self._offer(self._books.custody.mappings[mapping_id], [loan])
            self.refresh(session)

    def _grows_free(self, session: Session, namespace: Namespace) -> bool:
        """No usable slot is free, but one in a row that this engine is still mapping is."""
        has_free = namespace.table.has_free
        others = set(namespace.row_of_segment.values()) - session.usable_rows
        return not has_free(session.usable_rows) and has_free(others)
