"""Which caches are compared, and a Python environment for each: in the user's cache folder, made on first
use.

An environment holds that cache's own package from PyPI in a fixed version. What it needs beside (torch,
numpy, pyzmq, ...) it finds behind its own packages in the project's environment, which has torch and vLLM
for the CPU already; what only an accelerator or a cloud needs (cupy, cuda-python, bigtable) is left out,
since nothing of it runs here.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.user_cache import bare_environment, made_once, pip_install

PROJECT_PACKAGES = sysconfig.get_path("purelib")
ROOT = Path(__file__).resolve().parents[2]
IMPORT_S = 120.0


class NotInstallable(Exception):
    """An environment cannot be made here; the text is one line."""


@dataclass(frozen=True)
class Variant:
    """A way that a cache can be used; `setting` goes to its driver. `key` ends the names of its figures."""

    key: str
    setting: str


@dataclass(frozen=True)
class Peer:
    """Another cache. Without `requirement` it is in the project's environment already; `beside` is
    installed with it.

    `imports` is what its driver begins with, or the driver. `copies` are compared in store and load,
    `lookups` in lookups; the first of each stands for the peer, the others run in the full form or where
    `short` has their key.
    """

    name: str
    title: str
    driver: str
    imports: str
    requirement: str = ""
    beside: tuple[str, ...] = ()
    copies: tuple[Variant, ...] = ()
    lookups: tuple[Variant, ...] = ()
    short: tuple[str, ...] = ()

    def chosen(self, variants: tuple[Variant, ...], full: bool) -> tuple[Variant, ...]:
        """Those that a run measures."""
        return tuple(v for v in variants if full or v == variants[0] or v.key in self.short)


PEERS: tuple[Peer, ...] = (
    Peer(
        "lmcache",
        "LMCache MP 0.5.6",
        "lmcache",
        "lmcache.integration.vllm.vllm_multi_process_adapter",
        "lmcache==0.5.6",
        copies=(
            Variant("lmcache", "zmq-engine"),
            Variant("lmcache_server_copies", "zmq-server"),
            Variant("lmcache_large_chunks", "zmq-engine-default"),
            Variant("lmcache_grpc", "grpc-engine"),
        ),
        lookups=(Variant("lmcache", "zmq-engine"), Variant("lmcache_grpc", "grpc-engine")),
        short=("lmcache_server_copies", "lmcache_large_chunks"),
    ),
    Peer(
        "openlake",
        "OpenLake 0.8.1",
        "openlake",
        "openlake_client",
        "openlake-vllm==0.8.1",
        copies=(Variant("openlake", ""),),
        lookups=(Variant("openlake", ""),),
    ),
    Peer(
        "mooncake",
        "Mooncake Store 0.3.13",
        "mooncake",
        "benchmarks.peers.drivers.mooncake",
        "mooncake-transfer-engine-non-cuda==0.3.13",
        beside=("nvidia-cuda-runtime-cu12==12.9.79",),
        copies=(Variant("mooncake", ""),),
        lookups=(Variant("mooncake", ""),),
    ),
    Peer(
        "vllm",
        "vLLM's in-process manager",
        "inprocess",
        "vllm.v1.kv_offload.cpu.manager",
        lookups=(Variant("vllm", ""),),
    ),
)


def environment(peer: Peer, say: Callable[[str], None] = lambda line: None) -> Path:
    """The Python that runs this peer's driver. Raises `NotInstallable`."""
    if not peer.requirement:
        return Path(sys.executable)

    def make(folder: Path) -> None:
        say(f"{peer.name}: installing {peer.requirement} (once)")
        bare_environment(folder)
        python = folder / "bin" / "python"
        pip_install(python, "--no-deps", "--only-binary", ":all:", peer.requirement, *peer.beside)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "project.pth").write_text(f"{PROJECT_PACKAGES}\n")

    recipe = [sys.version, peer.requirement, *peer.beside, PROJECT_PACKAGES]
    try:
        folder = made_once(f"peer-{peer.requirement.replace('==', '-')}", recipe, make)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NotInstallable(
            f"{peer.requirement} cannot be installed here: {last_line(str(error))}"
        ) from error
    python = folder / "bin" / "python"
    check_import(python, peer)
    return python


def check_import(python: Path, peer: Peer) -> None:
    """Raises `NotInstallable` where its driver could not even begin."""
    try:
        result = subprocess.run(
            [python, "-c", f"import {peer.imports}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=IMPORT_S,
            cwd=ROOT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstallable(f"{peer.title} does not run here: {last_line(str(error))}") from error
    if result.returncode:
        raise NotInstallable(f"{peer.title} cannot be imported here: {last_line(result.stderr)}")


def last_line(text: str) -> str:
    """Where programs say what was wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # What pip says of its own version comes after what it failed at.
    lines = [line for line in lines if not line.startswith("[notice]")] or lines
    return lines[-1] if lines else "it gave no reason"
