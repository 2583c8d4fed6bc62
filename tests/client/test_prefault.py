"""What is touched ahead of the first copy: this rank's shards, whole pages, small pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvhost_client.mapping import Geometry, Segment
from kvhost_client.memory import Region
from kvhost_client.prefault import PIECE_BYTES, Prefaulter, pieces
from tests.client.fakes import MIB, sealed_file
from tests.support import wait_for


@pytest.fixture
def region() -> Iterator[Region]:
    file = sealed_file(40 * MIB)
    made = Region(file, 40 * MIB)
    os.close(file)
    yield made
    made.unmap()


def segment(region: Region, slot_bytes: int, shards: int) -> Segment:
    geometry = Geometry(slot_bytes, slot_bytes // shards, shards)
    return Segment(1, region, region.nbytes // slot_bytes, 1, geometry)


def test_one_shard_is_the_whole_segment_in_pieces(region: Region) -> None:
    assert list(pieces(segment(region, 4 * MIB, 1), rank=3)) == [
        (0, PIECE_BYTES),
        (16 * MIB, PIECE_BYTES),
        (32 * MIB, 8 * MIB),
    ]


def test_of_several_shards_only_this_ranks(region: Region) -> None:
    got = list(pieces(segment(region, 4 * MIB, 4), rank=2))
    assert got == [(n * 4 * MIB + 2 * MIB, MIB) for n in range(10)]


def test_large_shards_are_cut(region: Region) -> None:
    got = list(pieces(segment(region, 40 * MIB, 2), rank=1))
    assert got == [(20 * MIB, PIECE_BYTES), (36 * MIB, 4 * MIB)]


def test_pages_are_whole_and_inside_the_segment(region: Region) -> None:
    odd = segment(region, 10_000, 2)
    for offset, nbytes in pieces(odd, rank=1):
        assert offset % 4096 == nbytes % 4096 == 0
        assert 0 <= offset < offset + nbytes <= region.nbytes


def test_an_unmapped_segment_is_left_alone(region: Region) -> None:
    prefaulter = Prefaulter(0)
    region.unmap()
    prefaulter.add(segment(region, 4 * MIB, 1))
    wait_for(lambda: prefaulter.idle, what="the prefaulter")
    assert prefaulter.nbytes == 0
    prefaulter.close()


def test_what_the_kernel_refuses_costs_only_speed(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvhost_client.memory.MADV_POPULATE_WRITE", 9999)  # as on a kernel before 5.14
    prefaulter = Prefaulter(0)
    for _ in range(3):
        prefaulter.add(segment(region, 4 * MIB, 1))
    wait_for(lambda: prefaulter.idle, what="the prefaulter")
    assert prefaulter.nbytes == 0
    assert caplog.text.count("are slower") == 1
    assert not region.prefaulted
    prefaulter.close()


def test_it_counts_what_it_did(region: Region) -> None:
    prefaulter = Prefaulter(0)
    prefaulter.add(segment(region, 4 * MIB, 1))
    wait_for(lambda: prefaulter.idle, what="the prefaulter")
    assert prefaulter.nbytes == 40 * MIB
    assert region.prefaulted
    prefaulter.close()
