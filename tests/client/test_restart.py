"""A daemon that dies and comes back under an engine that never stops copying (C1, I1, I6)."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from kvhost_client.errors import KVHostError, NotMapped
from kvhost_client.types import ChainQuery, Chunk, Query, Semantics, StoreOf
from tests.client.engine import key
from tests.client.test_link import OPTIONS, Engine
from tests.support import Daemon, map_count, pat, wait_for

ROUNDS = 6
NAMES = 24


class Traffic:
    """Stores and loads without pause, from threads of its own, and checks every byte that was served."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.served = 0
        self.stored = 0
        self.wrong: list[str] = []
        self.failures: set[str] = set()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self.run, args=(act,)) for act in (self.store, self.load)]
        for thread in self._threads:
            thread.start()

    def run(self, act: object) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                act(key(f"chunk-{number % NAMES}"))  # type: ignore[operator]
            except (KVHostError, NotMapped) as error:
                self.failures.add(type(error).__name__)
                self._stop.wait(0.002)

    def store(self, name: bytes) -> None:
        session, mapping = self.engine.link.session, self.engine.worker.mapping
        if session is None or mapping is None:
            return
        boot = session.boot_id
        for grant in session.reserve(1).grants:
            copy = mapping.begin(session.number, [grant.store_id])
            if not copy or mapping.boot_id != boot:
                return
            try:
                address, nbytes = mapping.shard(grant.slot, 0)
                ctypes.memmove(address, pat(name, 0, nbytes), nbytes)
            finally:
                mapping.end(copy)
            session.update(commits=[StoreOf(grant.store_id, Chunk(1, name[:-4] + b"\0\0\0\1"))])
            self.stored += 1

    def load(self, name: bytes) -> None:
        session, mapping = self.engine.link.session, self.engine.worker.mapping
        if session is None or mapping is None:
            return
        as_set = name[:-4] + b"\0\0\0\1"
        query = Query(0, [ChainQuery(1, Semantics.SET, [as_set])])
        result = session.lookup([query], pin=True)[0].chains[0]
        for slot in result.slots:
            copy = mapping.begin(session.number)
            if copy and mapping.boot_id == session.boot_id:
                try:
                    data = ctypes.string_at(*mapping.shard(slot, 0))
                finally:
                    mapping.end(copy)
                self.served += 1
                if data != pat(name, 0, len(data)):
                    self.wrong.append(name.hex())
        session.release(result.pin_ids)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_no_byte_of_the_old_daemon_is_served_by_the_new_one(folder: Path) -> None:
    daemon = Daemon("3MiB", OPTIONS, folder=folder)
    engine = Engine(daemon.socket, deadline_s=1.0).start()
    traffic = Traffic(engine)
    for _ in range(ROUNDS):
        served = traffic.served
        wait_for(lambda served=served: traffic.served > served + 20, 10.0, "bytes to be served")  # type: ignore[misc]
        daemon.kill()
        daemon = Daemon("3MiB", OPTIONS, folder=folder)
    traffic.stop()
    assert traffic.wrong == []
    assert traffic.stored > ROUNDS
    assert traffic.failures <= {
        "Unavailable",
        "SessionEnded",
        "BreakerOpen",
        "NotMapped",
        "DeadlineExceeded",
        "NotHeld",
        "NotServing",
    }
    engine.close()
    assert map_count(os.getpid(), "memfd:kvhost") == 0
    wait_for(lambda: not daemon.status().sessions, what="the session to end")
    daemon.check_integrity()
    daemon.close()


def test_a_copy_that_runs_while_the_daemon_is_replaced_is_harmless(folder: Path) -> None:
    """It ends in the old pages, which nobody else has; its commit reaches nobody."""
    with Daemon("3MiB", OPTIONS, folder=folder) as first:
        engine = Engine(first.socket).start()
        engine.wait_usable()
        session, mapping = engine.link.session, engine.worker.mapping
        assert session is not None
        assert mapping is not None
        (grant,) = session.reserve(1).grants
        copy = mapping.begin(session.number, [grant.store_id])
        address, nbytes = mapping.shard(grant.slot, 0)
        first.kill()
        with Daemon("3MiB", OPTIONS, folder=folder) as second:
            engine.wait_usable()
            ctypes.memmove(address, pat("late", 0, nbytes), nbytes)
            assert ctypes.string_at(address, nbytes) == pat("late", 0, nbytes)
            mapping.end(copy)
            wait_for(lambda: map_count(os.getpid(), "memfd:kvhost") <= second.status().memory.segments)
            wait_for(lambda: not mapping.segment_ids, what="the old segments to go")
            assert second.status().counters["committed_chunks"] == 0
            engine.close()
