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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhost_client.mapping import Segment
from kvhost_client.types import Access
from kvhost_client.worker import WorkerLink
from kvhost_connector.config import ConfigError, Pin
from kvhost_connector.device import driver as driver_module
from kvhost_connector.device import pinning as pinning_module
from kvhost_connector.device.driver import CudaDriver, DriverError, can_register, driver_of
from kvhost_connector.device.pinning import PIECE_BYTES, Pinning, PinState
from kvhost_connector.platforms import Platform
from kvhost_proto.v1 import handover_pb2
from tests.client.fakes import MIB, FakeHandover, FakePeer
from tests.connector.device import FakeDevice, FakeDriver
from tests.support import map_count, wait_for

MAPS = "memfd:kvhost-test"


class Attached:
    """A link whose segments are registered with the fake driver."""

    def __init__(self, handover: FakeHandover, policy: Pin, piece_bytes: int = PIECE_BYTES) -> None:
        self.handover = handover
        self.driver = FakeDriver(FakeDevice())
        self.pauses: list[float] = []
        # Called in each pause, on the link's thread.
        self.meanwhile: Callable[[], None] = lambda: None
        self.pinning = Pinning(policy, piece_bytes, self._pause)
        self.pinning.use(self.driver)
        self.link = WorkerLink(
            handover.socket, secrets.token_bytes(16), 0, Access.DEVICE_DMA, registrar=self.pinning
        )
        self.link.start()

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.meanwhile()

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

    def covers(self, *spans: tuple[int, int]) -> bool:
        """Of (address, bytes), whether all are registered."""
        starts, sizes = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        return self.pinning.covers(starts, starts + sizes)

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
    assert attached.covers((address, nbytes), (address + 4096, 1))
    assert not attached.covers((address, nbytes + 1))
    lowest = min(attached.span(segment)[0] for segment in (3, 4, 5))
    assert not attached.covers((lowest - 1, 1))
    assert not attached.covers((1 << 46, 1))
    assert attached.covers()


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
    assert not attached.covers((address, nbytes))


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
    assert attached.covers(attached.span(3))
    assert not attached.covers(attached.span(4))
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


def test_a_worker_whose_driver_keeps_memory_does_not_take_leave(strict: Attached) -> None:
    """BYE is proof that nothing is mapped any more: the daemon would give the memory to others (I4)."""
    seen: list[Segment] = []
    register = strict.pinning.register

    def recorded(segments: Sequence[Segment]) -> Iterator[None]:
        seen.extend(segments)
        return register(segments)

    strict.pinning.register = recorded  # type: ignore[method-assign]
    strict.driver.allowed = 1
    strict.meanwhile = lambda: strict.driver.keep.add(seen[0].region.address)
    peer = strict.offer(3, 4)
    peer.expect_end()
    wait_for(lambda: strict.link.problem)
    assert [segment.region.mapped for segment in seen] == [True, False]
    strict.driver.keep = set()
    seen[0].region.unmap()


def test_without_pinning_the_driver_is_not_asked(handover: FakeHandover) -> None:
    attached = Attached(handover, Pin.OFF)
    peer = attached.offer(3)
    assert reported(peer) == [3]
    assert attached.driver.calls == []
    assert attached.pinning.state is PinState.OFF
    assert not attached.covers(attached.span(3))
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
    assert attached.covers((region.address, region.nbytes))
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


# Pieces: a driver that pins memory holds up the engine's other calls to it.


@pytest.fixture
def pieced(handover: FakeHandover) -> Iterator[Attached]:
    """Slots of 4 KiB: a segment of 1 MiB is registered in four calls."""
    made = Attached(handover, Pin.AUTO, piece_bytes=(256 << 10) + 100)
    yield made
    made.close()


def test_a_segment_is_registered_in_pieces_with_pauses(pieced: Attached) -> None:
    peer = pieced.offer(3, 4)
    assert reported(peer) == [3, 4]
    spans = [pieced.span(3), pieced.span(4)]
    wanted = [address + offset for address, nbytes in spans for offset in range(0, nbytes, 256 << 10)]
    assert sorted(start for start, _ in pieced.driver.device.registered) == sorted(wanted)
    assert pieced.covers(*spans)
    assert pieced.pinning.nbytes == 2 * MIB
    # In each pause others may use the driver, but never long.
    assert len(pieced.pauses) == 8
    assert all(0 <= pause <= 0.05 for pause in pieced.pauses)
    peer.retire(3)
    peer.expect("retired")
    assert pieced.registered == 4
    assert not pieced.covers(spans[0])
    assert pieced.covers(spans[1])


def test_no_piece_ends_in_a_slot() -> None:
    """A copy that lies in two registrations is refused by some drivers."""
    region = SimpleNamespace(nbytes=30 * 12_288)
    for slot_bytes, piece_bytes, wanted in (
        (12_288, 50_000, 4 * 12_288),
        (12_288, 1, 12_288),
        (6_144, 1, 12_288),
        (12_288, 1 << 30, 30 * 12_288),
        (1 << 30, 1, 30 * 12_288),
    ):
        segment: Any = SimpleNamespace(region=region, geometry=SimpleNamespace(slot_bytes=slot_bytes))
        pieces = list(pinning_module._cut(segment, piece_bytes))
        assert pieces[0] == (0, wanted)
        ends = [0, *(offset + nbytes for offset, nbytes in pieces)]
        assert ends[:-1] == [offset for offset, _ in pieces]
        assert ends[-1] == region.nbytes


def test_a_refusal_in_the_middle_of_a_segment_releases_its_pieces(pieced: Attached) -> None:
    pieced.driver.allowed = 6
    peer = pieced.offer(3, 4)
    assert reported(peer) == [3, 4]
    assert pieced.registered == 0
    assert [call for call, _ in pieced.driver.calls] == ["register"] * 6 + ["unregister"] * 6
    assert pieced.pinning.state is PinState.UNPINNED
    assert not pieced.covers(pieced.span(3))


def test_a_segment_that_retires_between_two_pieces_is_released(pieced: Attached) -> None:
    peer = pieced.handover.accept()
    pieced.meanwhile = lambda: peer.retire(3) if len(pieced.pauses) == 2 else None
    peer.expect("hello")
    peer.welcome()
    pieced.send(peer, 3, 4)
    peer.expect("retired")
    assert reported(peer) == [4]
    assert pieced.registered == 4
    assert pieced.covers(pieced.span(4))


def test_a_piece_that_the_driver_keeps_keeps_the_segment_mapped_and_unused(pieced: Attached) -> None:
    peer = pieced.offer(3)
    assert reported(peer) == [3]
    mapping = pieced.link.mapping
    assert mapping is not None
    region = mapping._segments[3].region
    pieced.driver.keep = {region.address + (512 << 10)}
    peer.retire(3)
    peer.expect_end()
    assert region.mapped
    # Its last piece is not registered any more: no copy may take the segment for pinned.
    assert pieced.registered == 3
    assert not pieced.covers((region.address, region.nbytes))
    pieced.driver.keep = set()
    region.unmap()


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
    asked: list[tuple[str, tuple[int, ...]]] = []

    def call(name: str, code: int) -> object:
        def answer(*arguments: int) -> object:
            asked.append((name, arguments))
            return SimpleNamespace(value=code)

        return answer

    cudart = SimpleNamespace(cudaHostRegister=call("register", 0), cudaHostUnregister=call("unregister", 4))
    accelerator = SimpleNamespace(set_device_index=lambda index: asked.append(("enter", (index,))))
    torch = SimpleNamespace(
        cuda=SimpleNamespace(cudart=lambda: cudart),
        accelerator=accelerator,
        version=SimpleNamespace(cuda=None, hip=None),
    )
    monkeypatch.setattr(driver_module, "_torch", lambda: torch)
    made = CudaDriver(3)
    made.enter()
    made.register(4096, 8192)
    with pytest.raises(DriverError, match="cudaHostUnregister on device 3 failed with code 4"):
        made.unregister(4096)
    assert asked == [("enter", (3,)), ("register", (4096, 8192, 0)), ("unregister", (4096,))]


@pytest.mark.parametrize(
    ("versions", "library", "call"),
    [
        (("12.9", None), "libcudart.so.12", "cudaThreadExchangeStreamCaptureMode"),
        ((None, "6.4.43482"), "libamdhip64.so.6", "hipThreadExchangeStreamCaptureMode"),
    ],
)
def test_a_thread_of_ours_spares_the_graphs_that_the_engine_captures(
    monkeypatch: pytest.MonkeyPatch, versions: tuple[str | None, str | None], library: str, call: str
) -> None:
    """The runtime is a fake: what is asked of it, and that no answer stops the thread."""
    asked: list[tuple[str, str, int]] = []

    class Runtime:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, name: str) -> Callable[[Any], int]:
            def exchange(mode: Any) -> int:
                asked.append((self.name, name, mode._obj.value))
                return 1

            return exchange

    monkeypatch.setattr(driver_module.ctypes, "CDLL", Runtime)
    driver_module._spare_captures(*versions)
    assert asked == [(library, call, 2)]


def test_a_runtime_that_is_not_there_leaves_the_mode_as_it_was(lines: pytest.LogCaptureFixture) -> None:
    lines.set_level(logging.DEBUG, "vllm")
    driver_module._spare_captures("0.1", None)
    assert "the capture mode of this thread stays as it is: libcudart.so.0: cannot open" in lines.text


def test_xpu_registers_through_the_operations_that_vllm_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter((True, False, True, False))
    asked: list[tuple[str, tuple[int, ...]]] = []

    def operation(name: str) -> Callable[..., bool]:
        return lambda *arguments: asked.append((name, arguments)) or next(answers)

    operations = SimpleNamespace(
        xpu_host_register=operation("register"), xpu_host_unregister=operation("unregister")
    )
    torch = SimpleNamespace(
        ops=SimpleNamespace(_C=operations),
        accelerator=SimpleNamespace(
            set_device_index=lambda index: asked.append(("enter", (index,))),
            synchronize=lambda index: asked.append(("settle", (index,))),
        ),
    )
    monkeypatch.setattr(driver_module, "_torch", lambda: torch)
    made = driver_of(Platform.XPU, 1)
    made.enter()
    made.register(4096, 8192)
    with pytest.raises(DriverError, match="xpu_host_register of 8192 bytes on device 1 failed"):
        made.register(4096, 8192)
    made.unregister(4096)
    with pytest.raises(DriverError, match="xpu_host_unregister on device 1 failed"):
        made.unregister(4096)
    made.settle()
    assert [name for name, _ in asked] == [
        *("enter", "register", "register", "unregister", "unregister", "settle")
    ]
    assert asked[1] == ("register", (4096, 8192))
