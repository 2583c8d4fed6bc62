"""`kvhostctl top`: who uses the cache and whether it hits, live."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from kvhost_client.commands import YES, Options, with_json

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from kvhost_proto.v1 import admin_pb2

_BAR = 40
_RECENT = 5
_WIDTH_IN_PIPES = 160
_NO_COUNT = "loop_lag_max_us"


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=3600.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--count", type=click.IntRange(min=1), help="End after so many looks; without it, with Ctrl-C.")
@with_json
def top(options: Options, interval: float, count: int | None) -> int:
    """Who uses the cache, and does it hit: live.

    With --json one JSON document a line for each look.
    """
    from rich.console import Console
    from rich.live import Live

    live = sys.stdout.isatty() and not options.json
    console = Console(highlight=False, width=None if live else _WIDTH_IN_PIPES)
    with options.admin() as admin, Live(console=console, screen=live, auto_refresh=False) as screen:
        before, began = admin.status(), time.monotonic()
        looks = 0
        while count is None or looks < count:
            time.sleep(interval)
            now, at = admin.status(), time.monotonic()
            rates = rates_between(before, now, at - began)
            if options.json:
                print(json.dumps(rates), flush=True)
            elif live:
                screen.update(page(now, rates), refresh=True)
            else:
                console.print(page(now, rates))
            before, began = now, at
            looks += 1
    sys.stdout.flush()
    return YES


def rates_between(
    before: admin_pb2.StatusReply, now: admin_pb2.StatusReply, seconds: float
) -> dict[str, Any]:
    """What happened between two looks, in things a second."""
    former = {one.number: one for one in before.namespaces}
    same_boot = before.boot_id == now.boot_id

    def rate(name: str) -> float:
        grown = now.counters[name] - (before.counters[name] if same_boot else 0)
        return max(0.0, grown / seconds)

    namespaces = []
    for one in now.namespaces:
        old = former.get(one.number) if same_boot else None
        grown = {
            name: count - (old.counters[name] if old is not None else 0)
            for name, count in one.counters.items()
        }
        looked = grown.get("hit_tokens", 0) + grown.get("miss_tokens", 0)
        slot = one.slot_bytes
        namespaces.append(
            {
                "number": one.number,
                "model": one.model,
                "used_bytes": one.chunks * slot,
                "capacity_bytes": one.segments * now.memory.segment_bytes,
                "sessions": one.sessions,
                "lookups_per_s": grown.get("queries", 0) / seconds,
                "hit_ratio": grown.get("hit_tokens", 0) / looked if looked else None,
                "loaded_bytes_per_s": grown.get("pinned_chunks", 0) * slot / seconds,
                "stored_bytes_per_s": grown.get("committed_chunks", 0) * slot / seconds,
                "evicted_per_s": grown.get("evicted", 0) / seconds,
            }
        )
    return {
        "state": now.state,
        "uptime_s": now.uptime_s,
        "used_bytes": now.memory.used_bytes,
        "capacity_bytes": now.memory.capacity_bytes,
        "sessions": len(now.sessions),
        "no_space_per_s": rate("no_space"),
        "bound_reached_per_s": rate("bound_reached"),
        "anomalies": {
            name: count for name, count in sorted(now.anomalies.items()) if count and name != _NO_COUNT
        },
        "namespaces": namespaces,
    }


def page(now: admin_pb2.StatusReply, rates: dict[str, Any]) -> Group:
    """One look as a person sees it."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from kvhost_client.tables import age, printable, size, state_name

    memory = now.memory
    head = Text(
        f"{now.version.program}  {state_name(now.state)}  up {age(now.uptime_s)}  "
        f"{len(now.sessions)} sessions  {len(now.namespaces)} namespaces",
        style="bold",
    )
    pool = _bar(memory.used_bytes, memory.capacity_bytes).append(
        f"  {size(memory.used_bytes)} of {size(memory.capacity_bytes)}, {size(memory.pinned_bytes)} pinned, "
        f"{size(memory.granted_bytes)} being written, {size(memory.quarantined_bytes)} quarantined"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "namespace",
        "model",
        "engines",
        "used",
        "lookups/s",
        "hits",
        "loaded/s",
        "stored/s",
        "evicted/s",
    ):
        table.add_column(name, justify="left" if name in ("namespace", "model") else "right", overflow="fold")
    for one in sorted(rates["namespaces"], key=lambda each: -each["used_bytes"]):
        hits = "" if one["hit_ratio"] is None else f"{one['hit_ratio']:.0%}"
        table.add_row(
            str(one["number"]),
            printable(one["model"]),
            str(one["sessions"]),
            size(one["used_bytes"]),
            f"{one['lookups_per_s']:.1f}",
            hits,
            size(int(one["loaded_bytes_per_s"])),
            size(int(one["stored_bytes_per_s"])),
            f"{one['evicted_per_s']:.1f}",
        )
    lines: list[Text | Table] = [head, pool, table]
    for run in list(now.evictions)[-_RECENT:][::-1]:
        taker = f" for namespace {run.taker}" if run.taker and run.taker != run.namespace_number else ""
        lines.append(
            Text(
                f"{age(run.ended_s)} ago: {run.chunks} chunks of namespace {run.namespace_number} evicted "
                f"({run.cause}{taker}), unused for {age(run.youngest_s)} to {age(run.oldest_s)}",
                style="dim",
            )
        )
    if rates["anomalies"]:
        told = ", ".join(f"{name} {count}" for name, count in rates["anomalies"].items())
        lines.append(Text(f"anomalies: {told}", style="yellow"))
    return Group(*lines)


def _bar(part: int, whole: int) -> Text:
    from rich.text import Text

    filled = round(_BAR * part / whole) if whole else 0
    return Text("█" * filled, style="cyan").append("░" * (_BAR - filled), style="dim")
