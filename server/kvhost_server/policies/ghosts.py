"""What is remembered of chunks that are gone: how often each had been used, in two bytes."""

from array import array

_COUNT_BITS = 2
_TAG_BITS = 14
_TAG_MASK = (1 << _TAG_BITS) - 1
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_CELLS_PER_SLOT = 4
_FEWEST = 1 << 15


class Ghosts:
    """Use counts (0 to 3) of keys that left, in a fixed table: one cell a hash, the newest key has it.

    A key is mistaken for another one with a chance of 1 in 16384, which costs a
    chunk with the wrong use count. The table has 4 cells a slot, at least 32768.
    """

    def __init__(self) -> None:
        self._cells = array("H")

    def remember(self, fingerprint: int, count: int, slots: int) -> None:
        """Notes a key's use count; `slots` is how large the cache is now."""
        if len(self._cells) < max(_FEWEST, _CELLS_PER_SLOT * slots):
            self._grow(max(_FEWEST, _CELLS_PER_SLOT * slots))
        place = fingerprint & len(self._cells) - 1
        self._cells[place] = _tag(fingerprint) << _COUNT_BITS | count

    def recall(self, fingerprint: int) -> int | None:
        """The use count of a key that left, or None when it is not known (any more)."""
        if not self._cells:
            return None
        cell = self._cells[fingerprint & len(self._cells) - 1]
        return cell & _COUNT_MASK if cell >> _COUNT_BITS == _tag(fingerprint) else None

    def _grow(self, wanted: int) -> None:
        # The place in a table of twice the size is one of two: a copy stands in both.
        if not self._cells:
            self._cells = array("H", bytes(2 * _FEWEST))
        while len(self._cells) < wanted:
            self._cells += self._cells


def _tag(fingerprint: int) -> int:
    return (fingerprint >> 48 & _TAG_MASK) or 1  # 0 is an empty cell
