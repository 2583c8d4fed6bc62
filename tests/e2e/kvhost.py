"""What the end-to-end tests say to engines: how to use a daemon, and hands into a stepped engine."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.connector.plane import plane


def kv_transfer(
    socket: str, *, policy: str = "recompute", by_name: bool = False, **extra: Any
) -> dict[str, Any]:
    """Fields of KVTransferConfig. `by_name`: found by vLLM's plugin entry point alone.

    Waits are long: on a busy machine a test wants to see what is shared, not who was faster. Tests of
    deadlines give their own.
    """
    waits = {"deadline_ms": 5000, "attach_wait_ms": 30_000}
    where = {} if by_name else {"kv_connector_module_path": "kvhost_connector"}
    return {
        "kv_connector": "KVHostConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"socket": socket, **waits, **extra},
        **where,
    }


# The rest runs in the engine's own process (`Engine.call`).


def _worker_link() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().working._link


def corrupt_pool(engine: Any, _: list[Any]) -> int:
    """Flips every bit of every mapped segment; returns how many bytes that were."""
    mapping = _worker_link().mapping
    flipped = 0
    for segment in mapping._segments.values():
        size = segment.region.nbytes
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(segment.region.address))
        np.invert(array, out=array)
        flipped += size
    return flipped


def is_attached(engine: Any, _: list[Any]) -> bool:
    """Whether lookups of this engine can hit now."""
    return bool(engine.engine_core.engine_core.scheduler.connector.scheduling.board.usable)


def is_settled(engine: Any, _: list[Any]) -> bool:
    """Whether the daemon knows of all that this engine stored and released."""
    return bool(engine.engine_core.engine_core.scheduler.connector.scheduling.board.idle)


def open_transfers(engine: Any, _: list[Any]) -> int:
    """Loads and stores that no worker has reported yet."""
    return int(engine.engine_core.engine_core.scheduler.connector.scheduling.manager.open_transfers())


def fail_copies(engine: Any, arguments: list[Any]) -> None:
    """[direction, chunks, skip]: the next copies fail. The engine must have been started with the plane."""
    direction, chunks, skip = arguments
    plane.fail(direction, chunks, skip=skip)


def delay_copies(engine: Any, arguments: list[Any]) -> None:
    """[seconds]: each copy of a chunk takes up to so much longer."""
    (plane.delay_s,) = arguments


def failed_copies(engine: Any, _: list[Any]) -> int:
    return plane.failed
