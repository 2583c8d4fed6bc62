"""Errands: bounded device memory, failures that stay with their errand, and withdrawal."""

from __future__ import annotations

import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kvhost_connector.tpu.carrier import CacheLost, Move
from tests.support.waiting import wait_for
from tests.tpu.devices.rig import Layer, Rig, mesh_of

LAYERS = [Layer((4, 8, 2, 16), jnp.bfloat16, P(None, None, "model"))] * 2


def rig(**more: Any) -> Rig:
    return Rig(mesh_of(model=2), LAYERS, [[0, 1]], **{"blocks": 128, "slots": 128, **more})


def test_a_long_save_stays_within_the_budget() -> None:
    """Upstream's device halts when it saves a prompt of 8,192 tokens at once."""
    part = rig(blocks=8).layout.groups[0].part_bytes
    bench = rig(blocks=600, slots=520, staging_bytes=40 * part, buckets=(1, 8, 16, 32, 64))
    assert bench.carrier.buckets == [(1, 8, 16, 32)]
    blocks = bench.rng.permutation(np.arange(1, 600))[:512]
    want = bench.layer_bits(0)[blocks]
    assert bench.carry("save", "store", bench.moves(0, blocks, range(512)))[0]
    assert bench.carrier.staging.peak <= 40 * part
    assert bench.carrier.transfers >= 16
    bench.wipe()
    assert bench.carry("load", "load", bench.moves(0, blocks, range(512)))[0]
    assert bench.carrier.staging.peak <= 40 * part
    assert np.array_equal(bench.layer_bits(0)[blocks], want)
    assert bench.carrier.staging.free == 40 * part


def test_a_budget_for_one_block_is_enough() -> None:
    part = rig(blocks=8).layout.groups[0].part_bytes
    bench = rig(staging_bytes=part)
    assert bench.carry("save", "store", bench.moves(0, range(1, 8), range(7)))[0]
    assert bench.carry("load", "load", bench.moves(0, range(1, 8), range(7)))[0]
    with pytest.raises(ValueError, match="staging_bytes must hold one block"):
        rig(staging_bytes=part - 1)


def test_refused_slots_fail_the_errand_and_touch_nothing() -> None:
    bench = rig()
    before = bench.pool.copy()
    bench.refused = "the daemon took its slots back"
    assert bench.carry("save", "store", bench.moves(0, [1, 2], [0, 1])) == (None, bench.refused)
    assert np.array_equal(bench.pool, before)
    cache = bench.layer_bits(0)
    assert bench.carry("load", "load", bench.moves(0, [1, 2], [0, 1])) == (None, bench.refused)
    assert np.array_equal(bench.layer_bits(0), cache)
    bench.refused = ""
    assert bench.carry("again", "store", bench.moves(0, [1, 2], [0, 1]))[0]
    assert bench.carrier.staging.free == bench.carrier.staging.total


def test_a_failure_stays_with_its_errand() -> None:
    """Errands share a transfer, not their fate."""
    bench = rig()

    def breaks(chunk: int) -> None:
        if chunk == 1:
            raise ValueError("on purpose")

    bench.carrier.add(bench.errand("bad", "store", bench.moves(0, [1, 2, 3], [1, 2, 3]), watch=breaks))
    bench.carrier.add(bench.errand("good", "store", bench.moves(0, [4, 5], [4, 5])))
    bench.carrier.pump()
    assert bench.carrier.transfers == 2
    assert bench.settle("bad") == (None, "on purpose")
    copied, _ = bench.settle("good")
    assert copied == 2 * bench.layout.groups[0].block_bytes
    kept = bench.layer_bits(0)[[1, 2, 3]]
    assert bench.carry("load", "load", bench.moves(0, [1, 2, 3], [4, 5, 4]), watch=breaks) == (
        None,
        "on purpose",
    )
    # What was read before the failure may be there; what came after it is not.
    assert np.array_equal(bench.layer_bits(0)[[2, 3]], kept[1:])


def test_a_slot_that_is_too_small_is_refused() -> None:
    bench = rig()
    moves = [Move(0, 1, 0, 1, 0)]
    copied, problem = bench.carry("save", "store", moves)
    assert copied is None
    assert "needs" in problem


def test_what_has_not_begun_can_be_withdrawn() -> None:
    part = rig(blocks=8).layout.groups[0].part_bytes
    bench = rig(staging_bytes=4 * part, buckets=(1, 4))
    gate = threading.Event()

    def held(chunk: int) -> None:
        assert gate.wait(10)

    first = bench.errand("first", "store", bench.moves(0, range(1, 5), range(4)), watch=held)
    second = bench.errand("second", "store", bench.moves(0, range(5, 9), range(4, 8)))
    bench.carrier.add(first)
    bench.carrier.add(second)
    bench.carrier.pump()
    assert first.out == 4
    assert second.waiting == 4, "no room while the first is on its way"
    bench.carrier.withdraw(second, "its blocks were needed")
    assert bench.ended["second"] == (None, "its blocks were needed")
    gate.set()
    assert bench.settle("first")[0]
    assert (bench.pool[4:8] == 0xEE).all()


def test_an_errand_withdrawn_half_way_fails_when_the_rest_is_back() -> None:
    part = rig(blocks=8).layout.groups[0].part_bytes
    bench = rig(staging_bytes=4 * part, buckets=(1, 4))
    gate = threading.Event()
    errand = bench.errand(
        "save", "store", bench.moves(0, range(1, 9), range(8)), watch=lambda chunk: gate.wait(10) and None
    )
    bench.carrier.add(errand)
    bench.carrier.pump()
    bench.carrier.withdraw(errand, "enough")
    assert "save" not in bench.ended
    gate.set()
    wait_for(lambda: "save" in bench.ended, 10)
    assert bench.ended["save"] == (None, "enough")
    assert bench.carrier.staging.free == bench.carrier.staging.total


def test_a_cache_that_was_consumed_by_a_failure_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = rig()
    assert bench.carry("save", "store", bench.moves(0, [1], [0]))[0]

    def breaks(kv_caches: Any, *_: Any) -> Any:
        kv_caches[0].delete()
        raise ValueError("on purpose")

    monkeypatch.setattr(bench.programs, "scatter", breaks)
    with pytest.raises(CacheLost):
        bench.carry("load", "load", bench.moves(0, [1], [0]))
    assert bench.ended["load"][0] is None


def test_a_program_that_fails_costs_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of device memory, say."""
    bench = rig()
    with monkeypatch.context() as patch:
        patch.setattr(bench.programs, "gather", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        assert bench.carry("save", "store", bench.moves(0, [1], [0])) == (None, "no memory")
    assert bench.carry("again", "store", bench.moves(0, [1], [0]))[0]
    assert bench.carrier.staging.free == bench.carrier.staging.total


def test_a_cache_that_is_gone_fails_errands() -> None:
    """Sleep mode releases the arrays; the engine may get others later."""
    bench = rig()
    bench.runner.kv_caches[0].delete()
    for kind in ("store", "load"):
        copied, problem = bench.carry(kind, kind, bench.moves(0, [1], [0]))
        assert copied is None
        assert "gone (sleep mode)" in problem
    bench.wipe()
    assert bench.carry("again", "store", bench.moves(0, [1], [0]))[0]


def test_many_errands_in_both_directions_at_random() -> None:
    part = rig(blocks=8).layout.groups[0].part_bytes
    bench = rig(staging_bytes=20 * part, buckets=(1, 2, 4, 8), slots=126)
    want = bench.layer_bits(1).copy()
    order = bench.rng.permutation(np.arange(1, 127))
    names = []
    for number, blocks in enumerate(np.array_split(order, 21)):
        names.append(f"save {number}")
        bench.carrier.add(bench.errand(names[-1], "store", bench.moves(0, blocks, blocks - 1)))
        if number % 3 == 0:
            bench.carrier.pump()
    for name in names:
        assert bench.settle(name)[0]
    bench.wipe()
    for number, blocks in enumerate(np.array_split(bench.rng.permutation(order), 13)):
        names.append(f"load {number}")
        bench.carrier.add(bench.errand(names[-1], "load", bench.moves(0, blocks, blocks - 1)))
    for name in names[21:]:
        assert bench.settle(name)[0]
    assert np.array_equal(bench.layer_bits(1)[order], want[order])
    assert bench.carrier.staging.peak <= 20 * part
