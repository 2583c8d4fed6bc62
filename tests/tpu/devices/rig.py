"""A runner without a model: arrays of random bits on a mesh, slots in ordinary memory, and hands on both."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvhost_connector.tpu.cache import WIDTHS, CacheLayout
from kvhost_connector.tpu.carrier import Carrier, Errand, Kind, Move
from kvhost_connector.tpu.moving import Programs
from tests.support.waiting import wait_for


@dataclass(frozen=True)
class Layer:
    """One array: the shape of a block (without the axis of blocks), its type, and how it is spread."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec


def mesh_of(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Every pattern may come: NaNs with payloads, negative zeros, denormals."""
    width = np.dtype(dtype).itemsize
    bits = rng.integers(0, 256, (*shape[:-1], shape[-1] * width), dtype=np.uint8)
    return bits.view(dtype)


def bits_of(array: Any) -> Any:
    host = np.asarray(array)
    return np.ascontiguousarray(host).view(WIDTHS[host.dtype.itemsize])


@functools.cache
def _programs(described: str, layout: CacheLayout) -> Programs:
    return Programs(layout)


def programs_of(layout: CacheLayout) -> Programs:
    """Those of an earlier rig with the same layout: compiling is most of what these tests do."""
    return _programs(layout.describe(), layout)


@dataclass
class Runner:
    kv_caches: list[Any]


@dataclass
class Rig:
    """A runner, its carrier, and a pool of slots.

    `groups`: for each KV cache group the numbers of its layers.
    """

    mesh: Mesh
    layers: Sequence[Layer]
    groups: Sequence[Sequence[int]]
    blocks: int
    slots: int = 16
    seed: int = 0
    staging_bytes: int = 1 << 24
    buckets: tuple[int, ...] = (1, 4, 16, 64)
    memory_kind: str = ""
    blocks_per_chunk: int = 1
    ended: dict[str, tuple[int | None, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.content = [random_bits(self.rng, (self.blocks, *it.shape), it.dtype) for it in self.layers]
        self.runner = Runner(self._arrays(self.content))
        self.layout = CacheLayout.of(self.runner.kv_caches, self.groups)
        self.programs = programs_of(self.layout)
        self.carrier = Carrier(
            self.runner,
            self.layout,
            self.programs,
            staging_bytes=self.staging_bytes,
            buckets=self.buckets,
            memory_kind=self.memory_kind,
        )
        self.slot_bytes = self.layout.shard_bytes(self.blocks_per_chunk)
        self.pool = np.full((self.slots, self.slot_bytes), 0xEE, dtype=np.uint8)
        self.refused = ""

    def _arrays(self, content: Sequence[Any]) -> list[Any]:
        # A copy of its own for each: on the CPU backend device arrays may share memory with numpy's.
        return [
            jax.device_put(np.array(host), NamedSharding(self.mesh, layer.spec))
            for host, layer in zip(content, self.layers, strict=True)
        ]

    def wipe(self) -> None:
        """Other bits everywhere."""
        self.content = [
            random_bits(self.rng, (self.blocks, *layer.shape), layer.dtype) for layer in self.layers
        ]
        self.runner.kv_caches = self._arrays(self.content)

    def place(self, slot: int) -> tuple[int, int]:
        row = self.pool[slot]
        return row.ctypes.data, row.size

    def errand(self, name: str, kind: Kind, moves: Sequence[Move], **more: Any) -> Errand:
        @contextmanager
        def opened() -> Iterator[Any]:
            if self.refused:
                raise ValueError(self.refused)
            yield self.place

        def done(copied: int | None, why: str) -> None:
            assert name not in self.ended, f"{name} ended twice"
            self.ended[name] = (copied, why)

        return Errand(kind, moves, opened, done, **more)

    def moves(self, group: int, blocks: Sequence[int], slots: Sequence[int]) -> list[Move]:
        return [
            Move(group, int(block), int(slot), 0, number)
            for number, (block, slot) in enumerate(zip(blocks, slots, strict=True))
        ]

    def carry(self, name: str, kind: Kind, moves: Sequence[Move], **more: Any) -> tuple[int | None, str]:
        """Carries one errand to its end."""
        self.carrier.add(self.errand(name, kind, moves, **more))
        return self.settle(name)

    def settle(self, name: str) -> tuple[int | None, str]:
        def over() -> bool:
            self.carrier.pump()
            return name in self.ended

        wait_for(over, 30.0, f"the end of {name}")
        return self.ended[name]

    def layer_bits(self, layer: int) -> Any:
        return bits_of(self.runner.kv_caches[layer])
