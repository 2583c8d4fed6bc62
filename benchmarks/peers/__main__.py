"""`python -m benchmarks.peers`: kvhost and other caches take turns with the same bytes and the same lookups.

Each side is a process of its own with its servers beside it. In every round both sides store all blocks of
a KV cache and load them into other blocks; whoever was first is second in the next round. Processor time is
that of client and servers together. All bytes are checked after every load.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import click

from benchmarks import machine
from benchmarks.__main__ import RESULTS, show
from benchmarks.peers.driver import Round, Setting
from benchmarks.peers.environments import PEERS, NotInstallable, Peer, Variant, environment
from benchmarks.peers.process import Driver, DriverFailed
from benchmarks.report import Report, Table

GIB = 1 << 30
LAYERS, PAGE_BYTES, PER_REQUEST = 32, 64 << 10, 128
"""Blocks of 2 MiB; a request is a prompt of 2048 tokens."""
SIZES = (1, 64, 1024, 8192)
REPEAT = {1: 41, 64: 41, 1024: 15, 8192: 5}

EPILOG = f"""\b
Peers:
{chr(10).join(f"  {peer.name:<9} {peer.title}" for peer in PEERS)}

\b
Examples:
  python -m benchmarks.peers                    128 blocks of 2 MiB a round, the usual ways of each
  python -m benchmarks.peers --full             512 blocks, every way
  python -m benchmarks.peers --only lmcache

Each peer gets an environment of its own in the user's cache folder, from PyPI, on first use. One that
cannot be had here is skipped with a line that says why. The exit code is 1 when one that is there failed."""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--full", is_flag=True, help="512 blocks a round and every way, instead of the short form.")
@click.option("--only", "named", multiple=True, metavar="NAME", help="This peer; may be repeated.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    metavar="DIR",
    help="Where the result goes. [default: benchmarks/results]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables.")
def main(full: bool, named: tuple[str, ...], output: Path, as_json: bool) -> None:
    """Compares kvhost with other caches in one run.

    The result goes to DIR/peers.json, and its figures into DIR/latest.json where that is there.
    """
    peers = chosen(named)
    report = Report()
    before, started = machine.load(), time.monotonic()
    failed = compare(peers, full, report)
    facts = {
        **machine.facts(),
        "form": "full" if full else "short",
        "load_before": before,
        "load_after": machine.load(),
        "seconds": round(time.monotonic() - started),
    }
    path, date = output / "peers.json", datetime.now(UTC).isoformat(timespec="seconds")
    report.write(path, facts, date)
    if (output / "latest.json").exists():
        merge(path, output / "latest.json")
    if as_json:
        click.echo(path.read_text(), nl=False)
    else:
        show(report, facts)
    say(f"results: {path}")
    if failed:
        say(f"failed: {', '.join(failed)}")
        sys.exit(1)


def chosen(named: Sequence[str]) -> tuple[Peer, ...]:
    """Peers by name; all without one. Raises `click.ClickException` with one line for a name that is none."""
    names = [name for part in named for name in part.split(",")]
    known = [peer.name for peer in PEERS]
    for name in names:
        if name not in known:
            raise click.ClickException(f"there is no peer {name!r}. There are: {', '.join(known)}")
    return tuple(peer for peer in PEERS if not names or peer.name in names)


def merge(path: Path, latest: Path) -> None:
    """Adds the figures of one result to another one, with the machine and the date they are from."""
    added, whole = json.loads(path.read_text()), json.loads(latest.read_text())
    for part in ("figures", "details", "tables", "skipped"):
        whole.setdefault(part, {}).update(added[part])
    whole["peers"] = {"machine": added["machine"], "date": added["date"]}
    latest.write_text(json.dumps(whole, indent=1) + "\n")


def say(line: str) -> None:
    """Progress, for whoever waits."""
    click.echo(f"benchmarks.peers: {line}", err=True)


def compare(peers: Sequence[Peer], full: bool, report: Report) -> list[str]:
    """Measures all of them; returns those that are there and failed."""
    failed: list[str] = []
    copies: list[list[object]] = []
    lookups: list[list[object]] = []
    for peer in peers:
        try:
            python = environment(peer, say)
        except NotInstallable as error:
            report.skip(peer.name, str(error))
            say(f"{peer.name} skipped: {error}")
            continue
        tasks = [(variant, copying) for copying, variants in ((True, peer.copies), (False, peer.lookups))
                 for variant in peer.chosen(variants, full)]  # fmt: skip
        for variant, copying in tasks:
            what = "copies" if copying else "lookups"
            say(f"{variant.key}: {what}")
            try:
                if copying:
                    copies += compare_copies(peer, python, variant, full, report)
                else:
                    lookups += compare_lookups(peer, python, variant, full, report)
            except DriverFailed as error:
                failed.append(f"{variant.key} ({what})")
                report.skip(f"{variant.key}, {what}", f"failed: {error}")
                say(f"{variant.key}, {what} failed: {error}")
    if copies:
        columns = ("cache", "how", "store GB/s (first)", "load GB/s (first)", "CPU-s/GiB: store, load")
        report.table("peers_copies", Table("The same bytes, in turns; all bytes checked", columns, copies))
    if lookups:
        sizes = ("cache", "how", *(f"{size} chunks, ms" for size in SIZES))
        report.table("peers_lookups", Table("Lookups, all found; round trip, median", sizes, lookups))
    return failed


def compare_copies(
    peer: Peer, python: Path, variant: Variant, full: bool, report: Report
) -> list[list[object]]:
    """Rounds of stores and loads; the first of each side finds fresh memory and is not compared."""
    blocks = 512 if full else 128
    setting = Setting(LAYERS, PAGE_BYTES, blocks, PER_REQUEST)
    theirs_setting = Setting(LAYERS, PAGE_BYTES, blocks, PER_REQUEST, variant.setting)
    ours: list[Round] = []
    theirs: list[Round] = []
    with (
        Driver(Path(sys.executable), "kvhost", setting) as our_side,
        Driver(python, peer.driver, theirs_setting) as their_side,
    ):
        sides = [(ours, our_side), (theirs, their_side)]
        for number in range(6):
            for kept, side in sides if number % 2 else sides[::-1]:
                kept.append(side.round())
        rows = [
            ["kvhost", our_side.about, *_copied(ours, setting)],
            [variant.key, f"{peer.title}: {their_side.about}", *_copied(theirs, setting)],
        ]
    pairs = list(zip(ours, theirs, strict=True))[1:]
    nbytes, key, figure = setting.blocks * setting.block_bytes, variant.key, report.figure
    how = f"{blocks} x 2 MiB, {their_side.about}"
    figure(f"store_vs_{key}", [t.store_s / o.store_s for o, t in pairs], note=f"GB/s, ours / theirs; {how}")
    figure(f"load_vs_{key}", [t.load_s / o.load_s for o, t in pairs], note=f"GB/s, ours / theirs; {how}")
    figure(
        f"cpu_vs_{key}",
        [(o.store_cpu_s + o.load_cpu_s) / (t.store_cpu_s + t.load_cpu_s) for o, t in pairs],
        note=f"processor time of a store and a load, ours / theirs; {how}",
    )
    figure(f"{key}_store_gb_s", [nbytes / 1e9 / t.store_s for _, t in pairs], "GB/s")
    figure(f"{key}_load_gb_s", [nbytes / 1e9 / t.load_s for _, t in pairs], "GB/s")
    return rows


def _copied(rounds: Sequence[Round], setting: Setting) -> list[object]:
    """Cells of one side."""
    nbytes = setting.blocks * setting.block_bytes
    store = [nbytes / 1e9 / each.store_s for each in rounds]
    load = [nbytes / 1e9 / each.load_s for each in rounds]
    cpu = [
        median(each) / (nbytes / GIB)
        for each in ([r.store_cpu_s for r in rounds[1:]], [r.load_cpu_s for r in rounds[1:]])
    ]
    return [
        f"{median(store[1:]):.2f} ({store[0]:.2f})",
        f"{median(load[1:]):.2f} ({load[0]:.2f})",
        f"{cpu[0]:.3f}, {cpu[1]:.3f}",
    ]


def compare_lookups(
    peer: Peer, python: Path, variant: Variant, full: bool, report: Report
) -> list[list[object]]:
    """Lookups of chunks that are all there, of 4 KiB each, so that 8192 of them are stored at once."""
    times: dict[str, dict[int, list[float]]] = {
        side: {size: [] for size in SIZES} for side in ("our", "their")
    }
    ours = Setting(1, 4096, max(SIZES), max(SIZES), "lookups")
    theirs = Setting(1, 4096, max(SIZES), max(SIZES), variant.setting)
    with (
        Driver(Path(sys.executable), "kvhost", ours) as our_side,
        Driver(python, peer.driver, theirs) as their_side,
    ):
        sides = [("our", our_side), ("their", their_side)]
        for side in (our_side, their_side):
            side.lookup(max(SIZES), 1)  # what is stored, and what is slow only once
        for number in range(6 if full else 3):
            for size in SIZES:
                for name, side in sides if number % 2 else sides[::-1]:
                    times[name][size].append(side.lookup(size, REPEAT[size]))
    for size in SIZES:
        each = [o / t for o, t in zip(times["our"][size], times["their"][size], strict=True)]
        report.figure(f"lookup_{size}_vs_{variant.key}", each, note="round trip, ours / theirs")
        report.figure(f"{variant.key}_lookup_{size}_ms", [1e3 * t for t in times["their"][size]], "ms")

    def cells(name: str) -> list[object]:
        return [f"{1e3 * median(times[name][size]):.3f}" for size in SIZES]

    return [
        ["kvhost", our_side.about, *cells("our")],
        [variant.key, f"{peer.title}: {their_side.about}", *cells("their")],
    ]


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.peers")
