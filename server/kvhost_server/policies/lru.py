"""The chunk whose last use is longest ago leaves first, tails before what they build on."""

from collections.abc import Sequence
from heapq import heappop, heappush

from kvhost_server.ids import ChunkKey, SlotIndex
from kvhost_server.policies.base import Candidates

PLACE_BITS = 32
_PLACE_MASK = (1 << PLACE_BITS) - 1
TAIL, INNER = 1, 2
_MOST_STALE = 256
_MOST_LOOKS = 4096


class LeastRecentlyUsed:
    """Order of the last use, tails of chains first.

    Heaps with lazy stamps: a use only writes the table's stamp; an entry that
    turns out to be older than its chunk's stamp is put back where it belongs.
    So a use costs nothing here, and a chunk has at most one entry among the
    tails and one among the inner chunks. One call looks at a bounded number of
    entries: when very many were used since they were queued, one of those goes.
    """

    name = "lru"

    def __init__(self, table: Candidates) -> None:
        self._table = table
        self._tails: list[list[int]] = [[]]
        self._inner: list[int] = []
        self._preferred: dict[SlotIndex, None] = {}
        self._queued = bytearray()
        self._looks = 0

    def stored(self, slot: SlotIndex, key: ChunkKey) -> None:
        pass

    def used(self, slots: Sequence[SlotIndex]) -> None:
        pass

    def gone(self, slot: SlotIndex, key: ChunkKey) -> None:
        pass

    def offer(self, slot: SlotIndex) -> None:
        if slot >= len(self._queued):
            self._queued.extend(bytes(slot + 1 - len(self._queued) + 1024))
        inner = self._table.has_children(slot)
        mark = INNER if inner else TAIL
        if not self._queued[slot] & mark:
            self._queued[slot] |= mark
            heap = self._inner if inner else self._tails[self._kind(slot)]
            heappush(heap, self._table.stamp(slot) << PLACE_BITS | slot)

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
        self._looks = 0
        found = self._tail()
        if found is None:
            found = self._take(self._inner, INNER)
        if found is None:
            found = self._tail()  # inner entries that turned out to be tails were put back there
        return found

    def describe(self) -> str:
        return self.name

    # What another order of the tails changes.

    def _kind(self, slot: SlotIndex) -> int:
        """In which of the heaps of tails this chunk belongs."""
        return 0

    def _tail(self) -> SlotIndex | None:
        """The tail to evict, taken out."""
        return self._take(self._tails[0], TAIL)

    # Heaps.

    def _take(self, heap: list[int], mark: int, kind: int = 0) -> SlotIndex | None:
        if not self._settle(heap, mark, kind):
            return None
        slot = SlotIndex(heappop(heap) & _PLACE_MASK)
        self._queued[slot] &= ~mark
        return slot

    def _settle(self, heap: list[int], mark: int, kind: int = 0) -> int:
        """Brings an entry that may go to the top and returns its chunk's stamp; 0: there is none."""
        table = self._table
        while heap and self._looks < _MOST_LOOKS:
            entry = heap[0]
            slot = SlotIndex(entry & _PLACE_MASK)
            if table.evictable(slot):
                stamp = table.stamp(slot)
                fits = table.has_children(slot) == (mark == INNER)
                if fits and mark == TAIL:
                    fits = self._kind(slot) == kind
                if fits and (stamp == entry >> PLACE_BITS or self._looks > _MOST_STALE):
                    return stamp
                heappop(heap)
                self._queued[slot] &= ~mark
                self.offer(slot)
            else:
                heappop(heap)  # held or gone; whoever lets go of it offers it again
                self._queued[slot] &= ~mark
            self._looks += 1
        return 0
