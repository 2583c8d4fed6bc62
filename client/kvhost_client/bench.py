"""`kvhostctl bench`: a self-test of a running daemon: how fast are lookups and copies, are bytes right?

It is an engine without a model, in a namespace of its own, and leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

import click

from kvhost_client.commands import NO, YES, Options, Size, progress, show, with_json

if TYPE_CHECKING:
    from kvhost_client.admin import AdminClient
    from kvhost_client.session import Session
    from kvhost_client.types import Grant
    from kvhost_client.worker import WorkerLink, WorkerMapping
    from kvhost_proto.v1 import common_pb2

_KEY_BYTES = 36
_TOKENS = 16
_LOOKUPS = 200
_CHAIN = 64
_LARGEST_SLOT = 1 << 20
_DEADLINE_S = 10.0
_POLL_S = 0.005

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Result:
    """What was measured."""

    ping_us_p50: float
    ping_us_p99: float
    lookup_keys: int
    lookup_us_p50: float
    lookup_us_p99: float
    chunks: int
    chunk_bytes: int
    written_bytes_per_s: float
    read_bytes_per_s: float
    wrong_chunks: int


@click.command()
@click.option("--memory", type=Size(), default="64MiB", show_default=True, help="How much to write and read.")
@click.option("--force", is_flag=True, help="Even where it would take memory from others.")
@with_json
def bench(options: Options, memory: int, force: bool) -> int:
    """Tests a running daemon: latency of lookups, bandwidth of copies, and that the bytes are right.

    Takes free segments of the pool for some seconds and gives them back. Exit code 1 if a byte was wrong, or
    if no segment is free: then what others stored would go, unless --force says so.
    """
    from kvhost_client.errors import FailedPrecondition

    with options.admin() as admin:
        pool = admin.status().memory
        if not pool.free_segments and not force:
            raise FailedPrecondition(
                "no segment of the pool is free: bench would take one from others; say --force if it may"
            )
        result = _Bench(options.socket, admin, pool.segment_bytes).run(memory)
    if options.json:
        click.echo(json.dumps(asdict(result), indent=2))
    else:
        show(options, None, _told(result))
    return NO if result.wrong_chunks else YES


def _told(result: Result) -> str:
    from kvhost_client.tables import size

    return (
        f"a call       {result.ping_us_p50:.0f} µs, 99 % within {result.ping_us_p99:.0f} µs\n"
        f"a lookup     {result.lookup_us_p50:.0f} µs, 99 % within {result.lookup_us_p99:.0f} µs, of "
        f"{result.lookup_keys} keys\n"
        f"writing      {size(int(result.written_bytes_per_s))}/s, {result.chunks} chunks of "
        f"{size(result.chunk_bytes)}, one thread\n"
        f"reading      {size(int(result.read_bytes_per_s))}/s\n"
        + (
            f"WRONG BYTES  in {result.wrong_chunks} of {result.chunks} chunks"
            if result.wrong_chunks
            else "every byte was right"
        )
    )


class _Bench:
    """An engine of one rank. `run` once."""

    def __init__(self, socket: str, admin: AdminClient, segment_bytes: int) -> None:
        self._socket = socket
        self._admin = admin
        self._slot_bytes = min(_LARGEST_SLOT, segment_bytes)
        self._instance = secrets.token_bytes(16)
        self._ready = False

    def run(self, nbytes: int) -> Result:
        from kvhost_client.session import Session
        from kvhost_client.worker import WorkerLink

        worker = WorkerLink(self._socket, self._instance, 0)
        worker.start()
        try:
            session = Session.open(
                self._socket, instance_id=self._instance, label="kvhostctl bench", deadline_s=_DEADLINE_S
            )
            try:
                declared = session.declare(self._spec(), {0: worker.token})
                return self._measure(session, worker, nbytes, declared.slots)
            finally:
                session.close()
        finally:
            worker.close()
            self._clean_up()

    def _measure(self, session: Session, worker: WorkerLink, nbytes: int, slots: int) -> Result:
        from kvhost_client.types import ChainQuery, Query, Semantics

        chunks = max(1, min(math.ceil(nbytes / self._slot_bytes), slots // 2))
        mapping = _until(lambda: worker.mapping, "the worker to map the pool")
        keys = [secrets.token_bytes(_KEY_BYTES - 4) + bytes(4) for _ in range(chunks)]
        data = secrets.token_bytes(self._slot_bytes)
        with progress("bench") as advance:
            pings = [_timed(session.ping) for _ in range(_LOOKUPS)]
            wrote_s = self._write(session, mapping, keys, data, lambda done: advance(done, 2 * chunks))
            asked = (keys * math.ceil(_CHAIN / chunks))[:_CHAIN]
            query = [Query(0, [ChainQuery(0, Semantics.SET, asked)])]
            lookups = [_timed(lambda: session.lookup(query)) for _ in range(_LOOKUPS)]
            read_s, wrong = self._read(
                session, mapping, keys, data, lambda n: advance(chunks + n, 2 * chunks)
            )
        return Result(
            *_quantiles(pings),
            len(asked),
            *_quantiles(lookups),
            chunks,
            self._slot_bytes,
            chunks * self._slot_bytes / wrote_s,
            chunks * self._slot_bytes / read_s,
            wrong,
        )

    def _write(
        self,
        session: Session,
        mapping: WorkerMapping,
        keys: Sequence[bytes],
        data: bytes,
        done: Callable[[int], None],
    ) -> float:
        """Writes and commits every chunk; returns the seconds the copies took."""
        from kvhost_client.errors import FailedPrecondition
        from kvhost_client.types import Chunk, StoreOf

        took = 0.0
        at = 0
        until = time.monotonic() + _DEADLINE_S
        while at < len(keys):
            reserved = session.reserve(min(8, len(keys) - at))
            if not reserved.grants:
                _check_deadline(until, f"a slot ({reserved.reason})")
                time.sleep(_POLL_S)
                continue
            until = time.monotonic() + _DEADLINE_S
            stores = []
            for grant, key in zip(reserved.grants, keys[at:], strict=False):
                took += self._copy(session, mapping, grant, _marked(data, key))
                stores.append(StoreOf(grant.store_id, Chunk(0, key, b"")))
            errors = session.update(assigns=stores).errors or session.update(commits=stores).errors
            if errors:
                raise FailedPrecondition(f"kvhostd refused what bench stored: {errors[0].message}")
            at += len(stores)
            done(at)
        return took

    def _copy(self, session: Session, mapping: WorkerMapping, grant: Grant, data: bytes) -> float:
        with _copying(mapping, session, [grant.store_id]):
            address, nbytes = mapping.shard(grant.slot, 0)
            began = time.perf_counter()
            ctypes.memmove(address, data, nbytes)
            return time.perf_counter() - began

    def _read(
        self,
        session: Session,
        mapping: WorkerMapping,
        keys: Sequence[bytes],
        data: bytes,
        done: Callable[[int], None],
    ) -> tuple[float, int]:
        """Pins, reads and compares every chunk; returns the seconds of the copies, and how many differ."""
        from kvhost_client.types import Semantics

        into = ctypes.create_string_buffer(self._slot_bytes)
        took, wrong = 0.0, 0
        for at, key in enumerate(keys):
            pins = session.pin(0, [key], Semantics.SET)
            if not pins:
                wrong += 1
                continue
            with _copying(mapping, session, []):
                address, nbytes = mapping.shard(pins[0].slot, 0)
                began = time.perf_counter()
                ctypes.memmove(into, address, nbytes)
                took += time.perf_counter() - began
            wrong += into.raw != _marked(data, key)
            session.release(pins)
            done(at + 1)
        return max(took, 1e-9), wrong

    def _clean_up(self) -> None:
        """Gives the segments back, once the daemon knows that nobody writes any more."""
        from kvhost_client.errors import KVHostError

        def gone() -> bool:
            mine = [one for one in self._admin.namespaces() if one.name == self._name]
            return not mine or self._admin.drop(str(mine[0].number)).kept == 0

        until = time.monotonic() + _DEADLINE_S
        while True:
            try:
                if gone():
                    return
            except KVHostError:  # the session is just ending
                _check_deadline(until, "the namespace to be given back")
            _check_deadline(until, "the namespace to be given back")
            time.sleep(_POLL_S)

    @property
    def _name(self) -> str:
        return f"bench {self._instance.hex()}"

    def _spec(self) -> common_pb2.NamespaceSpec:
        from kvhost_proto.v1 import common_pb2

        group = common_pb2.Group(id=0, semantics=common_pb2.SEMANTICS_SET, tokens_per_chunk=_TOKENS)
        layout = common_pb2.Layout(
            shard_bytes=self._slot_bytes, shards=1, ranks=1, key_bytes=_KEY_BYTES, groups=[group]
        )
        return common_pb2.NamespaceSpec(name=self._name, model="kvhostctl bench", layout=layout)


@contextmanager
def _copying(mapping: WorkerMapping, session: Session, stores: Sequence[int]) -> Iterator[None]:
    from kvhost_client.errors import SessionEnded

    copy = mapping.begin(session.number, stores)
    if not copy:
        raise SessionEnded("kvhostd took the memory back while bench was copying; try again")
    try:
        yield
    finally:
        mapping.end(copy)


def _marked(data: bytes, key: bytes) -> bytes:
    """The chunk of this key: no two are alike."""
    return key + data[len(key) :]


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The middle and the 99th percentile, in microseconds."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2] * 1e6, ordered[int(len(ordered) * 0.99)] * 1e6


def _until(condition: Callable[[], _Value | None], what: str) -> _Value:
    until = time.monotonic() + _DEADLINE_S
    while (value := condition()) is None:
        _check_deadline(until, what)
        time.sleep(_POLL_S)
    return value


def _check_deadline(until: float, what: str) -> None:
    from kvhost_client.errors import DeadlineExceeded

    if time.monotonic() > until:
        raise DeadlineExceeded(f"bench waited {_DEADLINE_S:g} s for {what} in vain")
