"""Whole engines on the device worker: vLLM's scheduler and transfer code, a real daemon, a fake device.

The fake device runs copies late and in an order of its own, as far as streams and events allow. The engine
without a model sees every wrong byte in the step that would have used it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvhost_connector import KVHostConnector
from kvhost_connector.device.pages import DevicePages
from kvhost_connector.device.pinning import PinState
from kvhost_connector.device.worker import DeviceWorker
from kvhost_connector.platforms import Platform
from tests.connector.device import FakeDevice, FakeDriver, Sticky, on_device, on_fake_device
from tests.connector.sim import Shape, Sim, answer, kv_transfer
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

BLOCK = 16


class LateDevice(FakeDevice):
    """Does a little, now and then, when it is asked."""

    chance = random.Random(11)

    def polled(self) -> None:
        if self.chance.random() < 0.3:
            self.run(self.chance.randint(1, 4))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """Every engine of this test has its KV cache here."""
    device = LateDevice()
    on_fake_device(monkeypatch, device, kernels=True)
    read = DevicePages.of

    def pages_of(caches: Any) -> DevicePages:
        for entry in caches.tensors:
            device.own(entry.tensor)
        return read(on_device(caches))

    def mapped() -> list[tuple[int, int]]:
        with open("/proc/self/maps") as maps:
            lines = [line.split()[0] for line in maps if "memfd:kvhost" in line]
        return merged((int(a, 16), int(b, 16)) for a, _, b in (line.partition("-") for line in lines))

    device.mapped = mapped
    monkeypatch.setattr(DevicePages, "of", pages_of)
    monkeypatch.setattr(KVHostConnector, "PLATFORM", Platform.CUDA)
    monkeypatch.setattr("kvhost_connector.spec.driver_of", lambda platform, index: FakeDriver(device))
    yield device
    device.eager = True


def merged(spans: Any) -> list[tuple[int, int]]:
    """Mappings that touch are one to the kernel, or the other way round."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def prompt(number: int, blocks: int) -> list[int]:
    return [3 + (number * 7919 + position * 31) % 500 for position in range(blocks * BLOCK)]


def worker_of(sim: Sim, rank: int = 0) -> DeviceWorker:
    worker = sim.workers[rank].connector.working.worker
    assert isinstance(worker, DeviceWorker)
    return worker


Engines = Callable[..., Sim]


def test_what_one_engine_computed_the_next_one_loads(
    device: FakeDevice, engine: Engines, daemon: Daemon
) -> None:
    first = engine(Shape(blocks=64, max_batched_tokens=1024))
    asked = prompt(1, 8)
    assert first.ask(asked, 4).tokens == answer(asked, 4)
    wait_for(lambda: daemon.status().memory.used_bytes > 0)
    second = engine(Shape(blocks=64, max_batched_tokens=1024))
    outcome = second.ask([*asked, 5, 6, 7], 4)
    assert outcome.tokens == answer([*asked, 5, 6, 7], 4)
    assert outcome.cached_tokens == len(asked)
    directions = {copy.direction for copy in device.copies}
    assert directions == {"store", "load"}
    # The daemon is told of a device that writes by DMA, and all of its segments are registered.
    report = second.workers[0].connector.working.report()
    assert (report.platform, report.memory) == ("cuda", "pinned")
    assert second.workers[0].connector.working._pinning.state is PinState.PINNED
    assert all(copy.by_kernel for copy in device.copies if copy.direction == "load")


def test_ranks_windows_preemptions_and_late_copies_stay_bit_exact(
    device: FakeDevice, engine: Engines
) -> None:
    """Too few blocks for all requests: blocks change hands while copies are on their way (A1)."""
    sim = engine(Shape(blocks=26, ranks=2, window=32, max_batched_tokens=128, max_seqs=4))
    chance = random.Random(3)
    for round_ in range(4):
        names = [
            sim.add(prompt(chance.randrange(5), chance.randint(2, 5)), chance.randint(1, 20))
            for _ in range(6)
        ]
        sim.run()
        assert all(sim.outcomes[name].finish_reason for name in names), round_
        assert sim.wrong == []
    assert {copy.direction for copy in device.copies} == {"store", "load"}


def test_a_device_that_fails_costs_the_cache_and_nothing_else(
    device: FakeDevice, engine: Engines, daemon: Daemon
) -> None:
    asked = prompt(2, 6)
    first = engine(Shape(max_batched_tokens=1024))
    first.ask(asked, 2)
    wait_for(lambda: daemon.status().memory.used_bytes > 0)
    with Sim(Shape(max_batched_tokens=1024), kv_transfer(daemon.socket)) as sim:
        scheduling = sim.connector.scheduling
        wait_for(lambda: sim.ask(prompt(3, 1), 1) and scheduling.board.usable)
        device.sticky = Sticky("CUDA error: an illegal memory access was encountered")
        assert sim.ask([*asked, 9], 3).tokens == answer([*asked, 9], 3)
        assert "illegal memory access" in worker_of(sim).problem
        # The scheduler's half hears of it and asks no more.
        wait_for(lambda: not scheduling.board.has_session)
        scheduling.board.counters.take()
        assert sim.ask([*asked, 10], 3).tokens == answer([*asked, 10], 3)
        assert "lookups" not in scheduling.board.counters.take()
        assert sim.wrong == []
        # What the device may still write stays mapped and held for as long as this process lives (I4).
        mapping = sim.workers[0].connector.working._link.mapping
        assert mapping.running == 1
        device.sticky = None
        mapping.end()
