"""Starts kvhostd, asks two engine processes the same long question, and prints what the second one saved.

Exit code 0 means: both answers have the same tokens, and at least 90 % of the prompt's full blocks
came from kvhost the second time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvhost_proto.v1 import admin_pb2, admin_pb2_grpc, common_pb2

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the warehouse called?"
BLOCK = 32
MAX_TOKENS = 64
# A token of this model has 23,040 bytes of keys and values; the prompt fills about 35 MiB.
POOL = "256MiB"
WANTED_SHARE = 0.9

console = Console(stderr=True, highlight=False)


class DemoError(Exception):
    """One sentence for the person who watches."""


@dataclass(frozen=True)
class Run:
    """What one engine process did with the question."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    tokens: tuple[int, ...]
    text: str
    stored_bytes: int
    loaded_bytes: int


def main() -> int:
    try:
        with step("Model: SmolLM2-135M-Instruct, dequantised once into the user's cache"):
            model = converted_model()
        with tempfile.TemporaryDirectory(prefix="kvhost-demo-") as name:
            folder = Path(name)
            with daemon(folder) as socket:
                cold = ask("First engine", model, socket, folder)
                warm = ask("Second engine", model, socket, folder)
    except DemoError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return 1
    return report(cold, warm)


def report(cold: Run, warm: Run) -> int:
    table = Table(title="The same question, asked of two engine processes", show_lines=True)
    for heading in ("", "first process", "second process"):
        table.add_column(heading, overflow="fold")
    table.add_row("prompt tokens", f"{cold.prompt_tokens:,}", f"{warm.prompt_tokens:,}")
    table.add_row("taken from the cache", f"{cold.cached_tokens:,}", f"{warm.cached_tokens:,}")
    table.add_row("time to first token", f"{cold.ttft_s:.2f} s", f"{warm.ttft_s:.2f} s")
    table.add_row("answer", cold.text, warm.text)
    Console(highlight=False, markup=False).print(table)

    identical = cold.tokens == warm.tokens
    figures = {
        "prompt_tokens": warm.prompt_tokens,
        "cold_ttft_s": round(cold.ttft_s, 3),
        "warm_ttft_s": round(warm.ttft_s, 3),
        "cached_tokens": warm.cached_tokens,
        "identical": identical,
        "store_bytes": cold.stored_bytes,
        "load_bytes": warm.loaded_bytes,
    }
    print(json.dumps(figures), flush=True)
    wanted = WANTED_SHARE * (warm.prompt_tokens // BLOCK) * BLOCK
    if not identical:
        console.print("demo: the two answers differ", style="red")
    if warm.cached_tokens < wanted:
        console.print(
            f"demo: {wanted:.0f} tokens should have come from the cache, {warm.cached_tokens} did",
            style="red",
        )
    return 0 if identical and warm.cached_tokens >= wanted else 1


# The programs.


def converted_model() -> Path:
    # In a process of its own: it holds the interpreter for seconds, and its libraries draw bars.
    command = [sys.executable, "-m", "demo.model"]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise DemoError(f"the model could not be converted:\n{result.stderr.strip()[-2000:]}")
    return Path(result.stdout.split()[-1])


@contextmanager
def daemon(folder: Path) -> Iterator[Path]:
    """kvhostd with a small pool on a socket in `folder`, for as long as the block runs."""
    socket = folder / "kvhostd.sock"
    log = folder / "kvhostd.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "kvhost_server", "--memory", POOL, "--socket", str(socket)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        with step(f"Daemon: kvhostd --memory {POOL}"):
            wait_until(lambda: serving(socket), 60, "kvhostd is not serving", process, log)
        yield socket
    finally:
        process.terminate()
        process.wait(timeout=30)


def ask(title: str, model: Path, socket: Path, folder: Path) -> Run:
    """One engine process from start to end."""
    log = folder / f"{title.lower().replace(' ', '-')}.log"
    order = {
        "arguments": {
            "model": str(model),
            "dtype": "bfloat16",
            "block_size": BLOCK,
            "max_model_len": 4096,
            "max_num_seqs": 4,
            "enforce_eager": True,
        },
        "kv_transfer": {
            "kv_connector": "KVHostConnector",
            "kv_connector_module_path": "kvhost_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            # More patient than a server would be: three processes start on few cores here.
            "kv_connector_extra_config": {
                "socket": str(socket),
                "deadline_ms": 2000,
                "attach_wait_ms": 10_000,
            },
        },
        "messages": [
            {"role": "user", "content": f"{(ROOT / 'demo' / 'document.md').read_text()}\n\n{QUESTION}"},
        ],
        "max_tokens": MAX_TOKENS,
    }
    readable, writable = os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "demo.engine", str(writable)],
            cwd=ROOT,
            env={**os.environ, **quiet_vllm()},
            pass_fds=(writable,),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    os.close(writable)
    if process.stdin is None:
        raise DemoError("the engine process has no standard input")
    with os.fdopen(readable) as events, process.stdin as orders:
        try:
            with step(f"{title}: start a process, load the model, warm up"):
                say(orders, json.dumps(order))
                expect(events, "ready", process, log)
            with step(f"{title}: a document of some 1,500 tokens and a question"):
                answer = expect(events, "answer", process, log)
            blocks = answer["prompt_tokens"] // BLOCK
            with step(f"{title}: end the process"):
                wait_until(
                    lambda: stored(socket) >= blocks, 30, "the prompt did not reach kvhost", process, log
                )
                say(orders, "end")
                moved = expect(events, "bytes", process, log)
                process.wait(timeout=60)
        finally:
            process.kill()
            process.wait(timeout=30)
    return Run(
        prompt_tokens=answer["prompt_tokens"],
        cached_tokens=answer["cached_tokens"],
        ttft_s=answer["ttft_s"],
        tokens=tuple(answer["tokens"]),
        text=answer["text"],
        stored_bytes=moved["stored"],
        loaded_bytes=moved["loaded"],
    )


def quiet_vllm() -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_COLOR": "0",
    }


# What they are asked and told.


def say(orders: IO[bytes], line: str) -> None:
    orders.write(line.encode() + b"\n")
    orders.flush()


def expect(events: IO[str], name: str, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """The next event of the engine, which must be `name`; an engine that ended gives none."""
    line = events.readline()
    if not line:
        process.wait(timeout=60)
        raise DemoError(f"the engine ended with code {process.returncode}; its log ends:\n{tail(log)}")
    event: dict[str, Any] = json.loads(line)
    if event.pop("event") != name:
        raise DemoError(f"the engine said {line!r} where {name!r} was expected")
    return event


def status(socket: Path) -> admin_pb2.StatusReply | None:
    """What kvhostd says about itself; None while it does not answer."""
    with grpc.insecure_channel(f"unix:{socket.with_name('kvhostd-admin.sock')}") as channel:
        try:
            reply: admin_pb2.StatusReply = admin_pb2_grpc.AdminStub(channel).Status(
                admin_pb2.StatusRequest(), timeout=2
            )
        except grpc.RpcError:
            return None
        return reply


def serving(socket: Path) -> bool:
    reply = status(socket)
    return reply is not None and reply.state == common_pb2.SERVICE_STATE_SERVING


def stored(socket: Path) -> int:
    reply = status(socket)
    return sum(namespace.chunks for namespace in reply.namespaces) if reply else 0


def wait_until(
    condition: Callable[[], bool],
    deadline_s: float,
    complaint: str,
    process: subprocess.Popen[bytes],
    log: Path,
) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        if process.poll() is not None:
            raise DemoError(
                f"{complaint}: it ended with code {process.returncode}; its log ends:\n{tail(log)}"
            )
        if time.monotonic() > until:
            raise DemoError(f"{complaint} after {deadline_s:.0f} s; the log ends:\n{tail(log)}")
        time.sleep(0.1)


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


@contextmanager
def step(title: str) -> Iterator[None]:
    """Shows what is going on and for how long, and leaves a line when it is done."""
    start = time.monotonic()
    if not console.is_terminal:
        console.print(f"{title} …", markup=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(title, total=None)
        yield
    console.print(f"[green]✓[/green] {title} ({time.monotonic() - start:.1f} s)")


if __name__ == "__main__":
    sys.exit(main())
