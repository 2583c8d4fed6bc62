"""The connector's metrics, as vLLM's native half exports them beside its own."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvhost_connector.orders import Counters

PREFIX = "vllm:kvhost_"
ATTACHED = f"{PREFIX}usable"

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
    return {**counters, ATTACHED: OffloadingGaugeMetadata(documentation=usable)}


def collect(counters: Counters, usable: bool) -> Any:
    """vLLM's statistics object with what was counted since the last call."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

    stats = OffloadingConnectorStats()
    for name, count in counters.take().items():
        stats.increase_counter(f"{PREFIX}{name}", count)
    stats.set_gauge(ATTACHED, int(usable))
    return stats
