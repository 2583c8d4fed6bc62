"""Dashboard, alerts and runbook: they name metrics that the daemon has, and each other."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvhost_connector.orders import Counters
from scripts import dashboard
from tests.support import Daemon
from tests.support.tools import tool

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "kvhost.rules.yml"
RUNBOOK = ROOT / "docs" / "runbook.md"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
EXPRESSIONS = [*(alert["expr"] for alert in ALERTS), *dashboard.expressions()]
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def samples() -> Iterator[list[tuple[str, dict[str, str]]]]:
    """Name and labels of every sample of a fresh daemon."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Daemon("4MiB", ["--metrics", f"127.0.0.1:{port}"]):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        text = opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = []
    for line in lines:
        name, labels = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+", line).groups()  # type: ignore[union-attr]
        found.append((name, dict(re.findall(r'(\w+)="([^"]*)"', labels or ""))))
    yield found


def promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [tool("promtool"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Every metric that an expression names, with its matchers of equality and of alternatives."""
    for name, matchers in re.findall(r"\b((?:kvhost_|vllm:)\w+)(?:\{([^}]*)\})?", expression):
        yield name, dict(re.findall(r'(\w+)=~?"([^"]*)"', matchers))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_that_is_asked_for_exists(
    expression: str, samples: list[tuple[str, dict[str, str]]]
) -> None:
    names = {name for name, _ in samples}
    of_namespaces = re.compile(r"kvhost_namespace_")
    named = list(selectors(expression))
    assert named or expression.startswith(("up{", "min by (instance) (up{"))
    for name, matchers in named:
        if name.startswith("vllm:"):
            assert name.removeprefix("vllm:kvhost_") in (*Counters.NAMES, "usable")
            continue
        if of_namespaces.match(name):
            # They have samples once there is a namespace: the daemon's table has their names.
            from kvhost_server.metrics import METRICS

            assert name in {metric.name for metric in METRICS}
            continue
        assert name in names
        for label, value in matchers.items():
            if label not in ("job", "instance"):
                seen = {labels.get(label) for found, labels in samples if found == name}
                assert set(value.split("|")) & seen, (
                    f"{name} has no {label} like {value}: {sorted(map(str, seen))}"
                )


def test_alternatives_of_an_alert_all_exist(samples: list[tuple[str, dict[str, str]]]) -> None:
    for alert in ALERTS:
        for name, matchers in selectors(alert["expr"]):
            for label, value in matchers.items():
                if not name.startswith("vllm:") and label not in ("job", "instance"):
                    seen = {labels.get(label) for found, labels in samples if found == name}
                    assert set(value.split("|")) <= seen, alert["alert"]


def test_the_dashboard_is_what_the_script_says_and_prometheus_can_read_it(tmp_path: Path) -> None:
    assert dashboard.main(["--check"]) == 0
    rules = [{"record": f"panel:{n}", "expr": text} for n, text in enumerate(dashboard.expressions())]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", str(file), folder=tmp_path)
    assert checked.returncode == 0, checked.stderr


def test_the_dashboard_answers_five_questions() -> None:
    panels = json.loads(dashboard.FILE.read_text())["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [
        "Is it up?",
        "Is it full?",
        "Does it hit?",
        "Is it slow?",
        "Who uses it?",
    ]
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    taken: set[tuple[int, int]] = set()
    for x, y, width, height in places:
        cells = {(column, row) for column in range(x, x + width) for row in range(y, y + height)}
        assert x + width <= 24
        assert not cells & taken
        taken |= cells
    assert all(panel["description"] for panel in panels if panel["type"] != "row")


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """promtool's own simulation, of a healthy daemon and of each fault."""
    for file in (RULES, Path(__file__).with_name("alerts_test.yml")):
        (tmp_path / file.name).write_text(file.read_text())
    ran = promtool("test", "rules", "alerts_test.yml", folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    text = (tmp_path / "alerts_test.yml").read_text()
    for alert in ALERTS:
        assert len(re.findall(rf"\b{alert['alert']}\b", text)) == 2, f"{alert['alert']} is not simulated"


def test_prometheus_takes_the_configuration() -> None:
    checked = promtool("check", "config", "prometheus.yml", folder=PROMETHEUS)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_has_its_section_in_the_runbook() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections == [alert["alert"] for alert in ALERTS]
    for alert in ALERTS:
        assert alert["annotations"]["runbook_url"].endswith(f"/runbook/#{alert['alert'].lower()}")
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        section = RUNBOOK.read_text().split(f"## {alert['alert']}\n")[1].split("\n## ")[0]
        for part in ("**Meaning.**", "**Look here.**", "**Do this.**"):
            assert part in section, alert["alert"]
