"""An engine without a model, attached to a real daemon, for benchmarks of the data path.

It has a session, a mapping, a KV cache of torch tensors, and the connector's host worker between them.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvhost_client.session import Session
from kvhost_client.types import Access, Chunk, Pin, ReserveStatus, Semantics, StoreOf
from kvhost_client.worker import WorkerLink, WorkerMapping
from kvhost_connector.metadata import Epoch, SlotSpec, TransferId
from kvhost_connector.pages import PageTable
from kvhost_connector.worker import HostWorker
from kvhost_proto.v1 import cache_pb2, common_pb2
from tests.support.waiting import wait_for

KEY_BYTES = 36
DEADLINE_S = 30.0
# Above any job of a benchmark: nothing is given up while it waits.
NO_FLUSH_S = 600.0

_numbers = itertools.count(1)


class KVCache:
    """Layers in one allocation, as vLLM's LBHNC: page `block` of layer `layer` is `pages[layer, block]`.

    Shape (layers, blocks, page bytes), dtype uint8. Block 0 is the null block and holds nothing.
    """

    def __init__(self, layers: int, blocks: int, page_bytes: int) -> None:
        self.backing = torch.empty((layers, blocks, page_bytes), dtype=torch.int8)
        self.pages: npt.NDArray[np.uint8] = self.backing.numpy().view(np.uint8)
        # Which pattern each block holds at present.
        self.holds = np.arange(blocks)
        for layer in range(layers):
            self.pages[layer] = self.pattern(layer, self.holds).view(np.uint8)

    @property
    def blocks(self) -> int:
        return int(self.pages.shape[1])

    def pattern(self, layer: int, names: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """What pages of this layer hold whose blocks have these names: shape (names, words of a page)."""
        words = self.pages.shape[2] // 8
        first = (names.astype(np.uint64) * np.uint64(len(self.pages)) + np.uint64(layer)) * np.uint64(words)
        return (first[:, None] + np.arange(words, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)

    def wrong_blocks(self) -> int:
        """How many blocks do not hold what they should."""
        wrong = np.zeros(self.blocks, dtype=bool)
        for layer, pages in enumerate(self.pages):
            wrong |= (pages.view(np.uint64) != self.pattern(layer, self.holds)).any(axis=1)
        return int(wrong.sum())

    def table(self) -> PageTable:
        """As the connector registers it."""
        refs = [
            SimpleNamespace(tensor_idx=layer, page_size_bytes=self.pages.shape[2])
            for layer in range(len(self.pages))
        ]
        return PageTable.of(
            SimpleNamespace(
                tensors=[SimpleNamespace(tensor=layer) for layer in self.backing], group_data_refs=[refs]
            )
        )


@dataclass(frozen=True)
class Stored:
    """Chunks under their keys; `blocks` has shape (chunks, blocks of a chunk)."""

    keys: list[bytes]
    blocks: npt.NDArray[np.int64]
    slots: list[int]
    ids: list[int]


@dataclass(frozen=True)
class Spent:
    """What some copies took: wall seconds, and processor seconds of this whole process."""

    seconds: float
    cpu: float

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.cpu + other.cpu)


def spent(act: Callable[[], object]) -> Spent:
    """Does it, and says what it took."""
    cpu, start = time.process_time(), time.perf_counter()
    act()
    return Spent(time.perf_counter() - start, time.process_time() - cpu)


class Attached:
    """One engine instance with one worker. In a `with`, which detaches it."""

    def __init__(self, socket: str, cache: KVCache, blocks_per_chunk: int, threads: int = 1) -> None:
        self.cache = cache
        self._blocks_per_chunk = blocks_per_chunk
        table = cache.table()
        instance = secrets.token_bytes(16)
        ready: list[cache_pb2.Notice] = []
        self.link = WorkerLink(socket, instance, 0, Access.CPU)
        self.link.start()
        self.session = Session.open(
            socket, instance_id=instance, label="benchmark", deadline_s=DEADLINE_S, on_notice=ready.append
        )
        shard_bytes = table.shard_bytes(blocks_per_chunk)
        self.session.declare(_namespace(shard_bytes), {0: self.link.token})
        wait_for(lambda: any(notice.mapped.ready for notice in list(ready)), DEADLINE_S, "a mapping")
        self.chunk_bytes = shard_bytes
        self.worker = HostWorker(
            table,
            self.link,
            blocks_per_chunk=blocks_per_chunk,
            threads=threads,
            flush_deadline_s=NO_FLUSH_S,
        )

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self.worker.shutdown()

    @property
    def mapping(self) -> WorkerMapping:
        mapping = self.link.mapping
        if mapping is None:
            raise RuntimeError(f"the worker has no mapping: {self.link.problem}")
        return mapping

    def reserve(self, blocks: npt.NDArray[np.int64]) -> Stored:
        """Slots for chunks of these blocks, under new keys. Waits until the worker has mapped them."""
        keys = [secrets.token_bytes(KEY_BYTES - 4) + bytes(4) for _ in blocks]
        ids: dict[bytes, tuple[int, int]] = {}

        def all_granted() -> bool:
            left = [key for key in keys if key not in ids]
            reserved = self.session.reserve(chunks=[Chunk(0, key) for key in left])
            for key, grant in zip(left, reserved.chunks, strict=True):
                if grant.status is ReserveStatus.RESERVED:
                    ids[key] = (grant.store_id, grant.slot)
            if len(ids) < len(keys) and not reserved.pending:
                raise RuntimeError(f"{len(keys)} slots were asked for, {len(ids)} granted: {reserved.reason}")
            return len(ids) == len(keys)

        wait_for(all_granted, DEADLINE_S, f"{len(keys)} slots")
        granted = [ids[key] for key in keys]
        return Stored(keys, blocks, [slot for _, slot in granted], [store for store, _ in granted])

    def prefaulted(self) -> None:
        """Returns when the worker's mapping needs no page fault any more."""
        wait_for(lambda: self.link.prefault_done, DEADLINE_S, "a prefaulted mapping")

    def store(self, stored: Stored, jobs: int) -> Spent:
        """Stores these chunks in so many jobs."""

        def submit(number: int, part: slice) -> None:
            spec = self._spec(number, stored.slots[part], stored.ids[part])
            self.worker.submit_store(number, _device(stored.blocks[part]), spec)

        return self._run(len(stored.slots), jobs, submit)

    def load(self, stored: Stored, jobs: int) -> Spent:
        """Loads these slots into these blocks."""

        def submit(number: int, part: slice) -> None:
            spec = self._spec(number, stored.slots[part], ())
            self.worker.submit_load(number, spec, _device(stored.blocks[part]))

        return self._run(len(stored.slots), jobs, submit)

    def commit(self, stored: Stored) -> None:
        """Publishes them."""
        pairs = zip(stored.ids, stored.keys, strict=True)
        result = self.session.update(commits=[StoreOf(store, Chunk(0, key)) for store, key in pairs])
        if result.errors:
            raise RuntimeError(f"a commit was refused: {result.errors[0].message}")

    @contextmanager
    def pinned(self, keys: Sequence[bytes], blocks: npt.NDArray[np.int64]) -> Iterator[Stored]:
        """These chunks held, to be loaded into these blocks."""
        pins: list[Pin] = self.session.pin(0, keys, Semantics.SET)
        if len(pins) != len(keys):
            raise RuntimeError(f"{len(keys)} chunks were stored, {len(pins)} could be pinned")
        yield Stored(list(keys), blocks, [pin.slot for pin in pins], [pin.pin_id for pin in pins])
        self.session.release(pins)

    def _run(self, chunks: int, jobs: int, submit: Callable[[int, slice], None]) -> Spent:
        """From the first submission until all have ended."""
        size = -(-chunks // jobs)
        parts = [(next(_numbers), slice(n, n + size)) for n in range(0, chunks, size)]

        def run() -> None:
            for number, part in parts:
                submit(number, part)
            self.worker.wait({number for number, _ in parts})
            self.worker.get_finished()

        took = spent(run)
        failed = self.worker.take_failed()
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(parts)} jobs failed")
        self.worker.take_reports()
        return took

    def _spec(self, number: int, slots: Sequence[int], store_ids: Sequence[int]) -> SlotSpec:
        return SlotSpec(
            TransferId(number),
            Epoch(0),
            session=self.session.number,
            boot_id=self.session.boot_id,
            generation=self.session.generation,
            slots=tuple(slots),
            store_ids=tuple(store_ids),
        )


def _device(blocks: npt.NDArray[np.int64]) -> Any:
    flat = blocks.ravel()
    return GPULoadStoreSpec(flat.tolist(), group_sizes=[len(flat)], block_indices=[0])


def _namespace(shard_bytes: int) -> common_pb2.NamespaceSpec:
    groups = [common_pb2.Group(id=0, semantics=common_pb2.SEMANTICS_SET, tokens_per_chunk=16)]
    return common_pb2.NamespaceSpec(
        model="benchmark",
        parts=[common_pb2.DigestPart(name="model", value=json.dumps("benchmark"))],
        layout=common_pb2.Layout(
            shard_bytes=shard_bytes, shards=1, ranks=1, key_bytes=KEY_BYTES, groups=groups
        ),
    )
