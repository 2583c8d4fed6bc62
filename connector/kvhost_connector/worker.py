"""The host worker: copies blocks of the engine's KV cache to slots of the pool and back, in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvhost_connector.config import CopyBy
from kvhost_connector.copying import Copier, choose_copier
from kvhost_connector.faults import no_faults
from kvhost_connector.jobs import Job, JobRefused, JobWorker, MappingSource
from kvhost_connector.pages import NULL_BLOCK, PageTable, Piece

# One call copies at most so many bytes (and at least one chunk): a few milliseconds, after which a job sees
# that it is told to stop.
BATCH_BYTES = 32 << 20


class HostWorker(JobWorker):
    """Copies for one rank whose KV cache the processor reaches. Other arguments are `JobWorker`'s."""

    pages: PageTable | None

    def __init__(
        self,
        pages: PageTable | None,
        source: MappingSource | None,
        *,
        copier: Copier | None = None,
        **arguments: Any,
    ) -> None:
        if copier is None and pages is not None:
            copier = choose_copier(CopyBy.AUTO)
        self._copier = copier
        super().__init__(pages, source, **arguments)
        self.copies_by = copier.name if copier is not None else ""

    def _copy(self, job: Job) -> int:
        pages, copier = self.pages, self._copier
        if pages is None or copier is None:
            raise JobRefused("this worker has no KV cache registered")
        copied = 0
        with self._mapping(job.spec) as mapping:
            largest = max((_image_bytes(pages, piece) for piece in job.pieces), default=0)
            # Every slot is looked up before the first byte moves.
            places = mapping.addresses([piece.slot for piece in job.pieces], self._rank, largest)
            for first, end in self._batches(pages, job.pieces):
                self._before_chunk(job, first)
                pages.check_in_place()
                group = pages.groups[job.pieces[first].group]
                blocks: list[int] = []
                images: list[int] = []
                for piece, place in zip(job.pieces[first:end], places[first:end], strict=True):
                    image = place + piece.position * group.block_bytes
                    for block in piece.blocks:
                        if block != NULL_BLOCK:
                            blocks.append(block)
                            images.append(image)
                        image += group.block_bytes
                if job.direction == "store":
                    mapping.prefault([piece.slot for piece in job.pieces[first:end]], self._rank)
                copier.copy(group, job.direction, blocks, images)
                copied += len(blocks) * group.block_bytes
        return copied

    def _batches(self, pages: PageTable, pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
        """(first, end) of chunks of one group that one call copies; a plane is asked before every chunk."""
        limit = BATCH_BYTES if self._plane is no_faults else 0
        first, nbytes = 0, 0
        for number, piece in enumerate(pieces):
            size = len(piece.blocks) * pages.groups[piece.group].block_bytes
            if number > first and (nbytes + size > limit or piece.group != pieces[first].group):
                yield first, number
                first, nbytes = number, 0
            nbytes += size
        if pieces:
            yield first, len(pieces)


def _image_bytes(pages: PageTable, piece: Piece) -> int:
    """Bytes of a chunk's image up to the end of the piece."""
    return (piece.position + len(piece.blocks)) * pages.groups[piece.group].block_bytes
