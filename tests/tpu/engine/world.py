"""What the engine tests of this folder share: engines on virtual devices, and the right answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.connector import plane
from tests.e2e.engine import ROOT, Answer, Engine
from tests.e2e.kvhost import kv_transfer
from tests.e2e.models import Recipe, checkpoint
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for
from tests.tpu.engine import shim

BLOCK = 16
START_S = 900.0
"""For the start of an engine: the very first one compiles some ten thousand modules of Python."""

ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 128,
    # With it, tpu-inference gives wrong tokens under preemption even without a connector.
    "async_scheduling": False,
    "enforce_eager": False,
}


def model() -> Path:
    return checkpoint(Recipe(dtype="float32"))


def engine(
    daemon: Daemon | None = None,
    *,
    devices: int = 1,
    settings: Any = None,
    environment: Any = None,
    **arguments: Any,
) -> Engine:
    """A tpu-inference engine, with kvhost's connector where a daemon is given."""
    transfer = None
    if daemon is not None:
        # Generated tokens are stored too, and a handful of programs is enough.
        extra = {"offload_prompt_only": False, "block_buckets": [1, 4, 16], **(settings or {})}
        transfer = kv_transfer(daemon.socket, **extra)
        transfer["kv_connector"] = "TPUOffloadConnector"
        transfer["kv_connector_module_path"] = "kvhost_connector.tpu"
    return Engine(
        model(),
        kv_transfer=transfer,
        environment={**shim.environment(devices), **plane.ENVIRONMENT, **(environment or {})},
        prepare="tests.tpu.engine.shim:install",
        start_deadline_s=START_S,
        tensor_parallel_size=devices,
        **{**ARGUMENTS, **arguments},
    )


@contextmanager
def together(*engines: Engine) -> Iterator[None]:
    """Starts several at once: a start keeps one core busy."""
    with ExitStack() as stack:
        for one in engines:
            one.launch()
            stack.callback(one.close)
        for one in engines:
            one.wait_ready()
        yield


def settled(asked: Engine) -> None:
    """Returns when the daemon knows of all that the engine stored."""
    wait_for(lambda: asked.call("tests.e2e.kvhost:is_settled"), 60, "the stores to be known")


def attached(asked: Engine) -> None:
    wait_for(lambda: asked.call("tests.e2e.kvhost:is_attached"), 60, "the engine to be attached")


def one_by_one(asked: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    return [asked.generate([prompt], max_tokens=max_tokens, deadline_s=300)[0] for prompt in prompts]


def full_blocks(answer: Answer) -> int:
    return answer.prompt_tokens // BLOCK * BLOCK


def right_answers(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """What transformers says, in float32, in a process of its own."""
    order = {"model": str(model()), "prompts": [list(prompt) for prompt in prompts], "tokens": max_tokens}
    result = subprocess.run(
        [sys.executable, "-m", "tests.tpu.engine.reference"],
        cwd=ROOT,
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [tuple(tokens) for tokens in json.loads(result.stdout.splitlines()[-1])]
