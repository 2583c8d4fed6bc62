"""What a user sees: the first token after a restart, and the throughput of traffic that never hits.

Both with the demo's model, in engines of one process: those of several spin on a core for each, and on few
cores that is what would be measured. The full form adds a second engine beside the first, and throughput with
a tiny model, whose steps take some milliseconds: what a connector costs shows there more than anywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engines import drive, forget, kv_transfer, start, wait_usable
from benchmarks.report import Plot, Report, Table
from benchmarks.scale import Scale, in_turns
from tests.e2e.engine import ROOT, Answer, Engine
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

BLOCK = 32
# All that is asked in the full form: 2,500 chunks of 720 KiB. What was evicted could not be compared.
MEMORY = "2GiB"
# Like the demo's question: about 1,500 tokens. Three short of a block, so that every block can hit.
QUESTION_TOKENS = 1504 - 3
QUESTIONS = 5

AT_A_TIME = 64
# Tokens of a short prompt and of its answer.
SHORT, ANSWER = 100, 16

TINY: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": AT_A_TIME,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 2048,
}


def measure(scale: Scale, report: Report) -> None:
    lengths = [QUESTION_TOKENS] * QUESTIONS
    if scale.full:
        lengths = [512 - 3, 1024 - 3, QUESTION_TOKENS, 3008 - 3] * QUESTIONS
    questions = [prompt(length, seed=500 + n) for n, length in enumerate(lengths)]
    with ExitStack() as stack, Daemon(MEMORY) as daemon:
        times: dict[str, list[float]] = {}
        with ExitStack() as first_life:
            first, plain = demo_engine(daemon), demo_engine(None)
            start(first_life, {"first": first, "plain": plain})
            warm_up(plain)
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
            throughput(report, first, plain, scale)
        for name in ("restart", "second") if scale.full else ("restart",):
            later = demo_engine(daemon)
            start(stack, {name: later})
            warm_up(later)
            times[name] = ask(later, questions, cached=True)
        first_tokens(report, lengths, times)
    if scale.full:
        with Daemon(MEMORY) as daemon:
            tiny_throughput(report, daemon)


def demo_engine(daemon: Daemon | None) -> Engine:
    """With all cores, and patient: every wait is in the figure. Without a daemon, without kvhost."""
    return Engine(
        demo_model(),
        kv_transfer=kv_transfer(daemon.socket, deadline_ms=2000, attach_wait_ms=10_000) if daemon else None,
        environment={"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
        start_deadline_s=600,
        max_model_len=4096,
        max_num_seqs=AT_A_TIME,
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
    for name in [name for name in names if name in times]:
        key, note = names[name]
        report.figure(key, [times[name][n] / times["cold"][n] for n in chosen], note=note)
    labels = {
        "cold": "without a cache",
        "again": "from the device's own cache",
        "restart": "after a restart, from kvhost",
        "second": "in a second engine, from kvhost",
    }
    measured = {name: label for name, label in labels.items() if name in times}
    sizes = sorted(set(lengths))

    def of_size(name: str, size: int) -> float:
        values = sorted(t for t, length in zip(times[name], lengths, strict=True) if length == size)
        return values[len(values) // 2]

    rows = [
        (label, *(f"{1000 * of_size(name, size):.0f} ms" for size in sizes))
        for name, label in measured.items()
    ]
    columns = ("first token", *(f"{size} tokens" for size in sizes))
    report.table("first_token", Table("Time to the first token, the demo's model", columns, rows))
    lines = {label: [(size, of_size(name, size)) for size in sizes] for name, label in measured.items()}
    report.plot(
        "first_token", Plot("Time to the first token, SmolLM2-135M", "prompt tokens", "seconds", lines)
    )


def throughput(report: Report, kvhost: Engine, plain: Engine, scale: Scale) -> None:
    """Prompts that nobody asked before, all waiting from the start; 500 on each side in the full form."""
    rounds, each = (10, 50) if scale.full else (7, 16)

    def run(engine: Engine, prompts: list[list[int]], answers: list[int]) -> float:
        began = time.monotonic()
        names = [engine.submit(one, count) for one, count in zip(prompts, answers, strict=True)]
        done = engine.wait(names, deadline_s=300)
        seconds = time.monotonic() - began
        check_unique(sum(answer.cached_tokens for answer in done))
        return sum(answer.prompt_tokens + len(answer.tokens) for answer in done) / seconds

    rates = alternate({"plain": plain, "kvhost": kvhost}, run, rounds, each)
    report.figure(
        "unique_throughput_vs_plain",
        ratios(rates),
        note=f"{rounds * each} prompts of {SHORT} tokens on each side, the demo's model",
    )
    report.figure("unique_throughput_tokens_per_s", rates["kvhost"], "tokens/s", "with kvhost")


def tiny_throughput(report: Report, daemon: Daemon) -> None:
    """The same with a tiny model, and each request coming when another one ends: it waits for its lookup."""
    model = checkpoint(Recipe(dtype="bfloat16"))
    with ExitStack() as stack:
        pair = {"plain": Engine(model, **TINY)}
        pair["kvhost"] = Engine(model, kv_transfer=kv_transfer(daemon.socket), **TINY)
        start(stack, pair)
        for number, engine in enumerate(pair.values()):
            first = [prompt(SHORT, seed=90_000 + number * 100 + n) for n in range(64)]
            drive(engine, first, [4] * 64, AT_A_TIME)
        wait_usable(pair["kvhost"])

        def run(engine: Engine, prompts: list[list[int]], answers: list[int]) -> float:
            result = drive(engine, prompts, answers, AT_A_TIME)
            check_unique(result["cached"])
            forget(engine)
            return float(result["tokens"] / result["seconds"])

        rates = alternate(pair, run, 10, 250)
    report.figure(
        "unique_throughput_tiny_vs_plain",
        ratios(rates),
        note="a model whose steps take 15 ms, each request coming when another one ends",
    )


def check_unique(cached: int) -> None:
    if cached:
        raise RuntimeError(f"{cached} tokens of unique prompts came from a cache")


def alternate(
    engines: Mapping[str, Engine],
    run: Callable[[Engine, list[list[int]], list[int]], float],
    rounds: int,
    each: int,
) -> dict[str, list[float]]:
    """Rates of both sides in turns, with the same prompts in a round, new ones in the next."""
    answers = [ANSWER + n % 5 for n in range(each)]
    rates: dict[str, list[float]] = {side: [] for side in engines}
    for number in range(rounds):
        prompts = [prompt(SHORT, seed=100_000 + number * each + n) for n in range(each)]
        for side in in_turns(engines, number):
            rates[side].append(run(engines[side], prompts, answers))
    return rates


def ratios(rates: Mapping[str, list[float]]) -> list[float]:
    return [ours / plain for ours, plain in zip(rates["kvhost"], rates["plain"], strict=True)]
