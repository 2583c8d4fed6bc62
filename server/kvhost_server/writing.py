"""Taking slots and publishing chunks: reserve, assign, commit, abort."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvhost_server.attachment import Attachment
from kvhost_server.books import Books, ServiceState
from kvhost_server.checks import ChunkRequest, check_chunk, parent_of
from kvhost_server.errors import Code, Refused
from kvhost_server.fates import Cause
from kvhost_server.ids import NamespaceNumber, SessionNumber, SlotIndex, StoreId
from kvhost_server.namespace import Namespace
from kvhost_server.notices import Recall
from kvhost_server.sessions import Bounds, Grant, Session

_RECALL_EVERY_S = 1.0


class ReserveStatus(IntEnum):
    """Answer for one chunk of a reservation; the values are the wire's."""

    RESERVED = 1
    EXISTS = 2
    BEING_WRITTEN = 3
    NO_SPACE = 4
    BOUND = 5


@dataclass(frozen=True)
class Reservation:
    """Slots granted: for no chunk in particular, then one answer a chunk. Slots are wire slots."""

    grants: list[tuple[StoreId, int]]
    chunks: list[tuple[ReserveStatus, StoreId, int]]
    pending: bool
    reason: str

    def and_then(self, more: "Reservation") -> "Reservation":
        """This one and what was given after it."""
        return Reservation(
            self.grants + more.grants,
            self.chunks + more.chunks,
            self.pending or more.pending,
            more.reason or self.reason,
        )


class Writing:
    """What a session may write, and when it is published (I2, I5)."""

    def __init__(self, books: Books, attachment: Attachment) -> None:
        self._books = books
        self._attachment = attachment
        self._last_store = books.ids_begin

    def reserve(self, session: Session, count: int, chunks: Sequence[ChunkRequest]) -> Reservation:
        """Takes slots to write into: `count` ahead, and one for each chunk that is not stored.

        Answers at once, with fewer when there is no room (E1).

        Raises:
            Refused: no namespace, or the daemon is starting or draining.
        """
        namespace = self._books.namespace_of(session)
        self._attachment.call_begins()
        if self._books.state is not ServiceState.SERVING:
            raise Refused(
                Code.UNAVAILABLE, f"the daemon is {self._books.state.name.lower()}: no slots are granted now"
            )
        self.check(session, chunks)
        if not session.ready:
            ranks = namespace.spec.layout.ranks
            if not namespace.segments:
                self._attachment.grow(namespace)
            answer = (ReserveStatus.NO_SPACE, StoreId(0), 0)
            reason = f"{session.mapped_ranks} of {ranks} ranks have mapped the segments"
            return Reservation([], [answer] * len(chunks), True, reason)
        bounds = self._books.bounds(session)
        reasons: list[str] = []
        answers = [self._reserve_chunk(session, namespace, chunk, bounds, reasons) for chunk in chunks]
        held = self._books.held(session)
        room = max(0, min(count, bounds.unassigned - session.unassigned, bounds.grants - held))
        slots = self._attachment.take_free(session, namespace, room)
        while len(slots) < room and (slot := self._attachment.take(session, namespace)) is not None:
            slots.append(slot)
        if len(slots) < room:
            reasons.append(self._no_space(namespace))
        elif room < count:
            self._books.counters["bound_reached"] += 1
            reasons.append(
                f"the session holds {held + room} slots, {session.unassigned + room} ahead; "
                f"its bounds are {bounds.grants} and {bounds.unassigned}"
            )
        grants = self._grant_ahead(session, namespace, slots)
        self._attachment.grow_ahead(session, namespace, count + len(chunks))
        if reasons:
            session.refused_at, session.refused_why = self._books.clock(), reasons[-1]
            self._recall_others(session, namespace)
        pending = bool(reasons) and (namespace.expecting or not session.all_usable)
        return Reservation(grants, answers, pending, reasons[-1] if reasons else "")

    def check(self, session: Session, chunks: Iterable[ChunkRequest]) -> None:
        """Raises `Refused` for a chunk that the session's namespace cannot have, or without a namespace."""
        namespace = self._books.namespace_of(session)
        for chunk in chunks:
            check_chunk(namespace, chunk)

    def assign(self, session: Session, store: StoreId, chunk: ChunkRequest) -> None:
        """A slot taken ahead is being written with this chunk.

        Raises:
            Refused: not a grant of this session, or one that already has a chunk.
        """
        grant = session.grants.get(store)
        if grant is None or grant.key is not None:
            self._books.anomalies["stale_assign"] += 1
            found = "not granted to this session" if grant is None else "assigned before"
            raise Refused(Code.FAILED_PRECONDITION, f"store {store} is {found}")
        check_chunk(grant.namespace, chunk)
        parent = parent_of(grant.namespace, chunk)
        session.grants[store] = grant._replace(key=chunk.key, parent=parent)
        session.unassigned -= 1
        self._books.writing[grant.namespace.number][chunk.key] += 1

    def commit(self, session: Session, store: StoreId, chunk: ChunkRequest) -> bool:
        """Every rank has written this slot: publish (I2). False when the key was published before.

        Raises:
            Refused: the store id is not this session's, was used before, is of an
                older generation, or was assigned to another chunk (I5, I6, B6).
        """
        grant = session.grants.get(store)
        if grant is None:
            self._books.anomalies["stale_commit"] += 1
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"store {store} is not held by this session: committed, aborted or fenced before, "
                "or not its own",
            )
        namespace = grant.namespace
        check_chunk(namespace, chunk)
        if grant.key not in (None, chunk.key):
            raise Refused(
                Code.INVALID_ARGUMENT, f"store {store} was assigned to another chunk than it is committed for"
            )
        self._books.end_grant(session, store, grant)
        if grant.generation != namespace.generation:
            namespace.table.give_back(grant.slot)
            self._books.anomalies["stale_commit"] += 1
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"store {store} was granted in generation {grant.generation}; "
                f"the namespace is in {namespace.generation}",
            )
        if chunk.key in namespace.table.index:
            namespace.table.give_back(grant.slot)
            self._books.counters["superseded_chunks"] += 1
            return False
        parent = parent_of(namespace, chunk)
        namespace.table.publish(grant.slot, chunk.key, parent, self._books.now(), chunk.checksum)
        namespace.stored(chunk.key, parent)
        namespace.counters["committed_chunks"] += 1
        self._books.counters["committed_chunks"] += 1
        self._books.outbox.events(namespace.number)
        return True

    def abort(self, session: Session, store: StoreId, unquiet_ranks: Sequence[int] = ()) -> None:
        """Gives a slot back unpublished; quarantined while one of these ranks may still write it.

        Raises:
            Refused: not a grant of this session, or a rank that the layout has not.
        """
        refusals: list[Refused] = []
        self.abort_all(session, [(store, unquiet_ranks)], lambda _, refused: refusals.append(refused))
        for refused in refusals:
            raise refused

    def abort_all(
        self,
        session: Session,
        aborts: Iterable[tuple[StoreId, Sequence[int]]],
        on_refused: Callable[[StoreId, Refused], None],
    ) -> None:
        """As `abort` for each store with its unquiet ranks. A worker is asked once for all: one fence
        a store would be more than it can read."""
        unquiet: dict[tuple[NamespaceNumber, frozenset[int]], dict[StoreId, Grant]] = {}
        for store, ranks in aborts:
            try:
                grant = self._end_store(session, store, ranks)
            except Refused as refused:
                on_refused(store, refused)
                continue
            if ranks:
                unquiet.setdefault((grant.namespace.number, frozenset(ranks)), {})[store] = grant
            else:
                grant.namespace.table.give_back(grant.slot)
        for (_, some), grants in unquiet.items():
            namespace = next(iter(grants.values())).namespace
            slots = [grant.slot for grant in grants.values()]
            self._books.quarantine(session, namespace, slots, [], ranks=some, store_ids=list(grants))

    def _end_store(self, session: Session, store: StoreId, unquiet_ranks: Sequence[int]) -> Grant:
        grant = session.grants.get(store)
        if grant is None:
            self._books.anomalies["stale_abort"] += 1
            raise Refused(
                Code.NOT_FOUND, f"store {store} is not held by this session: ended before, or not its own"
            )
        ranks = grant.namespace.spec.layout.ranks
        if any(rank >= ranks for rank in unquiet_ranks):
            # Nobody would be asked, and the slot reused under whoever was meant (I4).
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"rank {max(unquiet_ranks)} was called unquiet; the layout has ranks 0 to {ranks - 1}",
            )
        self._books.end_grant(session, store, grant)
        if grant.key is not None:
            self._books.counters["aborted_stores"] += 1
            self._books.fates.not_stored(grant.namespace.number, grant.key, Cause.ABORTED)
        return grant

    def _reserve_chunk(
        self, session: Session, namespace: Namespace, chunk: ChunkRequest, bounds: Bounds, reasons: list[str]
    ) -> tuple[ReserveStatus, StoreId, int]:
        nothing = StoreId(0)
        if chunk.key in namespace.table.index:
            return ReserveStatus.EXISTS, nothing, 0
        if chunk.key in self._books.writing[namespace.number]:
            return ReserveStatus.BEING_WRITTEN, nothing, 0
        if self._books.held(session) >= bounds.grants:
            self._books.counters["bound_reached"] += 1
            reasons.append(
                f"the session holds {self._books.held(session)} slots; its bound is {bounds.grants}"
            )
            self._books.fates.not_stored(namespace.number, chunk.key, Cause.BOUND)
            return ReserveStatus.BOUND, nothing, 0
        # The chain it continues is in use: evict something else.
        parent = namespace.table.index.get(chunk.parent) if chunk.parent else None
        if parent is not None:
            namespace.table.hold(parent)
        slot = self._attachment.take(session, namespace, parent)
        if parent is not None:
            namespace.table.let_go(parent)
        if slot is None:
            reasons.append(self._no_space(namespace))
            self._books.fates.not_stored(namespace.number, chunk.key, Cause.NO_SPACE)
            return ReserveStatus.NO_SPACE, nothing, 0
        self._last_store += 1
        store = StoreId(self._last_store)
        parent_key = parent_of(namespace, chunk)
        session.grants[store] = Grant(namespace, slot, namespace.generation, chunk.key, parent_key)
        self._books.writing[namespace.number][chunk.key] += 1
        self._books.counters["granted_slots"] += 1
        return ReserveStatus.RESERVED, store, namespace.table.wire(slot)

    def _grant_ahead(
        self, session: Session, namespace: Namespace, slots: Sequence[SlotIndex]
    ) -> list[tuple[StoreId, int]]:
        """Grants for chunks that are not known yet."""
        generation, grants = namespace.generation, session.grants
        stores = [StoreId(self._last_store + 1 + place) for place in range(len(slots))]
        self._last_store += len(slots)
        for store, slot in zip(stores, slots, strict=True):
            grants[store] = Grant(namespace, slot, generation)
        session.unassigned += len(slots)
        self._books.counters["granted_slots"] += len(slots)
        return list(zip(stores, namespace.table.wires(slots), strict=True))

    def _no_space(self, namespace: Namespace) -> str:
        self._books.counters["no_space"] += 1
        slots = namespace.table.slots
        return (
            f"no slot can be had: all {slots} slots of the namespace are held, or hold what the chunk "
            "continues, and no segment is free"
        )

    def _recall_others(self, session: Session, namespace: Namespace) -> None:
        now = self._books.clock()
        for number in namespace.sessions:
            other = self._books.sessions[SessionNumber(number)]
            if other is not session and other.unassigned and now - other.recalled_at >= _RECALL_EVERY_S:
                other.recalled_at = now
                self._books.outbox.notice(other.number, Recall(other.unassigned))
