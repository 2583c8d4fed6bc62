"""Device memory for copies in flight: a budget in bytes, and the sizes of batches that fit into it.

Every batch is one program and one transfer. Programs exist for a handful of sizes only, so a number of
blocks is cut into those; a batch may be filled up with rows that count for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class Staging:
    """Counts bytes on each device. Thread-safe; never gives more than `total`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.peak = 0
        self._used = 0
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        with self._lock:
            return self.total - self._used

    def take(self, size: int) -> bool:
        """Reserves `size` bytes if they are there."""
        with self._lock:
            if self._used + size > self.total:
                return False
            self._used += size
            self.peak = max(self.peak, self._used)
            return True

    def give(self, size: int) -> None:
        """Returns what was taken. More than that is an error: the budget must not grow."""
        with self._lock:
            if size > self._used:
                raise ValueError(f"{size} bytes of staging memory are given back, {self._used} were taken")
            self._used -= size


def usable_buckets(buckets: Sequence[int], block_bytes: int, total: int) -> tuple[int, ...]:
    """Those sizes whose batches fit into the budget, ascending; 1 is always among them.

    Raises ValueError when not even one block fits.
    """
    if block_bytes > total:
        raise ValueError(
            f"staging_bytes must hold one block, {block_bytes} bytes on each device, found {total}: raise it"
        )
    return tuple(sorted({1, *(size for size in buckets if size * block_bytes <= total)}))


def first_batch(blocks: int, buckets: Sequence[int], limit: int) -> int:
    """The size of program for the first of `blocks` blocks when at most `limit` rows fit; 0 when none does.

    A size that is nearly filled is taken whole: a few empty rows cost less than several more programs.
    """
    fitting = [size for size in buckets if size <= limit]
    if not fitting or blocks < 1:
        return 0
    for size in fitting:
        if size >= blocks and 4 * blocks > 3 * size:
            return size
    return max((size for size in fitting if size <= blocks), default=0)
