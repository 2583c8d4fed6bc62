"""How much of a benchmark is run: the short form (minutes) or the full one."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

_Side = TypeVar("_Side")


@dataclass(frozen=True)
class Scale:
    """`full` measures every size; the short form those that the required figures need.

    `rounds` is how often a comparison alternates its sides.
    """

    full: bool = False
    rounds: int = 5


def in_turns(sides: Iterable[_Side], number: int) -> list[_Side]:
    """The sides of a comparison in the order of round `number`: who goes first changes."""
    return list(sides)[:: 1 if number % 2 == 0 else -1]
