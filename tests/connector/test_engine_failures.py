"""Copies that fail: answers stay the same, a failed store is never seen, nobody hangs (A13, A15, C7, D7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.connector.plane import Plane
from tests.connector.sim import Shape, Sim, answer
from tests.e2e.models import prompt
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

Make = Callable[..., Sim]

SHAPES = {
    "one rank": Shape(),
    "two ranks": Shape(ranks=2),
    "windowed layers": Shape(window=40, blocks=128),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("skip", [0, 1, 4])
def test_a_load_that_fails_is_recomputed(engine: Make, plane: Plane, shape: Shape, skip: int) -> None:
    asked = prompt(100)
    engine(shape).ask(asked, 1)
    reader = engine(shape)
    plane.fail("load", skip=skip)
    outcome = reader.ask(asked, 10)
    assert plane.failed == 1
    assert outcome.tokens == answer(asked, 10)
    # The next request loads the same chunks.
    again = engine(shape).ask(asked, 10)
    assert (again.cached_tokens, again.tokens) == (96, answer(asked, 10))


def test_one_rank_that_fails_fails_the_load_of_all(engine: Make, plane: Plane) -> None:
    asked = prompt(100)
    shape = Shape(ranks=2)
    engine(shape).ask(asked, 1)
    plane.fail("load", ranks={1})
    reader = engine(shape)
    assert reader.ask(asked, 10).tokens == answer(asked, 10)
    assert plane.failed == 1


def test_a_request_whose_load_failed_does_not_load_these_chunks_again(engine: Make, plane: Plane) -> None:
    asked = prompt(100)
    engine().ask(asked, 1)
    plane.fail("load", 1000)
    plane.entered.clear()
    outcome = engine().ask(asked, 10)
    assert outcome.tokens == answer(asked, 10)
    assert plane.failed == 1
    assert plane.entered["load"] == 1


@pytest.mark.parametrize("shape", [Shape(), Shape(window=40, blocks=128)], ids=["one group", "two groups"])
def test_with_policy_fail_that_request_errors_and_no_other(engine: Make, plane: Plane, shape: Shape) -> None:
    asked, other = prompt(100), prompt(90, seed=3)
    engine(shape).ask(asked, 1)
    reader = engine(shape, policy="fail")
    plane.fail("load")
    names = [reader.add(asked, 10), reader.add(other, 10)]
    reader.run()
    failed, fine = (reader.outcomes[name] for name in names)
    assert failed.finish_reason == "error"
    assert fine.tokens == answer(other, 10)
    assert reader.ask(asked, 10).tokens == answer(asked, 10)


def test_three_requests_share_chunks_whose_load_fails_once(engine: Make, plane: Plane) -> None:
    shared = prompt(100)
    engine().ask(shared, 1)
    reader = engine()
    plane.fail("load", skip=2)
    prompts = [shared + [number] * 3 for number in (5, 6, 7)]
    names = [reader.add(asked, 6) for asked in prompts]
    reader.run()
    assert [reader.outcomes[name].tokens for name in names] == [answer(asked, 6) for asked in prompts]
    assert plane.failed == 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_a_store_that_fails_is_never_seen(engine: Make, plane: Plane, daemon: Daemon, shape: Shape) -> None:
    asked = prompt(70)
    writer = engine(shape)
    plane.fail("store", skip=1, ranks={shape.ranks - 1})
    writer.ask(asked, 4)
    assert plane.failed == 1
    assert sum(namespace.chunks for namespace in daemon.status().namespaces) == 0
    assert engine(shape).ask(asked, 4).cached_tokens == 0
    # A later store of the same chunks is a good one.
    assert engine(shape).ask(asked, 4).cached_tokens == 64


def test_a_failed_store_frees_its_slots(engine: Make, plane: Plane, daemon: Daemon) -> None:
    writer = engine()
    plane.fail("store", 1 << 30)
    for seed in range(12):
        writer.ask(prompt(64, seed=seed), 1)
    memory = daemon.status().memory
    assert memory.used_bytes == 0
    assert memory.quarantined_bytes == 0
    assert len(writer.connector.scheduling.board.stock) == memory.granted_bytes // 4096


def test_failures_are_counted(engine: Make, plane: Plane) -> None:
    asked = prompt(64)
    engine().ask(asked, 1)
    reader = engine()
    plane.fail("load")
    counted: dict[str, int] = {}
    board = reader.connector.scheduling.board
    taken = board.counters.take

    def counting() -> dict[str, int]:
        for name, count in taken().items():
            counted[name] = counted.get(name, 0) + count
        return {}

    board.counters.take = counting
    reader.ask(asked, 1)
    plane.fail("store", 1 << 30)
    reader.ask(prompt(64, seed=2), 1)
    counting()
    assert counted["failed_loads"] == 1
    assert counted["failed_stores"] == 1


# Native code that raises: contract 19.


def break_once(half: Any, name: str, error: type[Exception] = AssertionError) -> None:
    """The next call of a method of native's scheduler half raises."""
    method = getattr(half, name)

    def broken(*arguments: Any, **named: Any) -> Any:
        setattr(half, name, method)
        raise error(f"{name} breaks on purpose")

    setattr(half, name, broken)


@pytest.mark.parametrize("name", ["on_new_request", "get_num_new_matched_tokens", "request_finished"])
def test_a_hook_that_raises_costs_one_request_its_cache(engine: Make, name: str) -> None:
    asked = prompt(100)
    engine().ask(asked, 1)
    reader = engine()
    break_once(reader.connector.connector_scheduler, name)
    assert reader.ask(asked, 10).tokens == answer(asked, 10)
    assert reader.ask(prompt(80, seed=1), 10).tokens == answer(prompt(80, seed=1), 10)
    assert not reader.connector.scheduling._broken
    # A request that native never heard of is not in its books; the others are.
    reader.connector.scheduling.manager._views.clear()


def test_a_promised_load_that_native_refuses_is_reported_failed(engine: Make) -> None:
    asked = prompt(100)
    engine().ask(asked, 1)
    reader = engine()
    break_once(reader.connector.connector_scheduler, "update_state_after_alloc")
    outcome = reader.ask(asked, 10)
    assert outcome.tokens == answer(asked, 10)


def test_a_load_that_native_loses_after_its_pins_were_taken_holds_nothing(
    engine: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    asked, other = prompt(100), prompt(90, seed=2)
    engine().ask(asked, 1)
    engine().ask(other, 1)
    reader = engine()
    made = scheduler.GPULoadStoreSpec

    def broken(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(scheduler, "GPULoadStoreSpec", made)
        raise AssertionError("breaks on purpose")

    monkeypatch.setattr(scheduler, "GPULoadStoreSpec", broken)
    names = [reader.add(asked, 10), reader.add(other, 10)]
    reader.run()
    assert [reader.outcomes[name].tokens for name in names] == [answer(asked, 10), answer(other, 10)]
    assert not reader.connector.scheduling._broken
    wait_for(lambda: daemon.status().memory.pinned_bytes == 0)


@pytest.mark.parametrize("name", ["build_connector_meta", "update_connector_output"])
def test_books_in_doubt_turn_the_cache_off_and_nothing_else(
    engine: Make, daemon: Daemon, name: str, plane: Plane
) -> None:
    asked = prompt(100)
    engine().ask(asked, 1)
    reader = engine()
    plane.hold("load")
    loading = reader.add(asked, 10)
    while not plane.entered["load"]:
        reader.step()
    other = reader.add(prompt(90, seed=4), 10)
    break_once(reader.connector.connector_scheduler, name)
    reader.step()
    plane.go()
    reader.run()
    assert reader.outcomes[loading].tokens == answer(asked, 10)
    assert reader.outcomes[other].tokens == answer(prompt(90, seed=4), 10)
    assert reader.connector.scheduling._broken
    assert reader.ask(asked, 10).tokens == answer(asked, 10)
    reader.connector.scheduling._broken = False


def test_a_load_promised_in_the_step_that_broke_is_reported_failed(engine: Make) -> None:
    asked = prompt(100)
    engine().ask(asked, 1)
    reader = engine()
    half = reader.connector.connector_scheduler
    method = half.build_connector_meta

    def broken(output: Any) -> Any:
        if half._current_batch_load_jobs:
            half.build_connector_meta = method
            raise AssertionError("breaks on purpose")
        return method(output)

    half.build_connector_meta = broken
    assert reader.ask(asked, 10).tokens == answer(asked, 10)
    assert reader.connector.scheduling._broken
    reader.connector.scheduling._broken = False
