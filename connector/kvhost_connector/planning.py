"""Which block of a job goes where in which chunk: arithmetic on arrays, whatever device copies.

A job names blocks, group after group, and slots, one for each chunk that these blocks are in. A load may
begin in the middle of a chunk; a store covers whole chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvhost_connector.faults import Direction
from kvhost_connector.pages import NULL_BLOCK, Numbers, Piece

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec


class JobRefused(Exception):
    """The job must not be copied; the message says why."""


@dataclass(frozen=True)
class Plan:
    """Block `blocks[n]` is the `rows[n]`-th of the chunk in slot `slots[chunks[n]]`, for every n.

    `ends[g]` is where the blocks of group g end. `chunks` ascends in steps of 0 or 1.
    """

    slots: tuple[int, ...]
    blocks: Numbers
    chunks: Numbers
    rows: Numbers
    ends: tuple[int, ...]

    def chunk_span(self, start: int, end: int) -> tuple[int, int]:
        """First chunk of these blocks, and the one after their last; equal when there are none."""
        if start == end:
            return 0, 0
        return int(self.chunks[start]), int(self.chunks[end - 1]) + 1

    def reach(self, blocks: slice) -> int:
        """How many blocks a chunk of these must hold at least."""
        return int(self.rows[blocks].max()) + 1

    def images(
        self, blocks: slice, first: int, chunks_at: Numbers, block_bytes: int
    ) -> tuple[Numbers, Numbers]:
        """Which of these blocks are copied, null blocks left out, and the address of each one's image, when
        chunk `first + n` lies at `chunks_at[n]`."""
        found = self.blocks[blocks]
        at = chunks_at[self.chunks[blocks] - first] + self.rows[blocks] * block_bytes
        there = found != NULL_BLOCK
        return (found, at) if there.all() else (found[there], at[there])

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The same, an object for each chunk."""
        found: list[Piece] = []
        start = 0
        for group, end in enumerate(self.ends):
            first, last = self.chunk_span(start, end)
            cuts = np.searchsorted(self.chunks[start:end], np.arange(first, last + 1)) + start
            for chunk, (a, b) in enumerate(pairwise(cuts), first):
                blocks = tuple(self.blocks[a:b].tolist())
                found.append(Piece(self.slots[chunk], group, int(self.rows[a]), blocks))
            start = end
        return tuple(found)


def plan_job(
    device: GPULoadStoreSpec, slots: Sequence[int], blocks_per_chunk: int, direction: Direction
) -> Plan:
    """Pairs the blocks of a job with its slots. Raises `JobRefused` when they do not fit together."""
    chunks: list[Numbers] = []
    rows: list[Numbers] = []
    ends: list[int] = []
    used = end = 0
    for group, (size, first) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
        if direction == "store" and (first % blocks_per_chunk or size % blocks_per_chunk):
            raise JobRefused(
                f"a store of {size} blocks from block {first} on in group {group} is not a whole number of "
                f"chunks of {blocks_per_chunk} blocks"
            )
        row = first % blocks_per_chunk
        numbers, places = np.divmod(np.arange(row, row + size, dtype=np.int64), blocks_per_chunk)
        chunks.append(numbers + used)
        rows.append(places)
        used += -(-(row + size) // blocks_per_chunk) if size else 0
        end += size
        ends.append(end)
    blocks = np.asarray(device.block_ids, dtype=np.int64)
    if used != len(slots) or end != len(blocks):
        raise JobRefused(f"the job names {len(slots)} slots, its {len(blocks)} blocks need {used}")
    empty = np.zeros(0, dtype=np.int64)
    return Plan(
        tuple(slots), blocks, np.concatenate([empty, *chunks]), np.concatenate([empty, *rows]), tuple(ends)
    )
