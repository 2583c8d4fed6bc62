"""Drill 7 on the plain model: too few blocks, aborts wherever a request can be, many with the same beginning.

Every answer is that of an engine without a connector, and afterwards no block, request, pin or grant is left
(A1, A11, B7, D6, D7).
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.drills import engines
from tests.drills.engines import Oracle, ask_afresh, check, hand, wait_settled, wait_usable
from tests.drills.scale import Record, rounds, scale
from tests.e2e.engine import Engine
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support import Daemon, wait_for

pytestmark = pytest.mark.timeout(scale(600, 1800))

BLOCKS = 36
COUNT = 24


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("32MiB") as one:
        yield one


@pytest.fixture(scope="module")
def engine(daemon: Daemon, oracle: Oracle) -> Iterator[Engine]:
    """Few blocks, chunked prefill, generated tokens stored too."""
    oracle.launch()
    few = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 1024}
    with engines.engine(checkpoint(Recipe()), daemon, extra={"offload_prompt_only": False}, **few) as one:
        wait_usable(one)
        yield one


def _wave(record: Record, pool: list[list[int]], many: int) -> list[list[int]]:
    """Prompts with shared beginnings and ends of their own, some an exact number of blocks."""
    prompts = []
    for _ in range(many):
        length = record.random.choice([64, 96, 160, 256, record.random.randint(30, 300)])
        prompts.append(record.random.choice(pool)[:length])
    return prompts


def test_preemption_storms_during_saves_and_loads(engine: Engine, daemon: Daemon, oracle: Oracle) -> None:
    with Record("7 a real engine: preemption storms") as record:
        pool = [prompt(300, 3000 + seed) for seed in range(4)]
        before = engine.metric("vllm:num_preemptions"), engine.metric("vllm:kv_offload_load_bytes")
        hand(engine, "trouble", 0.0, 0.01)
        try:
            for _ in range(rounds(3, 24)):
                prompts = _wave(record, pool, 12)
                names = [engine.submit(asked, 90) for asked in prompts]
                for answer, asked in zip(engine.wait(names, 300), prompts, strict=True):
                    check(answer, oracle.tokens(asked, 90))
                wait_for(engine.reset_prefix_cache, 10, "the device's cache to be emptied")
                record.rounds += 1
        finally:
            hand(engine, "trouble", 0.0, 0.0)
        after = engine.metric("vllm:num_preemptions"), engine.metric("vllm:kv_offload_load_bytes")
        record.facts["preemptions"] = int(after[0] - before[0])
        record.facts["loaded_kib"] = int(after[1] - before[1]) // 1024
        assert after[0] > before[0], "nothing was preempted"
        assert after[1] > before[1], "nothing was loaded"
        engines.check_quiet(engine)
        engines.wait_nothing_held(daemon)


SHORT_OF_BLOCKS = ("waiting pinned", "preempted")
STATES = [
    "waiting asked",
    "waiting pinning",
    *SHORT_OF_BLOCKS,
    "loading",
    "prefill",
    "decode",
    "storing",
]


def test_aborts_in_every_state(engine: Engine, daemon: Daemon, oracle: Oracle) -> None:
    with Record("7 a real engine: aborts in every state") as record:
        asked, filler = prompt(500, 3100), prompt(800, 3101)
        check(engine.generate([asked], COUNT)[0], oracle.tokens(asked, COUNT))
        wait_settled(engine)
        each = rounds(4, 50)
        for state in STATES:
            other = None
            if state == "waiting pinned":
                # 25 of the 35 blocks are taken, 16 are needed: it holds its pins and waits.
                other = filler
            elif state == "preempted":
                # Both fit until they have decoded for a while.
                other = filler[:590]
            told: dict[str, Any] = hand(engine, "abort_in", state, each, asked, other, 60, deadline_s=600)
            record.facts[state] = told["hit"]
            record.rounds += each
            assert told["hit"] >= max(1, each // 2), (state, told)
            answer = ask_afresh(engine, asked, COUNT)
            check(answer, oracle.tokens(asked, COUNT), state)
            engines.check_quiet(engine)
            pinned, _, quarantined = engines.held(daemon)
            assert (pinned, quarantined) == (0, 0), state
        engines.wait_nothing_held(daemon)


def test_random_aborts_and_nobody_else_notices(engine: Engine, daemon: Daemon, oracle: Oracle) -> None:
    with Record("7 a real engine: random aborts") as record:
        pool = [prompt(300, 3200 + seed) for seed in range(3)]
        hand(engine, "trouble", 0.02, 0.005)
        try:
            for _ in range(rounds(3, 24)):
                prompts = _wave(record, pool, 10)
                names = [engine.submit(asked, COUNT) for asked in prompts]
                ended = record.random.sample(names, 5)
                for name in ended:
                    engine.abort([name])
                    hand(engine, "usable")  # A round trip: the next abort comes some steps later.
                for name, answer, asked in zip(names, engine.wait(names), prompts, strict=True):
                    if name not in ended:
                        check(answer, oracle.tokens(asked, COUNT))
                wait_for(engine.reset_prefix_cache, 10, "the device's cache to be emptied")
                record.rounds += 1
        finally:
            hand(engine, "trouble", 0.0, 0.0)
        engines.check_quiet(engine)
        engines.wait_nothing_held(daemon)


def test_many_requests_with_the_same_beginning(engine: Engine, oracle: Oracle) -> None:
    with Record("7 a real engine: the same prefix at once") as record:
        for number in range(rounds(2, 15)):
            shared = prompt(320, 3300 + number)
            prompts = [*([*shared, token] for token in range(3, 11)), shared]
            for _ in range(2):  # Nobody has it; then everybody loads it.
                for answer, asked in zip(engine.generate(prompts, COUNT), prompts, strict=True):
                    check(answer, oracle.tokens(asked, COUNT))
                wait_settled(engine)
                wait_for(engine.reset_prefix_cache, 10, "the device's cache to be emptied")
            # The whole prompt is there: one token must be computed all the same (A11).
            answer = ask_afresh(engine, shared, COUNT)
            check(answer, oracle.tokens(shared, COUNT))
            assert answer.cached_tokens >= 288
            record.rounds += 1
        engines.check_quiet(engine)


def test_hits_larger_than_half_the_device_do_not_block_each_other(engine: Engine, oracle: Oracle) -> None:
    """Requests that wait for their loads hold blocks which the others need (D6)."""
    with Record("7 a real engine: parked loads") as record:
        prompts = [prompt(600, 3400 + seed) for seed in range(6)]
        for asked in prompts:
            check(engine.generate([asked], COUNT)[0], oracle.tokens(asked, COUNT))
        for _ in range(rounds(2, 15)):
            wait_settled(engine)
            wait_for(engine.reset_prefix_cache, 10, "the device's cache to be emptied")
            hand(engine, "trouble", 0.0, 0.005)
            answers = engine.generate(prompts, COUNT, deadline_s=60)
            hand(engine, "trouble", 0.0, 0.0)
            for answer, asked in zip(answers, prompts, strict=True):
                check(answer, oracle.tokens(asked, COUNT))
            assert sum(answer.cached_tokens for answer in answers) >= 3 * 576
            record.worst("slowest_s", max(answer.total_s for answer in answers))
            record.rounds += 1
        engines.check_quiet(engine)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_speculative_decoding(oracle: Oracle) -> None:
    # Room for all rounds: what the order of eviction keeps of a full pool is another matter.
    with (
        Record("7 a real engine: speculative decoding") as record,
        Daemon("96MiB") as roomy,
        engines.engine(
            checkpoint(Recipe()),
            roomy,
            extra={"offload_prompt_only": False},
            speculative_config=NGRAM,
            num_gpu_blocks_override=BLOCKS,
            max_model_len=1024,
        ) as engine,
    ):
        wait_usable(engine)
        # Few words to choose from make many guesses right, and many wrong.
        few = {"allowed_token_ids": list(range(100, 104))}
        for number in range(rounds(2, 15)):
            prompts = [prompt(200 + 41 * more, 3500 + 4 * number + more) for more in range(4)]
            expected = [oracle.tokens(asked, 60, allowed=few["allowed_token_ids"]) for asked in prompts]
            for again in range(2):
                answers = engine.generate(prompts, 60, **few)
                for answer, right in zip(answers, expected, strict=True):
                    check(answer, right, (number, again))
                wait_settled(engine)
                wait_for(engine.reset_prefix_cache, 10, "the device's cache to be emptied")
            # What it generated is part of the next turn's prompt, and was stored.
            turn = [*prompts[0], *expected[0][:50]]
            answer = ask_afresh(engine, turn, COUNT)
            check(answer, oracle.tokens(turn, COUNT), number)
            assert answer.cached_tokens > len(prompts[0]), answer
            record.rounds += 1
        drafted = engine.metric("vllm:spec_decode_num_draft_tokens")
        accepted = engine.metric("vllm:spec_decode_num_accepted_tokens")
        record.facts.update(drafted=int(drafted), accepted=int(accepted))
        assert 0 < accepted < drafted
        engines.check_quiet(engine)
