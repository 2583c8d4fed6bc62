"""The last hour in samples: what the web page draws. A ring of flat arrays, some tens of kilobytes."""

import time
from array import array
from collections.abc import Callable, Mapping

EVERY_S = 10.0
SAMPLES = 361
"""An hour has 360 differences."""


class History:
    """Samples of some numbers, one every `EVERY_S`.

    Args:
        read: the numbers as they are now, by name; always the same names.
        most: how many samples are kept.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]], most: int = SAMPLES) -> None:
        self._read = read
        self._most = most
        self._columns: dict[str, array[float]] = {}
        self._next = 0
        self._sampled_at = 0.0

    @property
    def last_s(self) -> float:
        """How long ago the last sample was taken, in seconds."""
        return time.monotonic() - self._sampled_at if self._columns else 0.0

    def sample(self) -> None:
        """Takes one; the oldest goes when there are too many."""
        for name, value in self._read().items():
            column = self._columns.setdefault(name, array("d"))
            if len(column) < self._most:
                column.append(value)
            else:
                column[self._next] = value
        self._sampled_at = time.monotonic()
        self._next = (self._next + 1) % self._most

    def columns(self) -> dict[str, list[float]]:
        """Every number, the oldest first, and what it is just now at the end."""
        now = self._read()
        return {
            name: [*column[self._next :], *column[: self._next], now[name]]
            if len(column) == self._most
            else [*column, now[name]]
            for name, column in self._columns.items()
        }
