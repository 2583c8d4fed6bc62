"""Planning and copying of pages: bit-exact for every layout, and nothing outside the pages is touched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvhost_connector.pages import CacheMoved, PageTable, UnusablePages
from tests.connector.caches import Cache, interleaved, layered, scattered, two_groups

LAYOUTS: dict[str, Callable[[], Cache]] = {
    "layered": layered,
    "one layer": lambda: layered(1),
    "gaps between layers": lambda: layered(3, gap=24),
    "padded pages": lambda: layered(3, padding=16),
    "odd pages": lambda: layered(3, page=37),
    "interleaved": interleaved,
    "scattered": scattered,
    "two groups": two_groups,
}


@pytest.fixture(params=LAYOUTS, ids=str)
def cache(request: pytest.FixtureRequest) -> Cache:
    made = LAYOUTS[request.param]()
    made.fill()
    return made


def test_gather_gives_the_pages_without_padding_in_layer_order(cache: Cache) -> None:
    table = PageTable.of(cache.canonical)
    for number, group in enumerate(table.groups):
        for block in range(table.blocks):
            image = np.zeros(group.block_bytes, dtype=np.uint8)
            group.gather(block, image)
            assert image.tobytes() == cache.image(number, block)


def test_scatter_restores_a_block_and_touches_nothing_else(cache: Cache) -> None:
    table = PageTable.of(cache.canonical)
    for number, group in enumerate(table.groups):
        wanted = cache.image(number, 5)
        before = {(t, b): cache.page(t, b).tobytes() for t in range(len(cache.tensors)) for b in range(8)}
        group.scatter(2, np.frombuffer(wanted, dtype=np.uint8))
        assert cache.image(number, 2) == wanted
        touched = {index: size for index, size in cache.groups[number]}
        for (tensor, block), old in before.items():
            now = cache.page(tensor, block).tobytes()
            size = touched.get(tensor, 0) if block == 2 else 0
            # Padding stays, and so does every other block.
            assert now[size:] == old[size:]
        cache.fill()


def test_layers_at_one_distance_are_one_run() -> None:
    assert [len(group.runs) for group in PageTable.of(layered(30).canonical).groups] == [1]
    assert [len(group.runs) for group in PageTable.of(interleaved(30).canonical).groups] == [1]
    assert [len(group.runs) for group in PageTable.of(layered(3, gap=24).canonical).groups] == [1]


def test_shard_bytes_are_what_the_largest_group_needs() -> None:
    table = PageTable.of(two_groups().canonical)
    assert [group.block_bytes for group in table.groups] == [192, 112]
    assert table.shard_bytes(1) == 192
    assert table.shard_bytes(4) == 768


def test_a_device_tensor_is_refused_in_one_line() -> None:
    cache = layered()
    cache.tensors = [tensor.to("meta") for tensor in cache.tensors]
    with pytest.raises(UnusablePages, match="found device meta: run vLLM on its CPU platform"):
        PageTable.of(cache.canonical)


def test_a_page_that_does_not_lie_in_its_block_is_refused() -> None:
    cache = layered()
    cache.groups[0][1] = (1, 65)
    with pytest.raises(UnusablePages, match="a page of 65 bytes must lie in one piece inside its block"):
        PageTable.of(cache.canonical)


def test_layers_of_unequal_length_are_refused() -> None:
    cache = scattered()
    cache.tensors[1] = torch.zeros((9, 64), dtype=torch.int8)
    with pytest.raises(UnusablePages, match=r"equally many blocks, found \[8, 9\]"):
        PageTable.of(cache.canonical)


def test_a_cache_that_was_released_is_noticed() -> None:
    cache = layered()
    table = PageTable.of(cache.canonical)
    table.check_in_place()
    cache.tensors[0].untyped_storage().resize_(0)
    with pytest.raises(CacheMoved, match="sleep mode"):
        table.check_in_place()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_layer_that_is_elsewhere_now_is_noticed(layer: int) -> None:
    """Layers in one storage: the others are where they were."""
    cache = layered(3)
    assert len({tensor.untyped_storage().data_ptr() for tensor in cache.tensors}) == 1
    table = PageTable.of(cache.canonical)
    moved = cache.tensors[layer]
    moved.set_(torch.zeros_like(moved))
    with pytest.raises(CacheMoved):
        table.check_in_place()
