"""Things that are made once per user and kept: checkpoints, small environments.

Each lives in a folder of its own under `~/.cache/kvhost` (or `$XDG_CACHE_HOME/kvhost`), named after
what went into it, so that a change of the recipe makes a new one beside it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvhost"


def made_once(name: str, recipe: object, make: Callable[[Path], None]) -> Path:
    """The folder `name`, filled by `make(folder)` unless an earlier call with an equal recipe did.

    `recipe` is anything JSON can hold. Several processes may ask at once: one makes, the others
    wait. A folder is seen complete or not at all.
    """
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    root = cache_root()
    folder = root / f"{name}-{digest}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}-{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = root / f".{name}-{digest}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


def small_environment(name: str, *arguments: str) -> Path:
    """The Python of a virtual environment that holds what `pip install ARGUMENTS` brings, nothing else."""

    def make(folder: Path) -> None:
        bare_environment(folder)
        pip_install(folder / "bin" / "python", *arguments)

    return made_once(name, [sys.version, *arguments], make) / "bin" / "python"


def bare_environment(folder: Path) -> None:
    """A virtual environment without even pip; it may be moved afterwards."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)


def pip_install(python: Path, *arguments: str) -> None:
    """Installs into the environment of `python`, with the pip of the running one."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"this failed: {' '.join(command)}\n{result.stdout}{result.stderr}")
