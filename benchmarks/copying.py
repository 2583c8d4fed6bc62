"""Store and load of a GiB through a real daemon, mapping and worker, beside memcpy of the same bytes.

Two floors are measured in every round: libc's memcpy page by page over the same cache, in an order of the
same kind (what a worker does that copies pages one by one), and one memcpy of all the bytes (where libc
stores past the caches). Everything runs on one core, in a thread of the worker or in the caller's. Blocks are
in the order that a cache has after it was used for a while: shuffled. Every block is checked at the end.

Ratios to the floors are of processor time, which is what "one core" means where cores are shared: on the
worker's side that of the whole process, all threads and all of Python included. Ratios of wall time stand
beside them.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import numpy.typing as npt

from benchmarks.attached import Attached, KVCache, Spent, Stored, spent
from benchmarks.report import Plot, Report, Table
from benchmarks.scale import Scale
from kvhost_connector.copying import NativeCopier
from kvhost_connector.native import Kernel, NativeMissing, load_native
from tests.support.daemon import Daemon

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LAYERS = 32
# A pass is cut into so many portions: a session may hold a quarter of the slots as grants.
PORTIONS = 5
JOB_BYTES = 32 * MIB
# What a round stores must still be there when it loads: the oldest round goes first.
OPTIONS = ("--segment-size", "64MiB", "--policy", "lru")
MADV_DONTNEED = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class Case:
    """Pages of `page_bytes` in 32 layers, `blocks_per_chunk` blocks in a slot."""

    page_bytes: int
    blocks_per_chunk: int

    @property
    def slot_bytes(self) -> int:
        return self.page_bytes * LAYERS * self.blocks_per_chunk

    def __str__(self) -> str:
        return f"{self.page_bytes // KIB} KiB pages, {self.slot_bytes // KIB} KiB slots"


REQUIRED = Case(64 * KIB, 1)
SHORT = (REQUIRED, Case(16 * KIB, 1))
FULL = tuple(
    Case(page * KIB, blocks)
    for page in (64, 32, 16, 8)
    for blocks in (1, 2, 4, 8, 16, 32)
    if 256 * KIB <= page * KIB * LAYERS * blocks <= 8 * MIB
)


@dataclass
class Rounds:
    """What each round took to move `nbytes` bytes one way; the first round of all is left out of medians."""

    nbytes: int
    store: list[Spent] = field(default_factory=list)
    load: list[Spent] = field(default_factory=list)
    page_store: list[Spent] = field(default_factory=list)
    page_load: list[Spent] = field(default_factory=list)
    large_store: list[Spent] = field(default_factory=list)
    large_load: list[Spent] = field(default_factory=list)

    def rates(self, each: Sequence[Spent]) -> list[float]:
        """GB/s by the wall's clock."""
        return [self.nbytes / one.seconds / 1e9 for one in each]

    def rate(self, each: Sequence[Spent]) -> float:
        """The median."""
        return median(self.rates(each[1:]))

    def cpu(self, each: Sequence[Spent]) -> list[float]:
        """Processor seconds per GiB."""
        return [one.cpu / (self.nbytes / GIB) for one in each[1:]]


class Floors:
    """What memcpy does with the cache's bytes and a piece of shared memory of the same size."""

    def __init__(self, cache: KVCache) -> None:
        """Raises `NativeMissing`: without the compiled helper there is no loop around memcpy to run."""
        self._cache = cache
        self._copier = NativeCopier(load_native(), Kernel.PLAIN)
        self._memory = mmap.mmap(-1, cache.pages.nbytes)
        self._scratch = np.frombuffer(self._memory, dtype=np.uint8)
        # Every page is there before anything is timed.
        self._scratch[:: mmap.PAGESIZE] = 1
        self._group = cache.table().groups[0]

    def paged(self, order: npt.NDArray[np.int64], images: npt.NDArray[np.int64]) -> tuple[Spent, Spent]:
        """Stores and loads page by page. Blocks come back to where they were."""
        addresses = self._scratch.ctypes.data + images * self._group.block_bytes
        return (
            spent(lambda: self._copier.copy(self._group, "store", order, addresses)),
            spent(lambda: self._copier.copy(self._group, "load", order, addresses)),
        )

    def large(self) -> tuple[Spent, Spent]:
        """One memcpy out of the cache, and one back."""
        cache, scratch = self._cache.pages.ctypes.data, self._scratch.ctypes.data
        nbytes = self._cache.pages.nbytes
        return (
            spent(lambda: ctypes.memmove(scratch, cache, nbytes)),
            spent(lambda: ctypes.memmove(cache, scratch, nbytes)),
        )


class Pass:
    """Stores all blocks of a cache through one attached engine and loads them into others."""

    def __init__(self, engine: Attached, case: Case, chance: np.random.Generator) -> None:
        self._engine = engine
        self._case = case
        self._chance = chance

    def portions(self) -> list[npt.NDArray[np.int64]]:
        """All blocks but the null block, shuffled: arrays of (chunks, blocks of a chunk)."""
        size = self._case.blocks_per_chunk
        blocks = self._chance.permutation(np.arange(1, self._engine.cache.blocks))
        chunks = blocks[: len(blocks) // size * size].reshape(-1, size)
        return np.array_split(chunks, PORTIONS)

    def jobs(self, chunks: int) -> int:
        return max(1, chunks * self._case.slot_bytes // JOB_BYTES)

    def store(self, portions: Sequence[npt.NDArray[np.int64]]) -> tuple[Spent, list[Stored]]:
        total, done = Spent(0, 0), []
        for blocks in portions:
            stored = self._engine.reserve(blocks)
            total += self._engine.store(stored, self.jobs(len(blocks)))
            self._engine.commit(stored)
            done.append(stored)
        return total, done

    def load(self, done: Sequence[Stored]) -> Spent:
        """Every chunk goes to the blocks of another one."""
        cache, total = self._engine.cache, Spent(0, 0)
        held = cache.holds.copy()
        for stored, into in zip(done, [*done[1:], done[0]], strict=True):
            count = min(len(stored.keys), len(into.keys))
            chosen = self._chance.permutation(len(stored.keys))[:count]
            target = self._chance.permutation(into.blocks)[:count]
            with self._engine.pinned([stored.keys[n] for n in chosen], target) as pinned:
                total += self._engine.load(pinned, self.jobs(count))
            cache.holds[target] = held[stored.blocks[chosen]]
        return total


def measure(scale: Scale, report: Report) -> None:
    """Copies of every geometry and slot size; the required figures are those of 64 KiB pages."""
    try:
        load_native()
    except NativeMissing as error:
        report.skip("copying", str(error))
        return
    found: dict[Case, Rounds] = {}
    rows: list[list[object]] = []
    for case in FULL if scale.full else SHORT:
        rounds = scale.rounds if case == REQUIRED or scale.full else 2
        nbytes = GIB if case == REQUIRED or scale.full else GIB // 2
        with Daemon(f"{nbytes * 3 // 2}", OPTIONS) as daemon:
            found[case] = measure_case(daemon, case, nbytes, rounds + 1, report)
        rows.append(_row(case, found[case]))
    report_required(found[REQUIRED], report)
    report.table("copying", Table("Store and load beside memcpy, one core", COLUMNS, rows))
    lines: dict[str, list[tuple[float, float]]] = {}
    for case, rounds_ in found.items():
        slot = case.slot_bytes / MIB
        page = f"{case.page_bytes // KIB} KiB pages"
        lines.setdefault(f"store, {page}", []).append((slot, rounds_.rate(rounds_.store)))
        lines.setdefault(f"load, {page}", []).append((slot, rounds_.rate(rounds_.load)))
    report.plot("copying", Plot("Store and load", "slot, MiB", "GB/s", lines, log_x=True))


def measure_case(daemon: Daemon, case: Case, nbytes: int, rounds: int, report: Report) -> Rounds:
    """Alternates the worker and both floors. Raises `RuntimeError` when a block is not what it should be."""
    chance = np.random.default_rng(case.slot_bytes)
    cache = KVCache(LAYERS, nbytes // (case.page_bytes * LAYERS), case.page_bytes)
    floors = Floors(cache)
    result = Rounds(cache.pages.nbytes)
    with Attached(daemon.socket, cache, case.blocks_per_chunk) as engine:
        engine.prefaulted()
        passes = Pass(engine, case, chance)
        for number in range(rounds):
            for part in _turns(number):
                if part == "worker":
                    stored, done = passes.store(passes.portions())
                    result.store.append(stored)
                    result.load.append(passes.load(done))
                elif part == "pages":
                    order = chance.permutation(cache.blocks)
                    paged = floors.paged(order, chance.permutation(cache.blocks))
                    result.page_store.append(paged[0])
                    result.page_load.append(paged[1])
                else:
                    large = floors.large()
                    result.large_store.append(large[0])
                    result.large_load.append(large[1])
        if case == REQUIRED:
            measure_first_stores(daemon, engine, case, report)
    wrong = cache.wrong_blocks()
    if wrong:
        raise RuntimeError(f"{case}: {wrong} of {cache.blocks} blocks do not hold what was stored")
    return result


def measure_first_stores(daemon: Daemon, warm: Attached, case: Case, report: Report) -> None:
    """Stores through mappings that no store went through before, each beside one through a warm mapping."""
    ratios: dict[str, list[float]] = {"prefaulted": [], "at once": [], "by page faults": []}
    prefault_s: list[float] = []
    chance = np.random.default_rng(1)
    for state, each in ratios.items():
        start = time.perf_counter()
        with Attached(daemon.socket, warm.cache, case.blocks_per_chunk) as fresh:
            if state != "at once":
                fresh.prefaulted()
                prefault_s.append(time.perf_counter() - start)
            for blocks in _small_portions(warm.cache, chance):
                faults = state == "by page faults"
                if len(each) % 2:
                    later, first = _store_once(warm, blocks, case), _store_once(fresh, blocks, case, faults)
                else:
                    first, later = _store_once(fresh, blocks, case, faults), _store_once(warm, blocks, case)
                # Of what prefaults at the same time the wall's clock is the judge.
                by_wall = state == "at once"
                each.append(later.seconds / first.seconds if by_wall else later.cpu / first.cpu)
    figure = report.figure
    figure("first_store_vs_warm", ratios["prefaulted"], note="the mapping was prefaulted in background")
    figure("store_at_once_vs_warm", ratios["at once"][:1], note="prefaulting has just begun")
    figure("store_by_page_faults_vs_warm", ratios["by page faults"], note="as without any prefaulting")
    figure("attach_and_prefault_s", prefault_s, "s", "all segments of the pool")


def report_required(rounds: Rounds, report: Report) -> None:
    """The figures of one geometry."""
    sides = {
        "store": (rounds.store, rounds.page_store, rounds.large_store),
        "load": (rounds.load, rounds.page_load, rounds.large_load),
    }
    for name, (ours, pages, large) in sides.items():
        for floor, each in (("page", pages), ("nt", large)):
            pairs = list(zip(each, ours, strict=True))[1:]
            key = f"copy_{name}_vs_{floor}_floor"
            report.figure(key, [f.cpu / o.cpu for f, o in pairs], note="processor time")
            report.figure(f"{key}_wall", [f.seconds / o.seconds for f, o in pairs], note="wall time")
        report.figure(f"cpu_s_per_gib_{name}", rounds.cpu(ours), "s", "of the whole process")
        report.figure(f"copy_{name}_gb_s", rounds.rates(ours[1:]), "GB/s", "wall time")


COLUMNS = (
    "pages",
    "slots",
    "store GB/s (first)",
    "load GB/s (first)",
    "by pages: store, load",
    "one memcpy: store, load",
    "CPU-s/GiB: store, load",
    "by pages: store, load",
    "one memcpy: store, load",
)


def _row(case: Case, rounds: Rounds) -> list[object]:
    """Wall time first, then processor time."""

    def both(store: float, load: float, digits: int) -> str:
        return f"{store:.{digits}f}, {load:.{digits}f}"

    pairs = [(rounds.page_store, rounds.page_load), (rounds.large_store, rounds.large_load)]
    return [
        f"{case.page_bytes // KIB} KiB",
        f"{case.slot_bytes // KIB} KiB",
        *(f"{rounds.rate(each):.1f} ({rounds.rates(each)[0]:.1f})" for each in (rounds.store, rounds.load)),
        *(both(rounds.rate(store), rounds.rate(load), 1) for store, load in pairs),
        *(
            both(median(rounds.cpu(store)), median(rounds.cpu(load)), 3)
            for store, load in [(rounds.store, rounds.load), *pairs]
        ),
    ]


def _turns(number: int) -> tuple[str, str, str]:
    """Who goes first changes from round to round."""
    parts = ("worker", "pages", "large")
    return parts[number % 3 :] + parts[: number % 3]  # type: ignore[return-value]


def _small_portions(cache: KVCache, chance: np.random.Generator) -> Iterator[npt.NDArray[np.int64]]:
    blocks = chance.permutation(np.arange(1, cache.blocks))
    yield from (part[:, None] for part in np.array_split(blocks, 8)[:6])


def _store_once(engine: Attached, blocks: npt.NDArray[np.int64], case: Case, faults: bool = False) -> Spent:
    """With `faults` the process's way to the pages is taken first, as if they were mapped anew."""
    stored = engine.reserve(blocks)
    for slot in stored.slots if faults else ():
        address, nbytes = engine.mapping.shard(slot, 0)
        if _libc.madvise(address, nbytes, MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED)")
    took = engine.store(stored, max(1, len(blocks) * case.slot_bytes // JOB_BYTES))
    engine.commit(stored)
    return took


if __name__ == "__main__":
    shown = Report()
    measure(Scale(), shown)
    for key, one in shown.figures.items():
        print(f"{key}: {one.value:.3f} {one.unit} ({one.low:.3f} to {one.high:.3f})")
    for columns, *rows_ in [[table.columns, *table.rows] for table in shown.tables.values()]:
        for row_ in (columns, *rows_):
            print(" | ".join(map(str, row_)))
    for name, why in shown.skipped.items():
        print(f"{name} skipped: {why}")
