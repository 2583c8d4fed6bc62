"""The host worker: copies blocks of the engine's KV cache to slots of the pool and back, in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvhost_connector.config import CopyBy
from kvhost_connector.copying import Copier, choose_copier
from kvhost_connector.faults import no_faults
from kvhost_connector.jobs import Job, JobWorker, Mapping, MappingSource
from kvhost_connector.pages import PageTable
from kvhost_connector.planning import JobRefused, Plan

# One call copies at most so many bytes (and at least one chunk): some milliseconds, after which a job sees
# that it is told to stop.
BATCH_BYTES = 64 << 20


class Batch(NamedTuple):
    """Chunks `first` to `end` of a job, all of one group, and where their blocks are in its plan."""

    group: int
    first: int
    end: int
    blocks: slice


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
        with self._mapping(job.spec) as mapping:
            return sum(
                self._copy_batch(job, batch, pages, copier, mapping)
                for batch in self._batches(job.plan, pages)
            )

    def _copy_batch(self, job: Job, batch: Batch, pages: PageTable, copier: Copier, mapping: Mapping) -> int:
        self._before_chunk(job, batch.first)
        pages.check_in_place()
        plan, group = job.plan, pages.groups[batch.group]
        slots = plan.slots[batch.first : batch.end]
        needed = plan.reach(batch.blocks) * group.block_bytes
        places = np.array(mapping.addresses(slots, self._rank, needed), dtype=np.int64)
        blocks, images = plan.images(batch.blocks, batch.first, places, group.block_bytes)
        if job.direction == "store":
            mapping.prefault(slots, self._rank)
        copier.copy(group, job.direction, blocks, images)
        return len(blocks) * group.block_bytes

    def _batches(self, plan: Plan, pages: PageTable) -> Iterator[Batch]:
        """What one call copies; a plane is asked before every chunk."""
        limit = BATCH_BYTES if self._plane is no_faults else 0
        start = 0
        for number, (group, end) in enumerate(zip(pages.groups, plan.ends, strict=True)):
            blocks = slice(start, end)
            start = end
            first, last = plan.chunk_span(blocks.start, end)
            step = max(1, limit // (self._blocks_per_chunk * group.block_bytes))
            if last - first <= step:
                if last > first:
                    yield Batch(number, first, last, blocks)
                continue
            chunks = [*range(first, last, step), last]
            places = np.searchsorted(plan.chunks[blocks], chunks) + blocks.start
            for (this, following), (a, b) in zip(pairwise(chunks), pairwise(places.tolist()), strict=True):
                yield Batch(number, this, following, slice(a, b))
