"""Drills 7 and 8 on other models: windowed layers, latent attention, two ranks.

Answers are those of the same model without a connector, also when copies fail; afterwards no block is left.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.drills import engines, ranks, tiny
from tests.drills.engines import Oracle, ask, ask_afresh, check, hand, wait_settled, wait_usable
from tests.drills.scale import Record, rounds, scale
from tests.e2e.engine import Engine
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support import Daemon, wait_for

pytestmark = pytest.mark.timeout(scale(600, 1800))

COUNT = 12


@contextmanager
def _pair(model: Path, **arguments: Any) -> Iterator[tuple[Engine, Oracle, Daemon]]:
    """A model with a connector and without."""
    with Daemon("32MiB") as daemon, Oracle(model, **arguments) as alone:
        alone.launch()
        with engines.engine(model, daemon, extra={"offload_prompt_only": False}, **arguments) as engine:
            wait_usable(engine)
            yield engine, alone, daemon


def _comes_back(engine: Engine, alone: Oracle, record: Record, seed: int) -> None:
    for number in range(rounds(2, 12)):
        asked = prompt(500, seed + number)
        for _ in range(2):
            check(ask(engine, asked, COUNT), alone.tokens(asked, COUNT), number)
        answer = ask_afresh(engine, asked, COUNT)
        check(answer, alone.tokens(asked, COUNT), number)
        assert answer.cached_tokens >= 400, answer
        record.rounds += 1


def _failures(engine: Engine, alone: Oracle, record: Record, seed: int) -> None:
    for number in range(rounds(3, 18)):
        asked, other = prompt(500, seed + number), prompt(200, seed + 100 + number)
        check(ask(engine, asked, COUNT), alone.tokens(asked, COUNT), number)
        wait_settled(engine)
        assert engine.reset_prefix_cache()
        hand(engine, "fail", "load", 1, (0, 3, 6)[number % 3])
        for answer, tokens in zip(engine.generate([asked, other], COUNT), (asked, other), strict=True):
            check(answer, alone.tokens(tokens, COUNT), number)
        assert hand(engine, "entered")["failed"] == 1
        # A store that fails, and everything that is asked for after it.
        lost = prompt(500, seed + 200 + number)
        hand(engine, "fail", "store", 1 << 30, 0)
        check(ask(engine, lost, COUNT), alone.tokens(lost, COUNT), number)
        wait_settled(engine)
        assert hand(engine, "entered")["failed"] >= 1
        hand(engine, "fail", "store", 0, 0)
        answer = ask_afresh(engine, lost, COUNT)
        check(answer, alone.tokens(lost, COUNT), number)
        assert answer.cached_tokens == 0, answer
        record.rounds += 1


def _storm(engine: Engine, alone: Oracle, record: Record, seed: int) -> None:
    pool = [prompt(400, seed + number) for number in range(3)]
    hand(engine, "trouble", 0.03, 0.005)
    before = engine.metric("vllm:num_preemptions")
    try:
        for _ in range(rounds(2, 12)):
            prompts = [record.random.choice(pool)[: record.random.randint(30, 400)] for _ in range(10)]
            names = [engine.submit(asked, 40) for asked in prompts]
            ended = record.random.sample(names, 3)
            for name in ended:
                hand(engine, "usable")
                engine.abort([name])
            for name, answer, asked in zip(names, engine.wait(names, 300), prompts, strict=True):
                if name not in ended:
                    check(answer, alone.tokens(asked, 40))
            wait_for(engine.reset_prefix_cache, 10, "the device's cache to be emptied")
            record.rounds += 1
    finally:
        hand(engine, "trouble", 0.0, 0.0)
    record.facts["preemptions"] = int(engine.metric("vllm:num_preemptions") - before)


def _wrong_bytes_show(engine: Engine, alone: Oracle, seed: int) -> None:
    """The control: with every stored byte turned round the answer is another one."""
    asked = prompt(500, seed)
    check(ask(engine, asked, COUNT), alone.tokens(asked, COUNT))
    wait_settled(engine)
    assert engine.call("tests.e2e.kvhost:corrupt_pool") > 0
    answer = ask_afresh(engine, asked, COUNT)
    assert answer.cached_tokens >= 400
    assert answer.tokens != alone.tokens(asked, COUNT)


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "windowed layers": (tiny.windowed, {"num_gpu_blocks_override": 60, "max_model_len": 1024}),
}
# The only latent attention in float32, and it takes no other block size.
LATENT = {
    "block_size": 16,
    "attention_backend": "CPU_MLA",
    "num_gpu_blocks_override": 96,
    "max_model_len": 1024,
}


@pytest.mark.parametrize("name", list(MODELS))
def test_another_model(name: str) -> None:
    make, arguments = MODELS[name]
    with (
        Record(f"7 and 8 a real engine: {name}") as record,
        _pair(make(), **arguments) as (engine, alone, daemon),
    ):
        _comes_back(engine, alone, record, 5000)
        _failures(engine, alone, record, 5200)
        _storm(engine, alone, record, 5600)
        engines.check_quiet(engine)
        engines.wait_nothing_held(daemon)
        _wrong_bytes_show(engine, alone, 5900)
        engines.check_quiet(engine)


def test_latent_attention() -> None:
    """vLLM's latent attention on CPUs rounds otherwise when it goes on from blocks that are there, cache
    or not, so that answers after a hit are compared with each other, and the loaded bytes with those stored.
    """
    with (
        Record("7 and 8 a real engine: latent attention") as record,
        _pair(tiny.latent(), **LATENT) as (engine, alone, daemon),
    ):
        for number in range(rounds(3, 18)):
            asked = prompt(500, 6500 + number)
            hand(engine, "clear_blocks")
            check(ask(engine, asked, 1), alone.tokens(asked, 1), number)
            stored = hand(engine, "block_prints")
            wait_settled(engine)
            hand(engine, "clear_blocks")
            answer = ask_afresh(engine, asked, 1)
            assert answer.cached_tokens == 496, answer
            for before, after in zip(stored, hand(engine, "block_prints"), strict=True):
                # All but the last block, which is not full.
                assert len(set(before) & set(after)) >= 31, "bytes changed on their way"
            warm = ask_afresh(engine, asked, COUNT)
            # A load that fails is computed as ever; the next one finds the same bytes again.
            wait_settled(engine)
            assert engine.reset_prefix_cache()
            hand(engine, "fail", "load", 1, (0, 3, 6)[number % 3])
            check(ask(engine, asked, COUNT), alone.tokens(asked, COUNT), number)
            assert hand(engine, "entered")["failed"] == 1
            check(ask_afresh(engine, asked, COUNT), warm.tokens, number)
            lost = prompt(500, 6700 + number)
            hand(engine, "fail", "store", 1 << 30, 0)
            check(ask(engine, lost, COUNT), alone.tokens(lost, COUNT), number)
            wait_settled(engine)
            hand(engine, "fail", "store", 0, 0)
            answer = ask_afresh(engine, lost, COUNT)
            check(answer, alone.tokens(lost, COUNT), number)
            assert answer.cached_tokens == 0, answer
            record.rounds += 1
        engines.check_quiet(engine)
        engines.wait_nothing_held(daemon)


def test_windowed_layers_with_policy_fail() -> None:
    make, arguments = MODELS["windowed layers"]
    with (
        Record("8 a real engine: windowed layers, policy fail") as record,
        Daemon("32MiB") as daemon,
        engines.engine(make(), daemon, policy="fail", **arguments) as engine,
    ):
        wait_usable(engine)
        for number in range(rounds(3, 18)):
            asked, other = prompt(500, 6000 + number), prompt(200, 6100 + number)
            expected, fine = ask(engine, asked, COUNT), ask(engine, other, COUNT)
            wait_settled(engine)
            assert engine.reset_prefix_cache()
            hand(engine, "fail", "load", 1, number % 3)
            failed, beside = engine.generate([asked, other], COUNT)
            # Either request may have met the one fault; the other must not notice.
            reasons = {failed.finish_reason, beside.finish_reason}
            assert reasons == {"error", "length"}, (failed, beside)
            for answer, right in ((failed, expected), (beside, fine)):
                if answer.finish_reason == "length":
                    check(answer, right.tokens, number)
            check(ask_afresh(engine, asked, COUNT), expected.tokens, number)
            record.rounds += 1
        engines.check_quiet(engine)


TWO: dict[str, Any] = {"tensor_parallel_size": 2, "prepare": "tests.drills.ranks:calm"}
PLACES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def test_one_rank_of_two_fails(tmp_path: Path, oracle: Oracle) -> None:
    """Workers in two processes: a chunk is there when both have it, or not at all (I2, I11)."""
    with Record("7 a real engine: two ranks, one fails") as record, Daemon("32MiB") as daemon:
        environment = {**PLACES, **ranks.environment(tmp_path)}
        with engines.engine(checkpoint(Recipe()), daemon, environment=environment, **TWO) as engine:
            wait_usable(engine, 30)
            for number in range(rounds(2, 12)):
                _one_rank_fails(engine, oracle, daemon, tmp_path, number)
                record.rounds += 1
            engines.check_quiet(engine)
            engines.wait_nothing_held(daemon)


def _one_rank_fails(engine: Engine, alone: Oracle, daemon: Daemon, folder: Path, number: int) -> None:
    asked, rank = prompt(300, 7000 + number), number % 2
    expected = alone.tokens(asked, COUNT)
    before = _chunks(daemon)
    fault = ranks.order(folder, "store", rank)
    check(ask(engine, asked, COUNT), expected, "a failed store")
    wait_settled(engine)
    assert not fault.exists()
    good = _chunks(daemon) - before
    assert good < 9, "a chunk was published that one rank has not"
    answer = ask_afresh(engine, asked, COUNT)
    check(answer, expected, "after a failed store")
    assert answer.cached_tokens <= 32 * good, (answer, good)

    # On a busy machine the daemon may be heard too late, and the request is computed. Then once more.
    def comes_back() -> bool:
        answer = ask_afresh(engine, asked, COUNT)
        check(answer, expected, "a load")
        return answer.cached_tokens == 288

    wait_for(comes_back, 60, "a load by both ranks")
    fault = ranks.order(folder, "load", rank)

    def load_fails() -> bool:
        check(ask_afresh(engine, asked, COUNT), expected, "a failed load")
        return not fault.exists()

    wait_for(load_fails, 60, "a load that fails")
    wait_for(comes_back, 60, "a load by both ranks after one that failed")


def _chunks(daemon: Daemon) -> int:
    return sum(namespace.chunks for namespace in daemon.status().namespaces)
