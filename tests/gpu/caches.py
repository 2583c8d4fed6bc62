"""KV caches in the memory of the GPU, every byte of which names its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class GpuCache:
    """`layers` layers of `blocks` blocks; `cross` puts all layers of a block side by side (BLHNC)."""

    def __init__(self, layers: int, blocks: int, page: int, *, cross: bool = False) -> None:
        self.layers, self.blocks, self.page = layers, blocks, page
        self.backing = torch.empty(layers * blocks * page, dtype=torch.int8, device="cuda")
        layer, block = (page, layers * page) if cross else (blocks * page, page)
        self.tensors = [
            torch.as_strided(self.backing, (blocks, page), (block, 1), number * layer)
            for number in range(layers)
        ]

    @property
    def canonical(self) -> Any:
        """As vLLM's half hands it over; with CanonicalKVCaches' fields."""
        return SimpleNamespace(
            tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=self.page) for tensor in self.tensors],
            group_data_refs=[
                [SimpleNamespace(tensor_idx=n, page_size_bytes=self.page) for n in range(self.layers)]
            ],
        )

    def fill(self, salt: int) -> None:
        """Every byte depends on layer, block, place and salt, and is never 0."""
        place = torch.arange(self.page, device="cuda", dtype=torch.int64)
        block = torch.arange(self.blocks, device="cuda", dtype=torch.int64)[:, None]
        for number, tensor in enumerate(self.tensors):
            mixed = (place * 31 + block * 101 + number * 17 + salt * 53) % 251 + 1
            tensor.copy_((mixed - 128).to(torch.int8))

    def image(self, block: int) -> Any:
        """What a slot must hold of a block: uint8, on the host."""
        return torch.cat([tensor[block] for tensor in self.tensors]).cpu().view(torch.uint8)
