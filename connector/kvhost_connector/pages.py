"""Where the bytes of a block lie in the engine's KV cache, and how they go into a chunk's image and back.

The image of one block is the pages of its group's layers, one after another in layer order, without the
padding between them. A chunk's image is its blocks' images one after another. Distances come from the
tensors alone: nothing is assumed about layouts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

NULL_BLOCK = 0
"""vLLM's placeholder for blocks outside a window: never read, never written."""


class UnusablePages(ValueError):
    """This KV cache cannot be copied by the host worker; the message is one line."""


class CacheMoved(RuntimeError):
    """The KV cache is not where it was registered: vLLM released or replaced it (sleep mode)."""


class Piece(NamedTuple):
    """Consecutive blocks of one chunk: they go to the chunk's image from block `position` on."""

    slot: int
    group: int
    position: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Page:
    """One layer's page of every block. `address` is block 0's page; sizes and distances in bytes."""

    address: int
    bytes: int
    block_stride: int


@dataclass(frozen=True)
class Run:
    """Pages at one constant distance, copied by one call a block.

    `device` has shape (blocks, layers, bytes of a page), dtype uint8, and shares memory with the KV cache.
    """

    offset: int
    device: Bytes

    @property
    def bytes(self) -> int:
        return int(self.device.shape[1] * self.device.shape[2])


def bytes_at(address: int, size: int) -> Bytes:
    """The memory at an address as an array. The caller keeps the memory alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def plan_runs(pages: Sequence[Page], blocks: int) -> tuple[Run, ...]:
    """Groups pages that follow each other at a constant distance; order and image stay those of `pages`."""
    runs: list[Run] = []
    offset = 0
    start = 0
    while start < len(pages):
        first = pages[start]
        end = start + 1
        step = pages[end].address - first.address if end < len(pages) else 0
        while (
            end < len(pages)
            and pages[end].bytes == first.bytes
            and pages[end].block_stride == first.block_stride
            and pages[end].address - pages[end - 1].address == step
            and step >= first.bytes
        ):
            end += 1
        count = end - start
        span = (blocks - 1) * first.block_stride + (count - 1) * step + first.bytes
        device = np.lib.stride_tricks.as_strided(
            bytes_at(first.address, span),
            shape=(blocks, count, first.bytes),
            strides=(first.block_stride, step if count > 1 else first.bytes, 1),
        )
        runs.append(Run(offset, device))
        offset += count * first.bytes
        start = end
    return tuple(runs)


@dataclass(frozen=True)
class Spans:
    """Where bytes that lie together in a page and in the image are, of every block: four arrays of int64.

    For block b, `bytes[n]` bytes at `address[n] + b * block_stride[n]` lie `offset[n]` bytes into its image.
    """

    address: Numbers
    block_stride: Numbers
    offset: Numbers
    bytes: Numbers

    def __post_init__(self) -> None:
        check_numbers(self.address, self.block_stride, self.offset, self.bytes)

    @cached_property
    def pointers(self) -> tuple[int, int, int, int]:
        """Where the four arrays are, in this order."""
        arrays = (self.address, self.block_stride, self.offset, self.bytes)
        first, second, third, fourth = (array.ctypes.data for array in arrays)
        return first, second, third, fourth


def check_numbers(*arrays: Numbers) -> None:
    """Raises `ValueError` unless these are what compiled code may read: it checks nothing itself."""
    for array in arrays:
        if array.dtype != np.int64 or array.shape != arrays[0].shape or not array.flags.c_contiguous:
            raise ValueError("numbers and addresses must be contiguous int64 arrays of one length")


def plan_spans(pages: Sequence[Page]) -> Spans:
    """The same pages as numbers; pages that follow each other without a gap are one span."""
    spans: list[list[int]] = []
    offset = 0
    for page in pages:
        last = spans[-1] if spans else None
        if last and last[0] + last[3] == page.address and last[1] == page.block_stride:
            last[3] += page.bytes
        else:
            spans.append([page.address, page.block_stride, offset, page.bytes])
        offset += page.bytes
    address, stride, offsets, sizes = np.array(spans, dtype=np.int64).reshape(-1, 4).T.copy()
    return Spans(address, stride, offsets, sizes)


@dataclass(frozen=True)
class GroupPages:
    """All layers of one KV cache group, of `blocks` blocks. A block's image has `block_bytes` bytes."""

    runs: tuple[Run, ...]
    spans: Spans
    block_bytes: int
    blocks: int

    @classmethod
    def of(cls, pages: Sequence[Page], blocks: int) -> GroupPages:
        return cls(plan_runs(pages, blocks), plan_spans(pages), sum(page.bytes for page in pages), blocks)

    def check(self, blocks: Numbers) -> None:
        """Raises `IndexError` unless all these blocks exist: no address may be made from another number."""
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self.blocks:
            raise IndexError(f"blocks 0 to {self.blocks - 1} exist, found {blocks.min()} to {blocks.max()}")

    def gather(self, block: int, image: Bytes) -> None:
        """Copies one block into `block_bytes` bytes at the start of `image`. The GIL is free meanwhile."""
        for run in self.runs:
            shape = run.device.shape[1:]
            np.copyto(image[run.offset : run.offset + run.bytes].reshape(shape), run.device[block])

    def scatter(self, block: int, image: Bytes) -> None:
        """The other way round."""
        for run in self.runs:
            shape = run.device.shape[1:]
            np.copyto(run.device[block], image[run.offset : run.offset + run.bytes].reshape(shape))


class Watch:
    """Keeps the tensors under registered pages alive, and knows when their memory is not where it was."""

    def __init__(self, owners: Sequence[Any]) -> None:
        self._owners = tuple(owners)
        self._addresses = [owner.data_ptr() for owner in owners]
        # Layers often share one storage, and this is asked before every copy: each storage once.
        self._storages = {_place(owner): owner for owner in owners}

    def check(self) -> None:
        """Raises `CacheMoved` when a tensor's memory was released or replaced since it was registered."""
        if any(_place(owner) != place for place, owner in self._storages.items()) or (
            [owner.data_ptr() for owner in self._owners] != self._addresses
        ):
            raise CacheMoved(
                "the engine's KV cache moved since it was registered (sleep mode): nothing is copied"
            )


class Group(Protocol):
    """All layers of one KV cache group."""

    @property
    def block_bytes(self) -> int: ...


_Group = TypeVar("_Group", bound=Group)


class Registered(Generic[_Group]):
    """The KV cache of one worker as registered: every group's pages, wherever they lie."""

    def __init__(self, groups: Sequence[_Group], blocks: int, owners: Sequence[Any] = ()) -> None:
        """`owners` are the tensors under the pages: kept alive, and watched for having moved."""
        self.groups = tuple(groups)
        self.blocks = blocks
        self._watch = Watch(owners)

    def shard_bytes(self, blocks_per_chunk: int) -> int:
        """Bytes that this rank writes for one chunk: what the largest group needs."""
        return blocks_per_chunk * max(group.block_bytes for group in self.groups)

    def check_in_place(self) -> None:
        """Raises `CacheMoved` when a tensor's memory was released or replaced since it was registered."""
        self._watch.check()


class PageTable(Registered[GroupPages]):
    """The KV cache of one worker in host memory."""

    @classmethod
    def of(cls, caches: Any) -> PageTable:
        """Reads vLLM's CanonicalKVCaches. Raises `UnusablePages` for memory the CPU cannot reach."""
        tensors = [entry.tensor for entry in caches.tensors]
        count = check_blocks(tensors)
        devices = sorted({str(tensor.device.type) for tensor in tensors})
        if devices != ["cpu"]:
            raise UnusablePages(
                f"kvhost's host worker copies KV caches in host memory, found device {', '.join(devices)}: "
                f"run vLLM on its CPU platform"
            )
        groups = []
        for refs in caches.group_data_refs:
            pages = [page_of(tensors[ref.tensor_idx], int(ref.page_size_bytes)) for ref in refs]
            groups.append(GroupPages.of(pages, count))
        return cls(groups, count, tensors)


def check_blocks(tensors: Sequence[Any]) -> int:
    """The number of blocks of a KV cache. Raises `UnusablePages` when there is none, or no one number."""
    if not tensors:
        raise UnusablePages("the engine registered no KV cache")
    blocks = {int(tensor.shape[0]) for tensor in tensors}
    if len(blocks) != 1:
        raise UnusablePages(f"the layers of a KV cache must have equally many blocks, found {sorted(blocks)}")
    return blocks.pop()


def _place(tensor: Any) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return int(storage.data_ptr()), int(storage.nbytes())


def page_of(tensor: Any, size: int) -> Page:
    """One layer's pages, `size` bytes each, from its (blocks, ...) tensor. Raises `UnusablePages`."""
    element = int(tensor.element_size())
    stride = int(tensor.stride(0)) * element
    contiguous = int(tensor[0].numel()) * element
    if size > contiguous or not tensor[0].is_contiguous() or stride < size:
        raise UnusablePages(
            f"a page of {size} bytes must lie in one piece inside its block, found blocks of {contiguous} "
            f"bytes at a distance of {stride}"
        )
    return Page(int(tensor.data_ptr()), size, stride)
