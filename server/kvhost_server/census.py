"""How much memory each namespace has and what is in it: counted over flat arrays, cheap."""

from dataclasses import dataclass

from kvhost_server.books import Books
from kvhost_server.namespace import Namespace
from kvhost_server.slots import SlotState


@dataclass(frozen=True, slots=True)
class Census:
    """One namespace, in bytes."""

    namespace: Namespace
    capacity: int
    used: int
    pinned: int
    reserved: int
    """Granted: a session may write there."""
    quarantined: int


def census_of(books: Books) -> list[Census]:
    """All namespaces. O(slots), a byte each."""
    size = books.lending.segment_bytes
    counted = []
    for namespace in books.namespaces.values():
        table, slot = namespace.table, namespace.spec.layout.slot_bytes
        counted.append(
            Census(
                namespace,
                namespace.segments * size,
                len(table.index) * slot,
                table.pinned * slot,
                table.in_state(SlotState.GRANTED) * slot,
                table.in_state(SlotState.QUARANTINED) * slot,
            )
        )
    return counted
