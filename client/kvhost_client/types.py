"""The plain data of a session's calls: what goes in, what comes out.

Keys are opaque bytes, all of one length within a namespace. A slot is a 64-bit number: segment id in the
high 32 bits, place in the segment in the low 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, NewType

StoreId = NewType("StoreId", int)
"""One-time name of the right to write one slot; never used twice within a boot of the daemon."""

PinId = NewType("PinId", int)
"""One-time name of one hold on one chunk."""

Slot = NewType("Slot", int)
"""Place of a chunk's bytes: segment id << 32 | index in the segment."""


class Semantics(IntEnum):
    """How the keys of a chain are looked up."""

    PREFIX = 1
    """A key is useful only when all before it are there: the answer ends at the first miss."""
    SET = 2
    """Every key stands for itself."""


class ServiceState(IntEnum):
    """What the daemon does at present."""

    UNSPECIFIED = 0
    STARTING = 1
    SERVING = 2
    DRAINING = 3


class Access(IntEnum):
    """How a worker writes into the segments; decides what proves that it has stopped (I4)."""

    CPU = 1
    DEVICE_DMA = 2


class Found(IntEnum):
    """One byte of `ChainResult.found`."""

    MISS = 0
    HIT = 1
    BEING_WRITTEN = 2
    BOUND = 3
    """There, but not pinned: the session's pin bound is reached (I5)."""


class ReserveStatus(IntEnum):
    """What became of one chunk of a reserve call."""

    UNSPECIFIED = 0
    RESERVED = 1
    EXISTS = 2
    BEING_WRITTEN = 3
    NO_SPACE = 4
    BOUND = 5


@dataclass(frozen=True, slots=True)
class ChainQuery:
    """Keys of one KV cache group, head first."""

    group: int
    semantics: Semantics
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Query:
    """Chains of one request; `tag` is the caller's own number for it, and `request` its name, for people who
    ask the daemon why it missed."""

    tag: int
    chains: Sequence[ChainQuery]
    request: str = ""


class ChainResult(NamedTuple):
    """Answer for one chain. `found` holds a `Found` byte for each key, and with `Semantics.PREFIX` ends at
    the first key that is not a hit. With `pin`, the hits have one slot and one pin id each, in order, and
    one checksum each when the daemon knows any."""

    found: bytes
    slots: Sequence[int]
    pin_ids: Sequence[int]
    checksums: Sequence[int]

    @property
    def hits(self) -> int:
        """Number of keys that are there (and pinned, when asked for)."""
        return self.found.count(Found.HIT)

    @property
    def first_pin_id(self) -> int:
        """Id of the first pin, 0 for none. Not all others need follow by one: see `pin_ids`."""
        return self.pin_ids[0] if self.pin_ids else 0


class Answer(NamedTuple):
    tag: int
    chains: list[ChainResult]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is stored: the key of the chunk, and in full-attention groups the key before it (I10).

    `checksum` is of the slot's bytes, made by the writer; 0 for none.
    """

    group: int
    key: bytes
    parent: bytes = b""
    checksum: int = 0


class Pin(NamedTuple):
    """A chunk that cannot be evicted until it is released (I3)."""

    pin_id: PinId
    slot: Slot
    key: bytes


class Grant(NamedTuple):
    """A slot that may be written once, under this name."""

    store_id: StoreId
    slot: Slot


class ChunkGrant(NamedTuple):
    """A slot for a named chunk; store id and slot are 0 unless RESERVED."""

    status: ReserveStatus
    store_id: StoreId
    slot: Slot


class Reserved(NamedTuple):
    """`pending`: fewer than asked, and more is on its way. `reason`: why fewer, in one line."""

    grants: list[Grant]
    chunks: list[ChunkGrant]
    pending: bool
    reason: str

    def store_ids(self) -> list[StoreId]:
        """Everything that was granted."""
        named = [chunk.store_id for chunk in self.chunks if chunk.status == ReserveStatus.RESERVED]
        return [grant.store_id for grant in self.grants] + named


class StoreOf(NamedTuple):
    """A store id and the chunk it stands for."""

    store_id: int
    chunk: Chunk


class Abort(NamedTuple):
    """A store that does not happen. A worker of `unquiet_ranks` may still write the slot: it is reused only
    after each of them answered a fence or is proven ended (I4)."""

    store_id: int
    unquiet_ranks: Sequence[int] = ()


class ItemKind(IntEnum):
    UNSPECIFIED = 0
    ASSIGN = 1
    COMMIT = 2
    ABORT = 3
    RELEASE = 4
    TOUCH = 5


class ItemError(NamedTuple):
    """One item of an update that changed nothing; `code` is a gRPC status code."""

    kind: ItemKind
    id: int
    code: int
    message: str


class Updated(NamedTuple):
    """`superseded`: commits whose chunk somebody else had published first; the slot went back."""

    errors: list[ItemError]
    superseded: list[int]


class Declared(NamedTuple):
    """The session's namespace. Sizes in bytes; `slots` is what it could grow to while there is room."""

    digest: bytes
    namespace_number: int
    slot_bytes: int
    shard_stride: int
    slots_per_segment: int
    existed: bool
    slots: int


class Rebased(NamedTuple):
    """The namespace a session moved to by a reset."""

    digest: bytes
    namespace_number: int


class Pong(NamedTuple):
    boot_id: int
    state: ServiceState
    populated: float
    """0 to 1, of populating the pool."""
