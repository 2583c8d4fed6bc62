"""Writes `deploy/grafana/dashboards/kvhost.json`, a row for each of five questions; `--check` only compares.

Is it up, is it full, does it hit, is it slow, who uses it?
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.generated import keep

FILE = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards" / "kvhost.json"
HERE = 'job="$job", instance=~"$instance"'
"""The label matchers of every expression."""
_WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One picture.

    `series`: (expression, legend). `thresholds`: colours from a value on; a stat is coloured by them.
    """

    title: str
    series: Sequence[tuple[str, str]]
    unit: str
    about: str
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    thresholds: Sequence[tuple[float | None, str]] = ((None, "green"),)
    names: Sequence[tuple[str, str]] = ()
    """Values shown as words."""


def _ratio(hit: str, miss: str, by: str = "") -> str:
    rates = [f"sum{by} (rate({name}{{{HERE}}}[$__rate_interval]))" for name in (hit, miss)]
    return f"{rates[0]} / ({rates[0]} + {rates[1]})"


def _slowest(metric: str, by: str, more: str = "") -> str:
    return f"histogram_quantile(0.99, sum by ({by}, le) (rate({metric}{{{HERE}{more}}}[$__rate_interval])))"


def _rate(metric: str, by: str = "instance") -> str:
    return f"sum by ({by}) (rate({metric}{{{HERE}}}[$__rate_interval]))"


_MODEL = "* on (job, instance, namespace) group_left (model, digest) kvhost_namespace_info{" + HERE + "}"

ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "Is it up?",
        (
            Panel(
                "State",
                [
                    (
                        " + ".join(
                            f'{weight} * sum by (instance) (kvhost_state{{{HERE}, state="{state}"}})'
                            for weight, state in enumerate(("serving", "starting", "draining"), 1)
                        ),
                        "{{instance}}",
                    )
                ],
                "none",
                "What each daemon does now. Starting: the pool is being populated. Draining: what is stored "
                "can be read, nothing new is stored.",
                kind="stat",
                width=6,
                thresholds=((None, "red"), (1, "green"), (2, "blue"), (3, "orange")),
                names=(("1", "serving"), ("2", "starting"), ("3", "draining")),
            ),
            Panel(
                "Answers scrapes",
                [(f"min by (instance) (up{{{HERE}}})", "{{instance}}")],
                "none",
                "Red: Prometheus could not read the metrics. Engines compute meanwhile.",
                kind="stat",
                width=6,
                thresholds=((None, "red"), (1, "green")),
                names=(("0", "no"), ("1", "yes")),
            ),
            Panel(
                "Up for",
                [(f"time() - kvhost_start_time_seconds{{{HERE}}}", "{{instance}}")],
                "s",
                "A daemon that starts begins with an empty cache.",
                kind="stat",
                width=6,
            ),
            Panel(
                "Anomalies in this range",
                [
                    (
                        "sum by (kind) (increase(kvhost_anomalies_total"
                        f'{{{HERE}, kind!="loop_late"}}[$__range])) > 0',
                        "{{kind}}",
                    )
                ],
                "none",
                "What should not happen. After an engine was killed, quarantined_slots is no surprise.",
                kind="stat",
                width=6,
                thresholds=((None, "green"), (1, "orange")),
            ),
        ),
    ),
    (
        "Is it full?",
        (
            Panel(
                "Memory of the pool",
                [
                    (f"sum (kvhost_used_bytes{{{HERE}}})", "stored"),
                    (f"sum (kvhost_reserved_bytes{{{HERE}}})", "granted"),
                    (f"sum (kvhost_quarantined_bytes{{{HERE}}})", "in quarantine"),
                    (f"sum (kvhost_capacity_bytes{{{HERE}}})", "capacity"),
                ],
                "bytes",
                "A full pool is the normal state of a cache: what was used longest ago makes room. Capacity "
                "is the pool as it is; what was asked for may be more.",
                width=12,
            ),
            Panel(
                "Cannot be evicted now",
                [
                    (f"sum (kvhost_pinned_bytes{{{HERE}}})", "pinned"),
                    (f"sum (kvhost_reserved_bytes{{{HERE}}})", "granted"),
                    (f"sum (kvhost_quarantined_bytes{{{HERE}}})", "in quarantine"),
                ],
                "bytes",
                "Held by engines. Quarantine that stays: worker processes of a session that is over are "
                "alive and silent.",
                width=12,
                stacked=True,
            ),
            Panel(
                "Evictions",
                [(_rate("kvhost_evictions_total", "cause"), "{{cause}}")],
                "ops",
                "Chunks a second, by why: room in their own namespace, a segment that went to another one, a "
                "lower limit, an operator.",
            ),
            Panel(
                "Age at eviction",
                [
                    (
                        "histogram_quantile(0.5, sum by (le) "
                        f"(rate(kvhost_eviction_age_seconds_bucket{{{HERE}}}[$__rate_interval])))",
                        "half are older than",
                    )
                ],
                "s",
                "How long ago what is evicted was last used. Minutes: more memory would give more hits.",
            ),
            Panel(
                "Refused",
                [(_rate("kvhost_refusals_total", "reason"), "{{reason}}")],
                "ops",
                "no_space: everything is held. grant_bound, pin_bound: one engine wants more than its share.",
            ),
        ),
    ),
    (
        "Does it hit?",
        (
            Panel(
                "Tokens found",
                [(_ratio("kvhost_lookup_hit_tokens_total", "kvhost_lookup_miss_tokens_total"), "hit ratio")],
                "percentunit",
                "Of the tokens that engines looked up. What an engine still has on its device it does not "
                "look up.",
            ),
            Panel(
                "Tokens found, by model",
                [
                    (
                        "("
                        + _ratio(
                            "kvhost_namespace_lookup_hit_tokens_total",
                            "kvhost_namespace_lookup_miss_tokens_total",
                            " by (job, instance, namespace)",
                        )
                        + f") {_MODEL}",
                        "{{model}} {{digest}}",
                    )
                ],
                "percentunit",
                "One line a namespace. Two lines of one model: engines that do not share, see kvhostctl "
                "namespaces.",
            ),
            Panel(
                "Bytes moved",
                [
                    (_rate("kvhost_load_bytes_total"), "loaded {{instance}}"),
                    (_rate("kvhost_commit_bytes_total"), "stored {{instance}}"),
                ],
                "Bps",
                "What engines were given to load, and what they stored.",
            ),
        ),
    ),
    (
        "Is it slow?",
        (
            Panel(
                "Calls of engines, slowest in a hundred",
                [
                    (
                        _slowest(
                            "kvhost_rpc_duration_seconds_bucket",
                            "method",
                            ', service="Cache", method!~"OpenSession|Watch"',
                        ),
                        "{{method}}",
                    )
                ],
                "s",
                "Time in the daemon. A request gives up after the connector's deadline_ms (100 ms by "
                "default) and computes.",
                thresholds=((None, "green"), (0.05, "orange")),
            ),
            Panel(
                "Lag of the event loop",
                [(_slowest("kvhost_loop_lag_seconds_bucket", "instance"), "{{instance}}")],
                "s",
                "How late the daemon gets a processor. Above some 10 ms it competes with others for one.",
            ),
            Panel(
                "Failed calls and dropped messages",
                [
                    (_rate("kvhost_rpc_failures_total", "method"), "{{method}} failed"),
                    (_rate("kvhost_drops_total", "kind"), "{{kind}} dropped"),
                ],
                "ops",
                "Dropped: somebody read too slowly and starts anew.",
            ),
        ),
    ),
    (
        "Who uses it?",
        (
            Panel(
                "Memory by model",
                [(f"kvhost_namespace_used_bytes{{{HERE}}} {_MODEL}", "{{model}} {{digest}}")],
                "bytes",
                "What each namespace has stored.",
                width=8,
                stacked=True,
            ),
            Panel(
                "Engines and workers",
                [
                    (f"kvhost_sessions{{{HERE}}}", "engines {{instance}}"),
                    (f"kvhost_mappings{{{HERE}}}", "worker processes {{instance}}"),
                ],
                "none",
                "Connected now. Each engine has a worker process for each rank.",
            ),
            Panel(
                "Engines without their cache",
                [("1 - vllm:kvhost_usable", "{{instance}}")],
                "none",
                "1: this vLLM computes everything. From vLLM's own metrics.",
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "uid": "kvhost",
        "title": "kvhost",
        "tags": ["kvhost", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                _variable("job", "label_values(kvhost_build_info, job)", several=False),
                _variable("instance", 'label_values(kvhost_build_info{job="$job"}, instance)', several=True),
            ]
        },
        "panels": list(_panels()),
    }


def _variable(name: str, query: str, *, several: bool) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": several,
        "includeAll": several,
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for question, panels in ROWS:
        yield {
            "id": number,
            "type": "row",
            "title": question,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1},
            "panels": [],
        }
        number, top, left = number + 1, top + 1, 0
        for panel in panels:
            height = 4 if panel.kind == "stat" else 8
            if left + panel.width > _WIDTH:
                top, left = top + height, 0
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            yield _panel(panel, number, place)
            number, left = number + 1, left + panel.width
        top += height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps = [{"value": value, "color": color} for value, color in panel.thresholds]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.names:
        words = {value: {"text": word, "index": n} for n, (value, word) in enumerate(panel.names)}
        defaults["mappings"] = [{"type": "value", "options": words}]
    if panel.stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for n, (expression, legend) in enumerate(panel.series)
        ],
    }


def expressions() -> list[str]:
    """All of them, as they would be asked for one daemon."""
    words = {"$__rate_interval": "1m", "$__range": "3h", "$job": "kvhost", "$instance": ".+"}
    found = []
    for _, panels in ROWS:
        for panel in panels:
            for expression, _ in panel.series:
                for name, value in words.items():
                    expression = expression.replace(name, value)  # noqa: PLW2901
                found.append(expression)
    return found


def main(arguments: list[str] | None = None) -> int:
    stale = f"{FILE.name} is not what scripts/dashboard.py says: run `make docs`"
    return keep(
        FILE,
        json.dumps(dashboard(), indent=2) + "\n",
        stale=stale,
        program="dashboard",
        what=__doc__,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
