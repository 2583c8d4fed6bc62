"""One text for one value: what differs must differ in text, what is equal must not."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch

from kvhost_connector.canonical import canonical


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    RED = 1


@dataclass
class Pair:
    left: int
    right: Any = None


@dataclass
class OtherPair:
    left: int
    right: Any = None


def test_kinds_of_equal_looking_values_differ() -> None:
    values = [1, "1", True, 1.0, [1], Colour.RED, Level.RED, None, "None", Pair(1), OtherPair(1), {"left": 1}]
    texts = [canonical(value) for value in values]
    assert len(set(texts)) == len(texts)


def test_order_of_keys_and_sets_does_not_matter() -> None:
    assert canonical({"b": 1, "a": {3, 1, 2}}) == canonical({"a": {2, 3, 1}, "b": 1})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.bfloat16, '"torch.bfloat16"'),
        (Fraction(1, 4), '"1/4"'),
        ((1, 2), "[1,2]"),
        (Pair, '"tests.connector.test_canonical.Pair"'),
        ("ä", '"\\u00e4"'),
    ],
)
def test_special_values(value: Any, text: str) -> None:
    assert canonical(value) == text


def test_nested_dataclasses_show_all_fields() -> None:
    assert canonical(Pair(1, Pair(2))) == (
        '{"left":1,"right":{"left":2,"right":null,"type":"Pair"},"type":"Pair"}'
    )
