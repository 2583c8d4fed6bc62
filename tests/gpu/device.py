"""The GPU of this machine, if there is one, and how figures are printed."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from datetime import UTC, datetime
from typing import Any


def missing() -> str:
    """Why GPU tests cannot run here, in a few words; empty when they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is not built for a GPU"
    if not torch.cuda.is_available():
        return "no CUDA device is there"
    return ""


def machine() -> dict[str, Any]:
    """What figures are good for nothing without."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "card": properties.name,
        "card_gib": round(properties.total_memory / 2**30, 1),
        "driver": _driver(),
        "cuda": torch.version.cuda or torch.version.hip,
        "torch": torch.__version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def show(name: str, **figures: Any) -> None:
    """One line of JSON that docs/cuda.md can be filled in from."""
    print("\nFIGURES " + json.dumps({"name": name, **figures, "machine": machine()}))


class Seconds:
    """The time a block took, with the device at rest before and after."""

    def __enter__(self) -> Seconds:
        self._settle()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()
        self.seconds = time.perf_counter() - self.began

    def _settle(self) -> None:
        import torch

        torch.cuda.synchronize()

    def gib_s(self, nbytes: int) -> float:
        return round(nbytes / 2**30 / self.seconds, 2)
