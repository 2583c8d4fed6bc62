"""Weights that change: nothing of before is served to that engine or stored by it, others keep it (I12)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.connector.plane import Plane
from tests.connector.sim import Shape, Sim, answer
from tests.e2e.models import prompt
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

Make = Callable[..., Sim]

ASKED = prompt(100)


def new_weights(sim: Sim, version: str = "") -> None:
    """The weights change, whether the device's cache could be emptied or not."""
    sim.connector._extra_config["weights_version"] = version
    assert sim.scheduler.reset_connector_cache()
    sim.weights += 1


def without_device_cache() -> dict[str, Any]:
    """Every hit comes from kvhost: what the device kept of older weights is vLLM's to forget."""
    return {"arguments": {"enable_prefix_caching": False}}


def attached(sim: Sim) -> None:
    """What is asked now can be found, and what is computed stored: a reset gives all grants back, and an
    engine that does not work asks for none."""
    board = sim.connector.scheduling.board
    sim.connector.scheduling.manager.flush()
    wait_for(lambda: board.usable and len(board.stock), what="the engine to be attached, with grants")


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_stored_before_is_not_served_and_the_new_is(engine: Make, ranks: int) -> None:
    sim = engine(Shape(ranks=ranks))
    assert sim.ask(ASKED, 5).tokens == answer(ASKED, 5)
    assert sim.reset()
    attached(sim)
    fresh = sim.ask(ASKED, 5)
    assert (fresh.cached_tokens, fresh.tokens) == (0, answer(ASKED, 5, weights=1))
    assert sim.scheduler.reset_prefix_cache(False, False)
    again = sim.ask(ASKED, 5)
    assert (again.cached_tokens, again.tokens) == (96, answer(ASKED, 5, weights=1))


def test_an_engine_with_the_old_weights_keeps_its_cache(engine: Make) -> None:
    changed, other = engine(), engine()
    changed.ask(ASKED, 1)
    assert changed.reset()
    attached(changed)
    changed.ask(ASKED, 1)
    kept = other.ask(ASKED, 5)
    assert (kept.cached_tokens, kept.tokens) == (96, answer(ASKED, 5))


def test_engines_that_name_the_same_version_share_afterwards(engine: Make) -> None:
    one, other, third = engine(), engine(), engine()
    for sim, version in ((one, "v2"), (other, "v2"), (third, "")):
        new_weights(sim, version)
        attached(sim)
    one.ask(ASKED, 1)
    assert other.ask(ASKED, 1).cached_tokens == 96
    assert third.ask(ASKED, 1).cached_tokens == 0
    # The same name again does not name other weights.
    new_weights(other, "v2")
    attached(other)
    assert other.scheduler.reset_prefix_cache(False, False)
    assert other.ask(ASKED, 1).cached_tokens == 0


@pytest.mark.parametrize("resets", [1, 2, 3])
def test_loads_under_way_are_failed(engine: Make, plane: Plane, resets: int) -> None:
    engine(**without_device_cache()).ask(ASKED, 1)
    sim = engine(**without_device_cache())
    plane.hold("load")
    name = sim.add(ASKED, 5)
    while not plane.entered["load"]:
        sim.step()
    for _ in range(resets):
        new_weights(sim)
    # It computes nothing before the load is over: all of its answer is of the new weights.
    sim._added_under[name] = sim.weights
    plane.go()
    sim.run()
    assert sim.outcomes[name].tokens == answer(ASKED, 5, weights=resets)


def test_stores_under_way_are_not_committed(engine: Make, plane: Plane, daemon: Daemon) -> None:
    sim = engine(**without_device_cache())
    plane.hold("store")
    name = sim.add(ASKED, 30)
    while not plane.entered["store"]:
        sim.step()
    new_weights(sim)
    plane.go()
    sim.run()
    assert len(sim.outcomes[name].tokens) == 30
    attached(sim)
    fresh = sim.ask(ASKED, 5)
    assert (fresh.cached_tokens, fresh.tokens) == (0, answer(ASKED, 5, weights=1))
    # Nor does anybody else see them.
    assert engine(**without_device_cache()).ask(ASKED, 5).cached_tokens == 0


def test_a_running_request_stores_nothing_of_its_old_blocks(engine: Make) -> None:
    sim = engine(offload_prompt_only=False, **without_device_cache())
    name = sim.add(ASKED, 60)
    while len(sim.outcomes[name].tokens) < 20:
        sim.step()
    new_weights(sim)
    attached(sim)
    sim.run()
    said = sim.outcomes[name].tokens
    assert len(said) == 60
    assert sim.ask(ASKED + said, 1).cached_tokens == 0


def test_a_preempted_request_stores_again_what_it_computes_anew(engine: Make) -> None:
    sim = engine(offload_prompt_only=False)
    name = sim.add(ASKED, 60)
    while len(sim.outcomes[name].tokens) < 20:
        sim.step()
    assert sim.reset(running=True)
    sim._added_under[name] = sim.weights
    attached(sim)
    sim.run()
    before = sim.outcomes[name].tokens[:20]
    assert before == answer(ASKED, 20)
    assert sim.scheduler.reset_prefix_cache(False, False)
    assert sim.ask(ASKED, 5).cached_tokens == 96


def test_blocks_that_the_device_kept_of_older_weights_are_not_stored(engine: Make) -> None:
    sim = engine()
    first = sim.add(ASKED, 40)
    while len(sim.outcomes[first].tokens) < 5:
        sim.step()
    # A running request holds its blocks: vLLM cannot empty the device's cache, and says so.
    assert not sim.scheduler.reset_prefix_cache(False, True)
    attached(sim)
    # This one builds on blocks of before; nothing of it may enter the new namespace.
    second = sim.add(ASKED + prompt(50, seed=7), 2)
    sim.run()
    assert sim.outcomes[second].cached_tokens == 96
    assert sim.scheduler.reset_prefix_cache(False, False)
    assert sim.ask(ASKED + prompt(50, seed=7), 1).cached_tokens == 0


def test_a_reset_takes_no_time_and_holds_with_the_daemon_down(engine: Make, daemon: Daemon) -> None:
    sim = engine(**without_device_cache())
    sim.ask(ASKED, 1)
    daemon.freeze()
    began = time.monotonic()
    new_weights(sim)
    assert time.monotonic() - began < 0.1
    name = sim.add(ASKED, 5)
    sim.run()
    assert sim.outcomes[name].tokens == answer(ASKED, 5, weights=1)
    daemon.thaw()
    attached(sim)
    fresh = sim.ask(ASKED, 5)
    assert fresh.tokens == answer(ASKED, 5, weights=1)
    assert sim.ask(ASKED, 5).cached_tokens == 96
    # With the old weights there is a cache of its own, still.
    assert engine(**without_device_cache()).ask(ASKED, 5).cached_tokens == 96


def test_after_a_restart_of_the_daemon_the_new_weights_are_declared(
    engine: Make, daemon: Daemon, plane: Plane
) -> None:
    sim = engine(**without_device_cache())
    sim.ask(ASKED, 1)
    new_weights(sim, "v2")
    attached(sim)
    sim.ask(ASKED, 1)
    daemon.kill()
    with Daemon("8MiB", folder=daemon.folder):
        attached(sim)
        sim.ask(ASKED, 1)
        assert sim.ask(ASKED, 1).cached_tokens == 96
        # Another engine that only now comes to these weights shares them; one with the old ones does not.
        other = engine(**without_device_cache())
        assert other.ask(ASKED, 1).cached_tokens == 0
        new_weights(other, "v2")
        attached(other)
        assert other.ask(ASKED, 1).cached_tokens == 96


def test_a_reset_when_no_daemon_was_ever_there(engine: Make, tmp_path: Any) -> None:
    sim = engine(socket=str(tmp_path / "none.sock"), attach_wait_ms=100)
    assert sim.ask(ASKED, 5).tokens == answer(ASKED, 5)
    assert sim.reset()
    assert sim.ask(ASKED, 5).tokens == answer(ASKED, 5, weights=1)
