"""Where tests put a hand between a copy and its bytes: hold it, or make it fail.

In service nothing of this is active. A test names a hook in the environment of the engine, or passes one to
the worker; the worker asks it before it copies each chunk.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Literal, Protocol

VARIABLE = "KVHOST_FAULT_PLANE"

Direction = Literal["load", "store"]


class CopyFault(Exception):
    """A copy that failed on purpose."""


class FaultPlane(Protocol):
    """Called in a copying thread before each chunk of a job. May block; `CopyFault` fails the job."""

    def __call__(self, direction: Direction, rank: int, job_id: int, chunk: int) -> None: ...


def no_faults(direction: Direction, rank: int, job_id: int, chunk: int) -> None:
    """The plane of every engine that is not under test."""


def fault_plane(environment: Mapping[str, str] = os.environ) -> FaultPlane:
    """The hook named by KVHOST_FAULT_PLANE as `module:name`; none without it."""
    named = environment.get(VARIABLE, "")
    if not named:
        return no_faults
    module, _, name = named.partition(":")
    plane: FaultPlane = getattr(importlib.import_module(module), name)
    return plane
