"""Real engines under fire: how drills start them, what they compare with, and when all is quiet again.

Answers are compared token by token with an engine that has no connector and is asked one request at a time.
Models are in float32: in bfloat16 greedy tokens depend on who else is in the batch, cache or not.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.connector.plane import ENVIRONMENT
from tests.drills.scale import Record
from tests.e2e.engine import Answer, Engine
from tests.e2e.kvhost import kv_transfer
from tests.support import Daemon, wait_for

BLOCK = 32
# The p99 of a step in a quiet engine is far below this; what is above is load of the machine under test.
QUIET_STEP_S = 0.03
STEP_BOUND_S = 0.1

# A start takes some ten seconds, and minutes where many wait for each core.
ARGUMENTS: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "start_deadline_s": 240.0}

_HANDS = "tests.drills.hands:"


def engine(
    model: Path,
    daemon: Daemon,
    *,
    policy: str = "recompute",
    extra: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
    **arguments: Any,
) -> Engine:
    """An engine with a connector and a fault plane, not started. `extra` are settings of the connector."""
    merged = {**ARGUMENTS, **arguments}
    transfer = kv_transfer(daemon.socket, policy=policy, **(extra or {}))
    return Engine(model, kv_transfer=transfer, environment=environment, **merged)


class Oracle:
    """What the model says without a cache. Every answer is computed once."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        self._engine = Engine(model, **{**ARGUMENTS, **arguments})
        self._started = False
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._flipped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._engine.close()

    def launch(self) -> Self:
        """Starts in the background, beside whatever the test starts itself."""
        if not self._started:
            self._engine.launch()
            self._started = True
        return self

    def tokens(
        self, asked: Sequence[int], count: int, *, flipped: bool = False, allowed: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """The next `count` tokens, out of those `allowed` if any are named; with `flipped`, of the model with
        `hands.flip_weights` applied."""
        key = (flipped, tuple(allowed), *asked)
        known = self._known.get(key, ())
        if len(known) < count:
            self.launch()._engine.wait_ready()
            if flipped != self._flipped:
                hand(self._engine, "flip_weights")
                self._flipped = flipped
            assert self._engine.reset_prefix_cache()
            sampling = {"allowed_token_ids": list(allowed)} if allowed else {}
            (answer,) = self._engine.generate([asked], max_tokens=count, **sampling)
            known = self._known[key] = answer.tokens
        return known[:count]


# Hands in the engine's process.


def hand(engine: Engine, name: str, *arguments: Any, deadline_s: float = 60.0) -> Any:
    """Calls a function of `hands` in the engine's process."""
    return engine.call(_HANDS + name, *arguments, deadline_s=deadline_s)


def wait_usable(engine: Engine, deadline_s: float = 10.0) -> None:
    wait_for(lambda: hand(engine, "usable"), deadline_s, "the engine to use the cache")


def wait_settled(engine: Engine, deadline_s: float = 20.0) -> None:
    """Until all transfers are reported and the daemon knows of them."""

    def settled() -> bool:
        told = hand(engine, "holds")
        return bool(told["idle"] and not told["transfers"])

    wait_for(settled, deadline_s, "the transfers to be reported and known")


def came(condition: Callable[[], object], within_s: float = 4.0) -> bool:
    """Whether a point in a request's course is reached. On a busy machine an answer may miss its deadline,
    the request is computed, and the drill tries again."""
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def hold_copies(engine: Engine, known: Sequence[int], new: Sequence[int], count: int) -> list[str]:
    """Asks for both, and returns when a load of the one and a store of the other have begun; they are held.

    Empty when the answer to the lookup came too late and there was nothing to load.
    """
    hand(engine, "hold", "load", "store")
    names = [engine.submit(known, count)]
    if came(lambda: "load" in hand(engine, "entered")):
        # Only now: stores would take both copying threads, and the load would wait behind them.
        names.append(engine.submit(new, count))
        wait_for(lambda: "store" in hand(engine, "entered"), 30, "a store to begin")
        return names
    hand(engine, "go")
    engine.wait(names)
    return []


# Asking.


def ask(engine: Engine, asked: Sequence[int], count: int = 12, deadline_s: float = 60.0) -> Answer:
    (answer,) = engine.generate([asked], count, deadline_s)
    return answer


def ask_afresh(engine: Engine, asked: Sequence[int], count: int = 12) -> Answer:
    """Asks when nothing of it is on the device: what is cached came from the daemon."""
    wait_settled(engine)
    wait_for(engine.reset_prefix_cache, 10, "the device's cache to be emptied")
    return ask(engine, asked, count)


def check(answer: Answer, expected: tuple[int, ...], what: object = "") -> None:
    assert answer.finish_reason == "length", (what, answer)
    assert answer.tokens == expected, (what, answer, expected)


# What must be so afterwards.


def check_quiet(engine: Engine) -> None:
    """No request, no block and no transfer is left in the engine."""
    wait_settled(engine)
    wait_for(lambda: engine.state().requests == 0, 10, "the last requests to end")
    state = engine.state()
    assert (state.requests, state.free_blocks) == (0, state.blocks - 1), state
    told = hand(engine, "holds")
    assert told["transfers"] == 0, told
    assert told["broken"] is False, told


def held(daemon: Daemon) -> tuple[int, int, int]:
    memory = daemon.status().memory
    return memory.pinned_bytes, memory.granted_bytes, memory.quarantined_bytes


def wait_nothing_held(daemon: Daemon, deadline_s: float = 15.0) -> None:
    """Idle engines give back even what they hold ahead (after five seconds)."""
    wait_for(lambda: held(daemon) == (0, 0, 0), deadline_s, "pins, grants and quarantine to be empty")
    daemon.check_integrity()


def memory_files(pid: int) -> set[str]:
    """Inodes of the pool segments a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:kvhost" in line}


def open_memory_files(pid: int) -> int:
    entries = [entry for entry in os.scandir(f"/proc/{pid}/fd") if os.path.islink(entry.path)]
    return sum("memfd:kvhost" in os.readlink(entry.path) for entry in entries)


class Steps:
    """Step times of an engine, of which a drill promises that no daemon can stretch them.

    The bound is 0.1 s for the p99. Where the machine itself is so loaded that a healthy engine has slow
    steps, it grows in proportion: `healthy` measures that on the same engine a moment before.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._baseline = 0.0

    def healthy(self, work: Callable[[], object]) -> None:
        self._engine.state()
        work()
        self._baseline = max(self._baseline, p99(self._engine.state().steps_s))

    def start(self) -> None:
        self._engine.state()

    def check(self, record: Record) -> None:
        """Of the steps since `start`."""
        steps = self._engine.state().steps_s
        bound = STEP_BOUND_S * max(1.0, self._baseline / QUIET_STEP_S)
        record.worst("healthy_p99_s", self._baseline)
        record.worst("step_p99_s", p99(steps))
        record.worst("step_max_s", max(steps))
        assert p99(steps) < bound, (p99(steps), self._baseline, sorted(steps)[-5:])
        # One step that waits would hide behind the p99 of many.
        assert max(steps) < 5 * bound, (max(steps), self._baseline)


def p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)] if seconds else 0.0


def deadline(within_s: float) -> Callable[[], bool]:
    """Says whether so many seconds have passed since this call."""
    until = time.monotonic() + within_s
    return lambda: time.monotonic() > until


def seconds_of(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start
