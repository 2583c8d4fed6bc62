"""Waiting for a condition with a deadline, instead of sleeping and hoping."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

_POLL_S = 0.005

_Value = TypeVar("_Value")


def wait_for(condition: Callable[[], _Value | None], deadline_s: float = 5.0, what: str = "") -> _Value:
    """Calls `condition` until it returns something true, and returns that.

    Args:
        what: what is waited for, for the error; a callable condition's own name otherwise.

    Raises:
        AssertionError: the deadline passed; names the last value.
    """
    until = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(_too_late(condition, deadline_s, what, value))
        time.sleep(_POLL_S)


async def wait_for_async(
    condition: Callable[[], _Value | None], deadline_s: float = 5.0, what: str = ""
) -> _Value:
    """As `wait_for`, while the event loop goes on."""
    until = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(_too_late(condition, deadline_s, what, value))
        await asyncio.sleep(_POLL_S)


def _too_late(condition: Callable[[], object], deadline_s: float, what: str, last: object) -> str:
    name = what or getattr(condition, "__qualname__", repr(condition))
    return f"waited {deadline_s:g} s for {name} in vain; it was last {last!r}"
