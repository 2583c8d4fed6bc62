"""The host worker: copies blocks of the engine's KV cache to slots of the pool and back, in host memory."""

from __future__ import annotations

from typing import Any

from kvhost_connector.faults import Direction
from kvhost_connector.jobs import Job, JobRefused, JobWorker, Mapping, MappingSource
from kvhost_connector.pages import NULL_BLOCK, PageTable, Piece, bytes_at


class HostWorker(JobWorker):
    """Copies for one rank whose KV cache the processor reaches. Arguments as `JobWorker`'s."""

    pages: PageTable | None

    def __init__(self, pages: PageTable | None, source: MappingSource | None, **arguments: Any) -> None:
        super().__init__(pages, source, **arguments)

    def _copy(self, job: Job) -> int:
        pages = self.pages
        if pages is None:
            raise JobRefused("this worker has no KV cache registered")
        copied = 0
        with self._mapping(job.spec) as mapping:
            for number, piece in enumerate(job.pieces):
                self._before_chunk(job, number)
                pages.check_in_place()
                copied += self._copy_piece(pages, mapping, job.direction, piece)
        return copied

    def _copy_piece(self, pages: PageTable, mapping: Mapping, direction: Direction, piece: Piece) -> int:
        group = pages.groups[piece.group]
        address, size = mapping.shard(piece.slot, self._rank)
        needed = (piece.position + len(piece.blocks)) * group.block_bytes
        if needed > size:
            raise JobRefused(f"a chunk of this worker needs {needed} bytes, its place in a slot has {size}")
        image = bytes_at(address, size)
        copied = 0
        for index, block in enumerate(piece.blocks, piece.position):
            if block == NULL_BLOCK:
                continue
            part = image[index * group.block_bytes : (index + 1) * group.block_bytes]
            if direction == "store":
                group.gather(block, part)
            else:
                group.scatter(block, part)
            copied += group.block_bytes
        return copied
