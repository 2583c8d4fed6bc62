"""Whose segments are whose: the pool lends whole segments to namespaces and takes them back.

A segment goes to another namespace only when every worker that mapped it has
proven that it does so no more, and after it was zeroed (design section 7).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from kvhost_server.ids import MappingId, SegmentId
from kvhost_server.namespace import Namespace
from kvhost_server.notices import Assignment, Outbox

# A worker lets go of a segment in milliseconds, or when its copies have ended. One that takes longer is
# stopped, or hangs: nobody else should wait for it.
_PATIENCE_S = 1.0


class SegmentState(Enum):
    """Where a pool segment stands. An empty one has no memory: it is above the pool's budget."""

    EMPTY = "empty"
    POPULATING = "populating"
    FREE = "free"
    LENT = "lent"
    RETIRING = "retiring"
    CLEANING = "cleaning"


@dataclass(eq=False)
class Loan:
    """One stay of a pool segment in a namespace. `holders` are the workers that were offered it."""

    segment_id: SegmentId
    pool_index: int
    namespace: Namespace
    holders: set[MappingId] = field(default_factory=set)
    retired_at: float = inf


class Lending:
    """The pool's segments and their loans.

    Args:
        segment_bytes: size of every segment.
        segments: how many the pool will have; each is lent only after `ready`.
        outbox: takes the orders to retire, to zero, to allocate and to give back.
        clock: seconds, monotonic.
    """

    def __init__(self, segment_bytes: int, segments: int, outbox: Outbox, clock: Callable[[], float]) -> None:
        self.segment_bytes = segment_bytes
        self.states = [SegmentState.POPULATING] * segments
        # So many are wanted; while some above it are held, there are more.
        self.budget = segments
        self.loans: dict[SegmentId, Loan] = {}
        self._outbox = outbox
        self._clock = clock
        self._last_id = 0
        self._free: list[int] = []
        self._waiting: list[Namespace] = []

    @property
    def free_segments(self) -> int:
        return len(self._free)

    @property
    def segments(self) -> int:
        """Segments that have memory, or get it now."""
        return len(self.states) - self.states.count(SegmentState.EMPTY)

    def resize(self, asked_bytes: int) -> None:
        """The pool's budget is this many bytes from now on, in whole segments, rounded up. What is missing is
        allocated; for what is too much call `settle`."""
        self.budget = -(-asked_bytes // self.segment_bytes)
        more = self.budget - self.segments
        self.states.extend([SegmentState.EMPTY] * (self.budget - len(self.states)))
        empty = [index for index, state in enumerate(self.states) if state is SegmentState.EMPTY]
        fresh = empty[: max(0, more)]
        for index in fresh:
            self.states[index] = SegmentState.POPULATING
        self._outbox.resize(asked_bytes, fresh)

    def settle(self) -> int:
        """Gives back what is above the budget: free segments, then lent ones of which nothing is held, those
        without chunks or with the oldest use first, of namespaces above their floor. Returns how many of the
        latter were retired now."""
        surplus = self.segments - self.budget
        while surplus > 0 and self._free:
            self._empty(self._free.pop())
            surplus -= 1
        if surplus <= 0:
            return 0
        # These go by themselves, when they are ready.
        states = (SegmentState.RETIRING, SegmentState.CLEANING, SegmentState.POPULATING)
        surplus -= sum(state in states for state in self.states)
        retired = 0
        for loan in sorted(
            self.unheld(self.loans.values()), key=lambda loan: (self._has_chunks(loan), self._used_at(loan))
        ):
            if retired >= surplus:
                break
            if loan.namespace.segments > loan.namespace.floor:
                self.retire(loan)
                retired += 1
        return retired

    def missing(self, pool_indices: Iterable[int]) -> None:
        """There was no memory for these segments: the budget is what there is."""
        for index in pool_indices:
            self.states[index] = SegmentState.EMPTY
        self.budget = min(self.budget, self.segments)

    def ready(self, pool_index: int) -> Loan | None:
        """A segment is populated or zeroed. Returns the loan if a namespace was waiting for it."""
        if self.segments > self.budget:
            self._empty(pool_index)
            return None
        self.states[pool_index] = SegmentState.FREE
        self._free.append(pool_index)
        while self._waiting:
            namespace = self._waiting.pop(0)
            namespace.expecting = False
            loan = self.lend(namespace)
            if loan is not None:
                return loan
        return None

    def lendable(self, namespace: Namespace) -> int:
        """Free segments that this namespace may still take."""
        if not namespace.cap:
            return len(self._free)
        return max(0, min(len(self._free), namespace.cap - namespace.segments))

    def lend(self, namespace: Namespace) -> Loan | None:
        """A free segment for this namespace, or None when there is none or its cap is reached."""
        if not self.lendable(namespace):
            return None
        pool_index = self._free.pop()
        self._last_id += 1
        loan = Loan(SegmentId(self._last_id), pool_index, namespace)
        self.loans[loan.segment_id] = loan
        self.states[pool_index] = SegmentState.LENT
        namespace.row_of_segment[loan.segment_id] = namespace.table.add_row(loan.segment_id)
        return loan

    def assignment(self, loan: Loan) -> Assignment:
        """What a worker needs to know of a loan."""
        namespace = loan.namespace
        layout = namespace.spec.layout
        return Assignment(
            segment_id=loan.segment_id,
            pool_index=loan.pool_index,
            bytes=self.segment_bytes,
            slots=namespace.slots_per_segment,
            slot_bytes=layout.slot_bytes,
            shard_stride=layout.shard_stride,
            shards=layout.shards,
            generation=namespace.generation,
        )

    def loans_of(self, namespace: Namespace) -> list[Loan]:
        return [self.loans[segment] for segment in namespace.row_of_segment]

    def unheld(self, loans: Iterable[Loan]) -> list[Loan]:
        """Those of which nothing is held, and that are not on their way back already."""
        return [
            loan
            for loan in loans
            if self.states[loan.pool_index] is SegmentState.LENT
            and not loan.namespace.table.row_held[loan.namespace.row_of_segment[loan.segment_id]]
        ]

    def steal_for(self, namespace: Namespace) -> bool:
        """Retires a segment that nobody can use any more, else the one whose newest use is oldest, unless it
        is the namespace's own. None while one is on its way that nobody else waits for, but for a second at
        most.

        Only segments with nothing held, of namespaces above their floor, count; and those that a stopped
        worker has mapped only when there is nothing else at all. Returns whether one was retired now.
        """
        now = self._clock()
        stuck = namespace.expecting and now - namespace.expecting_since > _PATIENCE_S
        if namespace.cap and namespace.segments >= namespace.cap:
            return False
        others = sum(other is not namespace for other in self._waiting)
        if not stuck and self._coming() > others:
            return self._await(namespace)
        left = [
            loan
            for loan in self.loans.values()
            if loan.namespace.given_up_at is not None and loan.retired_at == inf
        ]
        loan = next(iter(self.unheld(left)), None)
        if loan is None:
            # What was left a moment ago is about to be let go of.
            fresh = sum(now - (loan.namespace.given_up_at or 0.0) <= _PATIENCE_S for loan in left)
            if not stuck and (namespace.expecting or fresh > others):
                return self._await(namespace)
            loan = self._oldest_for(namespace, stuck=stuck)
        if loan is None:
            return False
        self._expect(namespace)
        self.retire(loan)
        return True

    def _oldest_for(self, namespace: Namespace, *, stuck: bool) -> Loan | None:
        """The segment whose newest use is oldest; None where that is the namespace's own, or none may go."""
        slow = self.slow_holders().keys()
        candidates = [
            loan
            for loan in self.unheld(self.loans.values())
            if loan.namespace is namespace or loan.namespace.segments > loan.namespace.floor
        ]
        soon = [loan for loan in candidates if loan.holders.isdisjoint(slow)]
        if not (soon or stuck or namespace.segments):
            soon = candidates
        oldest = min(soon, key=self._used_at, default=None)
        return oldest if oldest is not None and oldest.namespace is not namespace else None

    def give_up(self, namespace: Namespace) -> None:
        """Everybody leaves this namespace, and nobody can name it any more: its segments are the first to
        go, as others need them."""
        namespace.given_up_at = self._clock()
        namespace.floor = namespace.cap = 0

    def withdraw(self, namespace: Namespace) -> None:
        """Somebody left: a namespace in which nobody is any more waits for nothing."""
        if namespace.expecting and not namespace.sessions:
            namespace.expecting = False
            self._waiting.remove(namespace)

    def _coming(self) -> int:
        """Segments that will be free in a moment."""
        now = self._clock()
        coming = self.states.count(SegmentState.CLEANING) + self.states.count(SegmentState.POPULATING)
        coming += sum(0 <= now - loan.retired_at <= _PATIENCE_S for loan in self.loans.values())
        return coming - max(0, self.segments - self.budget)

    def _await(self, namespace: Namespace) -> bool:
        """Waits for a segment that is on its way; since when stays known. False: none was retired."""
        if not namespace.expecting:
            self._expect(namespace)
        return False

    def slow_holders(self) -> Counter[MappingId]:
        """Workers that should long have let go of a segment, and of how many."""
        now = self._clock()
        return Counter(
            mapping
            for loan in self.loans.values()
            if now - loan.retired_at > _PATIENCE_S
            for mapping in loan.holders
        )

    def shrink(self, namespace: Namespace) -> int:
        """Retires unheld segments above the namespace's cap, oldest first. Returns how many."""
        surplus = max(0, namespace.segments - namespace.cap) if namespace.cap else 0
        oldest = sorted(self.unheld(self.loans_of(namespace)), key=self._used_at)[:surplus]
        for loan in oldest:
            self.retire(loan)
        return len(oldest)

    def retire(self, loan: Loan) -> None:
        """Takes a segment back: its chunks go now, the segment when its workers have let go."""
        namespace = loan.namespace
        namespace.table.remove_row(namespace.row_of_segment.pop(loan.segment_id))
        namespace.counters["segments_retired"] += 1
        self.states[loan.pool_index] = SegmentState.RETIRING
        loan.retired_at = self._clock()
        for mapping in loan.holders:
            self._outbox.retire(mapping, [loan.segment_id])
        self._clean_if_free(loan)

    def let_go(self, mapping: MappingId, segments: Iterable[SegmentId]) -> None:
        """A worker is proven not to map these segments any more."""
        for segment in segments:
            loan = self.loans.get(segment)
            if loan is not None and mapping in loan.holders:
                loan.holders.discard(mapping)
                if self.states[loan.pool_index] is SegmentState.RETIRING:
                    self._clean_if_free(loan)

    def _expect(self, namespace: Namespace) -> None:
        if not namespace.expecting:
            namespace.expecting = True
            self._waiting.append(namespace)
        namespace.expecting_since = self._clock()

    def _has_chunks(self, loan: Loan) -> bool:
        namespace = loan.namespace
        row = namespace.row_of_segment[loan.segment_id]
        return namespace.table.free_slots({row}) < namespace.slots_per_segment

    def _used_at(self, loan: Loan) -> int:
        return loan.namespace.table.row_used_at[loan.namespace.row_of_segment[loan.segment_id]]

    def _clean_if_free(self, loan: Loan) -> None:
        if not loan.holders:
            del self.loans[loan.segment_id]
            if self.segments > self.budget:
                self._empty(loan.pool_index)
                return
            self.states[loan.pool_index] = SegmentState.CLEANING
            self._outbox.clean(loan.pool_index)

    def _empty(self, pool_index: int) -> None:
        self.states[pool_index] = SegmentState.EMPTY
        self._outbox.release(pool_index)
