"""Touches a worker's shards ahead of the first copy, in the background.

The pages exist already (the daemon populated them); what is made here is this process's way to them. Without
it the first write through a fresh mapping is several times slower. A store that comes before does the same
for its own slots (`WorkerMapping.prefault`).
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections.abc import Iterator

from kvhost_client.mapping import Segment
from kvhost_client.memory import PAGE

logger = logging.getLogger(__name__)

# The kernel holds the process's address space for readers during a piece: a thread of the engine that maps
# memory waits that long. 16 MiB are a few milliseconds.
PIECE_BYTES = 16 << 20


def pieces(segment: Segment, rank: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of what this rank will write, page-aligned, in pieces of at most `PIECE_BYTES`."""
    geometry = segment.geometry
    if geometry.shards == 1:
        spans = iter([(0, segment.slots * geometry.slot_bytes)])
    else:
        first = geometry.shard_of(rank) * geometry.shard_stride
        spans = ((first + n * geometry.slot_bytes, geometry.shard_stride) for n in range(segment.slots))
    for offset, nbytes in spans:
        start = offset - offset % PAGE
        end = min(-(-(offset + nbytes) // PAGE) * PAGE, segment.region.nbytes)
        for piece in range(start, end, PIECE_BYTES):
            yield piece, min(PIECE_BYTES, end - piece)


class Prefaulter:
    """One background thread; it starts with the first segment and ends with `close`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._queue: queue.Queue[Segment | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes made present so far."""
        return self._bytes

    @property
    def idle(self) -> bool:
        """Nothing is left to do."""
        return self._queue.unfinished_tasks == 0

    def add(self, segment: Segment) -> None:
        """Prefaults the segment after those already waiting. Returns at once. From one thread only."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvhost-prefault", daemon=True)
            self._thread.start()
        self._queue.put(segment)

    def close(self) -> None:
        """Stops after the piece that runs. Regions stay what they are."""
        self._stopped = True
        self._queue.put(None)

    def _run(self) -> None:
        while (segment := self._queue.get()) is not None:
            try:
                self._populate(segment)
            except OSError as error:
                # Only speed is lost. A kernel before 5.14 (EINVAL) says so for every piece: once is enough.
                self._stopped = error.errno == errno.EINVAL
                logger.warning(
                    "prefaulting segment %d failed (%s): first copies to it are slower",
                    segment.segment_id,
                    error,
                )
            self._queue.task_done()

    def _populate(self, segment: Segment) -> None:
        for offset, nbytes in pieces(segment, self._rank):
            if self._stopped or not segment.region.populate(offset, nbytes):
                return
            self._bytes += nbytes
        segment.region.prefaulted = True
