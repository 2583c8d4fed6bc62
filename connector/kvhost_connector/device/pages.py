"""Where the bytes of a block lie in a device's memory, and at which addresses of the pool they belong.

The image of a block in a slot is the host worker's: the pages of its group's layers, one after another and
without padding; a chunk's image is its blocks' images in order. Pages that lie side by side (all layers of a
block, in a cross-layer layout) are one fragment: one copy a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvhost_connector.pages import Numbers, Page, Registered, UnusablePages, check_blocks, page_of
from kvhost_connector.planning import Plan


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

    From `starts[n]` to `ends[n]` lies what the n-th chunk may use of its slot; all inside the mapping.
    """

    blocks: Numbers
    rows: Numbers
    group_sizes: tuple[int, ...]
    starts: Numbers
    ends: Numbers
    nbytes: int


def plan_copy(pages: DevicePages, plan: Plan, places: Callable[[Sequence[int], int], list[int]]) -> CopyPlan:
    """Turns a job's plan, whose blocks are known to exist, into blocks and addresses; null blocks are left
    out.

    `places` gives the address of this rank's part of each of some slots, and raises for a slot that is not
    mapped, or has no room there for as many bytes as it is told.
    """
    blocks, rows, starts, ends = ([np.zeros(0, dtype=np.int64)] for _ in range(4))
    sizes: list[int] = []
    begin = nbytes = 0
    for group, end in zip(pages.groups, plan.ends, strict=True):
        here = slice(begin, end)
        first, last = plan.chunk_span(begin, end)
        begin = end
        sizes.append(0)
        if first == last:
            continue
        needed = plan.reach(here) * group.block_bytes
        at = np.array(places(plan.slots[first:last], needed), dtype=np.int64)
        found, images = plan.images(here, first, at, group.block_bytes)
        blocks.append(found)
        rows.append(images)
        starts.append(at)
        ends.append(at + needed)
        sizes[-1] = len(found)
        nbytes += len(found) * group.block_bytes
    all_blocks, all_rows, all_starts, all_ends = map(np.concatenate, (blocks, rows, starts, ends))
    return CopyPlan(all_blocks, all_rows, tuple(sizes), all_starts, all_ends, nbytes)
