"""The connector's metrics, as vLLM's native half exports them beside its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvhost_connector.metadata import WorkerReport
from kvhost_connector.orders import Counters

PREFIX = "vllm:kvhost_"
ATTACHED = f"{PREFIX}usable"
WORKERS = f"{PREFIX}workers"

LABELS = ("platform", "memory", "copies_by")

Gauges = Mapping[tuple[str, tuple[str, ...]], float]
"""Values by name of the metric and its labels."""

_COUNTERS = {
    "lookups": "Questions about stored chunks sent to kvhostd.",
    "lookup_deadlines": "Requests computed because kvhostd did not answer a lookup in time.",
    "pin_deadlines": "Requests computed because kvhostd did not confirm a hold in time.",
    "late_pins_given_back": "Holds on chunks that came too late to be used and were given back.",
    "grants_given_back": "Slots that were granted ahead and given back unused.",
    "stores_without_grant": "Times that a chunk could not be stored yet because no slot was granted.",
    "failed_loads": "Loads that were reported failed.",
    "failed_stores": "Stores that were given up.",
    "refused_updates": "Changes that kvhostd refused.",
    "failed_calls": "Calls to kvhostd that failed or timed out.",
    "attached": "Sessions opened with kvhostd.",
}


def metric_definitions() -> dict[str, Any]:
    """Name to vLLM's description of the metric. All exist, with value 0, before first use."""
    counters = {
        f"{PREFIX}{name}": OffloadingCounterMetadata(documentation=_COUNTERS[name]) for name in Counters.NAMES
    }
    usable = "1 while lookups can hit and chunks can be stored, 0 while the engine runs without kvhostd."
    workers = (
        "Workers of this engine by platform, and by what their memory of the cache is: host, or, where a "
        "device copies, pinned, unpinned, off or waiting; copies_by says what moves the bytes."
    )
    return {
        **counters,
        ATTACHED: OffloadingGaugeMetadata(documentation=usable),
        WORKERS: OffloadingGaugeMetadata(documentation=workers, labelnames=LABELS),
    }


def count_workers(reports: Iterable[WorkerReport], known: Gauges) -> dict[tuple[str, tuple[str, ...]], float]:
    """The gauges of these workers; those in `known` that none of them is in any more are 0."""
    counts: dict[tuple[str, tuple[str, ...]], float] = dict.fromkeys(known, 0)
    for report in reports:
        place = WORKERS, (report.platform, report.memory, report.copies_by)
        counts[place] = counts.get(place, 0) + 1
    return counts


def collect(counters: Counters, usable: bool, gauges: Gauges) -> Any:
    """vLLM's statistics object with what was counted since the last call, and these gauges."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

    stats = OffloadingConnectorStats()
    for name, count in counters.take().items():
        stats.increase_counter(f"{PREFIX}{name}", count)
    stats.set_gauge(ATTACHED, int(usable))
    for (name, labels), value in gauges.items():
        stats.set_gauge(name, value, labels)
    return stats
