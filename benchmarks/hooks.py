"""Time inside the scheduler's hooks, per engine step, beside vLLM's own in-process LRU manager.

Two engines with the same tiny model get the same traffic in turns: prompts that nobody asked before, the
same ones again after the device forgot them, and a mixture. Both caches are large enough for everything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks import baseline
from benchmarks.engines import drive, forget, kv_transfer, start, wait_usable
from benchmarks.report import Plot, Report, Table
from benchmarks.scale import Scale, in_turns
from tests.e2e.engine import Engine
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support.daemon import Daemon

AT_A_TIME = 64
# At most: requests arrive one by one, not as a crowd that would be the one step that is measured.
ARRIVALS_A_STEP = 4
TRAFFIC = ("miss", "hit", "mixed")
HOST_MEMORY_MIB = 1024
SIDES = ("vLLM", "kvhost")

ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": AT_A_TIME,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 3072,
}


def measure(scale: Scale, report: Report) -> None:
    rounds = scale.rounds if scale.full else 2
    requests = 448 if scale.full else 192
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(f"{HOST_MEMORY_MIB}MiB"))
        model = checkpoint(Recipe(dtype="bfloat16"))
        # Patient, so that both sides do the same work on a busy machine: requests wait outside of hooks.
        transfers = {
            "vLLM": baseline.kv_transfer(HOST_MEMORY_MIB << 20),
            "kvhost": kv_transfer(daemon.socket, deadline_ms=5000),
        }
        engines = {side: Engine(model, kv_transfer=transfers[side], **ARGUMENTS) for side in SIDES}
        start(stack, engines)
        for engine in engines.values():
            engine.call("benchmarks.probe:install")
        warm_up(engines)
        runs = {(side, traffic): [] for side in SIDES for traffic in TRAFFIC}  # type: dict[tuple[str, str], list[dict[str, Any]]]
        for number in range(rounds):
            for traffic, prompts in traffic_of(number, requests):
                for side in in_turns(SIDES, number):
                    runs[side, traffic].append(ask_all(engines[side], prompts))
        summarise(report, runs)


def warm_up(engines: dict[str, Engine]) -> None:
    """First steps are slower on both sides, and kvhost's first requests wait for its workers."""
    for engine in engines.values():
        ask_all(engine, [prompt(100, seed=900 + n) for n in range(AT_A_TIME)])
        wait_usable(engine)


def traffic_of(number: int, requests: int) -> list[tuple[str, list[list[int]]]]:
    """The prompts of one round, by kind of traffic; 512 tokens each, 16 blocks of 32."""
    first = 1000 + 10 * number * requests
    asked = [prompt(512, seed=first + n) for n in range(requests)]
    fresh = [prompt(512, seed=first + requests + n) for n in range(requests // 2)]
    half = [one for pair in zip(asked, fresh, strict=False) for one in pair]
    return [("miss", asked), ("hit", asked), ("mixed", half)]


def ask_all(engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    # Some answers are longer than others, so that requests do not come and go in step.
    result = drive(
        engine, prompts, [32 + 7 * n % 65 for n in range(len(prompts))], AT_A_TIME, ARRIVALS_A_STEP
    )
    forget(engine)
    return result


def summarise(report: Report, runs: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    waits: dict[str, int] = {}
    for traffic in TRAFFIC:
        theirs, ours = (sum(run["cached"] for run in runs[side, traffic]) for side in SIDES)
        if abs(theirs - ours) > 0.05 * max(theirs, ours):
            raise RuntimeError(
                f"the two sides did not do the same work: {theirs} tokens from vLLM's cache, {ours} from "
                f"kvhost with traffic {traffic!r}"
            )
        for run in runs["kvhost", traffic]:
            for what, count in run["waits"].items():
                waits[what] = waits.get(what, 0) + count
    report.figure(
        "scheduler_rpc_waits", sum(waits.values()), note=", ".join(f"{k}: {v}" for k, v in waits.items())
    )

    def each(side: str, traffic: str, function: Callable[[Any], Any]) -> list[float]:
        return [float(function(np.array(run["hooks_ns"]) / 1e6)) for run in runs[side, traffic]]

    def p99_of_all(side: str, traffic: str) -> float:
        """Of all steps together: one round has few steps beyond its 99th percentile."""
        together = np.concatenate([run["hooks_ns"] for run in runs[side, traffic]])
        return float(np.percentile(together, 99)) / 1e6

    rows, ratios, tails, tail_ratios = [], {}, {}, {}
    for traffic in TRAFFIC:
        by_side = {side: each(side, traffic, np.median) for side in SIDES}
        ratios[traffic] = [ours / theirs for theirs, ours in zip(*by_side.values(), strict=True)]
        tails[traffic] = each("kvhost", traffic, lambda ms: np.percentile(ms, 99))
        tails[traffic].append(p99_of_all("kvhost", traffic))
        tail_ratios[traffic] = p99_of_all("kvhost", traffic) / p99_of_all("vLLM", traffic)
        for side in SIDES:
            p99 = each(side, traffic, lambda ms: np.percentile(ms, 99))
            mean = each(side, traffic, np.mean)
            tokens = sum(run["cached"] for run in runs[side, traffic])
            steps = sum(len(run["hooks_ns"]) for run in runs[side, traffic])
            share = sum(sum(run["hooks_ns"]) for run in runs[side, traffic]) / sum(
                sum(run["steps_ns"]) for run in runs[side, traffic]
            )
            processor = [float(np.mean(np.array(run["processor_ns"]) / 1e6)) for run in runs[side, traffic]]
            rows.append(
                (
                    *(traffic, side, steps, tokens),
                    *(f"{np.median(values):.3f}" for values in (by_side[side], p99, mean, processor)),
                    f"{100 * share:.1f} %",
                )
            )
        report.figure(f"hook_cost_p50_ratio_{traffic}", ratios[traffic], note=f"kvhost / vLLM, {traffic}")
        report.figure(f"hook_cost_p99_ms_{traffic}", tails[traffic], "ms", note=f"kvhost, {traffic}")
    worst = max(TRAFFIC, key=lambda traffic: np.median(ratios[traffic]))
    report.figure("hook_cost_p50_ratio", ratios[worst], note=f"the worst kind of traffic: {worst}")
    slowest = max(TRAFFIC, key=lambda traffic: np.median(tails[traffic]))
    report.figure("hook_cost_p99_ms", tails[slowest], "ms", note=f"the worst kind of traffic: {slowest}")
    worst = max(tail_ratios, key=lambda traffic: tail_ratios[traffic])
    report.figure(
        "hook_cost_p99_ratio",
        tail_ratios[worst],
        note=f"kvhost / vLLM, 99th percentiles of all steps, the worst kind of traffic: {worst}",
    )
    columns = (
        "traffic",
        "cache",
        "steps",
        "tokens from it",
        "p50 ms",
        "p99 ms",
        "mean ms",
        "CPU ms",
        "of the step",
    )
    report.table("hooks", Table("Time in the scheduler's hooks, per step", columns, rows))
    by_hook: list[tuple[object, ...]] = []
    for traffic in TRAFFIC:
        for name in runs["kvhost", traffic][0]["by_hook"]:
            cells = []
            for side in SIDES:
                calls = sum(run["by_hook"].get(name, [0, 0])[0] for run in runs[side, traffic])
                spent = sum(run["by_hook"].get(name, [0, 0])[1] for run in runs[side, traffic])
                cells += [calls, f"{spent / 1e6:.1f}"]
            if any(cells[::2]):
                by_hook.append((traffic, name, *cells))
    report.table(
        "hooks_each",
        Table(
            "By hook: calls, and milliseconds in all",
            ("traffic", "hook", "vLLM calls", "ms", "kvhost calls", "ms"),
            by_hook,
        ),
    )
    report.plot(
        "hook_cost",
        Plot(
            "Time in the scheduler's hooks, 64 requests at a time",
            "percentile of steps",
            "milliseconds a step",
            {
                f"{side}, {traffic}": [
                    (
                        p,
                        float(np.percentile(np.concatenate([r["hooks_ns"] for r in runs[side, traffic]]), p))
                        / 1e6,
                    )
                    for p in (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99)
                ]
                for traffic in TRAFFIC
                for side in SIDES
            },
        ),
    )
