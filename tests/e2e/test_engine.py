"""The engines that other tests rely on: their answers can show a wrong byte, and they can be killed."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.engine import Engine, EngineDied
from tests.e2e.models import Recipe, checkpoint, prompt

pytestmark = pytest.mark.timeout(600)


def test_a_tiny_model_tells_prompts_apart_and_repeats_itself() -> None:
    asked = prompt(300)
    changed = [asked[0], asked[1] + 1, *asked[2:]]
    with Engine(checkpoint(Recipe()), max_num_batched_tokens=128, max_num_seqs=4) as engine:
        first, other = engine.generate([asked, changed], max_tokens=100)
        assert len(set(first.tokens)) > 50, "nearly constant tokens would hide wrong KV"
        assert first.tokens != other.tokens, "one token of the prompt must matter"
        assert (first.prompt_tokens, first.cached_tokens, first.finish_reason) == (300, 0, "length")

        [again] = engine.generate([asked], max_tokens=100)
        assert (again.cached_tokens, again.tokens) == (288, first.tokens)
        assert engine.reset_prefix_cache()
        [alone] = engine.generate([asked], max_tokens=100)
        assert (alone.cached_tokens, alone.tokens) == (0, first.tokens)

        name = engine.submit(prompt(50), max_tokens=1500)
        engine.abort([name])
        [aborted] = engine.wait([name])
        assert aborted.finish_reason == "abort"
        state = engine.state()
        assert (state.requests, state.free_blocks) == (0, state.blocks - 1)
        assert state.steps_s


def test_a_served_engine_dies_with_all_its_processes() -> None:
    with Engine(checkpoint(Recipe()), kind="served") as engine:
        names = [engine.submit(prompt(100, seed), max_tokens=1500) for seed in range(2)]
        engine.abort(names[:1])
        assert engine.wait(names[:1])[0].finish_reason == "abort"
        [short] = engine.generate([prompt(40)], max_tokens=5)
        assert len(short.tokens) == 5
        assert any("EngineCore" in command for command in engine.processes().values())

        engine.kill(signal.SIGKILL)
        with pytest.raises(EngineDied):
            engine.wait(names[1:])
        assert engine.processes() == {}
