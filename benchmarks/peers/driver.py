"""What all drivers have in common: a KV cache of patterned bytes, rounds of stores and loads, lookups, and
the lines in which they are asked for.

A driver reads one JSON object a line and answers each with one. The first says how large everything is; then
`{"do": "round"}` and `{"do": "lookup", "count": 64, "repeat": 100}` come in any order.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """How large everything is.

    `layers` pages of `page_bytes` bytes are a block, which is a chunk of every cache; `blocks` of them are
    stored and loaded in a round, `per_request` at once. `variant` chooses among ways that a cache offers.
    """

    layers: int
    page_bytes: int
    blocks: int
    per_request: int
    variant: str = ""

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def pool_bytes(self) -> int:
        """Room for four rounds: no side has to evict in the midst of one."""
        return max(1 << 30, 4 * self.blocks * self.block_bytes)


@dataclass
class Round:
    """One round: seconds by the wall's clock and seconds of processor, of the client and all its servers.

    `wrong` counts blocks that do not hold what was stored into the chunk that was loaded into them.
    """

    store_s: float
    store_cpu_s: float
    load_s: float
    load_cpu_s: float
    wrong: int


class KVCache:
    """`layers[n][block]` is a page of bytes. Block 0 is the null block and takes no part."""

    def __init__(self, setting: Setting) -> None:
        self._words = setting.page_bytes // 8
        # Which pattern each block holds at present.
        self.holds = np.arange(setting.blocks + 1)
        self.layers: list[npt.NDArray[np.uint8]] = [
            self.pattern(layer).view(np.uint8) for layer in range(setting.layers)
        ]

    def pattern(self, layer: int) -> npt.NDArray[np.uint64]:
        """What the pages of a layer hold, if every block holds what it should."""
        first = (self.holds.astype(np.uint64) * np.uint64(4096) + np.uint64(layer)) * np.uint64(self._words)
        return (first[:, None] + np.arange(self._words, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)

    def wrong_blocks(self) -> int:
        """How many blocks hold something else than they should."""
        wrong = np.zeros(len(self.holds), dtype=bool)
        for layer, pages in enumerate(self.layers):
            wrong |= (pages.view(np.uint64) != self.pattern(layer)).any(axis=1)
        return int(wrong[1:].sum())


class Cache(Protocol):
    """What a round needs to know of a KV cache."""

    holds: npt.NDArray[np.int64]

    def wrong_blocks(self) -> int:
        """How many blocks hold something else than they should."""


class Side(ABC):
    """One cache, driven by its own client. `request` numbers requests; every number is another prompt."""

    about = ""
    """What of it is used, in one line."""

    def __init__(self, setting: Setting, cache: Cache | None = None) -> None:
        self.setting = setting
        self.cache: Cache = KVCache(setting) if cache is None else cache

    @abstractmethod
    def servers(self) -> Sequence[int]:
        """Processes beside this one whose processor time belongs to it."""

    @abstractmethod
    def store(self, request: int, blocks: Blocks) -> None:
        """Stores these blocks as the chunks of a prompt; returns when others can find them."""

    @abstractmethod
    def find(self, request: int, count: int) -> None:
        """What a cache needs before it may load: looks the prompt up, and holds it. Not timed."""

    @abstractmethod
    def load(self, request: int, blocks: Blocks) -> None:
        """Loads the prompt's chunks into these blocks and lets go of them."""

    @abstractmethod
    def forget(self) -> None:
        """Drops all that is stored. Not timed."""

    @abstractmethod
    def lookup(self, request: int, count: int) -> int:
        """Looks the first `count` chunks of a prompt up; returns how many are there."""

    @abstractmethod
    def looked_up(self) -> None:
        """Undoes what the last lookup holds, if it holds anything. Not timed."""

    @abstractmethod
    def close(self) -> None:
        """Ends it and what it started."""


class Rounds:
    """Rounds of one side; requests are numbered through."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._chance = np.random.default_rng(1)
        self._next = 1
        self._filled = 0

    def round(self) -> Round:
        """Stores every block, then loads every chunk into the block of another one and checks all bytes."""
        side, cache = self._side, self._side.cache
        order = self._chance.permutation(np.arange(1, side.setting.blocks + 1))
        portions = np.array_split(order, max(1, len(order) // side.setting.per_request))
        first, self._next = self._next, self._next + len(portions)
        store, load = [], []
        for request, blocks in enumerate(portions, first):
            store.append(self._spent(lambda r=request, b=blocks: side.store(r, b)))  # type: ignore[misc]
        held = cache.holds.copy()
        target = np.roll(order, 1)
        for request, blocks in enumerate(portions, first):
            into, target = target[: len(blocks)], target[len(blocks) :]
            side.find(request, len(blocks))
            load.append(self._spent(lambda r=request, b=into: side.load(r, b)))  # type: ignore[misc]
            cache.holds[into] = held[blocks]
        wrong = cache.wrong_blocks()
        side.forget()
        self._filled = 0
        return Round(
            sum(s for s, _ in store), sum(c for _, c in store), sum(s for s, _ in load),
            sum(c for _, c in load), wrong,
        )  # fmt: skip

    def lookup(self, count: int, repeat: int) -> float:
        """The median of so many lookups of `count` chunks, all of which are there: seconds."""
        side = self._side
        if not self._filled:
            self._filled, self._next = self._next, self._next + 1
            side.store(self._filled, np.arange(1, side.setting.blocks + 1))
            side.lookup(self._filled, count)
            side.looked_up()
        took = []
        for _ in range(repeat):
            began = time.perf_counter()
            hits = side.lookup(self._filled, count)
            took.append(time.perf_counter() - began)
            side.looked_up()
            if hits != count:
                raise RuntimeError(f"{count} chunks are stored, {hits} were found")
        return median(took)

    def _spent(self, act: Callable[[], None]) -> tuple[float, float]:
        cpu, began = self._cpu(), time.perf_counter()
        act()
        return time.perf_counter() - began, self._cpu() - cpu

    def _cpu(self) -> float:
        """Processor seconds of this process and its servers, to the nanosecond."""
        return time.process_time() + sum(time.clock_gettime(-8 * pid - 6) for pid in self._side.servers())


def free_port() -> int:
    """A TCP port of this host that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def serve(make: Callable[[Setting], Side]) -> None:
    """The driver's main loop. Ends with standard input."""
    # What a client prints on its own is no answer: it goes to standard error.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(content: dict[str, Any]) -> None:
            answers.write(json.dumps(content) + "\n")
            answers.flush()

        side = make(Setting(**json.loads(sys.stdin.readline())))
        try:
            rounds = Rounds(side)
            answer({"about": side.about})
            for line in sys.stdin:
                asked = json.loads(line)
                if asked["do"] == "round":
                    answer(asdict(rounds.round()))
                else:
                    answer({"seconds": rounds.lookup(asked["count"], asked["repeat"])})
        finally:
            side.close()
