"""Engines that share: what one stored the other takes, exactly, and only where it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.connector.sim import Shape, Sim, answer
from tests.e2e.models import prompt
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

Make = Callable[..., Sim]

SHAPES = {
    "one rank": Shape(),
    "two ranks": Shape(ranks=2),
    "windowed layers": Shape(window=40, blocks=128),
    "windowed layers, two ranks": Shape(window=40, blocks=128, ranks=2),
    "small steps": Shape(max_batched_tokens=48),
}


def pool_bytes(daemon: Daemon) -> dict[str, int]:
    memory = daemon.status().memory
    return {name: getattr(memory, f"{name}_bytes") for name in ("used", "pinned", "granted")}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_a_second_engine_takes_every_full_block(engine: Make, shape: Shape) -> None:
    asked = prompt(200)
    first = engine(shape).ask(asked, 20)
    second = engine(shape).ask(asked, 20)
    assert (first.cached_tokens, second.cached_tokens) == (0, 192)
    assert first.tokens == second.tokens == answer(asked, 20)


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 4])
def test_prompts_around_a_block_boundary(engine: Make, blocks: int, over: int) -> None:
    asked = prompt(16 * blocks + over)
    one, other = engine(), engine()
    one.ask(asked, 2)
    outcome = other.ask(asked, 2)
    assert outcome.cached_tokens == len(asked) // 16 * 16
    assert outcome.tokens == answer(asked, 2)


def test_a_prompt_that_shares_its_first_part_takes_that_part(engine: Make) -> None:
    engine().ask(prompt(200), 2)
    asked = prompt(100) + prompt(100, seed=5)
    outcome = engine().ask(asked, 4)
    assert outcome.cached_tokens == 96
    assert outcome.tokens == answer(asked, 4)


def test_tokens_that_were_generated_are_stored_when_asked_to(engine: Make) -> None:
    asked = prompt(50)
    said = engine(offload_prompt_only=False).ask(asked, 60).tokens
    outcome = engine(offload_prompt_only=False).ask(asked + said, 1)
    assert outcome.cached_tokens == 96
    assert engine(offload_prompt_only=True).ask(asked + said + [7] * 16, 1).cached_tokens == 96


def test_generated_tokens_are_not_stored_otherwise(engine: Make) -> None:
    asked = prompt(50)
    said = engine().ask(asked, 60).tokens
    assert engine().ask(asked + said, 1).cached_tokens == 48


@pytest.mark.parametrize("chunk", [2, 4])
def test_chunks_of_several_blocks(engine: Make, chunk: int) -> None:
    asked = prompt(200)
    engine(blocks_per_chunk=chunk).ask(asked, 2)
    outcome = engine(blocks_per_chunk=chunk).ask(asked, 20)
    assert outcome.cached_tokens == 200 // (16 * chunk) * 16 * chunk
    assert outcome.tokens == answer(asked, 20)
    # Half of it on the device already: the load begins in the middle of a chunk.
    third = engine(blocks_per_chunk=chunk)
    third.ask(prompt(112), 1)
    assert third.ask(asked, 20).tokens == answer(asked, 20)


def test_salts_keep_requests_apart_and_no_salt_is_one_salt(engine: Make) -> None:
    asked = prompt(64)
    engine().ask(asked, 1, cache_salt="x")
    taken = {salt: engine().ask(asked, 1, cache_salt=salt).cached_tokens for salt in ("y", None, "", "x")}
    assert taken == {"y": 0, None: 0, "": 64, "x": 64}


def test_only_what_is_loaded_is_pinned_and_only_while_it_is(engine: Make, daemon: Daemon, plane: Any) -> None:
    asked = prompt(64)
    engine().ask(asked, 1)
    slot = pool_bytes(daemon)["used"] // 4
    reader = engine()
    reader.ask(asked[:32], 1)
    plane.hold("load")
    plane.entered.clear()
    name = reader.add(asked, 1)
    while not plane.entered["load"]:
        reader.step()
    # Two of four chunks were on the device.
    assert pool_bytes(daemon)["pinned"] == 2 * slot
    plane.go()
    reader.run()
    assert reader.outcomes[name].tokens == answer(asked, 1)
    wait_for(lambda: pool_bytes(daemon)["pinned"] == 0)
    # All four are there now: nothing is pinned for the same question again.
    reader.ask(asked, 1)
    wait_for(lambda: pool_bytes(daemon)["pinned"] == 0)


def test_requests_with_one_prefix_wait_for_one_load(engine: Make, plane: Any) -> None:
    asked = prompt(130)
    engine().ask(asked, 1)
    reader = engine(Shape(max_seqs=10))
    plane.delay_s = 0.05
    names = [reader.add(asked + [3 + n] * 5, 3) for n in range(10)]
    reader.run()
    assert plane.entered["load"] == 8, "each request loaded the prefix for itself"
    for n, name in enumerate(names):
        assert reader.outcomes[name].tokens == answer(asked + [3 + n] * 5, 3)


def test_two_engines_at_the_same_time(engine: Make) -> None:
    one, other = engine(), engine()
    prompts = [prompt(100, seed=seed) for seed in range(6)]
    for asked in prompts:
        for sim in (one, other):
            sim.add(asked, 5)
    while one.scheduler.has_requests() or other.scheduler.has_requests():
        for sim in (one, other):
            if sim.scheduler.has_requests():
                sim.step()
    for sim in (one, other):
        assert [outcome.tokens for outcome in sim.outcomes.values()] == [answer(p, 5) for p in prompts]


@pytest.mark.parametrize(
    "difference",
    [
        {"shape": Shape(layers=3)},
        {"shape": Shape(ranks=2)},
        {"namespace": "mine"},
        {"weights_version": "v2"},
        {"blocks_per_chunk": 2},
        {"arguments": {"dtype": "float32"}},
        {"arguments": {"hf_overrides": {"rope_theta": 5e5}}},
    ],
    ids=str,
)
def test_engines_that_differ_share_nothing(engine: Make, difference: dict[str, Any]) -> None:
    asked = prompt(100)
    engine().ask(asked, 2)
    outcome = engine(difference.pop("shape", None), **difference).ask(asked, 2)
    assert outcome.cached_tokens == 0
    assert outcome.tokens == answer(asked, 2)


def test_corrupted_bytes_are_seen_by_these_tests(engine: Make, daemon: Daemon, plane: Any) -> None:
    """The negative control: answers depend on the bytes that came from the pool."""
    asked = prompt(100)
    engine().ask(asked, 1)
    reader = engine()
    (worker,) = reader.workers
    host = worker.connector.working.worker
    copy_batch = host._copy_batch

    def corrupting(job: Any, batch: Any, pages: Any, copier: Any, mapping: Any) -> int:
        from kvhost_connector.pages import bytes_at

        for slot in job.plan.slots[batch.first : batch.end]:
            address, _ = mapping.shard(slot, 0)
            bytes_at(address, 64)[:] ^= 0xFF
        return int(copy_batch(job, batch, pages, copier, mapping))

    host._copy_batch = corrupting
    reader.ask(asked, 1)
    assert reader.wrong
    reader.wrong.clear()


def test_a_prompt_that_was_evicted_is_stored_whole_again(engine: Make) -> None:
    """Every block of it was removed: none of them keeps the next from being stored."""
    with Daemon("2MiB", ("--segment-size", "512KiB")) as small:
        sim = engine(Shape(blocks=128, max_batched_tokens=2048), socket=small.socket)
        asked = prompt(640)
        sim.ask(asked)
        for number in range(1, 41):
            sim.ask(prompt(960, seed=number))
        wait_for(lambda: small.status().counters["evicted_chunks"] > 1000)
        device_forgets(sim)
        assert sim.ask(asked).cached_tokens < 320
        device_forgets(sim)
        outcome = sim.ask([*asked, 7])
        assert outcome.cached_tokens == 640
        assert outcome.tokens == answer([*asked, 7], 1)


def device_forgets(sim: Sim) -> None:
    sim.settle()
    assert sim.scheduler.reset_prefix_cache(False, False)
