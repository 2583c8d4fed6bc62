"""What one daemon costs on a host that is larger than any we can measure on, and what breaks first.

Unit costs come from the last benchmark run where it has them, and are stated otherwise; everything else is
arithmetic. docs/scale.md has its answer for 2 TiB, 8 engines of 8 ranks and prompts of a million tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvhost_connector.device.pinning import PAUSE_PART
from kvhost_server.ids import ChunkKey, SegmentId
from kvhost_server.reading import MAX_KEYS_PER_CALL
from kvhost_server.sizing import default_segment_bytes
from kvhost_server.slots import ChunkTable
from kvhost_server.units import format_size, parse_size

RESULTS = Path(__file__).parent / "results" / "latest.json"
PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
_TABLE = "<!-- table: made by `python -m benchmarks.simulate --write` -->\n"
_END = "<!-- end of table -->\n"
GIB = 1 << 30
_PAGE = 4096
_PTE = 8


@dataclass(frozen=True)
class Host:
    """The host and what runs on it."""

    memory: int = 2 << 40
    """Bytes of the pool."""
    engines: int = 8
    ranks: int = 8
    block: int = 16
    """Tokens of a block; a chunk is one block."""
    token_bytes: int = 320 << 10
    """KV cache of one token over all layers and ranks; 320 KiB is a 70B model with 8 KV heads in bf16."""
    context: int = 1 << 20
    """Tokens of a prompt."""
    hit_share: float = 0.9
    """What of a prompt is there already."""
    requests: float = 0.05
    """Prompts a second, each engine."""
    steps: float = 20.0
    """Engine steps a second; each sends at most one message."""
    page: int = _PAGE
    """Bytes of a page of the pool: 4 KiB, or a huge page."""

    @property
    def chunk(self) -> int:
        return self.block * self.token_bytes

    @property
    def chunks(self) -> int:
        return self.memory // self.chunk

    @property
    def workers(self) -> int:
        return self.engines * self.ranks

    @property
    def segments(self) -> int:
        return self.memory // default_segment_bytes(self.memory)

    @property
    def blocks_of_prompt(self) -> int:
        return -(-self.context // self.block)


@dataclass(frozen=True)
class Costs:
    """Unit costs: the first ones measured by `python -m benchmarks` or `--measure`, the last assumed."""

    index_bytes: float = 400.0
    """Bytes of the daemon's memory for a chunk."""
    call_us: float = 125.0
    """Daemon processor time for a call, in microseconds: 8000 lookups of 64 hashes a second."""
    key_us: float = 0.4
    """The same for each further key of a call: 8192 in 3.3 ms."""
    store_us: float = 30.0
    """The same for a chunk stored: a slot found, something evicted, published."""
    grow_ns: float = 150.0
    """Standstill when the index doubles its table, for each chunk in it."""
    populate_gb_s: float = 1.0
    """Memory populated a second; one helper process."""
    copy_cpu_s: float = 0.15
    """An engine's processor time for a GiB copied by the processor."""
    register_s: float = 0.1
    """cudaHostRegister of a GiB in 4 KiB pages, a tenth in huge ones, without the pauses that the connector
    makes. Assumed: not measured yet."""
    link_gb_s: float = 50.0
    """One rank's PCIe link, generation 5, 16 lanes. Assumed."""
    dram_gb_s: float = 400.0
    """The host's memory, all ranks together. Assumed."""


_FIGURES: Mapping[str, tuple[str, float, float]] = {
    # cost -> figure of a run, and cost = factor * figure ** power
    "index_bytes": ("index_bytes_per_chunk", 1.0, 1),
    "call_us": ("requests_per_s", 1e6, -1),
    "key_us": ("lookup_8192_ms", 1e3 / 8192, 1),
    "populate_gb_s": ("populate_gb_per_s", 1.0, 1),
    "copy_cpu_s": ("cpu_s_per_gib_load", 1.0, 1),
}


def costs_of(path: Path) -> tuple[Costs, set[str]]:
    """Costs with what a benchmark run measured in the place of defaults, and which those are."""
    if not path.exists():
        return Costs(), set()
    figures = json.loads(path.read_text())["figures"]
    measured = {
        name: factor * figures[key] ** power
        for name, (key, factor, power) in _FIGURES.items()
        if figures.get(key)
    }
    return replace(Costs(), **measured), set(measured)


@dataclass(frozen=True)
class Row:
    """One thing that grows: its size on this host, what is bearable, and how far off that is."""

    what: str
    value: float
    limit: float
    unit: str
    breaks_at: str
    """At which size the limit is reached, all else equal."""
    remedy: str

    @property
    def load(self) -> float:
        """1 is the limit."""
        return self.value / self.limit


def rows(host: Host, costs: Costs) -> list[Row]:
    """Everything that grows with the host, what is nearest to its limit, or furthest beyond it, first."""
    return sorted([*_memory(host, costs), *_daemon(host, costs), *_data(host, costs)], key=lambda r: -r.load)


def _memory(host: Host, costs: Costs) -> Iterable[Row]:
    gib = host.memory / GIB
    index = host.chunks * costs.index_bytes / GIB
    yield Row(
        "index, daemon's memory",
        index,
        gib / 100,
        "GiB",
        f"chunks below {100 * costs.index_bytes / 1024:.0f} KiB (here {format_size(host.chunk)})",
        "more blocks a chunk",
    )
    tables = gib * GIB / host.page * _PTE / GIB
    share = tables / gib
    yield Row(
        "page tables of all workers, charged to the engines",
        tables * host.workers,
        gib / 20,
        "GiB",
        f"{0.05 / share:.0f} workers" if share * 1e6 > 1 else "never",
        "--hugepages 2MiB: 512 times less",
    )
    populate = host.memory / 1e9 / costs.populate_gb_s
    yield Row(
        "populate, until the daemon serves",
        populate,
        600,
        "s",
        format_size(_rounded(600 * costs.populate_gb_s * 1e9)),
        "huge pages; several helpers side by side (not built); every restart of the daemon costs this",
    )


def _daemon(host: Host, costs: Costs) -> Iterable[Row]:
    lookup = _keys(host.blocks_of_prompt, costs)
    hits = host.blocks_of_prompt * host.hit_share
    misses = host.blocks_of_prompt - hits
    # Found, pinned, released; what was not there is stored.
    prompt = lookup + 2 * _keys(hits, costs) + misses * costs.store_us
    busy = (host.requests * prompt + host.steps * costs.call_us) * host.engines / 1e6
    steps = host.steps * costs.call_us * host.engines / 1e6
    yield Row(
        "daemon's one core, busy",
        100 * busy,
        70,
        "%",
        f"{(0.7 - steps) / (prompt * host.engines / 1e6):.2g} prompts a second and engine",
        "more blocks a chunk; a daemon for each half of the engines",
    )
    calls = -(-host.blocks_of_prompt // MAX_KEYS_PER_CALL)
    yield Row(
        "calls to the daemon",
        host.engines * (host.steps + 3 * calls * host.requests),
        0.7e6 / costs.call_us,
        "/s",
        f"{0.7e6 / costs.call_us / (host.steps + 3 * calls * host.requests):.0f} engines",
        "a daemon for each half of the engines",
    )
    yield Row(
        f"lookup of one prompt, {calls} calls",
        lookup / 1e3,
        50,
        "ms",
        f"{50_000 / costs.key_us * host.block / 1e6:.2g} million tokens",
        "more blocks a chunk",
    )
    yield Row(
        "standstill of the loop when the index doubles",
        host.chunks * costs.grow_ns / 1e6,
        100,
        "ms",
        f"{100e6 / costs.grow_ns / 1e6:.2g} million chunks",
        "more blocks a chunk; an index in pieces (not built)",
    )
    yield Row(
        "the pool, taken by one prompt",
        100 * host.context * host.token_bytes / host.memory,
        50,
        "%",
        f"{host.memory / 2 / host.token_bytes / 1e6:.2g} million tokens (half of the slots can be pinned)",
        "a smaller KV cache (fp8)",
    )


def _data(host: Host, costs: Costs) -> Iterable[Row]:
    register_s = costs.register_s / (10 if host.page > _PAGE else 1) * (1 + PAUSE_PART)
    registered = host.memory / GIB * register_s
    segment = format_size(default_segment_bytes(host.memory))
    yield Row(
        f"cudaHostRegister, {host.segments} segments of {segment}, a worker",
        registered,
        120,
        "s",
        format_size(_rounded(120 / register_s * GIB)),
        "huge pages; segments are usable one by one as they are registered",
    )
    loaded = host.context * host.hit_share * host.token_bytes / 1e9
    together = min(host.ranks * costs.link_gb_s, costs.dram_gb_s)
    yield Row(
        "PCIe, the hits of one prompt, all ranks at once",
        loaded / together,
        5,
        "s",
        f"{5 * together * 1e9 / host.token_bytes / host.hit_share / 1e6:.2g} million tokens",
        "fp8; computing takes longer still",
    )
    moved = host.engines * host.requests * host.context * host.token_bytes / 1e9
    yield Row(
        "host memory's bandwidth, loads and stores of all engines",
        100 * moved / costs.dram_gb_s,
        50,
        "%",
        f"{0.5 * costs.dram_gb_s / (moved / host.requests):.2g} prompts a second and engine",
        "hits in the device's own cache come first",
    )
    yield Row(
        "engines' processors, copies where there is no DMA",
        moved * 1e9 / GIB * costs.copy_cpu_s / host.engines,
        host.ranks,
        "cores/engine",
        f"{host.ranks / (moved * 1e9 / GIB * costs.copy_cpu_s / host.engines / host.requests):.2g} "
        "prompts a second and engine",
        "device DMA",
    )


def _keys(keys: float, costs: Costs) -> float:
    """Microseconds of the daemon for so many keys, in calls of the greatest length."""
    return -(-keys // MAX_KEYS_PER_CALL) * costs.call_us + keys * costs.key_us


def _rounded(nbytes: float) -> int:
    return int(nbytes) // GIB * GIB


def measured_here() -> dict[str, float]:
    """Costs of the index that this machine can measure in seconds: `store_us`, `grow_ns`."""
    blocks, table = 20_000, ChunkTable(10_000, lambda key, used_at: None)
    rows_ = {table.add_row(SegmentId(1))}
    keys = [ChunkKey(number.to_bytes(32, "little") + bytes(4)) for number in range(1_000_000)]
    started = time.process_time()
    for now, key in enumerate(keys[:blocks]):
        slot = table.take(rows_)
        if slot is not None:
            table.publish(slot, key, None, now)
    store_us = (time.process_time() - started) / blocks * 1e6
    index: dict[ChunkKey, int] = {}
    worst, at = 0.0, 1
    for number, key in enumerate(keys):
        before = time.perf_counter()
        index[key] = number
        took = time.perf_counter() - before
        if number > 300_000 and took > worst:
            worst, at = took, number
    return {"store_us": store_us, "grow_ns": worst / at * 1e9}


COLUMNS = ("what", "here", "bearable", "of it", "breaks at", "then")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    return (
        row.what,
        f"{row.value:.3g} {row.unit}",
        f"{row.limit:.3g} {row.unit}",
        f"{100 * row.load:.0f} %",
        row.breaks_at,
        row.remedy,
    )


def verdict(found: list[Row]) -> str:
    """One sentence."""
    beyond = [row for row in found if row.load > 1]
    if not beyond:
        return f"Nothing breaks. Nearest to its limit: {found[0].what}, at {found[0].breaks_at}."
    named = "; ".join(f"{row.what} (at {row.breaks_at})" for row in beyond)
    return f"Beyond what is bearable, worst first: {named}."


def markdown(host: Host, costs: Costs) -> str:
    """The table and the verdict as docs/scale.md has them."""
    found = rows(host, costs)
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in found), "", verdict(found)])


def page() -> str:
    """docs/scale.md with the table that the stated unit costs give."""
    before, _, rest = PAGE.read_text().partition(_TABLE)
    return f"{before}{_TABLE}\n{markdown(Host(), Costs())}\n\n{_END}{rest.partition(_END)[2]}"


def _size(context: click.Context, option: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--memory", default="2TiB", callback=_size, metavar="SIZE", help="Size of the pool.")
@click.option("--engines", default=8, help="Engines on the host.")
@click.option("--ranks", default=8, help="Workers of each engine.")
@click.option("--block", default=16, help="Tokens of a chunk.")
@click.option(
    "--token-bytes", default="320KiB", callback=_size, metavar="SIZE", help="KV cache of one token."
)
@click.option("--context", default=1 << 20, help="Tokens of a prompt.")
@click.option("--hit-share", default=0.9, help="What of a prompt is there already.")
@click.option("--requests", default=0.05, help="Prompts a second, each engine.")
@click.option("--steps", default=20.0, help="Steps a second, each engine.")
@click.option("--page", default="4KiB", callback=_size, metavar="SIZE", help="Size of the pool's pages.")
@click.option(
    "--results",
    type=click.Path(dir_okay=False, path_type=Path),
    default=RESULTS,
    show_default="benchmarks/results/latest.json",
    help="Result of a benchmark run, for unit costs.",
)
@click.option("--defaults", is_flag=True, help="Use the stated unit costs only, as docs/scale.md does.")
@click.option("--measure", is_flag=True, help="Measure here what takes seconds to measure.")
@click.option("--write", is_flag=True, help="Write docs/scale.md anew.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table of docs/scale.md.")
def main(
    *,
    results: Path,
    defaults: bool,
    measure: bool,
    as_json: bool,
    as_markdown: bool,
    write: bool,
    **host_values: float,
) -> None:
    """Says what one daemon costs on a host of any size, and what breaks first."""
    if write:
        PAGE.write_text(page())
        return
    host = Host(**host_values)  # type: ignore[arg-type]
    costs, known = (Costs(), set()) if defaults else costs_of(results)
    if measure:
        here = measured_here()
        costs, known = replace(costs, **here), known | set(here)
    found = rows(host, costs)
    if as_json:
        content = {
            "host": asdict(host),
            "costs": asdict(costs),
            "measured": sorted(known),
            "rows": [{**asdict(row), "load": row.load} for row in found],
            "verdict": verdict(found),
        }
        click.echo(json.dumps(content, indent=1))
    elif as_markdown:
        click.echo(markdown(host, costs))
    else:
        _show(host, costs, known, found)


def _show(host: Host, costs: Costs, known: set[str], found: list[Row]) -> None:
    console = Console(highlight=False, markup=False)
    console.print(
        f"{format_size(host.memory)}, {host.engines} engines of {host.ranks} ranks, chunks of {host.block} "
        f"tokens ({format_size(host.chunk)}), {host.chunks:,} chunks, prompts of {host.context:,} tokens"
    )
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in COLUMNS[1:4] else "left")
    for row in found:
        table.add_row(*cells(row))
    console.print(table)
    console.print(verdict(found))
    table = Table("unit cost", "value", "from")
    for field in fields(costs):
        table.add_row(
            field.name, f"{getattr(costs, field.name):.4g}", "measured" if field.name in known else "stated"
        )
    console.print(table)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.simulate")
