"""Planning: what arithmetic on arrays says is what a loop over blocks would say, for every shape of a job."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvhost_connector.pages import Piece
from kvhost_connector.planning import JobRefused, plan_job


def device(blocks: list[int], sizes: list[int], first: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=first)


def by_hand(blocks: list[int], sizes: list[int], first: list[int], per_chunk: int) -> list[Piece]:
    """Block after block; slots are numbered 100, 101, ..."""
    pieces: list[Piece] = []
    cursor = 0
    for group, size in enumerate(sizes):
        before: int | None = None
        for index in range(first[group], first[group] + size):
            if index // per_chunk != before:
                before = index // per_chunk
                pieces.append(Piece(100 + len(pieces), group, index % per_chunk, ()))
            pieces[-1] = pieces[-1]._replace(blocks=(*pieces[-1].blocks, blocks[cursor]))
            cursor += 1
    return pieces


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=4), st.integers(1, 5))
def test_a_load_is_planned_as_block_after_block_would_be(
    groups: list[tuple[int, int]], per_chunk: int
) -> None:
    sizes, first = [size for size, _ in groups], [start for _, start in groups]
    blocks = [7 * n % 50 for n in range(sum(sizes))]
    wanted = by_hand(blocks, sizes, first, per_chunk)
    slots = tuple(range(100, 100 + len(wanted)))
    plan = plan_job(device(blocks, sizes, first), slots, per_chunk, "load")
    assert list(plan.pieces) == wanted
    assert plan.blocks.tolist() == blocks
    for block, chunk, row in zip(plan.blocks, plan.chunks, plan.rows, strict=True):
        piece = wanted[chunk]
        assert block == piece.blocks[row - piece.position]
    for wrong in (slots[:-1], (*slots, 1)):
        if wrong != slots:
            with pytest.raises(JobRefused, match=f"names {len(wrong)} slots, .* need {len(slots)}"):
                plan_job(device(blocks, sizes, first), wrong, per_chunk, "load")


def test_a_store_covers_whole_chunks() -> None:
    plan = plan_job(device([5, 6, 7, 8], [4], [2]), (9, 4), 2, "store")
    assert plan.pieces == (Piece(9, 0, 0, (5, 6)), Piece(4, 0, 0, (7, 8)))
    for blocks, first in (([1, 2, 3], 0), ([1, 2], 1)):
        with pytest.raises(JobRefused, match="not a whole number of chunks of 2 blocks"):
            plan_job(device(blocks, [len(blocks)], [first]), (0, 1), 2, "store")
