"""What became of chunks that are no longer there: a bounded memory, so that "why did it miss?" has an answer.

A fate is twenty bytes in flat arrays: the key's fingerprint, when, why, and for whom. The oldest is
overwritten. Keys themselves are not kept, and never shown to anybody who does not name them.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from kvhost_server.histogram import Histogram
from kvhost_server.ids import ChunkKey, NamespaceNumber

MOST_FATES = 131_072
MOST_RUNS = 64
_RUN_S = 10.0
_SLICE = 16_384
_CAUSE_BITS = 4
_TENTHS = 10
_NUMBER_MASK = (1 << 28) - 1
AGE_BOUNDS_S = (1, 5, 15, 60, 300, 900, 3600, 14400, 43200, 86400, 604800)


class Cause(IntEnum):
    """Why a chunk is not there."""

    ROOM = 0
    """Its own namespace needed the slot for another chunk."""
    SEGMENT = 1
    """Its segment went to another namespace."""
    LIMIT = 2
    """The namespace's cap was lowered."""
    OPERATOR = 3
    """Evicted by hand."""
    RESET = 4
    """The whole namespace was reset."""
    NO_SPACE = 5
    """Never stored: every slot was held when an engine asked for one."""
    BOUND = 6
    """Never stored: the engine's session held as much as it may."""
    ABORTED = 7
    """Never stored: the engine began to write it and gave up."""


EVICTIONS = (Cause.ROOM, Cause.SEGMENT, Cause.LIMIT, Cause.OPERATOR)
"""The causes that took a stored chunk away, one at a time."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What happened to one key of one namespace; `at` on the clock of the books, in seconds."""

    cause: Cause
    at: float
    taker: NamespaceNumber
    """Who got the room; 0 where nobody did."""


@dataclass(slots=True)
class Run:
    """Evictions of one kind that followed each other, as people are shown them."""

    namespace: NamespaceNumber
    cause: Cause
    taker: NamespaceNumber
    began: float
    ended: float
    chunks: int
    youngest_s: float
    """Of what was evicted, the shortest time since its last use."""
    oldest_s: float


class Fates:
    """The memory of all namespaces together.

    Args:
        clock: seconds, monotonic.
        most: how many fates are kept.
    """

    def __init__(self, clock: Callable[[], float], most: int = MOST_FATES) -> None:
        self.ages = Histogram(AGE_BOUNDS_S)
        self.evicted = dict.fromkeys(EVICTIONS, 0)
        self.runs: deque[Run] = deque(maxlen=MOST_RUNS)
        self.resets: dict[NamespaceNumber, float] = {}
        self._clock = clock
        self._most = most
        self._origin = clock()
        self._next = 0
        self._prints = array("q")
        self._when = array("I")
        self._where = array("I")
        self._why = array("I")
        self._cause = Cause.ROOM
        self._taker: NamespaceNumber | None = None

    @contextmanager
    def because(self, cause: Cause, taker: NamespaceNumber | None = None) -> Iterator[None]:
        """What is evicted meanwhile goes for this reason, and for this namespace (else for its own)."""
        before = self._cause, self._taker
        self._cause, self._taker = cause, taker
        try:
            yield
        finally:
            self._cause, self._taker = before

    def left(self, namespace: NamespaceNumber, key: ChunkKey, used_at_us: int) -> None:
        """A stored chunk was evicted; it was last used at this time of the clock, in microseconds."""
        now = self._clock()
        age = now - used_at_us / 1e6
        age = max(age, 0.0)
        cause = self._cause
        taker = NamespaceNumber(0) if cause in (Cause.LIMIT, Cause.OPERATOR) else self._taker or namespace
        self.ages.observe(age)
        self.evicted[cause] += 1
        self._keep(namespace, key, cause, taker, now)
        run = self.runs[-1] if self.runs else None
        if (
            run is not None
            and run.namespace == namespace
            and run.cause is cause
            and run.taker == taker
            and now - run.ended < _RUN_S
        ):
            run.ended = now
            run.chunks += 1
            if age < run.youngest_s:
                run.youngest_s = age
            elif age > run.oldest_s:
                run.oldest_s = age
        else:
            self.runs.append(Run(namespace, cause, taker, now, now, 1, age, age))

    def not_stored(self, namespace: NamespaceNumber, key: ChunkKey, cause: Cause) -> None:
        """An engine wanted to store this chunk and could not."""
        self._keep(namespace, key, cause, NamespaceNumber(0), self._clock())

    def reset(self, namespace: NamespaceNumber, chunks: int) -> None:
        """Everything of a namespace was dropped at once."""
        now = self.resets[namespace] = self._clock()
        self.runs.append(Run(namespace, Cause.RESET, NamespaceNumber(0), now, now, chunks, 0.0, 0.0))

    def forget(self, namespace: NamespaceNumber) -> None:
        """A namespace is gone; its number is never used again."""
        self.resets.pop(namespace, None)

    def of(self, namespace: NamespaceNumber, keys: Sequence[ChunkKey]) -> Iterator[dict[ChunkKey, Fate]]:
        """Looks for the newest fate of each key, in slices: yields what it found so far after each.

        O(fates kept) for all keys together.
        """
        wanted = {hash(key): key for key in keys}
        found: dict[ChunkKey, Fate] = {}
        ends = len(self._prints)
        at = self._next if ends == self._most else 0
        order = [*range(at - 1, -1, -1), *range(ends - 1, at - 1, -1)]
        yield found
        for start in range(0, len(order), _SLICE):
            for place in order[start : start + _SLICE]:
                key = wanted.get(self._prints[place])
                if key is not None and key not in found and self._where[place] == namespace & _NUMBER_MASK:
                    why = self._why[place]
                    found[key] = Fate(
                        Cause(why & ((1 << _CAUSE_BITS) - 1)),
                        self._origin + self._when[place] / _TENTHS,
                        NamespaceNumber(why >> _CAUSE_BITS),
                    )
            yield found

    def _keep(
        self, namespace: NamespaceNumber, key: ChunkKey, cause: Cause, taker: NamespaceNumber, now: float
    ) -> None:
        # Python's own hash of bytes: keyed anew in every process, and already computed for the index.
        when = int((now - self._origin) * _TENTHS) & 0xFFFFFFFF
        why = (taker & _NUMBER_MASK) << _CAUSE_BITS | cause
        place = self._next
        if place < len(self._prints):
            self._prints[place] = hash(key)
            self._when[place] = when
            self._where[place] = namespace & _NUMBER_MASK
            self._why[place] = why
        else:
            self._prints.append(hash(key))
            self._when.append(when)
            self._where.append(namespace & _NUMBER_MASK)
            self._why.append(why)
        self._next = (place + 1) % self._most
