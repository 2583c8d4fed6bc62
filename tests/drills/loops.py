"""What engines do all day: store chains, read them and check every byte, each loop on a thread of its own.

Every chunk holds the pattern of its key, so a torn, stale or foreign byte is seen and its owner named.
"""

import contextlib
import ctypes
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvhost_client.errors import DeadlineExceeded, KVHostError, NotHeld, NotMapped, SessionEnded, StaleStore
from kvhost_client.link import Link
from kvhost_client.mapping import WorkerMapping
from kvhost_client.session import Session
from kvhost_client.types import (
    ChainQuery,
    Chunk,
    Pin,
    Query,
    ReserveStatus,
    Semantics,
    Slot,
    StoreId,
    StoreOf,
)
from kvhost_client.worker import WorkerLink
from tests.client.engine import Engine, key, spec
from tests.support import pat, wait_for

_SAMPLES = 8
_PENDING_DEADLINE_S = 10.0
_NAMES_TO_BLAME = 200_000


def names(family: str, chain: int, length: int) -> list[str]:
    """Names of the chunks of one chain."""
    return [f"{family}{chain}.{i}" for i in range(length)]


class Loop:
    """A thread that does something until it is told to end."""

    def __init__(self, engine: Engine | None, seed: int = 0) -> None:
        self._engine = engine
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.samples: list[str] = []
        self._error: BaseException | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "no engine is attached"
        return self._engine

    def start(self) -> None:
        self._thread.start()

    def end(self, deadline_s: float = 30.0) -> None:
        self._ending.set()
        self._thread.join(deadline_s)
        assert not self._thread.is_alive(), "the loop does not end"

    def report(self) -> dict[str, Any]:
        """What was done so far. Raises what ended the loop."""
        if self._error is not None:
            raise self._error
        return {**self.counts, "samples": self.samples}

    def once(self) -> None:
        """One round."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self.once()
        except BaseException as error:
            self._error = error

    def blame(self, name: str, data: bytes, expected: bytes, suspects: Sequence[str]) -> None:
        """Counts wrong bytes and says whose they are."""
        self.counts["wrong"] += 1
        if len(self.samples) < _SAMPLES:
            at = next(i for i in range(0, len(data), 8) if data[i : i + 8] != expected[i : i + 8])
            word = data[at : at + 8]
            owners = (s for s in suspects if pat(key(s), 0, at + 8)[at:] == word)
            self.samples.append(f"{name} at byte {at} of {len(data)}: of {next(owners, 'nobody known')}")


def store_chain(engine: Engine, chain: Sequence[str], *, abort_every: int = 0) -> int:
    """Stores a chain chunk after chunk, as far as there is room; returns how far.

    With `abort_every`, every so manieth store is given up half-way.
    """
    parent = b""
    for done, name in enumerate(chain):
        chunk = Chunk(0, key(name), parent)
        parent = chunk.key
        grant = _grant(engine.session, chunk)
        if grant is None:
            continue
        status, store, slot = grant
        if status is not ReserveStatus.RESERVED:
            return done
        if abort_every and (done + 1) % abort_every == 0:
            _write(engine, slot, chunk.key, store, part=0.5)
            engine.session.abort(store)
            return done
        if not _write(engine, slot, chunk.key, store):
            return done
        engine.session.commit(store, chunk)
    return len(chain)


def _grant(session: Session, chunk: Chunk) -> tuple[ReserveStatus, StoreId, Slot] | None:
    """A slot for this chunk, waiting while more room is being mapped. None: somebody has stored it."""
    until = time.monotonic() + _PENDING_DEADLINE_S
    while True:
        reserved = session.reserve(0, [chunk])
        (given,) = reserved.chunks
        if given.status in (ReserveStatus.EXISTS, ReserveStatus.BEING_WRITTEN):
            return None
        if given.status is ReserveStatus.RESERVED or not reserved.pending or time.monotonic() > until:
            return given.status, given.store_id, given.slot


def _write(engine: Engine, slot: int, name: bytes, store: int, part: float = 1.0) -> bool:
    """Copies (a part of) the key's pattern into a slot. False when the mapping refuses."""
    with _copying(engine.workers[0].mapping, engine.session.number, [store]) as mapping:
        if mapping is None:
            return False
        try:
            address, nbytes = mapping.shard(slot, 0)
        except NotMapped:
            return False
        ctypes.memmove(address, pat(name, 0, nbytes), int(nbytes * part))
        return True


@contextlib.contextmanager
def _copying(
    mapping: WorkerMapping | None, session: int, stores: Sequence[int] = ()
) -> Iterator[WorkerMapping | None]:
    """The mapping while a copy runs; None when it may not."""
    copy = None if mapping is None else mapping.begin(session, stores)
    if mapping is None or not copy:
        yield None
        return
    try:
        yield mapping
    finally:
        mapping.end(copy)


class Storing(Loop):
    """Stores random chains of a family, over and over: with more chains than slots, a flood."""

    def __init__(self, engine: Engine | None, family: str, chains: int, length: int, seed: int = 0) -> None:
        super().__init__(engine, seed)
        self._family, self._chains, self._length = family, chains, length

    def once(self) -> None:
        chain = self.random.randrange(self._chains)
        length = self.random.randint(1, self._length)
        self.counts["chunks"] += store_chain(self.engine, names(self._family, chain, length))
        self.counts["chains"] += 1


class Reading(Loop):
    """Reads random chains of a family in long batches, several times over; every byte is compared while the
    pins are held.

    With `protected` off the pins go back before the copy: what this must not do, to show that it is seen.
    """

    def __init__(
        self,
        engine: Engine | None,
        *,
        family: str,
        chains: int,
        length: int,
        seed: int = 0,
        protected: bool = True,
        passes: int = 1,
    ) -> None:
        super().__init__(engine, seed)
        self._family, self._chains, self._length = family, chains, length
        self._protected = protected
        self._passes = passes

    def once(self) -> None:
        try:
            self._batch()
        except DeadlineExceeded:
            # Stopped amid a call for longer than any deadline: a late pin goes back by itself, and a late
            # release takes effect.
            self.counts["late"] += 1

    def _batch(self) -> None:
        chain = names(self._family, self.random.randrange(self._chains), self._length)
        by_key = {key(name): name for name in chain}
        pins = self.engine.session.pin(0, list(by_key))
        if not pins:
            self.counts["misses"] += 1
            return
        if not self._protected:
            self.engine.session.release(pins)
        for _ in range(self._passes):
            self._read(pins, by_key)
        if self._protected:
            self.engine.session.release(pins)
        self.counts["batches"] += 1

    def _read(self, pins: Sequence[Pin], by_key: dict[bytes, str]) -> None:
        with _copying(self.engine.workers[0].mapping, self.engine.session.number) as mapping:
            if mapping is None:
                self.counts["refused"] += 1
                return
            for pin in pins:
                try:
                    address, nbytes = mapping.shard(pin.slot, 0)
                except NotMapped:
                    self.counts["refused"] += 1
                    continue
                # In two halves, so that a stop falls into the middle of a chunk as often as between two.
                half = nbytes // 2 // 8 * 8
                data = ctypes.string_at(address, half)
                expected = pat(pin.key, 0, nbytes)
                data += ctypes.string_at(address + half, nbytes - half)
                self.counts["read"] += 1
                if data != expected:
                    every = [n for c in range(self._chains) for n in names(self._family, c, self._length)]
                    self.blame(by_key[pin.key], data, expected, every[:_NAMES_TO_BLAME])


class Mixed(Loop):
    """A bit of everything that an engine does, mistakes included."""

    def __init__(
        self,
        engine: Engine | None,
        *,
        family: str,
        chains: int,
        length: int,
        seed: int = 0,
        resets: bool = False,
    ) -> None:
        super().__init__(engine, seed)
        self._reader = Reading(engine, family=family, chains=chains, length=length, seed=seed)
        self._reader.counts, self._reader.samples = self.counts, self.samples
        self._family, self._chains, self._length, self._resets = family, chains, length, resets

    def once(self) -> None:
        chain = names(self._family, self.random.randrange(self._chains), self.random.randint(1, self._length))
        step = self.random.random()
        if step < 0.35:
            self.counts["stored"] += store_chain(self.engine, chain)
        elif step < 0.45:
            store_chain(self.engine, chain, abort_every=3)
        elif step < 0.80:
            self._reader.once()
        elif step < 0.90:
            keys = [key(name) for name in chain]
            self.engine.session.lookup([Query(0, [ChainQuery(0, Semantics.PREFIX, keys)])])
            self.engine.session.update(touches=[ChainQuery(0, Semantics.PREFIX, keys)])
        elif step < 0.97 or not self._resets:
            self._mistakes(chain)
        else:
            self.engine.session.reset()
            self.counts["resets"] += 1
        self.counts["steps"] += 1

    def _mistakes(self, chain: Sequence[str]) -> None:
        """A release and a commit too many: refused, and nothing changes (I5)."""
        session = self.engine.session
        pins = session.pin(0, [key(name) for name in chain])
        session.release(pins)
        errors = session.update(
            releases=[pin.pin_id for pin in pins], commits=[StoreOf(1 << 40, Chunk(0, key(chain[0])))]
        ).errors
        assert len(errors) == len(pins) + 1, errors
        self.counts["double_release"] += len(pins)
        self.counts["stale_commit"] += 1


class Linked(Loop):
    """An engine on a `Link`: it outlives the daemon, as vLLM's engines do. Works whenever it can."""

    def __init__(
        self, _: Engine | None, *, socket: str, family: str, chains: int, length: int, seed: int = 0
    ) -> None:
        super().__init__(None, seed)
        self._family, self._chains, self._length = family, chains, length
        instance = self.random.randbytes(16)
        self._worker = WorkerLink(socket, instance, 0, on_change=self._worker_changed)
        self._link = Link(
            socket,
            instance,
            f"linked {family}",
            declare=lambda: (spec(family), {0: self._worker.token}),
            on_up=lambda session, declared: None,
            on_down=lambda reason: self.counts.update(["downs"]),
            on_notice=lambda notice: None,
        )
        self._held: tuple[Session, list[Pin], StoreId, Chunk] | None = None
        self._hold_lock = threading.Lock()
        self._worker.start()
        self._link.start()

    def end(self, deadline_s: float = 30.0) -> None:
        super().end(deadline_s)
        assert self._link.close()
        assert self._worker.close()

    def report(self) -> dict[str, Any]:
        mapping = self._worker.mapping
        return {**super().report(), "boot": mapping.boot_id if mapping is not None else 0}

    def _worker_changed(self) -> None:
        self._link.declare_again()

    def once(self) -> None:
        session, mapping = self._link.session, self._worker.mapping
        if session is None or mapping is None or session.boot_id != mapping.boot_id:
            self.counts["without"] += 1
            self._ending.wait(0.002)
            return
        chain = names(self._family, self.random.randrange(self._chains), self._length)
        try:
            if self.random.random() < 0.5:
                self._store(session, mapping, chain)
            else:
                self._load(session, mapping, chain)
        except KVHostError as error:
            self.counts[type(error).__name__] += 1

    def _store(self, session: Session, mapping: WorkerMapping, chain: Sequence[str]) -> None:
        keys = [key(name) for name in chain]
        chunks = [Chunk(0, own, parent) for own, parent in zip(keys, [b"", *keys], strict=False)]
        given = session.reserve(0, chunks).chunks
        stores = [
            (StoreOf(grant.store_id, chunk), grant.slot)
            for grant, chunk in zip(given, chunks, strict=True)
            if grant.status is ReserveStatus.RESERVED
        ]
        with _copying(mapping, session.number, [store.store_id for store, _ in stores]) as running:
            if running is None:
                self.counts["refused"] += 1
                return
            for store, slot in stores:
                address, nbytes = running.shard(slot, 0)
                ctypes.memmove(address, pat(store.chunk.key, 0, nbytes), nbytes)
        self.counts["committed"] += len(stores) - len(
            session.update(commits=[store for store, _ in stores]).errors
        )

    def _load(self, session: Session, mapping: WorkerMapping, chain: Sequence[str]) -> None:
        by_key = {key(name): name for name in chain}
        pins = session.pin(0, list(by_key))
        with _copying(mapping, session.number) as running:
            if running is None:
                self.counts["refused"] += 1
                return
            for pin in pins:
                address, nbytes = running.shard(pin.slot, 0)
                data, expected = ctypes.string_at(address, nbytes), pat(pin.key, 0, nbytes)
                self.counts["read"] += 1
                if data != expected:
                    self.blame(by_key[pin.key], data, expected, chain)
        session.release(pins)

    # What is held over the daemon's death.

    def hold(self) -> None:
        """Takes a pin and a half-written grant, to be used after the daemon's return."""
        session = self._link.session
        assert session is not None, self._link.problem
        stored, half = (Chunk(0, key(f"{what}{secrets.token_hex(8)}")) for what in ("held", "half"))

        def reserved(chunk: Chunk) -> tuple[StoreId, Slot]:
            def try_() -> tuple[StoreId, Slot] | None:
                (given,) = session.reserve(0, [chunk]).chunks
                return (given.store_id, given.slot) if given.status is ReserveStatus.RESERVED else None

            return wait_for(try_, 5.0, f"a slot for {chunk.key.hex()[:8]}")

        store, slot = reserved(stored)
        mapping = self._worker.mapping
        with _copying(mapping, session.number, [store]) as running:
            assert running is not None
            address, nbytes = running.shard(slot, 0)
            ctypes.memmove(address, pat(stored.key, 0, nbytes), nbytes)
        session.commit(store, stored)
        pins = session.pin(0, [stored.key])
        assert len(pins) == 1
        store, _ = reserved(half)
        self._held = (session, pins, store, half)

    def use_what_was_held(self) -> list[str]:
        """Tries the old pin and the old grant, in the old session and in the new; what was *not* refused."""
        assert self._held is not None
        old, pins, store, chunk = self._held
        new = wait_for(lambda: self._link.session, 5.0, "a session with the new daemon")
        accepted = []
        for session, refusals in ((old, (SessionEnded,)), (new, (StaleStore, NotHeld))):
            for what, use in (
                ("commit", lambda s=session: s.commit(store, chunk)),
                ("release", lambda s=session: s.release(pins)),
            ):
                try:
                    use()
                except refusals:
                    continue
                accepted.append(f"{what} in session {session.number} of boot {session.boot_id:016x}")
        if new.lookup([Query(0, [ChainQuery(0, Semantics.SET, [chunk.key])])])[0].chains[0].hits:
            accepted.append("the half-written chunk is visible")
        self._held = None
        return accepted
