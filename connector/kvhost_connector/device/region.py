"""The pool under vLLM's own offloading worker: a region object of ours in the place of its private one.

vLLM's worker moves blocks between device tensors and rows of host tensors, and makes pointers of row numbers
as base + row * stride. Segments are mapped wherever there is room, and more come while the engine runs. So a
`Window` has rows of one byte: a row's number says where it lies in this process's memory, and one worker
serves all segments there are and will be. Only row numbers made by `rows_at` may be given to it, from
addresses that `plan_copy` has checked; the window's tensors are never read by the processor.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from kvhost_connector.device.pages import CopyPlan, DevicePages
from kvhost_connector.pages import Numbers

# Everything that a process on Linux maps lies between these, unless it asks for more by name.
_FIRST = mmap.PAGESIZE
_BEHIND = (1 << 47) - mmap.PAGESIZE


class RowSpec(BlockIDsLoadStoreSpec):
    """Rows of a `Window`: as vLLM's CPULoadStoreSpec, with numbers of 64 bits."""

    def __init__(self, rows: Numbers) -> None:
        super().__init__([])
        self.block_ids = rows


def rows_at(plan: CopyPlan) -> RowSpec:
    """The host side of a planned copy."""
    return RowSpec(plan.rows - _FIRST)


def blocks_of(plan: CopyPlan) -> GPULoadStoreSpec:
    """The device side of a planned copy."""
    # Any sequence of numbers will do, whatever the annotation says.
    blocks: Any = plan.blocks
    return GPULoadStoreSpec(blocks, group_sizes=plan.group_sizes, block_indices=[0] * len(plan.group_sizes))


class Window:
    """What vLLM's worker asks of a region, over all of this process's memory.

    The segments are registered one by one, on the link's thread, before anything is copied. vLLM's own
    registration, at the start of its worker, therefore finds a region of 0 bytes, and what it then says of it
    is not taken over: `is_pinned` is what the link's thread knows.
    """

    rank = 0
    total_size_bytes = 0
    num_chunks = 0
    page_size = mmap.PAGESIZE
    cpu_page_size = 0
    _row_stride = 1

    def __init__(self, views: Sequence[tuple[int, int]], *, pinned: bool) -> None:
        """`views`: (offset in a block's image, bytes) of the views that the worker will ask for, in order."""
        span = _BEHIND - _FIRST
        memory = (ctypes.c_int8 * span).from_address(_FIRST)
        self._base: Any = torch.frombuffer(memory, dtype=torch.int8)
        self._views = list(views)
        self._pinned = pinned
        self.pinned_addresses: list[int] = []

    @property
    def is_pinned(self) -> bool:
        """All memory that rows will name is registered with the driver."""
        return self._pinned

    @is_pinned.setter
    def is_pinned(self, verdict: bool) -> None:
        """vLLM's verdict on the 0 bytes that it found to register."""

    def create_next_worker_view(self, tensor_page_size: int) -> Any:
        """An int8 tensor of shape (1, `tensor_page_size`) with strides (1, 1): row `n` begins `n` bytes, and
        the fragment's offset, behind the window's first byte.

        One row, though there are as many as addresses: vLLM makes pointers of the first byte and the stride
        alone, and torch refuses shapes whose product, rows times bytes, is more than 2^63.
        """
        offset, size = self._views.pop(0)
        if size != tensor_page_size:
            raise ValueError(
                f"vLLM's worker asks for a view of {tensor_page_size} bytes a block where {size} are due"
            )
        return torch.as_strided(self._base, (1, size), (1, 1), storage_offset=offset)

    def create_next_canonical_view(self, tensor_page_size: int) -> Any:
        raise NotImplementedError("kvhost's slots hold no canonical pages: canonical_layout is refused")

    def iter_worker_slot_ranges(self) -> Iterator[tuple[int, int]]:
        """Nothing to populate or register (0.33)."""
        return iter(())

    def cleanup(self) -> None:
        """The segments are the link's: nothing is unmapped here."""
        self._base = None


def canonical_caches(pages: DevicePages) -> CanonicalKVCaches:
    """The KV cache as vLLM's worker takes it: one tensor for each fragment of each group."""
    tensors: list[CanonicalKVCacheTensor] = []
    groups: list[list[CanonicalKVCacheRef]] = []
    for group in pages.groups:
        refs = []
        for fragment in group.fragments:
            refs.append(CanonicalKVCacheRef(tensor_idx=len(tensors), page_size_bytes=fragment.bytes))
            tensors.append(CanonicalKVCacheTensor(tensor=fragment.view(), page_size_bytes=fragment.bytes))
        groups.append(refs)
    return CanonicalKVCaches(tensors=tensors, group_data_refs=groups)


def vllm_transfers(pages: DevicePages, *, pinned: bool) -> OffloadingWorker:
    """vLLM's offloading worker between this KV cache and rows of a window.

    It is given blocks one by one (its chunks have one block): a row is the image of one block, wherever in a
    chunk it lies. `pinned`: rows are in registered memory, which its kernels may then read by themselves.
    """
    views = [(fragment.offset, fragment.bytes) for group in pages.groups for fragment in group.fragments]
    worker: OffloadingWorker = CPUOffloadingWorker(
        kv_caches=canonical_caches(pages),
        blocks_per_chunk=1,
        num_cpu_chunks=0,
        mmap_region=Window(views, pinned=pinned),
    )
    return worker
