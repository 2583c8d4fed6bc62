"""Writes `docs/metrics.md` from the table of metrics in the code; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from kvhost_server.cli import DEFAULT_METRICS
from kvhost_server.metrics import METRICS, MOST_NAMESPACES
from scripts.configuration_page import table
from scripts.generated import keep

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

TEXT = """\
# Metrics

This page is made from the code (`make docs`).

`kvhostd` serves HTTP on `{address}` (`--metrics HOST:PORT`, or `--metrics off`), for reading:

| path | what |
|---|---|
| `/metrics` | everything below, for Prometheus |
| `/livez` | 200 while the daemon's loop turns, from the first half second on |
| `/readyz` | 200 while engines are served; 503 while the pool is populated, and while draining |
| `/` | a page for people, complete without any other server |
| `/api/status.json` | what that page shows |

There is no login and no TLS: whoever reaches the address can read the names of models and engines, never
keys or bytes. On a loopback address only requests for `localhost`, `127.0.0.1` and `[::1]` are answered, so
that no web page of another site can read it. In a pod, `--metrics 0.0.0.0:{port}` lets probes and
Prometheus in.

![The web page of kvhostd](images/console.png)

Where the default port is taken, the daemon says so in its log and serves without; a port that was asked for
and is taken ends the start.

{metrics}

Every metric exists, with value 0, before first use; those by namespace once there is a namespace. The
{most} namespaces that use the most memory have series of their own; the totals count all. The usual metrics
of a process (`process_resident_memory_bytes`, `process_cpu_seconds_total`, `process_open_fds`, …) follow.
A histogram has `_bucket`, `_sum` and `_count`.
"""


def page() -> str:
    rows = [
        [
            f"`{metric.name}`",
            str(metric.kind),
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.meaning,
        ]
        for metric in METRICS
    ]
    return TEXT.format(
        address=DEFAULT_METRICS,
        port=DEFAULT_METRICS.rpartition(":")[2],
        metrics=table(("metric", "kind", "labels", "meaning"), rows),
        most=MOST_NAMESPACES,
    )


def main(arguments: list[str] | None = None) -> int:
    stale = "docs/metrics.md is not what the code says: run `make docs`"
    return keep(PAGE, page(), stale=stale, program="metrics_page", what=__doc__, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
