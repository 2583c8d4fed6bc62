"""The command: which benchmarks there are, running them, and showing what they found."""

from __future__ import annotations

import difflib
import importlib
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks import machine
from benchmarks.plots import NoPlots, draw
from benchmarks.report import Figure, Report
from benchmarks.required import BOUNDS, BY_KEY
from benchmarks.scale import Scale

RESULTS = Path(__file__).parent / "results"

# In this order: what is sensitive to a warm machine comes first, the long replays last.
BENCHMARKS: dict[str, str] = {
    "lookup": "lookups of 1 to 8192 hashes through the client, and what the scheduler sees of them",
    "copying": "store and load of a GiB in slots of many sizes, beside memcpy",
    "daemon": "start, idle cost, requests per second, and what many chunks change",
    "hit_rate": "eviction policies on public request traces",
    "hooks": "time inside the scheduler's hooks of a real engine, beside vLLM's own manager",
    "end_to_end": "time to first token after a restart; throughput when nothing can be reused",
    "traces": "multi-turn replay of public request traces on a real engine (full form only)",
}

EPILOG = f"""\b
Benchmarks:
{chr(10).join(f"  {name:<11} {what}" for name, what in BENCHMARKS.items())}

\b
Examples:
  python -m benchmarks                       the short form, all of them: 5 to 6 minutes on two cores
  python -m benchmarks --full                every size, every replay
  python -m benchmarks --only hooks,lookup
  python -m benchmarks --only lookup --json | jq .figures

Every comparison takes its two sides in turns within one run; a figure is the median of its
repetitions, with the least and the greatest beside it. Run it on a quiet machine: load averages are
part of the result. The exit code is 1 when a benchmark failed, whatever the figures say."""


def chosen(named: tuple[str, ...]) -> tuple[str, ...]:
    """Names of benchmarks in the order in which they run; all without a name. Raises `click.ClickException`
    with one line for a name that is none."""
    names = [name for part in named for name in part.split(",")] or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            near = difflib.get_close_matches(name, BENCHMARKS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.ClickException(
                f"there is no benchmark {name!r}.{hint} There are: {', '.join(BENCHMARKS)}"
            )
    return tuple(name for name in BENCHMARKS if name in names)


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--full", is_flag=True, help="Measure every size (an hour, about) instead of the short form.")
@click.option(
    "--only",
    "named",
    multiple=True,
    metavar="NAME",
    help="Run this one; may be repeated, or several with commas.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    metavar="DIR",
    help="Where results and plots go. [default: benchmarks/results]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables.")
def main(full: bool, named: tuple[str, ...], output: Path, as_json: bool) -> None:
    """Measures what kvhost costs and what it brings.

    Results go to DIR/latest.json, plots to DIR/*.svg. With --only the result goes to DIR/only-NAMES.json,
    so that a partial run never stands in for a whole one.
    """
    names = chosen(named)
    report, scale = Report(), Scale(full=full)
    before, started = machine.load(), time.monotonic()
    failed = run(names, scale, report)
    facts = {
        **machine.facts(),
        "form": "full" if full else "short",
        "load_before": before,
        "load_after": machine.load(),
        "seconds": round(time.monotonic() - started),
    }
    path = output / (f"only-{'+'.join(names)}.json" if named else "latest.json")
    for name, plot in report.plots.items():
        try:
            draw(plot, output / f"{name}.svg")
        except NoPlots as error:
            report.skip("plots", str(error))
            break
    report.write(path, facts, datetime.now(UTC).isoformat(timespec="seconds"))
    if as_json:
        click.echo(path.read_text(), nl=False)
    else:
        show(report, facts)
    say(f"results: {path}")
    if failed:
        say(f"failed: {', '.join(failed)}")
        sys.exit(1)


def run(names: tuple[str, ...], scale: Scale, report: Report) -> list[str]:
    """Runs benchmarks in turn; returns those that failed. One that fails does not stop the others."""
    failed = []
    for number, name in enumerate(names, 1):
        say(f"{name} ({number} of {len(names)}): {BENCHMARKS[name]}")
        started = time.monotonic()
        try:
            importlib.import_module(f"benchmarks.{name}").measure(scale, report)
        except Exception as error:
            failed.append(name)
            traceback.print_exc()
            report.skip(name, f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        say(f"{name}: {time.monotonic() - started:.0f} s")
    return failed


def say(line: str) -> None:
    """Progress, for whoever waits; results go to standard output."""
    click.echo(f"benchmarks: {line}", err=True)


def show(report: Report, facts: dict[str, object]) -> None:
    """Tables on the terminal."""
    # A file has no width of its own.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    for described in report.tables.values():
        table = RichTable(title=described.title, title_justify="left")
        for column in described.columns:
            table.add_column(column)
        for row in described.rows:
            table.add_row(*map(str, row))
        console.print(table)
    table = RichTable(title="Figures", title_justify="left")
    for column in ("figure", "value", "least to greatest", "must be", "met", "what"):
        table.add_column(column, justify="left" if column in ("figure", "what") else "right")
    required = [bound.key for bound in BOUNDS if bound.key in report.figures]
    for key in [*required, *(key for key in report.figures if key not in BY_KEY)]:
        figure, bound = report.figures[key], BY_KEY.get(key)
        table.add_row(
            key,
            f"{figure.value:.4g}{figure.unit and ' '}{figure.unit}",
            spread(figure),
            bound.text if bound else "",
            ("yes" if bound.met(figure.value) else "[bold red]no[/]") if bound else "",
            bound.what if bound else figure.note,
        )
    console.print(table)
    for name, why in report.skipped.items():
        console.print(f"not measured: {name}: {why}", markup=False)
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, kernel {facts['kernel']}; "
        f"load {facts['load_before']} before, {facts['load_after']} after",
        markup=False,
    )


def spread(figure: Figure) -> str:
    if figure.low is None or figure.high is None or figure.low == figure.high:
        return ""
    return f"{figure.low:.4g} to {figure.high:.4g}"


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
