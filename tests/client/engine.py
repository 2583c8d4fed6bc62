"""An engine without a model: a session and one worker link per rank, in this process.

Run as a program it is an engine process of its own: it does what its arguments say and prints JSON.
"""

from __future__ import annotations

import ctypes
import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from kvhost_client.session import Session
from kvhost_client.types import ChainQuery, Chunk, Query, Semantics, StoreId, StoreOf
from kvhost_client.worker import WorkerLink, WorkerMapping
from kvhost_proto.v1 import cache_pb2, common_pb2
from tests.support import pat, wait_for

KEY_BYTES = 36
SHARD_BYTES = 60_000


def spec(model: str = "test", ranks: int = 1, shards: int = 1) -> common_pb2.NamespaceSpec:
    """A namespace of two groups: 0 with prefix semantics, 1 with set semantics."""
    groups = [
        common_pb2.Group(id=0, semantics=common_pb2.SEMANTICS_PREFIX, tokens_per_chunk=16),
        common_pb2.Group(id=1, semantics=common_pb2.SEMANTICS_SET, tokens_per_chunk=16),
    ]
    return common_pb2.NamespaceSpec(
        model=model,
        parts=[common_pb2.DigestPart(name="model", value=json.dumps(model))],
        layout=common_pb2.Layout(
            shard_bytes=SHARD_BYTES, shards=shards, ranks=ranks, key_bytes=KEY_BYTES, groups=groups
        ),
    )


def key(name: str, group: int = 0) -> bytes:
    """A key as an engine makes it: 32 bytes of hash, then the group."""
    return pat(name, 0, KEY_BYTES - 4) + group.to_bytes(4, "big")


def keys(name: str, count: int, group: int = 0) -> list[bytes]:
    return [key(f"{name}-{n}", group) for n in range(count)]


def prefix(names: Sequence[bytes], tag: int = 0) -> Query:
    return Query(tag, [ChainQuery(0, Semantics.PREFIX, names)])


@contextmanager
def running_copy(mapping: WorkerMapping, session: int, stores: Sequence[int] = ()) -> Iterator[None]:
    """A copy that the mapping allows, until the end of the block."""
    copy = mapping.begin(session, stores)
    assert copy, "the mapping refused the copy"
    try:
        yield
    finally:
        mapping.end(copy)


class Engine:
    """Attached and ready when the constructor returns (unless `ready` is False)."""

    def __init__(
        self, socket: str, ranks: int = 1, shards: int = 1, model: str = "test", ready: bool = True
    ) -> None:
        self.socket = socket
        self.instance_id = secrets.token_bytes(16)
        self.spec = spec(model, ranks, shards)
        self.notices: list[cache_pb2.Notice] = []
        self.ends: list[str] = []
        self.workers = [WorkerLink(socket, self.instance_id, rank) for rank in range(ranks)]
        for worker in self.workers:
            worker.start()
        self.session = Session.open(
            socket,
            instance_id=self.instance_id,
            label="engine under test",
            deadline_s=5.0,
            on_notice=self.notices.append,
            on_end=self.ends.append,
        )
        self.declared = self.session.declare(self.spec, self.tokens)
        if ready:
            self.wait_ready()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokens(self) -> dict[int, bytes]:
        return {rank: worker.token for rank, worker in enumerate(self.workers)}

    @property
    def mapping(self) -> WorkerMapping:
        mapping = self.workers[0].mapping
        assert mapping is not None, self.workers[0].problem
        return mapping

    def wait_ready(self) -> None:
        """All ranks have mapped what there is."""
        wait_for(lambda: any(n.mapped.ready for n in self.notices), what="the workers to be mapped")

    def grant(self, count: int) -> list[tuple[StoreId, int]]:
        """So many slots, waiting for the workers to map new segments."""
        got: list[tuple[StoreId, int]] = []

        def enough() -> bool:
            reserved = self.session.reserve(count - len(got))
            got.extend((grant.store_id, grant.slot) for grant in reserved.grants)
            assert reserved.pending or len(got) == count, reserved.reason
            return len(got) == count

        wait_for(enough, what=f"{count} slots")
        return got

    def write(self, slot: int, name: bytes, stores: Sequence[int] = ()) -> None:
        """Every rank writes the key's pattern into its shard."""
        for rank, worker in enumerate(self.workers):
            mapping = worker.mapping
            assert mapping is not None
            with running_copy(mapping, self.session.number, stores):
                address, nbytes = mapping.shard(slot, rank)
                ctypes.memmove(address, pat(name, rank, nbytes), nbytes)

    def read(self, slot: int, rank: int = 0) -> bytes:
        """What the rank's shard holds."""
        mapping = self.workers[rank].mapping
        assert mapping is not None
        with running_copy(mapping, self.session.number):
            return ctypes.string_at(*mapping.shard(slot, rank))

    def store(self, names: Sequence[bytes]) -> None:
        """Stores one chain of chunks in group 0, each with its pattern."""
        grants = self.grant(len(names))
        parents = [b"", *names]
        stores = [
            StoreOf(store, Chunk(0, name, parent))
            for (store, _), name, parent in zip(grants, names, parents, strict=False)
        ]
        assert not self.session.update(assigns=stores).errors
        for (store, slot), name in zip(grants, names, strict=True):
            self.write(slot, name, [store])
        assert not self.session.update(commits=stores).errors

    def wrong_bytes(self, names: Sequence[bytes]) -> list[str]:
        """Keys that are not there, or whose bytes are not their own."""
        pins = {pin.key: pin for pin in self.session.pin(0, names)}
        wrong = [name.hex() for name in names if name not in pins]
        for name, pin in pins.items():
            for rank in range(len(self.workers)):
                data = self.read(pin.slot, rank)
                if data != pat(name, rank, len(data)):
                    wrong.append(name.hex())
        self.session.release(pins.values())
        return wrong

    def close(self) -> None:
        """As an engine that ends well."""
        self.session.close()
        for worker in self.workers:
            assert worker.close()


def main() -> None:
    """`engine.py SOCKET store|read NAME COUNT`"""
    socket, what, name, count = sys.argv[1:]
    with Engine(socket) as engine:
        wanted = keys(name, int(count))
        if what == "store":
            engine.store(wanted)
            print(json.dumps({"stored": len(wanted)}))
        else:
            print(json.dumps({"wrong": engine.wrong_bytes(wanted)}))


if __name__ == "__main__":
    main()
