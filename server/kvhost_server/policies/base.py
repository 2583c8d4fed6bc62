"""What an eviction policy may ask, and what it is told and asked.

A policy orders candidates; it never frees, pins or knows about sessions. The
table tells it what was stored, used, dropped, and what may be evicted now; it
answers `victim()`: first chunks that no other resident chunk builds on; only
when every one of those is held, a chunk in the middle of a chain (I10).
"""

from collections.abc import Sequence
from typing import Protocol

from kvhost_server.ids import ChunkKey, SlotIndex


class Candidates(Protocol):
    """What a policy may ask the table."""

    @property
    def slots(self) -> int:
        """How many chunks there is room for."""

    def stamp(self, slot: SlotIndex) -> int:
        """Time of the last use; higher is later, no two are equal."""

    def evictable(self, slot: SlotIndex) -> bool:
        """Stored and held by nobody."""

    def has_children(self, slot: SlotIndex) -> bool:
        """Another resident chunk builds on this one."""

    def unreachable(self, slot: SlotIndex) -> bool:
        """A chunk that this one builds on is missing."""

    def key(self, slot: SlotIndex) -> ChunkKey | None:
        """Key of the chunk in this slot."""


class Policy(Protocol):
    """Order of eviction of one namespace."""

    name: str

    def stored(self, slot: SlotIndex, key: ChunkKey) -> None:
        """This chunk was published; its stamp is set. `offer` follows."""

    def used(self, slots: Sequence[SlotIndex]) -> None:
        """A request used these chunks; their stamps rose. Called often: what it does is little."""

    def gone(self, slot: SlotIndex, key: ChunkKey) -> None:
        """This chunk left the index, for whatever reason."""

    def offer(self, slot: SlotIndex) -> None:
        """This chunk may be evicted from now on, as far as anybody knows. May be said twice."""

    def prefer(self, slot: SlotIndex) -> None:
        """This chunk cannot be reached any more: take it before all others."""

    def victim(self) -> SlotIndex | None:
        """The chunk to evict next, forgotten until offered again.

        None when every chunk is held, or when thousands that come first are: looking on would stop the loop,
        and the next call looks further.
        """

    def describe(self) -> str:
        """One line for people: the name, and what it decides by now."""
