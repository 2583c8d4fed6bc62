"""One text for one value: how parts of a namespace are written, so that equal means equal."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any


def canonical(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, one form for each value, so that 1, "1" and true differ."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(entry) for entry in value), key=canonical)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return str(value)  # torch.dtype and its like
