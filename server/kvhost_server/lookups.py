"""Lookups as they travel: read and checked before any of it is done, answered at once or in slices; and the
bounds on what one update may ask (I13).

A peer's message of a few megabytes can name millions of things; the loop serves everybody. This is the path
of every request of every engine: each field of a message is read once, because reading one copies it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvhost_proto.v1 import cache_pb2, common_pb2
from kvhost_server.checks import check_keys
from kvhost_server.errors import Code, Refused
from kvhost_server.namespace import Namespace
from kvhost_server.reading import MAX_KEYS_PER_CALL, ChainAnswer, Found

MAX_ITEMS_PER_UPDATE = 16384
MAX_UNQUIET_RANKS = 1 << 20
MAX_TOUCHED_KEYS = 262144
_PER_SLICE = 4096
_SMALL = _PER_SLICE * 8
"""Bytes of keys that are surely no more than one slice."""
_FOUND = bytes([Found.YES])


class ChainAsked(NamedTuple):
    """The keys of one group, back to back; of the namespace's length."""

    group: int
    semantics: int
    keys: bytes


class QueryAsked(NamedTuple):
    """One query of a lookup; `tag` is the caller's, `request` the engine's name of what it is for."""

    tag: int
    chains: list[ChainAsked]
    request: str = ""


Ask = Callable[[ChainAsked, bytes], ChainAnswer]
"""Looks these keys of a chain up, as of now."""


def read_lookup(request: cache_pb2.LookupRequest, namespace: Namespace) -> list[QueryAsked]:
    """What is asked. Everything is checked before anything is pinned: a lookup is answered whole, or has
    changed nothing.

    Raises:
        Refused: more queries, chains or keys than allowed, an unknown group, keys of another length.
    """
    queries = request.queries
    _at_most(MAX_KEYS_PER_CALL, "queries in one lookup", len(queries))
    _at_most(MAX_KEYS_PER_CALL, "chains in one lookup", sum([len(query.chains) for query in queries]))
    asked = [
        QueryAsked(query.tag, [_read(chain, namespace) for chain in query.chains], query.request)
        for query in queries
    ]
    nbytes = sum([len(chain.keys) for query in asked for chain in query.chains])
    _at_most(MAX_KEYS_PER_CALL, "keys in one lookup", nbytes // namespace.spec.layout.key_bytes)
    return asked


def check_chain(chain: cache_pb2.Chain, namespace: Namespace) -> None:
    """Raises `Refused` for a chain that the namespace cannot have."""
    _read(chain, namespace)


def check_update(request: cache_pb2.UpdateRequest) -> None:
    """Raises `Refused` when the update has more of anything than allowed."""
    items = len(request.assigns) + len(request.commits) + len(request.aborts) + len(request.releases)
    _at_most(MAX_ITEMS_PER_UPDATE, "items in one update", items + len(request.touches))
    ranks = sum(len(abort.unquiet_ranks) for abort in request.aborts)
    _at_most(MAX_UNQUIET_RANKS, "unquiet ranks in one update", ranks)
    keys = sum(len(chain.keys) // max(1, chain.key_bytes) for chain in request.touches)
    _at_most(MAX_TOUCHED_KEYS, "touched keys in one update", keys)


Answered = list[list[ChainAnswer]]
"""For each query the answers to its chains, in the order asked."""


async def answer_lookup(asked: Sequence[QueryAsked], ask: Ask, key_bytes: int, pin: bool) -> Answered:
    """Looks everything up.

    Pins are made in one go: they either all belong to a living session or were never made. Otherwise others
    may have their turn after some thousand keys or chains.
    """
    if pin or (len(asked) == 1 and len(asked[0].chains) == 1 and len(asked[0].chains[0].keys) <= _SMALL):
        return [[ask(chain, chain.keys) for chain in query.chains] for query in asked]
    answered: Answered = []
    done = 0
    for query in asked:
        answers = []
        done += 1
        for chain in query.chains:
            done += 1 + len(chain.keys) // key_bytes
            if done <= _PER_SLICE:
                answers.append(ask(chain, chain.keys))
            else:
                answers.append(await _in_slices(chain, ask, key_bytes))
                done = 0
        answered.append(answers)
    return answered


def lookup_reply(asked: Sequence[QueryAsked], answered: Answered) -> cache_pb2.LookupReply:
    """The answers as they travel, without a stamp."""
    reply = cache_pb2.LookupReply()
    add = reply.answers.add
    for query, answers in zip(asked, answered, strict=True):
        chains = add(tag=query.tag).chains
        for answer in answers:
            if answer.slots:
                chains.add(
                    found=answer.found,
                    slots=answer.slots,
                    first_pin_id=answer.first_pin,
                    checksums=answer.checksums,
                )
            else:
                chains.add(found=answer.found)
    return reply


async def _in_slices(chain: ChainAsked, ask: Ask, key_bytes: int) -> ChainAnswer:
    found = b""
    step = _PER_SLICE * key_bytes
    for start in range(0, len(chain.keys), step):
        await asyncio.sleep(0)
        found += ask(chain, chain.keys[start : start + step]).found
        if chain.semantics == common_pb2.SEMANTICS_PREFIX and found[-1:] != _FOUND:
            break
    return ChainAnswer(found)


def _read(chain: cache_pb2.Chain, namespace: Namespace) -> ChainAsked:
    asked = ChainAsked(chain.group, chain.semantics, chain.keys)
    if asked.semantics not in (common_pb2.SEMANTICS_PREFIX, common_pb2.SEMANTICS_SET):
        raise Refused(
            Code.INVALID_ARGUMENT, f"semantics {asked.semantics}; allowed are 1 (prefix) and 2 (set)"
        )
    size = check_keys(namespace, asked.group, asked.keys)
    if asked.keys and chain.key_bytes != size:
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"key_bytes is {chain.key_bytes}; keys of the namespace have {size} bytes",
        )
    return asked


def _at_most(most: int, what: str, count: int) -> None:
    if count > most:
        raise Refused(Code.RESOURCE_EXHAUSTED, f"{count} {what}; allowed are {most}: ask in pages")
