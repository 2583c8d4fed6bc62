"""After how long chunks are used again, by how often they were used before: measured on a sample of keys.

Time is counted in chunks stored since, which is what moves an eviction order:
an hour without a store changes nothing.
"""

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

KINDS = 4
"""Kinds of chunks: used once, twice, three times, more often."""

SPANS = 16
_MOST_SAMPLED = 1 << 14
_FEWEST_SAMPLED = 1 << 10
_SAMPLED_PER_SLOT = 16
_HORIZON = 32
_UNITS_PER_SLOT = 64
_FEWEST_SLOTS = 64
_BELIEF = 20.0
_HABIT = 0.25
_GONE = 0x80


@dataclass
class Counts:
    """For each kind and span of age: how many chunks were used again within it, how many lived through it."""

    again: list[list[float]] = field(default_factory=lambda: [[0.0] * SPANS for _ in range(KINDS)])
    through: list[list[float]] = field(default_factory=lambda: [[0.0] * SPANS for _ in range(KINDS)])

    def halve(self) -> None:
        for table in (self.again, self.through):
            for row in table:
                row[:] = [value / 2 for value in row]


class ReuseHistory:
    """The last uses of sampled keys, resident or not, and what they tell: 16 a slot, at most 16384.

    The sample thins as the cache grows, so that it reaches back 32 times the
    cache's size. Age spans double: the first is 1/64 of the cache. Old counts
    lose half of their weight each time the history has turned over.
    """

    def __init__(self) -> None:
        self._sized(_FEWEST_SLOTS)

    def _sized(self, slots: int) -> None:
        """Begins anew for a cache of this size."""
        self._slots = slots
        self.unit = max(1, slots // _UNITS_PER_SLOT)
        self._sampled = min(_MOST_SAMPLED, max(_FEWEST_SAMPLED, _SAMPLED_PER_SLOT * slots))
        thinned = 1
        while thinned * self._sampled < slots * _HORIZON:
            thinned *= 2
        self.sample_mask = thinned - 1
        self.counts = Counts()
        self._began: int | None = None
        self._last = 0
        self._at: dict[int, int] = {}
        self.uses = 0
        # They grow to their size with use: most namespaces of a host are small, or idle.
        self._who = array("Q")
        self._when = array("Q")
        self._stamp = array("Q")
        self._kind = bytearray()
        self._reached = [0] * SPANS
        # Stamps at which the spans end, the oldest first.
        self._edges = [0] * SPANS

    def fit(self, slots: int) -> None:
        """The cache has so many slots now. When that is twice as many as before, all begins anew."""
        if slots >= 2 * self._slots:
            self._sized(slots)

    def sampled(self, fingerprint: int) -> bool:
        return not fingerprint >> 16 & self.sample_mask

    def use(self, fingerprint: int, kind: int, now: int, stamp: int) -> None:
        """A sampled key was stored or used; from now on it is of this kind.

        Args:
            now: chunks stored so far.
            stamp: the table's time of this use.
        """
        if self._began is None:
            self._began = now
        before = self._at.get(fingerprint)
        if before is not None:
            place = before % self._sampled
            span = ((now - self._when[place]) // self.unit).bit_length()
            self.counts.again[self._kind[place]][min(span, SPANS - 1)] += 1
            self._kind[place] |= _GONE
        place = self.uses % self._sampled
        if self.uses >= self._sampled:
            if not self._kind[place] & _GONE:
                del self._at[self._who[place]]
            if not place:
                self.counts.halve()
            self._who[place], self._when[place] = fingerprint, now
            self._stamp[place], self._kind[place] = stamp, kind
        else:
            self._who.append(fingerprint)
            self._when.append(now)
            self._stamp.append(stamp)
            self._kind.append(kind)
        self._at[fingerprint] = self.uses
        self.uses += 1
        self._last = now

    def advance(self, now: int) -> None:
        """Counts who has come through a span of age without a use."""
        oldest = max(0, self.uses - self._sampled)
        for span in range(SPANS):
            at = max(self._reached[span], oldest)
            edge = now - (self.unit << span)
            through = self.counts.through
            while at < self.uses:
                place = at % self._sampled
                if self._when[place] > edge:
                    break
                kind = self._kind[place]
                if not kind & _GONE:
                    through[kind][span] += 1
                at += 1
            self._reached[span] = at
            if at > oldest:
                self._edges[-1 - span] = self._stamp[(at if at < self.uses else at - 1) % self._sampled]
            else:
                self._edges[-1 - span] = 0

    def span_of(self, stamp: int) -> int:
        """In which span of age a chunk with this last use is."""
        return min(SPANS - bisect_right(self._edges, stamp), SPANS - 1)

    def age_of(self, stamp: int) -> str:
        """About how many chunks were stored since then, for people."""
        span = self.span_of(stamp)
        return f"under {self.unit << span}" if span < SPANS - 1 else f"over {self.unit << span - 1}"

    def densities(self, now: int) -> list[list[float]]:
        """For each kind and span of age: uses to be expected for each unit of time that a chunk is kept on.

        It is kept as long as that pays: the best of all stays from this age to
        a later one (a Gittins index). Where nothing was seen yet, each span is
        worth as much as the next, which is the order of last use.
        """
        known = now - self._began if self._began is not None else 0
        again, through = self.counts.again, self.counts.through
        table: list[list[float]] = []
        pooled: list[float] = []
        chance = _HABIT
        for span in range(SPANS):
            if self.unit << span <= known:
                used = sum(row[span] for row in again)
                seen = used + sum(row[span] for row in through)
                chance = (used + _BELIEF * _HABIT) / (seen + _BELIEF)
            pooled.append(chance)
        for kind in range(KINDS):
            chances = [
                (again[kind][span] + _BELIEF * pooled[span])
                / (again[kind][span] + through[kind][span] + _BELIEF)
                for span in range(SPANS)
            ]
            table.append(_best_densities(chances))
        return table


def _best_densities(chances: list[float]) -> list[float]:
    """From each span on: the most uses for each unit of time that any stay brings.

    A stay from one edge of a span to a later one is a chord of the curve of
    uses over time; the steepest lies on the curve's upper hull.
    """
    uses, times = [0.0], [0.0]
    left = 1.0
    for span, chance in enumerate(chances):
        width = 1 << max(0, span - 1)
        uses.append(uses[-1] + left * chance)
        times.append(times[-1] + left * width * (1 - chance / 2))
        left *= 1 - chance
    hull = [SPANS]
    best = [0.0] * SPANS
    for span in range(SPANS - 1, -1, -1):

        def slope(to: int, at: int = span) -> float:
            return (uses[to] - uses[at]) / (times[to] - times[at])

        while len(hull) > 1 and slope(hull[-1]) <= slope(hull[-2]):
            hull.pop()
        best[span] = slope(hull[-1])
        hull.append(span)
    return best
