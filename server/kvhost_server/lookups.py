"""Bounds on what one call may ask, checked before any of it is done, and lookups in slices (I13).

A peer's message of a few megabytes can name millions of things; the loop serves everybody.
"""

import asyncio
from collections.abc import Callable, Iterator

from kvhost_proto.v1 import cache_pb2, common_pb2
from kvhost_server.checks import check_keys
from kvhost_server.errors import Code, Refused
from kvhost_server.namespace import Namespace
from kvhost_server.reading import MAX_KEYS_PER_CALL, ChainAnswer, Found

MAX_ITEMS_PER_UPDATE = 16384
MAX_UNQUIET_RANKS = 1 << 20
MAX_TOUCHED_KEYS = 262144
_PER_SLICE = 4096

Ask = Callable[[cache_pb2.Chain, bytes], ChainAnswer]
"""Looks these keys of a chain up, as of now."""


def check_lookup(request: cache_pb2.LookupRequest, namespace: Namespace) -> None:
    """Everything is checked before anything is pinned: a lookup is answered whole, or has changed nothing.

    Raises:
        Refused: more queries, chains or keys than allowed, an unknown group, keys of another length.
    """
    _at_most(MAX_KEYS_PER_CALL, "queries in one lookup", len(request.queries))
    _at_most(MAX_KEYS_PER_CALL, "chains in one lookup", sum(len(query.chains) for query in request.queries))
    size = namespace.spec.layout.key_bytes
    keys = sum(len(chain.keys) for query in request.queries for chain in query.chains) // size
    _at_most(MAX_KEYS_PER_CALL, "keys in one lookup", keys)
    for query in request.queries:
        for chain in query.chains:
            check_chain(chain, namespace)


def check_chain(chain: cache_pb2.Chain, namespace: Namespace) -> None:
    """Raises `Refused` for a chain that the namespace cannot have."""
    if chain.semantics not in (common_pb2.SEMANTICS_PREFIX, common_pb2.SEMANTICS_SET):
        raise Refused(
            Code.INVALID_ARGUMENT, f"semantics {chain.semantics}; allowed are 1 (prefix) and 2 (set)"
        )
    size = check_keys(namespace, chain.group, chain.keys)
    if chain.keys and chain.key_bytes != size:
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"key_bytes is {chain.key_bytes}; keys of the namespace have {size} bytes",
        )


def check_update(request: cache_pb2.UpdateRequest) -> None:
    """Raises `Refused` when the update has more of anything than allowed."""
    items = len(request.assigns) + len(request.commits) + len(request.aborts) + len(request.releases)
    _at_most(MAX_ITEMS_PER_UPDATE, "items in one update", items + len(request.touches))
    ranks = sum(len(abort.unquiet_ranks) for abort in request.aborts)
    _at_most(MAX_UNQUIET_RANKS, "unquiet ranks in one update", ranks)
    keys = sum(len(chain.keys) // max(1, chain.key_bytes) for chain in request.touches)
    _at_most(MAX_TOUCHED_KEYS, "touched keys in one update", keys)


async def answer_at_once(request: cache_pb2.LookupRequest, ask: Ask) -> list[cache_pb2.LookupAnswer]:
    """Every chain in one go: for pins, which either all belong to a living session or were never made."""
    return [
        cache_pb2.LookupAnswer(
            tag=query.tag, chains=[_message(ask(chain, chain.keys)) for chain in query.chains]
        )
        for query in request.queries
    ]


async def answer_in_slices(request: cache_pb2.LookupRequest, ask: Ask) -> list[cache_pb2.LookupAnswer]:
    """Others may have their turn after some thousand keys or chains."""
    answers = []
    done = 0
    for query in request.queries:
        chains = []
        for chain in query.chains:
            found = b""
            for part in _parts(chain):
                found += ask(chain, part).found
                done += 1 + len(part) // max(1, chain.key_bytes)
                if done >= _PER_SLICE:
                    done = 0
                    await asyncio.sleep(0)
                if chain.semantics == common_pb2.SEMANTICS_PREFIX and found[-1:] != bytes([Found.YES]):
                    break
            chains.append(cache_pb2.ChainAnswer(found=found))
        answers.append(cache_pb2.LookupAnswer(tag=query.tag, chains=chains))
        done += 1
    return answers


def _parts(chain: cache_pb2.Chain) -> Iterator[bytes]:
    step = _PER_SLICE * max(1, chain.key_bytes)
    for start in range(0, len(chain.keys), step):
        yield chain.keys[start : start + step]


def _message(answer: ChainAnswer) -> cache_pb2.ChainAnswer:
    return cache_pb2.ChainAnswer(
        found=answer.found, slots=answer.slots, first_pin_id=answer.first_pin, checksums=answer.checksums
    )


def _at_most(most: int, what: str, count: int) -> None:
    if count > most:
        raise Refused(Code.RESOURCE_EXHAUSTED, f"{count} {what}; allowed are {most}: ask in pages")
