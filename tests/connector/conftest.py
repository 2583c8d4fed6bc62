"""What the tests with a whole engine share: a real daemon, a fault plane, and what must hold afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.connector.plane import ENVIRONMENT, Plane, fresh_plane
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for


@pytest.fixture(scope="session", autouse=True)
def _frozen_heap() -> None:
    """As vLLM's engine core does: a full collection over its heap takes as long as hundreds of steps."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB") as made:
        yield made


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with fresh_plane() as made:
        yield made


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Callable[..., Any]]:
    """Makes engines without a model; at the end all of them, and the daemon, must hold nothing."""
    from tests.connector.sim import Shape, Sim, kv_transfer

    with ExitStack() as stack:
        made: list[Sim] = []

        def make(shape: Shape | None = None, *, policy: str = "recompute", **extra: Any) -> Sim:
            weights = extra.pop("weights", 0)
            arguments = extra.pop("arguments", {})
            transfer = kv_transfer(extra.pop("socket", daemon.socket), policy, **extra)
            sim = Sim(shape or Shape(), transfer, weights=weights, **arguments)
            stack.callback(sim.close)
            made.append(sim)
            return sim

        yield make
        for sim in made:
            check_quiet(sim)
    if daemon.returncode is None:
        check_nothing_held(daemon)


def check_quiet(sim: Any) -> None:
    """Every byte that was used was right, and nothing is left of any request (INV-2)."""
    assert sim.wrong == []
    assert not sim.scheduler.requests
    assert sim.free_blocks() == sim.shape.blocks - 1
    side = sim.connector.scheduling
    assert not side._broken
    assert side.manager.open_transfers() == 0
    assert not side.manager._views


def check_nothing_held(daemon: Daemon, deadline_s: float = 3.0) -> None:
    """The daemon holds nothing for anybody any more, and its books agree."""

    def held() -> int:
        memory = daemon.status().memory
        return int(memory.pinned_bytes + memory.granted_bytes + memory.quarantined_bytes)

    wait_for(lambda: held() == 0, deadline_s, "nothing to be held")
    daemon.check_integrity()
    anomalies = {name: count for name, count in daemon.status().anomalies.items() if count}
    # Slow machines and resets under way are no fault of the engine's.
    for expected in ("loop_lag_max_us", "loop_late", "quarantined_slots"):
        anomalies.pop(expected, None)
    assert anomalies == {}
