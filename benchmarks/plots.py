"""Plots as SVG files, one for each that a benchmark described."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import Plot

COLOURS = ("#1b6ca8", "#d1495b", "#5a8f29", "#8d5fd3", "#e07a1f", "#3aa6a0", "#7a7a7a")
MARKERS = ("o", "s", "^", "D", "v", "P", "x")


class NoPlots(Exception):
    """matplotlib is not installed; the message says how to get it."""


def draw(plot: Plot, path: Path) -> None:
    """Writes one plot. Raises `NoPlots`."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoPlots("plots need matplotlib, which is not installed: make setup installs it") from error
    matplotlib.use("Agg")
    # The same result gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "kvhost"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    try:
        for number, (label, points) in enumerate(plot.lines.items()):
            many = len(points) > 40
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                label=label,
                color=COLOURS[number % len(COLOURS)],
                marker="" if many else MARKERS[number % len(MARKERS)],
                linewidth=1.6,
                markersize=4,
            )
        if plot.log_x:
            axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(plot.lines) > 1:
            axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    finally:
        pyplot.close(figure)
