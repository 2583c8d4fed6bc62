"""A second engine process takes every full block from kvhost, and says what it would have said anyway."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.engine import Answer, Engine
from tests.e2e.kvhost import kv_transfer
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(600)

BLOCK = 32
LONG = prompt(700)
# One token short of, exactly at, and one past a block boundary, of a prompt that nobody else shares.
AROUND = [prompt(3 * BLOCK + over, seed=1) for over in (-1, 0, 1)]
SHARING = LONG[:400] + prompt(120, seed=2)
UNRELATED = prompt(150, seed=3)

ARGUMENTS: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 4}


def ask_all(engine: Engine) -> list[Answer]:
    """Every prompt by itself: the tokens of a batch depend on who else is in it, on any engine."""
    (long,) = engine.generate([LONG], max_tokens=200)
    others = [engine.generate([asked], max_tokens=20)[0] for asked in (*AROUND, SHARING, UNRELATED)]
    return [long, *others]


def settled(engine: Engine) -> None:
    wait_for(lambda: engine.call("tests.e2e.kvhost:is_settled"), 10, "the stores to be known")


def full_blocks(answer: Answer, block: int = BLOCK) -> int:
    return answer.prompt_tokens // block * block


def check_same(answers: list[Answer], reference: list[Answer]) -> None:
    for answer, expected in zip(answers, reference, strict=True):
        assert answer.finish_reason == "length"
        assert answer.tokens == expected.tokens


def test_float32_with_chunked_prefill_and_a_negative_control() -> None:
    model = checkpoint(Recipe(dtype="float32"))
    arguments = {**ARGUMENTS, "dtype": "float32"}
    with Engine(model, **arguments) as alone:
        reference = ask_all(alone)
    with Daemon("64MiB") as daemon:
        transfer = kv_transfer(daemon.socket)
        with Engine(model, kv_transfer=transfer, **arguments) as first:
            answers = ask_all(first)
            check_same(answers, reference)
            assert answers[0].cached_tokens == 0
            settled(first)
        with Engine(model, kv_transfer=transfer, **arguments) as second:
            answers = ask_all(second)
            check_same(answers, reference)
            for answer in answers:
                assert answer.cached_tokens == full_blocks(answer), answer.prompt_tokens
            loaded = second.metric("vllm:kv_offload_load_bytes")
            assert loaded > 0
            state = second.state()
            assert (state.requests, state.free_blocks) == (0, state.blocks - 1)

            # The same question once more, with every stored byte turned round: now it must go wrong.
            assert second.call("tests.e2e.kvhost:corrupt_pool") > 0
            assert second.reset_prefix_cache()
            (spoilt,) = second.generate([LONG], max_tokens=200)
            assert spoilt.cached_tokens == full_blocks(spoilt)
            assert spoilt.tokens != reference[0].tokens
        daemon.check_integrity()


def test_bfloat16_with_processes_of_their_own() -> None:
    model = checkpoint(Recipe(dtype="bfloat16"))
    arguments = {**ARGUMENTS, "dtype": "bfloat16"}
    with Engine(model, **arguments) as alone:
        reference = ask_all(alone)
    with Daemon("64MiB") as daemon:
        transfer = kv_transfer(daemon.socket)
        with Engine(model, kind="served", kv_transfer=transfer, **arguments) as first:
            check_same(ask_all(first), reference)
        with Engine(model, kind="served", kv_transfer=transfer, **arguments) as second:
            answers = ask_all(second)
            check_same(answers, reference)
            for answer in answers:
                assert answer.cached_tokens == full_blocks(answer), answer.prompt_tokens
        wait_for(lambda: not daemon.status().sessions, 5, "all sessions to end")
        memory = daemon.status().memory
        assert (memory.pinned_bytes, memory.granted_bytes, memory.quarantined_bytes) == (0, 0, 0)
        daemon.check_integrity()


def test_the_default_block_size() -> None:
    model = checkpoint(Recipe(dtype="bfloat16"))
    arguments: dict[str, Any] = {"block_size": None, "dtype": "bfloat16", "max_num_batched_tokens": 256}
    with Engine(model, **arguments) as alone:
        reference = ask_all(alone)
    with Daemon("64MiB") as daemon:
        transfer = kv_transfer(daemon.socket)
        with Engine(model, kv_transfer=transfer, **arguments) as first:
            check_same(ask_all(first), reference)
            settled(first)
        with Engine(model, kv_transfer=transfer, **arguments) as second:
            answers = ask_all(second)
            check_same(answers, reference)
            assert [answer.cached_tokens for answer in answers] == [
                full_blocks(answer, 128) for answer in answers
            ]
