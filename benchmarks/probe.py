"""Runs inside an engine's process: drives it, and measures what its scheduler's hooks cost.

The engine is real: vLLM's scheduler, its worker and the connector, all of whose scheduler-side hooks are
wrapped from outside. The product knows nothing of this.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

# Every hook that vLLM's scheduler calls on its own half of a connector.
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "get_loaded_kv_cache_group_ids",
    "has_pending_block_frees",
    "build_connector_meta",
    "update_connector_output",
    "register_finished_partial_tail",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "get_kv_connector_stats",
    "take_events",
)
# Ways to wait for an answer: of gRPC itself, and of the client above it.
GRPC_WAITS = {
    "_UnaryUnaryMultiCallable": ("__call__", "with_call"),
    "_UnaryStreamMultiCallable": (),
    "_MultiThreadedRendezvous": ("result", "exception", "_next", "initial_metadata", "code"),
    "_SingleThreadedRendezvous": ("_next", "initial_metadata", "code"),
}
CLIENT_CALLS = ("open", "declare", "lookup", "reserve", "update", "reset", "ping", "pin", "release")


class Probe:
    """The wrapped hooks of one engine."""

    def __init__(self, connector: Any) -> None:
        self._thread = threading.get_ident()
        self._depth = 0
        self._spent = 0
        self._processor = 0
        self.by_hook: dict[str, list[int]] = {}
        self.waits: dict[str, int] = {}
        for name in HOOKS:
            hook = getattr(connector, name, None)
            if hook is not None:
                setattr(connector, name, self._timed(name, hook))
        self._watch_waits()

    def take(self) -> tuple[int, int]:
        """Nanoseconds spent in hooks since the last call: on the clock, and by this thread on a processor."""
        taken = self._spent, self._processor
        self._spent = self._processor = 0
        return taken

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        calls = self.by_hook.setdefault(name, [])

        def timed(*arguments: Any, **named: Any) -> Any:
            if self._depth:
                return hook(*arguments, **named)
            self._depth = 1
            processor = time.thread_time_ns()
            started = time.perf_counter_ns()
            try:
                return hook(*arguments, **named)
            finally:
                spent = time.perf_counter_ns() - started
                self._processor += time.thread_time_ns() - processor
                self._depth = 0
                self._spent += spent
                calls.append(spent)

        return timed

    def _watch_waits(self) -> None:
        from grpc import _channel

        from kvhost_client.session import Session

        for kind, methods in GRPC_WAITS.items():
            holder = getattr(_channel, kind)
            for name in methods:
                self._count(holder, name, f"grpc {kind}.{name}")
        self._count(grpc, "channel_ready_future", "grpc channel_ready_future")
        for name in CLIENT_CALLS:
            self._count(Session, name, f"Session.{name}")
        # Whatever else an answer might be awaited by, as long as it is awaited inside a hook.
        self._count(threading.Condition, "wait", "Condition.wait in a hook", only_in_hooks=True)

    def _count(self, holder: Any, name: str, label: str, *, only_in_hooks: bool = False) -> None:
        wrapped = vars(holder)[name]
        inner = wrapped.__func__ if isinstance(wrapped, classmethod) else wrapped

        def counting(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == self._thread and (self._depth or not only_in_hooks):
                self.waits[label] = self.waits.get(label, 0) + 1
            return inner(*arguments, **named)

        setattr(holder, name, classmethod(counting) if isinstance(wrapped, classmethod) else counting)


def install(engine: Any, _: list[Any]) -> None:
    """Wraps the hooks of this engine's scheduler."""
    connector = engine.engine_core.engine_core.scheduler.connector
    engine.kvhost_probe = Probe(connector)


def usable(engine: Any, _: list[Any]) -> bool:
    """Whether the cache of this engine can be used now; always, where it needs no connection."""
    side = getattr(engine.engine_core.engine_core.scheduler.connector, "_scheduler_side", None)
    return side is None or bool(side.board.usable and len(side.board.stock))


def drive(engine: Any, arguments: list[Any]) -> dict[str, Any]:
    """[prompts, output lengths, how many at a time, arrivals a step]: runs all of them, so many in flight.

    Returns, of every step with so many in flight, the time in hooks in nanoseconds (hooks of arrivals count
    for the step that follows) and the time of the step; also calls that the engine's thread waited for,
    tokens and seconds.
    """
    prompts, lengths, at_a_time, arrivals = arguments
    from vllm import SamplingParams

    core = engine.engine_core.engine_core
    probe: Probe | None = getattr(engine, "kvhost_probe", None)
    waiting = deque(zip(prompts, lengths, strict=True))
    flying = cached = tokens = 0
    hooks: list[int] = []
    processor: list[int] = []
    steps: list[int] = []
    gc.collect()
    # As vLLM does after its own start: what was there before is not looked at again.
    gc.freeze()
    if probe is not None:
        probe.take()
        probe.waits.clear()
        for calls in probe.by_hook.values():
            calls.clear()
    started = time.perf_counter()
    while waiting or flying:
        for _ in range(arrivals):
            if not waiting or flying >= at_a_time:
                break
            prompt, length = waiting.popleft()
            sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            drive.number = getattr(drive, "number", 0) + 1  # type: ignore[attr-defined]
            name = f"driven-{drive.number}"  # type: ignore[attr-defined]
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            flying += 1
        full = flying >= at_a_time
        began = time.perf_counter_ns()
        outputs = engine.step()
        if full:
            steps.append(time.perf_counter_ns() - began)
        if probe is not None:
            spent, used = probe.take()
            # The steady state: not while the first requests come in, nor while the last ones end.
            if full:
                hooks.append(spent)
                processor.append(used)
        for output in outputs:
            if output.finished:
                flying -= 1
                cached += output.num_cached_tokens or 0
                tokens += len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    seconds = time.perf_counter() - started
    settle(engine, core)
    return {
        "hooks_ns": hooks,
        "processor_ns": processor,
        "steps_ns": steps,
        "by_hook": {name: [len(calls), sum(calls)] for name, calls in probe.by_hook.items()} if probe else {},
        "waits": dict(probe.waits) if probe is not None else {},
        "cached": cached,
        "tokens": tokens,
        "seconds": seconds,
    }


def settle(engine: Any, core: Any) -> None:
    """Steps until what was computed is stored and known to be."""
    until = time.monotonic() + 30
    side = getattr(core.scheduler.connector, "_scheduler_side", None)
    while time.monotonic() < until:
        if core.scheduler.has_requests() or core.batch_queue:
            engine.step()
        elif side is not None and (side.manager.open_transfers() or not side.board.idle):
            time.sleep(0.002)
        else:
            return
    raise TimeoutError("stores were not finished within 30 s")
