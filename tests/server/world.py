"""A manager with an outbox that is a list: tests play the shell, the workers and the engines."""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhost_server.books import ServiceState
from kvhost_server.checks import ChunkRequest
from kvhost_server.ids import ChunkKey, MappingId, NamespaceNumber, PinId, SegmentId, SessionNumber, StoreId
from kvhost_server.manager import Manager
from kvhost_server.namespace import Group, Layout, NamespaceSpec, Semantics
from kvhost_server.notices import Assignment, Notice
from kvhost_server.policies import DEFAULT_POLICY
from kvhost_server.reading import Found
from kvhost_server.sessions import Session

KEY_BYTES = 12
SLOT_BYTES = 4096


def key(name: object, group: int = 0) -> ChunkKey:
    """A key of 12 bytes that says its name."""
    return ChunkKey(f"{name!s:>8.8}".encode() + group.to_bytes(4, "big"))


def chain(name: str, length: int) -> list[ChunkKey]:
    return [key(f"{name}{i:04d}") for i in range(length)]


def spec(model: str = "m", ranks: int = 1, shards: int | None = None, **parts: object) -> NamespaceSpec:
    layout = Layout(
        shard_bytes=SLOT_BYTES,
        shards=ranks if shards is None else shards,
        ranks=ranks,
        key_bytes=KEY_BYTES,
        groups=(Group(0, Semantics.PREFIX, 16), Group(1, Semantics.SET, 16)),
    )
    texts = {name: json.dumps(value) for name, value in {"model": model, **parts}.items()}
    return NamespaceSpec("", model, texts, layout)


@dataclass(frozen=True)
class Identity:
    instance_id: bytes
    pid: int = 100
    uid: int = 1000


@dataclass
class Outbox:
    """Keeps every order; the test carries out what it wants, when it wants."""

    offers: deque[tuple[MappingId, list[Assignment]]] = field(default_factory=deque)
    retires: deque[tuple[MappingId, list[SegmentId]]] = field(default_factory=deque)
    fences: deque[tuple[MappingId, int, SessionNumber, list[StoreId]]] = field(default_factory=deque)
    notices: list[tuple[SessionNumber, Notice]] = field(default_factory=list)
    cleans: deque[int] = field(default_factory=deque)
    populates: deque[int] = field(default_factory=deque)
    releases: list[int] = field(default_factory=list)
    with_events: set[NamespaceNumber] = field(default_factory=set)

    def offer(self, mapping: MappingId, segments: Sequence[Assignment]) -> None:
        self.offers.append((mapping, list(segments)))

    def retire(self, mapping: MappingId, segment_ids: Sequence[SegmentId]) -> None:
        self.retires.append((mapping, list(segment_ids)))

    def fence(
        self, mapping: MappingId, fence: int, session_below: SessionNumber, store_ids: Sequence[StoreId]
    ) -> None:
        self.fences.append((mapping, fence, session_below, list(store_ids)))

    def notice(self, session: SessionNumber, notice: Notice) -> None:
        self.notices.append((session, notice))

    def clean(self, pool_index: int) -> None:
        self.cleans.append(pool_index)

    def resize(self, asked_bytes: int, fresh: Sequence[int]) -> None:
        self.populates.extend(fresh)

    def release(self, pool_index: int) -> None:
        self.releases.append(pool_index)

    def events(self, namespace: NamespaceNumber) -> None:
        self.with_events.add(namespace)

    def chores(self) -> None:
        pass


class World:
    """A manager over a pool of `segments` times `slots` slots of 4 KiB, and its outbox.

    Args:
        obedient: workers map, retire and segments get zeroed as soon as `settle` runs.
    """

    def __init__(
        self,
        segments: int = 4,
        slots: int = 4,
        serving: bool = True,
        boot_id: int = 7,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        self.time = 1000.0
        self.outbox = Outbox()
        self.manager = Manager(
            boot_id, slots * SLOT_BYTES, segments, self.outbox, lambda: self.time, policy=policy
        )
        self.books = self.manager.books
        self._instances = 0
        # Workers that carry out nothing any more.
        self.stopped: set[MappingId] = set()
        if serving:
            for index in range(segments):
                self.manager.segment_ready(index)
            self.manager.set_state(ServiceState.SERVING)

    def engine(self, namespace: NamespaceSpec | None = None, attach: bool = True) -> "Engine":
        self._instances += 1
        engine = Engine(self, self._instances.to_bytes(16, "big"), namespace or spec())
        if attach:
            engine.attach()
        return engine

    def arriving(self, namespace: NamespaceSpec) -> "Engine":
        """An engine that has just declared its namespace: nobody has carried out anything of what follows."""
        engine = self.engine(namespace, attach=False)
        engine.say_hello()
        engine.open()
        return engine

    def settle(self, fences: bool = True) -> None:
        """Workers do as they are told and segments are zeroed, until nothing is left to do."""
        box, manager = self.outbox, self.manager
        while box.offers or box.retires or box.cleans or (fences and box.fences):
            while box.offers:
                mapping, assignments = box.offers.popleft()
                if mapping in self.books.custody.mappings.keys() - self.stopped:
                    manager.worker_mapped(mapping, [a.segment_id for a in assignments])
            while box.retires:
                mapping, segments = box.retires.popleft()
                if mapping in self.books.custody.mappings.keys() - self.stopped:
                    manager.worker_retired(mapping, segments)
            while fences and box.fences:
                mapping, fence, _, _ = box.fences.popleft()
                if mapping in self.books.custody.mappings.keys() - self.stopped:
                    manager.worker_fenced(mapping, fence)
            while box.cleans:
                manager.segment_clean(box.cleans.popleft())
        while manager.books.run_chores():
            pass

    def check(self) -> None:
        """The manager's books agree."""
        while self.manager.books.run_chores():
            pass
        assert self.manager.check_integrity() == []

    def notices_of(self, session: Session) -> list[Notice]:
        return [notice for number, notice in self.outbox.notices if number == session.number]


class Engine:
    """One engine instance: a session and one worker a rank."""

    def __init__(self, world: World, instance_id: bytes, namespace: NamespaceSpec) -> None:
        self.world = world
        self.manager = world.manager
        self.identity = Identity(instance_id)
        self.spec = namespace
        self.tokens = [bytes([rank]) * 16 + instance_id for rank in range(namespace.layout.ranks)]
        self.workers: list[MappingId] = []
        self.session: Session = None  # type: ignore[assignment]

    def attach(self) -> None:
        self.say_hello()
        self.open()
        self.world.settle()

    def say_hello(self) -> None:
        instance = self.identity.instance_id
        for rank, token in enumerate(self.tokens):
            self.workers.append(self.manager.worker_hello(instance, rank, 1, token, self.identity))

    def open(self) -> None:
        self.session = self.manager.open_session(self.identity, "an engine")
        self.manager.declare(self.session, self.spec, list(enumerate(self.tokens)))

    def lookup(
        self, keys: Sequence[ChunkKey], group: int = 0, semantics: Semantics = Semantics.PREFIX
    ) -> int:
        """How many of the keys are there."""
        answer = self.manager.reading.lookup(self.session, group, semantics, b"".join(keys), False)
        return answer.found.count(Found.YES)

    def pin(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, PinId]:
        """Pins as many keys of the chain as are there."""
        answer = self.manager.reading.lookup(self.session, 0, Semantics.PREFIX, b"".join(keys), True)
        return {keys[i]: PinId(answer.first_pin + i) for i in range(answer.found.count(Found.YES))}

    def release(self, *pins: PinId) -> None:
        for pin in pins:
            self.manager.reading.release(self.session, pin)

    def grants(self, count: int) -> list[StoreId]:
        return [store for store, _ in self.manager.writing.reserve(self.session, count, []).grants]

    def reserve(self, keys: Sequence[ChunkKey], parent: ChunkKey | None = None) -> list[StoreId]:
        """Store ids of the chunks of one chain for which there was room."""
        given = self.manager.writing.reserve(self.session, 0, self.requests(keys, parent))
        return [store for _, store, _ in given.chunks if store]

    def requests(self, keys: Sequence[ChunkKey], parent: ChunkKey | None = None) -> list[ChunkRequest]:
        parents = [parent, *keys[:-1]]
        return [ChunkRequest(0, k, p) for k, p in zip(keys, parents, strict=True)]

    def commit(self, store: StoreId, name: ChunkKey, parent: ChunkKey | None = None, group: int = 0) -> bool:
        return self.manager.writing.commit(self.session, store, ChunkRequest(group, name, parent))

    def store(self, keys: Sequence[ChunkKey], parent: ChunkKey | None = None) -> int:
        """Stores a chain chunk by chunk, each evicting what it needs; returns how many were stored."""
        stored = 0
        for request in self.requests(keys, parent):
            given = self.manager.writing.reserve(self.session, 0, [request])
            self.world.settle()
            if not given.chunks[0][1] and given.pending:
                given = self.manager.writing.reserve(self.session, 0, [request])
            if not given.chunks[0][1]:
                break
            self.manager.writing.commit(self.session, given.chunks[0][1], request)
            stored += 1
        return stored
