"""The Python 3.12 environment of `make test-tpu`: tpu-inference and vLLM for TPU, on JAX CPU devices.

About 11 GB and five minutes, so it is kept per user (scripts/user_cache.py), named after the engine's
version, and used by every checkout: kvhost itself is not installed there but comes in by PYTHONPATH.
Prints the path of its Python as the last line of standard output.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from scripts.user_cache import cache_root, made_once, pip_install

ROOT = Path(__file__).resolve().parent.parent
GIGABYTES = 11

# vllm-tpu asks for these at run time, through packages that setuptools 81 no longer brings.
BASE = ["setuptools<81", "wheel"]

FREE_OF_BYTECODE = "--no-compile"


class NoPython(Exception):
    """One sentence: there is no Python 3.12 to make the environment with."""


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        # For continuous integration: the sentence when it cannot be, nothing when it can.
        try:
            python_3_12()
        except NoPython as error:
            print(error)
            return 1
        return 0
    try:
        print(environment())
    except (NoPython, RuntimeError) as error:
        print(f"setup-tpu: {error}", file=sys.stderr)
        return 1
    return 0


def environment() -> Path:
    """The Python of the environment, made when it is not there yet.

    Raises NoPython where there is no Python 3.12, RuntimeError with pip's last words when it fails.
    """
    base, version = python_3_12()
    engine, others = requirements()

    def make(folder: Path) -> None:
        print(
            f"setup-tpu: making the TPU environment below {cache_root()}: about {GIGABYTES} GB, five minutes",
            file=sys.stderr,
            flush=True,
        )
        start = time.monotonic()
        subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
        pip_install(folder / "bin" / "python", FREE_OF_BYTECODE, *BASE)
        pip_install(folder / "bin" / "python", FREE_OF_BYTECODE, engine)
        print(f"setup-tpu: ready after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    folder = made_once("tpu", [version, BASE, engine], make)
    add(folder, engine, others)
    return folder / "bin" / "python"


def add(folder: Path, engine: str, others: Sequence[str]) -> None:
    """Installs what this checkout needs beside the engine and is not there yet. Seconds."""
    stamp = folder / "kvhost-needs.json"
    with (folder / ".kvhost.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = set(json.loads(stamp.read_text())) if stamp.exists() else set()
        if not there.issuperset(others):
            # The engine is named again, so that nothing can replace it.
            pip_install(folder / "bin" / "python", FREE_OF_BYTECODE, engine, *others)
            stamp.write_text(json.dumps(sorted({*there, *others})))


def requirements() -> tuple[str, list[str]]:
    """The engine, and what kvhost and the tests need beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    engine, *tools = project["dependency-groups"]["tpu"]
    return engine, [*tools, *project["project"]["dependencies"]]


def python_3_12() -> tuple[str, str]:
    """Command and version of a Python 3.12 that runs. Raises NoPython."""
    asked = os.environ.get("PYTHON312")
    for command in [asked] if asked else ["python3.12", sys.executable, *pyenv_versions()]:
        path = shutil.which(command)
        if path is None:
            continue
        # A name on the path may be a pyenv shim with nothing behind it.
        told = subprocess.run(
            [path, "-c", "import sys, venv; print(sys.executable); print(sys.version)"],
            capture_output=True,
            text=True,
            check=False,
        )
        if told.returncode == 0:
            executable, version = told.stdout.split("\n", 1)
            if version.startswith("3.12."):
                return executable, version.strip()
    raise NoPython(
        "tpu-inference needs Python 3.12 (jax 0.11 asks for it) and none was found: "
        + (f"PYTHON312={asked} is none" if asked else "no python3.12 on PATH")
        + "; install one, or name one with PYTHON312=/path/to/python3.12"
    )


def pyenv_versions() -> list[str]:
    """Those that pyenv has but does not put on PATH."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return [str(path) for path in sorted(root.glob("versions/3.12.*/bin/python3.12"), reverse=True)]


if __name__ == "__main__":
    sys.exit(main())
