"""A worker's link: what it says to the daemon and when, through growth, fences, retirement and the end.

Against a daemon that the test plays, so that every order can come at every moment.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost_client.errors import InvalidArgument, NotMapped
from kvhost_client.types import Access
from kvhost_client.worker import WorkerLink, WorkerMapping
from kvhost_proto.v1 import handover_pb2
from tests.client.fakes import MIB, FakeHandover, FakePeer, sealed_file
from tests.support import map_count, pat, thread_count, wait_for

MAPS = "memfd:kvhost-test"


class Watched(WorkerLink):
    """A link of rank 1 that counts its changes."""

    def __init__(self, socket: str) -> None:
        self.changes = 0
        super().__init__(socket, secrets.token_bytes(16), 1, on_change=self.count)

    def count(self) -> None:
        self.changes += 1


@pytest.fixture
def link(handover: FakeHandover) -> Iterator[Watched]:
    made = Watched(handover.socket)
    made.start()
    yield made
    handover.close()
    assert made.close()


def attach(handover: FakeHandover, *segments: int, boot_id: int = 7) -> tuple[FakePeer, handover_pb2.Hello]:
    """Accepts the link and hands segments over, if any."""
    peer = handover.accept()
    hello = peer.expect("hello").hello
    peer.welcome(boot_id)
    if segments:
        give(peer, *segments, boot_id=boot_id)
    return peer, hello


def give(peer: FakePeer, *segments: int, boot_id: int = 7) -> None:
    for file in peer.segments(*segments, boot_id=boot_id):
        os.close(file)
    assert list(peer.expect("mapped").mapped.segment_ids) == list(segments)


def mapped(link: WorkerLink) -> WorkerMapping:
    return wait_for(lambda: link.mapping, what="a mapping")


def allows(mapping: WorkerMapping, session: int, *stores: int) -> bool:
    """Would such a copy be let run?"""
    copy = mapping.begin(session, stores)
    if copy:
        mapping.end(copy)
    return bool(copy)


def slot(segment: int, index: int = 0) -> int:
    return segment << 32 | index


class TestAttaching:
    def test_hello_presents_the_token(self, handover: FakeHandover, link: Watched) -> None:
        _, hello = attach(handover)
        assert hello.role == handover_pb2.ROLE_WORKER
        assert hello.rank == 1
        assert hello.access == handover_pb2.ACCESS_CPU
        assert hello.token == link.token
        assert len(link.token) == 32

    def test_a_device_says_that_it_writes_by_dma(self, handover: FakeHandover) -> None:
        link = WorkerLink(handover.socket, secrets.token_bytes(16), 0, Access.DEVICE_DMA)
        link.start()
        _, hello = attach(handover)
        assert hello.access == handover_pb2.ACCESS_DEVICE_DMA
        assert link.close()

    def test_nothing_is_mapped_before_a_session_names_the_token(
        self, handover: FakeHandover, link: Watched
    ) -> None:
        peer, _ = attach(handover)
        peer.expect_silence()
        assert link.mapping is None
        give(peer, 3)
        assert mapped(link).segment_ids == {3}
        assert link.changes == 1

    def test_bytes_go_to_the_shared_pages(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover)
        (file,) = peer.segments(3)
        peer.expect("mapped")
        address, nbytes = mapped(link).shard(slot(3, 2), 1)
        data = pat("k", 1, nbytes)
        ctypes.memmove(address, data, nbytes)
        assert os.pread(file, nbytes, 2 * MIB // 4 + MIB // 8) == data
        os.close(file)

    def test_the_mapping_grows(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3)
        before = mapped(link)
        give(peer, 4, 9)
        assert mapped(link) is before
        assert before.segment_ids == {3, 4, 9}
        assert link.changes == 1

    def test_the_geometry_is_the_daemons(self, handover: FakeHandover, link: Watched) -> None:
        attach(handover, 3, boot_id=2**64 - 1)
        mapping = mapped(link)
        assert mapping.boot_id == 2**64 - 1
        assert (mapping.slot_bytes, mapping.shard_stride, mapping.shards) == (MIB // 4, MIB // 8, 2)

    def test_no_descriptor_is_left_after_mapping(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover)
        give(peer, *range(100, 150))
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_open(fd)]
        assert not [one for one in links if "memfd" in one]
        assert map_count(os.getpid(), MAPS) == 50

    def test_own_shards_are_prefaulted_in_the_background(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover)
        give(peer, 3, 4)
        wait_for(lambda: link.prefault_done and link.prefaulted_bytes, what="prefaulting")
        assert link.prefaulted_bytes == 2 * 4 * MIB // 8
        assert resident(mapped(link), 3, rank=1) == 4 * MIB // 8

    @pytest.mark.parametrize("wrong", [b"", b"short", bytes(17)])
    def test_an_instance_id_of_another_length_is_refused_before_anything_opens(self, wrong: bytes) -> None:
        with pytest.raises(InvalidArgument, match="16 bytes"):
            WorkerLink("/none", wrong, 0)

    def test_a_negative_rank_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="0 or more"):
            WorkerLink("/none", bytes(16), -1)

    def test_nothing_is_opened_before_the_start(self, handover: FakeHandover) -> None:
        threads, files = thread_count(os.getpid()), len(os.listdir("/proc/self/fd"))
        link = WorkerLink(handover.socket, bytes(16), 0)
        assert (thread_count(os.getpid()), len(os.listdir("/proc/self/fd"))) == (threads, files)
        assert link.close()

    def test_it_starts_once(self, link: Watched) -> None:
        with pytest.raises(RuntimeError, match="started before"):
            link.start()


class TestFences:
    def test_an_idle_worker_answers_at_once(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3)
        peer.fence(1, session_below=5, store_ids=[11])
        assert peer.expect("fenced").fenced.fence == 1
        assert not allows(mapped(link), 4)
        assert not allows(mapped(link), 5, 11)
        assert allows(mapped(link), 5)

    def test_a_parked_worker_answers_too(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover)
        peer.fence(1, session_below=5)
        assert peer.expect("fenced").fenced.fence == 1
        give(peer, 3)
        assert not mapped(link).begin(4), "what a fence forbade before the mapping stays forbidden"

    def test_running_copies_are_awaited_and_later_ones_are_not(
        self, handover: FakeHandover, link: Watched
    ) -> None:
        peer, _ = attach(handover, 3)
        mapping = mapped(link)
        first = mapping.begin(5, [11])
        peer.fence(1, store_ids=[11])
        wait_for(lambda: not allows(mapping, 5, 11), what="the fence to arrive")
        later = mapping.begin(5, [12])
        peer.expect_silence()
        mapping.end(first)
        assert peer.expect("fenced").fenced.fence == 1
        mapping.end(later)

    def test_fences_are_answered_in_order(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3)
        mapping = mapped(link)
        copy = mapping.begin(5)
        for number in (1, 2, 3):
            peer.fence(number, store_ids=[number])
        peer.expect_silence()
        mapping.end(copy)
        assert [peer.expect("fenced").fenced.fence for _ in range(3)] == [1, 2, 3]

    def test_while_a_fence_waits_the_daemon_is_heard(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3)
        mapping = mapped(link)
        copy = mapping.begin(5)
        peer.fence(1)
        give(peer, 4)
        assert mapping.segment_ids == {3, 4}
        mapping.end(copy)
        peer.expect("fenced")

    def test_an_end_from_another_thread_wakes_the_link(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3)
        mapping = mapped(link)
        copy = mapping.begin(5)
        peer.fence(1)
        thread = threading.Thread(target=mapping.end, args=(copy,))
        thread.start()
        peer.expect("fenced")
        thread.join()


class TestRetirement:
    def test_a_retired_segment_is_unmapped_and_then_reported(
        self, handover: FakeHandover, link: Watched
    ) -> None:
        peer, _ = attach(handover, 3, 4)
        mapping = mapped(link)
        peer.retire(3)
        assert list(peer.expect("retired").retired.segment_ids) == [3]
        assert map_count(os.getpid(), MAPS) == 1
        with pytest.raises(NotMapped):
            mapping.shard(slot(3), 0)
        assert mapping.shard(slot(4), 0)

    def test_not_while_a_copy_runs(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3)
        mapping = mapped(link)
        copy = mapping.begin(5)
        address, nbytes = mapping.shard(slot(3), 0)
        peer.retire(3)
        wait_for(lambda: 3 not in mapping.segment_ids, what="the order to arrive")
        peer.expect_silence()
        ctypes.memmove(address, pat("k", 0, nbytes), nbytes)  # must not be SIGSEGV
        mapping.end(copy)
        peer.expect("retired")
        assert map_count(os.getpid(), MAPS) == 0

    def test_a_segment_nobody_has_is_answered_all_the_same(
        self, handover: FakeHandover, link: Watched
    ) -> None:
        peer, _ = attach(handover, 3)
        peer.retire(99)
        assert list(peer.expect("retired").retired.segment_ids) == [99]

    def test_it_can_come_and_go_many_times(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 1)
        mapped(link)
        for number in range(2, 30):
            give(peer, number)
            peer.retire(number - 1)
            peer.expect("retired")
        assert map_count(os.getpid(), MAPS) == 1


class TestTheDaemonsEnd:
    def test_the_mapping_is_dead_and_unmapped(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3)
        mapping = mapped(link)
        peer.close()
        wait_for(lambda: mapping.gone, what="end-of-file to be seen")
        assert not mapping.begin(5)
        wait_for(lambda: map_count(os.getpid(), MAPS) == 0, what="unmapping")
        assert link.mapping is None
        assert link.changes >= 2

    def test_a_copy_that_had_begun_ends_first(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3)
        mapping = mapped(link)
        copy = mapping.begin(5)
        peer.close()
        wait_for(lambda: mapping.gone, what="end-of-file to be seen")
        address, nbytes = mapping.shard(slot(3), 0)
        ctypes.memmove(address, pat("k", 0, nbytes), nbytes)
        assert map_count(os.getpid(), MAPS) == 1
        mapping.end(copy)
        wait_for(lambda: map_count(os.getpid(), MAPS) == 0, what="unmapping")

    def test_meanwhile_the_next_daemon_is_served(self, handover: FakeHandover, link: Watched) -> None:
        """A copy through the old mapping delays nothing, and its end unmaps only what is old."""
        peer, _ = attach(handover, 3)
        old = mapped(link)
        copy = old.begin(5)
        peer.close()
        attach(handover, 3, boot_id=8)
        new = mapped(link)
        assert new is not old
        assert new.boot_id == 8
        old.end(copy)
        wait_for(lambda: map_count(os.getpid(), MAPS) == 1, what="the old segment to be unmapped")
        assert allows(new, 1)

    def test_a_new_daemon_gets_the_same_token(
        self, folder: Path, handover: FakeHandover, link: Watched
    ) -> None:
        _, hello = attach(handover, 3)
        handover.remove()
        started = time.monotonic()
        with FakeHandover(folder) as successor:
            _, again = attach(successor, 3, boot_id=8)
            assert time.monotonic() - started < 1.0
            assert again.token == hello.token == link.token
            assert mapped(link).boot_id == 8

    def test_the_same_daemon_gets_a_new_token(self, handover: FakeHandover, link: Watched) -> None:
        peer, hello = attach(handover, 3)
        mapped(link)
        changes = link.changes
        peer.close()
        refused = handover.accept()
        assert refused.expect("hello").hello.token == hello.token
        refused.welcome(7)
        refused.expect_end()
        _, fresh = attach(handover, 3)
        assert fresh.token == link.token != hello.token
        assert mapped(link).boot_id == 7
        assert link.changes >= changes + 2

    def test_a_daemon_that_knows_the_token_gets_another(self, handover: FakeHandover, link: Watched) -> None:
        peer = handover.accept()
        first = peer.expect("hello").hello.token
        peer.refuse(6, "this token was used before")
        peer.close()
        _, hello = attach(handover, 3)
        assert hello.token == link.token != first

    def test_it_comes_back_within_half_a_second_of_a_long_absence(
        self, folder: Path, handover: FakeHandover, link: Watched
    ) -> None:
        attach(handover, 3)
        mapped(link)
        handover.remove()
        wait_for(lambda: "no socket" in link.problem, what="the absence to be noticed")
        threading.Event().wait(1.5)  # long enough for the pauses to have grown to their longest
        started = time.monotonic()
        with FakeHandover(folder) as successor:
            attach(successor, 3, boot_id=8)
            mapped(link)
            assert time.monotonic() - started < 1.0
            assert link.problem == ""


class TestRefusals:
    def test_it_says_why_and_tries_again_at_leisure(self, handover: FakeHandover, link: Watched) -> None:
        times = []
        for _ in range(6):
            peer = handover.accept()
            times.append(time.monotonic())
            peer.expect("hello")
            peer.refuse(7, "uid 4 may not use this daemon")
            peer.close()
        assert "uid 4 may not use this daemon" in link.problem
        pauses = [after - before for before, after in itertools.pairwise(times)]
        assert pauses[0] < pauses[-1] <= 2.1

    @pytest.mark.parametrize("what", ["seals", "size", "slots", "missing", "twice", "boot", "early"])
    def test_segments_that_are_wrong_cost_the_connection_and_leave_nothing(
        self, handover: FakeHandover, link: Watched, what: str
    ) -> None:
        peer = handover.accept()
        peer.expect("hello")
        if what != "early":
            peer.welcome()
        file = sealed_file(MIB, 0) if what == "seals" else sealed_file(MIB // 2 if what == "size" else MIB)
        numbers = {"missing": (1, 2), "twice": (1, 1)}.get(what, (1,))
        files = [file, file] if what == "twice" else [file]
        boot_id = 99 if what == "boot" else 7
        peer.segments(*numbers, descriptors=files, slots=9 if what == "slots" else 4, boot_id=boot_id)
        os.close(file)
        if what == "early":
            peer.expect_end()
        else:
            peer.expect("bye")  # we live on: only this tells the daemon that nothing is mapped (I4)
            assert map_count(os.getpid(), MAPS) == 0
            peer.close()
        wait_for(lambda: link.problem, what="the reason")
        assert "\n" not in link.problem
        assert link.mapping is None
        wait_for(lambda: map_count(os.getpid(), MAPS) == 0, what="everything to be unmapped")

    def test_orders_that_make_no_sense_cost_the_connection(
        self, handover: FakeHandover, link: Watched
    ) -> None:
        for act in (
            lambda peer: peer.fence(1),
            lambda peer: peer.retire(1),
            lambda peer: peer.ticket(),
            lambda peer: peer.send_raw(b"KVH1"),
            lambda peer: peer.send_raw(b"GET / HTTP/1.1"),
        ):
            peer = handover.accept()
            peer.expect("hello")
            act(peer)
            peer.expect_end()
        assert link.problem

    def test_a_worker_that_gives_up_a_connection_says_bye(
        self, handover: FakeHandover, link: Watched
    ) -> None:
        peer, _ = attach(handover, 1)
        wait_for(lambda: link.mapping, what="the mapping")
        peer.welcome()  # a second time: this connection cannot go on
        peer.expect("bye")
        assert link.mapping is None
        assert map_count(os.getpid(), MAPS) == 0
        peer.close()

    def test_not_while_a_copy_runs(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 1)
        mapping = wait_for(lambda: link.mapping, what="the mapping")
        copy = mapping.begin(1)
        peer.welcome()
        peer.expect_end()
        assert map_count(os.getpid(), MAPS) == 1
        mapping.end(copy)
        wait_for(lambda: map_count(os.getpid(), MAPS) == 0, what="everything to be unmapped")

    def test_a_newer_daemon_is_named_as_one(self, handover: FakeHandover, link: Watched) -> None:
        peer = handover.accept()
        peer.expect("hello")
        peer.welcome(major=2)
        peer.expect_end()
        wait_for(lambda: "install the same kvhost major version" in link.problem, what="the reason")

    def test_a_callback_that_fails_stops_nothing(self, handover: FakeHandover) -> None:
        def fail() -> None:
            raise ValueError("a fault of the engine")

        link = WorkerLink(handover.socket, bytes(16), 0, on_change=fail)
        link.start()
        peer, _ = attach(handover, 3)
        peer.fence(1)
        peer.expect("fenced")
        assert link.close()


class TestClosing:
    def test_everything_is_unmapped_before_bye(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3, 4)
        mapped(link)
        assert link.close()
        peer.expect("bye")
        assert map_count(os.getpid(), MAPS) == 0
        peer.expect_end()

    def test_a_parked_worker_says_bye(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover)
        assert link.close()
        peer.expect("bye")

    def test_running_copies_are_awaited(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3)
        mapping = mapped(link)
        copy = mapping.begin(5)
        assert not link.close(timeout=0.1)
        assert not mapping.begin(5)
        peer.expect_silence()
        assert map_count(os.getpid(), MAPS) == 1
        mapping.end(copy)
        peer.expect("bye")
        assert link.close()

    def test_fences_are_answered_while_closing(self, handover: FakeHandover, link: Watched) -> None:
        peer, _ = attach(handover, 3)
        mapping = mapped(link)
        copy = mapping.begin(5)
        assert not link.close(timeout=0.05)
        peer.fence(1)
        mapping.end(copy)
        kinds = {peer.receive().WhichOneof("kind") for _ in range(1)}  # type: ignore[union-attr]
        assert kinds <= {"bye", "fenced"}

    def test_a_link_without_a_daemon_closes_at_once(self, folder: Path) -> None:
        link = WorkerLink(folder / "none.sock", bytes(16), 0)
        link.start()
        wait_for(lambda: link.problem, what="the absence to be noticed")
        started = time.monotonic()
        assert link.close()
        assert time.monotonic() - started < 0.6

    def test_threads_and_descriptors_are_as_before(self, handover: FakeHandover) -> None:
        threads, files = thread_count(os.getpid()), len(os.listdir("/proc/self/fd"))
        for number in range(3):
            link = WorkerLink(handover.socket, bytes(16), 0)
            link.start()
            peer, _ = attach(handover, number + 1)
            assert link.close()
            peer.expect("bye")
            peer.close()
        wait_for(lambda: thread_count(os.getpid()) == threads, what="the threads to end")
        assert len(os.listdir("/proc/self/fd")) == files

    def test_an_end_after_the_close_is_harmless(self, handover: FakeHandover, link: Watched) -> None:
        attach(handover, 3)
        mapping = mapped(link)
        copy = mapping.begin(5)
        handover.close()
        wait_for(lambda: mapping.gone, what="end-of-file to be seen")
        assert not link.close(timeout=0.05)
        mapping.end(copy)
        assert link.close()
        assert map_count(os.getpid(), MAPS) == 0


def fd_is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def resident(mapping: WorkerMapping, segment: int, rank: int) -> int:
    """Bytes of a rank's shards in a segment that this process can touch without a page fault."""
    total = 0
    with open("/proc/self/pagemap", "rb") as pagemap:
        for index in range(4):
            address, nbytes = mapping.shard(slot(segment, index), rank)
            pagemap.seek(address // 4096 * 8)
            words = memoryview(pagemap.read(nbytes // 4096 * 8)).cast("Q")
            total += 4096 * sum(bool(word >> 63) for word in words)
    return total
