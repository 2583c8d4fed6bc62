"""A real vLLM engine in a process of its own, driven from a test.

    with Engine(checkpoint(Recipe()), kv_transfer=KVHOST) as engine:
        answer, = engine.generate([prompt(100)], max_tokens=20)

The engine may be killed, stopped, and run beside another one. Every wait has a deadline, and the
death of the process ends every wait with the last lines of its log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]

# Small, without compilation, in the smallest block size the CPU backend takes.
DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "seed": 0,
}

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    # The pool of device blocks comes from num_gpu_blocks_override; without this
    # vLLM first measures, and may refuse, a share of the whole machine.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Two engines on few cores: let the kernel place the threads.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class EngineDied(Exception):
    """The engine process ended while a test waited for it; carries the end of its log."""


@dataclass(frozen=True)
class Answer:
    """What one request got.

    `cached_tokens` counts prompt tokens that were not computed, whether they came from the device
    cache or from a connector; in a fresh process that is the connector alone. `ttft_s` is the time
    from handing the request over to the first token. `finish_reason` is vLLM's ("length", "stop",
    "error"), "abort", or "error: …" with what the front end raised.
    """

    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0


@dataclass(frozen=True)
class State:
    """Inside of a stepped engine.

    One of the `blocks` is vLLM's null block: an idle engine has `blocks - 1` free. `steps_s` are the
    seconds of every step since it was last asked.
    """

    requests: int
    running: int
    waiting: int
    blocks: int
    free_blocks: int
    steps_s: tuple[float, ...]


class Engine:
    """One engine process. Use it as a context manager, or `start` and `close` it.

    `arguments` are vLLM's EngineArgs and go over `DEFAULTS`; None removes one (`block_size=None`
    is vLLM's own choice). `kv_transfer` holds the fields of KVTransferConfig. `prepare` names a
    `module:function` that the engine process calls with `prepare_argument` before it imports
    vLLM's engine: the place for faults.
    """

    def __init__(
        self,
        model: Path,
        *,
        kind: Literal["stepped", "served"] = "stepped",
        kv_transfer: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        prepare: str = "",
        prepare_argument: Any = None,
        start_deadline_s: float = 240.0,
        **arguments: Any,
    ) -> None:
        # vLLM would turn float32 weights into bfloat16.
        dtype = json.loads((model / "config.json").read_text())["dtype"]
        merged = {"model": str(model), "dtype": dtype, **DEFAULTS, **arguments}
        self._order = {
            "kind": kind,
            "arguments": {name: value for name, value in merged.items() if value is not None},
            "kv_transfer": dict(kv_transfer) if kv_transfer else None,
            "prepare": prepare,
            "prepare_argument": prepare_argument,
        }
        processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if kind == "served" else "0"}
        self._environment = {**os.environ, **ENVIRONMENT, **processes, **(environment or {})}
        self._start_deadline_s = start_deadline_s
        self._news = threading.Condition()
        self._answers: dict[str, Answer] = {}
        self._results: dict[int, Any] = {}
        self._ready = False
        self._ended = False
        self._numbers = 0

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Life and death.

    def launch(self) -> Self:
        """Starts the process and returns at once; `wait_ready` waits. For two engines at a time."""
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.engine_child", str(commands), str(events)],
            cwd=ROOT,
            env=self._environment,
            pass_fds=(commands, events),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(commands)
        os.close(events)
        self._reader = threading.Thread(target=self._read, name="engine events", daemon=True)
        self._reader.start()
        self._send(self._order)
        return self

    def wait_ready(self) -> Self:
        self._wait(lambda: self._ready, self._start_deadline_s, "start")
        return self

    def start(self) -> Self:
        self.launch()
        try:
            return self.wait_ready()
        except BaseException:
            self.kill()
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def processes(self) -> dict[int, str]:
        """Every process of the engine: pid to its command line (vLLM names its own "VLLM::…")."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                    if int(group) == self.pid and state != "Z":
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                        found[int(entry.name)] = command
                except (ProcessLookupError, FileNotFoundError):
                    continue  # Ended between the two looks.
        return found

    def kill(self, number: int = signal.SIGKILL, *, pid: int | None = None) -> None:
        """Sends a signal to one process of the engine, or to all of them."""
        try:
            if pid is None:
                os.killpg(self.pid, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            return
        if number == signal.SIGKILL and pid in (None, self.pid):
            self.process.wait(timeout=30)
        if number == signal.SIGKILL and pid is None:
            wait_for(lambda: not self.processes(), 30, "the end of every process of the engine")

    def close(self) -> None:
        """Ends the engine: politely, and by force when it does not go."""
        if self._commands >= 0:
            if self.process.poll() is None:
                self._send({"op": "stop"})
            os.close(self._commands)
            self._commands = -1
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGCONT)
            self.kill()
            self.process.wait(timeout=30)
            self._reader.join(timeout=30)
            self._log.close()

    def log(self) -> str:
        """All that vLLM and the connector logged so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    # Requests.

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        deadline_s: float = 120.0,
        **sampling: Any,
    ) -> list[Answer]:
        """Submits all prompts at once and waits for every answer."""
        return self.wait([self.submit(prompt, max_tokens, **sampling) for prompt in prompts], deadline_s)

    def submit(self, prompt: Sequence[int], max_tokens: int = 16, **sampling: Any) -> str:
        """Hands a request over and returns its name. Greedy, and past the end token, unless told."""
        name = f"request-{self._number()}"
        order = {"op": "submit", "id": name, "prompt": list(prompt), "max_tokens": max_tokens}
        self._send({**order, "sampling": sampling})
        return name

    def wait(self, names: Sequence[str], deadline_s: float = 120.0) -> list[Answer]:
        self._wait(lambda: all(name in self._answers for name in names), deadline_s, f"answer {list(names)}")
        with self._news:
            return [self._answers.pop(name) for name in names]

    def abort(self, names: Sequence[str]) -> None:
        """Aborts requests; each is then answered with reason "abort"."""
        self._send({"op": "abort", "ids": list(names)})

    # Questions.

    def reset_prefix_cache(
        self, *, connector: bool = False, running: bool = False, deadline_s: float = 60.0
    ) -> bool:
        """Empties the device cache; with `connector`, also tells the connector that the weights changed."""
        return bool(self._ask(deadline_s, op="reset_prefix_cache", connector=connector, running=running))

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges, `name{label=value,…}` to value, the model's name left out."""
        found: dict[str, float] = self._ask(30.0, op="metrics")
        return found

    def metric(self, name: str) -> float:
        """The sum over all labels of one metric; 0 when it is not there."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)

    def state(self) -> State:
        answer = self._ask(30.0, op="state")
        return State(**{**answer, "steps_s": tuple(answer["steps_s"])})

    def call(self, function: str, *arguments: Any, deadline_s: float = 30.0) -> Any:
        """Runs `module:function(engine, arguments)` in a stepped engine; its result must be JSON."""
        return self._ask(deadline_s, op="call", function=function, arguments=list(arguments))

    # The channel.

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _ask(self, deadline_s: float, **order: Any) -> Any:
        call = self._number()
        self._send({**order, "call": call})
        self._wait(lambda: call in self._results, deadline_s, order["op"])
        with self._news:
            return self._results.pop(call)

    def _send(self, order: Mapping[str, Any]) -> None:
        data = (json.dumps(order) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._commands, data) :]
        except BrokenPipeError:
            return  # The wait that follows says that the engine died, and why.

    def _read(self) -> None:
        try:
            with os.fdopen(self._events) as lines:
                for line in lines:
                    event = json.loads(line)
                    with self._news:
                        self._note(event)
                        self._news.notify_all()
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()

    def _note(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "ready":
            self._ready = True
        elif kind == "done":
            name = event.pop("id")
            self._answers[name] = Answer(**{**event, "tokens": tuple(event["tokens"])})
        else:
            self._results[event["call"]] = event["value"]

    def _wait(self, condition: Any, deadline_s: float, what: str) -> None:
        until = time.monotonic() + deadline_s
        with self._news:
            while not condition():
                if self._ended:
                    raise EngineDied(
                        f"the engine ended while it should {what}; its log ends:\n{self._tail()}"
                    )
                left = until - time.monotonic()
                if left <= 0:
                    self._ask_for_stacks()
                    raise TimeoutError(f"no {what} within {deadline_s:.0f} s; the log ends:\n{self._tail()}")
                self._news.wait(left)

    def _ask_for_stacks(self) -> None:
        """Has the process write the stack of every thread to its log, and waits until it did."""
        before = len(self.log())
        self.kill(signal.SIGUSR1, pid=self.pid)
        until = time.monotonic() + 2
        while len(self.log()) == before and time.monotonic() < until and self.process.poll() is None:
            self._news.wait(0.05)

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-40:])
