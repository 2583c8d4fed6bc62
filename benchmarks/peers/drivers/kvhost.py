"""kvhost's own side: a real daemon, the client, and the connector's worker with one thread.

Copies are what `benchmarks.copying` measures, with the daemon's part of a store and a load around them.
Lookups run against 64-byte slots, so that 8192 chunks fit (`benchmarks.small`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.attached import Attached, Stored
from benchmarks.attached import KVCache as TensorCache
from benchmarks.copying import JOB_BYTES, OPTIONS
from benchmarks.peers.driver import Blocks, Setting, Side, serve
from benchmarks.small import Engine, chain, keys, small_slots
from kvhost_client.types import Semantics
from tests.support.daemon import Daemon


class Copies(Side):
    about = "kvhostd, one worker thread; reserve, store, commit; pin, load, release"

    def __init__(self, setting: Setting) -> None:
        tensors = TensorCache(setting.layers, setting.blocks + 1, setting.page_bytes)
        super().__init__(setting, tensors)
        self._daemon = Daemon(str(setting.pool_bytes), OPTIONS)
        self._engine = Attached(self._daemon.socket, tensors, 1)
        self._stored: dict[int, Stored] = {}
        self._pins: list[Any] = []

    def servers(self) -> Sequence[int]:
        return [self._daemon.pid]

    def store(self, request: int, blocks: Blocks) -> None:
        stored = self._engine.reserve(blocks[:, None])
        self._engine.store(stored, self._jobs(len(blocks)))
        self._engine.commit(stored)
        self._stored[request] = stored

    def find(self, request: int, count: int) -> None:
        self._pins = self._engine.session.pin(0, self._stored[request].keys, Semantics.SET)
        if len(self._pins) != count:
            raise RuntimeError(f"{count} chunks are stored, {len(self._pins)} were found")

    def load(self, request: int, blocks: Blocks) -> None:
        slots = [pin.slot for pin in self._pins]
        self._engine.load(Stored([], blocks[:, None], slots, []), self._jobs(len(blocks)))
        self._engine.session.release(self._pins)

    def forget(self) -> None:
        """Nothing: it evicts the oldest by itself when it needs room."""
        self._stored.clear()

    def lookup(self, request: int, count: int) -> int:
        raise NotImplementedError("lookups run against small slots")

    def looked_up(self) -> None:
        """A lookup without pins holds nothing."""

    def close(self) -> None:
        self._engine.__exit__()
        self._daemon.close()

    def _jobs(self, chunks: int) -> int:
        return max(1, chunks * self.setting.block_bytes // JOB_BYTES)


class Lookups(Side):
    about = "kvhostd; one lookup call"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._daemon = small_slots(4 * setting.blocks)
        self._engine = Engine(self._daemon.socket)
        self._names = keys(0, setting.blocks)

    def servers(self) -> Sequence[int]:
        return [self._daemon.pid]

    def store(self, request: int, blocks: Blocks) -> None:
        self._engine.store(0, len(blocks))

    def lookup(self, request: int, count: int) -> int:
        (answer,) = self._engine.session.lookup([chain(self._names[:count])])
        return answer.chains[0].hits

    def looked_up(self) -> None:
        """A lookup without pins holds nothing."""

    def close(self) -> None:
        self._engine.__exit__(None, None, None)
        self._daemon.close()

    def find(self, request: int, count: int) -> None:
        raise NotImplementedError("copies run against slots of their own size")

    def load(self, request: int, blocks: Blocks) -> None:
        raise NotImplementedError("copies run against slots of their own size")

    def forget(self) -> None:
        """Nothing is stored twice."""


def make(setting: Setting) -> Side:
    return Lookups(setting) if setting.variant == "lookups" else Copies(setting)


if __name__ == "__main__":
    serve(make)
