"""Hit rates of the eviction policies on public request traces, beside Belady's optimum and a plain LRU.

A request hits the blocks in front of the first one that is not there, as with prefix attention; the rate is
hits / all blocks of all requests. The policies are the server's own, inside its own table, driven as the
manager drives it: pin and touch what is found, let go, then take a slot for each other block and publish it.

`python -m benchmarks.hit_rate [trace] [blocks] [policy]` prints one rate, or runs all.
"""

from __future__ import annotations

import hashlib
import heapq
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context

from benchmarks.mooncake import TRACES, NoTraces, Trace, load
from benchmarks.report import Plot, Report, Table
from benchmarks.scale import Scale
from kvhost_server.ids import ChunkKey, SegmentId, SlotIndex
from kvhost_server.policies import DEFAULT_POLICY, POLICIES
from kvhost_server.slots import ChunkTable

SIZES = (1000, 3000, 10000, 30000, 50000)
RATIOS = (("1k", 1000), ("3k", 3000))
LRU = "lru"
PLAIN_LRU = "plain LRU"
BELADY = "Belady's optimum"
_PROCESSES = 2
_REQUEST_US = 1000
_NEVER = 1 << 62


@dataclass(frozen=True)
class Hits:
    """Of `blocks` asked for, how many were there at all, and how many with everything in front of them."""

    blocks: int
    prefix: int
    anywhere: int

    @property
    def rate(self) -> float:
        """Prefix hits, in percent of all blocks."""
        return 100 * self.prefix / self.blocks

    @property
    def set_rate(self) -> float:
        """Hits wherever they stand, in percent of all blocks."""
        return 100 * self.anywhere / self.blocks


def serve(trace: Trace, blocks: int, policy: str, key_of: Callable[[int], ChunkKey] | None = None) -> Hits:
    """What the server's table hits with room for so many blocks, one segment, one request after the other."""
    table = ChunkTable(blocks, lambda key, used_at: None, policy)
    rows = {table.add_row(SegmentId(1))}
    index, now, named = table.index, 0, key_of or long_key
    prefix = anywhere = 0
    for request in trace:
        now += _REQUEST_US
        keys = [named(block) for block in request]
        found: list[SlotIndex] = []
        for key in keys:
            slot = index.get(key)
            if slot is None:
                break
            found.append(slot)
        prefix += len(found)
        anywhere += len(found) + sum(key in index for key in keys[len(found) :])
        for slot in found:
            table.hold(slot)
        table.touch(found, now)
        for slot in found:
            table.let_go(slot)
        for place in range(len(found), len(keys)):
            if keys[place] not in index:
                _store(table, rows, keys[place], keys[place - 1] if place else None, now)
    return Hits(sum(map(len, trace)), prefix, anywhere)


def _store(table: ChunkTable, rows: set[int], key: ChunkKey, parent: ChunkKey | None, now: int) -> None:
    tail = table.index.get(parent) if parent is not None else None
    if tail is not None:
        table.hold(tail)
    slot = table.take(rows, tail)
    if tail is not None:
        table.let_go(tail)
    if slot is not None:
        table.publish(slot, key, parent, now)


@cache
def long_key(block: int) -> ChunkKey:
    """A key as vLLM makes them: 32 bytes of hash, 4 of group index."""
    return ChunkKey(hashlib.sha256(block.to_bytes(8, "big")).digest() + bytes(4))


def plain_lru(trace: Trace, blocks: int) -> Hits:
    """A list of blocks in the order of use, and nothing else: what our own LRU is checked against."""
    order: OrderedDict[int, None] = OrderedDict()
    prefix = anywhere = 0
    for request in trace:
        there = [block in order for block in request]
        prefix += there.index(False) if False in there else len(there)
        anywhere += sum(there)
        for block in reversed(request):
            order[block] = None
            order.move_to_end(block)
        while len(order) > blocks:
            order.popitem(last=False)
    return Hits(sum(map(len, trace)), prefix, anywhere)


def belady(trace: Trace, blocks: int) -> Hits:
    """Whoever is used again last leaves first, known from the future; a block that is never used again is
    not kept. No policy without that knowledge does better."""
    next_uses: list[list[int]] = []
    later: dict[int, int] = {}
    for number in range(len(trace) - 1, -1, -1):
        next_uses.append([later.get(block, _NEVER) for block in trace[number]])
        later.update(dict.fromkeys(trace[number], number))
    next_uses.reverse()
    kept: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    prefix = anywhere = 0
    for request, uses in zip(trace, next_uses, strict=True):
        there = [block in kept for block in request]
        prefix += there.index(False) if False in there else len(there)
        anywhere += sum(there)
        for depth, (block, use) in enumerate(zip(request, uses, strict=True)):
            kept[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
            if use == _NEVER:
                del kept[block]
        while len(kept) > blocks:
            use, _, block = heapq.heappop(farthest)
            if kept.get(block) == -use:
                del kept[block]
    return Hits(sum(map(len, trace)), prefix, anywhere)


def rate(name: str, blocks: int, who: str) -> Hits:
    """Hits of a policy of the server, or of one of the two lines beside them. Raises `NoTraces`."""
    beside: dict[str, Callable[[Trace, int], Hits]] = {PLAIN_LRU: plain_lru, BELADY: belady}
    trace = load(name)
    return beside[who](trace, blocks) if who in beside else serve(trace, blocks, who)


def _rates(jobs: Iterable[tuple[str, int, str]]) -> dict[tuple[str, int, str], Hits]:
    """All rates, two at a time."""
    # Long ones first; each process reads the trace by itself.
    ordered = sorted(jobs, key=lambda job: (job[0], job[2] != DEFAULT_POLICY, job[1]))
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool:
        return dict(zip(ordered, pool.map(rate, *zip(*ordered, strict=True)), strict=True))


def measure(scale: Scale, report: Report) -> None:
    """Fills `hit_rate_*`. The short form replays the server's LRU only where it is the divisor of a ratio;
    elsewhere the plain one takes its place: they hit the same, as the full form shows."""
    try:
        for name in TRACES:
            load(name, 1)
    except NoTraces as error:
        report.skip("hit_rate", str(error))
        return
    lines = [*POLICIES, PLAIN_LRU, BELADY] if scale.full else [DEFAULT_POLICY, PLAIN_LRU, BELADY]
    found = _rates(
        [(name, size, who) for name in TRACES for size in SIZES for who in lines]
        + [("conversation", size, LRU) for _, size in RATIOS if not scale.full]
    )
    for name in TRACES:
        report.plot(
            f"hit_rate_{name}",
            Plot(
                f"Prefix hits, {name} trace",
                "blocks of the cache (512 tokens each)",
                "hits, % of all blocks",
                {who: [(size, found[name, size, who].rate) for size in SIZES] for who in lines},
                log_x=True,
            ),
        )
        report.table(
            f"hit_rate_{name}",
            Table(
                f"Prefix hits in % of all blocks, {name} trace",
                ("policy", *(f"{size:,}" for size in SIZES)),
                [(who, *(f"{found[name, size, who].rate:.2f}" for size in SIZES)) for who in lines],
            ),
        )
    differ = [(job, hits) for job, hits in found.items() if hits.anywhere != hits.prefix]
    if scale.full and differ:
        rows = [(*job, f"{hits.rate:.3f}", f"{hits.set_rate:.3f}") for job, hits in differ]
        columns = ("trace", "blocks", "policy", "prefix %", "set %")
        report.table("hit_rate_set", Table("Where hits anywhere differ from prefix hits", columns, rows))
    note = f"prefix hits of {DEFAULT_POLICY} and of {LRU}, both in the server's own table"
    for short, size in RATIOS:
        mine, lru = (found["conversation", size, who].rate for who in (DEFAULT_POLICY, LRU))
        report.figure(f"hit_rate_{short}_vs_lru", mine / lru, "x", note)
    points = [
        found[name, size, DEFAULT_POLICY].rate - found[name, size, LRU if scale.full else PLAIN_LRU].rate
        for name in TRACES
        for size in SIZES
    ]
    report.figure("hit_rate_worst_vs_lru_points", min(points), "points", "both traces, every size")
    lrus = [(hits, found[name, size, PLAIN_LRU]) for (name, size, who), hits in found.items() if who == LRU]
    ours = max(abs(hits.rate - plain.rate) for hits, plain in lrus)
    report.figure(
        "hit_rate_lru_vs_plain_points", ours, "points", "largest difference of our LRU to a plain one"
    )


def main(arguments: list[str]) -> int:
    if arguments:
        name, size, who = arguments[0], int(arguments[1]), (arguments[2:] or [DEFAULT_POLICY])[0]
        hits = rate(name, size, who)
        print(f"{name} {size} {who}: {hits.rate:.3f} % prefix hits, {hits.set_rate:.3f} % anywhere")
        return 0
    from benchmarks import machine
    from benchmarks.__main__ import show

    report, before = Report(), machine.load()
    measure(Scale(full=True), report)
    show(report, {**machine.facts(), "load_before": before, "load_after": machine.load()})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
