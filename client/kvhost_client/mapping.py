"""A worker's view of the segments of one daemon boot: where a slot's bytes are, and may they be touched?

Engine threads call `begin`, `shard`, `addresses` and `end`: microseconds, never a wait. The link's thread
adds segments, fences, retires and unmaps; it waits for running copies, copies never wait for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvhost_client.errors import HandoverFailed, NotMapped
from kvhost_client.memory import PAGE, Region, check_sealed_file
from kvhost_proto.v1 import handover_pb2

Copy = NewType("Copy", int)
"""Names a running copy for `end`. A copy that may run has a number above 0 (true), a refusal is 0 (false)."""

REFUSED = Copy(0)

_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1
# Far above any real namespace; keeps products of peer-supplied numbers small.
_SIZE_LIMIT = 1 << 48


@dataclass(frozen=True)
class Geometry:
    """How the slots of a segment are cut. Sizes in bytes."""

    slot_bytes: int
    shard_stride: int
    shards: int

    def check(self) -> None:
        """Raises `HandoverFailed` for numbers that cannot be."""
        positive = self.shard_stride > 0 and self.shards > 0
        if not positive or not self.shards * self.shard_stride <= self.slot_bytes <= _SIZE_LIMIT:
            raise HandoverFailed(
                f"kvhostd announced slots of {self.slot_bytes} bytes with {self.shards} shards of "
                f"{self.shard_stride} bytes: they do not fit"
            )

    def shard_of(self, rank: int) -> int:
        """Index of the rank's shard; all ranks use the same where only one is stored."""
        if self.shards == 1 and rank >= 0:
            return 0
        if not 0 <= rank < self.shards:
            raise NotMapped(f"rank {rank} has no shard; ranks 0 to {self.shards - 1} have one")
        return rank


@dataclass(frozen=True)
class Segment:
    """One mapped segment."""

    segment_id: int
    region: Region
    slots: int
    generation: int
    geometry: Geometry


class Registrar(Protocol):
    """Tells a device's driver of segments: after they are mapped, before the daemon hears that they are."""

    def register(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Registers these segments, one with each step of the iterator, on the link's thread; between two
        steps the daemon's orders are heard. A segment may be unmapped meanwhile: `region.mapped` tells.

        What is registered is taken back through `region.before_unmap`. Raises `HandoverFailed` when the
        segments must not be used at all.
        """
        ...


class WorkerMapping:
    """The segments of one daemon boot, as mapped by this worker process (I6).

    A copy is `copy = mapping.begin(...)`, then, when that is true, addresses and copying, then
    `mapping.end(copy)`. Addresses are good between the two only.
    """

    def __init__(self, boot_id: int, drained: Callable[[], None]) -> None:
        """`drained` is called, by an engine thread and so quick, when copies ended that `quiet` awaits."""
        self.boot_id = boot_id
        self._drained = drained
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held for a few instructions only
        self._gone = False
        self._segments: dict[int, Segment] = {}
        self._latest = Geometry(0, 0, 0)
        self._session_below = 0
        # Grows by aborted stores that somebody may still write, which are few.
        self._fenced: set[int] = set()
        # Copies that run, by the epoch in which they began. A fence, a retirement or the end closes an epoch:
        # it waits for the copies of that epoch and of earlier ones, and later copies do not delay it.
        self._epoch = 1
        self._running: dict[int, int] = {1: 0}
        self._awaited = False

    # For engine threads.

    @property
    def gone(self) -> bool:
        """The daemon, or this mapping, is gone: every copy must be failed without copying."""
        return self._gone or os.getpid() != self._pid

    @property
    def slot_bytes(self) -> int:
        """Size of a slot of the newest segments."""
        return self._latest.slot_bytes

    @property
    def shard_stride(self) -> int:
        """Bytes of one rank's shard in a slot of the newest segments, page alignment included."""
        return self._latest.shard_stride

    @property
    def shards(self) -> int:
        """Ranks with a place of their own; 1 where all ranks hold identical bytes."""
        return self._latest.shards

    @property
    def segment_ids(self) -> frozenset[int]:
        """Segments that are mapped and not retired."""
        return frozenset(self._segments)

    @property
    def running(self) -> int:
        """Copies that have begun and not ended."""
        with self._lock:
            return sum(self._running.values())

    def begin(self, session_number: int, store_ids: Iterable[int] = ()) -> Copy:
        """May this copy run? If so it counts as running until `end`, and nothing is unmapped under it.

        False (0) when the mapping is gone or a fence forbids the session or one of the store ids: fail the
        job without touching a byte (I4, I6). Loads name no store ids.
        """
        if os.getpid() != self._pid:
            return REFUSED
        with self._lock:
            if self._gone or session_number < self._session_below:
                return REFUSED
            if self._fenced and not self._fenced.isdisjoint(store_ids):
                return REFUSED
            self._running[self._epoch] += 1
            return Copy(self._epoch)

    def end(self, copy: Copy | None = None) -> None:
        """The copy has ended: no byte is read or written by it any more, on any device.

        Name the copy where several may run at once: without a name the youngest is taken to have ended,
        and a fence may wait longer than it must.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            epoch = copy or max((epoch for epoch, count in self._running.items() if count), default=0)
            if self._running.get(epoch, 0) < 1:
                raise RuntimeError(f"end() of copy {epoch}, which does not run: each begin() has one end()")
            self._running[epoch] -= 1
            tell = self._awaited and not self._running[epoch]
        if tell:
            self._drained()

    def shard(self, slot: int, rank: int) -> tuple[int, int]:
        """Address and size in bytes of a rank's shard of this slot. Raises `NotMapped`."""
        segment = self._segments.get(slot >> _INDEX_BITS)
        index = slot & _INDEX_MASK
        if segment is None or index >= segment.slots:
            raise self._not_mapped(slot)
        geometry = segment.geometry
        offset = index * geometry.slot_bytes + geometry.shard_of(rank) * geometry.shard_stride
        return segment.region.address + offset, geometry.shard_stride

    def addresses(self, slots: Sequence[int], rank: int, nbytes: int = 0) -> list[int]:
        """Addresses of the rank's shard of every slot, in order.

        Raises `NotMapped` if one is not mapped, or a shard has fewer than `nbytes` bytes.
        """
        found: list[int] = []
        segments = self._segments
        current, count, start, slot_bytes = -1, 0, 0, 0
        for slot in slots:
            if slot >> _INDEX_BITS != current:
                segment = segments.get(slot >> _INDEX_BITS)
                if segment is None:
                    raise self._not_mapped(slot)
                geometry = segment.geometry
                if nbytes > geometry.shard_stride:
                    raise NotMapped(
                        f"a chunk of this worker needs {nbytes} bytes, its place in a slot has "
                        f"{geometry.shard_stride}"
                    )
                current, count, slot_bytes = segment.segment_id, segment.slots, geometry.slot_bytes
                start = segment.region.address + geometry.shard_of(rank) * geometry.shard_stride
            index = slot & _INDEX_MASK
            if index >= count:
                raise self._not_mapped(slot)
            found.append(start + index * slot_bytes)
        return found

    def prefault(self, slots: Iterable[int], rank: int) -> None:
        """Before a store, within `begin` and `end`: spares it the page faults of segments that are not
        prefaulted yet. One call for a shard takes a quarter of the time of a fault for each of its pages.
        """
        for slot in slots:
            segment = self._segments.get(slot >> _INDEX_BITS)
            if segment is None or segment.region.prefaulted:
                continue
            address, nbytes = self.shard(slot, rank)
            start = (address - segment.region.address) // PAGE * PAGE
            end = min(-(-(address + nbytes - segment.region.address) // PAGE) * PAGE, segment.region.nbytes)
            try:
                segment.region.populate_now(start, end - start)
            except OSError:
                # Only speed is lost; the prefaulter says why.
                segment.region.prefaulted = True

    def generation_of(self, slot: int) -> int:
        """Generation of the namespace's content for which the slot's segment was lent. Raises `NotMapped`."""
        segment = self._segments.get(slot >> _INDEX_BITS)
        if segment is None:
            raise self._not_mapped(slot)
        return segment.generation

    def _not_mapped(self, slot: int) -> NotMapped:
        segment = self._segments.get(slot >> _INDEX_BITS)
        where = f"slot {slot:#x} (segment {slot >> _INDEX_BITS}, index {slot & _INDEX_MASK})"
        if segment is None:
            known = ", ".join(map(str, sorted(self._segments))) or "none"
            return NotMapped(
                f"{where} is not mapped here; mapped segments of boot {self.boot_id:016x}: {known}"
            )
        return NotMapped(f"{where} is outside its segment, which has {segment.slots} slots")

    # For the link's thread.

    def map(
        self, segment: handover_pb2.Segment, descriptor: int, geometry: Geometry, generation: int
    ) -> Segment:
        """Checks and maps one segment. The descriptor stays the caller's. Raises `HandoverFailed`."""
        geometry.check()
        if segment.id in self._segments:
            raise HandoverFailed(f"kvhostd sent segment {segment.id} twice")
        if segment.slots < 1 or segment.slots * geometry.slot_bytes > segment.bytes or segment.bytes % PAGE:
            raise HandoverFailed(
                f"segment {segment.id} of {segment.bytes} bytes cannot hold {segment.slots} slots of "
                f"{geometry.slot_bytes} bytes in whole pages"
            )
        check_sealed_file(descriptor, segment.bytes)
        try:
            region = Region(descriptor, segment.bytes)
        except OSError as error:
            raise HandoverFailed(f"segment {segment.id} cannot be mapped: {error}") from error
        mapped = Segment(segment.id, region, segment.slots, generation, geometry)
        self._segments[segment.id] = mapped
        self._latest = geometry
        return mapped

    def fence(self, session_below: int, store_ids: Iterable[int]) -> int:
        """Refuses these copies from now on. The epoch to wait for until none of them runs any more."""
        with self._lock:
            self._session_below = max(self._session_below, session_below)
            self._fenced.update(store_ids)
            return self._close_epoch()

    def retire(self, segment_ids: Iterable[int]) -> tuple[int, list[Segment]]:
        """Gives out no address in these segments any more. The epoch to wait for; what to unmap then."""
        with self._lock:
            leaving = [self._segments.pop(number) for number in segment_ids if number in self._segments]
            return self._close_epoch(), leaving

    def die(self) -> tuple[int, list[Segment]]:
        """Refuses every copy from now on. The epoch to wait for, and what to unmap then."""
        with self._lock:
            self._gone = True
            leaving = list(self._segments.values())
            # Copies that run may still ask for addresses; `forget` follows when they have ended.
            return self._close_epoch(), leaving

    def forget(self) -> None:
        """Gives out no address any more. Only after `die` and when quiet, before the regions are unmapped."""
        self._segments = {}

    def quiet(self, epoch: int) -> bool:
        """Has every copy ended that began in this epoch or before? If not, `drained` is called in time."""
        with self._lock:
            self._awaited = False
            for number, count in list(self._running.items()):
                if number <= epoch:
                    if count:
                        self._awaited = True
                    else:
                        del self._running[number]
            return not self._awaited

    def abandon(self) -> None:
        """In a forked child, where nothing is mapped: answer "gone". Takes no lock."""
        self._gone = True
        self._segments = {}

    def _close_epoch(self) -> int:
        closed = self._epoch
        self._epoch += 1
        self._running[self._epoch] = 0
        return closed
