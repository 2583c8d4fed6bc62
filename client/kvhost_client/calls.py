"""Between the plain data of a session's calls and wire messages: packing, paging, checking what comes back.

No call is made here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain as concatenate
from typing import NamedTuple

from kvhost_client.errors import BadReply, InvalidArgument
from kvhost_client.types import (
    Abort,
    Answer,
    ChainQuery,
    ChainResult,
    Chunk,
    ChunkGrant,
    Found,
    Grant,
    ItemError,
    ItemKind,
    Query,
    Reserved,
    ReserveStatus,
    Semantics,
    Slot,
    StoreId,
    StoreOf,
    Updated,
)
from kvhost_proto.v1 import cache_pb2, common_pb2

KEYS_PER_CALL = 16384
"""The daemon answers no more keys in one lookup, and no more slots in one reserve."""

ITEMS_PER_CALL = 16384
"""So many items of an update go into one message."""


def packed(keys: Sequence[bytes]) -> bytes:
    """Keys back to back. Raises `InvalidArgument` unless they are of one length."""
    joined = b"".join(keys)
    if keys and (not keys[0] or len(joined) != len(keys) * len(keys[0])):
        raise InvalidArgument("the keys of a chain must all have the same length, at least one byte")
    return joined


def chain_message(query: ChainQuery) -> cache_pb2.Chain:
    """A chain as it travels."""
    return cache_pb2.Chain(
        group=query.group,
        semantics=common_pb2.Semantics.Name(query.semantics),
        key_bytes=len(query.keys[0]) if query.keys else 0,
        keys=packed(query.keys),
    )


def chunk_message(chunk: Chunk) -> cache_pb2.Chunk:
    """A chunk as it travels."""
    return cache_pb2.Chunk(group=chunk.group, key=chunk.key, parent=chunk.parent, checksum=chunk.checksum)


class ChainCursor:
    """How far one chain has been asked, and what was found."""

    def __init__(self, query: ChainQuery) -> None:
        self.query = query
        self.asked = 0
        self.done = not query.keys
        self._found: list[bytes] = []
        self._slots: list[int] = []
        self._pins: list[range] = []
        self._checksums: list[int] = []

    def take(self, room: int) -> ChainQuery:
        """The next keys to ask for, at most `room`."""
        keys = self.query.keys
        if self.asked == 0 and len(keys) <= room:
            return self.query
        return ChainQuery(self.query.group, self.query.semantics, keys[self.asked : self.asked + room])

    def add(self, asked: int, answer: cache_pb2.ChainAnswer, pin: bool) -> None:
        """Notes the answer for the `asked` keys taken last. Raises `BadReply` when it does not fit them."""
        found = answer.found
        prefix = self.query.semantics == Semantics.PREFIX
        hits = found.count(Found.HIT)
        complete = len(found) == asked
        if prefix:  # hits, then the one key that is none
            complete = len(found) == min(hits + 1, asked) and found[:hits].count(Found.HIT) == hits
        if not complete or len(answer.slots) != (hits if pin else 0):
            raise BadReply(
                f"kvhostd answered {asked} keys with {len(found)} results, {hits} hits and "
                f"{len(answer.slots)} slots"
            )
        if len(answer.checksums) not in (0, hits):
            raise BadReply(f"kvhostd answered {hits} hits with {len(answer.checksums)} checksums")
        self._found.append(found)
        if pin and hits:
            # Earlier pages without any checksum, or this one: 0 says that none is known.
            self._checksums.extend(answer.checksums or [0] * hits)
            self._slots.extend(answer.slots)
            self._pins.append(range(answer.first_pin_id, answer.first_pin_id + hits))
        self.asked += asked
        self.done = self.asked == len(self.query.keys) or (prefix and hits < asked)

    def pin_ids(self) -> Sequence[int]:
        """Everything pinned so far."""
        if len(self._pins) == 1:
            return self._pins[0]
        return list(concatenate.from_iterable(self._pins))

    def result(self) -> ChainResult:
        """The answer for the whole chain."""
        checksums = self._checksums if any(self._checksums) else []
        return ChainResult(b"".join(self._found), self._slots, self.pin_ids(), checksums)


class Lookups:
    """Queries on their way through as many calls as they need; most need one."""

    def __init__(self, queries: Iterable[Query], pin: bool) -> None:
        self._pin = pin
        self._queries: list[tuple[int, list[ChainCursor]]] = []
        self._names: list[str] = []
        for query in queries:
            self._queries.append((query.tag, [ChainCursor(chain) for chain in query.chains]))
            self._names.append(query.request)
        self._sent: list[list[tuple[ChainCursor, int]]] = []

    def next_request(self, session_id: bytes) -> cache_pb2.LookupRequest | None:
        """The next call; None when everything is answered. Raises `InvalidArgument` for malformed keys."""
        request = cache_pb2.LookupRequest(session_id=session_id, pin=self._pin)
        self._sent = []
        room = KEYS_PER_CALL
        for number, (tag, cursors) in enumerate(self._queries):
            chains: list[cache_pb2.Chain] = []
            sent: list[tuple[ChainCursor, int]] = []
            for cursor in cursors:
                if not cursor.done and room:
                    part = cursor.take(room)
                    chains.append(chain_message(part))
                    sent.append((cursor, len(part.keys)))
                    room -= len(part.keys)
            if chains:
                # The daemon remembers what it was asked last under a name: the first part, then.
                name, self._names[number] = self._names[number], ""
                request.queries.add(tag=tag, chains=chains, request=name)
                self._sent.append(sent)
        return request if self._sent else None

    def add(self, reply: cache_pb2.LookupReply) -> None:
        """Notes the reply to the latest request. Raises `BadReply` when it does not fit."""
        if [len(answer.chains) for answer in reply.answers] != [len(sent) for sent in self._sent]:
            raise BadReply(f"kvhostd answered {len(self._sent)} queries with {len(reply.answers)} other ones")
        for sent, answer in zip(self._sent, reply.answers, strict=True):
            for (cursor, asked), chain in zip(sent, answer.chains, strict=True):
                cursor.add(asked, chain, self._pin)

    def pin_ids(self) -> list[int]:
        """Everything pinned so far."""
        return [pin for _, cursors in self._queries for cursor in cursors for pin in cursor.pin_ids()]

    def answers(self) -> list[Answer]:
        """One answer a query, in order."""
        return [Answer(tag, [cursor.result() for cursor in cursors]) for tag, cursors in self._queries]


def pins_in(reply: cache_pb2.LookupReply) -> list[int]:
    """The pins that a reply hands out."""
    return [
        chain.first_pin_id + n
        for answer in reply.answers
        for chain in answer.chains
        for n in range(len(chain.slots))
    ]


def grants_in(reply: cache_pb2.ReserveReply) -> list[int]:
    """The store ids that a reply hands out."""
    return [*reply.store_ids, *(store for store in reply.chunk_store_ids if store)]


def reserved(reply: cache_pb2.ReserveReply, count: int, chunks: int) -> Reserved:
    """A reserve's reply as plain data. Raises `BadReply` when it does not fit the question."""
    granted, named = len(reply.store_ids), len(reply.chunk_status)
    if granted > count or len(reply.slots) != granted:
        raise BadReply(
            f"kvhostd answered {count} slots asked with {granted} store ids, {len(reply.slots)} slots"
        )
    if not named == len(reply.chunk_store_ids) == len(reply.chunk_slots) == chunks:
        raise BadReply(f"kvhostd answered {chunks} chunks with {named} other ones")
    by_chunk = zip(reply.chunk_status, reply.chunk_store_ids, reply.chunk_slots, strict=True)
    return Reserved(
        [Grant(StoreId(s), Slot(at)) for s, at in zip(reply.store_ids, reply.slots, strict=True)],
        [ChunkGrant(_status(status), StoreId(s), Slot(at)) for status, s, at in by_chunk],
        reply.pending,
        reply.reason,
    )


def _status(value: int) -> ReserveStatus:
    try:
        return ReserveStatus(value)
    except ValueError:
        return ReserveStatus.UNSPECIFIED


class Items(NamedTuple):
    """What one update carries."""

    assigns: Iterable[StoreOf] = ()
    commits: Iterable[StoreOf] = ()
    aborts: Iterable[Abort] = ()
    releases: Iterable[int] = ()
    touches: Iterable[ChainQuery] = ()


class _Pages:
    """Messages of one update, filled one after the other."""

    def __init__(self, session_id: bytes) -> None:
        self._session_id = session_id
        self._room = 0
        self.requests: list[cache_pb2.UpdateRequest] = []

    def page(self, weight: int = 1) -> cache_pb2.UpdateRequest:
        """The message that takes the next item."""
        if not self.requests or (weight > self._room and self._room < ITEMS_PER_CALL):
            self.requests.append(cache_pb2.UpdateRequest(session_id=self._session_id))
            self._room = ITEMS_PER_CALL
        self._room -= weight
        return self.requests[-1]


def update_requests(session_id: bytes, items: Items) -> list[cache_pb2.UpdateRequest]:
    """The items in as few messages as the limits allow; none for no items.

    In the order in which the daemon works through one message, so that it makes no difference where they
    are cut. A touch counts by its keys and is never cut.
    """
    pages = _Pages(session_id)
    for pin_id in items.releases:
        pages.page().releases.append(pin_id)
    for abort in items.aborts:
        pages.page().aborts.add(store_id=abort.store_id, unquiet_ranks=abort.unquiet_ranks)
    for store in items.assigns:
        pages.page().assigns.add(store_id=store.store_id, chunk=chunk_message(store.chunk))
    for store in items.commits:
        pages.page().commits.add(store_id=store.store_id, chunk=chunk_message(store.chunk))
    for touch in items.touches:
        pages.page(len(touch.keys)).touches.append(chain_message(touch))
    return pages.requests


def updated(reply: cache_pb2.UpdateReply) -> Updated:
    """An update's reply as plain data."""
    errors = [ItemError(_kind(e.kind), e.id, e.code, e.message) for e in reply.errors]
    return Updated(errors, list(reply.superseded))


def _kind(value: int) -> ItemKind:
    try:
        return ItemKind(value)
    except ValueError:
        return ItemKind.UNSPECIFIED
