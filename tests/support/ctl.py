"""kvhostctl in a process of its own, as a person and a script run it."""

import os
import subprocess
import sys
from collections.abc import Mapping


def ctl(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs it to its end. `env` is added to the environment."""
    return subprocess.run(
        [sys.executable, "-m", "kvhost_client.ctl", *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
