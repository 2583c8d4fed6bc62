"""What is known of one request: keys on the wire, parents, where its chain is cut."""

from __future__ import annotations

from kvhost_client.types import Chunk, Semantics
from kvhost_connector.namespace import Group
from kvhost_connector.requests import RequestView, StoredKeys

FULL, WINDOW = Group(0, True, 16), Group(3, False, 32)


def key(number: int, group: int = 0) -> bytes:
    return bytes([number]) * 32 + group.to_bytes(4, "big")


def view(adapter: bytes = b"") -> RequestView:
    chains = [[key(number) for number in range(1, 7)], [key(number, 3) for number in range(1, 4)]]
    return RequestView("r", (FULL, WINDOW), chains, adapter)


def test_the_parent_of_a_chunk_is_the_one_before_it_in_full_attention_only() -> None:
    made = view()
    assert made.chunk(key(1), *made.place(key(1), 16)) == Chunk(0, key(1), b"")
    assert made.chunk(key(3), *made.place(key(3), 48)) == Chunk(0, key(3), key(2))
    assert made.chunk(key(2, 3), *made.place(key(2, 3), 64)) == Chunk(3, key(2, 3), b"")
    # A partly filled chunk continues the last full one.
    assert made.chunk(key(9), *made.place(key(9), 48 + 5)) == Chunk(0, key(9), key(3))


def test_questions_name_groups_and_how_they_are_looked_up() -> None:
    full, window = view().all_chains()
    assert (full.group, full.semantics, len(full.keys)) == (0, Semantics.PREFIX, 6)
    assert (window.group, window.semantics, len(window.keys)) == (3, Semantics.SET, 3)
    assert [query.keys for query in view().grouped([key(2, 3), key(1), key(2)])] == [
        [key(1), key(2)],
        [key(2, 3)],
    ]


def test_a_request_without_full_chunks_asks_nothing() -> None:
    assert RequestView("r", (FULL,), [[]]).all_chains() == []


def test_keys_grow_with_the_request() -> None:
    chain: list[bytes] = []
    made = RequestView("r", (FULL,), [chain])
    chain.append(key(1))
    assert [query.keys for query in made.all_chains()] == [[key(1)]]


def test_an_adapter_is_in_every_key_that_leaves_and_in_parents() -> None:
    plain, adapted = view(), view(b"a" * 32)
    for query, other in zip(plain.all_chains(), adapted.all_chains(), strict=True):
        assert not set(query.keys) & set(other.keys)
        assert {len(sent) for sent in other.keys} == {36}
        assert {sent[-4:] for sent in other.keys} == {sent[-4:] for sent in query.keys}
    chunk = adapted.chunk(key(2), *adapted.place(key(2), 32))
    assert chunk.parent == adapted.wire(key(1)) != key(1)


def test_what_comes_behind_a_removed_chunk_is_cut_off() -> None:
    made, removed = view(), StoredKeys()
    removed.add(key(3))
    removed.add(key(1, 3))
    made.find_cuts(removed, 1)
    assert [made.is_cut_off(*made.place(key(number), 16 * number)) for number in range(1, 6)] == [
        *(False, False, False),
        *(True, True),
    ]
    # A window needs nothing before it.
    assert not made.is_cut_off(*made.place(key(3, 3), 96))
    # Nothing is looked at again until something else is removed.
    removed.discard(key(3))
    made.find_cuts(removed, 1)
    assert made.is_cut_off(*made.place(key(5), 80))
    made.find_cuts(removed, 2)
    assert not made.is_cut_off(*made.place(key(5), 80))


def test_beliefs_are_bounded_and_the_oldest_goes() -> None:
    keys = StoredKeys(limit=3)
    for number in (1, 2, 3, 1, 4):
        keys.add(key(number))
    assert [number for number in range(1, 5) if key(number) in keys] == [1, 3, 4]
    assert keys.clear() == [key(3), key(1), key(4)]
    assert len(keys) == 0
