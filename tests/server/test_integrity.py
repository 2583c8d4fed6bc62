"""The books are compared with each other, in parts, with turns for others: what contradicts is found."""

from collections.abc import Callable

import pytest

from kvhost_server.integrity import problems_in_parts
from kvhost_server.slots import ChunkTable, SlotState
from tests.server.world import World, chain


@pytest.fixture
def world() -> World:
    """Two chains of which one branches, an orphan, a pinned chunk and grants."""
    world = World(segments=2, slots=16)
    engine = world.engine()
    engine.store(chain("a", 4))
    engine.store(chain("b", 2), parent=chain("a", 1)[0])
    engine.store(chain("o", 2), parent=chain("absent", 1)[0])
    engine.pin(chain("a", 2))
    engine.grants(1)
    world.check()
    return world


def table_of(world: World) -> ChunkTable:
    (namespace,) = world.books.namespaces.values()
    return namespace.table


def leaf(table: ChunkTable) -> int:
    return next(s for s in table.index.values() if table.parent(s) and not table.children(s))


def inner(table: ChunkTable) -> int:
    return next(s for s in table.index.values() if table.children(s))


def granted(table: ChunkTable) -> int:
    return table._state.index(SlotState.GRANTED)


def freed_twice(table: ChunkTable) -> None:
    row = min(table._rows_with_free)
    table._free[row].append(table._free[row][0])


def state(slot_of: Callable[[ChunkTable], int], wrong: SlotState) -> Callable[[ChunkTable], None]:
    def change(table: ChunkTable) -> None:
        table._state[slot_of(table)] = wrong

    return change


def count(name: str, slot_of: Callable[[ChunkTable], int]) -> Callable[[ChunkTable], None]:
    def change(table: ChunkTable) -> None:
        getattr(table, name)[slot_of(table)] += 1

    return change


WRONG: dict[str, Callable[[ChunkTable], object]] = {
    "a slot free twice": freed_twice,
    "a row without free slots": lambda table: table._rows_with_free.clear(),
    "a stored chunk that is free": state(leaf, SlotState.FREE),
    "a vacant slot": state(leaf, SlotState.VACANT),
    "a granted slot that is stored": state(granted, SlotState.READY),
    "a granted slot in quarantine": state(granted, SlotState.QUARANTINED),
    "an inner chunk without a listing": state(inner, SlotState.UNLISTED),
    "one hold too many": count("_holds", leaf),
    "a row that counts too many": count("row_held", lambda table: 0),
    "one child too many": count("_children", inner),
    "another first child": count("_first_child", inner),
    "another parent": lambda table: table._parent.__setitem__(leaf(table), leaf(table)),
    "a key that is lost": lambda table: table._key.__setitem__(leaf(table), None),
    "an index of nothing": lambda table: table.index.__setitem__(chain("x", 1)[0], granted(table)),
    "an orphan whose parent does not know it": lambda table: table._orphans_of.clear(),
    "a parent that waits for nobody": lambda table: table._missing_parent.clear(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_contradicts_is_found(world: World, wrong: str) -> None:
    WRONG[wrong](table_of(world))
    assert world.manager.check_integrity() != []


def test_holds_that_nobody_has(world: World) -> None:
    (session,) = world.books.sessions.values()
    session.pins.popitem()
    assert any("holders" in problem for problem in world.manager.check_integrity())


def test_grants_that_nobody_has(world: World) -> None:
    (session,) = world.books.sessions.values()
    session.grants.popitem()
    session.unassigned -= 1
    assert world.manager.check_integrity() == ["namespace 1: 1 slots are GRANTED, the books name 0"]


def test_between_two_parts_everything_may_change(world: World) -> None:
    """As in a daemon that goes on: chunks are stored, evicted, pinned and released meanwhile."""
    engine = world.engine()
    seen = 0
    for seen, part in enumerate(problems_in_parts(world.books), 1):
        assert part == []
        engine.store(chain(f"n{seen}", 3))
        engine.release(*engine.pin(chain(f"n{seen}", 3)).values())
        world.settle()
    assert seen > 5
    world.check()
