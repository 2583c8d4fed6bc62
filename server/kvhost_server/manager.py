"""The manager: decides who may read and write what. No I/O, no clock of its own, no locks.

Every call runs to its end on the one event loop. What must happen elsewhere is
ordered through the Outbox; long work is left as chores that the shell runs in
slices. Slots live in slots.py, segments in lending.py, workers and quarantine
in custody.py; this room connects them to sessions and enforces the bounds.
"""

import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from kvhost_server.custody import Access, Custody, Mapping, Quarantine
from kvhost_server.errors import Code, Refused
from kvhost_server.ids import (
    ChunkKey,
    MappingId,
    NamespaceNumber,
    PinId,
    SegmentId,
    SessionNumber,
    SlotIndex,
    StoreId,
)
from kvhost_server.lending import Lending, Loan
from kvhost_server.namespace import Namespace, NamespaceSpec, Semantics
from kvhost_server.notices import Ended, Fenced, KeyEvent, Mapped, Outbox, Recall, Resync
from kvhost_server.sessions import Bounds, Grant, PeerIdentity, Session
from kvhost_server.slots import SlotState

MAX_KEYS_PER_CALL = 16384
MAX_SESSIONS = 1024
_RECALL_EVERY_S = 1.0
_MICROSECONDS = 1_000_000

COUNTERS = (
    "sessions_opened",
    "lookup_chunks",
    "hit_chunks",
    "pinned_chunks",
    "granted_slots",
    "committed_chunks",
    "superseded_chunks",
    "aborted_stores",
    "evicted_chunks",
    "no_space",
    "bound_reached",
    "segments_retired",
)
ANOMALIES = (
    "stale_commit",
    "stale_assign",
    "stale_abort",
    "double_release",
    "foreign_segment",
    "false_fence",
    "hole_detected",
    "session_replaced",
    "quarantined_slots",
)


class ServiceState(IntEnum):
    """What the daemon can do now; the values are the wire's."""

    STARTING = 1
    SERVING = 2
    DRAINING = 3


class Found(IntEnum):
    """Answer for one key."""

    NO = 0
    YES = 1
    BEING_WRITTEN = 2
    PIN_BOUND = 3


class ReserveStatus(IntEnum):
    """Answer for one chunk of a reservation; the values are the wire's."""

    RESERVED = 1
    EXISTS = 2
    BEING_WRITTEN = 3
    NO_SPACE = 4
    BOUND = 5


@dataclass(frozen=True)
class ChainAnswer:
    """`found` has one byte a key; `slots` are wire slots of the pinned ones, whose pins follow `first_pin`."""

    found: bytes
    slots: list[int] = field(default_factory=list)
    first_pin: int = 0
    checksums: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ChunkRequest:
    """A chunk that a session wants to write, or has written."""

    group: int
    key: ChunkKey
    parent: ChunkKey | None = None
    checksum: int = 0


@dataclass(frozen=True)
class Reservation:
    """Slots granted: for no chunk in particular, then one answer a chunk. Slots are wire slots."""

    grants: list[tuple[StoreId, int]]
    chunks: list[tuple[ReserveStatus, StoreId, int]]
    pending: bool
    reason: str


class Manager:
    """Everything the daemon knows.

    Args:
        boot_id: random 64-bit id of this daemon process (I6).
        segment_bytes: size of each pool segment.
        segments: how many segments the pool will have.
        outbox: carries out what is decided here.
        clock: seconds, monotonic.
        policy: name of the eviction policy of new namespaces.
    """

    def __init__(
        self,
        boot_id: int,
        segment_bytes: int,
        segments: int,
        outbox: Outbox,
        clock: Callable[[], float],
        policy: str = "lru",
    ) -> None:
        self.boot_id = boot_id
        self.state = ServiceState.STARTING
        self.namespaces: dict[NamespaceNumber, Namespace] = {}
        self.sessions: dict[SessionNumber, Session] = {}
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.anomalies: Counter[str] = Counter(dict.fromkeys(ANOMALIES, 0))
        self.lending = Lending(segment_bytes, segments, outbox)
        self.custody = Custody(outbox, self._quarantine_over)
        self.clock = clock
        self._outbox = outbox
        self._policy = policy
        self._by_secret: dict[bytes, Session] = {}
        self._by_digest: dict[bytes, Namespace] = {}
        # Keys being written, with the number of writers, by namespace.
        self._writing: dict[NamespaceNumber, Counter[ChunkKey]] = {}
        self._last_session = 0
        self._last_store = 0
        self._last_pin = 0
        self._chores: deque[Iterator[None]] = deque()

    # The pool.

    def set_state(self, state: ServiceState) -> None:
        self.state = state

    def segment_ready(self, pool_index: int) -> None:
        """A segment is populated: it may be lent (I9)."""
        self._segment_free(pool_index)

    def segment_clean(self, pool_index: int) -> None:
        """A segment that came back was zeroed: it may be lent again."""
        self._segment_free(pool_index)

    def hole_detected(self, pool_index: int) -> None:
        """Pages of a segment vanished: what its namespace holds cannot be believed (I13)."""
        self.anomalies["hole_detected"] += 1
        for loan in list(self.lending.loans.values()):
            if loan.pool_index == pool_index and loan.segment_id in loan.namespace.row_of_segment:
                self.reset_namespace(loan.namespace)

    # Sessions.

    def open_session(self, identity: PeerIdentity, label: str) -> Session:
        """A scheduler proved who it is. An older session of the same engine ends.

        Raises:
            Refused: too many sessions, or the instance is another user's.
        """
        for old in [s for s in self.sessions.values() if s.identity.instance_id == identity.instance_id]:
            if old.identity.uid != identity.uid:
                raise Refused(Code.PERMISSION_DENIED, "this engine instance belongs to another user")
            self.anomalies["session_replaced"] += 1
            self.end_session(old.number, "a newer session of the same engine was opened")
        if len(self.sessions) >= MAX_SESSIONS:
            raise Refused(Code.RESOURCE_EXHAUSTED, f"{MAX_SESSIONS} sessions are open, which is the limit")
        self._last_session += 1
        session = Session(
            SessionNumber(self._last_session), secrets.token_bytes(16), identity, label, self.clock()
        )
        self.sessions[session.number] = session
        self._by_secret[session.secret] = session
        self.counters["sessions_opened"] += 1
        return session

    def session(self, secret: bytes) -> Session:
        """The session of this secret.

        Raises:
            Refused: there is none (any more).
        """
        session = self._by_secret.get(secret)
        if session is None:
            raise Refused(
                Code.NOT_FOUND, "no such session: it ended, or belongs to another daemon; open a new one"
            )
        return session

    def end_session(self, number: SessionNumber, why: str) -> int:
        """Ends a session; what its workers may still touch is quarantined. Returns how many slots.

        Raises:
            Refused: no such session.
        """
        session = self.sessions.pop(number, None)
        if session is None:
            raise Refused(Code.NOT_FOUND, f"session {number} is not open")
        del self._by_secret[session.secret]
        if session.namespace is not None:
            session.namespace.sessions.discard(number)
        slots = self._abandon(session)
        self.custody.forget_session(number)
        self._outbox.notice(number, Ended(why))
        return slots

    def declare(
        self, session: Session, spec: NamespaceSpec, tokens: Sequence[tuple[int, bytes]]
    ) -> tuple[Namespace, bool]:
        """Puts a session into a namespace and names its workers. Returns it and whether it existed.

        Raises:
            Refused: a slot does not fit a segment, or a token or rank is not this engine's.
        """
        layout = spec.layout
        if layout.slot_bytes > self.lending.segment_bytes:
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"a slot of {layout.slot_bytes} bytes ({layout.shards} shards of {layout.shard_bytes}) does not fit a "
                f"segment of {self.lending.segment_bytes}; start kvhostd with a larger --segment-size, or use fewer "
                "blocks a chunk",
            )
        for rank, _ in tokens:
            if not 0 <= rank < layout.ranks:
                raise Refused(
                    Code.INVALID_ARGUMENT,
                    f"rank {rank} was named; the layout has ranks 0 to {layout.ranks - 1}",
                )
        digest = spec.digest()
        existed = digest in self._by_digest
        namespace = self._by_digest.get(digest) or self._new_namespace(digest, spec)
        for rank, token in tokens:
            self.custody.claim(session, rank, token)
        if session.namespace is not namespace:
            self._enter(session, namespace)
        for mapping in self.custody.parked_for(session.number):
            self._pair(mapping, session)
        self._refresh(session)
        return namespace, existed

    def reset_session(self, session: Session, weights_version: str) -> Namespace:
        """The engine's weights changed: it leaves its namespace for a fresh one (I12).

        Raises:
            Refused: no namespace was declared.
        """
        namespace = self._namespace_of(session)
        spec = namespace.spec.with_weights(weights_version)
        fresh, _ = self.declare(session, spec, ())
        return fresh

    # Workers.

    def worker_hello(
        self, instance_id: bytes, rank: int, access: int, token: bytes, identity: PeerIdentity
    ) -> MappingId:
        """A worker arrived; it gets segments when a session names its token.

        Raises:
            Refused: its token is malformed or spent, or too many workers wait.
        """
        if identity.instance_id != instance_id:
            raise Refused(Code.INVALID_ARGUMENT, "the instance id of HELLO differs from the connection's")
        mapping = self.custody.arrive(rank, Access(access), token, identity)
        claimed = self.custody.claimed_by(mapping)
        session = self.sessions.get(claimed) if claimed is not None else None
        if session is not None:
            if session.identity.instance_id != instance_id:
                self.custody.ended(mapping)
                raise Refused(Code.PERMISSION_DENIED, "this token belongs to another engine instance")
            self._pair(mapping, session)
            self._refresh(session)
        return mapping.id

    def worker_mapped(self, mapping_id: MappingId, segment_ids: Iterable[SegmentId]) -> None:
        """A worker has mapped these segments."""
        mapping = self.custody.mappings[mapping_id]
        for segment in segment_ids:
            if segment in mapping.segments:
                mapping.segments[segment] = True
            elif segment not in mapping.retiring:
                self.anomalies["foreign_segment"] += 1
        self._refresh_session_of(mapping)

    def worker_fenced(self, mapping_id: MappingId, fence: int) -> None:
        """A worker answered a fence.

        Raises:
            Refused: the fence was never sent.
        """
        try:
            self.custody.fenced(self.custody.mappings[mapping_id], fence)
        except Refused:
            self.anomalies["false_fence"] += 1
            raise

    def worker_retired(self, mapping_id: MappingId, segment_ids: Iterable[SegmentId]) -> None:
        """A worker has unmapped these segments."""
        mapping = self.custody.mappings[mapping_id]
        known = [s for s in segment_ids if s in mapping.segments or s in mapping.retiring]
        for segment in known:
            mapping.segments.pop(segment, None)
            mapping.retiring.discard(segment)
        self.lending.let_go(mapping_id, known)
        self._refresh_session_of(mapping)

    def worker_ended(self, mapping_id: MappingId) -> None:
        """PROOF that a worker is gone: it writes nothing and maps nothing any more (I4, I7)."""
        mapping = self.custody.mappings.get(mapping_id)
        if mapping is None:
            return
        self.custody.ended(mapping)
        self.lending.let_go(mapping_id, [*mapping.segments, *mapping.retiring])
        self._left(mapping)

    def worker_disconnected(self, mapping_id: MappingId) -> None:
        """The connection is gone, which proves nothing: its slots wait for `worker_ended`."""
        mapping = self.custody.mappings[mapping_id]
        mapping.connected = False
        self._left(mapping)

    # Reading.

    def lookup(self, session: Session, group: int, semantics: int, packed: bytes, pin: bool) -> ChainAnswer:  # noqa: PLR0912
        """Which keys of one chain are there. With `pin`, those that are are held (I3).

        Args:
            packed: the keys back to back, head of the chain first.

        Raises:
            Refused: no namespace, an unknown group, or keys of another length.
        """
        namespace = self._namespace_of(session)
        size = self._check_keys(namespace, group, packed)
        table, index = namespace.table, namespace.table.index
        prefix = semantics == Semantics.PREFIX
        self.counters["lookup_chunks"] += len(packed) // size
        namespace.counters["lookup_chunks"] += len(packed) // size
        if not session.ready:
            # Until every rank has mapped the segments, nothing can be loaded.
            return ChainAnswer(b"\0" if prefix and packed else bytes(len(packed) // size))
        writing = self._writing[namespace.number]
        usable, per_row = session.usable_rows, table.slots_per_row
        anywhere = session.all_usable
        room = self.bounds(session).pins - session.pin_count if pin else len(packed)
        found = bytearray()
        slots: list[SlotIndex] = []
        for start in range(0, len(packed), size):
            key = ChunkKey(packed[start : start + size])
            slot = index.get(key)
            if slot is not None and (anywhere or slot // per_row in usable):
                if len(slots) < room:
                    slots.append(slot)
                    found.append(Found.YES)
                    continue
                found.append(Found.PIN_BOUND)
            else:
                found.append(Found.BEING_WRITTEN if key in writing else Found.NO)
            if prefix:
                break
        if not pin:
            self.counters["hit_chunks"] += len(slots)
            namespace.counters["hit_chunks"] += len(slots)
            return ChainAnswer(bytes(found))
        return self._pin(session, namespace, slots, bytes(found))

    def release(self, session: Session, pin: PinId) -> None:
        """Gives one hold back, once.

        Raises:
            Refused: this session does not hold it (B5).
        """
        slot = session.pins.pop(pin, None)
        if slot is not None and session.namespace is not None:
            session.namespace.table.let_go(slot)
            return
        former = session.former_pins.pop(pin, None)
        if former is None:
            self.anomalies["double_release"] += 1
            raise Refused(
                Code.NOT_FOUND, f"pin {pin} is not held by this session: released before, or not its own"
            )
        former[0].table.let_go(former[1])

    def touch(self, session: Session, group: int, packed: bytes) -> None:
        """The engine used these chunks of one chain without loading them.

        Raises:
            Refused: no namespace, an unknown group, or keys of another length.
        """
        namespace = self._namespace_of(session)
        size = self._check_keys(namespace, group, packed)
        index = namespace.table.index
        keys = (ChunkKey(packed[i : i + size]) for i in range(0, len(packed), size))
        slots = [slot for key in keys if (slot := index.get(key)) is not None]
        namespace.table.touch(slots, self._now())

    # Writing.

    def reserve(self, session: Session, count: int, chunks: Sequence[ChunkRequest]) -> Reservation:
        """Takes slots to write into: `count` ahead, and one for each chunk that is not stored.

        Answers at once, with fewer when there is no room (E1).

        Raises:
            Refused: no namespace, or the daemon is starting or draining.
        """
        namespace = self._namespace_of(session)
        if self.state is not ServiceState.SERVING:
            raise Refused(
                Code.UNAVAILABLE, f"the daemon is {self.state.name.lower()}: no slots are granted now"
            )
        for chunk in chunks:
            self._check_chunk(namespace, chunk)
        if not session.ready:
            ranks = namespace.spec.layout.ranks
            if not namespace.segments:
                self._grow(namespace)
            answer = (ReserveStatus.NO_SPACE, StoreId(0), 0)
            reason = f"{session.mapped_ranks} of {ranks} ranks have mapped the segments"
            return Reservation([], [answer] * len(chunks), True, reason)
        bounds = self.bounds(session)
        reasons: list[str] = []
        answers = [self._reserve_chunk(session, namespace, chunk, bounds, reasons) for chunk in chunks]
        grants: list[tuple[StoreId, int]] = []
        while len(grants) < count:
            if session.unassigned >= bounds.unassigned or self._held(session) >= bounds.grants:
                self.counters["bound_reached"] += 1
                reasons.append(
                    f"the session holds {self._held(session)} slots, {session.unassigned} of them ahead; its bounds are "
                    f"{bounds.grants} and {bounds.unassigned}"
                )
                break
            slot = self._take(session, namespace)
            if slot is None:
                reasons.append(self._no_space(namespace))
                break
            grants.append(self._grant(session, namespace, slot, None))
        self._grow_ahead(session, namespace, count + len(chunks))
        if reasons:
            self._recall_others(session, namespace)
        pending = bool(reasons) and (namespace.expecting or not session.all_usable)
        return Reservation(grants, answers, pending, reasons[-1] if reasons else "")

    def assign(self, session: Session, store: StoreId, chunk: ChunkRequest) -> None:
        """A slot taken ahead is being written with this chunk.

        Raises:
            Refused: not a grant of this session, or one that already has a chunk.
        """
        grant = session.grants.get(store)
        if grant is None or grant.key is not None:
            self.anomalies["stale_assign"] += 1
            found = "not granted to this session" if grant is None else "assigned before"
            raise Refused(Code.FAILED_PRECONDITION, f"store {store} is {found}")
        self._check_chunk(grant.namespace, chunk)
        parent = self._parent(grant.namespace, chunk)
        session.grants[store] = replace(grant, key=chunk.key, parent=parent)
        session.unassigned -= 1
        self._writing[grant.namespace.number][chunk.key] += 1

    def commit(self, session: Session, store: StoreId, chunk: ChunkRequest) -> bool:
        """Every rank has written this slot: publish (I2). False when the key was published before.

        Raises:
            Refused: the store id is not this session's, was used before, is of an
                older generation, or was assigned to another chunk (I5, I6, B6).
        """
        grant = session.grants.get(store)
        if grant is None:
            self.anomalies["stale_commit"] += 1
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"store {store} is not held by this session: committed, aborted or fenced before, or not its own",
            )
        namespace = grant.namespace
        self._check_chunk(namespace, chunk)
        if grant.key not in (None, chunk.key):
            raise Refused(
                Code.INVALID_ARGUMENT, f"store {store} was assigned to another chunk than it is committed for"
            )
        self._end_grant(session, store, grant)
        if grant.generation != namespace.generation:
            namespace.table.give_back(grant.slot)
            self.anomalies["stale_commit"] += 1
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"store {store} was granted in generation {grant.generation}; the namespace is in {namespace.generation}",
            )
        if chunk.key in namespace.table.index:
            namespace.table.give_back(grant.slot)
            self.counters["superseded_chunks"] += 1
            return False
        parent = self._parent(namespace, chunk)
        namespace.table.publish(grant.slot, chunk.key, parent, self._now(), chunk.checksum)
        namespace.stored(chunk.key, parent)
        namespace.counters["committed_chunks"] += 1
        self.counters["committed_chunks"] += 1
        self._outbox.events(namespace.number)
        return True

    def abort(self, session: Session, store: StoreId, unquiet_ranks: Sequence[int] = ()) -> None:
        """Gives a slot back unpublished; quarantined while one of these ranks may still write it.

        Raises:
            Refused: not a grant of this session.
        """
        grant = session.grants.get(store)
        if grant is None:
            self.anomalies["stale_abort"] += 1
            raise Refused(
                Code.NOT_FOUND, f"store {store} is not held by this session: ended before, or not its own"
            )
        self._end_grant(session, store, grant)
        if grant.key is not None:
            self.counters["aborted_stores"] += 1
        if unquiet_ranks:
            self._quarantine(
                session, grant.namespace, [grant.slot], [], ranks=unquiet_ranks, store_ids=[store]
            )
        else:
            grant.namespace.table.give_back(grant.slot)

    # People.

    def namespace_named(self, name: str) -> Namespace:
        """The namespace of this number or start of digest; of no name when there is just one.

        Raises:
            Refused: none, or more than one.
        """
        every = list(self.namespaces.values())
        if not name and len(every) == 1:
            return every[0]
        found = [
            n for n in every if name and (str(n.number) == name or n.digest.hex().startswith(name.lower()))
        ]
        exact = [n for n in found if str(n.number) == name]
        if len(exact or found) == 1:
            return (exact or found)[0]
        known = ", ".join(f"{n.number} ({n.digest.hex()[:12]})" for n in every[:8]) or "none"
        asked = (
            f"namespace {name!r} matches {len(found)}"
            if name
            else f"no namespace was named and there are {len(every)}"
        )
        raise Refused(Code.NOT_FOUND, f"{asked}; known: {known}")

    def reset_namespace(self, namespace: Namespace) -> int:
        """Drops all chunks of a namespace at once and raises its generation. Returns how many."""
        namespace.generation += 1
        table = namespace.table
        old = table.forget_all()
        self._writing[namespace.number].clear()
        namespace.cleared()
        self._outbox.events(namespace.number)
        for number in namespace.sessions:
            self._outbox.notice(SessionNumber(number), Resync())

        def discard() -> Iterator[None]:
            while old:
                key, slot = old.popitem()
                table.discard(slot, key)
                yield

        self._chore(discard())
        return len(old)

    def evict(self, namespace: Namespace, keys: Sequence[ChunkKey] | None) -> tuple[int, int, int]:
        """Drops these chunks, or all, that nobody holds. Returns (evicted, held, absent)."""
        table = namespace.table
        evicted = held = absent = 0
        for key in list(table.index) if keys is None else keys:
            slot = table.index.get(key)
            if slot is None:
                absent += 1
            elif table.evictable(slot):
                table.evict(slot)
                evicted += 1
            else:
                held += 1
        self._evictions(namespace)
        return evicted, held, absent

    def set_limits(self, namespace: Namespace, floor_bytes: int | None, cap_bytes: int | None) -> None:
        """Bounds of a namespace in whole segments, rounded up.

        Raises:
            Refused: a floor above the cap or above the pool.
        """
        size = self.lending.segment_bytes
        floor = namespace.floor if floor_bytes is None else -(-floor_bytes // size)
        cap = namespace.cap if cap_bytes is None else -(-cap_bytes // size)
        total = len(self.lending.states)
        if floor > total or (cap and floor > cap):
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"a floor of {floor} segments; allowed are at most {min(cap or total, total)}",
            )
        namespace.floor, namespace.cap = floor, cap
        self.lending.shrink(namespace)
        self._evictions(namespace)

    def bounds(self, session: Session) -> Bounds:
        """How much this session may hold now (I5)."""
        namespace = self._namespace_of(session)
        segments = namespace.segments + self.lending.lendable(namespace)
        return Bounds(segments * namespace.slots_per_segment, len(namespace.sessions))

    def is_being_written(self, namespace: Namespace, key: ChunkKey) -> bool:
        return key in self._writing[namespace.number]

    def quarantined(self, session: Session) -> int:
        return self.custody.quarantined_slots(session.identity.instance_id)

    def take_events(self, number: NamespaceNumber) -> tuple[list[KeyEvent], bool]:
        """Key events of a namespace since the last call, and whether some were lost."""
        return self.namespaces[number].take_events()

    # Long work.

    def run_chores(self, steps: int = 2000) -> bool:
        """Does some of the long work; True while there is more."""
        while self._chores and steps > 0:
            chore = self._chores[0]
            for _ in chore:
                steps -= 1
                if steps <= 0:
                    break
            else:
                self._chores.popleft()
        return bool(self._chores)

    def check_integrity(self) -> list[str]:
        """Every contradiction in the manager's books; empty when they agree."""
        from kvhost_server.integrity import find_problems  # noqa: PLC0415 - only people and tests ask

        return find_problems(self)

    # Inside: sessions and workers.

    def _new_namespace(self, digest: bytes, spec: NamespaceSpec) -> Namespace:
        number = NamespaceNumber(len(self.namespaces) + 1)
        per_segment = self.lending.segment_bytes // spec.layout.slot_bytes
        namespace = Namespace(number, digest, spec, per_segment, self._policy)
        self.namespaces[number] = namespace
        self._by_digest[digest] = namespace
        self._writing[number] = Counter()
        return namespace

    def _enter(self, session: Session, namespace: Namespace) -> None:
        """Moves a session; what it held in the old namespace it holds no more, loads that run keep their chunks."""
        old = session.namespace
        if old is not None:
            old.sessions.discard(session.number)
            session.former_pins.update({pin: (old, slot) for pin, slot in session.pins.items()})
            session.pins = {}
            slots = [grant.slot for grant in session.grants.values()]
            stores = list(session.grants)
            for store, grant in list(session.grants.items()):
                self._end_grant(session, store, grant)
            if slots:
                self._quarantine(session, old, slots, [], store_ids=stores)
        session.namespace = namespace
        namespace.sessions.add(session.number)
        if not namespace.segments:
            self._grow(namespace)
        for mapping_id in list(session.mapping_of_rank.values()):
            self._offer_all(self.custody.mappings[mapping_id], namespace)

    def _pair(self, mapping: Mapping, session: Session) -> None:
        mapping.session = session.number
        session.mapping_of_rank[mapping.rank] = mapping.id
        if session.namespace is not None:
            self._offer_all(mapping, session.namespace)

    def _offer_all(self, mapping: Mapping, namespace: Namespace) -> None:
        """The worker gets every segment of this namespace and keeps none of another."""
        others = [s for s in mapping.segments if s not in namespace.row_of_segment]
        if others:
            for segment in others:
                del mapping.segments[segment]
                mapping.retiring.add(segment)
            self._outbox.retire(mapping.id, others)
        self._offer(mapping, self.lending.loans_of(namespace))

    def _offer(self, mapping: Mapping, loans: list[Loan]) -> None:
        fresh = [loan for loan in loans if loan.segment_id not in mapping.segments]
        for loan in fresh:
            mapping.segments[loan.segment_id] = False
            loan.holders.add(mapping.id)
        if fresh and mapping.connected:
            self._outbox.offer(mapping.id, [self.lending.assignment(loan) for loan in fresh])

    def _left(self, mapping: Mapping) -> None:
        session = self.sessions.get(mapping.session) if mapping.session is not None else None
        if session is not None and session.mapping_of_rank.get(mapping.rank) == mapping.id:
            del session.mapping_of_rank[mapping.rank]
            self._refresh(session)

    def _refresh_session_of(self, mapping: Mapping) -> None:
        session = self.sessions.get(mapping.session) if mapping.session is not None else None
        if session is not None:
            self._refresh(session)

    def _refresh(self, session: Session) -> None:
        """Which rows every rank has mapped; tells the session when its readiness changed."""
        namespace = session.namespace
        if namespace is None:
            return
        ranks = namespace.spec.layout.ranks
        workers = [self.custody.mappings[m] for m in session.mapping_of_rank.values()]
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
            self._outbox.notice(session.number, Mapped(mapped, ranks, ready))

    # Inside: room.

    def _segment_free(self, pool_index: int) -> None:
        loan = self.lending.ready(pool_index)
        if loan is not None:
            self._offer_to_sessions(loan)

    def _grow(self, namespace: Namespace) -> None:
        """One more segment for the namespace: a free one, else somebody's oldest."""
        loan = self.lending.lend(namespace)
        if loan is not None:
            self._offer_to_sessions(loan)
        elif self.lending.steal_for(namespace):
            self.counters["segments_retired"] += 1
            for other in self.namespaces.values():
                self._evictions(other)
                for number in other.sessions:
                    self._refresh(self.sessions[SessionNumber(number)])

    def _offer_to_sessions(self, loan: Loan) -> None:
        for number in loan.namespace.sessions:
            session = self.sessions[SessionNumber(number)]
            for mapping_id in session.mapping_of_rank.values():
                self._offer(self.custody.mappings[mapping_id], [loan])
            self._refresh(session)

    def _grow_ahead(self, session: Session, namespace: Namespace, wanted: int) -> None:
        """Takes a free segment before the last slots are gone, so that nobody waits for its mapping."""
        if session.all_usable and self.lending.lendable(namespace):
            spare = namespace.table.free_slots(session.usable_rows)
            if spare < max(2 * wanted, namespace.slots_per_segment // 4):
                self._grow(namespace)

    def _take(self, session: Session, namespace: Namespace) -> SlotIndex | None:
        table = namespace.table
        if not table.has_free(session.usable_rows) and session.all_usable:
            self._grow(namespace)
        if not session.all_usable and self._grows_free(session, namespace):
            return None  # a free segment is being mapped: better than evicting
        slot = table.take(session.usable_rows)
        self._evictions(namespace)
        return slot

    def _grows_free(self, session: Session, namespace: Namespace) -> bool:
        """No usable slot is free, but one in a row that this engine is still mapping is."""
        has_free = namespace.table.has_free
        others = set(namespace.row_of_segment.values()) - session.usable_rows
        return not has_free(session.usable_rows) and has_free(others)

    def _evictions(self, namespace: Namespace) -> None:
        """Counts what was evicted and has it told."""
        gone = namespace.counters["evicted"] - namespace.counters["evicted_told"]
        if gone:
            namespace.counters["evicted_told"] += gone
            self.counters["evicted_chunks"] += gone
            self._outbox.events(namespace.number)

    def _no_space(self, namespace: Namespace) -> str:
        self.counters["no_space"] += 1
        return f"no slot can be had: all {namespace.table.slots} slots of the namespace are held, and no segment is free"

    def _recall_others(self, session: Session, namespace: Namespace) -> None:
        now = self.clock()
        for number in namespace.sessions:
            other = self.sessions[SessionNumber(number)]
            if other is not session and other.unassigned and now - other.recalled_at >= _RECALL_EVERY_S:
                other.recalled_at = now
                self._outbox.notice(other.number, Recall(other.unassigned))

    # Inside: holds.

    def _held(self, session: Session) -> int:
        return len(session.grants) + self.quarantined(session)

    def _grant(
        self, session: Session, namespace: Namespace, slot: SlotIndex, chunk: ChunkRequest | None
    ) -> tuple[StoreId, int]:
        self._last_store += 1
        store = StoreId(self._last_store)
        if chunk is None:
            session.grants[store] = Grant(namespace, slot, namespace.generation)
            session.unassigned += 1
        else:
            parent = self._parent(namespace, chunk)
            session.grants[store] = Grant(namespace, slot, namespace.generation, chunk.key, parent)
            self._writing[namespace.number][chunk.key] += 1
        self.counters["granted_slots"] += 1
        return store, namespace.table.wire(slot)

    def _end_grant(self, session: Session, store: StoreId, grant: Grant) -> None:
        del session.grants[store]
        if grant.key is None:
            session.unassigned -= 1
            return
        writing = self._writing[grant.namespace.number]
        writing[grant.key] -= 1
        if writing[grant.key] <= 0:
            del writing[grant.key]

    def _reserve_chunk(
        self, session: Session, namespace: Namespace, chunk: ChunkRequest, bounds: Bounds, reasons: list[str]
    ) -> tuple[ReserveStatus, StoreId, int]:
        nothing = StoreId(0)
        if chunk.key in namespace.table.index:
            return ReserveStatus.EXISTS, nothing, 0
        if chunk.key in self._writing[namespace.number]:
            return ReserveStatus.BEING_WRITTEN, nothing, 0
        if self._held(session) >= bounds.grants:
            self.counters["bound_reached"] += 1
            reasons.append(f"the session holds {self._held(session)} slots; its bound is {bounds.grants}")
            return ReserveStatus.BOUND, nothing, 0
        # The chain it continues is in use: evict something else.
        parent = namespace.table.index.get(chunk.parent) if chunk.parent else None
        if parent is not None:
            namespace.table.hold(parent)
        slot = self._take(session, namespace)
        if parent is not None:
            namespace.table.let_go(parent)
        if slot is None:
            reasons.append(self._no_space(namespace))
            return ReserveStatus.NO_SPACE, nothing, 0
        store, wire = self._grant(session, namespace, slot, chunk)
        return ReserveStatus.RESERVED, store, wire

    def _pin(
        self, session: Session, namespace: Namespace, slots: list[SlotIndex], found: bytes
    ) -> ChainAnswer:
        table = namespace.table
        first = self._last_pin + 1
        for slot in slots:
            table.hold(slot)
            self._last_pin += 1
            session.pins[PinId(self._last_pin)] = slot
        table.touch(slots, self._now())
        self.counters["pinned_chunks"] += len(slots)
        namespace.counters["pinned_chunks"] += len(slots)
        sums = table.checksums
        checksums = [sums.get(slot, 0) for slot in slots] if sums else []
        return ChainAnswer(found, [table.wire(slot) for slot in slots], first if slots else 0, checksums)

    def _abandon(self, session: Session) -> int:
        """A session is over: its grants and pins wait for its workers' silence."""
        by_namespace: dict[NamespaceNumber, tuple[Namespace, list[SlotIndex], list[SlotIndex]]] = {}

        def of(namespace: Namespace) -> tuple[Namespace, list[SlotIndex], list[SlotIndex]]:
            return by_namespace.setdefault(namespace.number, (namespace, [], []))

        for store, grant in list(session.grants.items()):
            self._end_grant(session, store, grant)
            of(grant.namespace)[1].append(grant.slot)
        if session.namespace is not None:
            of(session.namespace)[2].extend(session.pins.values())
        for namespace, slot in session.former_pins.values():
            of(namespace)[2].append(slot)
        for namespace, slots, read in by_namespace.values():
            # Even without holds: a fence makes workers refuse jobs of the ended session.
            self._quarantine(session, namespace, slots, read)
        return self.quarantined(session)

    def _quarantine(
        self,
        session: Session,
        namespace: Namespace,
        slots: list[SlotIndex],
        read: list[SlotIndex],
        *,
        ranks: Iterable[int] | None = None,
        store_ids: Iterable[StoreId] = (),
    ) -> None:
        for slot in slots:
            namespace.table.quarantine(slot)
        self.anomalies["quarantined_slots"] += len(slots)
        self.custody.quarantine(
            session, namespace, slots, read, self.clock(), ranks=ranks, store_ids=store_ids
        )

    def _quarantine_over(self, entry: Quarantine) -> None:
        """Every worker is proven quiet: the slots are free, the chunks may be evicted."""
        if entry.session in self.sessions and entry.slots:
            self._outbox.notice(entry.session, Fenced(len(entry.slots)))
        table = entry.namespace.table

        def free() -> Iterator[None]:
            for slot in entry.slots:
                if table.state(slot) is SlotState.QUARANTINED:
                    table.give_back(slot)
                yield
            for slot in entry.read:
                table.let_go(slot)
                yield

        self._chore(free())

    def _chore(self, work: Iterator[None]) -> None:
        self._chores.append(work)
        self._outbox.chores()

    # Inside: checks.

    def _namespace_of(self, session: Session) -> Namespace:
        if session.namespace is None:
            raise Refused(Code.FAILED_PRECONDITION, "the session has declared no namespace yet")
        return session.namespace

    def _check_keys(self, namespace: Namespace, group: int, packed: bytes) -> int:
        layout = namespace.spec.layout
        if all(g.id != group for g in layout.groups):
            known = ", ".join(str(g.id) for g in layout.groups)
            raise Refused(Code.INVALID_ARGUMENT, f"group {group} is not one of the namespace's: {known}")
        if len(packed) % layout.key_bytes:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"{len(packed)} bytes of keys is not a whole number of keys of {layout.key_bytes} bytes",
            )
        return layout.key_bytes

    def _check_chunk(self, namespace: Namespace, chunk: ChunkRequest) -> None:
        size = self._check_keys(namespace, chunk.group, chunk.key)
        if len(chunk.key) != size or len(chunk.parent or b"") not in (0, size):
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"key of {len(chunk.key)} and parent of {len(chunk.parent or b'')} bytes; the namespace's keys have {size}",
            )

    def _parent(self, namespace: Namespace, chunk: ChunkRequest) -> ChunkKey | None:
        parent = chunk.parent if namespace.prefix_keys(chunk.group) else None
        return parent if parent != chunk.key else None

    def _now(self) -> int:
        return int(self.clock() * _MICROSECONDS)
