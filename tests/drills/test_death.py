"""Drill 3: an engine dies at every step of lookup, pin, reserve, copy, commit, load and release.

A scheduler process and one or two worker processes use the production client. One of them, or all, are
killed; or only the session is ended while the workers live; with and without a forked child that inherited
everything, with gRPC's fork support on and off. Two seconds after the proof of the end nothing of them is
left (I7), and another engine has noticed nothing (B4, B11).
"""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from kvhost_client.admin import AdminClient
from tests.client.engine import key
from tests.drills.daemons import (
    Belongings,
    check_nothing_wedged,
    held,
    session_of,
    small_daemon,
    wait_belongings,
    wait_held,
    warm_up,
)
from tests.drills.scale import Record, rounds, scale
from tests.drills.stage import Process, Stage
from tests.support import Daemon, wait_for

ROUNDS = rounds(48, 240)
CHUNKS = 4
POINTS = ("lookup", "pin", "reserve", "assign", "copy", "commit", "load", "release")
VICTIMS = ("scheduler", "worker", "both", "session")
# When: after the answer; while the call runs; sent, but not yet read by the daemon.
PHASES = ("answered", "in flight", "unread")
IN_FLIGHT_S = 0.003
RESERVED = 1


@dataclass(frozen=True)
class Scene:
    """What happens in one round."""

    point: str
    victim: str
    phase: str
    ranks: int
    forked: bool
    grpc_fork_support: bool


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with small_daemon("8MiB") as running:
        yield running


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    """Where processes come from: with gRPC's fork support off, and on."""
    with (
        Stage({"GRPC_ENABLE_FORK_SUPPORT": "0"}) as without,
        Stage({"GRPC_ENABLE_FORK_SUPPORT": "1"}) as with_support,
    ):
        yield [without, with_support]


@dataclass
class Cast:
    """One engine in processes of its own, and what it was given."""

    stage: Stage
    daemon: Daemon
    ranks: int
    name: str
    instance: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        socket = self.daemon.socket
        self.model = f"ranks{self.ranks}"
        self.workers = [self.stage.start() for _ in range(self.ranks)]
        self.tokens = [
            worker.call("attach", socket=socket, instance=self.instance, rank=rank)
            for rank, worker in enumerate(self.workers)
        ]
        self.scheduler = self.stage.start()
        self.open(self.scheduler)
        # A quarter of the slots of one segment may be granted: eight, where two ranks share a slot.
        self.chunks = CHUNKS // self.ranks
        self.stored = [f"{self.name}s{i}" for i in range(self.chunks)]
        self.half = [f"{self.name}h{i}" for i in range(self.chunks)]
        self.pins: list[int] = []
        self.stores: list[int] = []
        self.slots: list[int] = []
        self.copying = False
        self._store()

    def open(self, scheduler: Process, wait: bool = True) -> None:
        self.session = scheduler.call(
            "open",
            socket=self.daemon.socket,
            instance=self.instance,
            model=self.model,
            ranks=self.ranks,
            tokens=self.tokens,
        )
        for worker in self.workers if wait else ():
            worker.call("mapped")

    def reserve(self, names: list[str]) -> None:
        chunks: list[list[int]] = []

        def reserved() -> bool:
            chunks[:] = self.scheduler.call("reserve", names=names)["chunks"]
            if all(status == RESERVED for status, _, _ in chunks):
                return True
            self.scheduler.call("update", aborts=[store for status, store, _ in chunks if status == RESERVED])
            return False

        wait_for(reserved, 5.0, f"{len(names)} slots")
        self.stores = [store for _, store, _ in chunks]
        self.slots = [slot for _, _, slot in chunks]

    def copy_in(self, names: list[str]) -> None:
        for name, slot, store in zip(names, self.slots, self.stores, strict=True):
            for worker in self.workers:
                assert worker.call("copy", session=self.session, slot=slot, name=name, stores=[store])

    def pin(self) -> None:
        pinned = self.scheduler.call("pin", names=self.stored)
        assert len(pinned) == self.chunks, pinned
        self.pins, self.slots = [pin for pin, _ in pinned], [slot for _, slot in pinned]

    def begin(self, name: str, stores: list[int]) -> None:
        """The last rank's copy is half done."""
        self.copying = True
        assert self.workers[-1].call(
            "begin", session=self.session, slot=self.slots[0], name=name, stores=stores
        )

    def _store(self) -> None:
        self.reserve(self.stored)
        self.copy_in(self.stored)
        assert self.scheduler.call("update", names=self.stored, commits=self.stores) == []
        self.stores = []

    # The points. Each leaves one call to be told to the scheduler, or None.

    def come_to(self, point: str) -> tuple[str, dict[str, Any]] | None:
        if point == "lookup":
            return "lookup", {"names": self.stored}
        if point == "pin":
            return "pin", {"names": self.stored}
        if point == "reserve":
            return "reserve", {"names": self.half}
        if point == "assign":
            taken = self.scheduler.call("take", count=1)
            self.stores = [store for store, _ in taken]
            return "update", {"names": self.half, "assigns": self.stores}
        if point in ("copy", "commit"):
            self.reserve(self.half)
        if point == "copy":
            self.begin(self.half[0], self.stores[:1])
            return None
        if point == "commit":
            self.copy_in(self.half)
            return "update", {"names": self.half, "commits": self.stores}
        self.pin()
        if point == "load":
            self.begin(self.stored[0], [])
            return None
        return "update", {"releases": self.pins}


class Bystander:
    """An engine that holds pins and grants all the while."""

    PINS = 3
    GRANTS = 2

    def __init__(self, stage: Stage, daemon: Daemon) -> None:
        self.daemon = daemon
        self.process = stage.start()
        self.number = self.process.call("engine", socket=daemon.socket, model="ranks1")
        self.names = [f"by{i}" for i in range(self.PINS)]
        assert self.process.call("store", names=self.names) == self.PINS
        assert len(self.process.call("pin", names=self.names)) == self.PINS
        assert len(self.process.call("take", count=self.GRANTS)) == self.GRANTS
        self.holds = held(daemon.status())
        assert self.holds == (self.PINS, self.GRANTS, 0)
        self._turn = 0

    def check(self, half: list[str], may_be_there: bool, ranks: int) -> None:
        """It has what it had; it can store; of the dead engine's chunks none is half-written."""
        self._turn += 1
        told = session_of(self.daemon.status(), self.number)
        assert told is not None
        assert (told.pins, told.grants) == (self.PINS, self.GRANTS)
        assert self.process.call("wrong", names=self.names) == []
        new = [f"by.{self._turn}.{i}" for i in range(2)]
        assert self.process.call("store", names=new) == 2
        assert self.process.call("wrong", names=new) == []
        if ranks == 1:
            there = self.process.call("lookup", names=half)
            assert may_be_there or not there, f"{there} chunks are visible that were never committed"
            assert self.process.call("wrong", names=half[:there]) == []


def _scenes(record: Record) -> list[Scene]:
    """Every point with every victim at least once in every 32 rounds, the rest by chance."""
    scenes: list[Scene] = []
    while len(scenes) < ROUNDS:
        turn = list(product(POINTS, VICTIMS))
        record.random.shuffle(turn)
        for point, victim in turn:
            phase = "answered" if victim == "session" else record.random.choice(PHASES)
            ranks = 1 + (record.random.random() < 0.25)
            forked = record.random.random() < 0.4
            # Its fork handlers take a second.
            support = record.random.random() < (0.2 if forked else 0.5)
            scenes.append(Scene(point, victim, phase, ranks, forked, support))
    return scenes[:ROUNDS]


@pytest.mark.timeout(scale(100, 1200))
def test_of_an_engine_that_dies_at_any_step_nothing_is_left(daemon: Daemon, stages: list[Stage]) -> None:
    with Record("3 death at every step") as record:
        warm_up(daemon, stages[0])
        bystander = Bystander(stages[0], daemon)
        baseline = Belongings.of(daemon.pid)
        for number, scene in enumerate(_scenes(record)):
            try:
                cast = Cast(stages[scene.grpc_fork_support], daemon, scene.ranks, f"d{number}.")
                _round(cast, bystander, scene, record)
                wait_belongings(daemon, baseline)
            except BaseException as error:
                error.add_note(f"round {number}: {scene}")
                raise
            record.rounds += 1
            record.count(f"{scene.victim} killed" if scene.victim != "session" else "session ended")
            record.count("with a forked child", scene.forked)
        for stage in stages:
            stage.bury()
        bystander.process.close()
        daemon.check_integrity()
        check_nothing_wedged(daemon, stages[0], "ranks3")


def _round(cast: Cast, bystander: Bystander, scene: Scene, record: Record) -> None:
    daemon, stage = cast.daemon, cast.stage
    told = cast.come_to(scene.point)
    if scene.forked:
        for process in (cast.scheduler, *cast.workers):
            stage.adopt(process.call("fork"))
    proven = _strike(daemon, cast, scene, told, record)
    sure = scene.victim != "session"  # of a session that only ended, the time is that of the order
    if scene.victim == "worker":
        _scheduler_goes_on(cast, scene)
        proven, sure = time.monotonic(), True
    elif cast.copying and scene.victim in ("scheduler", "session"):
        _the_copy_ends(daemon, cast, bystander, scene)
        proven = time.monotonic()
    took = wait_held(daemon, bystander.holds, proven)
    record.worst("slowest_s", took if sure else 0.0)
    if scene.victim == "session":
        _engine_comes_back(daemon, cast)
    for process in (cast.scheduler, *cast.workers):
        process.kill()
    wait_held(daemon, bystander.holds)
    wait_for(lambda: len(daemon.status().sessions) == 1, 2.0, "the session to be gone")
    bystander.check(cast.half, scene.point == "commit", scene.ranks)
    for process in (cast.scheduler, *cast.workers):
        process.close()
    stage.bury()


def _strike(
    daemon: Daemon, cast: Cast, scene: Scene, told: tuple[str, dict[str, Any]] | None, record: Record
) -> float:
    """Kills whom the scene says, when it says; returns when the end was proven."""
    frozen = scene.phase == "unread"
    if told is not None:
        verb, args = told
        if scene.phase == "answered":
            cast.scheduler.call(verb, **args)
        elif scene.phase == "in flight":
            cast.scheduler.tell(verb, **args)
            until = time.monotonic() + record.random.uniform(0.0, IN_FLIGHT_S)
            while time.monotonic() < until:
                pass
        else:
            daemon.freeze()
            cast.scheduler.tell(verb, **args, deadline_s=0.02)
            with pytest.raises(Exception, match="DeadlineExceeded"):
                cast.scheduler.answer()
    elif frozen:
        daemon.freeze()
    proven = time.monotonic()
    if scene.victim == "session":
        with AdminClient(daemon.socket) as admin:
            admin.end_session(cast.session)
    if scene.victim in ("scheduler", "both"):
        proven = cast.scheduler.kill()
    if scene.victim in ("worker", "both"):
        for worker in cast.workers if scene.victim == "both" else cast.workers[-1:]:
            proven = worker.kill()
    if frozen:
        daemon.thaw()
        proven = time.monotonic()  # a stopped daemon sees no proof
    return proven


def _the_copy_ends(daemon: Daemon, cast: Cast, bystander: Bystander, scene: Scene) -> None:
    """The session is over while a worker copies: what it touches is kept until it is done, however long."""
    pinned, _, quarantined = bystander.holds

    def kept() -> bool:
        now = held(daemon.status())
        if scene.point == "copy":
            return now[2] == quarantined + cast.chunks
        return now[0] == pinned + cast.chunks

    wait_for(kept, 2.0, f"what is being copied to be kept; held is {held(daemon.status())}")
    assert cast.workers[-1].call("finish")
    for worker in cast.workers:
        wait_for(
            lambda worker=worker: worker.call("refuses", session=cast.session),
            2.0,
            "the worker to refuse copies of the ended session",
        )


def _scheduler_goes_on(cast: Cast, scene: Scene) -> None:
    """A worker is gone and the scheduler is not: it finds nothing any more, and gives back what it holds."""
    if scene.phase == "in flight" and scene.point not in ("copy", "load"):
        cast.scheduler.answer()
    wait_for(lambda: cast.scheduler.call("lookup", names=cast.stored) == 0, 2.0, "lookups to miss")
    reserved = cast.scheduler.call("reserve", names=["none"])
    assert reserved["pending"], reserved
    cast.scheduler.call("update", aborts=cast.stores, unquiet=[cast.ranks - 1], releases=cast.pins)
    cast.scheduler.call("close_session")


def _engine_comes_back(daemon: Daemon, cast: Cast) -> None:
    """The same processes open the next session and work as before."""
    wait_for(lambda: cast.scheduler.call("ended"), 2.0, "the scheduler to hear of its session's end")
    cast.open(cast.scheduler)
    cast.pin()
    cast.reserve([f"{cast.name}again"])
    cast.copy_in([f"{cast.name}again"])
    with AdminClient(daemon.socket) as admin:
        namespace = str(session_of(daemon.status(), cast.session).namespace_number)  # type: ignore[union-attr]
        chunk = admin.lookup([key(f"{cast.name}again").hex()], namespace)[0]
    assert chunk.state == "writing"


def test_an_engine_that_is_only_stopped_keeps_what_it_holds(daemon: Daemon, stages: list[Stage]) -> None:
    """The negative control: no end, no proof, and so nothing comes back, however long it takes (I4)."""
    cast = Cast(stages[0], daemon, 1, "stopped")
    cast.pin()
    cast.reserve(cast.half)
    for process in (cast.scheduler, *cast.workers):
        process.stop()
    with pytest.raises(AssertionError, match="2 s after the end"):
        wait_held(daemon, (0, 0, 0))
    assert held(daemon.status()) == (CHUNKS, CHUNKS, 0)
    for process in (cast.scheduler, *cast.workers):
        process.kill()
    wait_held(daemon, (0, 0, 0))
