"""The tests for a real GPU: seen everywhere, run where there is one, able to run with little installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import conftest

ROOT = Path(__file__).resolve().parents[2]
NO_DEVICE = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

PROBE = """
import sys
for name in ("vllm", "click", "rich", "jax"):
    sys.modules[name] = None
sys.path[:0] = [f"{sys.argv[1]}/{folder}" for folder in ("", "proto", "client", "connector")]
import kvhost_connector.device.driver, kvhost_connector.device.pages, kvhost_connector.device.pinning
import tests.gpu.pool, tests.gpu.device, tests.gpu.caches, tests.gpu.test_torch
print("read")
"""


def test_make_test_gpu_fails_with_one_line_where_there_is_none() -> None:
    command = ["make", "-s", "test-gpu", f"GPU_PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=NO_DEVICE, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    first, *rest = done.stderr.splitlines()
    assert first.startswith("test-gpu: nothing was run, ")
    assert all(line.startswith("make") for line in rest)
    assert done.stdout == ""


@pytest.mark.parametrize("why", ["no CUDA device is there", ""])
def test_a_run_without_a_gpu_says_what_it_left_out(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "missing", lambda: why)
    marked, other = (SimpleNamespace(get_closest_marker=lambda name, has=has: has) for has in (True, None))
    left_out: list[Any] = []
    lines: list[str] = []

    def deselected(items: list[Any]) -> None:
        left_out.extend(items)

    hook = SimpleNamespace(pytest_deselected=deselected)
    config: Any = SimpleNamespace(stash=pytest.Stash(), hook=hook)
    items: Any = [marked, other]
    conftest.pytest_collection_modifyitems(config, items)
    conftest.pytest_terminal_summary(SimpleNamespace(write_line=lines.append), config)
    if why:
        assert (items, left_out) == ([other], [marked])
        assert lines == ["1 GPU tests were not run: no CUDA device is there (make test-gpu runs them)"]
    else:
        assert (items, left_out, lines) == ([marked, other], [], [])


def test_what_they_need_of_kvhost_needs_torch_and_little_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(ROOT)], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.stdout == "read\n", done.stderr
