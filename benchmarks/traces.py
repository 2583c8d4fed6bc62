"""Replay of public request traces on a real engine, scaled to a tiny model: hits and throughput.

A block of the trace (512 tokens) becomes one block of the engine (32 tokens), the same tokens wherever the
trace has the same block. The device holds few blocks, so that conversations that come back were forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import drive, forget, kv_transfer, start, wait_usable
from benchmarks.mooncake import FOLDER, TRACES
from benchmarks.report import Report, Table
from benchmarks.scale import Scale, in_turns
from tests.e2e.engine import Engine
from tests.e2e.models import VOCABULARY, Recipe, checkpoint
from tests.support.daemon import Daemon

REQUESTS = 200
BLOCK = 32
# A request of the trace may be longer than what the tiny model takes.
LONGEST = 120
AT_A_TIME = 8

ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": AT_A_TIME,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 1024,
}


@dataclass(frozen=True)
class Replay:
    """Prompts and lengths of the answers, in the order of the trace; `cut`: how many were shortened."""

    prompts: list[list[int]]
    lengths: list[int]
    cut: int


def measure(scale: Scale, report: Report) -> None:
    if not scale.full:
        report.skip("traces", "replays are part of the full form only")
        return
    missing = [name for name in TRACES.values() if not (FOLDER / name).exists()]
    if missing:
        report.skip("traces", f"{', '.join(missing)} is not in {FOLDER}")
        return
    with ExitStack() as stack, Daemon("1GiB") as daemon:
        model = checkpoint(Recipe(dtype="bfloat16"))
        engines = {
            "plain": Engine(model, **ARGUMENTS),
            "kvhost": Engine(model, kv_transfer=kv_transfer(daemon.socket), **ARGUMENTS),
        }
        start(stack, engines)
        for engine in engines.values():
            drive(engine, [block_tokens(-1 - n, salt=0) for n in range(16)], [4] * 16, AT_A_TIME)
        wait_usable(engines["kvhost"])
        rows: list[tuple[object, ...]] = []
        for name, file in TRACES.items():
            rows += replay(report, name, FOLDER / file, engines)
        columns = ("trace", "engine", "prompt tokens", "not computed", "share", "tokens/s")
        report.table("traces", Table(f"{REQUESTS} requests of each trace", columns, rows))


def replay(
    report: Report, name: str, path: Path, engines: dict[str, Engine], rounds: int = 3
) -> list[tuple[object, ...]]:
    hits: dict[str, list[float]] = {side: [] for side in engines}
    rates: dict[str, list[float]] = {side: [] for side in engines}
    total = 0
    for number in range(rounds):
        # Other tokens in every round: nothing of an earlier one is hit.
        asked = read(path, salt=1 + number)
        total = sum(map(len, asked.prompts))
        for side in in_turns(engines, number):
            result = drive(engines[side], asked.prompts, asked.lengths, AT_A_TIME)
            hits[side].append(result["cached"])
            rates[side].append(result["tokens"] / result["seconds"])
            forget(engines[side])
    rows: list[tuple[object, ...]] = []
    for side in engines:
        cached, rate = sorted(hits[side])[rounds // 2], sorted(rates[side])[rounds // 2]
        rows.append((name, side, total, int(cached), f"{100 * cached / total:.1f} %", f"{rate:.0f}"))
        report.figure(f"replay_{name}_hit_share_{side}", [hit / total for hit in hits[side]])
    report.figure(
        f"replay_{name}_throughput_vs_plain",
        [ours / plain for ours, plain in zip(rates["kvhost"], rates["plain"], strict=True)],
        note=f"{REQUESTS} requests, {asked.cut} of them shortened to {LONGEST} blocks",
    )
    return rows


def read(path: Path, salt: int) -> Replay:
    """The first requests of a trace, as prompts of the tiny model."""
    prompts, lengths, cut = [], [], 0
    with path.open() as lines:
        for _, line in zip(range(REQUESTS), lines, strict=False):
            request = json.loads(line)
            ids: list[int] = request["hash_ids"]
            cut += len(ids) > LONGEST
            prompts.append(flat(block_tokens(number, salt) for number in ids[:LONGEST]))
            lengths.append(max(1, min(64, request["output_length"] * BLOCK // 512)))
    return Replay(prompts, lengths, cut)


def flat(blocks: Iterable[list[int]]) -> list[int]:
    return [token for block in blocks for token in block]


def block_tokens(number: int, salt: int) -> list[int]:
    """The tokens that stand for one block of a trace."""
    state = (number * 2654435761 + salt * 40503 + 12345) & 0xFFFFFFFF
    tokens = []
    for _ in range(BLOCK):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        tokens.append(3 + (state >> 16) % (VOCABULARY - 3))
    return tokens
