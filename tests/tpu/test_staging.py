"""The budget of device memory, and how a number of blocks is cut into batches."""

from __future__ import annotations

import pytest

from kvhost_connector.tpu.staging import DEFAULT_BUCKETS, Staging, first_batch, usable_buckets


def test_a_budget_gives_what_it_has_and_no_more() -> None:
    staging = Staging(100)
    assert staging.free == 100
    assert staging.take(60)
    assert not staging.take(41), "all or nothing"
    assert staging.free == 40
    assert staging.take(40)
    assert (staging.free, staging.peak) == (0, 100)
    staging.give(60)
    assert staging.free == 60
    staging.give(40)
    assert staging.free == staging.total


def test_loads_and_saves_share_it() -> None:
    staging = Staging(10)
    assert staging.take(7)
    assert staging.take(3)
    assert not staging.take(1)
    staging.give(3)
    assert staging.take(2)
    assert staging.free == 1


def test_giving_back_too_much_does_not_make_it_grow() -> None:
    staging = Staging(10)
    assert staging.take(4)
    with pytest.raises(ValueError, match="5 bytes of staging memory are given back, 4 were taken"):
        staging.give(5)
    assert (staging.free, staging.total) == (6, 10)


@pytest.mark.parametrize(
    ("blocks", "limit", "batches"),
    [
        (1, 100, [1]),
        (3, 100, [2, 1]),
        (7, 100, [8]),
        (15, 100, [16]),
        (33, 100, [32, 1]),
        (48, 100, [32, 16]),
        (63, 100, [64]),
        (65, 100, [64, 1]),
        (500, 100, [64] * 8),
        (7, 5, [4, 2, 1]),
        (5, 0, []),
    ],
)
def test_blocks_are_cut_into_the_sizes_of_programs(blocks: int, limit: int, batches: list[int]) -> None:
    found = []
    while blocks > 0 and (size := first_batch(blocks, DEFAULT_BUCKETS, limit)):
        found.append(size)
        blocks -= size
    assert found == batches


def test_a_small_budget_allows_small_batches_only() -> None:
    assert usable_buckets((1, 2, 4, 8), 100, 450) == (1, 2, 4)
    assert usable_buckets((4, 8), 100, 100) == (1,)
    with pytest.raises(
        ValueError, match="staging_bytes must hold one block, 100 bytes on each device, found 99"
    ):
        usable_buckets((1, 2), 100, 99)
