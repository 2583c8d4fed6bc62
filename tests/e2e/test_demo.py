"""`make demo` keeps its word, and does not say so when it is not true."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from demo.__main__ import Run, report

ROOT = Path(__file__).resolve().parents[2]
COLD = Run(
    prompt_tokens=100, cached_tokens=0, ttft_s=2.0, tokens=(1, 2), text="a", stored_bytes=96, loaded_bytes=0
)
WARM = replace(COLD, cached_tokens=96, ttft_s=0.2, stored_bytes=0, loaded_bytes=96)


# Makes the model at first use, then starts two engines one after the other.
@pytest.mark.timeout(600)
def test_second_process_takes_the_prompt_from_kvhost() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "demo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert set(figures) == {
        *("prompt_tokens", "cold_ttft_s", "warm_ttft_s", "cached_tokens"),
        *("identical", "store_bytes", "load_bytes"),
    }
    assert figures["identical"] is True
    assert figures["cached_tokens"] == figures["prompt_tokens"] // 32 * 32
    assert figures["warm_ttft_s"] < figures["cold_ttft_s"]
    # 30 layers, keys and values of 3 heads of 64 numbers of 2 bytes.
    assert figures["load_bytes"] == figures["cached_tokens"] * 30 * 2 * 3 * 64 * 2
    assert figures["store_bytes"] >= figures["load_bytes"]


@pytest.mark.parametrize(
    ("warm", "code"),
    [
        (WARM, 0),
        (replace(WARM, tokens=(1, 3)), 1),
        (replace(WARM, cached_tokens=64), 1),
    ],
    ids=["as promised", "another answer", "too little from the cache"],
)
def test_exit_code_tells_the_truth(warm: Run, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(COLD, warm) == code
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical"] is (warm.tokens == COLD.tokens)
