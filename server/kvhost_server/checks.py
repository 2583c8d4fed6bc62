"""Checks on keys and chunks that a peer names (I13)."""

from typing import NamedTuple

from kvhost_server.errors import Code, Refused
from kvhost_server.ids import ChunkKey
from kvhost_server.namespace import Namespace


class ChunkRequest(NamedTuple):
    """A chunk that a session wants to write, or has written."""

    group: int
    key: ChunkKey
    parent: ChunkKey | None = None
    checksum: int = 0


def check_keys(namespace: Namespace, group: int, packed: bytes) -> int:
    layout = namespace.spec.layout
    if group not in layout.group_ids:
        known = ", ".join(str(g.id) for g in layout.groups)
        raise Refused(Code.INVALID_ARGUMENT, f"group {group} is not one of the namespace's: {known}")
    if len(packed) % layout.key_bytes:
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"{len(packed)} bytes of keys is not a whole number of keys of {layout.key_bytes} bytes",
        )
    return layout.key_bytes


def check_chunk(namespace: Namespace, chunk: ChunkRequest) -> None:
    size = check_keys(namespace, chunk.group, chunk.key)
    if len(chunk.key) != size or len(chunk.parent or b"") not in (0, size):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"key of {len(chunk.key)} and parent of {len(chunk.parent or b'')} bytes; "
            f"the namespace's keys have {size}",
        )


def parent_of(namespace: Namespace, chunk: ChunkRequest) -> ChunkKey | None:
    parent = chunk.parent if namespace.prefix_keys(chunk.group) else None
    return parent if parent != chunk.key else None
