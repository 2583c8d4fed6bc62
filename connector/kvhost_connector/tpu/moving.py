"""The programs that run on the devices: rows of bits out of the KV cache, and back into it.

One program takes a fixed number of blocks of one group. Each device handles its own part (`shard_map`), so
nothing crosses between devices. Rows are unsigned numbers: they are moved, never computed with.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from kvhost_connector.tpu.cache import WIDTHS, CacheLayout, GroupLayout, Slab, rows_spec

Progress = Callable[[int, int, float], None]
"""Programs done, programs in all, seconds since the first."""


@functools.cache
def moves_exactly(dtype: Any) -> bool:
    """Whether this backend keeps every bit of such numbers when blocks are picked and placed.

    XLA for CPU computes with some narrow types as if they were wider, even where they are only moved: NaNs
    lose their payload. Tried out with every pattern of 8 or 16 bits, or those of 32 bits that are at risk.
    """
    width = np.dtype(dtype).itemsize
    if jnp.issubdtype(dtype, jnp.integer):
        return True
    if width < 4:
        patterns = np.arange(1 << (8 * width), dtype=WIDTHS[width])
    else:
        edges = np.array([0, 1, 0x7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00001], dtype=np.uint32)
        patterns = np.concatenate([edges, edges | np.uint32(0x80000000), np.arange(50, dtype=np.uint32)])
        patterns = patterns.astype(np.uint32)
    rows = jax.device_put(patterns.reshape(2, -1))
    ids = jax.device_put(np.array([2, 0], dtype=np.int32))

    def there_and_back(cache: Any, rows: Any, ids: Any) -> Any:
        cache = cache.at[ids].set(lax.bitcast_convert_type(rows, dtype), mode="drop", unique_indices=True)
        return cache, lax.bitcast_convert_type(cache[ids], WIDTHS[width])

    cache = jnp.zeros((3, rows.shape[1]), dtype=dtype)
    placed, picked = jax.jit(there_and_back)(cache, rows, ids)
    held = np.asarray(placed)[np.array([2, 0])].view(WIDTHS[width])
    return bool(np.array_equal(np.asarray(picked), rows) and np.array_equal(held, rows))


class Programs:
    """Compiled programs for one cache. Call everything on the thread that drives the runner."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        kinds = {slab.dtype for group in layout.groups for slab in group.slabs}
        # Where a type is not moved exactly as it is, the program looks at the cache as at bits; XLA may then
        # need a copy of a layer while it runs.
        self._exact = {str(kind): moves_exactly(kind) for kind in kinds}
        self._compiled: dict[tuple[str, int, int], Any] = {}

    @property
    def compiled(self) -> int:
        """Programs that exist."""
        return len(self._compiled)

    def compile_ahead(self, buckets: Sequence[Sequence[int]], progress: Progress | None = None) -> None:
        """Makes all programs; `buckets` are the sizes of each group."""
        todo = [
            (kind, group, size)
            for group, sizes in enumerate(buckets)
            for size in sizes
            for kind in ("gather", "scatter")
        ]
        start = time.monotonic()
        for number, (kind, group, size) in enumerate(todo, 1):
            self._program(kind, group, size)
            if progress is not None:
                progress(number, len(todo), time.monotonic() - start)

    def gather(self, kv_caches: Sequence[Any], group: int, blocks: Sequence[int], size: int) -> list[Any]:
        """Starts picking blocks; returns one array of rows for each lane, of shape (size, shards x columns).

        Rows beyond `blocks` hold some other block. Later changes of the cache are not seen in them.
        """
        layout = self.layout.groups[group]
        ids = np.zeros(size, dtype=np.int32)
        ids[: len(blocks)] = blocks
        caches = [kv_caches[slab.index] for slab in layout.slabs]
        rows: list[Any] = self._program("gather", group, size)(caches, self._everywhere(ids))
        return rows

    def scatter(
        self, kv_caches: Sequence[Any], group: int, blocks: Sequence[int | None], size: int, rows: Any
    ) -> tuple[list[Any], Any]:
        """Starts placing rows; returns the new list of arrays and a small array that is ready when they are.

        The arrays given are consumed. A row whose block is None, and those beyond `blocks`, go nowhere.
        """
        layout = self.layout.groups[group]
        # Places that do not exist, each another one: such rows are dropped.
        ids = self.layout.blocks + np.arange(size, dtype=np.int32)
        for row, block in enumerate(blocks):
            if block is not None:
                ids[row] = block
        caches = [kv_caches[slab.index] for slab in layout.slabs]
        placed, token = self._program("scatter", group, size)(caches, rows, self._everywhere(ids))
        updated = list(kv_caches)
        for slab, array in zip(layout.slabs, placed, strict=True):
            updated[slab.index] = array
        return updated, token

    def _everywhere(self, ids: Any) -> Any:
        return jax.device_put(ids, self.layout.everywhere)

    def _program(self, kind: str, group: int, size: int) -> Any:
        key = (kind, group, size)
        if key not in self._compiled:
            self._compiled[key] = self._compile(kind, self.layout.groups[group], size)
        return self._compiled[key]

    def _compile(self, kind: str, group: GroupLayout, size: int) -> Any:
        mesh, sharding = self.layout.mesh, self.layout.sharding(group)
        specs = [slab.spec for slab in group.slabs]
        row_specs = [rows_spec(group) for _ in group.lanes]
        everyone = PartitionSpec(mesh.axis_names)
        caches = [
            jax.ShapeDtypeStruct(slab.shape, slab.dtype, sharding=NamedSharding(mesh, slab.spec))
            for slab in group.slabs
        ]
        ids = jax.ShapeDtypeStruct((size,), np.int32, sharding=self.layout.everywhere)
        rows = [
            jax.ShapeDtypeStruct((size, group.shards * lane.columns), WIDTHS[lane.width], sharding=sharding)
            for lane in group.lanes
        ]

        def gather(caches: Any, ids: Any) -> Any:
            return [
                jnp.concatenate([self._pick(group.slabs[i], caches[i], ids) for i in lane.members], axis=1)
                for lane in group.lanes
            ]

        def scatter(caches: Any, rows: Any, ids: Any) -> Any:
            placed: dict[int, Any] = {}
            for lane, bits in zip(group.lanes, rows, strict=True):
                start = 0
                for i in lane.members:
                    slab = group.slabs[i]
                    part = bits[:, start : start + slab.numbers]
                    placed[i] = self._place(slab, caches[i], part.reshape(size, *slab.local), ids)
                    start += slab.numbers
            result = [placed[i] for i in range(len(group.slabs))]
            return result, sum(_witness(array, ids) for array in result).reshape(1)

        if kind == "gather":
            program = jax.shard_map(
                gather, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=row_specs, check_vma=False
            )
            return jax.jit(program).lower(caches, ids).compile()
        program = jax.shard_map(
            scatter,
            mesh=mesh,
            in_specs=(specs, row_specs, PartitionSpec()),
            out_specs=(specs, everyone),
            check_vma=False,
        )
        return jax.jit(program, donate_argnums=0).lower(caches, rows, ids).compile()

    def _pick(self, slab: Slab, cache: Any, ids: Any) -> Any:
        bits = WIDTHS[slab.width]
        if self._exact[str(slab.dtype)]:
            picked = lax.bitcast_convert_type(cache[ids], bits)
        else:
            picked = lax.bitcast_convert_type(cache, bits)[ids]
        return picked.reshape(ids.shape[0], slab.numbers)

    def _place(self, slab: Slab, cache: Any, rows: Any, ids: Any) -> Any:
        if self._exact[str(slab.dtype)]:
            rows = lax.bitcast_convert_type(rows, slab.dtype)
            return cache.at[ids].set(rows, mode="drop", unique_indices=True)
        bits = lax.bitcast_convert_type(cache, WIDTHS[slab.width])
        placed = bits.at[ids].set(rows, mode="drop", unique_indices=True)
        return lax.bitcast_convert_type(placed, slab.dtype)


def _witness(cache: Any, ids: Any) -> Any:
    """A number that depends on the placed array, so that nobody has it before the array is there."""
    block = jnp.clip(ids[0], 0, cache.shape[0] - 1)
    first = cache[block].reshape(-1)[:1]
    return lax.bitcast_convert_type(first, WIDTHS[np.dtype(cache.dtype).itemsize]).astype(jnp.uint32)[0]
