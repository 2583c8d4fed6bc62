"""One number for a key, the same in every run: Python's own hash of bytes is not."""

from zlib import crc32

from kvhost_server.ids import ChunkKey


def fingerprint(key: ChunkKey) -> int:
    """64 bits of a key: a checksum of all of it, and above that the first bytes of its block hash."""
    return crc32(key) | int.from_bytes(key[:4], "big") << 32
