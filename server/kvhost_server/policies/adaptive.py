"""The default order: whoever is least likely to be used again for the room it takes leaves first."""

from collections.abc import Sequence
from typing import cast

from kvhost_server.ids import ChunkKey, SlotIndex
from kvhost_server.policies.base import Candidates
from kvhost_server.policies.ghosts import Ghosts
from kvhost_server.policies.hashing import fingerprint
from kvhost_server.policies.lru import PLACE_BITS, TAIL, LeastRecentlyUsed
from kvhost_server.policies.reuse import KINDS, ReuseHistory

_MOST = KINDS - 1
_KIND_MASK = 3
_SAMPLED = 4


class Adaptive(LeastRecentlyUsed):
    """Chunks are of four kinds, by how often they were used (remembered when they leave, for a while).

    Each kind is kept in the order of last use. What goes is the oldest of that
    kind whose oldest is worth least: uses to be expected for each unit of time
    that it is kept on, learned from when sampled chunks came back. Prompts that
    come once then pass through a small part of the cache; where young chunks
    come back as often as others, all kinds look alike and this is plain LRU.
    """

    name = "adaptive"

    def __init__(self, table: Candidates) -> None:
        super().__init__(table)
        self._tails = [[] for _ in range(KINDS)]
        self._ghosts = Ghosts()
        self._history = ReuseHistory()
        self._marks = bytearray()
        # Chunks stored so far: the time in which ages are counted.
        self._now = 0
        self._refresh_at = 0
        self._slots = 0
        self._worth = self._history.densities(0)

    def stored(self, slot: SlotIndex, key: ChunkKey) -> None:
        marks, history = self._marks, self._history
        if slot >= len(marks):
            marks.extend(bytes(slot + 1 - len(marks) + 1024))
        self._now += 1
        if self._now >= self._refresh_at:
            self._refresh()
        print_ = fingerprint(key)
        before = self._ghosts.recall(print_)
        kind = 0 if before is None else min(before + 1, _MOST)
        marks[slot] = kind
        if history.sampled(print_):
            marks[slot] |= _SAMPLED
            history.use(print_, kind, self._now, self._table.stamp(slot))

    def used(self, slots: Sequence[SlotIndex]) -> None:
        marks = self._marks
        for slot in slots:
            mark = marks[slot]
            if mark == _MOST:
                continue
            kind = min((mark & _KIND_MASK) + 1, _MOST)
            marks[slot] = mark & _SAMPLED | kind
            if mark & _SAMPLED:
                self._history.use(
                    fingerprint(cast(ChunkKey, self._table.key(slot))),
                    kind,
                    self._now,
                    self._table.stamp(slot),
                )

    def gone(self, slot: SlotIndex, key: ChunkKey) -> None:
        self._ghosts.remember(fingerprint(key), self._marks[slot] & _KIND_MASK, self._slots)

    def describe(self) -> str:
        history, ages = self._history, []
        for kind, name in enumerate(("once", "twice", "3 times", "more often")):
            entry = self._tails[kind][0] if self._tails[kind] else None
            stamp = 0 if entry is None else entry >> PLACE_BITS
            ages.append(f"{name} " + (f"{history.age_of(stamp)}" if stamp else "none"))
        return (
            f"{self.name}: learned from {history.uses} uses; age of the oldest tail, in chunks stored since, "
            f"by how often it was used: {', '.join(ages)}"
        )

    def _kind(self, slot: SlotIndex) -> int:
        return self._marks[slot] & _KIND_MASK

    def _tail(self) -> SlotIndex | None:
        # Twice: an entry whose slot has another chunk by now may have moved to a heap seen before.
        kind = self._least_worth()
        if kind is None:
            kind = self._least_worth()
        return None if kind is None else self._take(self._tails[kind], TAIL, kind)

    def _least_worth(self) -> int | None:
        """The kind whose oldest tail should go; None: no tail may."""
        span_of, worth = self._history.span_of, self._worth
        best = None
        for kind, heap in enumerate(self._tails):
            if heap and (stamp := self._settle(heap, TAIL, kind)):
                candidate = (worth[kind][span_of(stamp)], stamp, kind)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else best[2]

    def _refresh(self) -> None:
        self._slots = self._table.slots
        self._history.fit(self._slots)
        self._history.advance(self._now)
        self._worth = self._history.densities(self._now)
        self._refresh_at = self._now + max(64, self._history.unit)
