"""Segments as a worker gets them: from the handover socket, mapped, registered with the real driver."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvhost_client.mapping import WorkerMapping
from kvhost_client.types import Access
from kvhost_client.worker import WorkerLink
from kvhost_connector.config import Pin
from kvhost_connector.device.driver import CudaDriver
from kvhost_connector.device.pinning import Pinning
from tests.client.fakes import FakeHandover, FakePeer

BOOT = 7


class Pool:
    """A link whose daemon is the test."""

    def __init__(self, handover: FakeHandover, policy: Pin, segment_bytes: int, slot_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.slot_bytes = slot_bytes
        self.slots = segment_bytes // slot_bytes
        self.driver = CudaDriver(0)
        self.pinning = Pinning(policy)
        self.pinning.use(self.driver)
        self._handover = handover
        self.link = WorkerLink(
            handover.socket, secrets.token_bytes(16), 0, Access.DEVICE_DMA, registrar=self.pinning
        )
        self.link.start()
        self.peer: FakePeer = handover.accept()
        self.peer.expect("hello")
        self.peer.welcome(BOOT)
        self.seconds = 0.0

    def grow(self, *numbers: int) -> None:
        """Segments are handed over; returns when they are reported."""
        self.peer.socket.settimeout(300)
        began = time.perf_counter()
        files = self.peer.segments(
            *numbers,
            boot_id=BOOT,
            nbytes=self.segment_bytes,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            shards=1,
        )
        self.peer.expect("mapped")
        self.seconds = time.perf_counter() - began
        for file in files:
            os.close(file)

    @property
    def mapping(self) -> WorkerMapping:
        found = self.link.mapping
        assert found is not None, self.link.problem
        return found

    def slot(self, number: int) -> int:
        """Numbered over segments 1, 2, ..."""
        return (number // self.slots + 1) << 32 | number % self.slots

    def shard(self, slot: int) -> tuple[int, int]:
        return self.mapping.shard(slot, 0)

    def host(self, number: int) -> Any:
        """A slot as a torch tensor."""
        import ctypes

        import torch

        address, nbytes = self.shard(self.slot(number))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)


@contextmanager
def pool(
    policy: Pin = Pin.REQUIRED, segment_bytes: int = 64 << 20, slot_bytes: int = 1 << 20
) -> Iterator[Pool]:
    folder = Path(tempfile.mkdtemp(prefix="kvhg-"))
    with FakeHandover(folder) as handover:
        made = Pool(handover, policy, segment_bytes, slot_bytes)
        try:
            yield made
        finally:
            handover.close()
            assert made.link.close(60)
    shutil.rmtree(folder)
