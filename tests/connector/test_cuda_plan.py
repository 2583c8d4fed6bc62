"""From blocks and slots to addresses: bit-exact for every layout, checked, and nothing else is touched.

vLLM's real transfer worker, on a fake device in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from kvhost_connector.device.pages import DevicePages, plan_copy
from kvhost_connector.pages import CacheMoved, PageTable, UnusablePages
from kvhost_connector.planning import plan_job
from tests.connector.caches import Cache, interleaved, layered, scattered, two_groups
from tests.connector.device import on_device
from tests.connector.devicebench import FILL, Bench, Pool, blocks_of

LAYOUTS: dict[str, Callable[[], Cache]] = {
    "layered": layered,
    "one layer": lambda: layered(1),
    "gaps between layers": lambda: layered(3, gap=24),
    "padded pages": lambda: layered(3, padding=16),
    "odd pages": lambda: layered(3, page=37),
    "interleaved": interleaved,
    "scattered": scattered,
}

Benches = Callable[..., Bench]


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Benches]:
    with ExitStack() as stack:

        def make(cache: Cache, **arguments: Any) -> Bench:
            bench = Bench(monkeypatch, cache, **arguments)
            stack.callback(bench.close)
            return bench

        yield make


def pages_of(cache: Cache) -> DevicePages:
    return DevicePages.of(on_device(cache.canonical))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_blocks_come_back_bit_exact_and_nothing_else_changes(
    benches: Benches, layout: Callable[[], Cache]
) -> None:
    bench = benches(layout())
    size = bench.pages.groups[0].block_bytes
    images = {block: bench.cache.image(0, block) for block in range(8)}
    bench.store(1, [3, 5, 7], 0, 9, 15)
    bench.settle(1)
    for slot, block in ((0, 3), (9, 5), (15, 7)):
        assert bench.slot(slot, size) == images[block]
        assert set(bench.slot(slot)[size:]) == {FILL}
    assert all(bench.untouched(slot) for slot in range(16) if slot not in (0, 9, 15))
    bench.cache.fill(salt=1)
    others = {block: bench.cache.image(0, block) for block in range(8)}
    bench.load(2, [6, 1, 2], 15, 0, 9)
    bench.settle(2)
    expected = {**others, 6: images[7], 1: images[3], 2: images[5]}
    assert {block: bench.cache.image(0, block) for block in range(8)} == expected
    assert not bench.failed
    assert bench.done[2].transfer_size == 3 * size


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_slot_holds_what_the_host_worker_would_have_written(
    benches: Benches, layout: Callable[[], Cache]
) -> None:
    bench = benches(layout())
    table = PageTable.of(bench.cache.canonical)
    assert table.shard_bytes(1) == bench.pages.shard_bytes(1)
    bench.store(1, [4], 3)
    bench.settle(1)
    assert bench.slot(3, table.groups[0].block_bytes) == bench.cache.image(0, 4)


def test_a_block_of_all_layers_is_one_piece_where_they_lie_side_by_side(benches: Benches) -> None:
    bench = benches(interleaved(5))
    assert len(bench.pages.groups[0].fragments) == 1
    bench.store(1, [3, 4], 0, 1)
    bench.settle(1)
    assert [copy.nbytes for copy in bench.device.copies] == [5 * 64, 5 * 64]
    assert len(pages_of(layered(5)).groups[0].fragments) == 5


def test_large_pages_are_copied(benches: Benches) -> None:
    """Above 64 KiB: of many heads, or of all layers of a block side by side."""
    bench = benches(layered(2, page=(64 << 10) + 64), pool=Pool(slot_bytes=1 << 18))
    images = [bench.cache.image(0, block) for block in (3, 5)]
    bench.store(1, [3, 5], 0, 1)
    bench.settle(1)
    bench.load(2, [6, 7], 0, 1)
    bench.settle(2)
    assert bench.failed == set()
    assert [bench.cache.image(0, block) for block in (6, 7)] == images


def test_layers_of_different_allocations_are_never_joined() -> None:
    backing = torch.zeros(4096, dtype=torch.int8)
    first = torch.as_strided(backing, (4, 32), (64, 1), 0)
    second = torch.as_strided(backing, (4, 32), (64, 1), 32)
    joined = pages_of(Cache([first, second], [[(0, 32), (1, 32)]]))
    assert [part.bytes for part in joined.groups[0].fragments] == [64]
    apart = pages_of(Cache([first, first.clone()], [[(0, 32), (1, 32)]]))
    assert [part.bytes for part in apart.groups[0].fragments] == [32, 32]


def test_groups_go_to_their_own_slots(benches: Benches) -> None:
    bench = benches(two_groups())
    wanted = [bench.cache.image(0, 3), bench.cache.image(0, 4), bench.cache.image(1, 5)]
    spec = bench.spec(1, 2, 3, 4)
    assert bench.worker.submit_store(1, blocks_of([3, 4, 5], [2, 1]), spec)
    bench.settle(1)
    assert [bench.slot(2, 192), bench.slot(3, 192), bench.slot(4, 112)] == wanted
    bench.cache.fill(salt=1)
    assert bench.worker.submit_load(2, bench.spec(2, 4, 3), blocks_of([1, 2], [0, 2][::-1]))
    bench.settle(2)
    assert 2 not in bench.failed
    assert bench.worker.submit_load(3, bench.spec(3, 3, 4), blocks_of([6, 7], [1, 1]))
    bench.settle(3)
    assert [bench.cache.image(0, 6), bench.cache.image(1, 7)] == wanted[1:]


def test_chunks_of_several_blocks_and_a_load_from_the_middle_of_one(benches: Benches) -> None:
    bench = benches(layered(2, blocks=10), blocks_per_chunk=3)
    images = [bench.cache.image(0, block) for block in range(10)]
    bench.store(1, [1, 2, 3, 4, 5, 6], 0, 1)
    bench.settle(1)
    assert bench.slot(0, 3 * 128) == images[1] + images[2] + images[3]
    bench.cache.fill(salt=2)
    assert bench.worker.submit_load(2, bench.spec(2, 0, 1), blocks_of([7, 8, 9], first=[2]))
    bench.settle(2)
    assert [bench.cache.image(0, block) for block in (7, 8, 9)] == [images[3], images[4], images[5]]


def test_bytes_of_eight_bit_floats_are_bytes(benches: Benches) -> None:
    raw = torch.zeros((8, 96), dtype=torch.float8_e4m3fn)
    bench = benches(
        Cache([raw.view(torch.int8), torch.zeros((8, 64), dtype=torch.int8)], [[(0, 96), (1, 64)]])
    )
    image = bench.cache.image(0, 2)
    bench.store(1, [2], 0)
    bench.settle(1)
    bench.cache.fill(salt=4)
    bench.load(2, [6], 0)
    bench.settle(2)
    assert bench.cache.image(0, 6) == image
    assert bytes(raw[6].view(torch.uint8).numpy()) == image[:96]


def test_ranks_write_shards_of_their_own(benches: Benches) -> None:
    pool = Pool(shards=2)
    images = []
    for rank in (0, 1):
        bench = benches(layered(3), pool=pool, rank=rank)
        bench.cache.fill(salt=10 + rank)
        images.append(bench.cache.image(0, 3))
        bench.store(1, [3], 5)
        bench.settle(1)
    assert images[0] != images[1]
    assert [bytes(pool.bytes(5, rank)[:192]) for rank in (0, 1)] == images


def test_identical_bytes_are_stored_once_and_loaded_by_all_ranks(benches: Benches) -> None:
    """As latent attention (MLA) over tensor-parallel ranks: one shard, written by rank 0."""
    pool = Pool(shards=1)
    writer = benches(layered(3), pool=pool, rank=0)
    image = writer.cache.image(0, 3)
    writer.store(1, [3], 5)
    writer.settle(1)
    reader = benches(layered(3), pool=pool, rank=1)
    reader.cache.fill(salt=9)
    reader.load(1, [6], 5)
    reader.settle(1)
    assert reader.cache.image(0, 6) == image


def test_null_blocks_are_neither_read_nor_written(benches: Benches) -> None:
    bench = benches(layered(3))
    before = bench.cache.image(0, 0)
    bench.store(1, [0, 4], 0, 1)
    bench.settle(1)
    assert bench.untouched(0)
    bench.load(2, [0], 1)
    bench.settle(2)
    assert bench.cache.image(0, 0) == before
    assert not bench.failed


@pytest.mark.parametrize(
    ("blocks", "slots"),
    [([3], ()), ([3], (0, 1)), ([3, 8], (0, 1)), ([-1], (0,)), ([3], (16,)), ([3], (1 << 20,))],
)
def test_what_does_not_fit_never_becomes_an_address(
    benches: Benches, blocks: list[int], slots: tuple[int, ...]
) -> None:
    bench = benches(layered(3))
    bench.store(1, blocks, *slots)
    bench.load(2, blocks, *slots)
    bench.settle(1, 2)
    assert bench.failed == {1, 2}
    assert not bench.device.copies
    assert bench.pool.mapping.running == 0
    assert [report.ok for report in bench.worker.take_reports()] == [False, False]


def test_a_shard_too_small_for_the_chunk_is_refused(benches: Benches) -> None:
    bench = benches(layered(65))
    bench.store(1, [3], 0)
    bench.settle(1)
    assert bench.failed == {1}
    assert bench.untouched(0)


def test_a_plan_names_blocks_and_addresses_in_the_order_of_groups() -> None:
    pages = pages_of(two_groups())
    job = plan_job(blocks_of([3, 0, 4], [2, 1], [0, 1]), (7, 8), 2, "load")
    asked: list[tuple[tuple[int, ...], int]] = []

    def places(slots: Sequence[int], nbytes: int) -> list[int]:
        asked.append((tuple(slots), nbytes))
        return [slot << 16 for slot in slots]

    plan = plan_copy(pages, job, places)
    assert asked == [((7,), 2 * 192), ((8,), 2 * 112)]
    assert plan.blocks.tolist() == [3, 4]
    assert plan.rows.tolist() == [7 << 16, (8 << 16) + 112]
    assert plan.group_sizes == (1, 1)
    assert plan.starts.tolist() == [7 << 16, 8 << 16]
    assert plan.ends.tolist() == [(7 << 16) + 384, (8 << 16) + 224]
    assert plan.nbytes == 192 + 112


def test_a_group_without_blocks_is_planned_as_nothing() -> None:
    pages = pages_of(two_groups())
    for blocks, sizes, wanted in (([3], [1, 0], (1, 0)), ([3], [0, 1], (0, 1)), ([], [0, 0], (0, 0))):
        job = plan_job(blocks_of(blocks, sizes, [0, 0]), (7,) * len(blocks), 1, "load")
        plan = plan_copy(pages, job, lambda slots, nbytes: [slot << 16 for slot in slots])
        assert plan.group_sizes == wanted
        assert plan.blocks.tolist() == blocks


def test_caches_that_no_device_could_copy_are_refused() -> None:
    for cache, why in (
        (Cache([], []), "registered no KV cache"),
        (Cache([torch.zeros((8, 64)), torch.zeros((4, 64))], [[(0, 64)]]), "equally many blocks"),
        (Cache([torch.zeros((8, 16), dtype=torch.int32)], [[(0, 64)]]), "wider elements"),
        (Cache([torch.zeros((64, 8), dtype=torch.int8).T], [[(0, 8)]]), "one piece inside its block"),
    ):
        with pytest.raises(UnusablePages, match=why):
            pages_of(cache)
    with pytest.raises(UnusablePages, match="memory of its one device, found cpu"):
        DevicePages.of(layered().canonical)


def test_a_cache_that_moved_is_not_copied(benches: Benches) -> None:
    bench = benches(layered(1))
    [tensor] = bench.pages._watch._owners
    tensor.set_(torch.zeros((8, 64), dtype=torch.int8))
    bench.store(1, [3], 0)
    bench.settle(1)
    assert bench.failed == {1}
    with pytest.raises(CacheMoved):
        bench.pages.check_in_place()


def test_many_transfers_stay_bit_exact(benches: Benches) -> None:
    bench = benches(layered(5, blocks=16))
    images = [bench.cache.image(0, block) for block in range(16)]
    chance = np.random.default_rng(7)
    for round_ in range(30):
        blocks = chance.permutation(np.arange(1, 16))
        bench.store(round_, [int(block) for block in blocks], *range(15))
        bench.settle(round_)
        for slot, block in enumerate(blocks):
            assert bench.slot(slot, 320) == images[block]
    assert not bench.failed
