"""Transfers: over when every rank that takes part has reported, and never reported twice."""

from __future__ import annotations

from kvhost_client.types import Chunk, Grant, Slot, StoreId
from kvhost_connector.holds import Authority, PinnedSlot, Transfer, TransferTable
from kvhost_connector.metadata import Epoch

AUTHORITY = Authority(1, 10, 77, 1)


def grants(*numbers: int) -> list[Grant]:
    return [Grant(StoreId(number), Slot(number)) for number in numbers]


def store(table: TransferTable, *keys: bytes) -> Transfer:
    chunks = tuple(Chunk(0, key) for key in keys)
    given = tuple(grants(*range(1, len(keys) + 1)))
    return table.open_store(AUTHORITY, Epoch(0), req_id="r", keys=keys, chunks=chunks, grants=given)


def test_a_transfer_is_over_when_every_rank_that_takes_part_has_reported() -> None:
    table = TransferTable(3, [0, 1, 2])
    transfer = store(table, b"a")
    assert table.report(transfer.transfer_id, 0, True) is None
    assert table.report(transfer.transfer_id, 0, True) is None
    assert table.report(transfer.transfer_id, 2, True) is None
    assert table.report(transfer.transfer_id, 1, True) is transfer
    assert transfer.ok
    assert table.report(transfer.transfer_id, 1, True) is None


def test_one_rank_that_failed_fails_the_transfer() -> None:
    table = TransferTable(2, [0, 1])
    transfer = store(table, b"a")
    table.report(transfer.transfer_id, 0, False)
    assert table.report(transfer.transfer_id, 1, True) is transfer
    assert not transfer.ok


def test_only_writers_report_stores_and_all_ranks_report_loads() -> None:
    table = TransferTable(2, [0])
    written = store(table, b"a")
    assert table.report(written.transfer_id, 1, True) is None
    assert table.report(written.transfer_id, 0, True) is written
    load = table.open_load(AUTHORITY, Epoch(0), req_id="r", keys=(b"a",), pins=(PinnedSlot(1, 1),))
    assert table.report(load.transfer_id, 0, True) is None
    assert table.report(load.transfer_id, 1, True) is load


def test_ids_are_never_used_twice_and_foreign_ids_change_nothing() -> None:
    table = TransferTable(1, [0])
    first, second = store(table, b"a"), store(table, b"b")
    assert first.transfer_id != second.transfer_id
    assert table.report(type(first.transfer_id)(99), 0, True) is None
    assert len(table) == 2


def test_keys_being_stored_are_known_until_their_transfer_is_over() -> None:
    table = TransferTable(1, [0])
    transfer = store(table, b"a", b"b")
    assert set(table.storing) == {b"a", b"b"}
    table.report(transfer.transfer_id, 0, True)
    assert not table.storing


def test_an_abandoned_store_frees_its_keys_and_not_those_of_the_next() -> None:
    table = TransferTable(1, [0])
    old = store(table, b"a")
    table.unmark_storing(old)
    new = store(table, b"a")
    table.report(old.transfer_id, 0, True)
    assert table.storing == {b"a": new.transfer_id}


def test_transfers_that_never_left_can_be_taken_out() -> None:
    table = TransferTable(1, [0])
    sent = store(table, b"a")
    table.delivered()
    lost = store(table, b"b")
    assert table.take_undelivered() == [lost]
    assert table.stores() == [sent]
    assert set(table.storing) == {b"a"}
