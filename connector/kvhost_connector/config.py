"""The connector's settings: the keys of `kv_connector_extra_config`, in one table, checked once.

A key that is not in the table, or a value of the wrong kind, is an error of one line that names what was
found and what is allowed: a misspelt key must not silently mean its default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

SPEC_NAME = "KVHostSpec"
SPEC_MODULE = "kvhost_connector.spec"

SOCKET_VARIABLE = "KVHOST_SOCKET"
DEFAULT_SOCKET = "/run/kvhost/kvhostd.sock"


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line."""


class Pin(StrEnum):
    """What becomes of segments on a platform with a device driver."""

    AUTO = "auto"
    REQUIRED = "required"
    OFF = "off"


class HostMemory(StrEnum):
    """The host memory that JAX's transfers go through on a TPU."""

    AUTO = "auto"
    PINNED = "pinned_host"
    UNPINNED = "unpinned_host"
    RUNTIME = "runtime"


class CopyBy(StrEnum):
    """What copies blocks where the processor does."""

    AUTO = "auto"
    NATIVE = "native"
    NUMPY = "numpy"


@dataclass(frozen=True)
class Key:
    """One key of `kv_connector_extra_config`. `default` None means: see `meaning`."""

    name: str
    allowed: str
    default: Any
    meaning: str
    parse: Callable[[Any], Any]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _socket(value: Any) -> str:
    if not isinstance(value, str) or not value.removeprefix("unix:"):
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    # "false" is a true string: only JSON's own booleans are taken.
    if not isinstance(value, bool):
        raise TypeError
    return value


def _pin(value: Any) -> Pin:
    try:
        return Pin(value)
    except ValueError:
        raise TypeError from None


def _host_memory(value: Any) -> HostMemory:
    try:
        return HostMemory(value)
    except ValueError:
        raise TypeError from None


def _buckets(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise TypeError
    return tuple(_number(1, 4096)(size) for size in value)


def _copy_by(value: Any) -> CopyBy:
    try:
        return CopyBy(value)
    except ValueError:
        raise TypeError from None


def _number(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise TypeError
        return value

    return parse


KEYS: tuple[Key, ...] = (
    Key(
        "socket",
        "a path",
        None,
        f"Socket of kvhostd. Default: the environment's {SOCKET_VARIABLE}, else {DEFAULT_SOCKET}.",
        _socket,
    ),
    Key(
        "namespace",
        "a string",
        "",
        "Keeps engines apart that would share otherwise. Adds to what kvhost compares, never replaces it.",
        _text,
    ),
    Key(
        "weights_version",
        "a string",
        "",
        "Names the weights; stands in for the modification times of the weight files, so that copies share.",
        _text,
    ),
    Key(
        "deadline_ms",
        "a whole number from 1 to 10000",
        100,
        "How long a request waits for an answer of kvhostd before it is computed instead, in milliseconds.",
        _number(1, 10_000),
    ),
    Key(
        "attach_wait_ms",
        "a whole number from 0 to 60000",
        2000,
        "How long the first requests of a new engine wait for its workers to map the cache, in milliseconds; "
        "only while kvhostd answers.",
        _number(0, 60_000),
    ),
    Key(
        "copy_threads",
        "a whole number from 1 to 32",
        2,
        "Threads of each worker that copy between the engine's blocks and the cache, where no device does.",
        _number(1, 32),
    ),
    Key(
        "copy",
        '"auto", "native" or "numpy"',
        "auto",
        "What copies, where no device does: native, the compiled copying that is built when kvhost is "
        "installed with a C compiler there; numpy, at about half the speed; auto, the first of them that is "
        "there. With native and none built the engine runs without the cache.",
        _copy_by,
    ),
    Key(
        "pin",
        '"auto", "required" or "off"',
        "auto",
        "On GPUs: register the cache's memory with the driver, so that blocks move at full speed. With auto, "
        "transfers run unpinned where the driver refuses; with required, the engine runs without the cache "
        "then, and does not start where the driver cannot register memory at all; off does not try.",
        _pin,
    ),
    Key(
        "cross_layer_blocks",
        "true or false",
        False,
        "On GPUs: ask vLLM for a KV cache with all layers of a block side by side (BLHNC), so that a block "
        "is one copy. vLLM takes another layout where the attention backend has no such one.",
        _flag,
    ),
    Key(
        "staging_bytes",
        f"a whole number from 1 to {1 << 40}",
        None,
        "On TPUs: device memory that blocks on their way may take, in bytes on each device; it comes on top "
        "of what vLLM gives to the KV cache. Default: 256 MiB, or two blocks where these are more.",
        _number(1, 1 << 40),
    ),
    Key(
        "block_buckets",
        "a list of whole numbers from 1 to 4096",
        (1, 2, 4, 8, 16, 32, 64),
        "On TPUs: how many blocks one program moves; one program for each number and direction is compiled.",
        _buckets,
    ),
    Key(
        "compile_ahead",
        "true or false",
        True,
        "On TPUs: compile these programs when the engine starts, and not when they are first needed.",
        _flag,
    ),
    Key(
        "host_memory",
        '"auto", "pinned_host", "unpinned_host" or "runtime"',
        "auto",
        "On TPUs: host memory that transfers go through. auto is pinned_host on a TPU; runtime leaves it to "
        "JAX.",
        _host_memory,
    ),
    Key(
        "blocks_per_chunk",
        "a whole number from 1 to 4096",
        1,
        "Blocks stored under one key. More than 1 only where every KV cache group is full attention.",
        _number(1, 4096),
    ),
    Key(
        "block_size",
        "a whole number from 1 to 1048576",
        None,
        "The same in tokens: a multiple of the engine's block size. Give one of the two.",
        _number(1, 1 << 20),
    ),
    Key(
        "offload_prompt_only",
        "true or false",
        True,
        "Store the blocks of prompts only; false stores generated tokens too (multi-turn chats).",
        _flag,
    ),
    Key(
        "tracing",
        "true or false",
        False,
        "OpenTelemetry spans for lookups, loads, stores, reserves and commits, with vLLM's request id. Needs "
        "kvhost[otel]; goes where vLLM's own spans go, else where the OTEL_ variables say.",
        _flag,
    ),
    Key(
        "self_describing_kv_events",
        "true or false",
        False,
        "Put tokens and parents into the KV events of stored chunks (with vLLM's own events turned on).",
        _flag,
    ),
)

# Written by the connector itself, in the dictionary that vLLM's native half reads.
_OWN = {"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE}


@dataclass(frozen=True)
class ConnectorConfig:
    """The settings of one engine. Times in milliseconds."""

    socket: str
    namespace: str = ""
    weights_version: str = ""
    deadline_ms: int = 100
    attach_wait_ms: int = 2000
    copy_threads: int = 2
    copy: CopyBy = CopyBy.AUTO
    pin: Pin = Pin.AUTO
    cross_layer_blocks: bool = False
    staging_bytes: int | None = None
    block_buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    compile_ahead: bool = True
    host_memory: HostMemory = HostMemory.AUTO
    blocks_per_chunk: int = 1
    block_size: int | None = None
    offload_prompt_only: bool = True
    tracing: bool = False
    self_describing_kv_events: bool = False

    @property
    def deadline_s(self) -> float:
        return self.deadline_ms / 1000

    @property
    def attach_wait_s(self) -> float:
        return self.attach_wait_ms / 1000

    @classmethod
    def parse(
        cls, extra_config: Mapping[str, Any], environment: Mapping[str, str] = os.environ
    ) -> ConnectorConfig:
        """Reads `kv_connector_extra_config`. Raises `ConfigError`."""
        table = {key.name: key for key in KEYS}
        values: dict[str, Any] = {"socket": environment.get(SOCKET_VARIABLE) or DEFAULT_SOCKET}
        for name, value in extra_config.items():
            if name in _OWN:
                if value != _OWN[name]:
                    raise ConfigError(
                        f"{name} is set by kvhost to {_OWN[name]!r}, found {value!r}: leave it out"
                    )
            elif name == "canonical_layout":
                if value:
                    raise ConfigError(
                        "canonical_layout is not supported by kvhost, found true: leave it out (engines of "
                        "different tensor-parallel sizes do not share)"
                    )
            elif name == "sync_load_budget_bytes":
                if value:
                    raise ConfigError(
                        f"sync_load_budget_bytes must be 0 with kvhost, found {value!r}: vLLM cannot recover "
                        f"a synchronous load that fails"
                    )
            elif name in table:
                try:
                    values[name] = table[name].parse(value)
                except TypeError:
                    raise ConfigError(
                        f"{name} in kv_connector_extra_config must be {table[name].allowed}, found {value!r}"
                    ) from None
            else:
                raise ConfigError(_unknown(str(name), table))
        if "blocks_per_chunk" in extra_config and "block_size" in extra_config:
            raise ConfigError(
                f"blocks_per_chunk and block_size say the same in other units, found both "
                f"({extra_config['blocks_per_chunk']!r} and {extra_config['block_size']!r}): give one of them"
            )
        return cls(**values)


def _unknown(name: str, table: Mapping[str, Key]) -> str:
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"unknown key {name!r} in kv_connector_extra_config of kvhost: {hint}"
        f"Known keys: {', '.join(sorted(table))}"
    )


def prepare(extra_config: dict[str, Any]) -> ConnectorConfig:
    """Checks the settings and points vLLM's native half at kvhost's spec, in place.

    Every entry point of the connector calls it first, the class methods too: vLLM's API server never runs
    the constructor, and without the spec's name it would build the metrics of another one.
    """
    config = ConnectorConfig.parse(extra_config)
    extra_config.update(_OWN)
    # A failed synchronous load cannot be recovered (0.33): all loads are asynchronous.
    extra_config["sync_load_budget_bytes"] = 0
    return config


# The table and the class say the same; a key added to one of them only is found at import.
if {key.name for key in KEYS} != {field.name for field in fields(ConnectorConfig)}:
    raise ConfigError("KEYS and ConnectorConfig name different settings")
