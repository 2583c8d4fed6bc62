"""What makes two engines share: the namespace's digest, its layout, and its own books."""

import hashlib
import json
import secrets
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from time import monotonic

from kvhost_server.fates import Fates
from kvhost_server.ids import ChunkKey, NamespaceNumber, SegmentId
from kvhost_server.notices import Cleared, Evicted, KeyEvent, Stored
from kvhost_server.policies import DEFAULT_POLICY
from kvhost_server.slots import ChunkTable

PAGE = 4096
FORMAT_VERSION = 1
WEIGHTS_PART = "weights_version"
# Engines begin such a version with this, too.
_UNNAMED = "unnamed "
_MAX_QUEUED_EVENTS = 65536


class Semantics(IntEnum):
    """How the keys of a group are looked up; the values are the wire's."""

    PREFIX = 1
    SET = 2


@dataclass(frozen=True)
class Group:
    """One KV cache group: its index, how it is looked up, tokens in one chunk of it."""

    id: int
    semantics: Semantics
    tokens_per_chunk: int


@dataclass(frozen=True)
class Layout:
    """How a slot is laid out. `shard_bytes` is what one rank writes for one chunk."""

    shard_bytes: int
    shards: int
    ranks: int
    key_bytes: int
    groups: tuple[Group, ...]

    @cached_property
    def group_ids(self) -> frozenset[int]:
        return frozenset(group.id for group in self.groups)

    @cached_property
    def prefix_ids(self) -> frozenset[int]:
        """Groups whose chunks build on each other."""
        return frozenset(group.id for group in self.groups if group.semantics is Semantics.PREFIX)

    @property
    def shard_stride(self) -> int:
        """Bytes from one rank's shard to the next: whole pages."""
        return -(-self.shard_bytes // PAGE) * PAGE

    @property
    def slot_bytes(self) -> int:
        return self.shard_stride * self.shards


@dataclass(frozen=True)
class NamespaceSpec:
    """Everything that must be equal for two engines to share bytes.

    `parts` maps a name to canonical JSON, so that 1, "1" and true differ.
    `model` is for people and not part of the digest.
    """

    name: str
    model: str
    parts: Mapping[str, str]
    layout: Layout

    def digest(self) -> bytes:
        """32 bytes; equal exactly when everything but `model` is equal."""
        layout = self.layout
        sealed: dict[str, str] = {
            "kvhost.format": json.dumps(FORMAT_VERSION),
            "kvhost.name": json.dumps(self.name),
            "kvhost.layout": json.dumps(
                [layout.shard_bytes, layout.shards, layout.ranks, layout.key_bytes]
                + [[g.id, int(g.semantics), g.tokens_per_chunk] for g in layout.groups]
            ),
        }
        hasher = hashlib.sha256()
        for source, parts in ((b"own", sealed), (b"engine", self.parts)):
            hasher.update(source)
            for name in sorted(parts):
                for text in (name.encode(), parts[name].encode()):
                    hasher.update(len(text).to_bytes(8, "big") + text)
        return hasher.digest()

    @property
    def unnamed(self) -> bool:
        """Only one engine knows this name, and only while it has these weights."""
        return self.parts.get(WEIGHTS_PART, "").startswith(f'"{_UNNAMED}')

    def with_weights(self, version: str) -> "NamespaceSpec":
        """The same engine after its weights changed; without a version, a namespace nobody else can name."""
        value = version or _UNNAMED + secrets.token_hex(16)
        return replace(self, parts={**self.parts, WEIGHTS_PART: json.dumps(value)})


@dataclass(eq=False)
class Namespace:
    """One namespace's slots and what is counted about it.

    `floor` and `cap` bound how many segments it keeps and takes (0: no cap).
    """

    number: NamespaceNumber
    digest: bytes
    spec: NamespaceSpec
    table: ChunkTable = field(init=False)
    slots_per_segment: int
    policy: str = DEFAULT_POLICY
    fates: Fates = field(default_factory=lambda: Fates(monotonic))
    generation: int = 1
    floor: int = 0
    cap: int = 0
    sessions: set[int] = field(default_factory=set)
    counters: Counter[str] = field(default_factory=Counter)
    events: deque[KeyEvent] = field(default_factory=deque)
    events_lost: bool = False
    row_of_segment: dict[SegmentId, int] = field(default_factory=dict)
    # A segment is on its way to this namespace, from another one.
    expecting: bool = False
    expecting_since: float = 0.0
    # Since when nobody can come back to it (`Lending.give_up`).
    given_up_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens_per_chunk = {group.id: group.tokens_per_chunk for group in self.spec.layout.groups}
        self.table = ChunkTable(self.slots_per_segment, self._removed, self.policy)

    @property
    def segments(self) -> int:
        return len(self.row_of_segment)

    def prefix_keys(self, group: int) -> bool:
        """Chunks of this group build on each other."""
        return group in self.spec.layout.prefix_ids

    def stored(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        self._event(Stored(key, parent))

    def cleared(self) -> None:
        self.events.clear()
        self._event(Cleared())

    def _removed(self, key: ChunkKey, used_at: int) -> None:
        self.counters["evicted"] += 1
        self.fates.left(self.number, key, used_at)
        self._event(Evicted(key))

    def _event(self, event: KeyEvent) -> None:
        # Nobody may be there to take them; then only that they were lost counts.
        if len(self.events) >= _MAX_QUEUED_EVENTS:
            self.events.clear()
            self.events_lost = True
        self.events.append(event)

    def take_events(self) -> tuple[list[KeyEvent], bool]:
        """The key events since the last call, and whether some before them were lost."""
        events, lost = list(self.events), self.events_lost
        self.events.clear()
        self.events_lost = False
        return events, lost
