"""How the KV cache of a JAX runner is cut: layers, groups, devices, and the image of a block made of them.

The image of one block is one part for each device shard, one after another; a part is the shard's bytes of
every array of the group, first those of one width of number, then of the next. Devices that hold copies of
the same bytes share a part. Nothing is assumed about the order of axes inside a block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Bytes of a number, and the type whose values stand for its bits: they go through no arithmetic."""


class UnusableCache(ValueError):
    """This KV cache cannot be moved by the JAX worker; the message is one line."""


@dataclass(frozen=True)
class Slab:
    """One array of the runner's list.

    `index` is its place in the list, `local` the shape of one block on one device.
    """

    index: int
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    local: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bytes of one number."""
        return int(np.dtype(self.dtype).itemsize)

    @property
    def numbers(self) -> int:
        """Numbers of one block on one device."""
        return math.prod(self.local)


@dataclass(frozen=True)
class Lane:
    """The arrays of a group whose numbers have one width: they travel as one array of unsigned numbers.

    `columns` is how many numbers one block has on one device, `offset` where they begin in a part (bytes).
    """

    width: int
    members: tuple[int, ...]
    columns: int
    offset: int

    @property
    def bytes(self) -> int:
        return self.columns * self.width


@dataclass(frozen=True)
class GroupLayout:
    """One KV cache group: the blocks of a chunk of this group are cut from these arrays.

    Attributes:
        slabs: its arrays, in layer order, each once.
        lanes: the same by width.
        axes: mesh axes over which a block is spread.
        shards: parts of an image; devices beyond that hold copies.
    """

    slabs: tuple[Slab, ...]
    lanes: tuple[Lane, ...]
    axes: tuple[str, ...]
    shards: int

    @property
    def part_bytes(self) -> int:
        """Bytes of one block on one device."""
        return sum(lane.bytes for lane in self.lanes)

    @property
    def block_bytes(self) -> int:
        """Bytes of the image of one block."""
        return self.shards * self.part_bytes


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache of one runner. `blocks` is the number of blocks, the null block included."""

    mesh: Mesh
    blocks: int
    groups: tuple[GroupLayout, ...]

    @classmethod
    def of(cls, kv_caches: Sequence[Any], groups: Sequence[Sequence[int]]) -> CacheLayout:
        """Reads a runner's list of arrays. `groups`: for each KV cache group the indices of its arrays.

        Raises `UnusableCache`.
        """
        used = sorted({index for group in groups for index in group})
        if not used:
            raise UnusableCache("the engine registered no KV cache")
        for index in used:
            if not isinstance(kv_caches[index], jax.Array):
                raise UnusableCache(
                    f"entry {index} of the KV cache is a {type(kv_caches[index]).__name__}: kvhost moves "
                    f"layers that are one array each, state of several arrays (Mamba) is not served"
                )
        mesh = _mesh_of([kv_caches[index] for index in used])
        slabs = {index: _slab(index, kv_caches[index], mesh) for index in used}
        counts = {slab.shape[0] for slab in slabs.values()}
        if len(counts) != 1:
            raise UnusableCache(
                f"the layers of a KV cache must have equally many blocks, found {sorted(counts)}"
            )
        return cls(
            mesh, counts.pop(), tuple(_group([slabs[index] for index in group], mesh) for group in groups)
        )

    def shard_bytes(self, blocks_per_chunk: int) -> int:
        """Bytes of a chunk, all devices together: what the largest group needs."""
        return blocks_per_chunk * max(group.block_bytes for group in self.groups)

    def sharding(self, group: GroupLayout) -> NamedSharding:
        """How rows of images lie on the devices: shape (blocks, shards x columns), spread over columns."""
        return NamedSharding(self.mesh, rows_spec(group))

    @property
    def everywhere(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def check(self, kv_caches: Sequence[Any]) -> None:
        """Raises `UnusableCache` when the runner's arrays are not those of this layout any more."""
        for group in self.groups:
            for slab in group.slabs:
                array = kv_caches[slab.index] if slab.index < len(kv_caches) else None
                if not isinstance(array, jax.Array) or array.is_deleted():
                    raise UnusableCache("the engine's KV cache is gone (sleep mode): nothing is copied")
                if array.shape != slab.shape or array.dtype != slab.dtype:
                    raise UnusableCache(
                        f"the engine's KV cache changed from {slab.dtype}{slab.shape} to "
                        f"{array.dtype}{array.shape} since it was registered: nothing is copied"
                    )

    def describe(self) -> str:
        """Canonical JSON of everything that decides where bytes lie in an image."""
        axes = {name: int(size) for name, size in self.mesh.shape.items() if size > 1}
        groups = [
            {
                "axes": list(group.axes),
                "shards": group.shards,
                "layers": [
                    {
                        "dtype": str(slab.dtype),
                        "shape": list(slab.shape[1:]),
                        "local": list(slab.local),
                        "spec": [_axes_of(entry) for entry in slab.spec],
                    }
                    for slab in group.slabs
                ],
            }
            for group in self.groups
        ]
        return json.dumps({"mesh": axes, "groups": groups}, sort_keys=True, separators=(",", ":"))


def rows_spec(group: GroupLayout) -> PartitionSpec:
    return PartitionSpec(None, group.axes or None)


def shard_numbers(sharding: NamedSharding, shape: tuple[int, int], columns: int) -> dict[Any, int]:
    """device -> the part of the image that it holds of rows of this shape."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: (index[1].start or 0) // columns for device, index in indices.items() if index}


def _mesh_of(arrays: Sequence[Any]) -> Mesh:
    meshes = {array.sharding.mesh for array in arrays if isinstance(array.sharding, NamedSharding)}
    if not meshes and all(len(array.sharding.device_set) == 1 for array in arrays):
        devices = {device for array in arrays for device in array.sharding.device_set}
        if len(devices) == 1:
            return Mesh(np.array(list(devices)), ("device",))
    if len(meshes) != 1 or not all(isinstance(array.sharding, NamedSharding) for array in arrays):
        kinds = sorted({type(array.sharding).__name__ for array in arrays})
        raise UnusableCache(
            f"all layers of a KV cache must lie on one mesh, found {len(meshes)} meshes ({', '.join(kinds)})"
        )
    return meshes.pop()


def _axes_of(entry: Any) -> list[str]:
    if entry is None:
        return []
    return [entry] if isinstance(entry, str) else list(entry)


def _slab(index: int, array: Any, mesh: Mesh) -> Slab:
    width = int(np.dtype(array.dtype).itemsize)
    if width not in WIDTHS or str(array.dtype).startswith(("int4", "uint4", "int2", "uint2", "float4")):
        raise UnusableCache(
            f"layer {index} has numbers of type {array.dtype}: kvhost moves numbers of 8, 16 or 32 bits"
        )
    spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else PartitionSpec()
    spread = [_axes_of(entry) for entry in spec]
    over_blocks = [axis for axis in (spread[0] if spread else []) if mesh.shape[axis] > 1]
    if over_blocks:
        raise UnusableCache(
            f"the blocks of layer {index} are spread over mesh axis {', '.join(over_blocks)} (data parallel "
            f"attention): kvhost serves engines in which every device has its part of every block"
        )
    local = array.sharding.shard_shape(array.shape)[1:]
    return Slab(index, tuple(array.shape), array.dtype, spec, tuple(local))


def _group(slabs: Sequence[Slab], mesh: Mesh) -> GroupLayout:
    once = {slab.index: slab for slab in slabs}
    ordered = tuple(once.values())
    used = {axis for slab in ordered for entry in slab.spec for axis in _axes_of(entry)}
    axes = tuple(axis for axis in mesh.axis_names if axis in used and mesh.shape[axis] > 1)
    lanes: list[Lane] = []
    offset = 0
    for width in sorted({slab.width for slab in ordered}, reverse=True):
        members = tuple(number for number, slab in enumerate(ordered) if slab.width == width)
        lane = Lane(width, members, sum(ordered[number].numbers for number in members), offset)
        offset += lane.bytes
        lanes.append(lane)
    return GroupLayout(
        ordered, tuple(lanes), axes, int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))
    )
