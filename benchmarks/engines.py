"""Engines of the benchmarks: started side by side, ended together, with kvhost as its documentation says."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from tests.e2e.engine import Engine
from tests.support.waiting import wait_for


def kv_transfer(socket: str, **extra: Any) -> dict[str, Any]:
    """Fields of KVTransferConfig: the socket, and whatever shall not have its default."""
    return {
        "kv_connector": "KVHostConnector",
        "kv_connector_module_path": "kvhost_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket, **extra},
    }


def start(stack: ExitStack, engines: Mapping[str, Engine]) -> None:
    """Starts all of them at once; they end with the stack."""
    for engine in engines.values():
        engine.launch()
        stack.callback(engine.close)
    for engine in engines.values():
        engine.wait_ready()


def drive(
    engine: Engine, prompts: list[list[int]], lengths: list[int], at_a_time: int, arrivals: int = 1_000_000
) -> dict[str, Any]:
    """`probe.drive` in a stepped engine."""
    result: dict[str, Any] = engine.call(
        "benchmarks.probe:drive", prompts, lengths, at_a_time, arrivals, deadline_s=600
    )
    return result


def wait_usable(engine: Engine) -> None:
    """Returns once the engine's cache can be used. A request must have been asked before: it attaches."""
    wait_for(lambda: engine.call("benchmarks.probe:usable"), 30, "a cache that can be used")


def forget(engine: Engine) -> None:
    """Empties the device's cache: what hits next comes from elsewhere."""
    if not engine.reset_prefix_cache():
        raise RuntimeError("the device's cache could not be emptied: requests were still running")
