"""How much of a benchmark is run: the short form (minutes) or the full one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """`full` measures every size; the short form those that the required figures need.

    `rounds` is how often a comparison alternates its sides.
    """

    full: bool = False
    rounds: int = 5
