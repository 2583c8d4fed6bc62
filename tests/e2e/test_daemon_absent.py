"""No daemon, one that dies, one that comes back: the engine answers and needs no restart (I6, I8)."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Answer, Engine
from tests.e2e.kvhost import kv_transfer
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support.daemon import Daemon
from tests.support.processes import map_count
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(600)

ARGUMENTS: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 256, "max_num_seqs": 4}
ASKED = prompt(600)


def attached(engine: Engine) -> None:
    # Within 2 s of SERVING, and some for a busy machine.
    wait_for(lambda: engine.call("tests.e2e.kvhost:is_attached"), 10, "the engine to be attached")


def settled(engine: Engine) -> None:
    wait_for(lambda: engine.call("tests.e2e.kvhost:is_settled"), 10, "the stores to be known")


def fresh(engine: Engine, count: int = 60) -> Answer:
    """The question, with nothing on the device."""
    assert engine.reset_prefix_cache()
    (answer,) = engine.generate([ASKED], max_tokens=count)
    return answer


def test_an_engine_lives_through_everything_its_daemon_does() -> None:
    model = checkpoint(Recipe())
    with tempfile.TemporaryDirectory(prefix="kvhost-") as name:
        folder = Path(name)
        socket = str(folder / "kvhostd.sock")
        # Not running.
        transfer = kv_transfer(socket, attach_wait_ms=2000, deadline_ms=1000)
        with Engine(model, kv_transfer=transfer, **ARGUMENTS) as engine:
            began = time.monotonic()
            expected = fresh(engine)
            assert expected.cached_tokens == 0
            assert expected.finish_reason == "length"
            assert time.monotonic() - began < 60
            # It comes.
            with Daemon("16MiB", folder=folder) as daemon:
                attached(engine)
                assert fresh(engine).tokens == expected.tokens
                settled(engine)
                warm = fresh(engine)
                assert (warm.tokens, warm.cached_tokens) == (expected.tokens, 576)
                # It is killed while the engine serves, with a load or a store under way.
                names = [engine.submit(ASKED, 200), engine.submit(prompt(500, seed=1), 200)]
                daemon.kill()
                assert engine.wait(names)[0].tokens[:60] == expected.tokens
                assert fresh(engine).tokens == expected.tokens
            # Nothing of the old pool is mapped any more, and another daemon is used without a restart.
            wait_for(lambda: map_count(engine.pid, "memfd:kvhost") == 0, 5, "the old pool to be unmapped")
            with Daemon("16MiB", folder=folder) as daemon:
                attached(engine)
                assert fresh(engine).tokens == expected.tokens
                settled(engine)
                warm = fresh(engine)
                assert (warm.tokens, warm.cached_tokens) == (expected.tokens, 576)
                # It is stopped: the engine computes.
                daemon.freeze()
                frozen = fresh(engine)
                assert frozen.tokens == expected.tokens
                daemon.thaw()
                attached(engine)
                warm = fresh(engine)
                assert (warm.tokens, warm.cached_tokens) == (expected.tokens, 576)
                settled(engine)
                memory = daemon.status().memory
                assert (memory.pinned_bytes, memory.quarantined_bytes) == (0, 0)
                daemon.check_integrity()
            state = engine.state()
            assert (state.requests, state.free_blocks) == (0, state.blocks - 1)
