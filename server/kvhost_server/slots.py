"""The chunks and slots of one namespace: what is where, who builds on whom, what is held.

Pure bookkeeping in flat arrays: no object per chunk (a garbage collection over
a million small objects would stop the loop for 0.2 s). Who holds a slot, and
why, is the manager's business; this room counts holds and keeps the order of
eviction (I3, I10).
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum

from kvhost_server.ids import ChunkKey, SegmentId, SlotIndex, wire_slot
from kvhost_server.policies import DEFAULT_POLICY, POLICIES, Policy
from kvhost_server.slotchecks import table_problems

NO_SLOT = SlotIndex(-1)


class SlotState(IntEnum):
    """What a slot is to the daemon. docs/design.md shows who moves it and with what proof."""

    VACANT = 0
    """Its row has no segment."""
    FREE = 1
    GRANTED = 2
    """A session may write it."""
    READY = 3
    """Holds a chunk that the index names."""
    QUARANTINED = 4
    """Nobody may have it until its old writers are proven quiet (I4)."""
    UNLISTED = 5
    """Holds a chunk that the index names no more, kept only for those who still read it."""


class IntegrityError(Exception):
    """The books contradict each other. Never expected; found by `check_integrity`."""


class ChunkTable:
    """Slots, index and eviction order of one namespace.

    Args:
        slots_per_row: slots in one segment; a row is a segment's worth of slots.
        on_removed: called with the key of every chunk that leaves the index, and when it was last used.
        policy: name of the eviction policy.
    """

    def __init__(
        self, slots_per_row: int, on_removed: Callable[[ChunkKey, int], None], policy: str = DEFAULT_POLICY
    ) -> None:
        self.slots_per_row = slots_per_row
        self.index: dict[ChunkKey, SlotIndex] = {}
        self.rows: list[SegmentId | None] = []
        self.row_held: list[int] = []
        self.row_used_at: list[int] = []
        self.checksums: dict[SlotIndex, int] = {}
        self.policy: Policy = POLICIES[policy](self)
        self._on_removed = on_removed
        self._free: list[array[int]] = []
        self._rows_with_free: set[int] = set()
        self._now = 0
        self._state = bytearray()
        self._holds = array("I")
        self._stamp = array("Q")
        self._parent = array("i")
        self._children = array("I")
        self._first_child = array("i")
        self._next_sibling = array("i")
        self._previous_sibling = array("i")
        self._key: list[ChunkKey | None] = []
        # Chunks whose parent is not resident: by the parent's key, and back.
        self._orphans_of: dict[ChunkKey, set[SlotIndex]] = {}
        self._missing_parent: dict[SlotIndex, ChunkKey] = {}

    def close(self) -> None:
        """Nothing is asked of this table any more. Without its circles it is freed at once: what was left out
        of collections is never found by one."""
        del self.policy, self._on_removed

    # Segments come and go as rows.

    def add_row(self, segment: SegmentId) -> int:
        """Makes the slots of a segment part of the namespace; returns the row."""
        n = self.slots_per_row
        row = next((i for i, s in enumerate(self.rows) if s is None), len(self.rows))
        first = row * n
        free = array("i", range(first + n - 1, first - 1, -1))
        if row == len(self.rows):
            self.rows.append(segment)
            self.row_held.append(0)
            self.row_used_at.append(self._now)
            self._free.append(free)
            self._state.extend(bytes([SlotState.FREE]) * n)
            zeros, nones = bytes(8 * n), array("i", [-1]) * n
            self._holds.frombytes(zeros[: 4 * n])
            self._stamp.frombytes(zeros)
            self._children.frombytes(zeros[: 4 * n])
            for links in (self._parent, self._first_child, self._next_sibling, self._previous_sibling):
                links.extend(nones)
            self._key.extend([None] * n)
        else:
            self.rows[row], self._free[row] = segment, free
            self.row_used_at[row] = self._now
            self._state[first : first + n] = bytes([SlotState.FREE]) * n
        self._rows_with_free.add(row)
        return row

    def remove_row(self, row: int) -> int:
        """Gives a segment up: drops its chunks. Returns how many. Nothing in the row may be held.

        Raises:
            IntegrityError: something in the row is held.
        """
        if self.row_held[row]:
            raise IntegrityError(f"row {row} is given up with {self.row_held[row]} held slots")
        dropped, n = 0, self.slots_per_row
        first, end = row * n, (row + 1) * n
        slot = self._state.find(SlotState.READY, first, end)
        while slot >= 0:
            self.evict(SlotIndex(slot))
            dropped += 1
            slot = self._state.find(SlotState.READY, slot + 1, end)
        self._state[first:end] = bytes([SlotState.VACANT]) * n
        self._free[row] = array("i")
        self._rows_with_free.discard(row)
        self.rows[row] = None
        return dropped

    def row_of(self, slot: SlotIndex) -> int:
        return slot // self.slots_per_row

    def wire(self, slot: SlotIndex) -> int:
        """The number by which this slot travels.

        Raises:
            IntegrityError: the slot's row has no segment.
        """
        row, place = divmod(slot, self.slots_per_row)
        segment = self.rows[row]
        if segment is None:
            raise IntegrityError(f"slot {slot} is named but its row {row} has no segment")
        return wire_slot(segment, place)

    def wires(self, slots: Sequence[SlotIndex]) -> list[int]:
        """As `wire`, for many."""
        n, rows = self.slots_per_row, self.rows
        if any(rows[row] is None for row in {slot // n for slot in slots}):
            return [self.wire(slot) for slot in slots]  # raises
        bases = [0 if segment is None else wire_slot(segment, 0) for segment in rows]
        return [bases[slot // n] | slot % n for slot in slots]

    # What a policy asks.

    def stamp(self, slot: SlotIndex) -> int:
        return self._stamp[slot]

    def evictable(self, slot: SlotIndex) -> bool:
        return self._state[slot] == SlotState.READY and not self._holds[slot]

    def has_children(self, slot: SlotIndex) -> bool:
        return self._children[slot] > 0

    def unreachable(self, slot: SlotIndex) -> bool:
        # Bounded: a wrong answer far down a chain costs an early eviction, no more.
        at = slot
        for _ in range(64):
            if self._parent[at] < 0:
                return at in self._missing_parent
            at = SlotIndex(self._parent[at])
        return True

    # What the manager asks.

    def state(self, slot: SlotIndex) -> SlotState:
        return SlotState(self._state[slot])

    def key(self, slot: SlotIndex) -> ChunkKey | None:
        return self._key[slot]

    def parent(self, slot: SlotIndex) -> ChunkKey | None:
        """Key of the chunk this one builds on, resident or not."""
        parent = self._parent[slot]
        return self._key[parent] if parent >= 0 else self._missing_parent.get(slot)

    def holds(self, slot: SlotIndex) -> int:
        return self._holds[slot]

    def children(self, slot: SlotIndex) -> int:
        return self._children[slot]

    @property
    def slots(self) -> int:
        return self.slots_per_row * sum(s is not None for s in self.rows)

    def in_state(self, state: SlotState) -> int:
        """Slots in this state now. One pass over a byte a slot: for those who look now and then."""
        return self._state.count(state)

    @property
    def pinned(self) -> int:
        """Slots with a chunk that somebody reads."""
        written = self.in_state(SlotState.GRANTED) + self.in_state(SlotState.QUARANTINED)
        return sum(self.row_held) - written

    def free_slots(self, rows: Iterable[int]) -> int:
        """Free slots in these rows."""
        return sum(len(self._free[row]) for row in rows)

    def has_free(self, rows: set[int]) -> bool:
        """Whether any of these rows has a free slot."""
        return not self._rows_with_free.isdisjoint(rows)

    def pages(self, size: int) -> Iterator[list[tuple[ChunkKey, ChunkKey | None]]]:
        """Every key that is in the index now with its parent, `size` at a time, at any pace.

        A key that leaves meanwhile is told all the same, without a parent.
        """
        entries = list(self.index.items())

        def page(start: int) -> list[tuple[ChunkKey, ChunkKey | None]]:
            now = self.index.get
            return [
                (key, self.parent(at) if now(key) == at else None)
                for key, at in entries[start : start + size]
            ]

        return (page(start) for start in range(0, len(entries), size))

    # Taking, publishing, holding, freeing.

    def take(self, rows: set[int], tail: SlotIndex | None = None, attempts: int = 64) -> SlotIndex | None:
        """A slot to write into: a free one in one of these rows, else one whose chunk is evicted.

        What the chunk in `tail` builds on is not evicted: the new chunk continues it, and could never be
        reached (E1). Returns None when nothing can be had. What comes first in the order of eviction and
        must not go is passed over, at most `attempts` times.
        """
        for row in self._rows_with_free:
            if row in rows:
                return self._grant(SlotIndex(self._free[row][-1]))
        passed: list[SlotIndex] = []
        taken = None
        chain: set[SlotIndex] | None = None
        while len(passed) < attempts:
            victim = self.policy.victim()
            if victim is None:
                break
            if chain is None and tail is not None and self._children[victim]:
                chain = self._chain_to(tail)
            if self.row_of(victim) in rows and (chain is None or victim not in chain):
                self.evict(victim)
                taken = self._grant(victim)
                break
            passed.append(victim)
        for slot in passed:
            self.policy.offer(slot)
        return taken

    def take_free(self, rows: set[int], most: int) -> list[SlotIndex]:
        """So many free slots in these rows to write into, as far as there are any; nothing is evicted."""
        taken: list[SlotIndex] = []
        state = self._state
        for row in self._rows_with_free & rows:
            free = self._free[row]
            part = free[-(most - len(taken)) :] if len(taken) < most else ()
            if not part:
                break
            del free[-len(part) :]
            if not free:
                self._rows_with_free.discard(row)
            for slot in part:
                state[slot] = SlotState.GRANTED
            self.row_held[row] += len(part)
            taken += map(SlotIndex, reversed(part))
        return taken

    def publish(
        self, slot: SlotIndex, key: ChunkKey, parent: ChunkKey | None, now: int, checksum: int = 0
    ) -> None:
        """A granted slot now holds this chunk, complete: the index names it (I2)."""
        self._expect(slot, SlotState.GRANTED)
        self._state[slot] = SlotState.READY
        self._key[slot] = key
        self.index[key] = slot
        if checksum:
            self.checksums[slot] = checksum
        self._use(slot, now)
        self.policy.stored(slot, key)
        if parent is not None:
            parent_slot = self.index.get(parent, NO_SLOT)
            if parent_slot >= 0:
                self._link(slot, parent_slot)
            else:
                self._missing_parent[slot] = parent
                self._orphans_of.setdefault(parent, set()).add(slot)
        for orphan in self._orphans_of.pop(key, ()):
            del self._missing_parent[orphan]
            if not self._builds_on(slot, orphan):  # a peer may claim that two chunks build on each other
                self._link(orphan, slot)
        self._unheld(slot)
        self.policy.offer(slot)
        if slot in self._missing_parent and not self._children[slot]:
            self.policy.prefer(slot)

    def hold(self, slot: SlotIndex) -> None:
        """One more reason not to evict this chunk."""
        if not self._holds[slot]:
            self.row_held[self.row_of(slot)] += 1
        self._holds[slot] += 1

    def hold_all(self, slots: Sequence[SlotIndex]) -> None:
        """As `hold`, for many."""
        holds, held, n = self._holds, self.row_held, self.slots_per_row
        for slot in slots:
            if not holds[slot]:
                held[slot // n] += 1
            holds[slot] += 1

    def let_go(self, slot: SlotIndex) -> None:
        """One reason less. A chunk the index names no more is freed with its last hold.

        Raises:
            IntegrityError: nobody held it.
        """
        if not self._holds[slot]:
            raise IntegrityError(f"slot {slot} is let go but nobody held it")
        self._holds[slot] -= 1
        if not self._holds[slot]:
            self._unheld(slot)
            if self._state[slot] == SlotState.UNLISTED:
                self._make_free(slot)
            elif slot in self._missing_parent and not self._children[slot]:
                self.policy.prefer(slot)
            else:
                self.policy.offer(slot)

    def give_back(self, slot: SlotIndex) -> None:
        """A granted or quarantined slot that nobody writes any more is free."""
        self._expect(slot, SlotState.GRANTED, SlotState.QUARANTINED)
        self._unheld(slot)
        self._make_free(slot)

    def quarantine(self, slot: SlotIndex) -> None:
        """A granted slot that somebody may still write (I4)."""
        self._expect(slot, SlotState.GRANTED)
        self._state[slot] = SlotState.QUARANTINED

    def touch(self, slots: Sequence[SlotIndex], now: int) -> None:
        """These chunks of one chain, head to tail, were used: ancestors end up newest (E2)."""
        stamp, used, n = self._stamp, self.row_used_at, self.slots_per_row
        # Strictly rising, as in `_use`.
        at = max(now - 1, self._now)
        for slot in reversed(slots):
            at += 1
            stamp[slot] = at
            used[slot // n] = at
        self._now = at
        self.policy.used(slots)

    def evict(self, slot: SlotIndex) -> None:
        """Drops a stored chunk that nobody holds; its slot is free."""
        self._expect(slot, SlotState.READY)
        if self._holds[slot]:
            raise IntegrityError(f"slot {slot} is evicted but held {self._holds[slot]} times")
        self._unlist(slot)
        self._make_free(slot)

    def forget_all(self) -> dict[ChunkKey, SlotIndex]:
        """Empties the index at once; returns the old one, for `discard` in slices."""
        old, self.index = self.index, {}
        self._orphans_of, self._missing_parent = {}, {}
        return old

    def discard(self, slot: SlotIndex, key: ChunkKey) -> None:
        """Drops one chunk of a forgotten index: freed now, or with its last hold."""
        if self._state[slot] != SlotState.READY or self._key[slot] is not key:
            return  # evicted meanwhile
        self._unlist(slot)
        if self._holds[slot]:
            self._state[slot] = SlotState.UNLISTED
        else:
            self._make_free(slot)

    # Inside.

    def _expect(self, slot: SlotIndex, *states: SlotState) -> None:
        if self._state[slot] not in states:
            wanted = " or ".join(s.name for s in states)
            raise IntegrityError(f"slot {slot} is {self.state(slot).name}, expected {wanted}")

    def _grant(self, slot: SlotIndex) -> SlotIndex:
        """The slot that was freed last in its row is taken."""
        row = self.row_of(slot)
        self._free[row].pop()
        if not self._free[row]:
            self._rows_with_free.discard(row)
        self._state[slot] = SlotState.GRANTED
        self.row_held[row] += 1
        return slot

    def _unheld(self, slot: SlotIndex) -> None:
        self.row_held[self.row_of(slot)] -= 1

    def _make_free(self, slot: SlotIndex) -> None:
        self._state[slot] = SlotState.FREE
        self._key[slot] = None
        row = self.row_of(slot)
        self._free[row].append(slot)
        self._rows_with_free.add(row)

    def _use(self, slot: SlotIndex, now: int) -> None:
        # Strictly rising, so that the order of use has no ties.
        self._now = now if now > self._now else self._now + 1
        self._stamp[slot] = self._now
        self.row_used_at[self.row_of(slot)] = self._now

    def _chain_to(self, slot: int) -> set[SlotIndex]:
        """This chunk and all that it builds on."""
        chain: set[SlotIndex] = set()
        while slot >= 0:
            chain.add(SlotIndex(slot))
            slot = self._parent[slot]
        return chain

    def _builds_on(self, slot: int, other: SlotIndex) -> bool:
        while slot >= 0 and slot != other:
            slot = self._parent[slot]
        return slot == other

    def _link(self, slot: SlotIndex, parent: SlotIndex) -> None:
        self._parent[slot] = parent
        head = self._first_child[parent]
        self._next_sibling[slot] = head
        self._previous_sibling[slot] = NO_SLOT
        if head >= 0:
            self._previous_sibling[head] = slot
        self._first_child[parent] = slot
        self._children[parent] += 1

    def _unlink(self, slot: SlotIndex) -> None:
        parent, after, before = self._parent[slot], self._next_sibling[slot], self._previous_sibling[slot]
        if before >= 0:
            self._next_sibling[before] = after
        else:
            self._first_child[parent] = after
        if after >= 0:
            self._previous_sibling[after] = before
        self._parent[slot] = self._next_sibling[slot] = self._previous_sibling[slot] = NO_SLOT
        self._children[parent] -= 1
        # A chunk was last used when anything built on it was.
        self._stamp[parent] = max(self._stamp[parent], self._stamp[slot])
        leaf = SlotIndex(parent)
        if not self._children[parent] and self.evictable(leaf):
            if leaf in self._missing_parent:
                self.policy.prefer(leaf)
            else:
                self.policy.offer(leaf)

    def _unlist(self, slot: SlotIndex) -> None:
        """Out of the index and out of its chain; what built on it becomes an orphan."""
        key = self._key[slot]
        if key is None:
            raise IntegrityError(f"slot {slot} holds a chunk without a key")
        listed = self.index.get(key) == slot
        if listed:
            del self.index[key]
        self.checksums.pop(slot, None)
        self.policy.gone(slot, key)
        if self._parent[slot] >= 0:
            self._unlink(slot)
        missing = self._missing_parent.pop(slot, None)
        if missing is not None:
            waiting = self._orphans_of[missing]
            waiting.discard(slot)
            if not waiting:
                del self._orphans_of[missing]
        child = self._first_child[slot]
        while child >= 0:
            orphan, child = SlotIndex(child), self._next_sibling[child]
            self._parent[orphan] = self._next_sibling[orphan] = self._previous_sibling[orphan] = NO_SLOT
            if listed:
                self._missing_parent[orphan] = key
                self._orphans_of.setdefault(key, set()).add(orphan)
                self._prefer_tails(orphan)
        self._first_child[slot] = NO_SLOT
        self._children[slot] = 0
        if listed:
            self._on_removed(key, self._stamp[slot])

    def _prefer_tails(self, root: SlotIndex) -> None:
        """Chunks below an orphan cannot be reached: their tails are the first candidates (I10)."""
        pending = [root]
        while pending:
            slot = pending.pop()
            child = self._first_child[slot]
            if child < 0:
                self.policy.prefer(slot)
            while child >= 0:
                pending.append(SlotIndex(child))
                child = self._next_sibling[child]

    # Sanity.

    def check_integrity(self) -> list[str]:
        """Every contradiction in the books, one line each; empty when they agree. O(slots)."""
        return [problem for part in table_problems(self) for problem in part]

    def held_slots(self) -> int:
        """Slots with at least one hold."""
        return sum(self.row_held) - self.count(SlotState.GRANTED) - self.count(SlotState.QUARANTINED)

    def count(self, state: SlotState) -> int:
        """How many slots are in this state."""
        return self._state.count(state)
