"""Segments and a device's driver: registered one by one before they are reported, released before they go.

The registrar here is a fake that writes down what it was asked.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from kvhost_client.errors import HandoverFailed
from kvhost_client.mapping import Segment
from kvhost_client.types import Access
from kvhost_client.worker import WorkerLink
from tests.client.fakes import MIB, FakeHandover, FakePeer
from tests.support import map_count, wait_for

MAPS = "memfd:kvhost-test"


class FakeRegistrar:
    """Notes the order of things, with how much was mapped when it happened."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.refuse = 0
        self.stuck: dict[int, Segment] = {}
        # Steps that may be taken; more come with `allow`.
        self.allowed = 1 << 30

    def register(self, segments: Sequence[Segment]) -> Iterator[None]:
        for segment in segments:
            while self.allowed <= 0:
                yield
            self.allowed -= 1
            if not segment.region.mapped:
                self.told.append(("gone", segment.segment_id))
                continue
            if segment.segment_id == self.refuse:
                raise HandoverFailed(f"segment {segment.segment_id} cannot be registered")
            self.told.append(("register", segment.segment_id))
            segment.region.before_unmap(partial(self._release, segment))
            yield

    def _release(self, segment: Segment) -> None:
        assert segment.region.mapped
        self.told.append(("release", segment.segment_id))
        if segment.segment_id in self.stuck:
            self.stuck[segment.segment_id] = segment
            raise OSError("the driver holds on to it")


@pytest.fixture
def registrar() -> FakeRegistrar:
    return FakeRegistrar()


@pytest.fixture
def link(handover: FakeHandover, registrar: FakeRegistrar) -> Iterator[WorkerLink]:
    made = WorkerLink(handover.socket, secrets.token_bytes(16), 0, Access.DEVICE_DMA, registrar=registrar)
    made.start()
    yield made
    handover.close()
    registrar.allowed = 1 << 30
    assert made.close()


def offer(handover: FakeHandover, *segments: int) -> FakePeer:
    peer = handover.accept()
    peer.expect("hello")
    peer.welcome()
    send(peer, *segments)
    return peer


def send(peer: FakePeer, *segments: int) -> None:
    for file in peer.segments(*segments, nbytes=MIB):
        os.close(file)


def reported(peer: FakePeer) -> list[int]:
    return list(peer.expect("mapped").mapped.segment_ids)


def test_all_segments_are_registered_before_any_is_reported(
    handover: FakeHandover, registrar: FakeRegistrar, link: WorkerLink
) -> None:
    registrar.allowed = 2
    peer = offer(handover, 3, 4, 5)
    wait_for(lambda: len(registrar.told) == 2)
    peer.expect_silence()
    assert link.mapping is None
    registrar.allowed = 1
    assert reported(peer) == [3, 4, 5]
    assert registrar.told == [("register", 3), ("register", 4), ("register", 5)]
    assert wait_for(lambda: link.mapping).segment_ids == {3, 4, 5}


def test_later_segments_are_registered_as_they_come(
    handover: FakeHandover, registrar: FakeRegistrar, link: WorkerLink
) -> None:
    peer = offer(handover, 3)
    assert reported(peer) == [3]
    registrar.allowed = 0
    send(peer, 4)
    wait_for(lambda: link.mapping and 4 in link.mapping.segment_ids)
    peer.expect_silence()
    registrar.allowed = 1
    assert reported(peer) == [4]


def test_orders_are_obeyed_while_segments_are_registered(
    handover: FakeHandover, registrar: FakeRegistrar, link: WorkerLink
) -> None:
    peer = offer(handover, 3)
    assert reported(peer) == [3]
    registrar.allowed = 1
    send(peer, 4, 5, 6)
    wait_for(lambda: ("register", 4) in registrar.told)
    peer.fence(1, session_below=2)
    assert peer.expect("fenced").fenced.fence == 1
    peer.retire(3, 5)
    assert list(peer.expect("retired").retired.segment_ids) == [3, 5]
    assert ("release", 3) in registrar.told
    registrar.allowed = 5
    # The one that went meanwhile is neither registered nor reported.
    assert reported(peer) == [4, 6]
    assert ("gone", 5) in registrar.told
    assert ("release", 5) not in registrar.told


def test_a_segment_is_released_before_it_is_unmapped(
    handover: FakeHandover, registrar: FakeRegistrar, link: WorkerLink
) -> None:
    peer = offer(handover, 3, 4)
    assert reported(peer) == [3, 4]
    peer.retire(3)
    peer.expect("retired")
    assert registrar.told[2:] == [("release", 3)]
    mapping = link.mapping
    assert mapping is not None
    copy = mapping.begin(1)
    handover.close()
    wait_for(lambda: link.mapping is None)
    assert registrar.told[3:] == [], "a copy still runs"
    mapping.end(copy)
    wait_for(lambda: map_count(os.getpid(), MAPS) == 0)
    assert registrar.told[3:] == [("release", 4)]


def test_closing_the_link_releases_everything_once(
    handover: FakeHandover, registrar: FakeRegistrar, link: WorkerLink
) -> None:
    peer = offer(handover, 3, 4)
    assert reported(peer) == [3, 4]
    registrar.allowed = 1
    send(peer, 7, 8)
    wait_for(lambda: ("register", 7) in registrar.told)
    link._closing = True
    assert link._wake is not None
    link._wake.ring()
    peer.expect("bye")
    assert sorted(registrar.told[3:]) == [("release", 3), ("release", 4), ("release", 7)]
    assert map_count(os.getpid(), MAPS) == 0


def test_what_the_registrar_refuses_is_not_used_and_its_end_is_told(
    handover: FakeHandover, registrar: FakeRegistrar, link: WorkerLink
) -> None:
    registrar.refuse = 4
    peer = offer(handover, 3, 4)
    peer.expect("bye")
    assert registrar.told == [("register", 3), ("release", 3)]
    assert link.mapping is None
    wait_for(lambda: link.problem == "segment 4 cannot be registered")


def test_memory_that_the_driver_does_not_let_go_of_stays_mapped(
    handover: FakeHandover, registrar: FakeRegistrar, link: WorkerLink
) -> None:
    peer = offer(handover, 3, 4)
    assert reported(peer) == [3, 4]
    mapping = wait_for(lambda: link.mapping)
    registrar.stuck = {3: mapping._segments[3]}
    peer.retire(3)
    # Neither RETIRED nor BYE: only the end of the process proves that nothing writes it (I4).
    peer.expect_end()
    [stuck] = registrar.stuck.values()
    assert stuck.region.mapped
    registrar.stuck = {}
    stuck.region.unmap()
