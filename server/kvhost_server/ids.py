"""The daemon's names for things: numbers and bytes that must not be mixed up."""

from typing import NewType

ChunkKey = NewType("ChunkKey", bytes)
"""vLLM's hash of the last block in a chunk, followed by its group index (4 bytes)."""

SlotIndex = NewType("SlotIndex", int)
"""Place of a slot inside its namespace: row * slots per segment + place in the segment."""

SegmentId = NewType("SegmentId", int)
"""One loan of a pool segment to a namespace. Never used twice within a boot."""

SessionNumber = NewType("SessionNumber", int)
"""Public number of a session; rises with every session opened."""

MappingId = NewType("MappingId", int)
"""One worker process's connection on the handover socket and what it maps."""

NamespaceNumber = NewType("NamespaceNumber", int)

StoreId = NewType("StoreId", int)
"""One-time name of the right to write one slot."""

PinId = NewType("PinId", int)
"""One-time name of one hold on one chunk."""

SLOT_INDEX_BITS = 32


def wire_slot(segment: SegmentId, place: int) -> int:
    """The number by which a slot travels: segment id above, place in the segment below."""
    return segment << SLOT_INDEX_BITS | place
