"""Packing, paging, and what is checked of the answers."""

import pytest

from kvhost_client import calls
from kvhost_client.errors import BadReply, InvalidArgument
from kvhost_client.types import Abort, ChainQuery, Chunk, Query, ReserveStatus, Semantics, StoreOf
from kvhost_proto.v1 import cache_pb2
from tests.client.engine import key, keys, prefix

LIMIT = calls.KEYS_PER_CALL


def answer(request: cache_pb2.LookupRequest, hits: int, first_pin: int) -> cache_pb2.LookupReply:
    """The reply of a daemon that has the first `hits` keys of every chain of the request."""
    reply = cache_pb2.LookupReply()
    for query in request.queries:
        told = reply.answers.add(tag=query.tag)
        for chain in query.chains:
            count = len(chain.keys) // chain.key_bytes
            there = min(hits, count)
            found = b"\1" * there + b"\0" * min(1, count - there)
            told.chains.add(
                found=found, slots=range(500, 500 + there) if request.pin else [], first_pin_id=first_pin
            )
    return reply


def test_a_short_list_is_one_call() -> None:
    lookups = calls.Lookups([prefix(keys("a", 3), tag=9)], pin=True)
    request = lookups.next_request(b"s" * 16)
    assert request is not None
    assert request.pin
    assert request.queries[0].chains[0].keys == b"".join(keys("a", 3))
    lookups.add(answer(request, 2, 40))
    assert lookups.next_request(b"s" * 16) is None
    (result,) = lookups.answers()
    assert result.tag == 9
    assert result.chains[0].found == b"\1\1\0"
    assert list(result.chains[0].pin_ids) == [40, 41]
    assert result.chains[0].first_pin_id == 40
    assert result.chains[0].hits == 2


def test_a_long_list_is_paged_and_its_pins_are_named_one_by_one() -> None:
    wanted = keys("long", 2 * LIMIT + 5)
    lookups = calls.Lookups([prefix(wanted)], pin=True)
    sizes, first_pin = [], 100
    while (request := lookups.next_request(b"s")) is not None:
        sizes.append(len(request.queries[0].chains[0].keys) // 36)
        lookups.add(answer(request, LIMIT, first_pin))
        first_pin += 100_000
    assert sizes == [LIMIT, LIMIT, 5]
    chain = lookups.answers()[0].chains[0]
    assert chain.hits == len(wanted)
    assert len(chain.slots) == len(chain.pin_ids) == len(wanted)
    assert chain.pin_ids[LIMIT] == 100_100
    assert len(set(chain.pin_ids)) == len(wanted)


def test_a_prefix_that_ends_in_the_first_page_asks_for_no_second_one() -> None:
    lookups = calls.Lookups([prefix(keys("long", LIMIT + 1))], pin=False)
    request = lookups.next_request(b"s")
    assert request is not None
    lookups.add(answer(request, 7, 0))
    assert lookups.next_request(b"s") is None
    assert lookups.answers()[0].chains[0].found == b"\1" * 7 + b"\0"


def test_many_queries_share_the_room_of_a_call() -> None:
    half = LIMIT // 2 + 1
    lookups = calls.Lookups([prefix(keys(f"q{n}", half), tag=n) for n in range(3)], pin=False)
    calls_made = 0
    while (request := lookups.next_request(b"s")) is not None:
        total = sum(len(c.keys) // 36 for q in request.queries for c in q.chains)
        assert total <= LIMIT
        lookups.add(answer(request, LIMIT, 0))
        calls_made += 1
    assert calls_made == 2
    assert [a.tag for a in lookups.answers()] == [0, 1, 2]
    assert all(a.chains[0].hits == half for a in lookups.answers())


def test_no_keys_are_no_call() -> None:
    lookups = calls.Lookups([prefix([])], pin=True)
    assert lookups.next_request(b"s") is None
    assert lookups.answers()[0].chains[0].found == b""


@pytest.mark.parametrize("wrong", [[b"a", b"bb"], [b"", b""]])
def test_keys_of_different_lengths_are_refused(wrong: list[bytes]) -> None:
    with pytest.raises(InvalidArgument, match="same length"):
        calls.Lookups([prefix(wrong)], pin=False).next_request(b"s")


@pytest.mark.parametrize(
    ("chain", "pin"),
    [
        (cache_pb2.ChainAnswer(found=b"\1\1\1\1"), False),
        (cache_pb2.ChainAnswer(found=b""), False),
        (cache_pb2.ChainAnswer(found=b"\1\1"), False),
        (cache_pb2.ChainAnswer(found=b"\0\0\0"), False),
        (cache_pb2.ChainAnswer(found=b"\0\1"), False),
        (cache_pb2.ChainAnswer(found=b"\1\0\1"), False),
        (cache_pb2.ChainAnswer(found=b"\1\1\1", slots=[1, 2]), True),
        (cache_pb2.ChainAnswer(found=b"\0", slots=[1]), True),
        (cache_pb2.ChainAnswer(found=b"\0", slots=[1]), False),
        (cache_pb2.ChainAnswer(found=b"\1\1\0", slots=[1, 2], checksums=[5]), True),
    ],
)
def test_an_answer_that_does_not_fit_is_not_believed(chain: cache_pb2.ChainAnswer, pin: bool) -> None:
    lookups = calls.Lookups([prefix(keys("a", 3))], pin)
    lookups.next_request(b"s")
    with pytest.raises(BadReply):
        lookups.add(cache_pb2.LookupReply(answers=[cache_pb2.LookupAnswer(chains=[chain])]))


def test_another_number_of_answers_is_not_believed() -> None:
    lookups = calls.Lookups([prefix(keys("a", 3))], pin=False)
    lookups.next_request(b"s")
    with pytest.raises(BadReply):
        lookups.add(cache_pb2.LookupReply())


@pytest.mark.parametrize(
    "reply",
    [
        cache_pb2.ReserveReply(store_ids=[1, 2, 3], slots=[1, 2, 3]),
        cache_pb2.ReserveReply(store_ids=[1], slots=[]),
        cache_pb2.ReserveReply(
            chunk_status=[cache_pb2.RESERVE_STATUS_RESERVED], chunk_store_ids=[1], chunk_slots=[1]
        ),
    ],
)
def test_a_reserve_answer_that_does_not_fit_is_not_believed(reply: cache_pb2.ReserveReply) -> None:
    with pytest.raises(BadReply):
        calls.reserved(reply, count=2, chunks=0)


def test_a_reserve_answer_as_plain_data() -> None:
    reply = cache_pb2.ReserveReply(
        store_ids=[11],
        slots=[1 << 32],
        chunk_status=[1, 2, 99],  # type: ignore[list-item]
        chunk_store_ids=[12, 0, 0],
        chunk_slots=[3, 0, 0],
        pending=True,
        reason="soon",
    )
    got = calls.reserved(reply, count=2, chunks=3)
    assert got.grants == [(11, 1 << 32)]
    assert [chunk.status for chunk in got.chunks] == [
        ReserveStatus.RESERVED,
        ReserveStatus.EXISTS,
        ReserveStatus.UNSPECIFIED,
    ]
    assert got.store_ids() == [11, 12]
    assert calls.grants_in(reply) == [11, 12]
    assert (got.pending, got.reason) == (True, "soon")


def test_an_update_is_one_message_until_the_limit() -> None:
    chunk = Chunk(0, key("k"), key("p"), checksum=5)
    items = calls.Items(
        [StoreOf(1, chunk)], [StoreOf(2, chunk)], [Abort(3, [0, 1])], [4], prefix(keys("t", 2)).chains
    )
    (request,) = calls.update_requests(b"s", items)
    assert request.assigns[0].chunk.parent == key("p")
    assert request.commits[0].chunk.checksum == 5
    assert list(request.aborts[0].unquiet_ranks) == [0, 1]
    assert list(request.releases) == [4]
    assert request.touches[0].key_bytes == 36
    assert calls.update_requests(b"s", calls.Items()) == []


def test_a_large_update_is_cut_in_the_order_in_which_the_daemon_works() -> None:
    stores = [StoreOf(n, Chunk(0, key("k"))) for n in range(10)]
    items = calls.Items(stores, stores, [], range(calls.ITEMS_PER_CALL - 5), [])
    first, second = calls.update_requests(b"s", items)
    assert len(first.releases) == calls.ITEMS_PER_CALL - 5
    assert [s.store_id for s in first.assigns] == [0, 1, 2, 3, 4]
    assert [s.store_id for s in second.assigns] == [5, 6, 7, 8, 9]
    assert len(second.commits) == 10


def test_a_touch_is_never_cut() -> None:
    long = ChainQuery(0, Semantics.PREFIX, keys("t", LIMIT + 10))
    items = calls.Items([], [], [], [1], [long, long])
    sizes = [[len(t.keys) // 36 for t in r.touches] for r in calls.update_requests(b"s", items)]
    assert sizes == [[], [LIMIT + 10], [LIMIT + 10]]


def test_pins_of_a_reply_are_all_found() -> None:
    request = calls.Lookups(
        [Query(0, [*prefix(keys("a", 2)).chains, *prefix(keys("b", 3)).chains])], True
    ).next_request(b"")
    assert request is not None
    assert calls.pins_in(answer(request, 5, 30)) == [30, 31, 30, 31, 32]
