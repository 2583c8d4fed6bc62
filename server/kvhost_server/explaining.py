"""Why chunks are not there: what is known of each key, in words for people."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvhost_proto.v1 import admin_pb2, common_pb2
from kvhost_server.books import Books
from kvhost_server.errors import Code, Refused
from kvhost_server.fates import MOST_FATES, Cause, Fate
from kvhost_server.ids import ChunkKey, NamespaceNumber, SessionNumber
from kvhost_server.namespace import Namespace, NamespaceSpec, Semantics
from kvhost_server.recall import AskedRequest
from kvhost_server.slots import SlotState

MOST_KEYS = 16384
GROUP_BYTES = 4
_SLICE = 1024


@dataclass(frozen=True)
class Chain:
    """Keys of one group, head first; `hits_then` of them were there when an engine asked."""

    group: int
    keys: list[ChunkKey]
    hits_then: int = 0


def keys_from_hex(namespace: Namespace, texts: Iterable[str]) -> list[ChunkKey]:
    """Keys as people write them: the group index at the end may be left out, and is 0 then.

    Raises:
        Refused: not hex, another length, or too many.
    """
    size = namespace.spec.layout.key_bytes
    keys = []
    for text in texts:
        try:
            key = bytes.fromhex(text)
        except ValueError:
            raise Refused(Code.INVALID_ARGUMENT, f"{text[:80]!r} is not hexadecimal") from None
        if len(key) == size - GROUP_BYTES:
            key += bytes(GROUP_BYTES)
        if len(key) != size:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"{text[:80]!r} has {len(key)} bytes; keys of namespace {namespace.number} have {size} "
                f"(block hash, then {GROUP_BYTES} bytes of group index, which may be left out)",
            )
        keys.append(ChunkKey(key))
    if len(keys) > MOST_KEYS:
        raise Refused(Code.RESOURCE_EXHAUSTED, f"{len(keys)} keys in one call; allowed are {MOST_KEYS}")
    return keys


def chains_of_keys(keys: Sequence[ChunkKey]) -> list[Chain]:
    """The keys by group, each in the order given."""
    groups: dict[int, list[ChunkKey]] = {}
    for key in keys:
        groups.setdefault(int.from_bytes(key[-GROUP_BYTES:], "big"), []).append(key)
    return [Chain(group, members) for group, members in groups.items()]


def chains_of_request(namespace: Namespace, asked: AskedRequest) -> list[Chain]:
    """The chains of a request, as its engine looked them up."""
    size = namespace.spec.layout.key_bytes
    return [
        Chain(
            chain.group,
            [ChunkKey(chain.keys[at : at + size]) for at in range(0, len(chain.keys), size)],
            chain.found.count(1),
        )
        for chain in asked.chains
    ]


def differences(one: NamespaceSpec, other: NamespaceSpec) -> list[str]:
    """Names of what differs between two namespaces: why they do not share."""
    names = sorted(
        name for name in {*one.parts, *other.parts} if one.parts.get(name) != other.parts.get(name)
    )
    return [
        *names,
        *(["namespace name"] if one.name != other.name else []),
        *(["layout"] if one.layout != other.layout else []),
    ]


async def explain(
    books: Books, namespace: Namespace, chains: Sequence[Chain]
) -> list[admin_pb2.ExplainedChain]:
    """What is known of each key. Others may have their turn in between."""
    missing = [key for chain in chains for key in chain.keys if not _ready(namespace, key)]
    fates: dict[ChunkKey, Fate] = {}
    for fates in books.fates.of(namespace.number, missing):  # noqa: B007 - the last one counts
        await asyncio.sleep(0)
    told = []
    for chain in chains:
        explained = admin_pb2.ExplainedChain(group=chain.group, hits_then=chain.hits_then)
        group = next((g for g in namespace.spec.layout.groups if g.id == chain.group), None)
        if group is not None:
            explained.semantics = common_pb2.Semantics.Name(group.semantics)  # type: ignore[assignment]
            explained.tokens_per_chunk = group.tokens_per_chunk
        for start in range(0, len(chain.keys), _SLICE):
            for key in chain.keys[start : start + _SLICE]:
                explained.chunks.append(_explained(books, namespace, key, fates.get(key)))
            await asyncio.sleep(0)
        prefix = group is None or group.semantics is Semantics.PREFIX
        _summarise(explained, prefix)
        told.append(explained)
    return told


def _ready(namespace: Namespace, key: ChunkKey) -> bool:
    slot = namespace.table.index.get(key)
    return slot is not None and namespace.table.state(slot) is SlotState.READY


def _explained(
    books: Books, namespace: Namespace, key: ChunkKey, fate: Fate | None
) -> admin_pb2.ExplainedChunk:
    chunk = admin_pb2.ExplainedChunk(key=key.hex())
    if _ready(namespace, key):
        chunk.state = "ready"
    elif key in books.writing[namespace.number]:
        chunk.state, chunk.why = "writing", "an engine is writing it now"
    elif fate is not None:
        chunk.state = _STATES[fate.cause]
        chunk.why = _WHY[fate.cause].format(taker=fate.taker)
        chunk.ago_s = max(0.0, books.clock() - fate.at)
        chunk.other_namespace = fate.taker if fate.taker != namespace.number else 0
    else:
        _not_here(books, namespace, key, chunk)
    return chunk


def _not_here(books: Books, namespace: Namespace, key: ChunkKey, chunk: admin_pb2.ExplainedChunk) -> None:
    for other in books.namespaces.values():
        if other is not namespace and key in other.table.index:
            apart = ", ".join(differences(namespace.spec, other.spec)) or "nothing but their reset"
            chunk.state, chunk.other_namespace = "elsewhere", other.number
            chunk.why = f"namespace {other.number} has it, which differs in: {apart}"
            return
    chunk.state = "unknown"
    reset = books.fates.resets.get(namespace.number)
    if reset is not None:
        chunk.why = "not stored since the namespace was reset"
        chunk.ago_s = books.clock() - reset
    else:
        chunk.why = f"never stored here, as far as the last {MOST_FATES:,} that went are remembered"
    refused = [
        (session.refused_at, session.number, session.refused_why)
        for number in namespace.sessions
        if (session := books.sessions[SessionNumber(number)]).refused_why
    ]
    if refused:
        at, number, why = max(refused)
        chunk.why += f"; session {number} was refused slots {books.clock() - at:.0f} s ago: {why}"


def _summarise(explained: admin_pb2.ExplainedChain, prefix: bool) -> None:
    chunks = explained.chunks
    ready = [chunk.state == "ready" for chunk in chunks]
    explained.usable = (ready.index(False) if False in ready else len(ready)) if prefix else sum(ready)
    tokens = explained.tokens_per_chunk
    text = f"{explained.usable} of {len(chunks)} chunks can be loaded"
    if tokens:
        text += f" ({explained.usable * tokens} of {len(chunks) * tokens} tokens)"
    first = ready.index(False) if False in ready else None
    if first is not None:
        text += f"; chunk {first + 1} is missing: {chunks[first].why}"
    if prefix and sum(ready) > explained.usable:
        text += f"; {sum(ready) - explained.usable} behind it are there and of no use without it"
    explained.summary = text


_STATES = {
    Cause.ROOM: "evicted",
    Cause.SEGMENT: "evicted",
    Cause.LIMIT: "evicted",
    Cause.OPERATOR: "evicted",
    Cause.RESET: "evicted",
    Cause.NO_SPACE: "refused",
    Cause.BOUND: "refused",
    Cause.ABORTED: "aborted",
}
_WHY = {
    Cause.ROOM: "evicted to make room in its own namespace",
    Cause.SEGMENT: "evicted with its segment, which went to namespace {taker}",
    Cause.LIMIT: "evicted for a lower limit of its namespace",
    Cause.OPERATOR: "evicted by an operator",
    Cause.RESET: "dropped by a reset",
    Cause.NO_SPACE: "never stored: every slot was held when an engine asked for one",
    Cause.BOUND: "never stored: the engine's session held as much as it may",
    Cause.ABORTED: "never stored: the engine began to write it and gave up",
}


def best_namespace(books: Books, texts: Sequence[str]) -> NamespaceNumber | None:
    """Where most of these keys are, when nobody said which namespace is meant; None when nowhere."""
    best, most = None, 0
    for namespace in books.namespaces.values():
        try:
            keys = keys_from_hex(namespace, texts[:_SLICE])
        except Refused:
            continue
        here = sum(_ready(namespace, key) for key in keys)
        if here > most:
            best, most = namespace.number, here
    return best
