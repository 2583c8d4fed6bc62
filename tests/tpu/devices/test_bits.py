"""Blocks come back bit by bit: every type, spread at random over devices, 1 to 500 blocks in any order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kvhost_connector.tpu.cache import UnusableCache
from tests.tpu.devices.rig import Layer, Rig, bits_of, mesh_of

HEADS = P(None, None, "model")


def layers(
    dtype: Any, count: int = 2, spec: P = HEADS, shape: tuple[int, ...] = (4, 8, 2, 16)
) -> list[Layer]:
    return [Layer(shape, dtype, spec)] * count


CASES: dict[str, tuple[dict[str, int], list[Layer], list[list[int]]]] = {
    "one device": ({"model": 1}, layers(jnp.bfloat16), [[0, 1]]),
    "two halves": ({"model": 2}, layers(jnp.float32, 3), [[0, 1, 2]]),
    "eight heads": ({"model": 8}, layers(jnp.bfloat16), [[0, 1]]),
    "e4m3": ({"model": 4}, layers(jnp.float8_e4m3fn), [[0, 1]]),
    "e5m2": ({"model": 4}, layers(jnp.float8_e5m2), [[0, 1]]),
    "two axes": (
        {"data": 1, "dcp": 2, "model": 4},
        layers(jnp.bfloat16, spec=P("data", "dcp", "model")),
        [[0, 1]],
    ),
    "reversed axes": (
        {"a": 2, "model": 4},
        layers(jnp.float32, spec=P(None, None, ("model", "a"))),
        [[0, 1]],
    ),
    "copies": ({"data": 2, "model": 4}, layers(jnp.bfloat16), [[0, 1]]),
    "everywhere the same": ({"model": 8}, layers(jnp.bfloat16, spec=P()), [[0, 1]]),
    "layers of many shapes": (
        {"model": 4},
        [
            Layer((4, 8, 2, 16), jnp.bfloat16, HEADS),
            Layer((4, 4, 2, 32), jnp.bfloat16, HEADS),
            Layer((4, 8, 1, 16), jnp.float32, HEADS),
            Layer((4, 4, 4, 16), jnp.float8_e4m3fn, HEADS),
            Layer((4, 24), jnp.bfloat16, P()),
        ],
        [[0, 1, 2, 3, 4]],
    ),
    "groups that overlay each other": (
        {"model": 2},
        layers(jnp.bfloat16, 3),
        [[0, 1], [0, 2], [1]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_save_wipe_load(name: str) -> None:
    axes, kinds, groups = CASES[name]
    rig = Rig(mesh_of(**axes), kinds, groups, blocks=64, slots=64, seed=len(name))
    for group, members in enumerate(groups):
        count = int(rig.rng.integers(1, 40))
        blocks = rig.rng.permutation(np.arange(1, 64))[:count]
        others = rig.rng.permutation(np.arange(1, 64))[:count]
        slots = rig.rng.permutation(64)[:count]
        want = [rig.layer_bits(layer)[blocks] for layer in members]
        layout = rig.layout.groups[group]
        assert rig.carry(f"save {group}", "store", rig.moves(group, blocks, slots)) == (
            count * layout.block_bytes,
            "",
        )
        rig.wipe()
        before = [rig.layer_bits(layer) for layer in range(len(kinds))]
        loaded, problem = rig.carry(f"load {group}", "load", rig.moves(group, others, slots))
        assert (loaded, problem) == (count * layout.block_bytes, "")
        untouched = np.setdiff1d(np.arange(64), others)
        for layer in range(len(kinds)):
            after = rig.layer_bits(layer)
            if layer in members:
                assert np.array_equal(after[others], want[members.index(layer)])
                assert np.array_equal(after[untouched], before[layer][untouched])
            else:
                assert np.array_equal(after, before[layer])


@pytest.mark.parametrize("count", [1, 2, 5, 63, 64, 65, 500])
def test_any_number_of_blocks(count: int) -> None:
    rig = Rig(mesh_of(model=8), layers(jnp.bfloat16, shape=(2, 8, 2, 4)), [[0, 1]], blocks=512, slots=512)
    blocks = rig.rng.permutation(np.arange(1, 512))[:count]
    slots = rig.rng.permutation(512)[:count]
    want = [rig.layer_bits(layer)[blocks] for layer in range(2)]
    assert rig.carry("save", "store", rig.moves(0, blocks, slots))[0]
    rig.wipe()
    assert rig.carry("load", "load", rig.moves(0, blocks[::-1], slots[::-1]))[0]
    for layer in range(2):
        assert np.array_equal(rig.layer_bits(layer)[blocks], want[layer])
    assert rig.carrier.staging.free == rig.carrier.staging.total


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_through_host_memory_of_a_kind(kind: str) -> None:
    rig = Rig(mesh_of(model=4), layers(jnp.bfloat16), [[0, 1]], blocks=16, memory_kind=kind)
    blocks, slots = [3, 9, 1, 12, 5], [4, 0, 2, 9, 7]
    want = rig.layer_bits(0)[blocks]
    assert rig.carry("save", "store", rig.moves(0, blocks, slots))[0]
    rig.wipe()
    assert rig.carry("load", "load", rig.moves(0, blocks, slots))[0]
    assert np.array_equal(rig.layer_bits(0)[blocks], want)


def test_every_part_has_its_own_place() -> None:
    """The image of a block is the bytes of device after device: what one host of several would write."""
    rig = Rig(mesh_of(model=4), layers(jnp.bfloat16), [[0, 1]], blocks=8)
    assert rig.carry("save", "store", rig.moves(0, [5], [3]))[0]
    part = rig.layout.groups[0].part_bytes
    expected = b"".join(
        bits_of(rig.content[layer][5][:, 2 * device : 2 * device + 2]).tobytes()
        for device in range(4)
        for layer in range(2)
    )
    assert len(expected) == 4 * part
    assert rig.pool[3].tobytes() == expected


def test_several_blocks_of_a_chunk() -> None:
    rig = Rig(mesh_of(model=2), layers(jnp.float32), [[0, 1]], blocks=32, blocks_per_chunk=4)
    moves = [
        move._replace(position=number % 4, slot=number // 4)
        for number, move in enumerate(rig.moves(0, range(1, 9), range(8)))
    ]
    want = rig.layer_bits(1)[1:9]
    assert rig.carry("save", "store", moves)[0]
    rig.wipe()
    assert rig.carry("load", "load", moves[2:])[0]
    assert np.array_equal(rig.layer_bits(1)[3:9], want[2:])


def test_what_comes_after_a_save_is_not_in_it() -> None:
    """A forward pass that consumes and rewrites the cache follows at once."""
    rig = Rig(mesh_of(model=4), layers(jnp.bfloat16, shape=(8, 8, 2, 64)), [[0, 1]], blocks=128, slots=128)
    overwrite = jax.jit(lambda caches: [cache * 0 for cache in caches], donate_argnums=0)
    blocks = list(range(1, 101))
    want = rig.layer_bits(0)[blocks]
    overwrite([array for array in rig._arrays(rig.content)])
    rig.carrier.add(rig.errand("save", "store", rig.moves(0, blocks, range(100))))
    rig.carrier.pump()
    rig.runner.kv_caches = overwrite(rig.runner.kv_caches)
    assert rig.settle("save")[0]
    rig.wipe()
    assert rig.carry("load", "load", rig.moves(0, blocks, range(100)))[0]
    assert np.array_equal(rig.layer_bits(0)[blocks], want)


def test_a_slot_may_change_as_soon_as_its_load_is_done() -> None:
    """On the CPU backend a device array can be the very memory it was made from."""
    rig = Rig(mesh_of(model=4), layers(jnp.bfloat16), [[0, 1]], blocks=64)
    blocks, slots = [4, 7, 11], [0, 1, 2]
    want = rig.layer_bits(1)[blocks]
    assert rig.carry("save", "store", rig.moves(0, blocks, slots))[0]
    kept = rig.pool.copy()
    rig.wipe()
    for round_ in range(5):
        rig.pool[:] = kept
        assert rig.carry(f"load {round_}", "load", rig.moves(0, blocks, slots))[0]
        rig.pool[:] = 0x55
        assert np.array_equal(rig.layer_bits(1)[blocks], want)


def test_programs_are_a_handful_and_made_ahead() -> None:
    rig = Rig(mesh_of(model=4), layers(jnp.bfloat16), [[0, 1]], blocks=127, slots=128)
    seen: list[tuple[int, int]] = []
    rig.programs.compile_ahead(rig.carrier.buckets, lambda done, total, _: seen.append((done, total)))
    assert seen[-1] == (8, 8)
    before = rig.layer_bits(0)
    assert np.array_equal(before, bits_of(rig.content[0])), "making programs must not touch the cache"
    for number, count in enumerate((1, 3, 17, 100)):
        assert rig.carry(f"save {number}", "store", rig.moves(0, range(1, count + 1), range(count)))[0]
        assert rig.carry(f"load {number}", "load", rig.moves(0, range(1, count + 1), range(count)))[0]
    assert rig.programs.compiled == 8


def test_saves_of_several_errands_are_one_transfer() -> None:
    rig = Rig(mesh_of(model=4), layers(jnp.bfloat16), [[0, 1]], blocks=64, slots=32)
    for number in range(16):
        rig.carrier.add(rig.errand(f"save {number}", "store", rig.moves(0, [number + 1], [number])))
    rig.carrier.pump()
    assert rig.carrier.transfers == 1
    for number in range(16):
        assert rig.settle(f"save {number}")[0]


@pytest.mark.parametrize(
    ("axes", "kinds", "says"),
    [
        ({"data": 2, "model": 4}, layers(jnp.bfloat16, spec=P("data", None, "model")), "data parallel"),
        ({"model": 2}, layers(jnp.int4), "int4"),
    ],
)
def test_what_is_refused(axes: dict[str, int], kinds: list[Layer], says: str) -> None:
    arrays = [
        jax.device_put(
            jnp.zeros((8, *layer.shape), layer.dtype), jax.NamedSharding(mesh_of(**axes), layer.spec)
        )
        for layer in kinds
    ]
    from kvhost_connector.tpu.cache import CacheLayout

    with pytest.raises(UnusableCache, match=says):
        CacheLayout.of(arrays, [[0, 1]])


def test_descriptions_differ_where_bytes_lie_elsewhere() -> None:
    def described(**axes: int) -> str:
        return Rig(mesh_of(**axes), layers(jnp.bfloat16), [[0, 1]], blocks=8).layout.describe()

    assert described(model=4) == described(model=4)
    assert described(model=4) != described(model=2)
