"""Adapters of a base model, and the KV events a router lives on, through whole engines (A4, H3)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.connector.sim import Sim, answer
from tests.e2e.models import prompt
from tests.support.daemon import Daemon
from tests.support.patterns import pat
from tests.support.waiting import wait_for

Make = Callable[..., Sim]

ASKED = prompt(100)


# Adapters.


@pytest.fixture
def adapter(tmp_path: Path) -> LoRARequest:
    (tmp_path / "adapter_model.safetensors").write_bytes(pat("adapter", 0, 64))
    return LoRARequest("mine", 1, str(tmp_path))


def test_an_adapter_shares_with_itself_and_with_nobody_else(
    engine: Make, adapter: LoRARequest, tmp_path: Path
) -> None:
    engine().ask(ASKED, 1, lora_request=adapter)
    assert engine().ask(ASKED, 1, lora_request=adapter).cached_tokens == 96
    assert engine().ask(ASKED, 1).cached_tokens == 0
    other = tmp_path / "other"
    other.mkdir()
    assert engine().ask(ASKED, 1, lora_request=LoRARequest("mine", 1, str(other))).cached_tokens == 0


def test_an_adapter_written_over_the_old_one_gets_none_of_its_cache(
    engine: Make, adapter: LoRARequest, tmp_path: Path
) -> None:
    running = engine()
    running.ask(ASKED, 1, lora_request=adapter)
    os.utime(tmp_path / "adapter_model.safetensors", ns=(1, 1))
    # The engine that has it loaded goes on as before; a new one loads the new files.
    assert running.scheduler.reset_prefix_cache(False, False)
    assert running.ask(ASKED, 1, lora_request=adapter).cached_tokens == 96
    assert engine().ask(ASKED, 5, lora_request=adapter).tokens == answer(ASKED, 5)
    assert engine().ask(ASKED, 5, lora_request=adapter).cached_tokens == 96


# Events.


def events_on(**extra: Any) -> dict[str, Any]:
    return {
        "arguments": {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")},
        "self_describing_kv_events": True,
        **extra,
    }


def hashes(sim: Sim, tokens: list[int]) -> list[Any]:
    """Block hashes of a prompt, as events name them."""
    name = sim.add(tokens, 1)
    found = [maybe_convert_block_hash(block) for block in sim.scheduler.requests[name].block_hashes]
    sim.abort([name])
    sim.run()
    return found


def collected(sim: Sim) -> list[Any]:
    """The scheduler's own taking, kept."""
    kept: list[Any] = []
    native = sim.connector.take_events

    def keeping() -> list[Any]:
        taken = list(native())
        kept.extend(taken)
        return taken

    sim.connector.take_events = keeping
    return kept


def test_stored_events_name_tokens_and_parents_of_what_can_be_loaded(engine: Make) -> None:
    sim = engine(**events_on())
    kept = collected(sim)
    sim.ask(ASKED, 1)
    sim.connector.take_events()
    known = hashes(sim, ASKED)
    stored = {event.block_hashes[0]: event for event in kept if isinstance(event, BlockStored)}
    assert set(stored) == set(known)
    assert {event.medium for event in stored.values()} == {"CPU"}
    for index, block in enumerate(known):
        event = stored[block]
        assert event.token_ids == ASKED[16 * index : 16 * (index + 1)]
        assert event.parent_block_hash == (known[index - 1] if index else None)
        assert event.block_size == 16
    # Every one of them loads.
    assert engine().ask(ASKED, 1).cached_tokens == 96


def replay(events: list[Any]) -> set[Any]:
    """What is there after these events."""
    alive: set[Any] = set()
    for event in events:
        if isinstance(event, BlockStored):
            alive |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            alive -= set(event.block_hashes)
    return alive


def test_replaying_the_events_gives_what_the_daemon_has(engine: Make) -> None:
    with Daemon("128KiB", ["--segment-size", "32KiB"]) as small:
        sim = engine(socket=small.socket, **events_on())
        kept = collected(sim)
        for seed in range(12):
            sim.ask(prompt(100, seed=seed), 1)
        sim.connector.take_events()
        assert any(isinstance(event, BlockRemoved) for event in kept)
        (namespace,) = small.status().namespaces
        assert len(replay(kept)) == namespace.chunks
        # The end of the daemon is the end of all of it.
        small.kill()
        wait_for(lambda: not sim.connector.scheduling.board.has_session)
        sim.ask(prompt(20), 1)
        sim.connector.take_events()
        assert replay(kept) == set()
