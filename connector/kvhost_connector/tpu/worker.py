"""The JAX worker: takes vLLM's jobs and has the carrier carry them.

`pump` is called on the engine's thread wherever the connector is called in a step: before the forward pass,
so that saves are started before blocks can be used anew, and after it. What waits for a transfer waits on
another thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvhost_connector.jobs import FLUSH_DEADLINE_S, Job, JobBook, JobState, MappingSource
from kvhost_connector.pages import NULL_BLOCK
from kvhost_connector.tpu.cache import CacheLayout
from kvhost_connector.tpu.carrier import Carrier, Errand, Move, Place

# Enough for a helper thread to say that it is done; `pump` must run meanwhile.
_POLL_S = 0.005


class JaxWorker(JobBook):
    """Carries for the one worker process of an engine, whatever number of devices it drives."""

    def __init__(
        self,
        pages: CacheLayout,
        source: MappingSource,
        carrier: Carrier,
        *,
        flush_deadline_s: float = FLUSH_DEADLINE_S,
        **arguments: Any,
    ) -> None:
        """Arguments as `JobBook`'s. The carrier ends with the worker."""
        super().__init__(pages, source, **arguments)
        self.layout = pages
        self._carrier = carrier
        self._flush_deadline_s = flush_deadline_s
        self._errands: dict[int, Errand] = {}
        self._closing = False

    # The engine's thread.

    def pump(self) -> None:
        """Starts what can be started now."""
        self._carrier.pump()

    def wait(self, job_ids: set[int]) -> None:
        """Returns when the blocks of these jobs may be used anew.

        A save is out of its blocks when its programs are started: where device memory for that is short,
        they wait for it until the deadline, and are given up then. A load that has begun is awaited, another
        is given up at the deadline (contract 21).
        """
        until = time.monotonic() + self._flush_deadline_s
        while True:
            self._carrier.pump()
            late = time.monotonic() >= until
            with self._news:
                errands = [self._errands[job_id] for job_id in job_ids if job_id in self._errands]
            pending = [errand for errand in errands if not errand.over and self._in_blocks(errand)]
            if not pending:
                return
            if late:
                for errand in pending:
                    self._carrier.withdraw(errand, "it had not begun when its blocks were needed")
            self._carrier.rest(_POLL_S)

    @staticmethod
    def _in_blocks(errand: Errand) -> bool:
        """Whether its blocks may still be read or written by a program that is not started yet, or written
        by one that runs."""
        return errand.waiting > 0 or (errand.kind == "load" and errand.out > 0)

    def get_finished(self) -> list[Any]:
        self.pump()
        return super().get_finished()

    def shutdown(self) -> None:
        """Gives up what waits, lets what runs end, and takes leave of the daemon."""
        with self._news:
            self._closed = True
            errands = list(self._errands.values())
        if os.getpid() == self._pid and not self._closing:
            self._closing = True
            for errand in errands:
                self._carrier.withdraw(errand, "the engine ends")
            until = time.monotonic() + 5
            while not self._carrier.idle and time.monotonic() < until:
                self._carrier.pump()
                self._carrier.rest(_POLL_S)
            self._carrier.close()
        if self._source is not None:
            self._source.close(timeout=2.0)

    # The life of a job.

    def _accept(self, job: Job) -> None:
        moves = [
            Move(piece.group, block, piece.slot, position, chunk)
            for chunk, piece in enumerate(job.pieces)
            for position, block in enumerate(piece.blocks, piece.position)
            if block != NULL_BLOCK
        ]

        @contextmanager
        def slots() -> Iterator[Place]:
            with self._mapping(job.spec) as mapping:
                yield lambda slot: mapping.shard(slot, self._rank)

        def done(copied: int | None, why: str) -> None:
            with self._news:
                self._errands.pop(job.job_id, None)
                if job.state is not JobState.DONE:
                    self._finish(job, copied, why)

        errand = Errand(job.direction, moves, slots, done, lambda chunk: self._before_chunk(job, chunk))
        with self._news:
            self._jobs[job.job_id] = job
            job.state = JobState.RUNNING
            self._errands[job.job_id] = errand
        self._carrier.add(errand)
