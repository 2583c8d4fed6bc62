"""Sizes as people write them: `8GiB`, `64MiB`, `4096`."""

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "ki": 1 << 10,
    "mib": 1 << 20,
    "mi": 1 << 20,
    "gib": 1 << 30,
    "gi": 1 << 30,
    "tib": 1 << 40,
    "ti": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)

MAX_SIZE = 1 << 50


def parse_size(text: str) -> int:
    """Bytes of a size with a unit; a bare number means bytes.

    Raises:
        ValueError: with a sentence, when the text is no size, or none between 1 byte and 1 PiB.
    """
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise ValueError(
            f"{text!r} is not a size; write a number and B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, as in 8GiB"
        )
    whole, _, fraction = match.group(1).partition(".")
    size = int(whole[:20]) * _UNITS[unit]
    if fraction:
        size += int(fraction[:12]) * _UNITS[unit] // 10 ** len(fraction[:12])
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"{text!r} is outside what a size may be: 1 byte to 1024 TiB")
    return size


def format_size(size: int) -> str:
    """The shortest exact form if there is one (`8GiB`), else a rounded one (`1.3 GiB`)."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= unit:
            return f"{size // unit}{name}" if size % unit == 0 else f"{size / unit:.1f} {name}"
    return f"{size} B"


def exact_size(size: int) -> str:
    """A form that `parse_size` reads back to the same number."""
    text = format_size(size)
    return text if " " not in text else str(size)
