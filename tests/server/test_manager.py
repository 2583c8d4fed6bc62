"""What the manager promises, invariant by invariant (docs/design.md, section 4)."""

import gc
import time
import weakref

import pytest

from kvhost_server.books import ServiceState
from kvhost_server.checks import ChunkRequest
from kvhost_server.errors import Code, Refused
from kvhost_server.ids import MappingId, PinId, SegmentId, SessionNumber, StoreId
from kvhost_server.lending import SegmentState
from kvhost_server.namespace import Namespace, Semantics
from kvhost_server.notices import Ended, Mapped, Recall, Resync
from kvhost_server.reading import Found
from kvhost_server.slots import SlotState
from kvhost_server.stewardship import evict, namespace_named, reset_namespace, resize_pool, set_limits
from kvhost_server.writing import ReserveStatus
from tests.server.world import KEY_BYTES, Identity, World, chain, key, spec


@pytest.fixture
def world() -> World:
    return World()


def refused(code: Code, call: object, *args: object) -> str:
    with pytest.raises(Refused) as caught:
        call(*args)  # type: ignore[operator]
    assert caught.value.code is code
    return caught.value.message


# I2: commit publishes


def test_a_chunk_is_visible_only_after_commit(world: World) -> None:
    engine = world.engine()
    (store,) = engine.reserve([key("a")])
    assert engine.lookup([key("a")]) == 0
    assert engine.commit(store, key("a"))
    assert engine.lookup([key("a")]) == 1
    world.check()


def test_an_aborted_store_is_never_visible_and_its_slot_comes_back(world: World) -> None:
    engine = world.engine()
    (store,) = engine.reserve([key("a")])
    engine.manager.writing.abort(engine.session, store)
    assert engine.lookup([key("a")]) == 0
    assert "not held" in refused(Code.FAILED_PRECONDITION, engine.commit, store, key("a"))
    assert world.books.anomalies["stale_commit"] == 1
    world.check()


def test_the_first_commit_of_a_key_wins_and_the_other_slot_goes_back(world: World) -> None:
    first, second = world.engine(), world.engine()
    (store,) = first.grants(1)
    (other,) = second.grants(1)
    assert first.commit(store, key("a"))
    assert not second.commit(other, key("a"))
    assert world.books.counters["superseded_chunks"] == 1
    assert not first.session.grants
    assert not second.session.grants
    world.check()


def test_a_second_writer_of_a_key_is_told_that_it_is_being_written(world: World) -> None:
    first, second = world.engine(), world.engine()
    first.reserve([key("a")])
    given = second.manager.writing.reserve(second.session, 0, second.requests([key("a")]))
    assert given.chunks[0][0] is ReserveStatus.BEING_WRITTEN
    answer = second.manager.reading.lookup(second.session, 0, Semantics.PREFIX, key("a"), False)
    assert answer.found == bytes([Found.BEING_WRITTEN])


def test_a_stored_chunk_gets_no_second_slot(world: World) -> None:
    engine = world.engine()
    engine.store([key("a")])
    given = engine.manager.writing.reserve(engine.session, 0, engine.requests([key("a")]))
    assert given.chunks == [(ReserveStatus.EXISTS, 0, 0)]


# I3: a hit is a pin in hand


def test_a_pinned_chunk_survives_a_flood(world: World) -> None:
    engine, flood = world.engine(), world.engine()
    names = chain("a", 4)
    engine.store(names)
    assert len(engine.pin(names)) == 4
    for i in range(40):
        flood.store([key(f"f{i}")])
        world.check()
    assert engine.lookup(names) == 4


def test_everything_pinned_means_no_space_at_once_and_no_eviction(world: World) -> None:
    first, second, third = world.engine(), world.engine(), world.engine()
    names = chain("a", 16)
    assert first.store(names) == 16
    assert len(first.pin(names)) == 8, "half of the slots is one session's bound"
    answer = second.manager.reading.lookup(second.session, 1, Semantics.SET, b"".join(names[8:]), True)
    assert len(answer.slots) == 8
    given = third.manager.writing.reserve(third.session, 0, third.requests([key("x")]))
    assert given.chunks[0][0] is ReserveStatus.NO_SPACE
    assert "held" in given.reason
    second.release(PinId(answer.first_pin + 7))
    assert third.store([key("x")]) == 1
    world.check()


def test_the_pin_bound_is_told_key_by_key(world: World) -> None:
    engine = world.engine()
    names = chain("a", 16)
    engine.store(names)
    answer = engine.manager.reading.lookup(engine.session, 1, Semantics.SET, b"".join(names), True)
    assert answer.found == bytes([Found.YES] * 8 + [Found.PIN_BOUND] * 8)


# I4: reclaimed by proof


def test_slots_of_an_ended_session_wait_for_the_worker_s_answer(world: World) -> None:
    engine, other = world.engine(), world.engine()
    engine.reserve(chain("a", 4))
    assert world.manager.end_session(engine.session.number, "test") == 4
    names = chain("b", 16)
    assert other.manager.books.custody.quarantined_slots(engine.identity.instance_id) == 4
    for name in [*names, *names]:
        given = other.manager.writing.reserve(other.session, 0, other.requests([name]))
        if given.chunks[0][1]:
            other.commit(given.chunks[0][1], name)
        world.settle(fences=False)
    assert other.lookup(names, 1, Semantics.SET) == 12
    world.check()
    world.settle()
    assert other.manager.books.custody.quarantined_slots(engine.identity.instance_id) == 0
    assert other.store(chain("c", 4)) == 4
    world.check()


def test_the_end_of_the_worker_is_proof_and_a_lost_connection_is_not(world: World) -> None:
    engine = world.engine()
    engine.reserve(chain("a", 4))
    world.manager.worker_disconnected(engine.workers[0])
    world.manager.end_session(engine.session.number, "test")
    world.settle()
    assert world.books.custody.quarantined_slots(engine.identity.instance_id) == 4
    world.manager.worker_ended(engine.workers[0])
    assert world.books.custody.quarantined_slots(engine.identity.instance_id) == 0
    world.check()


def test_an_old_fence_proves_nothing_about_a_later_one(world: World) -> None:
    engine = world.engine()
    stores = engine.reserve(chain("a", 2))
    engine.manager.writing.abort(engine.session, stores[0], [0])
    (mapping, fence, below, ids) = world.outbox.fences.popleft()
    assert (below, ids) == (0, [stores[0]])
    engine.manager.writing.abort(engine.session, stores[1], [0])
    world.manager.worker_fenced(mapping, fence)
    assert len(world.books.custody.quarantines) == 1
    world.settle()
    assert not world.books.custody.quarantines
    world.check()


def test_a_fence_that_was_never_sent_is_refused(world: World) -> None:
    engine = world.engine()
    assert "never sent" in refused(Code.INVALID_ARGUMENT, world.manager.worker_fenced, engine.workers[0], 1)
    assert world.books.anomalies["false_fence"] == 1


def test_a_stuck_reader_keeps_its_chunk_readable_and_not_evictable(world: World) -> None:
    engine, other = world.engine(), world.engine()
    engine.store([key("a")])
    engine.pin([key("a")])
    world.manager.end_session(engine.session.number, "test")
    world.settle(fences=False)
    for i in range(40):
        given = other.manager.writing.reserve(other.session, 0, other.requests([key(f"f{i}")]))
        if given.chunks[0][1]:
            other.commit(given.chunks[0][1], key(f"f{i}"))
        world.settle(fences=False)
    assert world.books.counters["evicted_chunks"] > 10
    assert other.lookup([key("a")]) == 1
    world.settle()
    assert evict(world.books, namespace_named(world.books, ""), [key("a")]) == (1, 0, 0)
    world.check()


# I5: holds belong to an owner


def test_pins_of_earlier_sessions_count_until_their_workers_are_quiet(world: World) -> None:
    engine = world.engine()
    engine.store(chain("a", 16))
    assert len(engine.pin(chain("a", 16))) == 8
    for _ in range(3):
        engine.open()
        assert not engine.pin(chain("a", 16)[8:])
    world.settle()
    assert len(engine.pin(chain("a", 16)[8:])) == 8
    world.check()


def test_an_abort_that_names_no_rank_of_ours_is_refused(world: World) -> None:
    engine = world.engine()
    (store,) = engine.reserve([key("a")])
    refused(Code.INVALID_ARGUMENT, world.manager.writing.abort, engine.session, store, [1])
    world.manager.writing.abort(engine.session, store, [0])
    assert world.books.quarantined(engine.session) == 1
    world.settle()
    assert not world.books.quarantined(engine.session)
    world.check()


def test_many_quarantines_cost_each_no_more_than_few() -> None:
    """One entry for every aborted store: no sum over all of them, and no search through them."""

    def cost(stores: int) -> float:
        world = World(segments=128, slots=256)
        engine = world.engine()
        for i in range(stores):
            world.settle(fences=False)
            (store,) = engine.reserve([key(i)])
            world.manager.writing.abort(engine.session, store, [0])
        # A collection looks at all that other tests have imported, which takes longer than what is timed.
        gc.collect()
        gc.disable()
        began = time.process_time()
        for _ in range(stores // 10):
            engine.grants(1)
        world.manager.worker_ended(engine.workers[0])
        took = time.process_time() - began
        gc.enable()
        assert not world.books.custody.quarantines
        world.check()
        return took

    assert cost(6400) < 8 * 3 * cost(800)


def test_foreign_and_second_releases_change_nothing(world: World) -> None:
    first, second = world.engine(), world.engine()
    first.store([key("a")])
    pins = first.pin([key("a")])
    held = second.pin([key("a")])
    first.release(*pins.values())
    for _ in range(2):
        refused(Code.NOT_FOUND, first.release, *pins.values())
    refused(Code.NOT_FOUND, first.release, *held.values())
    assert world.books.anomalies["double_release"] == 3
    table = namespace_named(world.books, "").table
    assert table.holds(table.index[key("a")]) == 1
    world.check()


def test_foreign_stale_and_second_commits_are_refused(world: World) -> None:
    first, second = world.engine(), world.engine()
    (store,) = first.grants(1)
    refused(Code.FAILED_PRECONDITION, second.commit, store, key("a"))
    first.commit(store, key("a"))
    refused(Code.FAILED_PRECONDITION, first.commit, store, key("b"))
    assert first.lookup([key("b")]) == 0
    assert world.books.anomalies["stale_commit"] == 2
    world.check()


def test_ids_of_another_boot_name_nothing() -> None:
    """A client that keeps an id over the daemon's restart must not hit a grant or a pin of the new one."""
    ids: list[set[int]] = []
    for boot in (0x1234567_89ABCDEF, 0x1234567_89ABCDF0):
        world = World(boot_id=boot)
        engine = world.engine()
        engine.store(chain("a", 4))
        ids.append({*engine.pin(chain("a", 4)).values(), *engine.grants(2)})
    assert not ids[0] & ids[1]
    assert max(*ids[0], *ids[1]) < 1 << 63


def test_a_session_holds_at_most_a_quarter_of_the_slots(world: World) -> None:
    engine = world.engine()
    given = engine.manager.writing.reserve(engine.session, 0, engine.requests(chain("a", 10)))
    statuses = [status for status, _, _ in given.chunks]
    assert statuses == [ReserveStatus.RESERVED] * 4 + [ReserveStatus.BOUND] * 6
    assert len(engine.grants(8)) == 0
    world.check()


def test_slots_taken_ahead_shrink_with_the_number_of_sessions() -> None:
    world = World(segments=8, slots=8)
    first = world.engine()
    assert len(first.grants(100)) == 8
    second = world.engine()
    assert len(second.grants(100)) == 4
    world.check()


def test_assigning_a_grant_makes_room_for_another_one(world: World) -> None:
    engine = world.engine()
    (first, second) = engine.grants(5)
    engine.manager.writing.assign(engine.session, first, ChunkRequest(0, key("a")))
    assert len(engine.grants(5)) == 1
    message = refused(Code.INVALID_ARGUMENT, engine.commit, first, key("b"))
    assert "assigned to another chunk" in message
    refused(
        Code.FAILED_PRECONDITION,
        engine.manager.writing.assign,
        engine.session,
        first,
        ChunkRequest(0, key("c")),
    )
    engine.manager.writing.abort(engine.session, second)
    world.check()


def test_unused_grants_are_recalled_when_another_engine_finds_no_room() -> None:
    world = World(segments=1, slots=8)
    hoarder, other = world.engine(), world.engine()
    hoarder.grants(4)
    blocked = world.engine()
    for i in range(8):
        other.manager.writing.reserve(other.session, 0, other.requests([key(f"o{i}")]))
        blocked.manager.writing.reserve(blocked.session, 0, blocked.requests([key(f"b{i}")]))
    assert any(isinstance(n, Recall) for n in world.notices_of(hoarder.session))
    world.check()


# I7: owners die


def test_after_the_end_of_an_engine_nothing_of_it_is_left(world: World) -> None:
    engine, other = world.engine(), world.engine()
    other.store(chain("o", 2))
    held = other.pin(chain("o", 2))
    engine.store(chain("a", 3))
    engine.pin(chain("a", 3))
    engine.reserve(chain("b", 2))
    world.manager.end_session(engine.session.number, "its process ended")
    world.manager.worker_ended(engine.workers[0])
    world.check()
    status = namespace_named(world.books, "")
    assert not world.books.custody.quarantines
    assert engine.workers[0] not in world.books.custody.mappings
    table = status.table
    assert sum(table.holds(slot) for slot in table.index.values()) == 2
    assert other.lookup(chain("b", 2)) == 0
    assert other.store(chain("b", 2)) == 2
    other.release(*held.values())
    world.check()


def test_a_session_that_opens_again_takes_its_living_workers_over(world: World) -> None:
    engine = world.engine()
    engine.store([key("a")])
    engine.reserve([key("b")])
    engine.open()
    assert world.books.anomalies["session_replaced"] == 1
    assert engine.lookup([key("a")]) == 1
    world.settle()
    assert not world.books.custody.quarantines
    assert engine.store([key("b")]) == 1
    world.check()


def test_another_user_cannot_take_an_instance_over(world: World) -> None:
    engine = world.engine()
    thief = Identity(engine.identity.instance_id, uid=2000)
    refused(Code.PERMISSION_DENIED, world.manager.open_session, thief, "thief")
    assert engine.session.number in world.books.sessions


# I6, handover: tokens, ranks


def test_nothing_is_granted_or_found_before_every_rank_has_mapped() -> None:
    world = World()
    first = world.engine()
    first.store([key("a")])
    late = world.engine(spec(ranks=2), attach=False)
    late.say_hello()
    late.open()
    mapping, assignments = world.outbox.offers.popleft()
    world.manager.worker_mapped(mapping, [a.segment_id for a in assignments])
    given = late.manager.writing.reserve(late.session, 1, [])
    assert given.grants == []
    assert given.pending
    assert "1 of 2 ranks" in given.reason
    world.settle()
    assert isinstance(world.notices_of(late.session)[-1], Mapped)
    assert late.session.ready
    assert late.store([key("a")]) == 1
    world.check()


def test_hits_wait_for_the_segment_they_lie_in() -> None:
    world = World(segments=2, slots=2)
    first, second = world.engine(), world.engine(attach=False)
    second.say_hello()
    first.store(chain("a", 1))
    second.open()
    mapping, assignments = world.outbox.offers.popleft()
    assert second.lookup(chain("a", 1)) == 0, "not mapped yet"
    world.manager.worker_mapped(mapping, [a.segment_id for a in assignments])
    assert second.lookup(chain("a", 1)) == 1


def test_a_token_is_good_once(world: World) -> None:
    engine = world.engine()
    hello = world.manager.worker_hello
    message = refused(
        Code.ALREADY_EXISTS, hello, engine.identity.instance_id, 0, 1, engine.tokens[0], engine.identity
    )
    assert "used before" in message
    world.manager.worker_ended(engine.workers[0])
    refused(Code.ALREADY_EXISTS, hello, engine.identity.instance_id, 0, 1, engine.tokens[0], engine.identity)
    refused(Code.INVALID_ARGUMENT, hello, engine.identity.instance_id, 0, 1, b"short", engine.identity)
    world.check()


def test_a_token_of_another_engine_opens_nothing(world: World) -> None:
    victim, thief = world.engine(), world.engine(spec(model="other"))
    message = refused(
        Code.PERMISSION_DENIED, world.manager.declare, thief.session, thief.spec, [(0, victim.tokens[0])]
    )
    assert "another engine" in message
    world.check()


def test_a_worker_says_only_what_it_was_offered(world: World) -> None:
    engine = world.engine()
    world.manager.worker_mapped(engine.workers[0], [SegmentId(999)])
    assert world.books.anomalies["foreign_segment"] == 1
    world.check()


def test_too_many_workers_without_a_session_are_refused(world: World) -> None:
    for i in range(256):
        engine = world.engine(attach=False)
        engine.say_hello()
        assert i < 256
    refused(Code.RESOURCE_EXHAUSTED, world.engine(attach=False).say_hello)


# I10: prefix order


def test_the_tail_of_the_older_chain_goes_first(world: World) -> None:
    engine = world.engine()
    engine.store(chain("a", 10))
    engine.store(chain("b", 8))
    assert engine.lookup(chain("a", 10)) == 8
    assert engine.lookup(chain("b", 8)) == 8
    world.check()


def test_a_touched_chain_outlives_the_other(world: World) -> None:
    engine = world.engine()
    engine.store(chain("a", 8))
    engine.store(chain("b", 8))
    engine.manager.reading.touch(engine.session, 0, b"".join(chain("a", 8)))
    engine.store(chain("c", 6))
    assert engine.lookup(chain("a", 8)) == 8
    assert engine.lookup(chain("b", 8)) == 2
    world.check()


def test_a_prompt_larger_than_the_pool_keeps_its_head(world: World) -> None:
    engine = world.engine()
    assert engine.store(chain("a", 40)) == 16
    assert engine.lookup(chain("a", 40)) == 16
    # What is stored next takes the tail, not the head.
    assert engine.store(chain("b", 4)) == 4
    assert engine.lookup(chain("a", 40)) == 12
    world.check()


def test_orphans_are_the_first_candidates_and_find_their_parent_again(world: World) -> None:
    engine, reader = world.engine(), world.engine()
    engine.store(chain("a", 3))
    engine.store(chain("b", 10))
    table = namespace_named(world.books, "").table
    table.evict(table.index[key("a0000")])
    world.check()
    engine.store([key("a0000")])
    assert engine.lookup(chain("a", 3)) == 3
    table.evict(table.index[key("a0000")])
    engine.store(chain("c", 3))
    assert engine.lookup(chain("b", 10)) == 10
    reader.store(chain("d", 2))
    assert reader.lookup(chain("b", 10)) == 10
    assert reader.lookup([key("a0002")], 1, Semantics.SET) == 0
    world.check()


def test_when_every_leaf_is_held_the_oldest_inner_chunk_goes(world: World) -> None:
    first, second = world.engine(), world.engine()
    names = chain("a", 16)
    first.store(names)
    tail = second.manager.reading.lookup(second.session, 1, Semantics.SET, names[-1], True)
    assert second.store([key("x")]) == 1
    assert first.lookup(names) == 0, "the head was the oldest chunk that nobody held"
    second.release(PinId(tail.first_pin))
    world.check()


def test_chunks_that_claim_to_build_on_each_other_do_no_harm(world: World) -> None:
    engine = world.engine()
    engine.store([key("a")], parent=key("b"))
    engine.store([key("b")], parent=key("a"))
    engine.store([key("c")], parent=key("c"))
    world.check()
    engine.store(chain("d", 20))
    world.check()


def test_chunks_of_windowed_groups_have_no_parents(world: World) -> None:
    engine = world.engine()
    (store,) = engine.grants(1)
    engine.commit(store, key("w", 1), key("v", 1), group=1)
    table = namespace_named(world.books, "").table
    assert table.parent(table.index[key("w", 1)]) is None


# Namespaces and segments


def test_equal_specs_share_and_different_ones_never_do(world: World) -> None:
    first, second, other = world.engine(), world.engine(), world.engine(spec(model="other"))
    first.store([key("a")])
    assert second.lookup([key("a")]) == 1
    assert other.lookup([key("a")]) == 0
    segments = {s: loan.namespace for s, loan in world.books.lending.loans.items()}
    assert len({id(n) for n in segments.values()}) == 2
    world.check()


@pytest.mark.parametrize(
    "parts", [{"dtype": "bf16"}, {"rope": 2}, {"rope": "2"}, {"rope": True}, {"layout": "HND"}]
)
def test_every_part_of_the_digest_counts_with_its_type(parts: dict[str, object]) -> None:
    others = [spec(), spec(rope=1), spec(ranks=2), spec(model="n"), spec(dtype="f16")]
    assert spec(**parts).digest() not in {other.digest() for other in others}
    assert spec(**parts).digest() == spec(**parts).digest()


def test_a_namespace_without_room_takes_the_segment_used_longest_ago(world: World) -> None:
    old = world.engine()
    assert old.store(chain("a", 16)) == 16
    world.time += 10
    young = world.engine(spec(model="young"))
    world.settle()
    assert world.books.lending.free_segments == 0
    assert young.store(chain("y", 4)) == 4
    assert old.lookup(chain("a", 16), 1, Semantics.SET) == 12
    world.check()


def test_a_segment_moves_only_after_every_worker_let_go_and_it_was_zeroed(world: World) -> None:
    old = world.engine()
    old.store(chain("a", 16))
    world.time += 10
    young = world.arriving(spec(model="young"))
    (mapping, segments) = world.outbox.retires.popleft()
    assert mapping == old.workers[0]
    assert not world.outbox.cleans
    world.manager.worker_retired(mapping, segments)
    assert world.outbox.cleans
    assert not world.outbox.offers
    world.manager.segment_clean(world.outbox.cleans.popleft())
    assert world.outbox.offers[0][0] == young.workers[0]
    world.settle()
    assert young.store([key("y")]) == 1
    world.check()


def test_an_engine_that_came_while_everything_was_held_gets_a_segment_later(world: World) -> None:
    holders = [world.engine() for _ in range(2)]
    names = chain("a", 16)
    assert holders[0].store(names) == 16
    pins = [
        holder.manager.reading.lookup(holder.session, 1, Semantics.SET, b"".join(part), True).first_pin
        for holder, part in zip(holders, (names[:8], names[8:]), strict=True)
    ]
    late = world.engine(spec(model="late"))
    world.manager.tend()
    world.settle()
    assert not late.session.ready
    holders[0].release(*(PinId(pins[0] + i) for i in range(8)))
    world.manager.tend()
    world.settle()
    assert late.session.ready
    assert late.store([key("l")]) == 1
    world.check()


def test_held_segments_and_floors_are_not_taken(world: World) -> None:
    old = world.engine()
    old.store(chain("a", 16))
    set_limits(world.books, world.manager.attachment, namespace_named(world.books, ""), 4 * 4 * 4096, None)
    world.time += 10
    young = world.engine(spec(model="young"))
    assert young.store([key("y")]) == 0
    set_limits(world.books, world.manager.attachment, namespace_named(world.books, "1"), 0, 8 * 4096)
    world.check()  # before any worker has let go
    world.settle()
    assert namespace_named(world.books, "1").segments == 2
    assert young.store([key("y")]) == 1
    world.check()


def test_a_smaller_pool_gives_back_what_is_free_then_what_was_used_longest_ago(world: World) -> None:
    engine = world.engine()
    assert engine.store(chain("a", 4)) == 4
    world.time += 10
    assert engine.store(chain("b", 4)) == 4
    world.settle()
    size = world.books.lending.segment_bytes
    assert world.books.lending.free_segments == 1  # the engine has taken one ahead
    resize_pool(world.books, world.manager.attachment, 2 * size)
    assert len(world.outbox.releases) == 1  # the free one needs nobody's consent
    world.settle()
    assert len(world.outbox.releases) == 2  # the one without chunks goes before older ones with
    assert engine.lookup(chain("a", 4), 1, Semantics.SET) == 4
    resize_pool(world.books, world.manager.attachment, size)
    assert len(world.outbox.releases) == 2  # the worker has not let go yet
    world.settle()
    assert len(world.outbox.releases) == 3
    assert world.books.lending.segments == 1
    assert engine.lookup(chain("a", 4), 1, Semantics.SET) == 0
    assert engine.lookup(chain("b", 4), 1, Semantics.SET) == 4
    assert world.manager.check_integrity() == []


def test_a_smaller_pool_waits_for_what_is_held(world: World) -> None:
    engine = world.engine()
    names = chain("a", 4)
    engine.store(names)
    pins = engine.manager.reading.lookup(engine.session, 1, Semantics.SET, b"".join(names), True).first_pin
    other = world.engine(spec(model="other"))
    other.store(chain("o", 4))
    size = world.books.lending.segment_bytes
    resize_pool(world.books, world.manager.attachment, size)
    world.settle()
    assert world.books.lending.segments == 1  # the pinned one, whoever was used last
    assert engine.lookup(names, 1, Semantics.SET) == 4
    # What is free above the budget is not lent again.
    assert other.store([key("p")]) == 0
    engine.release(*(PinId(pins + i) for i in range(4)))
    world.check()


def test_a_larger_pool_is_used_as_soon_as_there_is_memory(world: World) -> None:
    engine = world.engine()
    engine.store(chain("a", 16))
    size = world.books.lending.segment_bytes
    resize_pool(world.books, world.manager.attachment, 6 * size)
    assert list(world.outbox.populates) == [4, 5]
    world.manager.segment_ready(world.outbox.populates.popleft())
    engine.reserve([key("b")])  # finds nothing free in what is mapped: the namespace grows
    world.settle()
    assert engine.store([key("b")]) == 1
    assert engine.lookup(chain("a", 16), 1, Semantics.SET) == 16
    world.manager.segments_missing([world.outbox.populates.popleft()])
    assert (world.books.lending.budget, world.books.lending.segments) == (5, 5)
    world.check()


def test_a_pool_below_a_segment_or_the_floors_is_refused(world: World) -> None:
    world.engine().store(chain("a", 16))
    with pytest.raises(Refused, match="at least, one segment"):
        resize_pool(world.books, world.manager.attachment, 0)
    set_limits(world.books, world.manager.attachment, namespace_named(world.books, ""), 3 * 4 * 4096, None)
    with pytest.raises(Refused, match="floors: 3 segments"):
        resize_pool(world.books, world.manager.attachment, 2 * 4 * 4096)
    assert world.books.lending.segments == 4


def test_a_large_reservation_in_a_full_pool_looks_for_a_segment_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That costs as much as there are segments: a thousand in a terabyte."""
    engine = world.engine()
    engine.store(chain("a", 16))
    looks: list[object] = []
    steal = world.books.lending.steal_for
    monkeypatch.setattr(world.books.lending, "steal_for", lambda n: (looks.append(n), steal(n))[1])
    assert len(engine.reserve(chain("b", 4))) == 4
    assert len(looks) == 1
    # Another call looks again: meanwhile there may be something.
    assert engine.reserve([key("c")]) == []
    world.manager.writing.abort(engine.session, next(iter(engine.session.grants)))
    engine.reserve([key("c")])
    assert len(looks) <= 3
    world.check()


def test_a_stopped_worker_bars_nobody_from_the_segments_of_others() -> None:
    """What it has mapped cannot move before it lets go; what others have, can."""
    world = World(segments=4, slots=4)
    stopped = world.engine()
    stopped.store(chain("s", 8))
    world.time += 10
    living = world.engine(spec(model="living"))
    living.store(chain("l", 8))
    world.stopped.update(stopped.workers)
    retired = world.books.counters["segments_retired"]
    young = world.engine(spec(model="young"))
    assert namespace_named(world.books, "1").segments == 1, "the oldest segment was chosen"
    assert young.store([key("y")]) == 0
    world.time += 0.5
    assert young.store([key("y")]) == 0
    world.time += 1.0
    assert young.store([key("y")]) == 1, "the next one was chosen"
    assert world.books.counters["segments_retired"] == retired + 2
    # From now on it is known to be slow: nobody waits for it again.
    another = world.engine(spec(model="another"))
    assert another.store([key("n")]) == 1
    assert namespace_named(world.books, "1").segments == 1
    # It wakes up, and what it kept is used again.
    for mapping in world.stopped:
        world.manager.worker_retired(mapping, list(world.books.custody.mappings[mapping].segments))
    world.stopped.clear()
    world.settle()
    assert SegmentState.RETIRING not in world.books.lending.states
    world.check()


def test_where_only_a_stopped_worker_has_segments_one_of_them_is_awaited() -> None:
    world = World(segments=2, slots=4)
    stopped = world.engine()
    stopped.store(chain("s", 8))
    world.stopped.update(stopped.workers)
    young = world.engine(spec(model="young"))
    for _ in range(5):
        world.time += 2
        assert young.store([key("y")]) == 0
    assert namespace_named(world.books, "1").segments == 1, "one is enough"
    world.manager.worker_ended(stopped.workers[0])
    world.settle()
    assert young.store([key("y")]) == 1
    world.check()


def test_a_slot_larger_than_a_segment_is_refused_with_the_remedy() -> None:
    world = World(segments=1, slots=1)
    engine = world.engine(spec(ranks=2), attach=False)
    assert "--segment-size" in refused(Code.FAILED_PRECONDITION, engine.open)


# I12, resets


def test_after_a_reset_the_engine_sees_nothing_old_and_others_keep_theirs(world: World) -> None:
    engine, other = world.engine(), world.engine()
    engine.store(chain("a", 4))
    (store,) = engine.reserve([key("e")])
    pins = engine.pin(chain("a", 2))
    world.manager.reset_session(engine.session, "")
    refused(Code.FAILED_PRECONDITION, engine.commit, store, key("e"))
    world.settle()
    assert engine.lookup([*chain("a", 4)]) == 0
    assert engine.lookup([key("e")]) == 0
    assert other.lookup(chain("a", 4)) == 4
    engine.release(*pins.values())
    assert engine.store(chain("n", 2)) == 2
    assert other.lookup(chain("n", 2)) == 0
    world.check()


def test_namespaces_that_are_empty_and_unused_are_forgotten(world: World) -> None:
    engine = world.engine()
    for _ in range(20):
        world.manager.reset_session(engine.session, "")
        world.settle()
        assert engine.store(chain("a", 2)) == 2
    assert len(world.books.namespaces) <= 6
    world.check()


def test_a_forgotten_namespace_is_freed_without_a_collection(world: World) -> None:
    """What lives is left out of collections when a namespace comes: a circle would stay for ever."""
    engine = world.engine()
    world.manager.reset_session(engine.session, "")
    world.settle()
    parts = [weakref.ref(part) for part in namespace_parts(engine.session.namespace)]
    engine.store(chain("a", 2))
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            world.manager.reset_session(engine.session, "")
            world.settle()
            engine.store(chain("a", 2))
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()
    world.check()


def namespace_parts(namespace: Namespace | None) -> list[object]:
    """A namespace, and what it has that is large."""
    assert namespace is not None
    return [namespace, namespace.table, namespace.table.policy]


def test_an_engine_that_resets_often_takes_nothing_from_others(world: World) -> None:
    """What it leaves is of no use to anybody: that is what its next namespace gets."""
    other, engine = world.engine(), world.engine()
    world.manager.reset_session(engine.session, "")
    world.settle()
    assert other.store(chain("o", 12)) == 12
    assert world.books.lending.free_segments == 0
    for number in range(20):
        assert engine.store(chain(f"e{number}", 3)) == 3
        # What was just stored is newer than anything of the other one's.
        world.time += 0.1
        for _ in range(1 + number % 2):
            world.manager.reset_session(engine.session, "")
        world.settle()
        assert engine.session.ready
        assert other.lookup(chain("o", 12)) == 12
    world.check()


def test_what_a_reset_leaves_held_is_awaited_for_a_moment(world: World) -> None:
    other, engine = world.engine(), world.engine()
    world.manager.reset_session(engine.session, "")
    world.settle()
    other.store(chain("o", 12))
    engine.reserve([key("e")])
    world.manager.reset_session(engine.session, "")
    world.settle(fences=False)
    assert not engine.session.ready
    # Its workers answer: what was left is free, and comes without anybody asking again.
    world.settle()
    world.settle()
    assert engine.session.ready
    assert other.lookup(chain("o", 12)) == 12
    engine.reserve([key("e")])
    world.manager.reset_session(engine.session, "")
    world.settle(fences=False)
    world.time += 1.1
    world.manager.tend()
    world.settle(fences=False)
    assert engine.session.ready
    assert other.lookup(chain("o", 12)) == 0
    world.settle()
    world.check()


def test_what_a_pinned_load_held_at_a_reset_is_taken_before_anything_of_others(world: World) -> None:
    other, engine = world.engine(), world.engine()
    world.manager.reset_session(engine.session, "")
    world.settle()
    other.store(chain("o", 12))
    engine.store(chain("e", 2))
    pins = engine.pin(chain("e", 2))
    world.manager.reset_session(engine.session, "")
    world.settle()
    assert not engine.session.ready
    engine.release(*pins.values())
    # Later than anybody waits, and it is still there.
    world.time += 5
    world.manager.tend()
    world.settle()
    assert engine.session.ready
    assert other.lookup(chain("o", 12)) == 12
    world.check()


def test_a_segment_that_does_not_come_is_not_awaited_for_ever(world: World) -> None:
    """Zeroing failed: it stays out of use."""
    owner = world.engine()
    owner.store(chain("a", 16))
    world.time += 10
    late = world.arriving(spec(model="late"))
    mapping, segments = world.outbox.retires.popleft()
    world.manager.worker_retired(mapping, segments)
    world.outbox.cleans.clear()
    for ready in (False, True):
        world.time += 0.6
        world.manager.tend()
        world.settle()
        assert late.session.ready is ready
    world.check()


def test_memory_that_is_being_allocated_is_not_awaited_for_ever(world: World) -> None:
    owner = world.engine()
    owner.store(chain("a", 16))
    resize_pool(world.books, world.manager.attachment, 5 * 4 * 4096)
    late = world.engine(spec(model="late"))
    assert not late.session.ready
    world.time += 1.1
    world.manager.tend()
    world.settle()
    assert late.session.ready
    world.check()


def test_an_engine_that_leaves_waits_for_nothing_any_more(world: World) -> None:
    """Its next namespace gets what was on the way, and nobody loses a second segment for it."""
    other = world.engine()
    other.store(chain("o", 16))
    engine = world.arriving(spec(model="e"))
    world.manager.reset_session(engine.session, "2")
    world.manager.reset_session(engine.session, "3")
    gone = world.arriving(spec(model="gone"))
    world.manager.end_session(gone.session.number, "it died")
    world.settle()
    assert engine.session.ready
    assert not any(n.segments for n in world.books.namespaces.values() if not n.sessions)
    assert other.lookup(chain("o", 16), 1, Semantics.SET) >= 8
    world.check()


def test_a_long_chain_is_left_in_slices(world: World) -> None:
    """To drop thousands of chunks, each with all that builds on it, would stop everybody."""
    large = World(segments=4, slots=2000)
    engine = large.engine()
    large.manager.reset_session(engine.session, "")
    large.settle()
    assert engine.store(chain("a", 6000)) == 6000
    left = engine.session.namespace
    assert left is not None
    began = time.process_time()
    large.manager.reset_session(engine.session, "")
    assert time.process_time() - began < 0.5
    assert not left.table.index
    counted = large.books.counters
    assert counted["committed_chunks"] == counted["evicted_chunks"] == 6000
    large.settle()
    assert engine.session.ready
    large.check()


def test_a_named_namespace_keeps_what_it_has_when_its_engines_leave(world: World) -> None:
    engine = world.engine()
    engine.store(chain("a", 4))
    world.manager.reset_session(engine.session, "step 2")
    world.settle()
    assert engine.store(chain("b", 4)) == 4
    world.manager.reset_session(engine.session, "step 3")
    world.settle()
    assert world.engine().lookup(chain("a", 4)) == 4
    world.manager.reset_session(engine.session, "step 2")
    world.settle()
    assert engine.lookup(chain("b", 4)) == 4
    # An engine may come back to what it alone can name, as long as it did not leave it for other weights.
    world.manager.reset_session(engine.session, "unnamed 1")
    world.settle()
    engine.store(chain("c", 2))
    world.manager.reset_session(engine.session, "unnamed 1")
    assert engine.lookup(chain("c", 2)) == 2
    world.manager.reset_session(engine.session, "step 2")
    world.settle()
    world.manager.reset_session(engine.session, "unnamed 1")
    world.settle()
    assert engine.lookup(chain("c", 2)) == 0
    assert engine.store(chain("c", 2)) == 2
    world.check()


def test_two_resets_in_a_row_and_a_shared_weights_version(world: World) -> None:
    first, second = world.engine(), world.engine()
    world.manager.reset_session(first.session, "")
    world.manager.reset_session(first.session, "step 2")
    world.manager.reset_session(second.session, "step 2")
    world.settle()
    first.store([key("a")])
    assert second.lookup([key("a")]) == 1
    world.check()


def test_resetting_a_namespace_drops_all_and_voids_what_is_being_written(world: World) -> None:
    engine = world.engine()
    engine.store(chain("a", 3))
    pins = engine.pin(chain("a", 1))
    (store,) = engine.reserve([key("e")])
    namespace = namespace_named(world.books, "")
    assert reset_namespace(world.books, namespace) == 3
    assert engine.lookup(chain("a", 3)) == 0
    refused(Code.FAILED_PRECONDITION, engine.commit, store, key("e"))
    world.check()
    assert isinstance(world.notices_of(engine.session)[-1], Resync)
    assert engine.store(chain("a", 3)) == 3
    slot = engine.session.pins[next(iter(pins.values()))]
    assert namespace.table.state(slot) is SlotState.UNLISTED
    engine.release(*pins.values())
    assert namespace.table.state(slot) is SlotState.FREE
    world.check()


def test_a_hole_in_a_segment_drops_its_namespace_only(world: World) -> None:
    engine, other = world.engine(), world.engine(spec(model="other"))
    engine.store([key("a")])
    other.store([key("a")])
    loan = world.books.lending.loans_of(namespace_named(world.books, "1"))[0]
    world.manager.hole_detected(loan.pool_index)
    assert engine.lookup([key("a")]) == 0
    assert other.lookup([key("a")]) == 1
    assert world.books.anomalies["hole_detected"] == 1
    world.check()


# States of the daemon, bad input


def test_while_starting_sessions_open_lookups_miss_and_grants_are_unavailable() -> None:
    world = World(serving=False)
    engine = world.engine()
    assert engine.lookup([key("a")]) == 0
    assert "starting" in refused(Code.UNAVAILABLE, engine.grants, 1)
    for index in range(4):
        world.manager.segment_ready(index)
    world.manager.set_state(ServiceState.SERVING)
    engine.manager.writing.reserve(engine.session, 1, [])
    world.settle()
    assert engine.store([key("a")]) == 1
    world.check()


def test_bad_keys_groups_ranks_and_sessions_are_named(world: World) -> None:
    engine = world.engine()
    reading = world.manager.reading
    message = refused(
        Code.INVALID_ARGUMENT, reading.lookup, engine.session, 9, Semantics.PREFIX, key("a"), False
    )
    assert "group 9" in message
    message = refused(
        Code.INVALID_ARGUMENT, reading.lookup, engine.session, 0, Semantics.PREFIX, b"123", False
    )
    assert f"{KEY_BYTES} bytes" in message
    (store,) = engine.grants(1)
    refused(Code.INVALID_ARGUMENT, engine.commit, store, key("a")[:5])
    refused(Code.INVALID_ARGUMENT, engine.commit, store, key("a"), key("b")[:5])
    refused(Code.INVALID_ARGUMENT, world.manager.declare, engine.session, spec(), [(7, bytes(32))])
    refused(Code.NOT_FOUND, world.manager.session, b"unknown")
    refused(Code.NOT_FOUND, world.manager.end_session, SessionNumber(99), "test")
    homeless = world.manager.open_session(Identity(b"z" * 16), "no namespace")
    refused(Code.FAILED_PRECONDITION, reading.lookup, homeless, 0, Semantics.PREFIX, key("a"), False)
    refused(Code.NOT_FOUND, world.manager.writing.abort, engine.session, StoreId(12345))
    world.check()


def test_names_of_namespaces(world: World) -> None:
    world.engine()
    world.engine(spec(model="other"))
    first = namespace_named(world.books, "1")
    assert namespace_named(world.books, first.digest.hex()[:10]) is first
    assert "there are 2" in refused(Code.NOT_FOUND, namespace_named, world.books, "")
    assert "matches 0" in refused(Code.NOT_FOUND, namespace_named, world.books, "zz")


def test_sessions_learn_that_they_ended(world: World) -> None:
    engine = world.engine()
    world.manager.end_session(engine.session.number, "ended by an operator")
    assert world.notices_of(engine.session)[-1] == Ended("ended by an operator")


def test_a_worker_that_was_never_there_ends_without_harm(world: World) -> None:
    world.manager.worker_ended(MappingId(77))
    world.check()


def test_segments_go_through_their_states(world: World) -> None:
    assert world.books.lending.states == [SegmentState.FREE] * 4
    world.engine()
    assert world.books.lending.states.count(SegmentState.LENT) == 1
