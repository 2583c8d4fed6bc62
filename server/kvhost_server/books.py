"""What all rooms of the manager share: who there is, what is counted, what is held, long work that waits."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

from kvhost_server.custody import Custody, Quarantine
from kvhost_server.errors import Code, Refused
from kvhost_server.fates import Fates
from kvhost_server.ids import ChunkKey, NamespaceNumber, SessionNumber, SlotIndex, StoreId
from kvhost_server.lending import Lending
from kvhost_server.namespace import Namespace
from kvhost_server.notices import Fenced, Outbox
from kvhost_server.sessions import Bounds, Grant, Session
from kvhost_server.slots import SlotState

_MICROSECONDS = 1_000_000
_BOOT_MASK = (1 << 31) - 1
_IDS_OF_A_BOOT = 24  # bits

COUNTERS = (
    "sessions_opened",
    "lookup_chunks",
    "hit_chunks",
    "advised_chunks",
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
BYTES_OF = ("committed_chunks", "pinned_chunks")
"""Counters of chunks that are also told in bytes."""
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


class Books:
    """The manager's shared state. Each room reads and writes it on the one event loop.

    Args:
        boot_id: random 64-bit id of this daemon process (I6).
        segment_bytes: size of each pool segment.
        segments: how many segments the pool will have.
        outbox: carries out what is decided.
        clock: seconds, monotonic.
    """

    def __init__(
        self, boot_id: int, segment_bytes: int, segments: int, outbox: Outbox, clock: Callable[[], float]
    ) -> None:
        self.boot_id = boot_id
        # Store and pin ids count from here: what a client kept from another boot most likely names nothing
        # in this one, whatever the client does with it (I5, I6).
        self.ids_begin = (boot_id & _BOOT_MASK) << _IDS_OF_A_BOOT
        self.state = ServiceState.STARTING
        self.namespaces: dict[NamespaceNumber, Namespace] = {}
        self.sessions: dict[SessionNumber, Session] = {}
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.anomalies: Counter[str] = Counter(dict.fromkeys(ANOMALIES, 0))
        self.lending = Lending(segment_bytes, segments, outbox, clock)
        self.custody = Custody(outbox, self._quarantine_over)
        self.clock = clock
        self.fates = Fates(clock)
        self.outbox = outbox
        # Called when a namespace that was given up holds less than before: an engine may wait for that.
        self.when_let_go: Callable[[], None] = lambda: None
        # Keys being written, with the number of writers, by namespace.
        self.writing: dict[NamespaceNumber, Counter[ChunkKey]] = {}
        # Chunks that operators keep, by namespace: one hold each.
        self.operator_pins: dict[NamespaceNumber, dict[ChunkKey, SlotIndex]] = {}
        # What namespaces that are gone had counted, in bytes: totals never fall.
        self._former_bytes: Counter[str] = Counter()
        self._chores: deque[Iterator[None]] = deque()

    def now(self) -> int:
        """Microseconds, monotonic: the unit of a chunk's last use."""
        return int(self.clock() * _MICROSECONDS)

    def namespace_of(self, session: Session) -> Namespace:
        if session.namespace is None:
            raise Refused(Code.FAILED_PRECONDITION, "the session has declared no namespace yet")
        return session.namespace

    def bytes_of(self, counter: str) -> int:
        """What all namespaces have counted under this name, in bytes instead of chunks."""
        now = sum(n.counters[counter] * n.spec.layout.slot_bytes for n in self.namespaces.values())
        return now + self._former_bytes[counter]

    def forget(self, namespace: Namespace) -> None:
        """A namespace with nothing in it is gone; its number is never used again."""
        del self.namespaces[namespace.number]
        del self.writing[namespace.number]
        self.fates.forget(namespace.number)
        namespace.table.close()
        for name in BYTES_OF:
            self._former_bytes[name] += namespace.counters[name] * namespace.spec.layout.slot_bytes

    def bounds(self, session: Session) -> Bounds:
        """How much this session may hold now (I5)."""
        namespace = self.namespace_of(session)
        segments = namespace.segments + self.lending.lendable(namespace)
        return Bounds(segments * namespace.slots_per_segment, len(namespace.sessions))

    def held(self, session: Session) -> int:
        return len(session.grants) + self.quarantined(session)

    def pins_held(self, session: Session) -> int:
        """Its pins, and those of the engine's earlier sessions whose workers are not proven quiet (I5)."""
        return session.pin_count + self.custody.quarantined_reads(session.identity.instance_id)

    def quarantined(self, session: Session) -> int:
        return self.custody.quarantined_slots(session.identity.instance_id)

    def end_grant(self, session: Session, store: StoreId, grant: Grant) -> None:
        del session.grants[store]
        if grant.key is None:
            session.unassigned -= 1
            return
        writing = self.writing[grant.namespace.number]
        writing[grant.key] -= 1
        if writing[grant.key] <= 0:
            del writing[grant.key]

    def quarantine(
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

    def tell_evictions(self, namespace: Namespace) -> None:
        """Counts what was evicted and has it told."""
        gone = namespace.counters["evicted"] - namespace.counters["evicted_told"]
        if gone:
            namespace.counters["evicted_told"] += gone
            self.counters["evicted_chunks"] += gone
            self.outbox.events(namespace.number)

    def add_chore(self, work: Iterator[None]) -> None:
        self._chores.append(work)
        self.outbox.chores()

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

    def _quarantine_over(self, entry: Quarantine) -> None:
        """Every worker is proven quiet: the slots are free, the chunks may be evicted."""
        if entry.session in self.sessions and entry.slots:
            self.outbox.notice(entry.session, Fenced(len(entry.slots)))
        table = entry.namespace.table

        def free() -> Iterator[None]:
            for slot in entry.slots:
                if table.state(slot) is SlotState.QUARANTINED:
                    table.give_back(slot)
                yield
            for slot in entry.read:
                table.let_go(slot)
                yield
            if entry.namespace.given_up_at is not None:
                self.when_let_go()

        self.add_chore(free())
