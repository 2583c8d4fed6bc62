"""What a user sees: the first token after a restart, and the throughput of traffic that never hits.

The first token is timed with the demo's model, in engines as `vllm serve` runs them. Throughput is that of
a tiny model, whose steps take some milliseconds: what a connector costs shows there more than anywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engines import drive, forget, kv_transfer, start, wait_usable
from benchmarks.report import Plot, Report, Table
from benchmarks.scale import Scale
from tests.e2e.engine import ROOT, Answer, Engine
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

BLOCK = 32
MEMORY = "768MiB"
# Like the demo's question: about 1,500 tokens. Three short of a block, so that every block can hit.
QUESTION_TOKENS = 1504 - 3

TINY: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 2048,
}
AT_A_TIME = 64
# Tokens of a short prompt and of its answer.
SHORT, ANSWER = 100, 16


def measure(scale: Scale, report: Report) -> None:
    lengths = (
        [512 - 3, 1024 - 3, QUESTION_TOKENS, 3008 - 3] * 3
        if scale.full
        else [512 - 3, *[QUESTION_TOKENS] * 3]
    )
    questions = [prompt(length, seed=500 + n) for n, length in enumerate(lengths)]
    with ExitStack() as stack, Daemon(MEMORY) as daemon:
        tiny = checkpoint(Recipe(dtype="bfloat16"))
        pair = {
            "plain": Engine(tiny, **TINY),
            "kvhost": Engine(tiny, kv_transfer=kv_transfer(daemon.socket), **TINY),
        }
        times: dict[str, list[float]] = {}
        with ExitStack() as first_life:
            first = demo_engine(daemon)
            start(first_life, {"first": first})
            start(stack, pair)
            warm_up(first)
            times["cold"] = ask(first, questions, cached=False)
            times["again"] = ask(first, questions, cached=True)
            expected = sum(length // BLOCK for length in lengths)
            # The answers' tokens are not stored, the warm-up's are.
            wait_for(
                lambda: daemon.status().counters["committed_chunks"] >= expected,
                30,
                "the prompts to be stored",
            )
        with ExitStack() as second_life:
            later = {"restart": demo_engine(daemon), "second": demo_engine(daemon)}
            start(second_life, later)
            for engine in later.values():
                warm_up(engine)
            for name, engine in later.items():
                times[name] = ask(engine, questions, cached=True)
        first_tokens(report, lengths, times)
        throughput(report, pair, scale)


def demo_engine(daemon: Daemon) -> Engine:
    """An engine as `make demo` runs it: with all cores, and as patient, since every wait is in the figure."""
    return Engine(
        demo_model(),
        kind="served",
        kv_transfer=kv_transfer(daemon.socket, deadline_ms=2000, attach_wait_ms=10_000),
        environment={"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
        start_deadline_s=600,
        max_model_len=4096,
        max_num_seqs=4,
        num_gpu_blocks_override=1024,
    )


def demo_model() -> Path:
    command = [sys.executable, "-m", "demo.model"]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the demo's model could not be made: {result.stderr.strip()[-500:]}")
    return Path(result.stdout.split()[-1])


def warm_up(engine: Engine) -> None:
    """The first requests of a process are slower than any later one, with and without a cache."""
    for seed in (1, 2):
        engine.generate([prompt(200, seed=seed)], max_tokens=4)


def ask(engine: Engine, questions: Sequence[Sequence[int]], *, cached: bool) -> list[float]:
    """Seconds to the first token of each question, asked one after another."""
    times = []
    for question in questions:
        [answer] = engine.generate([question], max_tokens=4)
        check(answer, question, cached=cached)
        times.append(answer.ttft_s or 0.0)
    return times


def check(answer: Answer, question: Sequence[int], *, cached: bool) -> None:
    wanted = len(question) // BLOCK * BLOCK if cached else 0
    if answer.cached_tokens != wanted:
        raise RuntimeError(
            f"{answer.cached_tokens} of {len(question)} prompt tokens came from a cache, {wanted} should have"
        )


def first_tokens(report: Report, lengths: list[int], times: dict[str, list[float]]) -> None:
    chosen = [n for n, length in enumerate(lengths) if length == QUESTION_TOKENS]
    names = {
        "again": ("ttft_local_vs_cold", "the device's own prefix cache / cold"),
        "restart": ("ttft_restart_vs_cold", "after the engine's restart, from kvhost / cold"),
        "second": ("ttft_second_engine_vs_cold", "another engine, from kvhost / cold"),
    }
    for name, (key, note) in names.items():
        report.figure(key, [times[name][n] / times["cold"][n] for n in chosen], note=note)
    labels = {
        "cold": "without a cache",
        "again": "from the device's own cache",
        "restart": "after a restart, from kvhost",
        "second": "in a second engine, from kvhost",
    }
    sizes = sorted(set(lengths))

    def of_size(name: str, size: int) -> float:
        values = sorted(t for t, length in zip(times[name], lengths, strict=True) if length == size)
        return values[len(values) // 2]

    rows = [
        (label, *(f"{1000 * of_size(name, size):.0f} ms" for size in sizes)) for name, label in labels.items()
    ]
    columns = ("first token", *(f"{size} tokens" for size in sizes))
    report.table("first_token", Table("Time to the first token, the demo's model", columns, rows))
    lines = {label: [(size, of_size(name, size)) for size in sizes] for name, label in labels.items()}
    report.plot(
        "first_token", Plot("Time to the first token, SmolLM2-135M", "prompt tokens", "seconds", lines)
    )


def throughput(report: Report, engines: dict[str, Engine], scale: Scale) -> None:
    """Alternating rounds of prompts that nobody asked before; 500 of them on each side."""
    rounds = 10 if scale.full else 5
    each = 100
    answers = [ANSWER + n % 5 for n in range(each)]
    for number, engine in enumerate(engines.values()):
        drive(engine, [prompt(SHORT, seed=90_000 + number * 100 + n) for n in range(64)], [4] * 64, AT_A_TIME)
    wait_usable(engines["kvhost"])
    rates: dict[str, list[float]] = {side: [] for side in engines}
    for number in range(rounds):
        prompts = [prompt(SHORT, seed=100_000 + number * each + n) for n in range(each)]
        order = list(engines) if number % 2 == 0 else list(engines)[::-1]
        for side in order:
            result = drive(engines[side], prompts, answers, AT_A_TIME)
            if result["cached"]:
                raise RuntimeError(f"{result['cached']} tokens of unique prompts came from a cache")
            rates[side].append(result["tokens"] / result["seconds"])
            forget(engines[side])
    pairs = zip(rates["kvhost"], rates["plain"], strict=True)
    report.figure(
        "unique_throughput_vs_plain",
        [ours / plain for ours, plain in pairs],
        note=f"{rounds * each} prompts of {SHORT} tokens on each side",
    )
    report.figure("unique_throughput_tokens_per_s", rates["kvhost"], "tokens/s", "with kvhost")
