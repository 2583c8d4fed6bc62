"""The sanity of one namespace's slots, in parts that a living daemon can afford one at a time.

Each part compares what must agree at any moment between two calls, so that others may have their turn in
between. Looks at the table's own arrays, which nobody else does.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvhost_server.ids import ChunkKey, SlotIndex

if TYPE_CHECKING:
    from kvhost_server.slots import ChunkTable

VACANT, FREE, GRANTED, READY, QUARANTINED, UNLISTED = range(6)
_NAMES = ("VACANT", "FREE", "GRANTED", "READY", "QUARANTINED", "UNLISTED")
_SLOTS_A_PART = 2048
_KEYS_A_PART = 8192


def table_problems(table: "ChunkTable") -> Iterator[list[str]]:
    """Contradictions in the books of a table, part by part, one line each. O(slots) in all."""
    yield _rows_with_free(table)
    for row in range(len(table.rows)):
        yield _row(table, row)
        first, end = row * table.slots_per_row, (row + 1) * table.slots_per_row
        for start in range(first, end, _SLOTS_A_PART):
            yield _slots(table, row, range(start, min(start + _SLOTS_A_PART, end)))
    keys = list(table.index)
    for start in range(0, len(keys), _KEYS_A_PART):
        yield _index(table, keys[start : start + _KEYS_A_PART])
    missing = list(table._missing_parent)
    for start in range(0, len(missing), _KEYS_A_PART):
        yield _orphans(table, missing[start : start + _KEYS_A_PART])
    if sum(map(len, table._orphans_of.values())) != len(table._missing_parent):
        yield ["orphans and missing parents differ in number"]


def _rows_with_free(table: "ChunkTable") -> list[str]:
    if table._rows_with_free != {row for row, slots in enumerate(table._free) if slots}:
        return ["the rows with free slots are not those that have some"]
    return []


def _row(table: "ChunkTable", row: int) -> list[str]:
    """What is counted for a row as a whole."""
    problems: list[str] = []
    first, end = row * table.slots_per_row, (row + 1) * table.slots_per_row
    state, free = table._state, table._free[row]
    wanted = table.slots_per_row if table.rows[row] is None else 0
    if state.count(VACANT, first, end) != wanted:
        problems.append(
            f"row {row} of segment {table.rows[row]} has {state.count(VACANT, first, end)} vacant slots"
        )
    if len(set(free)) != len(free):
        problems.append(f"a slot of row {row} stands twice in its free list")
    wrong = [slot for slot in free if not first <= slot < end or state[slot] != FREE]
    if wrong or len(free) != state.count(FREE, first, end):
        problems.append(
            f"row {row} has {state.count(FREE, first, end)} free slots and {len(free)} in its free list, "
            f"which should not name {wrong[:8]}"
        )
    held = sum(map(bool, table._holds[first:end]))
    held += state.count(GRANTED, first, end) + state.count(QUARANTINED, first, end)
    if table.row_held[row] != held:
        problems.append(f"row {row} counts {table.row_held[row]} held slots, the slots say {held}")
    return problems


def _slots(table: "ChunkTable", row: int, slots: range) -> list[str]:
    problems: list[str] = []
    for slot in slots:
        state, holds = table._state[slot], table._holds[slot]
        stored = state in (READY, UNLISTED)
        if holds and not stored:
            problems.append(f"slot {slot} is {_NAMES[state]} but pinned {holds} times")
        if state == UNLISTED and not holds:
            problems.append(f"slot {slot} is unlisted and nobody holds it")
        if (table._key[slot] is not None) != stored:
            problems.append(f"slot {slot} is {_NAMES[state]} and its key is {table._key[slot]!r}")
        if table._parent[slot] >= 0:
            problems += _place_in_chain(table, slot)
        if table._children[slot]:
            problems += _children(table, slot)
    return problems


def _place_in_chain(table: "ChunkTable", slot: int) -> list[str]:
    parent, before = table._parent[slot], table._previous_sibling[slot]
    problems = []
    if table._state[parent] != READY:
        problems.append(f"slot {slot} builds on slot {parent}, which holds no chunk")
    if (table._next_sibling[before] if before >= 0 else table._first_child[parent]) != slot:
        problems.append(f"slot {slot} builds on slot {parent}, which does not know it")
    return problems


def _children(table: "ChunkTable", slot: int) -> list[str]:
    """Follows the list of children, as far as it should be long."""
    count, child = 0, table._first_child[slot]
    while child >= 0 and table._parent[child] == slot and count <= table._children[slot]:
        count, child = count + 1, table._next_sibling[child]
    if count != table._children[slot] or child >= 0:
        return [f"slot {slot} counts {table._children[slot]} children, its list has {count}"]
    return []


def _index(table: "ChunkTable", keys: list[ChunkKey]) -> list[str]:
    problems = []
    for key in keys:
        slot = table.index.get(key)
        if slot is not None and (table._state[slot] != READY or table._key[slot] != key):
            problems.append(f"the index names slot {slot} for a key it does not hold")
    return problems


def _orphans(table: "ChunkTable", slots: list[SlotIndex]) -> list[str]:
    problems = []
    for slot in slots:
        parent = table._missing_parent.get(slot)
        if parent is None:
            continue
        if parent in table.index:
            problems.append(f"slot {slot} misses a parent that is there")
        if slot not in table._orphans_of.get(parent, ()):
            problems.append(f"slot {slot} misses a parent that does not know it")
    return problems
