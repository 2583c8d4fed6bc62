"""What a benchmark run found: figures by key, tables and plots; kept as one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Figure:
    """One number of the result. `low` and `high` are the least and the greatest of its repetitions."""

    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Plot:
    """Lines of (x, y) points, by their label."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False


@dataclass(frozen=True)
class Table:
    """Rows for a person; everything in a cell is shown as `str`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass
class Report:
    """Filled by every benchmark of a run, in order."""

    figures: dict[str, Figure] = field(default_factory=dict)
    plots: dict[str, Plot] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def figure(self, key: str, values: float | Sequence[float], unit: str = "", note: str = "") -> float:
        """Records one number, or the median of repetitions with their spread; returns what was recorded."""
        each = [float(v) for v in values] if isinstance(values, Sequence) else [float(values)]
        middle = float(median(each))
        self.figures[key] = Figure(middle, unit, min(each), max(each), note)
        return middle

    def plot(self, name: str, plot: Plot) -> None:
        """Adds a plot; `name` becomes its file's name."""
        self.plots[name] = plot

    def table(self, name: str, table: Table) -> None:
        """Adds a table for the terminal."""
        self.tables[name] = table

    def skip(self, name: str, why: str) -> None:
        """Says what was not measured, and why, in one line."""
        self.skipped[name] = why

    def write(self, path: Path, machine: Mapping[str, object], date: str) -> None:
        """Writes `{"figures": {key: number}, "machine": …, "date": …, "details": …}`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "figures": {key: figure.value for key, figure in self.figures.items()},
            "machine": dict(machine),
            "date": date,
            "details": {key: asdict(figure) for key, figure in self.figures.items()},
            "tables": {name: asdict(table) for name, table in self.tables.items()},
            "skipped": self.skipped,
        }
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")
