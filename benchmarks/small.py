"""A real kvhostd with very many, very small slots, and an engine without a model that fills it.

A chunk costs the daemon the same whatever its bytes, and a slot is normally whole pages: here it is 64
bytes, so that four million of them fit into any machine. That is the only thing that is not as in service.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType

import grpc

from kvhost_client.session import Session
from kvhost_client.types import ChainQuery, Query, Semantics
from kvhost_client.worker import WorkerLink
from kvhost_proto.v1 import cache_pb2, common_pb2
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

PAGE = 4096
SLOT_BYTES = 64
SEGMENTS = 128
KEY_BYTES = 36
CHAIN = 256
"""Chunks of one prompt, each building on the one before: 4096 tokens in blocks of 16."""
PER_CALL = 8192
_CALL_S = 60.0

_SMALL_SLOTS = f"""
import sys
import kvhost_server.namespace
kvhost_server.namespace.PAGE = {SLOT_BYTES}
from kvhost_server.cli import main
sys.argv[:] = ["kvhostd", *sys.argv[4:]]
main()
"""


def small_slots(slots: int, options: Sequence[str] = ()) -> Daemon:
    """A daemon whose pool has this many slots at least, in at most 128 segments, as pools of any size."""
    segment = max(PAGE, -(-slots * SLOT_BYTES // SEGMENTS // PAGE) * PAGE)
    segments = max(4, -(-slots * SLOT_BYTES // segment))
    return Daemon(
        str(segment * segments),
        ("--segment-size", str(segment), *options),
        prefix=(sys.executable, "-c", _SMALL_SLOTS),
    )


def key(number: int) -> bytes:
    """A key as an engine makes it: 32 bytes of hash, then the group."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4)


def keys(first: int, count: int) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


def chain(names: Sequence[bytes], tag: int = 0) -> Query:
    return Query(tag, [ChainQuery(0, Semantics.PREFIX, names)])


class Engine:
    """An engine without a model: a session, and one worker that maps whatever it is given."""

    def __init__(self, socket: str, model: str = "small") -> None:
        self.instance_id = secrets.token_bytes(16)
        self.worker = WorkerLink(socket, self.instance_id, 0)
        self.worker.start()
        ready: list[bool] = []

        def heard(notice: cache_pb2.Notice) -> None:
            if notice.WhichOneof("kind") == "mapped":
                ready.append(notice.mapped.ready)

        self.session = Session.open(
            socket, instance_id=self.instance_id, label="benchmark", deadline_s=30.0, on_notice=heard
        )
        group = common_pb2.Group(id=0, semantics=common_pb2.SEMANTICS_PREFIX, tokens_per_chunk=16)
        layout = common_pb2.Layout(
            shard_bytes=SLOT_BYTES, shards=1, ranks=1, key_bytes=KEY_BYTES, groups=[group]
        )
        spec = common_pb2.NamespaceSpec(
            model=model,
            parts=[common_pb2.DigestPart(name="model", value=json.dumps(model))],
            layout=layout,
        )
        self.declared = self.session.declare(spec, {0: self.worker.token})
        wait_for(lambda: any(ready), 30.0, "the worker to map its segments")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()
        self.worker.close()

    def store(self, first: int, count: int) -> float:
        """Stores the chunks of these numbers, in chains; returns the seconds it took.

        As the connector does it, slots first and then what was written to them, but in calls as large as
        they may be, and made by hand: the client's own share would be most of the time.
        """
        began = time.perf_counter()
        connection = self.session._connection
        update: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        update = connection.channel.unary_unary("/kvhost.v1.Cache/Update")
        head = cache_pb2.UpdateRequest(session_id=connection.session_id).SerializeToString()
        waiting: list[grpc.Future[bytes]] = []
        number, end = first, first + count
        parent = b""
        while number < end:
            reserved = self.session.reserve(min(PER_CALL, end - number), deadline_s=_CALL_S)
            if not reserved.grants:
                if waiting:  # grants are bounded: those that are on their way back must be so first
                    _accepted(waiting.pop(0).result())
                    continue
                if not reserved.pending:
                    raise RuntimeError(f"no slot for chunk {number}: {reserved.reason}")
                time.sleep(0.001)  # the worker maps another segment, in this process
                continue
            parts = [head]
            for grant in reserved.grants:
                name = key(number)
                if number % CHAIN == 0:
                    parent = b""
                parts.append(_commit(grant.store_id, name, parent))
                parent = name
                number += 1
            waiting.append(update.future(b"".join(parts), timeout=_CALL_S))
            if len(waiting) > 2:
                _accepted(waiting.pop(0).result())
        for call in waiting:
            _accepted(call.result())
        return time.perf_counter() - began


def _commit(store_id: int, name: bytes, parent: bytes) -> bytes:
    """One entry of `UpdateRequest.commits`, as it travels."""
    chunk = b"\x12%c%b" % (len(name), name)
    if parent:
        chunk += b"\x1a%c%b" % (len(parent), parent)
    store = b"\x08%b\x12%c%b" % (_varint(store_id), len(chunk), chunk)
    return b"\x1a%c%b" % (len(store), store)


def _varint(value: int) -> bytes:
    """A number of more than two groups of seven bits, as it travels; neighbours have the upper ones in
    common."""
    return bytes((value & 127 | 128, value >> 7 & 127 | 128)) + _upper(value >> 14)


@lru_cache(64)
def _upper(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _accepted(answer: bytes) -> None:
    reply = cache_pb2.UpdateReply.FromString(answer)
    if reply.errors:
        raise RuntimeError(f"{len(reply.errors)} chunks were not stored: {reply.errors[0].message}")


class Usage:
    """What a process used since the last look, and has now."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._cpu = self._cpu_now()

    def cpu_s(self) -> float:
        """Seconds of processor since the last call."""
        before, self._cpu = self._cpu, self._cpu_now()
        return self._cpu - before

    @property
    def rss_bytes(self) -> int:
        """Resident memory of its own: shared memory, which is where the region is, left out."""
        with open(f"/proc/{self.pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        return (int(fields["RssAnon"].split()[0]) + int(fields["RssFile"].split()[0])) * 1024

    def _cpu_now(self) -> float:
        # To the nanosecond, where /proc/PID/stat counts in ticks of 10 ms.
        return time.clock_gettime(-8 * self.pid - 6)


@contextmanager
def engines(socket: str, count: int) -> Iterator[list[Engine]]:
    """So many engines of one namespace."""
    made: list[Engine] = []
    try:
        for _ in range(count):
            made.append(Engine(socket))
        yield made
    finally:
        for engine in made:
            engine.session.close()
        for engine in made:
            engine.worker.close()
