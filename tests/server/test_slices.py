"""Long calls in slices: the same as in one go, except that others have their turn in between."""

import asyncio

import pytest

from kvhost_server import slices
from kvhost_server.books import ServiceState
from kvhost_server.checks import ChunkRequest
from kvhost_server.errors import Code, Refused
from kvhost_server.slices import ITEMS_PER_SLICE
from kvhost_server.writing import Reservation, ReserveStatus
from tests.server.world import Engine, World, chain, key

MANY = 2 * ITEMS_PER_SLICE + 10


@pytest.fixture
def world() -> World:
    return World(segments=4, slots=4 * MANY)


@pytest.fixture
def engine(world: World) -> Engine:
    return world.engine()


def reserve(engine: Engine, count: int, chunks: list[ChunkRequest]) -> Reservation:
    return asyncio.run(slices.reserve(engine.manager, engine.session.secret, count, chunks))


def meanwhile(engine: Engine, count: int, chunks: list[ChunkRequest], act: object) -> Reservation:
    """The same, with something that happens after the first slice."""

    async def both() -> Reservation:
        long = asyncio.ensure_future(slices.reserve(engine.manager, engine.session.secret, count, chunks))
        await asyncio.sleep(0)
        act()  # type: ignore[operator]
        return await long

    return asyncio.run(both())


def test_slots_ahead_and_for_chunks(world: World, engine: Engine) -> None:
    requests = engine.requests(chain("a", MANY))
    given = reserve(engine, 20, requests)
    assert [status for status, _, _ in given.chunks] == [ReserveStatus.RESERVED] * MANY
    stores = [store for _, store, _ in given.chunks] + [store for store, _ in given.grants]
    assert len(given.grants) == 20
    assert stores == sorted(set(stores)) == list(engine.session.grants)
    slots = [slot for _, _, slot in given.chunks] + [slot for _, slot in given.grants]
    assert len(set(slots)) == MANY + 20
    world.check()


def test_a_malformed_chunk_at_the_end_changes_nothing(world: World, engine: Engine) -> None:
    requests = [*engine.requests(chain("a", MANY)), ChunkRequest(0, key("b")[:-1])]
    with pytest.raises(Refused, match="whole number of keys"):
        reserve(engine, 0, requests)
    assert not engine.session.grants
    world.check()


def test_a_bound_is_told_once_and_ends_it(world: World, engine: Engine) -> None:
    bound = world.books.bounds(engine.session).unassigned
    given = reserve(engine, 4 * bound, [])
    assert len(given.grants) == bound
    assert f"its bounds are {world.books.bounds(engine.session).grants} and {bound}" in given.reason
    world.check()


def test_the_session_ends_in_between(world: World, engine: Engine) -> None:
    number = engine.session.number
    with pytest.raises(Refused) as caught:
        meanwhile(
            engine, 0, engine.requests(chain("a", MANY)), lambda: engine.manager.end_session(number, "test")
        )
    assert caught.value.code == Code.NOT_FOUND
    world.settle()
    world.check()
    assert not world.books.custody.quarantines


def test_what_was_granted_before_the_daemon_drains_is_told(world: World, engine: Engine) -> None:
    requests = engine.requests(chain("a", MANY))
    given = meanwhile(engine, 0, requests, lambda: world.manager.set_state(ServiceState.DRAINING))
    status = [status for status, _, _ in given.chunks]
    assert status[:ITEMS_PER_SLICE] == [ReserveStatus.RESERVED] * ITEMS_PER_SLICE
    assert status[ITEMS_PER_SLICE:] == [ReserveStatus.NO_SPACE] * (MANY - ITEMS_PER_SLICE)
    assert "draining" in given.reason
    assert len(engine.session.grants) == ITEMS_PER_SLICE
    world.check()
