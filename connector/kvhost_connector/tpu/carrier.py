"""Carries blocks between the runner's arrays and slots: batches of a few sizes, bounded device memory.

The thread that drives the runner starts every program, in one order, whenever it calls `pump`; helper threads
wait for transfers and copy bytes. Saves of all errands that wait are carried together. A save is safe from
the next forward pass as soon as its program was started: the rows are a copy. A load counts as done when the
small output of its program is ready, as the arrays themselves are consumed by the next one.

Needs JAX and numpy, nothing of vLLM.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from kvhost_connector.tpu.cache import WIDTHS, CacheLayout, UnusableCache, shard_numbers
from kvhost_connector.tpu.moving import Programs
from kvhost_connector.tpu.staging import Staging, first_batch, usable_buckets

logger = logging.getLogger("vllm.kvhost.worker")

Kind = Literal["load", "store"]
Place = Callable[[int], tuple[int, int]]
"""slot -> address and bytes of this engine's image in it."""


class NotCarried(Exception):
    """An errand cannot be carried; the message is one line. Others raised by an errand count likewise."""


class CacheLost(RuntimeError):
    """The runner's arrays are gone half-way: the engine cannot go on."""


class Runner(Protocol):
    """The part of tpu-inference's runner that is used. The list is replaced at every step."""

    kv_caches: Any


class Move(NamedTuple):
    """One block, and where its image lies: the `position`-th block in the chunk of `slot`."""

    group: int
    block: int
    slot: int
    position: int
    chunk: int
    """Number of the chunk within its errand, for those who watch copies."""


@dataclass(eq=False)
class Errand:
    """Moves that succeed or fail together.

    Attributes:
        open: gives the right to touch its slots while the context lasts, and says where they are; raises
            when they may not be touched.
        watch: called with each move's chunk before its bytes are copied; what it raises fails the errand.
        done: called once, on any thread: bytes copied, or None and why not.
    """

    kind: Kind
    moves: Sequence[Move]
    open: Callable[[], AbstractContextManager[Place]]
    done: Callable[[int | None, str], None]
    watch: Callable[[int], None] = lambda chunk: None
    waiting: int = 0
    out: int = 0
    copied: int = 0
    problem: str = ""
    begun: bool = False
    over: bool = False


@dataclass(eq=False)
class Batch:
    """Moves that one program carries. `rows`: device arrays of a store; `buffers` and `good` of a load."""

    kind: Kind
    group: int
    size: int
    cargo: list[tuple[Errand, Move]]
    staged: int
    rows: list[Any] = field(default_factory=list)
    buffers: list[list[Any]] = field(default_factory=list)
    good: list[bool] = field(default_factory=list)
    token: Any = None


class Carrier:
    """Carries for one runner. `add`, `pump`, `withdraw` and `close` belong to the runner's thread."""

    def __init__(
        self,
        runner: Runner,
        layout: CacheLayout,
        programs: Programs,
        *,
        staging_bytes: int,
        buckets: Sequence[int],
        threads: int = 2,
        memory_kind: str = "",
    ) -> None:
        """`staging_bytes`: of each device. `memory_kind`: host memory that transfers go through, as
        "pinned_host"; "" leaves it to the runtime. Raises ValueError when one block is too much."""
        self._runner = runner
        self._layout = layout
        self._programs = programs
        self._memory_kind = memory_kind
        self.staging = Staging(staging_bytes)
        self.buckets = [usable_buckets(buckets, group.part_bytes, staging_bytes) for group in layout.groups]
        self.transfers = 0
        self.news = threading.Condition()
        self._queues: dict[Kind, list[deque[tuple[Errand, Move]]]] = {
            "load": [deque() for _ in layout.groups],
            "store": [deque() for _ in layout.groups],
        }
        self._read: deque[Batch] = deque()
        self._tasks: deque[tuple[Callable[[Batch], None], Batch]] = deque()
        self._spare: dict[tuple[int, int], list[list[list[Any]]]] = {}
        self._busy = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvhost-carry-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # The runner's thread.

    def add(self, errand: Errand) -> None:
        """Takes an errand up; `pump` starts it."""
        errand.waiting = len(errand.moves)
        if not errand.moves:
            self._end(errand)
            return
        for move in errand.moves:
            self._queues[errand.kind][move.group].append((errand, move))

    def pump(self) -> None:
        """Starts what can be started now: loads whose bytes were read, then saves, then reading for loads."""
        while (batch := self._next_read()) is not None:
            self._start(self._place, batch)
        for kind in ("load", "store"):
            while (formed := self._form(kind)) is not None:
                if kind == "store":
                    self._start(self._pick, formed)
                else:
                    self._hand_over(self._fill, formed)

    def withdraw(self, errand: Errand, why: str) -> None:
        """What has not begun of an errand will not begin; it fails."""
        errand.problem = errand.problem or why
        for queue in self._queues[errand.kind]:
            kept = [entry for entry in queue if entry[0] is not errand]
            if len(kept) < len(queue):
                queue.clear()
                queue.extend(kept)
        with self.news:
            errand.waiting = 0
        self._end_if_over(errand)

    @property
    def idle(self) -> bool:
        """Nothing is on its way. Errands that have not begun do not count."""
        with self.news:
            return self._busy == 0

    def rest(self, seconds: float) -> None:
        """Waits for a helper thread to be done with something, or so long."""
        with self.news:
            if self._busy and not self._read:
                self.news.wait(seconds)

    def close(self) -> None:
        """Ends the threads when what they do is done."""
        with self.news:
            self._closed = True
            self.news.notify_all()
        for thread in self._threads:
            thread.join()

    def _next_read(self) -> Batch | None:
        with self.news:
            return self._read.popleft() if self._read else None

    def _form(self, kind: Kind) -> Batch | None:
        """The next batch of a kind, None when there is nothing to carry or no room for it."""
        for group, queue in enumerate(self._queues[kind]):
            layout = self._layout.groups[group]
            limit = self.staging.free // layout.part_bytes
            size = first_batch(len(queue), self.buckets[group], limit)
            if size and self.staging.take(size * layout.part_bytes):
                cargo = [queue.popleft() for _ in range(min(size, len(queue)))]
                with self.news:
                    self._busy += 1
                    for errand, _ in cargo:
                        errand.begun = True
                        errand.waiting -= 1
                        errand.out += 1
                return Batch(kind, group, size, cargo, size * layout.part_bytes)
        return None

    def _start(self, step: Callable[[Batch], None], batch: Batch) -> None:
        """Runs a step that starts a program. A failure is the batch's alone, unless the cache is lost."""
        try:
            step(batch)
        except Exception as error:
            if not isinstance(error, UnusableCache):
                logger.exception("kvhost: a program that moves blocks failed")
            self._fail(batch, str(error) or type(error).__name__)
            self._finish(batch)
            if isinstance(error, CacheLost):
                raise

    def _pick(self, batch: Batch) -> None:
        self._layout.check(self._runner.kv_caches)
        blocks = [move.block for _, move in batch.cargo]
        rows = self._programs.gather(self._runner.kv_caches, batch.group, blocks, batch.size)
        if self._memory_kind:
            sharding = self._layout.sharding(self._layout.groups[batch.group])
            rows = jax.device_put(rows, sharding.with_memory_kind(self._memory_kind))
        else:
            for lane in rows:
                lane.copy_to_host_async()
        batch.rows = rows
        self.transfers += 1
        self._hand_over(self._collect, batch)

    def _place(self, batch: Batch) -> None:
        self._layout.check(self._runner.kv_caches)
        blocks = [
            move.block if good else None for (_, move), good in zip(batch.cargo, batch.good, strict=True)
        ]
        group = self._layout.groups[batch.group]
        sharding = self._layout.sharding(group)
        rows = []
        for number, lane in enumerate(group.lanes):
            shape = (batch.size, group.shards * lane.columns)
            parts = shard_numbers(sharding, shape, lane.columns)
            arrays = [
                jax.device_put(batch.buffers[part][number], self._beside(device))
                for device, part in parts.items()
            ]
            beside = sharding.with_memory_kind(self._memory_kind) if self._memory_kind else sharding
            row = jax.make_array_from_single_device_arrays(shape, beside, arrays)
            rows.append(jax.device_put(row, sharding) if self._memory_kind else row)
        kept = self._runner.kv_caches
        try:
            updated, batch.token = self._programs.scatter(kept, batch.group, blocks, batch.size, rows)
        except Exception as error:
            if any(kept[slab.index].is_deleted() for slab in group.slabs):
                raise CacheLost("the KV cache was consumed by a program that failed") from error
            raise
        self._runner.kv_caches = type(kept)(updated)
        self.transfers += 1
        self._hand_over(self._await, batch)

    def _beside(self, device: Any) -> Any:
        """Where the bytes for a device are put first."""
        return SingleDeviceSharding(device, memory_kind=self._memory_kind or None)

    # The helper threads.

    def _hand_over(self, task: Callable[[Batch], None], batch: Batch) -> None:
        with self.news:
            self._tasks.append((task, batch))
            self.news.notify_all()

    def _work(self) -> None:
        while True:
            with self.news:
                while not self._tasks:
                    if self._closed:
                        return
                    self.news.wait()
                task, batch = self._tasks.popleft()
            try:
                task(batch)
            except Exception as error:
                logger.exception("kvhost: a batch of blocks could not be copied")
                self._fail(batch, str(error) or type(error).__name__)
                self._finish(batch)

    def _collect(self, batch: Batch) -> None:
        """A save: waits for the rows and copies each part to its place."""
        group = self._layout.groups[batch.group]
        sources: list[tuple[Any, int, int]] = []
        for lane, rows in zip(group.lanes, batch.rows, strict=True):
            for shard in rows.addressable_shards:
                if shard.replica_id == 0:
                    part = (shard.index[1].start or 0) // lane.columns
                    host = np.ascontiguousarray(np.asarray(shard.data))
                    sources.append((host, part * group.part_bytes + lane.offset, lane.bytes))

        def copy(row: int, image: int) -> None:
            for host, offset, size in sources:
                ctypes.memmove(image + offset, host.ctypes.data + row * size, size)

        self._copy_rows(batch, copy)
        self._finish(batch)

    def _fill(self, batch: Batch) -> None:
        """A load: copies each part out of its place, into memory that is the batch's own until it is done."""
        group = self._layout.groups[batch.group]
        batch.buffers = self._buffers(batch)

        def copy(row: int, image: int) -> None:
            for part, lanes in enumerate(batch.buffers):
                for lane, buffer in zip(group.lanes, lanes, strict=True):
                    source = image + part * group.part_bytes + lane.offset
                    ctypes.memmove(buffer.ctypes.data + row * lane.bytes, source, lane.bytes)

        batch.good = self._copy_rows(batch, copy)
        with self.news:
            self._read.append(batch)
            self.news.notify_all()

    def _await(self, batch: Batch) -> None:
        """A load: its bytes are in the cache when the witness is there."""
        batch.token.block_until_ready()
        with self.news:
            self._spare.setdefault((batch.group, batch.size), []).append(batch.buffers)
        self._finish(batch)

    def _copy_rows(self, batch: Batch, copy: Callable[[int, int], None]) -> list[bool]:
        """Copies row after row, each errand's within its own right to its slots; says which were copied."""
        block_bytes = self._layout.groups[batch.group].block_bytes
        good = [False] * len(batch.cargo)
        by_errand: dict[int, list[int]] = {}
        for row, (errand, _) in enumerate(batch.cargo):
            by_errand.setdefault(id(errand), []).append(row)
        for rows in by_errand.values():
            errand = batch.cargo[rows[0]][0]
            try:
                with errand.open() as place:
                    for row in rows:
                        move = batch.cargo[row][1]
                        errand.watch(move.chunk)
                        if errand.problem:
                            break
                        address, size = place(move.slot)
                        needed = (move.position + 1) * block_bytes
                        if needed > size:
                            raise NotCarried(
                                f"a chunk of this worker needs {needed} bytes, its place in a slot has {size}"
                            )
                        copy(row, address + move.position * block_bytes)
                        good[row] = True
                        with self.news:
                            errand.copied += block_bytes
            except Exception as error:
                # Whatever its own right or watch raises concerns this errand alone.
                with self.news:
                    errand.problem = errand.problem or str(error) or type(error).__name__
        return good

    def _buffers(self, batch: Batch) -> list[list[Any]]:
        """Memory for the rows of every part and lane, reused when an earlier batch is done with it."""
        with self.news:
            spare = self._spare.get((batch.group, batch.size))
            if spare:
                return spare.pop()
        group = self._layout.groups[batch.group]
        return [
            [np.empty((batch.size, lane.columns), dtype=WIDTHS[lane.width]) for lane in group.lanes]
            for _ in range(group.shards)
        ]

    # Ends.

    def _fail(self, batch: Batch, why: str) -> None:
        with self.news:
            for errand, _ in batch.cargo:
                errand.problem = errand.problem or why

    def _finish(self, batch: Batch) -> None:
        """The batch is over: nothing of it is read or written any more."""
        batch.rows, batch.token, batch.buffers = [], None, []
        self.staging.give(batch.staged)
        errands = {id(errand): errand for errand, _ in batch.cargo}
        with self.news:
            for errand, _ in batch.cargo:
                errand.out -= 1
        for errand in errands.values():
            self._end_if_over(errand)
        with self.news:
            self._busy -= 1
            self.news.notify_all()

    def _end_if_over(self, errand: Errand) -> None:
        with self.news:
            if errand.over or errand.waiting or errand.out:
                return
            errand.over = True
        self._end(errand)

    def _end(self, errand: Errand) -> None:
        errand.over = True
        errand.done(None if errand.problem else errand.copied, errand.problem)
