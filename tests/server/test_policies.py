"""Orders of eviction: what may go, what goes first, what a call may cost, and that learning pays.

The replays are small; `python -m benchmarks.hit_rate` has the whole traces.
"""

import random
import tracemalloc
from collections.abc import Iterator

import pytest

from benchmarks import hit_rate
from benchmarks.mooncake import FOLDER, NoTraces, Trace, load
from kvhost_client.admin import AdminClient
from kvhost_server.ids import ChunkKey, SegmentId, SlotIndex
from kvhost_server.policies import DEFAULT_POLICY, POLICIES
from kvhost_server.policies.adaptive import Adaptive
from kvhost_server.policies.ghosts import Ghosts
from kvhost_server.policies.hashing import fingerprint
from kvhost_server.policies.reuse import KINDS, SPANS, ReuseHistory
from kvhost_server.slots import ChunkTable
from tests.client.engine import Engine as ClientEngine
from tests.client.engine import keys as client_keys
from tests.server.world import World, chain, key
from tests.support import Daemon

# Prefix hits with room for 1000 blocks.
REPLAYS = [
    ("conversation", 900, {"adaptive": 1077, "lru": 938}),
    ("synthetic", 900, {"adaptive": 197, "lru": 241}),
]
FINGERPRINT = 283687513053268

each_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


def table_of(slots: int, policy: str) -> ChunkTable:
    table = ChunkTable(slots, lambda key, used_at: None, policy)
    table.add_row(SegmentId(1))
    return table


def store(
    table: ChunkTable, name: ChunkKey, parent: ChunkKey | None = None, now: int = 0
) -> SlotIndex | None:
    slot = table.take({0}, table.index.get(parent) if parent else None)
    if slot is not None:
        table.publish(slot, name, parent, now)
    return slot


# What may go.


class Watched:
    """A table whose policy is held to the rules at every victim."""

    def __init__(self, slots: int, policy: str) -> None:
        self.table = table_of(slots, policy)
        self.victims = 0
        # Taken out by this call of `take` already.
        self.passed: set[SlotIndex] = set()
        self._victim = self.table.policy.victim
        self.table.policy.victim = self.victim  # type: ignore[method-assign]

    def victim(self) -> SlotIndex | None:
        table = self.table
        found = self._victim()
        may_go = {slot for slot in table.index.values() if not table.holds(slot)} - self.passed
        tails = {slot for slot in may_go if not table.children(slot)}
        if found is None:
            assert not may_go, "nothing was offered though a chunk is held by nobody"
            return None
        self.victims += 1
        assert found in may_go, "a chunk was offered that is held, or not in the index"
        assert found in tails or not tails, "an inner chunk was offered while there was a tail"
        self.passed.add(found)
        return found

    def store(self, name: ChunkKey, parent: ChunkKey | None) -> None:
        self.passed = set()
        if name not in self.table.index:
            store(self.table, name, parent)


@each_policy
@pytest.mark.parametrize("seed", range(6))
def test_only_unheld_chunks_are_offered_and_tails_come_first(policy: str, seed: int) -> None:
    chance = random.Random(seed)
    watched = Watched(12, policy)
    table, held = watched.table, []
    chains = [chain(name, 8) for name in "abcdef"]
    for step in range(1500):
        keys = chance.choice(chains)
        there = [slot for name in keys if (slot := table.index.get(name)) is not None]
        match chance.randrange(6):
            case 0 if there:
                for slot in there:
                    table.hold(slot)
                held.append(there)
            case 1 if held:
                for slot in held.pop(chance.randrange(len(held))):
                    table.let_go(slot)
            case 2:
                table.touch(there, step)
            case 3 if there and not table.holds(there[-1]) and chance.random() < 0.3:
                table.evict(there[-1])
            case _:
                place = chance.randrange(8)
                watched.store(keys[place], keys[place - 1] if place else None)
        if step % 100 == 0:
            assert table.check_integrity() == []
    assert watched.victims > 50


@each_policy
def test_there_is_no_victim_only_when_all_are_held_and_there_is_one_again_afterwards(policy: str) -> None:
    table = table_of(3, policy)
    slots = [store(table, key(i)) for i in range(3)]
    for slot in slots:
        assert slot is not None
        table.hold(slot)
    assert table.policy.victim() is None
    table.let_go(slots[1])  # type: ignore[arg-type]
    assert table.policy.victim() == slots[1]


@each_policy
def test_a_chunk_that_cannot_be_reached_goes_before_all_others(policy: str) -> None:
    table = table_of(4, policy)
    store(table, key("old"))
    orphan = store(table, key("b"), key("a"))
    store(table, key("new"))
    assert table.policy.victim() == orphan


def test_lru_takes_the_longest_unused_and_ancestors_last() -> None:
    table = table_of(6, "lru")
    a, b = chain("a", 3), chain("b", 3)
    for keys in (a, b):
        for place, name in enumerate(keys):
            store(table, name, keys[place - 1] if place else None)
    table.touch([table.index[name] for name in a], 100)
    left = []
    for _ in range(6):
        victim = table.policy.victim()
        assert victim is not None
        left.append(table.key(victim))
        table.evict(victim)
    assert left == [*reversed(b), *reversed(a)]


# What a call may cost.


class Counted:
    """Candidates that count how often they are asked whether they may go; `held` ones may not."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.stamps = list(range(1, slots + 1))
        self.held = range(0)
        self.asked = 0

    def stamp(self, slot: SlotIndex) -> int:
        return self.stamps[slot]

    def evictable(self, slot: SlotIndex) -> bool:
        self.asked += 1
        return slot not in self.held

    def has_children(self, slot: SlotIndex) -> bool:
        return False

    def unreachable(self, slot: SlotIndex) -> bool:
        return False

    def key(self, slot: SlotIndex) -> ChunkKey | None:
        return ChunkKey(fingerprint(key(slot)).to_bytes(8, "big") + bytes(4))


def filled(policy: str, slots: int) -> tuple[Counted, Adaptive]:
    table = Counted(slots)
    made = POLICIES[policy](table)
    for slot in map(SlotIndex, range(slots)):
        made.stored(slot, table.key(slot) or ChunkKey(b""))
        made.offer(slot)
    return table, made  # type: ignore[return-value]


@each_policy
def test_one_call_looks_at_few_chunks_though_all_were_used_since_they_were_queued(policy: str) -> None:
    table, made = filled(policy, 20000)
    table.stamps = [stamp + 20000 for stamp in table.stamps]
    for _ in range(3):
        table.asked = 0
        assert made.victim() is not None
        assert table.asked < 600


@each_policy
def test_one_call_looks_at_a_bounded_number_of_held_chunks_and_the_next_ones_go_on(policy: str) -> None:
    table, made = filled(policy, 20000)
    table.held = range(15000)
    victims = []
    for _ in range(5):
        table.asked = 0
        victims.append(made.victim())
        assert table.asked < 5000
    assert victims[-1] is not None
    assert victims[-1] >= 15000


@each_policy
def test_a_chunk_costs_a_policy_less_than_a_hundred_bytes(policy: str) -> None:
    slots = 30_000
    table = Counted(slots)
    keys = [table.key(SlotIndex(slot)) or ChunkKey(b"") for slot in range(slots)]
    tracemalloc.start()
    try:
        made = POLICIES[policy](table)
        for slot in map(SlotIndex, range(slots)):
            made.stored(slot, keys[slot])
            made.offer(slot)
        for slot in map(SlotIndex, range(slots // 2)):
            made.used([slot])
            made.gone(slot, keys[slot])
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What is remembered of sampled keys has a fixed size.
    assert grown - (3 << 20) < 75 * slots


# What is remembered.


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    assert fingerprint(ChunkKey(bytes(range(36)))) == FINGERPRINT
    assert fingerprint(key("a", 0)) != fingerprint(key("a", 1)), "the group counts"


def test_ghosts_know_use_counts_before_and_after_they_grow() -> None:
    ghosts = Ghosts()
    assert ghosts.recall(fingerprint(key("a"))) is None
    for number in range(1000):
        ghosts.remember(fingerprint(key(number)), number % 4, 1000)
    ghosts.remember(fingerprint(key("one more")), 2, 100_000)
    known = [ghosts.recall(fingerprint(key(number))) for number in range(1000)]
    assert sum(count == number % 4 for number, count in enumerate(known)) > 950, (
        "newer keys take a place or two"
    )
    strangers = [ghosts.recall(fingerprint(key(-number))) for number in range(1, 1001)]
    assert sum(count is not None for count in strangers) < 5


def test_history_tells_who_comes_back_from_who_does_not() -> None:
    history = ReuseHistory()
    chance = random.Random(7)
    due: dict[int, list[int]] = {}
    for now in range(1, 6000):
        for number in due.pop(now, ()):
            history.use(number, 1, now, now)
        number = chance.getrandbits(64)
        history.use(number, 0, now, now)
        if now % 4 == 0:
            due.setdefault(now + 100, []).append(number)
        if now % 64 == 0:
            history.advance(now)
    table = history.densities(6000)
    assert len(table) == KINDS
    assert all(len(row) == SPANS for row in table)
    span = history.span_of(6000 - 60)
    assert table[0][span] > 3 * table[1][span], "once used comes back after 100 stores, twice used never does"
    assert table[0][span] > table[0][history.span_of(6000 - 1000)]


def test_what_nothing_is_known_of_is_in_the_order_of_last_use() -> None:
    for row in ReuseHistory().densities(0):
        assert row == sorted(row, reverse=True)
        assert row[0] > row[-1]


# That it pays.


def scans(requests: int, seed: int) -> Trace:
    """Popular prompts, and between them runs of prompts that come once."""
    chance, once = random.Random(seed), iter(range(10**7, 10**9, 6))
    weights = [1 / (rank + 1) for rank in range(400)]
    popular = chance.choices(range(400), weights, k=requests)
    trace: Trace = []
    for number, first in enumerate(popular):
        trace.append(list(range(first * 6, first * 6 + 6)))
        if number % 600 > 300:
            start = next(once)
            trace.append(list(range(start, start + 6)))
    return trace


def recent(requests: int, seed: int) -> Trace:
    """Conversations that come back soon or never: what LRU is best at."""
    chance = random.Random(seed)
    history: list[int] = []
    for number in range(requests):
        back = int(chance.expovariate(1 / 60))
        again = history and chance.random() < 0.6
        history.append(history[-min(len(history), 1 + back)] if again else 10**6 + number)
    return [list(range(first * 6, first * 6 + 6)) for first in history]


def difference(trace: Trace, blocks: int) -> float:
    """Points by which the default policy hits more than LRU."""
    return hit_rate.serve(trace, blocks, DEFAULT_POLICY).rate - hit_rate.serve(trace, blocks, "lru").rate


def test_one_time_prompts_do_not_push_out_popular_ones() -> None:
    assert difference(scans(3000, 1), 300) > 4


def test_where_lru_is_right_little_is_lost() -> None:
    assert difference(recent(3000, 2), 600) > -0.5


def test_when_the_traffic_changes_it_learns_again() -> None:
    trace = [*scans(1000, 3), *recent(1500, 4), *scans(1000, 5), *recent(1500, 6)]
    assert difference(trace, 400) > -0.5


@each_policy
def test_a_replay_through_the_manager_hits_what_one_through_the_table_does(policy: str) -> None:
    trace = scans(250, 8)
    world = World(segments=1, slots=120, policy=policy)
    engine, hits = world.engine(), 0
    for request in trace:
        world.time += 0.001
        keys = [key(block) for block in request]
        pins = engine.pin(keys)
        hits += len(pins)
        engine.release(*pins.values())
        if len(pins) < len(keys):
            engine.store(keys[len(pins) :], keys[len(pins) - 1] if pins else None)
    world.check()
    assert hits == hit_rate.serve(trace, 120, policy, key).prefix


def test_our_lru_is_lru() -> None:
    for trace in (scans(1000, 9), recent(1000, 10)):
        assert hit_rate.serve(trace, 200, "lru") == hit_rate.plain_lru(trace, 200)
        assert hit_rate.serve(trace, 200, DEFAULT_POLICY).prefix < hit_rate.belady(trace, 200).prefix


@pytest.mark.parametrize(("name", "requests", "expected"), REPLAYS)
def test_hits_on_a_public_trace(name: str, requests: int, expected: dict[str, int]) -> None:
    """Exactly these: another number is another policy, or another order of what the table says to it."""
    try:
        trace = load(name, requests)
    except NoTraces as error:
        pytest.skip(f"{error} (looked in {FOLDER})")
    assert {policy: hit_rate.serve(trace, 1000, policy).prefix for policy in POLICIES} == expected


# What people see.


@pytest.fixture
def lru_daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB", "--policy", "lru"]) as running:
        yield running


def test_a_namespace_says_which_policy_it_has(lru_daemon: Daemon) -> None:
    with ClientEngine(lru_daemon.socket) as engine, AdminClient(lru_daemon.socket) as admin:
        engine.store(client_keys("a", 2))
        assert [namespace.policy for namespace in admin.namespaces()] == ["lru"]
        assert admin.status().config["policy"] == "lru"


def test_the_default_says_after_how_long_what_leaves() -> None:
    table = table_of(1000, DEFAULT_POLICY)
    for number in range(1500):
        store(table, key(number))
    told = table.policy.describe()
    assert told.startswith("adaptive: learned from ")
    assert "once under 1920, twice none" in told
