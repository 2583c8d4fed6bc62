"""One request on its way to a hit: asked, answered, pinned, loading. Keys here are vLLM's own.

    IDLE --ask--> ASKED --answer--> KNOWN --native finds n > 0--> PINNING --held--> PINNED --allocated--> IDLE
      ^             |                  |                             |              ^  |
      |             +----------------- answer, held with it ---------|--------------+  |
      +---- a new attempt -------------+------- deadline ------------+--- 16 asks -----+

What is looked up in KNOWN is advice. What is looked up in PINNED is what is held, and nothing else (I3).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvhost_client.types import ChainQuery, Chunk, Semantics
from kvhost_connector.holds import Authority, PinnedSlot
from kvhost_connector.namespace import Group
from kvhost_connector.orders import Ticket
from kvhost_connector.weights import adapter_key

MAX_ASKS = 16
"""Pins that were not allocated after so many asks go back: the engine has no blocks for this request."""


class Phase(Enum):
    IDLE = auto()
    ASKED = auto()
    KNOWN = auto()
    PINNING = auto()
    PINNED = auto()


@dataclass
class RequestView:
    """What the manager knows of one request.

    `chains` are the keys of each group, head first: native's own lists, which grow with the request.
    """

    req_id: str
    groups: tuple[Group, ...]
    chains: Sequence[list[bytes]]
    adapter: bytes = b""
    phase: Phase = Phase.IDLE
    ticket: Ticket | None = None
    answered_at: float = 0.0
    # Until then everything is a miss: the daemon did not answer in time.
    blind_until: float = 0.0
    found: set[bytes] = field(default_factory=set)
    # What lookup called a hit since native was entered last.
    hits: dict[bytes, None] = field(default_factory=dict)
    pins: dict[bytes, PinnedSlot] = field(default_factory=dict)
    authority: Authority | None = None
    # Locally computed tokens for which the pins were taken; None: for however many these are.
    computed: int | None = 0
    # Whether hits were to be held with the first answer.
    held_at_once: bool = False
    asks: int = 0
    # Keys of a load that failed: misses from then on, else the request would load and fail for ever.
    failed: set[bytes] = field(default_factory=set)
    touched: bool = False
    # Where each chain is known to be cut, as of so many removals.
    cuts: list[int | None] = field(default_factory=list)
    cuts_as_of: int = -1
    wires: dict[bytes, bytes] = field(default_factory=dict)
    preemptions: int = 0
    hold_until_step: int = 0
    # Whether every group is looked up by prefix.
    prefix_only: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prefix_only = all(group.prefix for group in self.groups)

    def wire(self, key: bytes) -> bytes:
        """The key as the daemon knows it: an adapter's identity is inside."""
        if not self.adapter:
            return key
        wire = self.wires.get(key)
        if wire is None:
            wire = self.wires[key] = adapter_key(key, self.adapter)
        return wire

    def place(self, key: bytes, end_token: int) -> tuple[int, int]:
        """(position of the group, index of the chunk in it) of a key that ends at this token."""
        if len(self.groups) == 1:
            return 0, -(-end_token // self.groups[0].tokens_per_chunk) - 1
        group_id = int.from_bytes(key[-4:], "big")
        for position, group in enumerate(self.groups):
            if group.id == group_id:
                return position, -(-end_token // group.tokens_per_chunk) - 1
        raise KeyError(f"group {group_id} is not offloaded")

    def chunk(self, key: bytes, position: int, index: int) -> Chunk:
        """The chunk with its parent: the one before it, in groups that are looked up by prefix (I10)."""
        group, chain = self.groups[position], self.chains[position]
        parent = chain[index - 1] if group.prefix and 0 < index <= len(chain) else b""
        if self.adapter:
            return Chunk(group.id, self.wire(key), self.wire(parent) if parent else b"")
        return Chunk(group.id, key, parent)

    def is_cut_off(self, position: int, index: int) -> bool:
        """Whether a chunk before this one was removed: by prefix this one could not be found."""
        cut = self.cuts[position] if self.cuts else None
        return cut is not None and index > cut

    def find_cuts(self, removed: StoredKeys, as_of: int) -> None:
        """Looks where the chains are cut, if there were removals since the last look."""
        if self.cuts_as_of == as_of:
            return
        self.cuts_as_of = as_of
        self.cuts = [
            next((index for index, key in enumerate(chain) if self.wire(key) in removed), None)
            if group.prefix and len(removed)
            else None
            for group, chain in zip(self.groups, self.chains, strict=True)
        ]

    def all_chains(self) -> list[ChainQuery]:
        """Questions for all keys of the request."""
        return [self.query(group, keys) for group, keys in zip(self.groups, self.chains, strict=True) if keys]

    def query(self, group: Group, keys: Sequence[bytes]) -> ChainQuery:
        semantics = Semantics.PREFIX if group.prefix else Semantics.SET
        wired = list(keys) if not self.adapter else [self.wire(key) for key in keys]
        return ChainQuery(group.id, semantics, wired)

    def grouped(self, keys: Sequence[bytes]) -> list[ChainQuery]:
        """Questions for some keys, in the order given within each group."""
        by_group: dict[int, list[bytes]] = {}
        for key in keys:
            by_group.setdefault(int.from_bytes(key[-4:], "big"), []).append(key)
        return [self.query(group, by_group[group.id]) for group in self.groups if group.id in by_group]


class StoredKeys:
    """Wire keys that are believed to be stored. Bounded: the oldest belief goes first.

    A belief saves a store, or makes a request ask for a pin; the pin proves it (I3).
    """

    def __init__(self, limit: int = 1 << 18) -> None:
        self._limit = limit
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> Container[bytes]:
        """The keys alone: to look many of them up."""
        return self._keys

    def add(self, key: bytes) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._limit:
            del self._keys[next(iter(self._keys))]

    def add_all(self, keys: Iterable[bytes]) -> None:
        known = self._keys
        for key in keys:
            known.pop(key, None)
            known[key] = None
        while len(known) > self._limit:
            del known[next(iter(known))]

    def discard(self, key: bytes) -> None:
        self._keys.pop(key, None)

    def clear(self) -> list[bytes]:
        """Forgets everything; returns what was believed."""
        keys = list(self._keys)
        self._keys.clear()
        return keys
