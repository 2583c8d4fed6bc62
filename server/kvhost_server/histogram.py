"""A histogram that costs a bisection when something is observed, and is read only when somebody asks."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of observations by upper bound, and their sum.

    Args:
        bounds: rising upper bounds, each included; what is larger than the last is counted too.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, int]]:
        """Upper bound and number of observations up to it, as Prometheus wants them: rising, +Inf last."""
        rising, seen = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            seen += count
            rising.append((bound, seen))
        return rising

    def quantile(self, share: float) -> float:
        """The bound below which this share of the observations lies; 0 without any. The last finite bound
        stands for everything above it."""
        wanted, seen = share * self.count, 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if count and seen >= wanted:
                return bound
        return self.bounds[-1] if self.counts[-1] else 0.0
