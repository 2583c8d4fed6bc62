"""Where the bytes of a block lie in a device's memory, and at which addresses of the pool they belong.

The image of a block in a slot is the host worker's: the pages of its group's layers, one after another and
without padding; a chunk's image is its blocks' images in order. Pages that lie side by side (all layers of a
block, in a cross-layer layout) are one fragment: one copy a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvhost_connector.pages import NULL_BLOCK, Page, Piece, Registered, UnusablePages, check_blocks, page_of


@dataclass(frozen=True)
class Fragment:
    """Bytes that are copied in one piece for each block.

    Attributes:
        address: of block 0's, in the device's memory.
        bytes: of one block.
        block_stride: distance between blocks in the device's memory.
        offset: of these bytes in the image of a block.
        tensor: the first of the tensors they belong to; block `b`'s bytes begin with its row `b`.
    """

    address: int
    bytes: int
    block_stride: int
    offset: int
    tensor: Any

    def view(self) -> Any:
        """An int8 tensor of shape (blocks, bytes) over these bytes, with the device's distances."""
        return self.tensor.as_strided(
            (self.tensor.shape[0], self.bytes), (self.block_stride, 1), self.tensor.storage_offset()
        )


@dataclass(frozen=True)
class DeviceGroup:
    """All layers of one KV cache group."""

    fragments: tuple[Fragment, ...]
    block_bytes: int


class DevicePages(Registered[DeviceGroup]):
    """The KV cache of one worker as registered: every group's fragments, in the memory of one device."""

    def __init__(
        self, groups: Sequence[DeviceGroup], blocks: int, device: int, owners: Sequence[Any] = ()
    ) -> None:
        super().__init__(groups, blocks, owners)
        self.device = device

    @classmethod
    def of(cls, caches: Any) -> DevicePages:
        """Reads vLLM's CanonicalKVCaches. Raises `UnusablePages` for what cannot be copied."""
        tensors = [entry.tensor for entry in caches.tensors]
        blocks = check_blocks(tensors)
        devices = sorted({str(tensor.device) for tensor in tensors})
        if len(devices) > 1 or devices[0].startswith("cpu"):
            raise UnusablePages(
                f"the KV cache of a worker on this platform must lie in the memory of its one device, found "
                f"{', '.join(devices)}"
            )
        if any(tensor.element_size() != 1 for tensor in tensors):
            raise UnusablePages("vLLM hands KV caches over as bytes, found tensors of wider elements")
        groups = []
        for refs in caches.group_data_refs:
            pages = [
                (page_of(tensors[ref.tensor_idx], int(ref.page_size_bytes)), tensors[ref.tensor_idx])
                for ref in refs
            ]
            groups.append(DeviceGroup(_fragments(pages), sum(page.bytes for page, _ in pages)))
        return cls(groups, blocks, int(tensors[0].device.index or 0), tensors)


def _fragments(pages: Sequence[tuple[Page, Any]]) -> tuple[Fragment, ...]:
    found: list[Fragment] = []
    offset = 0
    for page, tensor in pages:
        last = found[-1] if found else None
        if (
            last is not None
            and last.address + last.bytes == page.address
            and last.block_stride == page.block_stride
            and last.bytes + page.bytes <= last.block_stride
            and last.tensor.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        ):
            found[-1] = Fragment(
                last.address, last.bytes + page.bytes, last.block_stride, last.offset, last.tensor
            )
        else:
            found.append(Fragment(page.address, page.bytes, page.block_stride, offset, tensor))
        offset += page.bytes
    return tuple(found)


@dataclass(frozen=True)
class CopyPlan:
    """Which blocks go where: block `blocks[n]` to the image at address `rows[n]`, group after group.

    `spans` are the (address, bytes) of the slots' parts, all inside the mapping.
    """

    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    group_sizes: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    nbytes: int


class OutOfPlace(ValueError):
    """A job names bytes that are not its own; the message is one line."""


def plan_copy(
    pages: DevicePages, pieces: Sequence[Piece], shard: Callable[[int], tuple[int, int]]
) -> CopyPlan:
    """Turns a job's pieces, ordered by group, into blocks and addresses.

    `shard` gives address and size of this rank's part of a slot, and raises for a slot that is not mapped.
    Everything is checked before it becomes an address; null blocks are left out. Raises `OutOfPlace`.
    """
    blocks: list[int] = []
    rows: list[int] = []
    sizes = [0] * len(pages.groups)
    spans: list[tuple[int, int]] = []
    nbytes = 0
    for piece in pieces:
        group = pages.groups[piece.group]
        size = group.block_bytes
        address, room = shard(piece.slot)
        needed = (piece.position + len(piece.blocks)) * size
        if piece.position < 0 or needed > room:
            raise OutOfPlace(f"a chunk of this worker needs {needed} bytes, its place in a slot has {room}")
        spans.append((address, needed))
        for row, block in enumerate(piece.blocks, piece.position):
            if block == NULL_BLOCK:
                continue
            if not 0 < block < pages.blocks:
                raise OutOfPlace(f"block {block} does not exist: the KV cache has {pages.blocks} blocks")
            blocks.append(block)
            rows.append(address + row * size)
            sizes[piece.group] += 1
            nbytes += size
    return CopyPlan(tuple(blocks), tuple(rows), tuple(sizes), tuple(spans), nbytes)
