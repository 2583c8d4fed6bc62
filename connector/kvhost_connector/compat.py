"""Everything of vLLM that is not public: the private names kvhost touches, and where 0.32 and 0.33 differ.

Nothing outside this module may name a private attribute of vLLM's native offloading half. What is named here
is checked when a connector is built, and a vLLM that lacks any of it is refused in one line.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

SUPPORTED = ((0, 32), (0, 33))

# Versions in which `IdleRequests` knows what native does with a request in a step.
_TRIMMED = ((0, 32),)

_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"

# module -> class or function -> attributes of it
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": {
        "OffloadingConnector": (
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "update_connector_output",
            "get_transfer_results",
            "handle_preemptions",
            "request_finished_all_groups",
            "reset_cache",
        ),
    },
    f"{_OFFLOADING}.scheduler": {
        "OffloadingConnectorScheduler": ("reset_cache",),
        "RequestOffloadState": (
            "update_offload_keys",
            "max_offload_tokens",
            "req_context",
            "group_states",
            "req",
        ),
        "RequestGroupState": ("next_stored_chunk_idx",),
        "get_sliding_window_size_in_chunks": (),
    },
    f"{_OFFLOADING}.common": {"OffloadingConnectorMetadata": (), "OffloadingWorkerMetadata": ("aggregate",)},
    f"{_OFFLOADING}.config": {"build_offloading_config": (), "get_offloading_group_ids": ()},
    f"{_OFFLOADING}.metrics": {"OffloadingConnectorStats": ("increase_counter", "set_gauge")},
    "vllm.v1.kv_offload.base": {
        "OffloadingManager": ("lookup", "prepare_load", "prepare_store", "take_events"),
        "OffloadingWorker": ("submit_store", "submit_load", "get_finished", "wait"),
        "OffloadingSpec": ("get_manager", "get_worker"),
        "ReqContext": ("get_offload_key_position",),
        "GPULoadStoreSpec": (),
        "CanonicalKVCaches": (),
    },
    "vllm.v1.core.kv_cache_utils": {"resolve_none_hash_seed": (), "make_block_hash_with_group_id": ()},
    "vllm.utils.hashing": {"get_hash_fn_by_name": ()},
}

# What workers on devices are built on; imported by these only.
_TRANSFERS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.kv_offload.cpu.gpu_worker": {
        "CPUOffloadingWorker": (),
        "SingleDirectionOffloadingHandler": ("transfer_async",),
    },
    "vllm.v1.kv_offload.base": {
        "BlockIDsLoadStoreSpec": (),
        "CanonicalKVCacheRef": (),
        "CanonicalKVCacheTensor": (),
    },
}

_SCHEDULER_NAMES = (
    "_req_status",
    "_jobs",
    "_job_counter",
    "_stale_job_threshold",
    "_current_batch_load_jobs",
    "_current_batch_jobs_to_flush",
    "_current_batch_allocated_block_ids",
    "_block_id_to_pending_jobs",
    "_chunks_being_loaded",
    "manager",
    "config",
)
_WORKER_NAMES = ("_load_jobs", "_unsubmitted_store_jobs", "_is_store_writer", "worker")


class IncompatibleVLLM(RuntimeError):
    """This vLLM is not one that kvhost can extend; the message is one line."""


def log_as_vllm(name: str) -> None:
    """Has a package's log lines look like vLLM's own, in vLLM's format and level."""
    logger, vllm_logger = logging.getLogger(name), logging.getLogger("vllm")
    if vllm_logger.handlers:
        logger.handlers = list(vllm_logger.handlers)
        logger.setLevel(vllm_logger.level)
        logger.propagate = vllm_logger.propagate


def vllm_version() -> tuple[int, int]:
    """Major and minor version of the installed vLLM."""
    import vllm

    major, minor = vllm.__version_tuple__[:2]
    return int(major), int(minor)


def page_format() -> str:
    """Names how vLLM lays out a block's bytes. Engines of different minor versions share only where this
    was proven equal."""
    major, minor = vllm_version()
    return f"vllm {major}.{minor}"


def check() -> None:
    """Raises `IncompatibleVLLM` unless everything that kvhost needs of vLLM is there."""
    found = vllm_version()
    if found not in SUPPORTED:
        known = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise IncompatibleVLLM(
            f"kvhost's connector extends vLLM {known}, found {found[0]}.{found[1]}: install one of these, or "
            f"a newer kvhost"
        )
    _check_names(_NAMES)


def check_transfers() -> None:
    """Raises `IncompatibleVLLM` unless vLLM's transfer code is as workers on devices need it."""
    _check_names(_TRANSFERS)


def _check_names(wanted: dict[str, dict[str, tuple[str, ...]]]) -> None:
    missing = [name for module, names in wanted.items() for name in _missing(module, names)]
    if missing:
        major, minor = vllm_version()
        raise IncompatibleVLLM(
            f"this vLLM {major}.{minor} lacks what kvhost's connector extends ({', '.join(missing)}): "
            f"install the released version"
        )


def _missing(module: str, names: dict[str, tuple[str, ...]]) -> Iterator[str]:
    try:
        loaded = importlib.import_module(module)
    except ImportError:
        yield module
        return
    for name, attributes in names.items():
        holder = getattr(loaded, name, None)
        if holder is None:
            yield f"{module}.{name}"
            continue
        for attribute in attributes:
            if not hasattr(holder, attribute):
                yield f"{name}.{attribute}"


def _check_instance(half: Any, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(half, name)]
    if missing:
        raise IncompatibleVLLM(
            f"{type(half).__name__} of this vLLM lacks {', '.join(missing)}, which kvhost's connector uses: "
            f"install vLLM 0.32 or 0.33"
        )


class SchedulerHalf:
    """The native scheduler half: what kvhost reads and mends in it."""

    def __init__(self, half: Any) -> None:
        _check_instance(half, _SCHEDULER_NAMES)
        self._half = half
        self._idle = IdleRequests(half, half.manager.grants_at_hand) if vllm_version() in _TRIMMED else None

    @property
    def manager(self) -> Any:
        return self._half.manager

    @property
    def groups(self) -> Any:
        """One native GroupOffloadConfig for each offloaded KV cache group."""
        return self._half.config.kv_group_configs

    def status(self, req_id: str) -> Any:
        """The native state of a request, None when it has none."""
        return self._half._req_status.get(req_id)

    def statuses(self) -> Iterator[tuple[str, Any]]:
        return iter(list(self._half._req_status.items()))

    def adopt(self, request: Any) -> None:
        """Gives native a state for a request that it failed to take up: it looks for one in every step.
        Nothing of the request is stored."""
        if self.status(request.request_id) is None:
            module = importlib.import_module(f"{_OFFLOADING}.scheduler")
            base = importlib.import_module("vllm.v1.kv_offload.base")
            status = module.RequestOffloadState(
                config=self._half.config,
                req=request,
                req_context=base.ReqContext(req_id=request.request_id),
                offloading_context=base.RequestOffloadingContext(),
            )
            status.max_offload_tokens = 0
            self._half._req_status[request.request_id] = status

    @property
    def loading(self) -> Collection[bytes]:
        """Keys that are being loaded; native has other requests that need them wait."""
        return self._half._chunks_being_loaded or ()

    def loads_all(self, request: Any, tokens: int) -> bool:
        """Whether the load of this request covers so many tokens without a gap, from the first on."""
        status = self.status(request.request_id)
        ranges = getattr(status, "load_key_ranges", None)
        if not ranges or not tokens:
            return False
        reached = status.num_locally_computed_tokens
        end = reached + tokens
        for first, behind, _ in ranges:
            if first > reached:
                return False
            reached = max(reached, behind)
            if reached >= end:
                return True
        return False

    def key_chains(self, req_id: str) -> list[list[bytes]]:
        """Keys of every group, head first, brought up to date. The lists are native's own and grow."""
        status = self.status(req_id)
        if status is None:
            return [[] for _ in self.groups]
        status.update_offload_keys()
        return [group.offload_keys for group in status.group_states]

    def what_matters(self, scheduler_output: Any) -> Any:
        """A step's output without the requests in which native would look for something to do and find
        nothing. It goes through all of them in every step; most only decode."""
        return self._idle.leave_out(scheduler_output) if self._idle is not None else scheduler_output

    def awaken(self, req_id: str) -> None:
        """Native may move this request's progress in storing back, or forgets it: it is looked at again."""
        if self._idle is not None:
            self._idle.awaken(req_id)

    def awaken_all(self) -> None:
        """The same, of all requests."""
        if self._idle is not None:
            self._idle.awaken_all()

    def undelivered_loads(self) -> list[str]:
        """Requests that were promised a load which no metadata has carried to the workers yet."""
        return [job.req_id for job in self._half._current_batch_load_jobs.values()]

    def rewind_stored(self, req_id: str, group: int, chunk: int) -> None:
        """Lets native offer the chunks from `chunk` on again, in this step or the next."""
        status = self.status(req_id)
        self.awaken(req_id)
        if status is not None:
            state = status.group_states[group]
            state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, chunk)

    def shun(self, req_id: str) -> None:
        """Has native store nothing of a request that it could not be asked about: its block table may be
        wrong."""
        status = self.status(req_id)
        if status is not None:
            status.max_offload_tokens = 0
            for state in status.group_states:
                state.block_ids.clear()

    def abandon(self) -> None:
        """Empties the native half after it raised: nothing of it is asked again, and reports of jobs that
        still run are ignored as stale."""
        half = self._half
        half._stale_job_threshold = half._job_counter
        half._jobs.clear()
        half._req_status.clear()
        self.awaken_all()
        half._current_batch_load_jobs.clear()
        half._current_batch_jobs_to_flush.clear()
        half._current_batch_allocated_block_ids.clear()
        half._block_id_to_pending_jobs.clear()
        if half._chunks_being_loaded is not None:
            half._chunks_being_loaded.clear()


class CachedRequests(NamedTuple):
    """What native reads of vLLM's CachedRequestData."""

    req_ids: list[str]
    new_block_ids: list[Any]
    resumed_req_ids: Any


class TrimmedOutput:
    """A SchedulerOutput with fewer requests; everything else is the original's."""

    __slots__ = ("_output", "num_scheduled_tokens", "scheduled_cached_reqs")

    def __init__(self, output: Any, scheduled: dict[str, int], cached: CachedRequests) -> None:
        self._output = output
        self.num_scheduled_tokens = scheduled
        self.scheduled_cached_reqs = cached

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


OFFERED_A_STEP = 24
"""So many chunks are offered to be stored in a step, where more could wait; and those of one request at
least."""

WAITING_PART = 2
"""Of the grants at hand one in so many is for chunks that wait: requests that end need all of theirs at
once."""


class IdleRequests:
    """Requests whose whole prompt native has offered to be stored, where prompts alone are stored.

    In a step, native does two things with a running request: it notes new blocks, and looks for chunks behind
    `next_stored_chunk_idx` up to the end of what was computed, or of the prompt. With the index at the end of
    the prompt the second finds nothing. It moves back only when a load is allocated, which a lookup precedes,
    at a reset, and when we move it: `awaken` in each of these cases. What finished is never left out.

    Where all groups are full attention, prompts that become complete together are offered one after the
    other, over the next steps, so that none of these is long. Their blocks stay with them until they end, and
    in the step after that native offers what is left: never more waits than could be stored then.
    """

    def __init__(self, half: Any, grants_at_hand: Callable[[], int]) -> None:
        self._half = half
        self._grants_at_hand = grants_at_hand
        self._prompts_only = bool(half.config.offload_prompt_only)
        self._tokens = [int(group.tokens_per_chunk) for group in half.config.kv_group_configs]
        self._may_wait = all(
            group.sliding_window_size_in_chunks is None and not group.is_eagle_group
            for group in half.config.kv_group_configs
        )
        # With the length of the prompt: a session that goes on has a longer one.
        self._idle: dict[str, tuple[Any, int]] = {}

    def awaken(self, req_id: str) -> None:
        self._idle.pop(req_id, None)

    def awaken_all(self) -> None:
        self._idle.clear()

    def leave_out(self, output: Any) -> Any:
        if not self._prompts_only:
            return output
        idle = self._idle
        scheduled = {}
        for req_id, count in output.num_scheduled_tokens.items():
            known = idle.get(req_id)
            if known is not None and known[0].num_prompt_tokens == known[1]:
                continue
            if not self._becomes_idle(req_id):
                scheduled[req_id] = count
        if self._may_wait and len(scheduled) > 1:
            self._put_off(scheduled)
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        req_ids, new_blocks = [], []
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None or req_id in scheduled or req_id in resumed:
                req_ids.append(req_id)
                new_blocks.append(blocks)
        return TrimmedOutput(output, scheduled, CachedRequests(req_ids, new_blocks, resumed))

    def _put_off(self, scheduled: dict[str, int]) -> None:
        """Takes out requests whose chunks can as well be offered in a later step."""
        due = {req_id: self._due(req_id, count) for req_id, count in scheduled.items()}
        room = max(OFFERED_A_STEP, sum(due.values()) - self._grants_at_hand() // WAITING_PART)
        offered = 0
        for req_id, chunks in due.items():
            if not chunks:
                continue
            if offered and offered + chunks > room:
                del scheduled[req_id]
            else:
                offered += chunks

    def _due(self, req_id: str, count: int) -> int:
        """How many chunks native would offer of a request that computes `count` tokens in this step."""
        status = self._half._req_status.get(req_id)
        if status is None:
            return 0
        end = min(status.req.num_computed_tokens + count, status.req.num_prompt_tokens)
        if status.max_offload_tokens is not None:
            end = min(end, status.max_offload_tokens)
        return sum(
            max(0, end // tokens - state.next_stored_chunk_idx)
            for tokens, state in zip(self._tokens, status.group_states, strict=True)
        )

    def _becomes_idle(self, req_id: str) -> bool:
        status = self._half._req_status.get(req_id)
        if status is None:
            return False
        prompt = int(status.req.num_prompt_tokens)
        for tokens, state in zip(self._tokens, status.group_states, strict=True):
            if state.next_stored_chunk_idx < prompt // tokens:
                return False
        self._idle[req_id] = (status.req, prompt)
        return True


class WorkerHalf:
    """The native worker half."""

    def __init__(self, half: Any) -> None:
        _check_instance(half, _WORKER_NAMES)
        self._half = half

    @property
    def worker(self) -> Any:
        """Our OffloadingWorker; None before the KV caches are registered."""
        return self._half.worker

    def load_requests(self) -> dict[int, str]:
        """job id -> request, of every load that is not reported yet. A copy."""
        return dict(self._half._load_jobs)

    def set_worker(self, worker: Any) -> None:
        """Gives native a worker after it failed to make one."""
        self._half.worker = worker


def show_metrics(metrics: Any) -> None:
    """Makes every unlabelled metric exist with value 0: vLLM creates them when they first change (H2)."""
    for engine in metrics.per_engine_labelvalues:
        for name, described in metrics._offloading_metric_metadata.items():
            if not described.labelnames:
                metrics._get_prometheus_metric(name, (), engine)


def cached_block_hashes(block_pool: Any) -> frozenset[bytes]:
    """Hashes (with group id) of all blocks in the device's prefix cache; empty where the pool has none."""
    cache = getattr(getattr(block_pool, "cached_block_hash_to_block", None), "_cache", None)
    return frozenset(cache) if cache else frozenset()


def block_hash_with_group(block_hash: bytes, group: int) -> bytes:
    """The form in which the device's prefix cache knows a block of a group."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    combined: bytes = make_block_hash_with_group_id(block_hash, group)
    return combined


def hash_algorithm(vllm_config: Any) -> tuple[str, str, int]:
    """Name of the block-hash algorithm, its resolved seed, and the length of its hashes in bytes.

    NONE_HASH itself is not defined yet when connectors are built. For algorithms without a fixed seed the
    seed is drawn anew on every call: call it once.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    name = str(vllm_config.cache_config.prefix_caching_hash_algo)
    function = get_hash_fn_by_name(name)
    return name, str(resolve_none_hash_seed(function)), len(function("length"))


def offloaded_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Indices of the KV cache groups that native offloading handles."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids

    groups: tuple[int, ...] = tuple(get_offloading_group_ids(kv_cache_config))
    return groups


def is_full_attention(kv_cache_spec: Any, tokens_per_chunk: int) -> bool:
    """Whether native looks a group up by prefix (and not by window or state)."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        get_sliding_window_size_in_chunks,
    )

    return get_sliding_window_size_in_chunks(kv_cache_spec, tokens_per_chunk) is None


def attention_layer(vllm_config: Any, layer_name: str) -> Any:
    """The layer object of a worker's model, None when there is no such layer."""
    context = getattr(vllm_config.compilation_config, "static_forward_context", None) or {}
    return context.get(layer_name)


def preempted_requests(scheduler_output: Any) -> frozenset[str]:
    return frozenset(scheduler_output.preempted_req_ids or ())
