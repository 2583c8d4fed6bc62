"""How bytes move between the pages of blocks and their images in host memory, chosen once per worker.

`native` does it in one compiled call for many blocks; `numpy` in one call for each block and run of layers,
at a little more than half the speed. Both free the GIL meanwhile.
"""

from __future__ import annotations

import logging
from typing import Protocol

from kvhost_connector.config import CopyBy
from kvhost_connector.faults import Direction
from kvhost_connector.native import Kernel, Native, NativeMissing, load_native
from kvhost_connector.pages import GroupPages, Numbers, bytes_at

logger = logging.getLogger("vllm.kvhost.worker")

KEPT_BYTES = 1 << 20
"""A load of at most so many bytes is left in the processor's caches, where the next step finds it.

Measured as copy and first read together: stores past the caches win from 2 MiB on, which is where a core's
second-level cache ends; below they lose up to a tenth.
"""


class Copier(Protocol):
    """`name` tells a person what copies."""

    @property
    def name(self) -> str: ...

    def copy(self, group: GroupPages, direction: Direction, blocks: Numbers, images: Numbers) -> None:
        """Stores or loads block `blocks[n]` to or from its image at address `images[n]`, for every n.

        Images have `group.block_bytes` bytes, overlap nothing, and stay mapped until this returns. Raises
        `IndexError` for a block that does not exist, before a byte is copied.
        """


class NumpyCopier:
    """Copies with numpy alone."""

    name = "numpy"

    def copy(self, group: GroupPages, direction: Direction, blocks: Numbers, images: Numbers) -> None:
        group.check(blocks)
        move = group.gather if direction == "store" else group.scatter
        for block, image in zip(blocks.tolist(), images.tolist(), strict=True):
            move(block, bytes_at(image, group.block_bytes))


class NativeCopier:
    """Copies with the compiled library, by the best kernel or by one that is named."""

    def __init__(self, native: Native, kernel: Kernel | None = None) -> None:
        self._native = native
        self._kernel = native.kernel if kernel is None else kernel
        self.name = f"native-{self._kernel.name.lower()}"

    def copy(self, group: GroupPages, direction: Direction, blocks: Numbers, images: Numbers) -> None:
        group.check(blocks)
        kept = direction == "load" and len(blocks) * group.block_bytes <= KEPT_BYTES
        kernel = Kernel.PLAIN if kept else self._kernel
        self._native.copy(direction, group.spans, blocks, images, kernel)


def choose_copier(setting: CopyBy) -> Copier:
    """Raises `NativeMissing` when the compiled copying is asked for and not there."""
    if setting is CopyBy.NUMPY:
        return NumpyCopier()
    try:
        return NativeCopier(load_native())
    except NativeMissing as error:
        if setting is CopyBy.NATIVE:
            raise
        logger.warning("kvhost: blocks are copied by numpy, at about half the speed: %s", error)
        return NumpyCopier()
