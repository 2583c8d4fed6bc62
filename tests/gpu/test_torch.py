"""Registration, store, load and bandwidth on a real GPU: kvhost's link, pinning and planner, torch alone.

The copies themselves are torch's, block by block, where an engine has vLLM's batched copy.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import torch

from kvhost_connector.config import Pin
from kvhost_connector.device.driver import CudaDriver, can_register
from kvhost_connector.device.pages import CopyPlan, DevicePages, plan_copy
from kvhost_connector.device.pinning import PinState
from kvhost_connector.planning import Plan
from tests.gpu.caches import GpuCache
from tests.gpu.device import Seconds, show
from tests.gpu.pool import Pool, pool

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def copy(pages: DevicePages, plan: CopyPlan, *, store: bool) -> int:
    """Carries a plan of one group out on the current stream; the number of pieces."""
    pieces = 0
    for fragment in pages.groups[0].fragments:
        view = fragment.view()
        for block, row in zip(plan.blocks.tolist(), plan.rows.tolist(), strict=True):
            memory = (ctypes.c_int8 * fragment.bytes).from_address(row + fragment.offset)
            host = torch.frombuffer(memory, dtype=torch.int8)
            if store:
                host.copy_(view[block], non_blocking=True)
            else:
                view[block].copy_(host, non_blocking=True)
            pieces += 1
    return pieces


def plan(pages: DevicePages, made: Pool, blocks: list[int]) -> CopyPlan:
    slots = tuple(made.slot(number) for number in range(len(blocks)))
    counted = np.arange(len(blocks))
    job = Plan(slots, np.array(blocks), counted, np.zeros_like(counted), (len(blocks),))
    return plan_copy(pages, job, lambda slots, nbytes: made.mapping.addresses(slots, 0, nbytes))


def test_the_driver_registers_memory() -> None:
    assert can_register(CudaDriver(0)) == ""


def test_segments_are_pinned_when_they_are_reported_and_not_any_more_when_they_retire() -> None:
    with pool() as made:
        made.grow(1, 2)
        assert made.pinning.state is PinState.PINNED
        assert made.host(0).is_pinned()
        assert made.host(made.slots).is_pinned()
        made.peer.retire(1)
        made.peer.expect("retired")
        assert made.host(made.slots).is_pinned()
        assert made.pinning.nbytes == made.segment_bytes


def test_an_error_of_the_drivers_does_not_reach_the_engines_kernels() -> None:
    """A refused registration leaves an error pending in its thread: in the link's, not in the engine's."""
    with pool(Pin.AUTO) as made:
        made.grow(1)
        [segment] = made.mapping._segments.values()
        # Registered a second time: the driver refuses.
        done: list[None] = []
        steps = made.pinning.register([segment])
        thread = threading.Thread(target=lambda: done.extend(steps))
        thread.start()
        thread.join()
        assert made.pinning.state is PinState.UNPINNED
        assert int((torch.ones(4, device="cuda") + 1).sum()) == 8


@pytest.mark.parametrize("cross", [False, True], ids=["per layer", "cross layer"])
def test_blocks_come_back_bit_exact(cross: bool) -> None:
    cache = GpuCache(8, 32, 12_288, cross=cross)
    pages = DevicePages.of(cache.canonical)
    assert len(pages.groups[0].fragments) == (1 if cross else 8)
    with pool() as made:
        made.grow(1)
        cache.fill(1)
        blocks = [3, 31, 1, 16]
        images = [cache.image(block) for block in blocks]
        copy(pages, plan(pages, made, blocks), store=True)
        torch.cuda.synchronize()
        for number, image in enumerate(images):
            assert torch.equal(made.host(number)[: image.numel()], image)
        cache.fill(2)
        copy(pages, plan(pages, made, blocks[::-1]), store=False)
        torch.cuda.synchronize()
        for block, image in zip(blocks[::-1], images, strict=True):
            assert torch.equal(cache.image(block), image)
        untouched = GpuCache(8, 32, 12_288, cross=cross)
        untouched.fill(2)
        for block in set(range(32)) - set(blocks):
            assert torch.equal(cache.image(block), untouched.image(block))


def test_kvhost_holds_no_device_memory() -> None:
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    with pool(segment_bytes=256 * MIB) as made:
        made.grow(1)
        now, _ = torch.cuda.mem_get_info()
        # The driver keeps page tables for what is registered; no context of another device, no buffers.
        assert free - now < 64 * MIB
        show("device_memory", segment_mib=256, device_mib=round((free - now) / MIB, 2))


def test_figures_of_registration() -> None:
    """Populated memory, as the daemon hands it out."""
    for mib in (64, 1024):
        with pool(Pin.OFF, segment_bytes=mib * MIB, slot_bytes=2 * MIB) as made:
            made.grow(1)
            for number in range(made.slots):
                made.host(number).fill_(1)
            address, _ = made.shard(made.slot(0))
            with Seconds() as took:
                made.driver.register(address, mib * MIB)
            with Seconds() as released:
                made.driver.unregister(address)
            show(
                "registration",
                segment_mib=mib,
                register_ms=round(took.seconds * 1e3, 2),
                unregister_ms=round(released.seconds * 1e3, 2),
                gib_s=took.gib_s(mib * MIB),
            )


@pytest.mark.parametrize("pin", [Pin.REQUIRED, Pin.OFF], ids=["pinned", "unpinned"])
@pytest.mark.parametrize("cross", [False, True], ids=["per layer", "cross layer"])
def test_figures_of_bandwidth(pin: Pin, cross: bool) -> None:
    """32 layers of 32 KiB a block: a model of 8 billion parameters with blocks of 16 tokens."""
    layers, page, count = 32, 32_768, 256
    cache = GpuCache(layers, count + 1, page, cross=cross)
    cache.fill(1)
    pages = DevicePages.of(cache.canonical)
    blocks = list(range(1, count + 1))
    nbytes = count * layers * page
    with pool(pin, segment_bytes=512 * MIB, slot_bytes=layers * page) as made:
        made.grow(1)
        made_plan = plan(pages, made, blocks)
        copy(pages, made_plan, store=True)
        with Seconds() as stored:
            pieces = copy(pages, made_plan, store=True)
        with Seconds() as loaded:
            copy(pages, made_plan, store=False)
        show(
            "bandwidth_torch",
            pinned=pin is Pin.REQUIRED,
            cross_layer=cross,
            pieces=pieces,
            piece_bytes=nbytes // pieces,
            store_gib_s=stored.gib_s(nbytes),
            load_gib_s=loaded.gib_s(nbytes),
        )
        assert torch.equal(made.host(0)[: layers * page], cache.image(1))
