"""Several engines on one daemon at a time, and pools too small for what they are asked to hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.engine import Engine
from tests.e2e.kvhost import kv_transfer
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(600)

ARGUMENTS: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 256, "max_num_seqs": 4}
# Two layers, four heads, keys and values of 32 numbers of two bytes, 32 tokens.
CHUNK = 2 * 4 * 2 * 32 * 2 * 32


def settled(engine: Engine) -> None:
    wait_for(lambda: engine.call("tests.e2e.kvhost:is_settled"), 10, "the stores to be known")


def test_the_same_share_and_the_different_never_do() -> None:
    same, different = checkpoint(Recipe()), checkpoint(Recipe(layers=3))
    asked = [prompt(500, seed) for seed in range(3)]
    with Daemon("64MiB") as daemon:
        transfer = kv_transfer(daemon.socket)
        engines = [Engine(model, kv_transfer=transfer, **ARGUMENTS) for model in (same, same, different)]
        try:
            for engine in engines:
                engine.launch()
            one, twin, stranger = (engine.wait_ready() for engine in engines)
            # Both models are asked at once; neither has anything to take.
            names = [one.submit(tokens, 50) for tokens in asked]
            others = [stranger.submit(tokens, 50) for tokens in asked]
            first, foreign = one.wait(names), stranger.wait(others)
            assert [answer.cached_tokens for answer in first + foreign] == [0] * 6
            assert [a.tokens for a in first] != [a.tokens for a in foreign]
            settled(one)
            settled(stranger)
            # The twin takes what its model's engine stored; both are asked again at the same time.
            names = [twin.submit(tokens, 50) for tokens in asked]
            assert stranger.reset_prefix_cache()
            others = [stranger.submit(tokens, 50) for tokens in asked]
            taken, again = twin.wait(names), stranger.wait(others)
            assert [answer.cached_tokens for answer in taken + again] == [480] * 6
            assert [a.tokens for a in taken] == [a.tokens for a in first]
            assert [a.tokens for a in again] == [a.tokens for a in foreign]
            namespaces = daemon.status().namespaces
            assert sorted(namespace.sessions for namespace in namespaces) == [1, 2]
        finally:
            for engine in engines:
                engine.close()
        daemon.check_integrity()


def test_a_pool_smaller_than_a_prompt_and_smaller_than_the_working_set() -> None:
    model = checkpoint(Recipe())
    huge = prompt(1900)
    many = [prompt(300, seed) for seed in range(5)]
    # 24 chunks: not half of the long prompt, and two of the five others.
    with (
        Daemon(f"{24 * CHUNK // 1024}KiB", ["--segment-size", f"{4 * CHUNK // 1024}KiB"]) as daemon,
        Engine(model, kv_transfer=kv_transfer(daemon.socket), **ARGUMENTS) as engine,
    ):
        (expected,) = engine.generate([huge], max_tokens=40)
        settled(engine)
        assert engine.reset_prefix_cache()
        (answer,) = engine.generate([huge], max_tokens=40)
        assert answer.tokens == expected.tokens
        # Its beginning fits, and the beginning is what counts.
        assert 0 < answer.cached_tokens <= 24 * 32
        reference = [engine.generate([asked], max_tokens=20)[0].tokens for asked in many]
        for _ in range(3):
            assert engine.reset_prefix_cache()
            tokens = [engine.generate([asked], max_tokens=20)[0].tokens for asked in many]
            assert tokens == reference
        counters = daemon.status().counters
        assert counters["evicted_chunks"] > 0
        settled(engine)
        state = engine.state()
        assert (state.requests, state.free_blocks) == (0, state.blocks - 1)
        assert engine.call("tests.e2e.kvhost:open_transfers") == 0
        daemon.check_integrity()
