"""Finding and holding chunks: lookup, pin, release, touch."""

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum

from kvhost_server.books import Books
from kvhost_server.checks import check_keys
from kvhost_server.errors import Code, Refused
from kvhost_server.ids import ChunkKey, PinId, SlotIndex
from kvhost_server.namespace import Namespace, Semantics
from kvhost_server.sessions import Session

MAX_KEYS_PER_CALL = 16384


class Found(IntEnum):
    """Answer for one key."""

    NO = 0
    YES = 1
    BEING_WRITTEN = 2
    PIN_BOUND = 3


@dataclass(frozen=True)
class ChainAnswer:
    """Answer for one chain: `found` has one byte (`Found`) a key.

    When pinned, `slots` are the wire slots of the keys found, and `first_pin`,
    `first_pin` + 1, … their pins.
    """

    found: bytes
    slots: list[int] = field(default_factory=list)
    first_pin: int = 0
    checksums: list[int] = field(default_factory=list)


class Reading:
    """What a session may read."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._last_pin = books.ids_begin

    def lookup(self, session: Session, group: int, semantics: int, packed: bytes, pin: bool) -> ChainAnswer:
        """Which keys of one chain are there. With `pin`, those that are are held (I3).

        Args:
            packed: the keys back to back, head of the chain first.

        Raises:
            Refused: no namespace, an unknown group, or keys of another length.
        """
        namespace = self._books.namespace_of(session)
        size = check_keys(namespace, group, packed)
        table, index = namespace.table, namespace.table.index
        prefix = semantics == Semantics.PREFIX
        self._books.counters["lookup_chunks"] += len(packed) // size
        namespace.counters["lookup_chunks"] += len(packed) // size
        if not session.ready:
            # Until every rank has mapped the segments, nothing can be loaded.
            return ChainAnswer(b"\0" if prefix and packed else bytes(len(packed) // size))
        writing = self._books.writing[namespace.number]
        usable, per_row = session.usable_rows, table.slots_per_row
        anywhere = session.all_usable
        room = self._books.bounds(session).pins - self._books.pins_held(session) if pin else len(packed)
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
            self._books.counters["hit_chunks"] += len(slots)
            namespace.counters["hit_chunks"] += len(slots)
            return ChainAnswer(bytes(found))
        return self._pin(session, namespace, slots, bytes(found))

    def advise(self, namespace: Namespace, semantics: int, packed: bytes) -> ChainAnswer:
        """Which keys of one chain are stored now, for somebody without a session. Nothing is held."""
        size = namespace.spec.layout.key_bytes
        index = namespace.table.index
        writing = self._books.writing.get(namespace.number, Counter())
        self._books.counters["advised_chunks"] += len(packed) // size
        found = bytearray()
        for start in range(0, len(packed), size):
            key = ChunkKey(packed[start : start + size])
            if key in index:
                found.append(Found.YES)
                continue
            found.append(Found.BEING_WRITTEN if key in writing else Found.NO)
            if semantics == Semantics.PREFIX:
                break
        return ChainAnswer(bytes(found))

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
            self._books.anomalies["double_release"] += 1
            raise Refused(
                Code.NOT_FOUND, f"pin {pin} is not held by this session: released before, or not its own"
            )
        former[0].table.let_go(former[1])

    def touch(self, session: Session, group: int, packed: bytes) -> None:
        """The engine used these chunks of one chain without loading them.

        Raises:
            Refused: no namespace, an unknown group, or keys of another length.
        """
        namespace = self._books.namespace_of(session)
        size = check_keys(namespace, group, packed)
        index = namespace.table.index
        keys = (ChunkKey(packed[i : i + size]) for i in range(0, len(packed), size))
        slots = [slot for key in keys if (slot := index.get(key)) is not None]
        namespace.table.touch(slots, self._books.now())

    def _pin(
        self, session: Session, namespace: Namespace, slots: list[SlotIndex], found: bytes
    ) -> ChainAnswer:
        table = namespace.table
        first = self._last_pin + 1
        for slot in slots:
            table.hold(slot)
            self._last_pin += 1
            session.pins[PinId(self._last_pin)] = slot
        table.touch(slots, self._books.now())
        self._books.counters["pinned_chunks"] += len(slots)
        namespace.counters["pinned_chunks"] += len(slots)
        sums = table.checksums
        checksums = [sums.get(slot, 0) for slot in slots] if sums else []
        return ChainAnswer(found, [table.wire(slot) for slot in slots], first if slots else 0, checksums)
