"""Between wire messages and the manager's own types: checks on the way in, packing on the way out (I13)."""

from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import grpc

from kvhost_proto.v1 import cache_pb2, common_pb2
from kvhost_server.checks import ChunkRequest
from kvhost_server.errors import Code, Refused
from kvhost_server.ids import ChunkKey
from kvhost_server.namespace import Group, Layout, NamespaceSpec, Semantics
from kvhost_server.notices import Ended, Fenced, Mapped, Notice, Recall, Resync

MAX_SHARD_BYTES = 1 << 40
MAX_RANKS = 1024
MAX_KEY_BYTES = 256
MAX_GROUPS = 256
MAX_PARTS = 256
MAX_TEXT = 65536
MAX_SPEC_BYTES = 256 << 10
LONGEST_REFUSAL = 1000
"""A longer one does not fit into what gRPC allows for a status: the client would see another error."""

_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_Self = TypeVar("_Self")
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
_Params = ParamSpec("_Params")


def answers(
    handler: Callable[Concatenate[_Self, _Request, _Params], Awaitable[_Reply]],
) -> Callable[[_Self, _Request, Any], Awaitable[_Reply]]:
    """A gRPC handler whose `Refused` becomes the status it names. The handler takes the request alone."""

    @wraps(handler)
    async def wrapped(self: _Self, request: _Request, context: Any) -> _Reply:
        try:
            return await handler(self, request)  # type: ignore[call-arg]
        except Refused as refused:
            await refuse(context, refused)

    return wrapped


async def refuse(context: Any, refused: Refused) -> NoReturn:
    """Ends a call with the status and the sentence of a refusal."""
    await context.abort(_STATUS[refused.code], refused.message[:LONGEST_REFUSAL])
    raise AssertionError("abort returned")


def spec_of(message: common_pb2.NamespaceSpec) -> NamespaceSpec:
    """The namespace a peer describes.

    Raises:
        Refused: a number or text outside what is allowed; the message says which.
    """
    layout = message.layout
    _within("bytes of the namespace's description", message.ByteSize(), 0, MAX_SPEC_BYTES)
    _within("layout.shard_bytes", layout.shard_bytes, 1, MAX_SHARD_BYTES)
    _within("layout.ranks", layout.ranks, 1, MAX_RANKS)
    _within("layout.key_bytes", layout.key_bytes, 8, MAX_KEY_BYTES)
    _within("number of layout.groups", len(layout.groups), 1, MAX_GROUPS)
    _within("number of parts", len(message.parts), 0, MAX_PARTS)
    if layout.shards not in (1, layout.ranks):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"layout.shards is {layout.shards}; allowed are 1 and the number of ranks, {layout.ranks}",
        )
    for name, text in (
        ("name", message.name),
        ("model", message.model),
        *((p.name, p.value) for p in message.parts),
    ):
        _within(f"length of {name[:64]!r}", len(text), 0, MAX_TEXT)
    parts = {part.name: part.value for part in message.parts}
    if len(parts) != len(message.parts):
        raise Refused(Code.INVALID_ARGUMENT, "a digest part is named twice")
    groups = tuple(
        Group(group.id, _semantics(group.semantics), group.tokens_per_chunk) for group in layout.groups
    )
    if len({group.id for group in groups}) != len(groups):
        raise Refused(Code.INVALID_ARGUMENT, "a KV cache group is named twice")
    return NamespaceSpec(
        name=message.name,
        model=message.model,
        parts=parts,
        layout=Layout(layout.shard_bytes, layout.shards, layout.ranks, layout.key_bytes, groups),
    )


def layout_message(layout: Layout) -> common_pb2.Layout:
    return common_pb2.Layout(
        shard_bytes=layout.shard_bytes,
        shards=layout.shards,
        ranks=layout.ranks,
        key_bytes=layout.key_bytes,
        groups=[
            common_pb2.Group(
                id=g.id, semantics=common_pb2.Semantics.Name(g.semantics), tokens_per_chunk=g.tokens_per_chunk
            )
            for g in layout.groups
        ],
    )


def chunk_of(message: cache_pb2.Chunk) -> ChunkRequest:
    """A chunk that a peer names; lengths are checked by the manager, who knows the namespace."""
    parent = ChunkKey(message.parent) if message.parent else None
    return ChunkRequest(message.group, ChunkKey(message.key), parent, message.checksum)


def notice_message(notice: Notice) -> cache_pb2.Notice:
    """A notice as it travels. `Ended` does not: it ends the stream."""
    match notice:
        case Mapped(mapped, ranks, ready):
            return cache_pb2.Notice(mapped=cache_pb2.Mapped(mapped_ranks=mapped, ranks=ranks, ready=ready))
        case Recall(grants):
            return cache_pb2.Notice(recall=cache_pb2.Recall(grants=grants))
        case Fenced(slots):
            return cache_pb2.Notice(fenced=cache_pb2.Fenced(slots=slots))
        case Resync():
            return cache_pb2.Notice(resync=cache_pb2.Resync())
        case Ended(why):
            return cache_pb2.Notice(going_down=cache_pb2.GoingDown(reason=why))


def printable(text: str, longest: int) -> str:
    """A peer's words for people: one line, nothing that would move a cursor or forge a log record."""
    text = text[:longest]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def pack(keys: Iterable[ChunkKey | None], key_bytes: int) -> bytes:
    """Keys back to back; None as zero bytes."""
    nothing = bytes(key_bytes)
    return b"".join(nothing if key is None else key for key in keys)


def _semantics(value: int) -> Semantics:
    try:
        return Semantics(value)
    except ValueError:
        raise Refused(
            Code.INVALID_ARGUMENT, f"semantics {value}; allowed are 1 (prefix) and 2 (set)"
        ) from None


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise Refused(Code.INVALID_ARGUMENT, f"{what} is {value}; allowed are {low} to {high}")
