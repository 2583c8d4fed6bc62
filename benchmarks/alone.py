"""Runs one benchmark by itself and prints what it found: `python -m benchmarks.NAME [--full]`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks import machine
from benchmarks.__main__ import show
from benchmarks.report import Report
from benchmarks.scale import Scale


def run_alone(measure: Callable[[Scale, Report], None]) -> None:
    """Measures and shows it; keeps nothing."""
    report = Report()
    before = machine.load()
    measure(Scale(full="--full" in sys.argv[1:]), report)
    show(report, {**machine.facts(), "load_before": before, "load_after": machine.load()})
