"""A device worker over a patterned cache on the fake device, and segments as the daemon hands them over."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvhost_client.mapping import Geometry, Segment, WorkerMapping
from kvhost_connector.config import Pin
from kvhost_connector.device.pages import DevicePages
from kvhost_connector.device.pinning import Pinning
from kvhost_connector.device.worker import DeviceWorker
from kvhost_connector.metadata import Epoch, SlotSpec, TransferId
from kvhost_connector.pages import bytes_at
from kvhost_proto.v1 import handover_pb2
from tests.client.fakes import sealed_file
from tests.connector.caches import Cache
from tests.connector.device import FakeDevice, FakeDriver, on_device, on_fake_device
from tests.support.waiting import wait_for

BOOT, SESSION = 77, 5
SLOT_BYTES = 4096
FILL = 0xEE


class Pool:
    """Mapped segments of a few slots, of one boot. In the place of a link as well."""

    def __init__(
        self,
        segments: int = 2,
        slots: int = 8,
        shards: int = 1,
        boot_id: int = BOOT,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.mapping: Any = WorkerMapping(boot_id, lambda: None)
        self.segments: list[Segment] = []
        self.shards = shards
        for _ in range(segments):
            self.grow()

    def grow(self) -> Segment:
        size = self.slot_bytes * self.shards
        nbytes = self.slots * size
        file = sealed_file(nbytes)
        message = handover_pb2.Segment(id=len(self.segments) + 1, bytes=nbytes, slots=self.slots)
        segment = self.mapping.map(message, file, Geometry(size, self.slot_bytes, self.shards), 1)
        os.close(file)
        bytes_at(segment.region.address, nbytes)[:] = FILL
        self.segments.append(segment)
        return segment  # type: ignore[no-any-return]

    def slot(self, number: int) -> int:
        """Numbered over all segments."""
        return (number // self.slots + 1) << 32 | number % self.slots

    def bytes(self, number: int, rank: int = 0) -> Any:
        return bytes_at(*self.mapping.shard(self.slot(number), rank))

    def spans(self) -> list[tuple[int, int]]:
        return [
            (segment.region.address, segment.region.address + segment.region.nbytes)
            for segment in self.segments
            if segment.region.mapped
        ]

    def unmap(self) -> None:
        for segment in self.segments:
            segment.region.unmap()

    def close(self, timeout: float) -> None:
        self.closed = True


class Bench:
    """One rank."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        cache: Cache,
        *,
        eager: bool = True,
        kernels: bool = False,
        pin: Pin = Pin.OFF,
        pool: Pool | None = None,
        **arguments: Any,
    ) -> None:
        self.cache = cache
        cache.fill()
        self.device = FakeDevice(eager=eager)
        for tensor in cache.tensors:
            self.device.own(tensor)
        on_fake_device(monkeypatch, self.device, kernels=kernels)
        self.pool = pool or Pool()
        self.device.mapped = self.pool.spans
        self.driver = FakeDriver(self.device)
        self.pinning = Pinning(pin)
        self.pinning.use(self.driver)
        self.pages = DevicePages.of(on_device(cache.canonical))
        self.worker = DeviceWorker(
            self.pages, self.pool, driver=self.driver, pinning=self.pinning, **arguments
        )
        self.done: dict[int, Any] = {}
        self.failed: set[int] = set()

    def spec(self, number: int, *slots: int, epoch: int = 0, **more: Any) -> SlotSpec:
        fields = {"session": SESSION, "boot_id": BOOT, "generation": 1, **more}
        return SlotSpec(
            TransferId(number), Epoch(epoch), slots=tuple(self.pool.slot(slot) for slot in slots), **fields
        )

    def store(self, job: int, blocks: Sequence[int], *slots: int, **more: Any) -> None:
        spec = self.spec(job, *slots, store_ids=tuple(100 + slot for slot in slots), **more)
        assert self.worker.submit_store(job, blocks_of(blocks), spec)

    def load(self, job: int, blocks: Sequence[int], *slots: int, **more: Any) -> None:
        assert self.worker.submit_load(job, self.spec(job, *slots, **more), blocks_of(blocks))

    def register(self, segment: Segment) -> None:
        """As the link does it, on a thread that is not the engine's."""
        thread = threading.Thread(target=lambda: list(self.pinning.register([segment])))
        thread.start()
        thread.join()

    def collect(self) -> None:
        for result in self.worker.get_finished():
            assert result.job_id not in self.done, f"job {result.job_id} was reported twice"
            assert result.success, "native asserts success"
            self.done[result.job_id] = result
        self.failed |= self.worker.take_failed()

    def settle(self, *jobs: int) -> None:
        """Waits until these jobs are reported."""

        def all_there() -> bool:
            self.collect()
            return set(jobs) <= set(self.done)

        wait_for(all_there, 5.0, f"jobs {jobs} to end")

    def slot(self, number: int, size: int | None = None, rank: int = 0) -> bytes:
        return bytes(self.pool.bytes(number, rank)[:size])

    def untouched(self, number: int) -> bool:
        return bool(np.all(self.pool.bytes(number) == FILL))

    def close(self) -> None:
        if self.device.sticky is None:
            self.device.eager = True
            self.device.run()
        self.worker.shutdown()
        self.pool.unmap()


def blocks_of(
    blocks: Sequence[int], sizes: Sequence[int] | None = None, first: Sequence[int] | None = None
) -> GPULoadStoreSpec:
    """The device side of a job."""
    sizes = sizes or [len(blocks)]
    return GPULoadStoreSpec(list(blocks), group_sizes=sizes, block_indices=first or [0] * len(sizes))
