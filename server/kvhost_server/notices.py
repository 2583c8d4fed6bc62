"""What the daemon tells a session without being asked, and the orders its decisions give to the shell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvhost_server.ids import ChunkKey, MappingId, NamespaceNumber, SegmentId, SessionNumber, StoreId


@dataclass(frozen=True)
class Mapped:
    """The number of ranks that hold the namespace's segments changed."""

    mapped_ranks: int
    ranks: int
    ready: bool


@dataclass(frozen=True)
class Recall:
    """Somebody else needs the room of this many unused grants."""

    grants: int


@dataclass(frozen=True)
class Fenced:
    """Quarantined slots became free."""

    slots: int


@dataclass(frozen=True)
class Resync:
    """The namespace's content was dropped: forget what you believe about stored keys."""


@dataclass(frozen=True)
class Ended:
    """The session is over; nothing follows."""

    why: str


Notice = Mapped | Recall | Fenced | Resync | Ended


class Stored(NamedTuple):
    key: ChunkKey
    parent: ChunkKey | None


class Evicted(NamedTuple):
    key: ChunkKey


@dataclass(frozen=True)
class Cleared:
    """Every key of the namespace left at once."""


KeyEvent = Stored | Evicted | Cleared


@dataclass(frozen=True)
class Assignment:
    """A pool segment on loan to a namespace, as a worker needs to know it. Sizes in bytes."""

    segment_id: SegmentId
    pool_index: int
    bytes: int
    slots: int
    slot_bytes: int
    shard_stride: int
    shards: int
    generation: int


class Outbox(Protocol):
    """What the manager orders; the shell carries it out. No call may come back into the manager at once."""

    def offer(self, mapping: MappingId, segments: Sequence[Assignment]) -> None:
        """Send these segments, with their file descriptors, to a worker."""

    def retire(self, mapping: MappingId, segment_ids: Sequence[SegmentId]) -> None:
        """Tell a worker to unmap these segments and to say so."""

    def fence(
        self, mapping: MappingId, fence: int, session_below: SessionNumber, store_ids: Sequence[StoreId]
    ) -> None:
        """Tell a worker to finish what runs, drop what waits, and to say so."""

    def notice(self, session: SessionNumber, notice: Notice) -> None:
        """Tell a session; bounded, so it may be collapsed to a resync."""

    def clean(self, pool_index: int) -> None:
        """Zero this segment, then call `segment_clean`."""

    def resize(self, asked_bytes: int, fresh: Sequence[int]) -> None:
        """The pool was asked to be of this size: allocate these segments, and call `segment_ready` for each
        or `segments_missing`."""

    def release(self, pool_index: int) -> None:
        """Nobody has this segment mapped: give its memory back."""

    def events(self, namespace: NamespaceNumber) -> None:
        """Key events of this namespace wait: call `take_events` soon."""

    def chores(self) -> None:
        """Long work waits: call `run_chores` until it answers False, in slices."""
