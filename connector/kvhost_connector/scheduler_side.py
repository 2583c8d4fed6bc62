"""What the connector does in the scheduler's process, around vLLM's native half.

Each method is one hook of vLLM's scheduler. None waits for the daemon, none raises: where native itself
raises, the request concerned is computed, or, when native's own books are in doubt, the engine goes on
without the cache (contract 19).
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvhost_client.link import Link
from kvhost_client.session import Session
from kvhost_client.types import Declared
from kvhost_connector import compat, stats
from kvhost_connector.agent import Agent
from kvhost_connector.board import Board
from kvhost_connector.config import ConnectorConfig
from kvhost_connector.manager import HostManager
from kvhost_connector.metadata import NATIVE_FIELDS, StepMetadata, WorkerMetadata, WorkerReport
from kvhost_connector.namespace import (
    EngineParts,
    Group,
    WorkersDisagree,
    check_reports,
    namespace_spec,
    tokens_of,
)
from kvhost_connector.requests import RequestView
from kvhost_connector.weights import AdapterIdentities
from kvhost_proto.v1 import common_pb2

logger = logging.getLogger("vllm.kvhost")

Matched = tuple[int | None, bool]
Declaration = tuple[common_pb2.NamespaceSpec, Mapping[int, bytes]]
WAIT: Matched = (None, False)

SLOTS_AHEAD = 64
"""At least so many slots are granted ahead: two short steps may be over before a busy daemon answers."""


def instance_id(vllm_config: Any) -> bytes:
    """16 bytes shared by the scheduler and all workers of one engine, and by nobody else: a configured
    engine id may be used twice, the configuration's own instance id is made anew at every start."""
    name = f"{vllm_config.kv_transfer_config.engine_id}\0{vllm_config.instance_id}"
    return hashlib.sha256(name.encode()).digest()[:16]


class SchedulerSide:
    """The scheduler half of one engine."""

    def __init__(self, half: Any, spec: Any, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig):
        self._native = compat.SchedulerHalf(half)
        self._config = config
        self.manager: HostManager = self._native.manager
        self._adapters = AdapterIdentities(str(getattr(vllm_config.lora_config, "lora_dtype", "")))
        self._groups = tuple(
            Group(
                int(group.group_idx), group.sliding_window_size_in_chunks is None, int(group.tokens_per_chunk)
            )
            for group in self._native.groups
        )
        self._parts = EngineParts.of(
            vllm_config,
            kv_cache_config,
            config,
            groups=self._groups,
            tokens_per_hash=int(spec.tokens_per_hash),
            blocks_per_chunk=int(spec.blocks_per_chunk),
            replicated=bool(spec.replicated_layout),
        )
        budget = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self.board = Board(
            deadline_s=config.deadline_s,
            stock_target=max(
                SLOTS_AHEAD, sum(2 * -(-budget // group.tokens_per_chunk) for group in self._groups)
            ),
        )
        self.manager.attach(
            self.board,
            ranks=self._parts.ranks,
            writers=[0] if spec.replicated_layout else range(self._parts.ranks),
            may_attach=self._may_attach,
        )
        self._reports: dict[int, WorkerReport] = {}
        # Weights and reports that the link declared last.
        self._declared: tuple[str, dict[int, WorkerReport]] = (config.weights_version, {})
        self._hopeless = False
        self._attach_until = 0.0
        self._step = 0
        self._reset_since_step = False
        # Requests whose blocks were computed with older weights: their limit on storing before that.
        self._held_back: dict[str, int | None] = {}
        self._old_blocks: frozenset[bytes] = frozenset()
        self._block_pool: Any = None
        # Requests that wait for a load that cannot happen, to be reported failed by the workers.
        self._promised: list[str] = []
        # Native's books are in doubt: it is asked no more.
        self._broken = False
        self._used_versions = {config.weights_version}
        self._weights = config.weights_version
        self._agent = Agent(self.board, self.declaration)
        self._link = Link(
            config.socket,
            instance_id(vllm_config),
            f"vllm {'.'.join(map(str, compat.vllm_version()))} {self._parts.model}",
            declare=self._link_declares,
            on_up=self._up,
            on_down=self.board.down,
            on_notice=self.board.notice,
        )
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                'kvhost: kv_load_failure_policy is "fail": a chunk that cannot be loaded ends its request '
                'with an error. Set "kv_load_failure_policy": "recompute" to have it computed instead'
            )
        self._agent.start()
        self._link.start()

    def shutdown(self) -> None:
        self._agent.close()
        self._link.close(timeout=2.0)

    # The workers.

    def workers_reported(self, reports: Iterable[WorkerReport]) -> None:
        """Reports of ranks, at start and when one attaches anew with another token."""
        changed = False
        for report in reports:
            changed = changed or not report.declares_as(self._reports.get(report.rank))
            self._reports[report.rank] = report
        self.manager.gauges = stats.count_workers(self._reports.values(), self.manager.gauges)
        if len(self._reports) < self._parts.ranks or self._hopeless:
            return
        try:
            check_reports(self._reports, self._parts.ranks)
        except WorkersDisagree as error:
            self._hopeless = True
            logger.error("kvhost: this engine runs without the cache: %s", error)
            self._link.close(timeout=0.0)
            return
        if not changed:
            return
        if not self._attach_until:
            self._attach_until = time.monotonic() + self._config.attach_wait_s
        self._link.declare_again()

    def declaration(self) -> Declaration | None:
        """What to declare, with the weights of now; None while workers have not reported. Any thread."""
        reports = dict(self._reports)
        if self._hopeless or len(reports) < self._parts.ranks:
            return None
        parts = self._parts.with_weights(self._weights)
        return namespace_spec(parts, reports, self._config.namespace), tokens_of(reports)

    def _link_declares(self) -> Declaration | None:
        if self.board.has_session:
            # Only the agent speaks in an open session: in order with resets, which must not be undone.
            self.board.declare_again()
            return None
        self._declared = self._weights, dict(self._reports)
        return self.declaration()

    def _up(self, session: Session, declared: Declared) -> None:
        """The link has a session. Weights or tokens may have changed while it opened."""
        weights, reports = self._declared
        self.board.up(session, declared, self._weights if weights != self._weights else None)
        if reports != self._reports:
            self.board.declare_again()

    def _may_attach(self) -> bool:
        """Whether this new engine will be attached in a moment, so that its first request may wait for it.
        Never where no daemon answers, and never again after the first time."""
        if self._hopeless or self.board.ever_mapped or time.monotonic() >= self._attach_until:
            return False
        return self.board.connected if self.board.has_session else not self._link.problem

    # The course of a request.

    def new_request(self, request: Any, native: Callable[[Any], None]) -> None:
        if self._broken:
            return
        try:
            native(request)
            view = RequestView(
                request.request_id,
                self._groups,
                self._native.key_chains(request.request_id),
                self._adapters.of(request),
            )
            self.manager.begin(view)
        except Exception:
            logger.exception("kvhost: request %s runs without the cache", request.request_id)
            self._native.adopt(request)

    def match(self, request: Any, computed: int, native: Callable[[Any, int], Matched]) -> Matched:
        """How many tokens behind `computed` can be loaded: a number only for what is pinned (I3)."""
        view = self.manager.view(request.request_id)
        if self._broken:
            return 0, False
        try:
            if view is None:
                # Unknown to us: all its keys are misses, but native must be asked (contract 8).
                self._native.awaken(request.request_id)
                return native(request, computed)
            if self.manager.still_waits(view):
                return WAIT
            self._let_store(request, computed)
            if self._preemption_unseen(request, view):
                return WAIT
            self._native.awaken(request.request_id)
            self._native.key_chains(request.request_id)
            if self.manager.must_wait(view, computed):
                return WAIT
            skips = request.skip_reading_prefix_cache
            if not skips and self.manager.foresee(view, computed, self._native.loading):
                return WAIT
            found, _ = native(request, computed)
            if found is None:
                return WAIT
            context = self._native.status(request.request_id).req_context
            if self.manager.must_pin(view, context, computed, found):
                return WAIT
            return found, found > 0
        except Exception:
            logger.exception("kvhost: request %s is computed", request.request_id)
            self._native.shun(request.request_id)
            if view is not None:
                self.manager.end(view)
            return 0, False

    def allocated(self, request: Any, external: int, native: Callable[[], None]) -> None:
        """Blocks were allocated; `external` tokens of them are to be loaded."""
        view = self.manager.view(request.request_id)
        try:
            if self._broken:
                raise RuntimeError("the native half is not used any more")
            native()
        except Exception:
            # The scheduler waits for this load from now on (contract 19).
            if external:
                self._promised.append(request.request_id)
                self.manager.drop_undelivered(request.request_id)
                logger.exception("kvhost: the load of request %s failed", request.request_id)
        if view is not None:
            self.manager.allocated(view)

    def hit_sources(
        self, request: Any, external: int, native: Callable[[], dict[CacheHitSource, int]]
    ) -> dict[CacheHitSource, int]:
        """Where `external` loaded tokens came from. Native sorts the ranges of all keys by where each came
        from; with us all come from one place, and the answer is known where they cover everything."""
        return {CacheHitSource.HOST: external} if self._native.loads_all(request, external) else native()

    def finished(self, request: Any, native: Callable[[], tuple[bool, Any]]) -> tuple[bool, Any]:
        view = self.manager.view(request.request_id)
        if view is not None:
            self.manager.end(view)
        self._held_back.pop(request.request_id, None)
        self._native.awaken(request.request_id)
        if self._broken:
            self.manager.forget(request.request_id)
            return False, None
        try:
            return native()
        except Exception:
            logger.exception("kvhost: the end of request %s", request.request_id)
            return False, None
        finally:
            self.manager.flush()

    def _preemption_unseen(self, request: Any, view: RequestView) -> bool:
        """Whether native has not been told of this request's preemption yet: it asserts that a preempted
        request has no load (contract 13)."""
        if request.num_preemptions > view.preemptions:
            view.preemptions = request.num_preemptions
            view.hold_until_step = self._step + 1
        return self._step < view.hold_until_step

    # Steps.

    def build_metadata(self, output: Any, native: Callable[[Any], Any]) -> StepMetadata:
        meta: Any = None
        if not self._broken:
            try:
                self._offer_again(windowed=False)
                meta = native(self._native.what_matters(output))
                self.manager.delivered()
                self._offer_again(windowed=True)
                self.manager.drop_shortfalls()
            except Exception:
                self._give_up()
        failed = tuple(dict.fromkeys(self._promised))
        self._promised = []
        self._step += 1
        self._reset_since_step = False
        for req_id in compat.preempted_requests(output):
            view, status = self.manager.view(req_id), self._native.status(req_id)
            if view is not None and status is not None:
                # Native knows it now: the next lookup may proceed.
                view.preemptions = status.req.num_preemptions
        for req_id in output.finished_req_ids or ():
            self.manager.forget(req_id)
        # The workers begin to copy in the next step: this one's assigns go with what they report now.
        self.manager.flush(urgent=True)
        if meta is None:
            return StepMetadata({}, {}, None, epoch=self.manager.epoch, failed_requests=failed)
        fields = {name: getattr(meta, name) for name in NATIVE_FIELDS}
        return StepMetadata(**fields, epoch=self.manager.epoch, failed_requests=failed)

    def output(self, connector_output: Any, native: Callable[[Any], None]) -> None:
        """What the workers did. Our own reports come first: native takes every job for a success (I2)."""
        meta = connector_output.kv_connector_worker_meta
        try:
            if isinstance(meta, WorkerMetadata):
                self.manager.reported(meta.reports)
                if meta.workers:
                    self.workers_reported(meta.workers)
            if not self._broken:
                native(connector_output)
        except Exception:
            self._give_up()
        self.manager.flush()

    def has_work(self, native: Callable[[], bool]) -> bool:
        return not self._broken and native()

    def _offer_again(self, *, windowed: bool) -> None:
        """Chunks for which no grant was there: native would never offer them again (contract 14)."""
        for shortfall in self.manager.take_shortfalls(windowed=windowed):
            self._native.rewind_stored(shortfall.req_id, shortfall.position, shortfall.chunk)

    def _give_up(self) -> None:
        """Native raised half-way: what it keeps in its books may be wrong, so it is asked no more."""
        logger.exception("kvhost: vLLM's offloading half failed; this engine goes on without the cache")
        self._broken = True
        self._promised.extend(self._native.undelivered_loads())
        self._native.abandon()
        self.manager.drop_undelivered()

    # Weights.

    def bind_block_pool(self, block_pool: Any) -> None:
        self._block_pool = block_pool

    def reset(self, native: Callable[[], Any], weights_version: str) -> bool:
        """The weights changed: nothing of before is served to this engine or stored by it any more (I12)."""
        # A version that was used before does not name these weights.
        fresh = weights_version if weights_version not in self._used_versions else ""
        self._weights = fresh or f"unnamed {secrets.token_hex(16)}"
        self._used_versions.add(self._weights)
        self.manager.reset(self._weights)
        self._native.awaken_all()
        # What the device still caches now was computed before.
        self._old_blocks = compat.cached_block_hashes(self._block_pool)
        if self._broken:
            return True
        for req_id, status in self._native.statuses():
            if status.req.num_computed_tokens > 0 and not status.req.is_finished():
                # Native would store its old blocks again, under the new weights (contract 22).
                self._held_back.setdefault(req_id, status.max_offload_tokens)
                status.max_offload_tokens = 0
        # A second reset before the next step: native asserts, and has nothing left to forget.
        if not self._reset_since_step:
            try:
                native()
            except Exception:
                self._give_up()
        self._reset_since_step = True
        return True

    def _let_store(self, request: Any, computed: int) -> None:
        """The scheduler asks about a request that has no computed blocks of its own (any more): it may store
        again, unless it builds on blocks that the device kept from older weights."""
        req_id = request.request_id
        status = self._native.status(req_id)
        if status is None:
            return
        if req_id in self._held_back:
            status.max_offload_tokens = self._held_back.pop(req_id)
        if computed and self._old_blocks and self._builds_on_old_blocks(req_id, computed):
            self._held_back[req_id] = status.max_offload_tokens
            status.max_offload_tokens = 0

    def _builds_on_old_blocks(self, req_id: str, computed: int) -> bool:
        chains = zip(self._groups, self._native.key_chains(req_id), strict=True)
        # The cache of the device knows blocks by the same bytes as offload keys: hash and group.
        return any(
            key in self._old_blocks
            for group, keys in chains
            for key in keys[: -(-computed // group.tokens_per_chunk)]
        )
