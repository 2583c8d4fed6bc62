"""Which chunk leaves next. A policy orders candidates; it never frees, pins or knows about sessions.

The table tells the policy when a chunk was used (its `stamp` rose) and when a
chunk may be evicted (`offer`). A policy answers `victim()`: first chunks that
no other resident chunk builds on, oldest first; only when every one of those is
held, a chunk in the middle of a chain (I10).
"""

from heapq import heappop, heappush
from typing import Protocol

from kvhost_server.ids import SlotIndex

_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1
_LEAF, _INNER = 1, 2


class Candidates(Protocol):
    """What a policy may ask the table about a slot."""

    def stamp(self, slot: SlotIndex) -> int:
        """Time of the last use; higher is later, no two are equal."""

    def evictable(self, slot: SlotIndex) -> bool:
        """Stored and held by nobody."""

    def has_children(self, slot: SlotIndex) -> bool:
        """Another resident chunk builds on this one."""

    def unreachable(self, slot: SlotIndex) -> bool:
        """A chunk that this one builds on is missing."""


class Policy(Protocol):
    """Order of eviction of one namespace."""

    name: str

    def offer(self, slot: SlotIndex) -> None:
        """This chunk may be evicted from now on, as far as anybody knows. May be said twice."""

    def prefer(self, slot: SlotIndex) -> None:
        """This chunk cannot be reached any more: take it before all others."""

    def victim(self) -> SlotIndex | None:
        """The chunk to evict next, or None when every chunk is held. It is forgotten until offered again."""


class LeastRecentlyUsed:
    """The chunk whose last use is longest ago, leaves before inner chunks.

    Heaps with lazy stamps: a use only writes the table's stamp; an entry that
    turns out to be older than its chunk's stamp is put back where it belongs.
    So a use costs nothing here, and each chunk has at most one entry a heap.
    """

    name = "lru"

    def __init__(self, table: Candidates) -> None:
        self._table = table
        self._leaves: list[int] = []
        self._inner: list[int] = []
        self._preferred: dict[SlotIndex, None] = {}
        self._queued = bytearray()

    def offer(self, slot: SlotIndex) -> None:
        if self._table.has_children(slot):
            self._push(self._inner, _INNER, slot)
        else:
            self._push(self._leaves, _LEAF, slot)

    def prefer(self, slot: SlotIndex) -> None:
        self._preferred[slot] = None

    def victim(self) -> SlotIndex | None:
        table = self._table
        while self._preferred:
            slot, _ = self._preferred.popitem()
            if not table.evictable(slot):
                continue
            if table.unreachable(slot) and not table.has_children(slot):
                return slot
            self.offer(slot)
        for heap, mark in ((self._leaves, _LEAF), (self._inner, _INNER), (self._leaves, _LEAF)):
            # The last round: inner entries that turned out to be leaves were put back there.
            found = self._oldest(heap, mark)
            if found is not None:
                return found
        return None

    def _push(self, heap: list[int], mark: int, slot: SlotIndex) -> None:
        if slot >= len(self._queued):
            self._queued.extend(bytes(slot + 1 - len(self._queued) + 1024))
        if not self._queued[slot] & mark:
            self._queued[slot] |= mark
            heappush(heap, self._table.stamp(slot) << _PLACE_BITS | slot)

    def _oldest(self, heap: list[int], mark: int) -> SlotIndex | None:
        table = self._table
        while heap:
            entry = heappop(heap)
            slot = SlotIndex(entry & _PLACE_MASK)
            self._queued[slot] &= ~mark
            if not table.evictable(slot):
                continue  # held or gone; whoever lets go of it offers it again
            if table.has_children(slot) != (mark == _INNER) or table.stamp(slot) != entry >> _PLACE_BITS:
                self.offer(slot)
                continue
            return slot
        return None


POLICIES: dict[str, type[LeastRecentlyUsed]] = {"lru": LeastRecentlyUsed}
