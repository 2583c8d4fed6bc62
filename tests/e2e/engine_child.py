"""The child half of `engine.py`: one vLLM engine, commands in and events out as JSON lines.

Two ways to run the engine:

- `stepped`: scheduler and worker in this process, stepped by this file as vLLM's own core loop
  does. Its inside can be looked at (`state`), and one SIGKILL ends all of it.
- `served`: `AsyncLLM`, what `vllm serve` runs: the scheduler is a process of its own.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO


@dataclass
class Channel:
    """JSON lines over two pipes; standard output belongs to vLLM's log."""

    commands: int
    events: TextIO
    _rest: bytes = b""

    def say(self, **event: Any) -> None:
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()

    def arrived(self, wait_s: float | None) -> Iterator[dict[str, Any]]:
        """Commands that are there; waits for one when `wait_s` is None.

        Ends the process when the parent is gone.
        """
        while select.select([self.commands], [], [], wait_s)[0]:
            data = os.read(self.commands, 1 << 20)
            if not data:
                sys.exit(0)
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (json.loads(line) for line in lines)
            if lines:
                wait_s = 0.0


@dataclass
class Running:
    """One request as a client sees it."""

    started: float
    tokens: list[int] = field(default_factory=list)
    ttft_s: float | None = None

    def take(self, output: Any) -> dict[str, Any]:
        """Keeps new tokens, notes when the first one came, and gives what to report."""
        completion = output.outputs[0]
        now = time.monotonic()
        if self.ttft_s is None and completion.token_ids:
            self.ttft_s = now - self.started
        self.tokens = list(completion.token_ids)
        return {
            "tokens": self.tokens,
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens or 0,
            "ttft_s": self.ttft_s,
            "total_s": now - self.started,
            "finish_reason": completion.finish_reason,
        }


def sampling(command: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    chosen = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **command.get("sampling", {})}
    return SamplingParams(max_tokens=command["max_tokens"], **chosen)


def prompt_of(command: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_token_ids": command["prompt"]}


def metrics() -> dict[str, float]:
    """vLLM's counters and gauges of this process: `name{label=value,…}` to value."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        value = getattr(metric, "value", None)
        if value is not None:
            labels = ",".join(f"{k}={v}" for k, v in sorted(metric.labels.items()) if k != "model_name")
            found[f"{metric.name}{{{labels}}}"] = float(value)
    return found


class Stepped:
    """The engine in this process, one step at a time."""

    def __init__(self, arguments: Any, channel: Channel) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(arguments)
        self._core = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._channel = channel
        self._running: dict[str, Running] = {}
        # vLLM gives requests names of its own.
        self._ours: dict[str, str] = {}
        self._steps: list[float] = []

    def run(self) -> None:
        stop = False
        while not stop:
            for command in self._channel.arrived(None if not self._has_work() else 0.0):
                stop = self._obey(command) or stop
            if self._has_work() and not stop:
                self._step()
        self._engine.engine_core.shutdown()

    def _has_work(self) -> bool:
        # Requests that are finished but not yet told to the workers count, as in vLLM's own loop.
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)

    def _step(self) -> None:
        start = time.monotonic()
        outputs = self._engine.step()
        self._steps.append(time.monotonic() - start)
        for output in outputs:
            running = self._running[output.request_id]
            report = running.take(output)
            if output.finished:
                del self._running[output.request_id]
                self._channel.say(event="done", id=output.request_id, **report)
        if not outputs:
            time.sleep(0.001)  # As vLLM's loop: lets the threads of a transfer go on.

    def _obey(self, command: dict[str, Any]) -> bool:
        op = command["op"]
        if op == "submit":
            name = command["id"]
            self._running[name] = Running(time.monotonic())
            self._ours[name] = self._engine.add_request(name, prompt_of(command), sampling(command))
        elif op == "abort":
            for name in command["ids"]:
                running = self._running.pop(name, None)
                if running is not None:
                    self._engine.abort_request([self._ours[name]], internal=True)
                    self._channel.say(event="done", id=name, tokens=running.tokens, finish_reason="abort")
        elif op == "stop":
            return True
        else:
            self._channel.say(event="result", call=command["call"], value=self._answer(command))
        return False

    def _answer(self, command: dict[str, Any]) -> Any:
        op = command["op"]
        if op == "reset_prefix_cache":
            return self._engine.reset_prefix_cache(command["running"], command["connector"])
        if op == "metrics":
            return metrics()
        if op == "state":
            scheduler = self._core.scheduler
            pool = scheduler.kv_cache_manager.block_pool
            running, waiting = scheduler.get_request_counts()
            steps, self._steps = self._steps, []
            return {
                "requests": len(scheduler.requests),
                "running": running,
                "waiting": waiting,
                "blocks": pool.num_gpu_blocks,
                "free_blocks": pool.get_num_free_blocks(),
                "steps_s": steps,
            }
        if op == "call":
            return called(command["function"], self._engine, command["arguments"])
        raise ValueError(f"no such command: {op}")


class Served:
    """The engine as `vllm serve` runs it: the front end here, the scheduler in a child."""

    def __init__(self, arguments: Any, channel: Channel) -> None:
        self._arguments = arguments
        self._channel = channel
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(self._arguments)
        self._channel.say(event="ready")
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        def readable() -> None:
            for command in self._channel.arrived(0.0):
                inbox.put_nowait(command)

        loop.add_reader(self._channel.commands, readable)
        while (command := await inbox.get())["op"] != "stop":
            await self._obey(command)
        loop.remove_reader(self._channel.commands)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._engine.shutdown()

    async def _obey(self, command: dict[str, Any]) -> None:
        op = command["op"]
        if op == "submit":
            self._tasks[command["id"]] = asyncio.create_task(self._request(command))
            # A task that is cancelled before its first step would say nothing.
            await asyncio.sleep(0)
        elif op == "abort":
            for name in command["ids"]:
                if name in self._tasks:
                    self._tasks[name].cancel()
        else:
            self._channel.say(event="result", call=command["call"], value=await self._answer(command))

    async def _request(self, command: dict[str, Any]) -> None:
        name = command["id"]
        running = Running(time.monotonic())
        try:
            report: dict[str, Any] = {}
            async for output in self._engine.generate(prompt_of(command), sampling(command), name):
                report = running.take(output)
            self._channel.say(event="done", id=name, **report)
        except asyncio.CancelledError:
            # Leaving the generator has aborted the request in the engine.
            self._channel.say(event="done", id=name, tokens=running.tokens, finish_reason="abort")
        except Exception as error:  # The engine's own errors reach the test as the request's outcome.
            reason = f"error: {type(error).__name__}: {error}"
            self._channel.say(event="done", id=name, tokens=running.tokens, finish_reason=reason)
        finally:
            del self._tasks[name]

    async def _answer(self, command: dict[str, Any]) -> Any:
        op = command["op"]
        if op == "reset_prefix_cache":
            return await self._engine.reset_prefix_cache(command["running"], command["connector"])
        if op == "metrics":
            return metrics()
        raise ValueError(f"a served engine cannot be asked: {op}")


def called(function: str, *arguments: Any) -> Any:
    """Runs `module:name` of the tests in this process, to look inside or to break something."""
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def main() -> None:
    # A test that waited too long asks where every thread is.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    channel = Channel(int(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w"))
    order = next(channel.arrived(None))
    if order["prepare"]:
        called(order["prepare"], order["prepare_argument"])

    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    arguments = dict(order["arguments"])
    if order["kv_transfer"]:
        arguments["kv_transfer_config"] = KVTransferConfig(**order["kv_transfer"])
    if order["kind"] == "served":
        Served(AsyncEngineArgs(**arguments), channel).run()
    else:
        engine = Stepped(EngineArgs(**arguments), channel)
        channel.say(event="ready")
        engine.run()


if __name__ == "__main__":
    main()
