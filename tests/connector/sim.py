"""An engine without a model: vLLM's real scheduler and the real connector around a KV cache made of patterns.

Every token's KV is a value made from all tokens before it, the weights, layer and rank. Before a request
"computes", everything it would attend to is compared with what must be there: a wrong, torn, stale or foreign
byte in any block is seen in the step that would have used it. Hooks are called in the order of vLLM's model
runner; several ranks are several worker connectors with caches of their own.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.e2e.models import VOCABULARY, Recipe, checkpoint
from tests.support.waiting import wait_for

HEADS, HEAD_SIZE = 2, 4


@dataclass(frozen=True)
class Shape:
    """The engine to simulate. `window` adds a group of sliding-window layers with that many tokens."""

    blocks: int = 64
    block_size: int = 16
    layers: int = 2
    ranks: int = 1
    window: int | None = None
    max_batched_tokens: int = 256
    max_seqs: int = 8


def kv_transfer(socket: str, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """Fields of KVTransferConfig for an engine of this daemon. Waits are long, for busy machines; tests of
    deadlines give their own."""
    waits = {"deadline_ms": 5000, "attach_wait_ms": 30_000}
    return {
        "kv_connector": "KVHostConnector",
        "kv_connector_module_path": "kvhost_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"socket": socket, **waits, **extra},
    }


def vllm_config(shape: Shape, transfer: dict[str, Any] | None, **arguments: Any) -> Any:
    """A real VllmConfig for a tiny model."""
    config = EngineArgs(
        model=str(checkpoint(Recipe())),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        block_size=shape.block_size,
        max_num_batched_tokens=shape.max_batched_tokens,
        max_num_seqs=shape.max_seqs,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        **arguments,
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = shape.ranks
    config.parallel_config.world_size = shape.ranks
    config.cache_config.num_gpu_blocks = shape.blocks
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def kv_cache_config(shape: Shape) -> KVCacheConfig:
    """`layers` full-attention layers, and as many windowed ones with a window."""
    fields: dict[str, Any] = {
        "block_size": shape.block_size,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    full = FullAttentionSpec(**fields)
    groups = [KVCacheGroupSpec([f"full.{n}" for n in range(shape.layers)], full)]
    if shape.window is not None:
        windowed = SlidingWindowSpec(**fields, sliding_window=shape.window)
        groups.append(KVCacheGroupSpec([f"window.{n}" for n in range(shape.layers)], windowed))
    names = [name for group in groups for name in group.layer_names]
    page = full.page_size_bytes
    size = page * shape.blocks * len(names)
    tensor = KVCacheTensor(size=size, layers=names, layer_stride=page * shape.blocks, block_stride=page)
    return KVCacheConfig(
        num_blocks=shape.blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=groups,
        kv_cache_layout="LBHNC",
        hash_block_size=shape.block_size,
    )


class Chain:
    """One digest a token, of it and all before it, under some weights."""

    def __init__(self, weights: int = 0, salt: str = "") -> None:
        self.weights = weights
        self._last = f"weights {weights} salt {salt}".encode()
        self.digests: list[bytes] = []

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._last = hashlib.blake2b(self._last + token.to_bytes(4, "big"), digest_size=8).digest()
            self.digests.append(self._last)

    def following(self) -> int:
        """The token that a model with these weights says next."""
        return 3 + int.from_bytes(self._last, "big") % (VOCABULARY - 3)


def values(digests: Sequence[bytes], layer: int, rank: int) -> Any:
    """The KV of tokens in one layer of one rank: an int32 each, never 0."""
    raw = np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)
    mixed = (raw * np.uint64(2 * layer + 3)) ^ np.uint64((rank + 1) * 0x9E3779B9)
    return (mixed % np.uint64(0x7FFFFF00) + np.uint64(1)).astype(np.int32)


def answer(prompt: Sequence[int], count: int, weights: int = 0, salt: str = "") -> list[int]:
    """What an engine with right KV answers."""
    chain = Chain(weights, salt)
    chain.extend(prompt)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(chain.following())
        chain.extend(tokens[-1:])
    return tokens


class Worker:
    """One rank: its connector and its KV cache."""

    def __init__(self, config: Any, kv_config: KVCacheConfig, rank: int) -> None:
        self.rank = rank
        self.config = copy.copy(config)
        self.config.parallel_config = copy.copy(config.parallel_config)
        self.config.parallel_config.rank = rank
        names = kv_config.kv_cache_tensors[0].layers
        block_size = kv_config.kv_cache_groups[0].kv_cache_spec.block_size
        shape = (len(names), kv_config.num_blocks, HEADS, block_size, 2 * HEAD_SIZE)
        self.backing = torch.full(shape, float("nan"), dtype=torch.float32)
        self.caches = {name: self.backing[number] for number, name in enumerate(names)}
        self.words = {name: cache.view(torch.int32).numpy() for name, cache in self.caches.items()}
        self.connector: Any = None
        if config.kv_transfer_config is not None:
            self.connector = KVConnectorFactory.create_connector(
                self.config, KVConnectorRole.WORKER, kv_config
            )
            self.connector.register_kv_caches(self.caches)

    def write(self, layer: str, number: int, table: Any, start: int, digests: Sequence[bytes]) -> None:
        """Computes the KV of tokens from `start` on."""
        words = self.words[layer]
        size = words.shape[2]
        positions = np.arange(start, len(digests))
        blocks = np.asarray(table)[positions // size]
        assert blocks.all(), "a token would be written into the null block"
        words[blocks, :, positions % size, :] = self._expected(number, digests[start:])

    def wrong(
        self, layer: str, number: int, table: Any, span: tuple[int, int], digests: Sequence[bytes]
    ) -> list[int]:
        """Positions in the span whose KV is not what it must be."""
        first, end = span
        if end <= first:
            return []
        words = self.words[layer]
        size = words.shape[2]
        positions = np.arange(first, end)
        found = words[np.asarray(table)[positions // size], :, positions % size, :]
        unequal = found != self._expected(number, digests[first:end])
        return [int(positions[index]) for index in np.nonzero(unequal.any(axis=(1, 2)))[0]]

    def _expected(self, number: int, digests: Sequence[bytes]) -> Any:
        """Shape (tokens, 1, 2 * HEAD_SIZE): all heads hold the same."""
        return values(digests, number, self.rank)[:, None, None] + np.arange(2 * HEAD_SIZE, dtype=np.int32)


@dataclass
class Outcome:
    """What became of a request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int = 0


class Sim:
    """The engine. `step` is one of its steps; `run` steps until everything is answered."""

    def __init__(
        self,
        shape: Shape = Shape(),
        transfer: dict[str, Any] | None = None,
        *,
        weights: int = 0,
        **arguments: Any,
    ) -> None:
        self.shape = shape
        self.weights = weights
        self.config = vllm_config(shape, transfer, **arguments)
        kv_config = kv_cache_config(shape)
        self.kv_config = kv_config
        # As the engine core does it: workers first, then the scheduler, then their handshake.
        self.workers = [Worker(self.config, kv_config, rank) for rank in range(shape.ranks)]
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_config, self.config)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        if self.connector is not None:
            reports = {(0, worker.rank): worker.connector.get_handshake_metadata() for worker in self.workers}
            self.connector.set_xfer_handshake_metadata_pp_aware(reports)
            self.aggregator = KVOutputAggregator.from_connector(self.connector, shape.ranks)
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hash_block_size, hash_function)
        self._numbers = 0
        self._added_under: dict[str, int] = {}
        self._chains: dict[str, Chain] = {}
        self.outcomes: dict[str, Outcome] = {}
        # (request, layer, rank, position) of KV that was about to be used and was wrong.
        self.wrong: list[tuple[str, str, int, int]] = []
        self.steps_s: list[float] = []
        # Called between the parts of a step, with the name of the part that comes next.
        self.between: Callable[[str], None] = lambda part: None

    # Requests.

    def add(self, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> str:
        self._numbers += 1
        name = f"r{self._numbers}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )
        self._added_under[name] = self.weights
        self.outcomes[name] = Outcome()
        self.scheduler.add_request(request)
        return name

    def ask(self, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> Outcome:
        """One request, from beginning to end."""
        name = self.add(prompt, max_tokens, **more)
        self.run()
        return self.outcomes[name]

    def abort(self, names: Sequence[str]) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        for name in names:
            self.outcomes[name].finish_reason = "abort"

    def reset(self, *, running: bool = False, weights: int | None = None) -> bool:
        """Everything computed so far must be forgotten. If vLLM says that it is, the weights change."""
        done = bool(self.scheduler.reset_prefix_cache(running, True))
        if done:
            self.weights = self.weights + 1 if weights is None else weights
        return done

    # Steps.

    def run(self, deadline_s: float = 30.0) -> None:
        until = time.monotonic() + deadline_s
        while self.scheduler.has_requests():
            self.step()
            assert time.monotonic() < until, f"not done after {deadline_s} s: {list(self.scheduler.requests)}"
        self.settle()

    def settle(self) -> None:
        """Waits until a daemon that answers knows of all that was done."""
        if self.connector is not None:
            board = self.connector.scheduling.board
            wait_for(lambda: board.idle or not board.usable, what="the agent to be idle")

    def step(self) -> None:
        began = time.monotonic()
        output = self.scheduler.schedule()
        self.steps_s.append(time.monotonic() - began)
        results = [self._execute(worker, output) for worker in self.workers]
        began = time.monotonic()
        runner_output: Any = results[0]
        if self.connector is not None:
            runner_output = self.aggregator.aggregate(results)
        answers = self.scheduler.update_from_output(output, runner_output)
        self.steps_s[-1] += time.monotonic() - began
        for outputs in answers.values():
            for entry in outputs.outputs:
                outcome = self.outcomes[entry.request_id]
                outcome.tokens += entry.new_token_ids
                if entry.finish_reason is not None:
                    outcome.finish_reason = str(entry.finish_reason)
                if entry.prefill_stats is not None:
                    stats = entry.prefill_stats
                    outcome.cached_tokens = stats.num_local_cached_tokens + stats.num_external_cached_tokens
        if not output.total_num_scheduled_tokens:
            time.sleep(0.001)  # as vLLM's own loop between empty steps

    def _execute(self, worker: Worker, output: Any) -> ModelRunnerOutput:
        """One rank's part of a step, hooks in the order of vLLM's V1 model runner."""
        connector = worker.connector
        result = KVConnectorOutput()
        if connector is not None:
            metadata = copy.deepcopy(output.kv_connector_metadata) if self.shape.ranks > 1 else None
            metadata = metadata or output.kv_connector_metadata
            connector.handle_preemptions(metadata)
            connector.bind_connector_metadata(metadata)
        self.between("forward")
        sampled = self._forward(worker, output)
        if connector is not None:
            self.between("load")
            connector.start_load_kv(None)
            connector.wait_for_save()
            results = connector.get_transfer_results(output.finished_req_ids)
            result.finished_sending = results.finished_sending
            result.finished_recving = results.finished_recving
            result.failed_recving = results.failed_recving
            result.invalid_block_ids = connector.get_block_ids_with_load_errors()
            result.kv_connector_stats = connector.get_kv_connector_stats()
            result.kv_connector_worker_meta = connector.build_connector_worker_meta()
            connector.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=result if connector is not None else None,
        )

    def _forward(self, worker: Worker, output: Any) -> dict[str, list[int]]:
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            # schedule() has already counted this step's tokens as computed.
            end = request.num_computed_tokens
            start = end - count
            chain = self._chain(request, end)
            digests = chain.digests[:end]
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            number = 0
            for group, table in zip(self.kv_config.kv_cache_groups, tables, strict=True):
                window = getattr(group.kv_cache_spec, "sliding_window", None)
                first = max(0, start + 1 - window) if window else 0
                for layer in group.layer_names:
                    if self._added_under[name] == self.weights:
                        wrong = worker.wrong(layer, number, table, (first, start), digests)
                        self.wrong += [(name, layer, worker.rank, position) for position in wrong]
                    worker.write(layer, number, table, start, digests)
                    number += 1
            done = end >= request.num_tokens
            sampled[name] = [chain.following()] if done else []
        return sampled

    def _chain(self, request: Any, end: int) -> Chain:
        chain = self._chains.get(request.request_id)
        if chain is None or chain.weights != self.weights:
            chain = self._chains[request.request_id] = Chain(self.weights, request.cache_salt or "")
        if len(chain.digests) < end:
            chain.extend(request.all_token_ids[len(chain.digests) : end])
        return chain

    # The end.

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        for worker in self.workers:
            if worker.connector is not None:
                worker.connector.shutdown()
        self.scheduler.shutdown()

    def __enter__(self) -> Sim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
