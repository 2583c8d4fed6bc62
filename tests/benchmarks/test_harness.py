"""`python -m benchmarks`, with benchmarks that take no time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from benchmarks import __main__ as harness
from benchmarks import required
from benchmarks.report import Plot, Report, Table
from benchmarks.scale import Scale

ROOT = Path(__file__).resolve().parents[2]


def good(scale: Scale, report: Report) -> None:
    report.figure("lookup_1_vs_noop", [1.1, 1.0, 1.3])
    report.figure("form", 2 if scale.full else 1)
    report.plot("curve", Plot("A curve", "x", "y", {"one": [(1, 1), (2, 4)], "two": [(1, 2), (2, 2)]}))
    report.table("rows", Table("Rows", ("a", "b"), [(1, "two")]))
    report.skip("other side", "it is not installed")


def bad(scale: Scale, report: Report) -> None:
    raise RuntimeError("the daemon did not start\nand more lines")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, measure in (("good", good), ("bad", bad)):
        module = ModuleType(f"benchmarks.{name}")
        module.measure = measure  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
    monkeypatch.setattr(harness, "BENCHMARKS", {"bad": "fails", "good": "works"})


def run(output: Path, *arguments: str) -> Result:
    return CliRunner().invoke(harness.main, ["--output", str(output), *arguments])


@pytest.mark.usefixtures("benchmarks")
def test_one_benchmark_writes_figures_and_a_plot_and_no_latest_result(tmp_path: Path) -> None:
    result = run(tmp_path, "--only", "good")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "only-good.json").read_text())
    assert content["figures"] == {"lookup_1_vs_noop": 1.1, "form": 1}
    assert content["details"]["lookup_1_vs_noop"]["low"] == 1.0
    assert content["details"]["lookup_1_vs_noop"]["high"] == 1.3
    for fact in ("cpu", "cores", "memory_gib", "kernel", "python", "vllm", "torch", "grpcio", "load_before"):
        assert content["machine"][fact], fact
    assert re.match(r"20\d\d-\d\d-\d\dT", content["date"])
    assert content["skipped"] == {"other side": "it is not installed"}
    assert (tmp_path / "curve.svg").read_text().lstrip().startswith("<?xml")
    assert not (tmp_path / "latest.json").exists()
    # The table says whether a bound is met.
    assert re.search(r"lookup_1_vs_noop.*1\.1.*<= 1\.2.*yes", result.output)


@pytest.mark.usefixtures("benchmarks")
def test_a_failing_benchmark_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, "--full")
    assert result.exit_code == 1
    assert "failed: bad" in result.stderr
    content = json.loads((tmp_path / "latest.json").read_text())
    assert content["figures"]["form"] == 2
    assert content["skipped"]["bad"] == "failed: the daemon did not start"


@pytest.mark.usefixtures("benchmarks")
def test_json_on_standard_output_is_the_file(tmp_path: Path) -> None:
    result = run(tmp_path, "--only", "good", "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "only-good.json").read_text())


def test_an_unknown_name_gives_one_line_with_those_there_are(tmp_path: Path) -> None:
    result = run(tmp_path, "--only", "hoks")
    assert result.exit_code != 0
    [line] = result.output.splitlines()
    assert "'hoks'" in line
    assert "Did you mean 'hooks'?" in line
    assert all(name in line for name in harness.BENCHMARKS)
    assert not list(tmp_path.iterdir())


def test_help_teaches() -> None:
    command = [sys.executable, "-m", "benchmarks", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for word in ("--full", "--only", "--output", "--json", "Examples:", "latest.json", *harness.BENCHMARKS):
        assert word in result.stdout


def test_every_claim_stands_in_the_page_with_its_bound_and_what_would_refute_it() -> None:
    page = (ROOT / "docs" / "claims.md").read_text()
    rows = {
        cells[1].strip("` "): [cell.strip() for cell in cells]
        for line in page.splitlines()
        if line.startswith("| ") and len(cells := line.strip("|").split("|")) == 4
    }
    for bound in required.BOUNDS:
        assert bound.key in rows, f"docs/claims.md lacks {bound.key}"
        assert rows[bound.key][2] == bound.text.replace("<=", "at most").replace(">=", "at least"), bound.key
        target = "make bench-peers" if bound.benchmark == "peers" else f"make bench ONLY={bound.benchmark}"
        assert rows[bound.key][3] == f"`{target}`", bound.key
        assert bound.benchmark == "peers" or bound.benchmark in harness.BENCHMARKS


def test_a_kept_result_has_only_figures_that_are_explained() -> None:
    path = ROOT / "benchmarks" / "results" / "latest.json"
    figures = json.loads(path.read_text())["figures"] if path.exists() else {}
    assert all(isinstance(value, int | float) for value in figures.values())
