"""Finding and holding chunks: lookup, pin, release, touch."""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

from kvhost_server.books import Books
from kvhost_server.checks import check_keys
from kvhost_server.errors import Code, Refused
from kvhost_server.ids import ChunkKey, PinId, SlotIndex
from kvhost_server.namespace import Namespace, Semantics
from kvhost_server.sessions import Session

MAX_KEYS_PER_CALL = 16384
_KEYS_AT_ONCE = 128


class Found(IntEnum):
    """Answer for one key."""

    NO = 0
    YES = 1
    BEING_WRITTEN = 2
    PIN_BOUND = 3


_NO, _YES, _BEING_WRITTEN, _PIN_BOUND = (bytes([found]) for found in Found)


class ChainAnswer(NamedTuple):
    """Answer for one chain: `found` has one byte (`Found`) a key.

    When pinned, `slots` are the wire slots of the keys found, and `first_pin`,
    `first_pin` + 1, … their pins.
    """

    found: bytes
    slots: Sequence[int] = ()
    first_pin: int = 0
    checksums: Sequence[int] = ()


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
        books = self._books
        namespace = books.namespace_of(session)
        size = check_keys(namespace, group, packed)
        count = len(packed) // size
        prefix = semantics == Semantics.PREFIX
        books.counters["lookup_chunks"] += count
        namespace.counters["lookup_chunks"] += count
        if not session.ready:
            # Until every rank has mapped the segments, nothing can be loaded.
            return ChainAnswer(_NO if prefix and packed else bytes(count))
        usable = None if session.all_usable else session.usable_rows
        slots, found = self._find(namespace, packed, prefix, usable)
        if pin:
            room = max(0, books.bounds(session).pins - books.pins_held(session))
            if len(slots) > room:
                slots, found = slots[:room], _bounded(found, room, prefix)
            return self._pin(session, namespace, slots, found)
        books.counters["hit_chunks"] += len(slots)
        namespace.counters["hit_chunks"] += len(slots)
        return ChainAnswer(found)

    def advise(self, namespace: Namespace, semantics: int, packed: bytes) -> ChainAnswer:
        """Which keys of one chain are stored now, for somebody without a session. Nothing is held."""
        self._books.counters["advised_chunks"] += len(packed) // namespace.spec.layout.key_bytes
        return ChainAnswer(self._find(namespace, packed, semantics == Semantics.PREFIX, None)[1])

    def _find(
        self, namespace: Namespace, packed: bytes, prefix: bool, usable: set[int] | None
    ) -> tuple[list[SlotIndex], bytes]:
        """The slots of the keys that are there, and one `Found` a key.

        No step a key in Python where it can be avoided: this is what engines ask most.
        """
        table = namespace.table
        get, per_row = table.index.get, table.slots_per_row
        writing = self._books.writing.get(namespace.number, ())
        slots: list[SlotIndex] = []
        found = b""
        for keys in _cut(packed, namespace.spec.layout.key_bytes):
            at: list[Any] = list(map(get, keys))  # a slot or None
            if usable is not None:
                at = [None if slot is None or slot // per_row not in usable else slot for slot in at]
            if None not in at:
                slots += at
                found += _YES * len(at)
            elif prefix:
                hits = at.index(None)
                slots += at[:hits]
                found += _YES * hits + (_BEING_WRITTEN if keys[hits] in writing else _NO)
                break
            else:
                slots += [slot for slot in at if slot is not None]
                found += bytes(
                    [
                        Found.YES if slot is not None else Found.BEING_WRITTEN if key in writing else Found.NO
                        for slot, key in zip(at, keys, strict=True)
                    ]
                )
        return slots, found

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
        get = namespace.table.index.get
        slots = [slot for keys in _cut(packed, size) for slot in map(get, keys) if slot is not None]
        namespace.table.touch(slots, self._books.now())

    def _pin(
        self, session: Session, namespace: Namespace, slots: list[SlotIndex], found: bytes
    ) -> ChainAnswer:
        table = namespace.table
        first = self._last_pin + 1
        self._last_pin += len(slots)
        table.hold_all(slots)
        session.pins.update(zip(map(PinId, range(first, first + len(slots))), slots, strict=True))
        table.touch(slots, self._books.now())
        self._books.counters["pinned_chunks"] += len(slots)
        namespace.counters["pinned_chunks"] += len(slots)
        sums = table.checksums
        checksums = [sums.get(slot, 0) for slot in slots] if sums else []
        return ChainAnswer(found, table.wires(slots), first if slots else 0, checksums)


def _bounded(found: bytes, room: int, prefix: bool) -> bytes:
    """The answer when only the first `room` of the keys found may be pinned."""
    if prefix:
        return _YES * room + _PIN_BOUND
    at = -1
    for _ in range(room):
        at = found.index(_YES, at + 1)
    return found[: at + 1] + found[at + 1 :].replace(_YES, _PIN_BOUND)


def _cut(packed: bytes, size: int) -> Iterator[tuple[ChunkKey, ...]]:
    """Keys of `size` bytes back to back, apart: some at a time."""
    step = size * _KEYS_AT_ONCE
    for start in range(0, len(packed), step):
        count = min(len(packed) - start, step) // size
        yield _cutter(size, count)(packed, start)


@lru_cache(2 * _KEYS_AT_ONCE)
def _cutter(size: int, count: int) -> Callable[[bytes, int], tuple[ChunkKey, ...]]:
    """Takes `count` keys of `size` bytes out of bytes, from an offset: in one step, where a slice a key
    costs twice the time of the whole lookup."""
    return Struct(f"{size}s" * count).unpack_from
