"""The device worker on a real GPU with vLLM's batched block copies: right bytes, order, failure, bandwidth.

Collected only where vLLM is installed; with a build for the GPU it needs nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvhost_connector.config import Pin
from kvhost_connector.device.pages import DevicePages
from kvhost_connector.device.worker import DeviceWorker
from kvhost_connector.metadata import Epoch, SlotSpec, TransferId
from tests.gpu.caches import GpuCache
from tests.gpu.device import Seconds, show
from tests.gpu.pool import BOOT, Pool, pool

pytestmark = pytest.mark.gpu

LAYERS, PAGE, BLOCKS = 32, 32_768, 257


class Bench:
    def __init__(self, made: Pool, cache: GpuCache) -> None:
        self.pool = made
        self.cache = cache
        self.worker = DeviceWorker(
            DevicePages.of(cache.canonical), made.link, driver=made.driver, pinning=made.pinning
        )
        self.done: set[int] = set()
        self.failed: set[int] = set()

    def submit(self, job: int, blocks: list[int], slots: list[int], *, store: bool) -> None:
        device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        host = SlotSpec(TransferId(job), Epoch(0), 1, BOOT, 1, tuple(self.pool.slot(slot) for slot in slots))
        if store:
            self.worker.submit_store(job, device, host)
        else:
            self.worker.submit_load(job, host, device)

    def settle(self, *jobs: int) -> None:
        until = time.monotonic() + 60
        while not set(jobs) <= self.done:
            self.done |= {result.job_id for result in self.worker.get_finished()}
            self.failed |= self.worker.take_failed()
            assert time.monotonic() < until, self.worker.problem
        assert not self.failed, self.worker.problem


@pytest.fixture(params=["pinned", "unpinned"])
def made(request: pytest.FixtureRequest) -> Iterator[Pool]:
    policy = Pin.REQUIRED if request.param == "pinned" else Pin.OFF
    with pool(policy, segment_bytes=512 << 20, slot_bytes=LAYERS * PAGE) as found:
        found.grow(1)
        yield found


@pytest.mark.parametrize("cross", [False, True], ids=["per layer", "cross layer"])
@pytest.mark.parametrize("page", [PAGE, 4096], ids=["large pages", "small pages"])
def test_blocks_come_back_bit_exact(made: Pool, cross: bool, page: int) -> None:
    """Small pages of pinned memory are loaded by vLLM's kernel instead of its batched copy."""
    cache = GpuCache(LAYERS, 64, page, cross=cross)
    bench = Bench(made, cache)
    cache.fill(1)
    blocks = list(range(1, 41))
    images = {block: cache.image(block) for block in blocks}
    bench.submit(1, blocks, list(range(40)), store=True)
    bench.settle(1)
    cache.fill(2)
    bench.submit(2, blocks[::-1], list(range(40)), store=False)
    bench.settle(2)
    torch.cuda.synchronize()
    for source, target in zip(blocks, blocks[::-1], strict=True):
        assert torch.equal(cache.image(target), images[source])
    bench.worker.shutdown()


def test_a_store_waits_for_the_step_that_computes_its_block(made: Pool) -> None:
    cache = GpuCache(LAYERS, 64, PAGE)
    bench = Bench(made, cache)
    cache.fill(1)
    torch.cuda.synchronize()
    for round_ in range(2, 12):
        torch.cuda._sleep(50_000_000)
        cache.fill(round_)
        bench.submit(round_, [5], [0], store=True)
        bench.settle(round_)
        assert torch.equal(made.host(0)[: LAYERS * PAGE], cache.image(5))
    bench.worker.shutdown()


def test_a_load_waits_for_the_step_that_still_reads_its_block(made: Pool) -> None:
    cache = GpuCache(LAYERS, 64, PAGE)
    bench = Bench(made, cache)
    cache.fill(1)
    bench.submit(1, [5], [0], store=True)
    bench.settle(1)
    for round_ in range(2, 12):
        cache.fill(round_)
        expected = cache.image(5)
        torch.cuda._sleep(50_000_000)
        read = torch.cat([tensor[5] for tensor in cache.tensors])
        bench.submit(round_, [5], [0], store=False)
        bench.settle(round_)
        assert torch.equal(read.cpu().view(torch.uint8), expected)
    bench.worker.shutdown()


@pytest.mark.parametrize("cross", [False, True], ids=["per layer", "cross layer"])
def test_figures_of_bandwidth(made: Pool, cross: bool) -> None:
    cache: Any = GpuCache(LAYERS, BLOCKS, PAGE, cross=cross)
    bench = Bench(made, cache)
    cache.fill(1)
    blocks = list(range(1, BLOCKS))
    nbytes = len(blocks) * LAYERS * PAGE
    figures: dict[str, float] = {}
    job = 0
    for name, store in (("store", True), ("load", False)):
        for measured in (False, True):
            job += 1
            with Seconds() as took:
                began = time.perf_counter()
                bench.submit(job, blocks, list(range(len(blocks))), store=store)
                submitted = time.perf_counter() - began
                bench.settle(job)
            if measured:
                figures[f"{name}_gib_s"] = took.gib_s(nbytes)
                figures[f"{name}_submit_ms"] = round(submitted * 1e3, 2)
    pinned = made.pinning.nbytes > 0
    show("bandwidth_vllm", pinned=pinned, cross_layer=cross, blocks=len(blocks), bytes=nbytes, **figures)
    bench.worker.shutdown()
