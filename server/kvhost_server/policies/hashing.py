"""One number for a key, the same in every run: Python's own hash of bytes is not."""

from kvhost_server.ids import ChunkKey

_MASK = (1 << 64) - 1


def fingerprint(key: ChunkKey) -> int:
    """64 bits of a key: of the block hash in front, evenly spread already, and the group index behind."""
    mixed = int.from_bytes(key[:8], "little") ^ int.from_bytes(key[-4:], "big") * 0x9E3779B97F4A7C15
    mixed = (mixed & _MASK) * 0xBF58476D1CE4E5B9 & _MASK
    return mixed ^ mixed >> 32
