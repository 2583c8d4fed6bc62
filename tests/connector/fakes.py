"""A session with a daemon that lives in this process: the same answers, and hands to delay or break it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvhost_client.errors import KVHostError
from kvhost_client.types import (
    Abort,
    Answer,
    ChainQuery,
    ChainResult,
    Declared,
    Found,
    Grant,
    ItemError,
    ItemKind,
    Query,
    Rebased,
    Reserved,
    Semantics,
    ServiceState,
    Slot,
    StoreId,
    StoreOf,
    Updated,
)
from kvhost_proto.v1 import cache_pb2

_NOT_FOUND = 5


class FakeSession:
    """Counts every hold; a release or commit of something not held is an error, as in the daemon.

    `gate` closed: calls wait, as with a stopped daemon. `fail_next`: errors that the next calls raise.
    """

    def __init__(self, number: int = 1, slots: int = 64, boot_id: int = 7) -> None:
        self.number = number
        self.boot_id = boot_id
        self.generation = 1
        self.state = ServiceState.SERVING
        self.slots = slots
        self.stored: dict[bytes, int] = {}
        self.pins: dict[int, bytes] = {}
        self.grants: dict[int, int] = {}
        self.assigned: dict[int, Any] = {}
        self.aborts: list[Abort] = []
        self.touched: list[ChainQuery] = []
        self.resets: list[str] = []
        self.calls: list[str] = []
        self.pin_bound = 1 << 30
        self.grant_bound = 1 << 30
        self.unready = False
        self.gate = threading.Event()
        self.gate.set()
        self.fail_next: list[KVHostError] = []
        self.closed = False
        self._numbers = itertools.count(1)

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        assert self.gate.wait(10)
        if self.fail_next:
            raise self.fail_next.pop(0)

    def declare(self, spec: Any, tokens: Mapping[int, bytes], deadline_s: float | None = None) -> Declared:
        self._enter("declare")
        return self.declared()

    def declared(self) -> Declared:
        return Declared(b"d" * 32, 1, 4096, 4096, 16, False, self.slots)

    def lookup(
        self, queries: Iterable[Query], pin: bool = False, deadline_s: float | None = None
    ) -> list[Answer]:
        self._enter("pin" if pin else "lookup")
        return [Answer(query.tag, [self._chain(chain, pin) for chain in query.chains]) for query in queries]

    def _chain(self, chain: ChainQuery, pin: bool) -> ChainResult:
        found: list[int] = []
        slots: list[int] = []
        pins: list[int] = []
        for key in chain.keys:
            there = key in self.stored
            if there and pin and len(self.pins) >= self.pin_bound:
                found.append(Found.BOUND)
            elif there:
                found.append(Found.HIT)
                if pin:
                    number = next(self._numbers)
                    self.pins[number] = key
                    pins.append(number)
                    slots.append(self.stored[key])
            else:
                found.append(Found.MISS)
            if chain.semantics is Semantics.PREFIX and found[-1] != Found.HIT:
                break
        return ChainResult(bytes(found), slots, pins, [])

    def reserve(self, count: int = 0, *, deadline_s: float | None = None) -> Reserved:
        self._enter("reserve")
        room = 0 if self.unready else max(0, self.grant_bound - len(self.grants))
        given = []
        for _ in range(min(count, room)):
            number = next(self._numbers)
            self.grants[number] = number
            given.append(Grant(StoreId(number), Slot(number)))
        return Reserved(given, [], self.unready, "" if len(given) == count else "bound")

    def update(
        self,
        *,
        assigns: Iterable[StoreOf] = (),
        commits: Iterable[StoreOf] = (),
        aborts: Iterable[Abort] = (),
        releases: Iterable[int] = (),
        touches: Iterable[ChainQuery] = (),
        deadline_s: float | None = None,
        on_late: Any = None,
    ) -> Updated:
        self._enter("update")
        errors = []

        def take(kind: ItemKind, number: int, held: dict[int, Any]) -> bool:
            if number not in held:
                errors.append(ItemError(kind, number, _NOT_FOUND, f"{kind.name} of {number}, not held"))
                return False
            del held[number]
            return True

        for pin in releases:
            take(ItemKind.RELEASE, pin, self.pins)
        for abort in aborts:
            if take(ItemKind.ABORT, abort.store_id, self.grants):
                self.aborts.append(abort)
        for store in assigns:
            self.assigned[store.store_id] = store.chunk
        for store in commits:
            if take(ItemKind.COMMIT, store.store_id, self.grants):
                self.stored[store.chunk.key] = store.store_id
        self.touched.extend(touches)
        return Updated(errors, [])

    def reset(self, weights_version: str = "", deadline_s: float | None = None) -> Rebased:
        self._enter("reset")
        self.resets.append(weights_version)
        self.stored.clear()
        self.generation += 1
        return Rebased(b"r" * 32, 2)

    def ping(self, deadline_s: float | None = None) -> Any:
        self._enter("ping")

    def close(self) -> None:
        self.closed = True
        self.gate.set()


def mapped(ready: bool = True) -> cache_pb2.Notice:
    return cache_pb2.Notice(mapped=cache_pb2.Mapped(mapped_ranks=1, ranks=1, ready=ready))


def removed(keys: Sequence[bytes]) -> cache_pb2.Notice:
    return cache_pb2.Notice(removed=cache_pb2.Removed(keys=b"".join(keys), key_bytes=len(keys[0])))


def recall(grants: int) -> cache_pb2.Notice:
    return cache_pb2.Notice(recall=cache_pb2.Recall(grants=grants))


def resync() -> cache_pb2.Notice:
    return cache_pb2.Notice(resync=cache_pb2.Resync())
