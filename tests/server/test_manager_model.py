"""The manager against a simple oracle: random interleavings of engines, workers, deaths and people.

The oracle plays the memory. Every granted slot is a place that its writers may
scribble on until they are proven quiet; every commit writes the key's name
there. Whatever the manager then says is loadable must still carry that name
(I1, I3, I4), and nothing may be given out twice. The long form takes its number
of steps from KVHOST_MODEL_STEPS.
"""

import os
from collections.abc import Callable
from math import inf

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvhost_server.checks import ChunkRequest
from kvhost_server.errors import Refused
from kvhost_server.ids import ChunkKey, MappingId, NamespaceNumber, PinId, StoreId
from kvhost_server.namespace import Semantics
from kvhost_server.policies import POLICIES
from kvhost_server.reading import Found
from kvhost_server.stewardship import evict, reset_namespace, resize_pool, set_limits
from tests.server.world import SLOT_BYTES, Engine, World, chain, key, spec

CHAINS = {name: chain(name, 8) for name in "abc"}
KEYS = st.builds(lambda name, i: CHAINS[name][i], st.sampled_from("abc"), st.integers(0, 7))
ENGINES = st.integers(0, 3)
PLACE = tuple[int, int]
"""A place in memory: (pool segment, slot in it). It outlives loans, as the physical pages do."""


class Life:
    """An engine as the oracle sees it: who may still write where, and what it thinks it holds."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stores: dict[StoreId, PLACE] = {}
        self.assigned: dict[StoreId, ChunkKey] = {}
        self.pins: dict[PinId, tuple[ChunkKey, PLACE]] = {}
        self.alive = True
        self.session_open = True
        self.dead_workers: set[MappingId] = set()
        # Places that the session gave up but workers may still write: until each
        # worker has answered this fence (or a later one), or has ended.
        self.loose: dict[PLACE, dict[MappingId, float]] = {}


class ManagerModel(RuleBasedStateMachine):
    """Four engines in two namespaces on a pool of six segments of three slots, with each policy."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.world = World(segments=6, slots=3, policy=policy)
        self.memory: dict[PLACE, tuple[int, ChunkKey] | str] = {}
        self.lives = [Life(self.world.engine(self._spec(i))) for i in range(4)]

    @staticmethod
    def _spec(index: int):  # type: ignore[no-untyped-def]
        return spec(model="even" if index % 2 == 0 else "odd", ranks=1 + index // 2, shards=1)

    # What engines do.

    @rule(who=ENGINES, name=KEYS)
    def reserve_chunk(self, who: int, name: ChunkKey) -> None:
        life = self._open(who)
        if life is None:
            return
        request = ChunkRequest(0, name, self._parent(name))
        given = self._try(life.engine.manager.writing.reserve, life.engine.session, 0, [request])
        if given is not None and given.chunks[0][1]:
            self._granted(life, given.chunks[0][1], given.chunks[0][2])
            life.assigned[given.chunks[0][1]] = name

    @rule(who=ENGINES, name=st.sampled_from("abc"), length=st.integers(1, 8))
    def store_chain(self, who: int, name: str, length: int) -> None:
        """The usual course: chunk by chunk, each slot reserved, written and committed."""
        for one in CHAINS[name][:length]:
            self.reserve_chunk(who, one)
            life = self._open(who)
            mine = [s for s, assigned in life.assigned.items() if assigned == one] if life is not None else []
            if mine and life is not None:
                self._commit(life, mine[0], one)

    @rule(who=ENGINES, count=st.integers(1, 4))
    def take_ahead(self, who: int, count: int) -> None:
        life = self._open(who)
        if life is not None:
            given = self._try(life.engine.manager.writing.reserve, life.engine.session, count, [])
            for store, slot in given.grants if given is not None else ():
                self._granted(life, store, slot)

    @rule(who=ENGINES, pick=st.integers(0, 99), name=KEYS)
    def assign(self, who: int, pick: int, name: ChunkKey) -> None:
        life = self._open(who)
        free = [s for s in life.stores if s not in life.assigned] if life is not None else []
        if life is not None and free:
            store = free[pick % len(free)]
            life.engine.manager.writing.assign(
                life.engine.session, store, ChunkRequest(0, name, self._parent(name))
            )
            life.assigned[store] = name

    @rule(who=ENGINES, pick=st.integers(0, 99), name=KEYS)
    def write_and_commit(self, who: int, pick: int, name: ChunkKey) -> None:
        life = self._open(who)
        if life is None or not life.stores:
            return
        self._commit(life, sorted(life.stores)[pick % len(life.stores)], name)

    def _commit(self, life: Life, store: StoreId, name: ChunkKey) -> None:
        name = life.assigned.pop(store, name)
        place = life.stores.pop(store)
        namespace = self._namespace(life)
        assert self.memory[place] == f"granted {store}", "a granted slot was given to somebody else"
        try:
            published = life.engine.commit(store, name, self._parent(name))
        except Refused:
            published = False  # its generation is over
        self.memory[place] = (namespace, name) if published else "free"

    @rule(who=ENGINES, pick=st.integers(0, 99), quiet=st.booleans())
    def abort(self, who: int, pick: int, quiet: bool) -> None:
        life = self._open(who)
        if life is None or not life.stores:
            return
        store = sorted(life.stores)[pick % len(life.stores)]
        place = life.stores.pop(store)
        life.assigned.pop(store, None)
        self.memory[place] = "free"
        unquiet = [] if quiet else range(life.engine.spec.layout.ranks)
        self._fencing(
            life,
            [] if quiet else [place],
            lambda: life.engine.manager.writing.abort(life.engine.session, store, unquiet),
        )

    @rule(who=ENGINES, name=st.sampled_from("abc"), length=st.integers(1, 8))
    def pin(self, who: int, name: str, length: int) -> None:
        life = self._open(who)
        if life is None:
            return
        keys = CHAINS[name][:length]
        answer = self.world.manager.reading.lookup(
            life.engine.session, 0, Semantics.PREFIX, b"".join(keys), True
        )
        for i, wire in enumerate(answer.slots):
            assert answer.found[i] == Found.YES
            place = self._place(wire)
            assert self.memory[place] == (self._namespace(life), keys[i]), "a hit is not what was stored"
            life.pins[PinId(answer.first_pin + i)] = (keys[i], place)
        if answer.slots:
            books, session = self.world.books, life.engine.session
            assert books.pins_held(session) <= books.bounds(session).pins, (
                "an engine pins more than its bound"
            )

    @rule(who=ENGINES, pick=st.integers(0, 99))
    def load_and_release(self, who: int, pick: int) -> None:
        life = self._open(who)
        if life is not None and life.pins:
            pin = sorted(life.pins)[pick % len(life.pins)]
            name, place = life.pins.pop(pin)
            written = self.memory[place]
            assert isinstance(written, tuple)
            assert written[1] == name, "a pinned chunk was overwritten"
            life.engine.release(pin)

    @rule(who=ENGINES, name=st.sampled_from("abc"))
    def touch(self, who: int, name: str) -> None:
        life = self._open(who)
        if life is not None:
            self.world.manager.reading.touch(life.engine.session, 0, b"".join(CHAINS[name]))

    @precondition(lambda self: len(self.world.books.namespaces) < 8)
    @rule(who=ENGINES, version=st.sampled_from(["", "v2"]))
    def reset_session(self, who: int, version: str) -> None:
        life = self._open(who)
        if life is None:
            return
        namespace = life.engine.session.namespace
        assert namespace is not None
        if version and namespace.spec.with_weights(version).digest() == namespace.digest:
            # These weights have a name, and the engine has them already: a reset that is asked for twice.
            self.world.manager.reset_session(life.engine.session, version)
            assert life.engine.session.namespace is namespace
            return
        places = self._give_up_stores(life)
        self._fencing(life, places, lambda: self.world.manager.reset_session(life.engine.session, version))

    # What workers and the shell do.

    @rule(who=ENGINES)
    def scribble(self, who: int) -> None:
        """A worker that is not proven quiet writes where it once might."""
        life = self.lives[who]
        for place in life.loose:
            assert not isinstance(self.memory.get(place), tuple), "a published slot can still be written"
            assert not str(self.memory.get(place)).startswith("granted"), "quarantine was left too early"

    @rule(count=st.integers(1, 3))
    def workers_map(self, count: int) -> None:
        box = self.world.outbox
        for _ in range(min(count, len(box.offers))):
            mapping, assignments = box.offers.popleft()
            if mapping in self.world.books.custody.mappings:
                self.world.manager.worker_mapped(mapping, [a.segment_id for a in assignments])

    @rule()
    def everybody_obeys_but_for_fences(self) -> None:
        for _ in range(8):
            self.workers_map(99)
            while self.world.outbox.retires:
                self.a_worker_retires()
            while self.world.outbox.cleans:
                self.a_segment_is_zeroed()
            self.memory_is_given_back()

    @rule()
    def a_worker_answers_a_fence(self) -> None:
        box = self.world.outbox
        if box.fences:
            mapping, fence, _, _ = box.fences.popleft()
            if mapping in self.world.books.custody.mappings:
                self._proven(mapping, fence)
                self.world.manager.worker_fenced(mapping, fence)

    @rule()
    def a_worker_retires(self) -> None:
        box = self.world.outbox
        if box.retires:
            mapping, segments = box.retires.popleft()
            if mapping in self.world.books.custody.mappings:
                self.world.manager.worker_retired(mapping, segments)

    @rule()
    def a_segment_is_zeroed(self) -> None:
        box = self.world.outbox
        if box.cleans:
            index = box.cleans.popleft()
            self._bytes_go(index)
            self.world.manager.segment_clean(index)

    @rule()
    def memory_is_given_back(self) -> None:
        box = self.world.outbox
        while box.releases:
            self._bytes_go(box.releases.pop())

    def _bytes_go(self, index: int) -> None:
        for life in self.lives:
            assert not any(place[0] == index for place in life.loose), "zeroed or freed under a writer"
        for place in [p for p in self.memory if p[0] == index]:
            self.memory[place] = "free"

    @rule(who=ENGINES)
    def a_worker_loses_its_connection(self, who: int) -> None:
        life = self.lives[who]
        if life.alive and life.engine.workers:
            worker = life.engine.workers[-1]
            if self.world.books.custody.mappings[worker].connected:
                self.world.manager.worker_disconnected(worker)

    @rule(who=ENGINES)
    def the_session_ends(self, who: int) -> None:
        life = self._open(who)
        if life is not None:
            places = self._give_up_stores(life)
            life.pins.clear()
            life.session_open = False
            number = life.engine.session.number
            self._fencing(life, places, lambda: self.world.manager.end_session(number, "model"))

    @rule(who=ENGINES)
    def the_session_opens_again(self, who: int) -> None:
        life = self.lives[who]
        if life.alive:
            places = self._give_up_stores(life)
            life.pins.clear()
            self._fencing(life, places, life.engine.open)
            life.session_open = True

    @rule(who=ENGINES)
    def the_engine_dies(self, who: int) -> None:
        life = self.lives[who]
        if life.alive:
            if life.session_open:
                self.world.manager.end_session(life.engine.session.number, "its process ended")
            for worker in life.engine.workers:
                self._proven(worker, inf)
                self.world.manager.worker_ended(worker)
            self.lives[who] = Life(self.world.engine(self._spec(who), attach=False))
            for place, written in self.memory.items():
                if isinstance(written, str) and written.startswith("granted"):
                    store = StoreId(int(written.split()[1]))
                    if not any(store in other.stores for other in self.lives):
                        self.memory[place] = "free"
            self.lives[who].engine.say_hello()
            self.lives[who].engine.open()

    # What people and time do.

    @rule(number=st.integers(1, 4), everything=st.booleans(), name=KEYS)
    def evict_by_hand(self, number: int, everything: bool, name: ChunkKey) -> None:
        namespace = self.world.books.namespaces.get(NamespaceNumber(number))
        if namespace is not None:
            evict(self.world.books, namespace, list(namespace.table.index) if everything else [name])

    @precondition(lambda self: len(self.world.books.namespaces) < 12)
    @rule(number=st.integers(1, 4))
    def reset_by_hand(self, number: int) -> None:
        namespace = self.world.books.namespaces.get(NamespaceNumber(number))
        if namespace is not None:
            reset_namespace(self.world.books, namespace)

    @rule(number=st.integers(1, 4), floor=st.integers(0, 2), cap=st.integers(0, 4))
    def limit(self, number: int, floor: int, cap: int) -> None:
        namespace = self.world.books.namespaces.get(NamespaceNumber(number))
        if namespace is not None:
            size = 3 * SLOT_BYTES
            attachment = self.world.manager.attachment
            self._try(set_limits, self.world.books, attachment, namespace, floor * size, cap * size)

    @rule(segments=st.integers(0, 6))
    def resize_the_pool(self, segments: int) -> None:
        attachment = self.world.manager.attachment
        self._try(resize_pool, self.world.books, attachment, segments * 3 * SLOT_BYTES)

    @rule(there=st.booleans())
    def memory_comes_or_not(self, there: bool) -> None:
        box = self.world.outbox
        if box.populates:
            index = box.populates.popleft()
            if there:
                self.world.manager.segment_ready(index)
            else:
                self.world.manager.segments_missing([index])

    @rule(seconds=st.floats(0.001, 5))
    def time_passes(self, seconds: float) -> None:
        self.world.time += seconds

    @rule(steps=st.integers(1, 4))
    def some_chores(self, steps: int) -> None:
        self.world.books.run_chores(steps)

    # Always true.

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def bounds_hold(self) -> None:
        for life in self.lives if hasattr(self, "lives") else ():
            if life.session_open and life.alive:
                session = life.engine.session
                assert len(session.grants) == len(life.stores)

    @invariant()
    def every_key_is_where_it_was_written(self) -> None:
        if not hasattr(self, "world"):
            return
        for namespace in self.world.books.namespaces.values():
            for name, slot in namespace.table.index.items():
                place = self._place(namespace.table.wire(slot))
                assert self.memory[place] == (namespace.number, name)

    # The oracle's own.

    def _open(self, who: int) -> Life | None:
        life = self.lives[who]
        return life if life.alive and life.session_open else None

    def _try(self, call: Callable[..., object], *args: object):  # type: ignore[no-untyped-def]
        try:
            return call(*args)
        except Refused:
            return None

    def _namespace(self, life: Life) -> int:
        namespace = life.engine.session.namespace
        assert namespace is not None
        return namespace.number

    def _parent(self, name: ChunkKey) -> ChunkKey | None:
        keys = next(keys for keys in CHAINS.values() if name in keys)
        at = keys.index(name)
        return keys[at - 1] if at else None

    def _place(self, wire: int) -> PLACE:
        loan = self.world.books.lending.loans[wire >> 32]  # type: ignore[index]
        return loan.pool_index, wire & 0xFFFFFFFF

    def _granted(self, life: Life, store: StoreId, wire: int) -> None:
        place = self._place(wire)
        assert not str(self.memory.get(place, "free")).startswith("granted"), "a slot was granted twice"
        for other in self.lives:
            assert place not in other.loose, "a slot was granted while an old writer may still write it"
            for name, held in other.pins.values():
                assert held != place, f"a slot was granted while {name!r} in it is pinned"
        self.memory[place] = f"granted {store}"
        life.stores[store] = place
        books, session = self.world.books, life.engine.session
        assert books.held(session) <= books.bounds(session).grants, "an engine holds more than its bound"

    def _give_up_stores(self, life: Life) -> list[PLACE]:
        places = list(life.stores.values())
        for place in places:
            self.memory[place] = "free"
        life.stores.clear()
        life.assigned.clear()
        return places

    def _fencing(self, life: Life, places: list[PLACE], call: Callable[[], object]) -> None:
        """Runs a call that takes these places from their writers, and notes what each writer owes."""
        workers = self.world.books.custody.of_instance(life.engine.identity.instance_id)
        before = {m.id: m.last_fence for m in workers if m.segments or m.retiring}
        deaf = {m.id for m in workers if not m.connected}
        for place in places:
            life.loose[place] = {m: inf if m in deaf else last + 1 for m, last in before.items()}
        call()
        life.loose = {place: owed for place, owed in life.loose.items() if owed}

    def _proven(self, mapping: MappingId, fence: float) -> None:
        """A worker is quiet about everything up to this fence."""
        for life in self.lives:
            for owed in life.loose.values():
                if mapping in owed and owed[mapping] <= fence:
                    del owed[mapping]
            life.loose = {place: owed for place, owed in life.loose.items() if owed}


STEPS = int(os.environ.get("KVHOST_MODEL_STEPS", "6000"))
PER_RUN = 120
ManagerModel.TestCase.settings = settings(
    max_examples=max(1, STEPS // PER_RUN),
    stateful_step_count=PER_RUN,
    deadline=None,
    derandomize="KVHOST_MODEL_STEPS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestManagerModel = ManagerModel.TestCase


def test_the_model_uses_different_keys() -> None:
    assert len({k for keys in CHAINS.values() for k in keys} | {key("z")}) == 25
