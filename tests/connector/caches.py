"""KV caches as vLLM hands them to a worker, filled with patterns: each page names its layer and block."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.support.patterns import pat


@dataclass
class Cache:
    """`tensors` are (blocks, page) int8 views; `groups` lists (tensor index, unpadded page bytes)."""

    tensors: list[Any]
    groups: list[list[tuple[int, int]]]

    @property
    def canonical(self) -> Any:
        """The part of vLLM's CanonicalKVCaches that is read."""
        return SimpleNamespace(
            tensors=[SimpleNamespace(tensor=tensor) for tensor in self.tensors],
            group_data_refs=[
                [SimpleNamespace(tensor_idx=index, page_size_bytes=size) for index, size in group]
                for group in self.groups
            ],
        )

    def page(self, tensor: int, block: int) -> Any:
        """The bytes of one page, writable."""
        return self.tensors[tensor][block].numpy().view(np.uint8)

    def fill(self, salt: int = 0) -> None:
        """Every page gets the pattern of its place."""
        for number, tensor in enumerate(self.tensors):
            for block in range(tensor.shape[0]):
                page = self.page(number, block)
                page[:] = np.frombuffer(pat(f"{number}/{block}", salt, page.size), dtype=np.uint8)

    def image(self, group: int, block: int) -> bytes:
        """What the image of a block must be: its pages without padding, in layer order."""
        return b"".join(self.page(index, block)[:size].tobytes() for index, size in self.groups[group])


def layered(layers: int = 3, blocks: int = 8, page: int = 64, gap: int = 0, padding: int = 0) -> Cache:
    """One region a layer, as in LBHNC; `gap` bytes between layers, `padding` bytes unused in each page."""
    backing = torch.zeros(layers * (blocks * page + gap) + 1, dtype=torch.int8)
    tensors = [
        torch.as_strided(backing, (blocks, page), (page, 1), storage_offset=1 + layer * (blocks * page + gap))
        for layer in range(layers)
    ]
    return Cache(tensors, [[(layer, page - padding) for layer in range(layers)]])


def interleaved(layers: int = 3, blocks: int = 8, page: int = 64) -> Cache:
    """All layers of a block side by side, as in BLHNC: the stride of blocks is not the page."""
    backing = torch.zeros(layers * blocks * page, dtype=torch.int8)
    tensors = [
        torch.as_strided(backing, (blocks, page), (layers * page, 1), storage_offset=layer * page)
        for layer in range(layers)
    ]
    return Cache(tensors, [[(layer, page) for layer in range(layers)]])


def scattered(sizes: tuple[int, ...] = (64, 64, 32, 128), blocks: int = 8) -> Cache:
    """Layers of different page sizes, each in an allocation of its own."""
    tensors = [torch.zeros((blocks, size), dtype=torch.int8) for size in sizes]
    return Cache(tensors, [[(index, size) for index, size in enumerate(sizes)]])


def two_groups(blocks: int = 8) -> Cache:
    """Two groups of different sizes that overlay each other in the first layer."""
    cache = layered(4, blocks)
    cache.groups = [[(0, 64), (1, 64), (2, 64)], [(0, 48), (3, 64)]]
    return cache
