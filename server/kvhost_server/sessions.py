"""A session and what it holds: pins, grants, and the bounds on both (I5)."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvhost_server.ids import ChunkKey, MappingId, PinId, SessionNumber, SlotIndex, StoreId
from kvhost_server.namespace import Namespace


class PeerIdentity(Protocol):
    """Who is at the other end of the handover socket, as the kernel says."""

    @property
    def pid(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def instance_id(self) -> bytes: ...


class Grant(NamedTuple):
    """The right to write one slot, once. `key` is None while it is not known what will be written."""

    namespace: Namespace
    slot: SlotIndex
    generation: int
    key: ChunkKey | None = None
    parent: ChunkKey | None = None


@dataclass(eq=False)
class Session:
    """An engine's control connection."""

    number: SessionNumber
    secret: bytes
    identity: PeerIdentity
    label: str
    opened_at: float
    namespace: Namespace | None = None
    pins: dict[PinId, SlotIndex] = field(default_factory=dict)
    # Pins in the namespace that the session left by a reset: loads may still run there.
    former_pins: dict[PinId, tuple[Namespace, SlotIndex]] = field(default_factory=dict)
    grants: dict[StoreId, Grant] = field(default_factory=dict)
    unassigned: int = 0
    mapping_of_rank: dict[int, MappingId] = field(default_factory=dict)
    # Rows of the namespace that every rank has mapped, and whether those are all.
    usable_rows: set[int] = field(default_factory=set)
    all_usable: bool = False
    ready: bool = False
    mapped_ranks: int = 0
    recalled_at: float = float("-inf")
    # Why it last got fewer slots than it asked for, for people.
    refused_at: float = float("-inf")
    refused_why: str = ""

    @property
    def pin_count(self) -> int:
        return len(self.pins) + len(self.former_pins)


@dataclass(frozen=True)
class Bounds:
    """How much one session may hold, in chunks (I5).

    `slots` is what its namespace has and could still take from the pool.
    """

    slots: int
    sessions: int

    @property
    def pins(self) -> int:
        return max(1, self.slots // 2)

    @property
    def grants(self) -> int:
        """Granted and quarantined slots together."""
        return max(1, self.slots // 4)

    @property
    def unassigned(self) -> int:
        """Slots taken ahead, with no chunk yet."""
        return max(1, self.slots // (8 * max(1, self.sessions)))
