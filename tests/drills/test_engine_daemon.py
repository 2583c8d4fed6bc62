"""Drills 4 and 5 with a real engine: its daemon dies and comes back, or stands still.

The engine says what it would say without a cache, its steps do not wait for anybody, it uses the cache again
by itself, and nothing stays held or mapped (I6, I7, I8; C1, C3, C6).
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.drills import engines
from tests.drills.engines import Oracle, Steps, ask, ask_afresh, check, hand, wait_settled, wait_usable
from tests.drills.scale import LONG, Record, rounds, scale
from tests.e2e.engine import Engine
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support import Daemon, process_state, wait_for

pytestmark = pytest.mark.timeout(scale(600, 1800))

MEMORY = "16MiB"
AWAY_S = scale(3, 30)
FAST_S = 0.05
USED_AGAIN_WITHIN_S = 2.0
# In service requests wait so long for an answer, and no longer.
SETTINGS = {"deadline_ms": 100, "attach_wait_ms": 2000}
COUNT = 12


@dataclass
class Stage:
    """One engine, and the daemon of the moment."""

    engine: Engine
    daemon: Daemon
    oracle: Oracle
    seeds: int = 0
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def fresh(self, length: int = 300) -> list[int]:
        """A prompt nobody has asked before."""
        self.seeds += 1
        return prompt(length, 1000 + self.seeds)

    def ask(self, asked: list[int]) -> None:
        check(ask(self.engine, asked, COUNT), self.oracle.tokens(asked, COUNT))

    def use(self, deadline_s: float = 30.0) -> None:
        """Something is stored, and comes back. On a busy machine an answer may miss its deadline: again."""
        asked = self.fresh()
        self.ask(asked)

        def comes_back() -> bool:
            answer = ask_afresh(self.engine, asked, COUNT)
            check(answer, self.oracle.tokens(asked, COUNT))
            return answer.cached_tokens == 288

        wait_for(comes_back, deadline_s, "a prompt that comes from the cache")

    def copies_both_ways(self) -> list[tuple[str, list[int]]]:
        """Two requests with a load and a store that have begun and are held; the engine may go on."""
        for _ in range(10):
            known, new = self.stored(), self.fresh()
            if names := engines.hold_copies(self.engine, known, new, COUNT):
                return list(zip(names, [known, new], strict=True))
        raise AssertionError("no load began on this machine")

    def stored(self) -> list[int]:
        """A prompt that the daemon has and the device has not."""
        asked = self.fresh()
        self.ask(asked)
        wait_settled(self.engine)
        assert self.engine.reset_prefix_cache()
        return asked


@pytest.fixture(scope="module")
def stage(oracle: Oracle) -> Iterator[Stage]:
    oracle.launch()
    folder = Path(tempfile.mkdtemp(prefix="kvhost-"))
    daemon = Daemon(MEMORY, folder=folder)
    try:
        with engines.engine(checkpoint(Recipe()), daemon, extra=SETTINGS) as engine:
            one = Stage(engine, daemon, oracle)
            wait_usable(engine)
            yield one
            daemon = one.daemon
    finally:
        daemon.close()
        shutil.rmtree(folder)


# It dies.


def _used_again(stage: Stage) -> None:
    wait_usable(stage.engine)
    stage.use()


def _die_and_return(stage: Stage, record: Record, away_s: float) -> None:
    engine, daemon, oracle = stage.engine, stage.daemon, stage.oracle
    # What the same use costs on this machine at this moment with a daemon that is there.
    healthy = engines.seconds_of(stage.use)
    files = engines.memory_files(engine.pid)
    assert files
    under_way = stage.copies_both_ways()
    daemon.kill()
    killed = time.monotonic()
    if away_s > FAST_S:
        # The copies end in memory that only this engine still has.
        hand(engine, "go")
        steps = Steps(engine)
        steps.healthy(lambda: None)
        while time.monotonic() - killed < away_s:
            stage.ask(stage.fresh(100))
        steps.check(record)
    stage.daemon = Daemon(MEMORY, folder=daemon.folder, wait=False)
    if away_s <= FAST_S:
        assert time.monotonic() - killed < 20 * FAST_S, "this machine is too slow for a fast return"
    stage.daemon.wait_serving()
    serving = time.monotonic()
    hand(engine, "go")
    for name, asked in under_way:
        check(engine.wait([name])[0], oracle.tokens(asked, COUNT))
    _used_again(stage)
    took = time.monotonic() - serving
    record.worst("used_again_s", took)
    record.worst("healthy_use_s", healthy)
    assert took < USED_AGAIN_WITHIN_S + healthy, (took, healthy)
    wait_for(lambda: not engines.memory_files(engine.pid) & files, 2, "the old memory to be unmapped")
    assert engines.open_memory_files(engine.pid) == 0


@pytest.mark.parametrize(
    ("away_s", "times"), [(0.0, rounds(3, 20)), (AWAY_S, rounds(1, 2))], ids=["fast", "slow"]
)
def test_a_daemon_that_dies_with_copies_in_flight_and_comes_back(
    stage: Stage, away_s: float, times: int
) -> None:
    with Record("4 a real engine: daemon death and return", facts={"away_s": away_s}) as record:
        for _ in range(times):
            _die_and_return(stage, record, away_s)
            record.rounds += 1
        engines.check_quiet(stage.engine)
        engines.wait_nothing_held(stage.daemon)


# It stands still.


def _freeze_at(stage: Stage, point: str) -> list[tuple[str, list[int]]]:
    """Freezes the daemon at a point of a request's course; returns the requests under way."""
    engine = stage.engine
    if point == "copies":
        under_way = stage.copies_both_ways()
        stage.daemon.freeze()
        hand(engine, "go")
        return under_way
    for _ in range(10):
        known, new = stage.stored(), stage.fresh()
        if point == "before":
            stage.daemon.freeze()
        else:
            hand(engine, "stop_daemon_at", point, stage.daemon.pid)
        under_way = [(engine.submit(asked, COUNT), asked) for asked in (known, new)]
        if engines.came(lambda: process_state(stage.daemon.pid) == "T"):
            return under_way
        engine.wait([name for name, _ in under_way])
    raise AssertionError(f"no request came to {point} on this machine")


def _stand_still(stage: Stage, point: str, frozen_s: float, record: Record) -> None:
    engine, oracle, daemon = stage.engine, stage.oracle, stage.daemon
    steps = Steps(engine)
    steps.healthy(lambda: [stage.use() for _ in range(2)])
    steps.start()
    under_way = _freeze_at(stage, point)
    try:
        for name, asked in under_way:
            check(engine.wait([name])[0], oracle.tokens(asked, COUNT), point)
        began = time.monotonic()
        while True:
            stage.ask(stage.fresh(100))
            if time.monotonic() - began > frozen_s:
                break
        # Nobody hears of it, and nobody waits.
        (again,) = engine.generate([under_way[0][1]], COUNT)
        check(again, oracle.tokens(under_way[0][1], COUNT), point)
        steps.check(record)
    finally:
        daemon.thaw()
    thawed = time.monotonic()
    wait_usable(engine)
    record.worst("usable_again_s", time.monotonic() - thawed)
    stage.use()
    wait_settled(engine)

    def given_back() -> bool:
        pinned, _, quarantined = engines.held(daemon)
        return (pinned, quarantined) == (0, 0)

    wait_for(given_back, 5, "late pins to be given back")
    daemon.check_integrity()


POINTS = ["before", "lookup", "pin", "hold", "load", "copies", "commit", "release"]


@pytest.mark.parametrize("frozen_s", [scale(1, 2), scale(7, 30)], ids=["short", "longer than any call"])
def test_a_daemon_that_stands_still_at_every_step(stage: Stage, frozen_s: float) -> None:
    # A call may take five seconds: what is on its way then is another matter than what comes late.
    points = POINTS if frozen_s < 5 or LONG else ["pin", "hold", "commit"]
    facts: dict[str, object] = {"frozen_s": frozen_s}
    with Record("5 a real engine: frozen daemon", facts=facts) as record:
        for _ in range(rounds(1, 3) if frozen_s < 10 else 1):
            for point in points:
                _stand_still(stage, point, frozen_s, record)
                record.rounds += 1
        engines.check_quiet(stage.engine)
        # Grants held ahead, too, once the engine is idle.
        engines.wait_nothing_held(stage.daemon)
