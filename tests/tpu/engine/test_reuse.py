"""A new engine process takes every full block from kvhost, on one, two and four devices, and errs nowhere."""

from __future__ import annotations

import pytest

from tests.e2e.models import prompt
from tests.support.daemon import Daemon
from tests.tpu.engine.world import (
    BLOCK,
    attached,
    engine,
    full_blocks,
    one_by_one,
    right_answers,
    settled,
    together,
)

pytestmark = pytest.mark.timeout(3000)

TOKENS = 24
# Longer than a step's budget of 128 tokens: computed in pieces, and stored piece by piece.
LONG = prompt(330)
# One token short of, exactly at, and one past a block boundary; and one that shares the head of another.
PROMPTS = [
    LONG,
    *(prompt(3 * BLOCK + over, seed=1) for over in (-1, 0, 1)),
    LONG[:200] + prompt(60, seed=2),
]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return right_answers(PROMPTS, TOKENS)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_new_process_loads_every_full_block(devices: int, expected: list[tuple[int, ...]]) -> None:
    turn = [*LONG, *expected[0], *prompt(30, seed=7)]
    with Daemon("64MiB") as daemon:
        alone, first = engine(devices=devices), engine(daemon, devices=devices)
        with together(alone, first):
            assert [answer.tokens for answer in one_by_one(alone, PROMPTS, TOKENS)] == expected
            attached(first)
            answers = one_by_one(first, PROMPTS, TOKENS)
            assert [answer.tokens for answer in answers] == expected
            assert answers[0].cached_tokens == 0
            settled(first)
        with engine(daemon, devices=devices) as second:
            # On a busy machine the session may open later than the first question comes.
            attached(second)
            answers = one_by_one(second, PROMPTS, TOKENS)
            assert [answer.tokens for answer in answers] == expected
            for answer in answers:
                assert answer.cached_tokens == full_blocks(answer), answer.prompt_tokens
            assert second.metric("vllm:kv_offload_load_bytes") > 0
            # What was generated was stored too: the next turn of the chat finds it.
            assert second.reset_prefix_cache()
            (turned,) = one_by_one(second, [turn], 1)
            assert turned.cached_tokens == (len(LONG) + TOKENS - 1) // BLOCK * BLOCK
            state = second.state()
            assert (state.requests, state.free_blocks) == (0, state.blocks - 1)

            # Once more, with every stored byte turned round: now it must go wrong.
            settled(second)
            assert second.call("tests.e2e.kvhost:corrupt_pool") > 0
            assert second.reset_prefix_cache()
            (spoilt,) = one_by_one(second, [LONG], TOKENS)
            assert spoilt.cached_tokens == full_blocks(spoilt)
            assert spoilt.tokens != expected[0]
        daemon.check_integrity()
