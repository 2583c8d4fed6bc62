"""Bytes that name their owner: a torn, stale or foreign chunk is seen, and zeros never pass for content."""

import hashlib

import numpy as np

_WORD = 8


def pattern_word(key: bytes | str | int, salt: int = 0) -> int:
    """H64(key, salt): the 64-bit number that the pattern of this key starts with."""
    text = key if isinstance(key, bytes) else str(key).encode()
    digest = hashlib.blake2b(text, digest_size=_WORD, salt=salt.to_bytes(16, "little")).digest()
    return int.from_bytes(digest, "little")


def pat(key: bytes | str | int, salt: int, nbytes: int) -> bytes:
    """The bytes that belong to a key: 8-byte word i is H64(key, salt) xor i (little endian)."""
    words = np.arange(-(-nbytes // _WORD), dtype="<u8") ^ np.uint64(pattern_word(key, salt))
    return words.tobytes()[:nbytes]
