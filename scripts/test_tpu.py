"""`make test-tpu`: the tests that need tpu-inference, in the environment that the user's cache keeps.

Arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.setup_tpu_env import NoPython, environment

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".", "proto", "server", "client", "connector")


def main() -> int:
    try:
        python = environment()
    except (NoPython, RuntimeError) as error:
        print(f"test-tpu: {error}", file=sys.stderr)
        return 1
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in FOLDERS),
        "KVHOST_TEST_TPU_ENGINE": "1",
    }
    # What is imported is compiled once, into the environment: each engine would take a minute more without.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    # Results of the other tests' last run are not to be overwritten.
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "tests/tpu/engine", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
