"""Runs what needs JAX: each file of `devices` in a process with eight virtual devices.

Not in pytest's own process: JAX's threads and tests that fork do not go together.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((Path(__file__).parent / "devices").glob("test_*.py"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_on_eight_devices(file: Path) -> None:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "KVHOST_TEST_DEVICES": "1",
    }
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\d+ passed", result.stdout), result.stdout
