"""KV events: what was announced and can be loaded, and its end; replayed they are the key set (H3, H4)."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.kv_offload.base import Medium, OffloadingEvent

from kvhost_connector.events import EventLog

KEYS = [bytes([number]) * 36 for number in range(8)]


def replay(events: Iterable[OffloadingEvent]) -> set[bytes]:
    known: set[bytes] = set()
    for event in events:
        assert event.medium is Medium.CPU
        known = known - set(event.keys) if event.removed else known | set(event.keys)
    return known


def test_stored_and_removed_chunks_are_told_in_order() -> None:
    log = EventLog(True)
    log.stored(KEYS[:4])
    log.removed(KEYS[1:3])
    assert replay(log.take()) == {KEYS[0], KEYS[3]}
    assert log.take() == []


def test_what_was_not_announced_is_not_retracted() -> None:
    log = EventLog(True)
    log.stored(KEYS[:1])
    log.take()
    log.removed(KEYS[1:])
    assert log.take() == []


def test_the_end_of_everything_retracts_what_was_announced() -> None:
    log = EventLog(True)
    log.stored(KEYS)
    log.removed(KEYS[:2])
    told = log.take()
    log.all_removed()
    ends = log.take()
    assert replay([*told, *ends]) == set()
    assert [set(event.keys) for event in ends] == [set(KEYS[2:])]
    log.all_removed()
    assert log.take() == []


def test_chunks_of_adapters_are_told_by_the_keys_that_vllm_knows() -> None:
    log = EventLog(True)
    log.learn({b"wire": b"own", KEYS[0]: KEYS[0]})
    log.stored([b"wire", KEYS[0]])
    log.removed([b"wire"])
    assert [list(event.keys) for event in log.take()] == [[b"own", KEYS[0]], [b"own"]]


def test_nothing_is_kept_when_events_are_off() -> None:
    log = EventLog(False)
    log.learn({b"wire": b"own"})
    log.stored(KEYS)
    log.removed(KEYS)
    log.all_removed()
    assert log.take() == []
