"""Segments and the driver, through the real link: one by one, off the engine's thread, rolled back whole.

The driver is a fake that checks that what it is given is there, and on which thread it is asked.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost_client.types import Access
from kvhost_client.worker import WorkerLink
from kvhost_connector.config import ConfigError, Pin
from kvhost_connector.device.driver import DriverError, can_register
from kvhost_connector.device.pinning import Pinning, PinState
from kvhost_proto.v1 import handover_pb2
from tests.client.fakes import MIB, FakeHandover, FakePeer
from tests.connector.device import FakeDevice, FakeDriver
from tests.support import map_count, wait_for

MAPS = "memfd:kvhost-test"


class Attached:
    """A link whose segments are registered with the fake driver."""

    def __init__(self, handover: FakeHandover, policy: Pin) -> None:
        self.handover = handover
        self.driver = FakeDriver(FakeDevice())
        self.pinning = Pinning(policy)
        self.pinning.use(self.driver)
        self.link = WorkerLink(
            handover.socket, secrets.token_bytes(16), 0, Access.DEVICE_DMA, registrar=self.pinning
        )
        self.link.start()

    def offer(self, *segments: int) -> FakePeer:
        peer = self.handover.accept()
        hello = peer.expect("hello").hello
        assert hello.access == handover_pb2.ACCESS_DEVICE_DMA
        peer.welcome()
        self.send(peer, *segments)
        return peer

    def send(self, peer: FakePeer, *segments: int) -> None:
        for file in peer.segments(*segments):
            os.close(file)

    def span(self, segment: int) -> tuple[int, int]:
        mapping = wait_for(lambda: self.link.mapping)
        region = mapping._segments[segment].region
        return region.address, region.nbytes

    @property
    def registered(self) -> int:
        return len(self.driver.device.registered)

    def close(self) -> None:
        self.handover.close()
        self.driver.keep = set()
        assert self.link.close()
        assert self.registered == 0
        assert map_count(os.getpid(), MAPS) == 0


@pytest.fixture
def handover() -> Iterator[FakeHandover]:
    folder = Path(tempfile.mkdtemp(prefix="kvhp-"))
    with FakeHandover(folder) as server:
        yield server
    shutil.rmtree(folder)


@pytest.fixture
def attached(handover: FakeHandover) -> Iterator[Attached]:
    made = Attached(handover, Pin.AUTO)
    yield made
    made.close()


@pytest.fixture
def strict(handover: FakeHandover) -> Iterator[Attached]:
    made = Attached(handover, Pin.REQUIRED)
    yield made
    made.close()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("vllm")
    before, logger.propagate = logger.propagate, True
    caplog.set_level(logging.INFO, "vllm")
    yield caplog
    logger.propagate = before


def reported(peer: FakePeer) -> list[int]:
    return list(peer.expect("mapped").mapped.segment_ids)


def test_segments_are_registered_when_they_are_reported(attached: Attached) -> None:
    assert attached.pinning.state is PinState.WAITING
    peer = attached.offer(3, 4, 5)
    assert reported(peer) == [3, 4, 5]
    assert attached.registered == 3
    assert attached.pinning.state is PinState.PINNED
    assert attached.pinning.nbytes == 3 * MIB
    assert not attached.pinning.problem
    address, nbytes = attached.span(4)
    assert attached.pinning.covers([(address, nbytes), (address + 4096, 1)])
    assert not attached.pinning.covers([(address, nbytes + 1)])
    lowest = min(attached.span(segment)[0] for segment in (3, 4, 5))
    assert not attached.pinning.covers([(lowest - 1, 1)])
    assert not attached.pinning.covers([(1 << 46, 1)])
    assert attached.pinning.covers([])


def test_growth_is_registered_and_what_retires_is_released(attached: Attached) -> None:
    peer = attached.offer(3)
    assert reported(peer) == [3]
    attached.send(peer, 4)
    assert reported(peer) == [4]
    assert attached.registered == 2
    address, nbytes = attached.span(3)
    peer.retire(3)
    peer.expect("retired")
    assert attached.driver.calls[-1] == ("unregister", address)
    assert not attached.pinning.covers([(address, nbytes)])


def test_a_refusal_rolls_its_segments_back_and_they_are_used_unpinned(
    attached: Attached, lines: pytest.LogCaptureFixture
) -> None:
    attached.driver.allowed = 3
    peer = attached.offer(3)
    assert reported(peer) == [3]
    attached.send(peer, 4, 5, 6, 7)
    # Mapped and reported, none of them registered; the first stays as it was.
    assert reported(peer) == [4, 5, 6, 7]
    assert attached.registered == 1
    assert [call for call, _ in attached.driver.calls] == [
        *("register", "register", "register", "unregister", "unregister")
    ]
    assert attached.pinning.covers([attached.span(3)])
    assert not attached.pinning.covers([attached.span(4)])
    assert attached.pinning.state is PinState.UNPINNED
    # A limit that was met is not tried again.
    attached.send(peer, 8)
    assert reported(peer) == [8]
    assert len(attached.driver.calls) == 5
    said = [record.getMessage() for record in lines.records if record.levelno >= logging.WARNING]
    assert [line for line in said if line.startswith("kvhost: segment")] == [
        "kvhost: segment 6 (of 4) was not registered with the device's driver: fakeHostRegister of 1048576 "
        "bytes failed with code 2; transfers of these and later segments run unpinned, slower"
    ]


def test_where_pinned_memory_is_required_a_refusal_leaves_the_cache(
    strict: Attached, lines: pytest.LogCaptureFixture
) -> None:
    strict.driver.allowed = 1
    peer = strict.offer(3, 4)
    peer.expect("bye")
    wait_for(lambda: strict.link.problem)
    assert "pinned memory is required, and the driver refused it" in strict.link.problem
    assert strict.pinning.problem == "fakeHostRegister of 1048576 bytes failed with code 2"
    assert strict.link.mapping is None
    assert "runs without the cache, because pinned memory is required" in lines.text


def test_without_pinning_the_driver_is_not_asked(handover: FakeHandover) -> None:
    attached = Attached(handover, Pin.OFF)
    peer = attached.offer(3)
    assert reported(peer) == [3]
    assert attached.driver.calls == []
    assert attached.pinning.state is PinState.OFF
    assert not attached.pinning.covers([attached.span(3)])
    attached.close()


def test_a_driver_that_raises_something_else_has_not_registered(attached: Attached) -> None:
    def enter() -> None:
        raise RuntimeError("no device is there")

    attached.driver.enter = enter  # type: ignore[method-assign]
    peer = attached.offer(3)
    assert reported(peer) == [3]
    assert attached.pinning.state is PinState.UNPINNED
    assert attached.registered == 0


def test_memory_that_the_driver_keeps_stays_mapped(attached: Attached) -> None:
    peer = attached.offer(3, 4)
    assert reported(peer) == [3, 4]
    mapping = attached.link.mapping
    assert mapping is not None
    region = mapping._segments[3].region
    attached.driver.keep = {region.address}
    peer.retire(3)
    peer.expect_end()
    assert region.mapped
    assert attached.pinning.covers([(region.address, region.nbytes)])
    attached.driver.keep = set()
    region.unmap()


def test_a_copy_that_runs_keeps_its_segment_registered(attached: Attached) -> None:
    peer = attached.offer(3)
    assert reported(peer) == [3]
    mapping = attached.link.mapping
    assert mapping is not None
    copy = mapping.begin(1)
    peer.retire(3)
    peer.expect_silence()
    assert attached.registered == 1
    mapping.end(copy)
    peer.expect("retired")
    assert attached.registered == 0


# Where the driver cannot register at all.


def test_the_probe_registers_a_page_in_a_thread_of_its_own() -> None:
    driver = FakeDriver(FakeDevice())
    assert can_register(driver) == ""
    assert [call for call, _ in driver.calls] == ["register", "unregister"]
    assert threading.get_ident() not in driver.device.entered


def test_the_probe_says_what_the_driver_said() -> None:
    driver = FakeDriver(FakeDevice())
    driver.allowed = 0
    assert can_register(driver) == "DriverError: fakeHostRegister of 4096 bytes failed with code 2"


def test_the_engine_does_not_start_where_pinning_is_required_and_impossible() -> None:
    driver = FakeDriver(FakeDevice())
    driver.allowed = 0
    for policy in (Pin.AUTO, Pin.OFF):
        lenient = Pinning(policy)
        lenient.use(driver)
        lenient.require_driver()
    strict = Pinning(Pin.REQUIRED)
    strict.use(driver)
    with pytest.raises(ConfigError, match='"pin" in kv_connector_extra_config is "required", and the driver'):
        strict.require_driver()
    driver.allowed = 1
    strict.require_driver()


def test_the_driver_of_cuda_speaks_in_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from kvhost_connector.device import driver as room

    asked: list[tuple[str, tuple[int, ...]]] = []

    def call(name: str, code: int) -> object:
        def answer(*arguments: int) -> object:
            asked.append((name, arguments))
            return SimpleNamespace(value=code)

        return answer

    cudart = SimpleNamespace(cudaHostRegister=call("register", 0), cudaHostUnregister=call("unregister", 4))
    accelerator = SimpleNamespace(set_device_index=lambda index: asked.append(("enter", (index,))))
    torch = SimpleNamespace(cuda=SimpleNamespace(cudart=lambda: cudart), accelerator=accelerator)
    monkeypatch.setattr(room, "_torch", lambda: torch)
    made = room.CudaDriver(3)
    made.enter()
    made.register(4096, 8192)
    with pytest.raises(DriverError, match="cudaHostUnregister on device 3 failed with code 4"):
        made.unregister(4096)
    assert asked == [("enter", (3,)), ("register", (4096, 8192, 0)), ("unregister", (4096,))]
