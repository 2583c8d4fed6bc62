"""What a worker may touch: ranges, copies that run, fences, and the end of a mapping (I4, I6, I13)."""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvhost_client.errors import HandoverFailed, NotMapped
from kvhost_client.mapping import Geometry, Segment, WorkerMapping
from kvhost_client.memory import Region, check_sealed_file
from kvhost_proto.v1 import handover_pb2
from tests.client.fakes import MIB, sealed_file
from tests.support import map_count, pat

TWO_SHARDS = Geometry(slot_bytes=MIB // 4, shard_stride=MIB // 8, shards=2)
ONE_SHARD = Geometry(slot_bytes=MIB // 4, shard_stride=MIB // 4, shards=1)


def add(mapping: WorkerMapping, number: int, geometry: Geometry = TWO_SHARDS, nbytes: int = MIB) -> Segment:
    file = sealed_file(nbytes)
    try:
        announced = handover_pb2.Segment(id=number, bytes=nbytes, slots=nbytes // geometry.slot_bytes)
        return mapping.map(announced, file, geometry, generation=number)
    finally:
        os.close(file)


class Bell:
    def __init__(self) -> None:
        self.rung = 0

    def __call__(self) -> None:
        self.rung += 1


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def mapping(bell: Bell) -> Iterator[WorkerMapping]:
    made = WorkerMapping(boot_id=7, drained=bell)
    segments = [add(made, 3), add(made, 9)]
    yield made
    for segment in segments:
        segment.region.unmap()


def slot(segment: int, index: int) -> int:
    return segment << 32 | index


class TestAddresses:
    def test_every_shard_of_every_slot_has_its_own_place(self, mapping: WorkerMapping) -> None:
        seen: set[int] = set()
        for number in (3, 9):
            for index in range(4):
                for rank in range(2):
                    address, nbytes = mapping.shard(slot(number, index), rank)
                    assert nbytes == MIB // 8
                    assert not seen & set(range(address, address + nbytes, 4096))
                    seen.update(range(address, address + nbytes, 4096))
        assert len(seen) == 2 * MIB // 4096

    def test_what_is_written_at_one_address_is_read_there(self, mapping: WorkerMapping) -> None:
        address, nbytes = mapping.shard(slot(9, 2), 1)
        data = pat("k", 1, nbytes)
        ctypes.memmove(address, data, nbytes)
        assert ctypes.string_at(address, nbytes) == data

    def test_in_bulk_they_are_the_same(self, mapping: WorkerMapping) -> None:
        slots = [slot(3, 0), slot(3, 3), slot(9, 1), slot(3, 2)]
        assert mapping.addresses(slots, 1) == [mapping.shard(one, 1)[0] for one in slots]
        assert mapping.addresses([], 1) == []

    def test_where_one_shard_is_stored_all_ranks_use_it(self, bell: Bell) -> None:
        made = WorkerMapping(7, bell)
        segment = add(made, 1, ONE_SHARD)
        assert made.shard(slot(1, 1), 5) == made.shard(slot(1, 1), 0)
        assert made.addresses([slot(1, 1)], 5) == [made.shard(slot(1, 1), 0)[0]]
        segment.region.unmap()

    @pytest.mark.parametrize(
        "wrong",
        [
            slot(3, 4),
            slot(4, 0),
            slot(0, 0),
            -1,
            -(1 << 63),
            2**63,
            2**64 - 1,
            2**64 + slot(3, 0),
            slot(3, 2**32 - 1),
            slot(3, 0) | 1 << 31,
        ],
    )
    def test_a_slot_outside_is_refused(self, mapping: WorkerMapping, wrong: int) -> None:
        with pytest.raises(NotMapped):
            mapping.shard(wrong, 0)
        with pytest.raises(NotMapped):
            mapping.addresses([slot(3, 0), wrong], 0)

    @pytest.mark.parametrize("rank", [2, -1, 2**40])
    def test_a_rank_without_a_shard_is_refused(self, mapping: WorkerMapping, rank: int) -> None:
        with pytest.raises(NotMapped, match="has no shard"):
            mapping.shard(slot(3, 0), rank)
        with pytest.raises(NotMapped, match="has no shard"):
            mapping.addresses([slot(3, 0)], rank)

    def test_the_error_says_what_is_mapped(self, mapping: WorkerMapping) -> None:
        with pytest.raises(NotMapped, match=r"segment 4, index 1.*mapped segments of boot 0{15}7: 3, 9"):
            mapping.shard(slot(4, 1), 0)

    def test_a_place_that_is_too_small_is_refused(self, mapping: WorkerMapping) -> None:
        assert mapping.addresses([slot(3, 0)], 0, MIB // 8) == mapping.addresses([slot(3, 0)], 0)
        with pytest.raises(NotMapped, match=r"needs 131073 bytes, its place in a slot has 131072"):
            mapping.addresses([slot(3, 0)], 0, MIB // 8 + 1)

    def test_a_store_ahead_of_the_prefaulter_touches_its_own_slots(
        self, mapping: WorkerMapping, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[int, int]] = []
        monkeypatch.setattr(
            Region, "populate_now", lambda region, offset, nbytes: calls.append((offset, nbytes))
        )
        mapping.prefault([slot(3, 1), slot(9, 2), slot(4, 0)], 1)
        eighth = MIB // 8
        assert calls == [(3 * eighth, eighth), (5 * eighth, eighth)]
        mapping._segments[3].region.prefaulted = True
        mapping.prefault([slot(3, 1)], 1)
        assert len(calls) == 2

    def test_what_the_kernel_refuses_is_not_tried_again(
        self, mapping: WorkerMapping, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhost_client.memory.MADV_POPULATE_WRITE", 9999)  # as on a kernel before 5.14
        mapping.prefault([slot(3, 0)], 0)
        assert mapping._segments[3].region.prefaulted

    def test_each_segment_keeps_its_generation(self, mapping: WorkerMapping) -> None:
        assert mapping.generation_of(slot(9, 0)) == 9
        with pytest.raises(NotMapped):
            mapping.generation_of(slot(1, 0))

    def test_they_cost_little(self, mapping: WorkerMapping) -> None:
        """A copy plan asks once a job and once a chunk: microseconds."""
        slots = [slot(3, n % 4) for n in range(1000)]

        def best(act: Callable[[], object], times: int = 20) -> float:
            spans = []
            for _ in range(times):
                started = time.perf_counter()
                act()
                spans.append(time.perf_counter() - started)
            return min(spans)

        assert best(lambda: [mapping.shard(one, 1) for one in slots]) < 5e-3
        assert best(lambda: mapping.addresses(slots, 1)) < 2e-3

        def thousand_copies() -> None:
            for _ in range(1000):
                mapping.end(mapping.begin(5, (1, 2)))

        assert best(thousand_copies) < 10e-3


class TestCopies:
    def test_a_copy_runs_until_its_end(self, mapping: WorkerMapping) -> None:
        copy = mapping.begin(1)
        assert copy
        assert mapping.running == 1
        mapping.end(copy)
        assert mapping.running == 0

    def test_an_end_without_a_begin_is_an_error(self, mapping: WorkerMapping) -> None:
        with pytest.raises(RuntimeError, match="does not run"):
            mapping.end()
        copy = mapping.begin(1)
        mapping.end(copy)
        with pytest.raises(RuntimeError, match="does not run"):
            mapping.end(copy)

    def test_a_fence_refuses_earlier_sessions(self, mapping: WorkerMapping) -> None:
        mapping.fence(session_below=5, store_ids=[])
        assert not mapping.begin(4)
        assert mapping.begin(5)
        mapping.fence(session_below=3, store_ids=[])
        assert not mapping.begin(4), "an older fence takes nothing back"

    def test_a_fence_refuses_the_stores_it_names_for_ever(self, mapping: WorkerMapping) -> None:
        mapping.fence(0, [11, 12])
        mapping.fence(0, [13])
        for store in (11, 12, 13):
            assert not mapping.begin(9, [1, store])
        assert mapping.begin(9, [1, 14])
        assert mapping.begin(9)

    def test_a_fence_waits_for_the_copies_that_had_begun(self, mapping: WorkerMapping, bell: Bell) -> None:
        first, second = mapping.begin(1, [11]), mapping.begin(1)
        epoch = mapping.fence(0, [11])
        assert not mapping.quiet(epoch)
        mapping.end(first)
        assert bell.rung == 0
        assert not mapping.quiet(epoch)
        mapping.end(second)
        assert bell.rung == 1
        assert mapping.quiet(epoch)

    def test_later_copies_do_not_delay_a_fence(self, mapping: WorkerMapping, bell: Bell) -> None:
        first = mapping.begin(1)
        epoch = mapping.fence(0, [11])
        later = mapping.begin(1)
        assert not mapping.quiet(epoch)
        mapping.end(first)
        assert bell.rung == 1
        assert mapping.quiet(epoch)
        assert mapping.running == 1
        mapping.end(later)

    def test_without_a_name_the_youngest_copy_is_taken_to_have_ended(self, mapping: WorkerMapping) -> None:
        mapping.begin(1)
        epoch = mapping.fence(0, [11])
        mapping.begin(1)
        mapping.end()
        assert not mapping.quiet(epoch), "never too early"
        mapping.end()
        assert mapping.quiet(epoch)

    def test_fences_end_in_their_order(self, mapping: WorkerMapping) -> None:
        first = mapping.begin(1)
        one = mapping.fence(0, [11])
        second = mapping.begin(1)
        two = mapping.fence(0, [12])
        mapping.end(second)
        assert not mapping.quiet(one)
        assert not mapping.quiet(two)
        mapping.end(first)
        assert mapping.quiet(one)
        assert mapping.quiet(two)

    def test_many_fences_leave_nothing_behind(self, mapping: WorkerMapping) -> None:
        for number in range(1000):
            copy = mapping.begin(1)
            epoch = mapping.fence(0, [number])
            mapping.end(copy)
            assert mapping.quiet(epoch)
        assert len(mapping._running) == 1


class TestTheEnd:
    def test_a_retired_segment_gives_out_no_address(self, mapping: WorkerMapping) -> None:
        epoch, (segment,) = mapping.retire([3, 1234])
        assert segment.segment_id == 3
        assert mapping.quiet(epoch)
        with pytest.raises(NotMapped):
            mapping.shard(slot(3, 0), 0)
        assert mapping.shard(slot(9, 0), 0)
        assert mapping.segment_ids == {9}

    def test_a_dead_mapping_begins_nothing(self, mapping: WorkerMapping) -> None:
        assert not mapping.gone
        epoch, segments = mapping.die()
        assert mapping.gone
        assert not mapping.begin(1)
        assert len(segments) == 2
        assert mapping.quiet(epoch)

    def test_a_copy_that_runs_keeps_its_addresses_until_it_ends(self, mapping: WorkerMapping) -> None:
        copy = mapping.begin(1)
        epoch, _ = mapping.die()
        address, nbytes = mapping.shard(slot(3, 0), 0)
        ctypes.memmove(address, pat("k", 0, nbytes), nbytes)
        assert not mapping.quiet(epoch)
        mapping.end(copy)
        assert mapping.quiet(epoch)
        mapping.forget()
        with pytest.raises(NotMapped):
            mapping.shard(slot(3, 0), 0)


class TestHandedOver:
    """Nothing from the wire is trusted (I13)."""

    def offer(self, bell: Bell, segment: handover_pb2.Segment, geometry: Geometry, file: int) -> str:
        # Of files: threads of other tests come and go, with memory of their own.
        maps = map_count(os.getpid(), "/")
        try:
            with pytest.raises(HandoverFailed) as caught:
                WorkerMapping(7, bell).map(segment, file, geometry, 1)
        finally:
            os.close(file)
        assert map_count(os.getpid(), "/") == maps
        return str(caught.value)

    @pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK])
    def test_a_file_that_can_be_resized_is_refused(self, bell: Bell, seals: int) -> None:
        segment = handover_pb2.Segment(id=1, bytes=MIB, slots=4)
        assert "F_SEAL_SHRINK and F_SEAL_GROW" in self.offer(
            bell, segment, TWO_SHARDS, sealed_file(MIB, seals)
        )

    def test_a_file_of_another_size_is_refused(self, bell: Bell) -> None:
        segment = handover_pb2.Segment(id=1, bytes=MIB, slots=4)
        sentence = self.offer(bell, segment, TWO_SHARDS, sealed_file(MIB // 2))
        assert f"has {MIB // 2} bytes, {MIB} were announced" in sentence

    def test_something_that_is_no_memory_file_is_refused(self, bell: Bell) -> None:
        segment = handover_pb2.Segment(id=1, bytes=MIB, slots=4)
        assert "not a memory file" in self.offer(bell, segment, TWO_SHARDS, os.open("/dev/null", os.O_RDWR))

    @pytest.mark.parametrize(
        ("nbytes", "slots"), [(MIB, 5), (MIB, 0), (MIB, 2**32 - 1), (MIB + 1, 4), (2**63, 4), (0, 1)]
    )
    def test_slots_that_do_not_fit_are_refused(self, bell: Bell, nbytes: int, slots: int) -> None:
        segment = handover_pb2.Segment(id=1, bytes=nbytes, slots=slots)
        self.offer(bell, segment, TWO_SHARDS, sealed_file(MIB))

    @pytest.mark.parametrize(
        "geometry",
        [
            Geometry(0, 0, 0),
            Geometry(4096, 0, 1),
            Geometry(4096, 4096, 0),
            Geometry(4096, 4096, 2),
            Geometry(4096, 2**63, 2**31),
            Geometry(2**63, 2**62, 2),
        ],
    )
    def test_shards_that_do_not_fit_are_refused(self, bell: Bell, geometry: Geometry) -> None:
        segment = handover_pb2.Segment(id=1, bytes=MIB, slots=1)
        assert "do not fit" in self.offer(bell, segment, geometry, sealed_file(MIB))

    def test_a_segment_that_comes_twice_is_refused(self, mapping: WorkerMapping) -> None:
        with pytest.raises(HandoverFailed, match="segment 3 twice"):
            add(mapping, 3)

    def test_a_sealed_file_is_accepted(self) -> None:
        file = sealed_file(MIB)
        check_sealed_file(file, MIB)
        os.close(file)


class TestRegion:
    def test_it_is_left_out_of_children_and_of_core_dumps(self) -> None:
        file = sealed_file(MIB)
        region = Region(file, MIB)
        try:
            entries = Path("/proc/self/smaps").read_text().partition(f"{region.address:x}-")[2]
            flags = entries.partition("VmFlags:")[2].splitlines()[0].split()
            assert {"dc", "dd", "sh"} <= set(flags)  # not copied on fork, not dumped, shared
        finally:
            region.unmap()
            os.close(file)

    def test_unmapping_twice_is_once(self) -> None:
        file = sealed_file(MIB)
        before = map_count(os.getpid(), "memfd:kvhost-test")
        region = Region(file, MIB)
        os.close(file)
        assert map_count(os.getpid(), "memfd:kvhost-test") == before + 1
        region.unmap()
        region.unmap()
        assert map_count(os.getpid(), "memfd:kvhost-test") == before

    def test_an_unmapped_region_is_not_populated(self) -> None:
        file = sealed_file(MIB)
        region = Region(file, MIB)
        os.close(file)
        assert region.populate(0, 4096)
        region.unmap()
        assert not region.populate(0, 4096)

    def test_what_cannot_be_mapped_is_an_error_with_a_reason(self) -> None:
        file = os.open("/dev/null", os.O_RDWR)
        with pytest.raises(OSError, match="mmap of 1048576 bytes"):
            Region(file, MIB)
        os.close(file)
