"""Requests that end early, daemons that are not there: nothing stays held, nobody waits (B3, B7, D6, I8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connector.plane import Plane
from tests.connector.sim import Shape, Sim, answer
from tests.e2e.models import prompt
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

Make = Callable[..., Sim]

ASKED = prompt(100)


def held(daemon: Daemon) -> int:
    """Bytes pinned or quarantined; grants that are held ahead do not count."""
    memory = daemon.status().memory
    return int(memory.pinned_bytes + memory.quarantined_bytes)


def step_until(sim: Sim, condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        sim.step()


def phase(sim: Sim, name: str) -> str:
    view = sim.connector.scheduling.manager.view(name)
    return view.phase.name if view is not None else ""


def looked_up(sim: Sim, plane: Plane, name: str) -> None:
    wait_for(lambda: phase(sim, name) == "ASKED")


def pinned(sim: Sim, plane: Plane, name: str) -> None:
    # No block is free: what is pinned cannot be allocated.
    pool = sim.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    step_until(sim, lambda: phase(sim, name) == "PINNED")
    pool.free_blocks(taken)


def loading(sim: Sim, plane: Plane, name: str) -> None:
    plane.hold("load")
    step_until(sim, lambda: plane.entered["load"])


def loaded(sim: Sim, plane: Plane, name: str) -> None:
    step_until(sim, lambda: sim.outcomes[name].tokens)


def storing(sim: Sim, plane: Plane, name: str) -> None:
    plane.hold("store")
    step_until(sim, lambda: plane.entered["store"])


STATES = [looked_up, pinned, loading, loaded, storing]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_an_abort_in_any_state_leaves_nothing_held(
    engine: Make, daemon: Daemon, plane: Plane, state: Callable[..., None]
) -> None:
    engine().ask(ASKED, 1)
    sim = engine()
    wait_for(lambda: sim.connector.scheduling.board.usable)
    for seed in range(3):
        plane.entered.clear()
        # What is to be stored must be new.
        name = sim.add(prompt(100, seed=50 + seed) if state is storing else ASKED, 50)
        state(sim, plane, name)
        sim.abort([name])
        plane.go()
        sim.run()
        wait_for(lambda: held(daemon) == 0)
        assert sim.free_blocks() == sim.shape.blocks - 1
        assert sim.scheduler.reset_prefix_cache(False, False)
    assert sim.ask(ASKED, 5).tokens == answer(ASKED, 5)


def test_many_aborts_while_loading_give_every_block_back(engine: Make, daemon: Daemon, plane: Plane) -> None:
    engine().ask(ASKED, 1)
    sim = engine()
    for _ in range(50):
        plane.entered.clear()
        plane.hold("load")
        name = sim.add(ASKED, 5)
        step_until(sim, lambda: plane.entered["load"])
        sim.abort([name])
        plane.go()
        sim.run()
        assert sim.scheduler.reset_prefix_cache(False, False)
    wait_for(lambda: held(daemon) == 0)
    # A pool that leaked would have no room now.
    assert sim.ask(prompt(600, seed=4), 1).tokens == answer(prompt(600, seed=4), 1)


def test_pins_that_find_no_blocks_go_back_and_are_taken_again(engine: Make, daemon: Daemon) -> None:
    engine().ask(ASKED, 1)
    sim = engine()
    pool = sim.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    name = sim.add(ASKED, 5)
    step_until(sim, lambda: phase(sim, name) == "PINNED")
    step_until(sim, lambda: phase(sim, name) != "PINNED")
    pool.free_blocks(taken)
    sim.run()
    assert sim.outcomes[name].cached_tokens == 96
    assert sim.outcomes[name].tokens == answer(ASKED, 5)


def test_loads_larger_than_half_the_device_all_finish(engine: Make) -> None:
    prompts = [prompt(320, seed=seed) for seed in range(6)]
    writer = engine()
    for asked in prompts:
        writer.ask(asked, 1)
    reader = engine(Shape(blocks=36, max_seqs=6))
    names = [reader.add(asked, 3) for asked in prompts]
    reader.run(60)
    assert [reader.outcomes[name].tokens for name in names] == [answer(asked, 3) for asked in prompts]


# Daemons.


def test_without_a_daemon_the_first_request_does_not_wait(engine: Make, tmp_path: Path) -> None:
    sim = engine(socket=str(tmp_path / "kvhostd.sock"), attach_wait_ms=30_000)
    wait_for(lambda: sim.connector.scheduling._link.problem)
    began = time.monotonic()
    assert sim.ask(ASKED, 5).tokens == answer(ASKED, 5)
    assert time.monotonic() - began < 5


def test_a_daemon_that_comes_later_is_used(engine: Make, daemon: Daemon, tmp_path: Path) -> None:
    sim = engine(socket=str(tmp_path / "kvhostd.sock"), attach_wait_ms=100)
    sim.ask(ASKED, 1)
    with Daemon("8MiB", folder=tmp_path):
        wait_for(lambda: sim.connector.scheduling.board.usable, 10)
        assert sim.scheduler.reset_prefix_cache(False, False)
        sim.ask(ASKED, 1)
        assert sim.scheduler.reset_prefix_cache(False, False)
        assert sim.ask(ASKED, 1).cached_tokens == 96


def test_a_new_engine_waits_for_its_first_attachment(engine: Make) -> None:
    engine().ask(ASKED, 1)
    # No time passes between the making of the engine and its first request.
    assert engine().ask(ASKED, 1).cached_tokens == 96


def test_a_load_whose_daemon_died_before_it_began_is_recomputed(
    engine: Make, daemon: Daemon, plane: Plane
) -> None:
    engine().ask(ASKED, 1)
    sim = engine(copy_threads=1)
    plane.hold("load")
    first, second = sim.add(ASKED, 5), sim.add(prompt(90, seed=3), 5)
    step_until(sim, lambda: plane.entered["load"])
    daemon.kill()
    wait_for(lambda: not sim.connector.scheduling.board.has_session)
    plane.go()
    sim.run()
    assert sim.outcomes[first].tokens == answer(ASKED, 5)
    assert sim.outcomes[second].tokens == answer(prompt(90, seed=3), 5)


@pytest.mark.parametrize("when", ["before the lookup", "between lookup and load", "during the commit"])
def test_a_stopped_daemon_costs_no_step_anything(
    engine: Make, daemon: Daemon, plane: Plane, when: str
) -> None:
    engine().ask(ASKED, 1)
    sim = engine(deadline_ms=100)
    wait_for(lambda: sim.connector.scheduling.board.usable)
    other = prompt(100, seed=6)
    if when == "before the lookup":
        daemon.freeze()
        name = sim.add(ASKED, 5)
    elif when == "between lookup and load":
        plane.hold("load")
        name = sim.add(ASKED, 5)
        step_until(sim, lambda: plane.entered["load"] or sim.outcomes[name].tokens)
        daemon.freeze()
        plane.go()
    else:
        plane.hold("store")
        name = sim.add(other, 5)
        step_until(sim, lambda: plane.entered["store"])
        daemon.freeze()
        plane.go()
    try:
        began = time.monotonic()
        sim.run()
        assert time.monotonic() - began < 10
        expected = answer(other if when == "during the commit" else ASKED, 5)
        assert sim.outcomes[name].tokens == expected
        # The next requests do not even wait for the deadline.
        wait_for(lambda: sim.connector.scheduling.board.silent or not sim.connector.scheduling.board.usable)
        for seed in range(20, 24):
            assert sim.ask(prompt(40, seed=seed), 2).tokens == answer(prompt(40, seed=seed), 2)
    finally:
        daemon.thaw()
    wait_for(lambda: sim.connector.scheduling.board.usable, 10)
    wait_for(lambda: held(daemon) == 0)


def test_an_operator_who_ends_the_session_costs_a_moment(engine: Make, daemon: Daemon) -> None:
    import grpc

    from kvhost_proto.v1 import admin_pb2, admin_pb2_grpc

    sim = engine()
    sim.ask(ASKED, 1)
    (session,) = daemon.status().sessions
    with grpc.insecure_channel(f"unix:{daemon.admin_socket}") as channel:
        admin_pb2_grpc.AdminStub(channel).EndSession(
            admin_pb2.EndSessionRequest(number=session.number), timeout=10
        )
    board = sim.connector.scheduling.board
    wait_for(lambda: not board.usable)
    # The worker's connection lived on; it attaches again with a token of its own making or its old one.
    while not board.usable:
        sim.ask(prompt(20), 1)
    assert sim.scheduler.reset_prefix_cache(False, False)
    assert sim.ask(ASKED, 5).tokens == answer(ASKED, 5)
