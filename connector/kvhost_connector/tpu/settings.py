"""The environment of tpu-inference's in-process offload: honoured where kvhost has the like, else named.

What an engine's settings say goes before the environment. One warning names every variable that was found,
with what stands in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvhost_connector.config import ConfigError

PREFIX = "TPU_OFFLOAD_"
STAGING_BLOCKS = "TPU_OFFLOAD_NUM_STAGING_BLOCKS"
HOST_CHUNKS = "TPU_OFFLOAD_NUM_CPU_CHUNKS"
DEFAULT_STAGING_BYTES = 256 << 20


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def _flag(text: str) -> bool:
    return bool(_whole(text))


def _buckets(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",") if part.strip()]
    if not sizes or min(sizes) < 1:
        raise ValueError
    return sizes


@dataclass(frozen=True)
class _Variable:
    """One variable. `key`: the setting it is taken for, with `value` of its text; "" when it has none."""

    allowed: str
    read: Callable[[str], Any]
    stands: str
    key: str = ""
    value: Callable[[Any], Any] = lambda read: read


VARIABLES: dict[str, _Variable] = {
    HOST_CHUNKS: _Variable(
        "a whole number", _whole, "is replaced by kvhostd's --memory, in bytes for all engines of the host"
    ),
    STAGING_BLOCKS: _Variable(
        "a whole number", _whole, "sets staging_bytes to so many blocks; write staging_bytes, in bytes"
    ),
    "TPU_OFFLOAD_DECODE_SAVE": _Variable(
        "0 or 1",
        _flag,
        "sets offload_prompt_only to its opposite; write offload_prompt_only",
        "offload_prompt_only",
        lambda decode: not decode,
    ),
    "TPU_OFFLOAD_SAVE_THREADS": _Variable(
        "a whole number",
        _whole,
        "sets copy_threads; write copy_threads",
        "copy_threads",
        lambda count: max(1, count),
    ),
    "TPU_OFFLOAD_BATCHED_SAVE": _Variable(
        "0 or 1", _flag, "is not needed: saves that wait are always carried together"
    ),
    "TPU_OFFLOAD_SKIP_JAX_PRECOMPILE": _Variable(
        "0 or 1",
        _flag,
        "sets compile_ahead to its opposite; write compile_ahead",
        "compile_ahead",
        lambda skip: not skip,
    ),
    "TPU_OFFLOAD_BLOCK_SIZE_BUCKETS": _Variable(
        "whole numbers with commas between them",
        _buckets,
        "sets block_buckets; write block_buckets",
        "block_buckets",
    ),
    "TPU_OFFLOAD_USE_UNPINNED_HOST": _Variable(
        "0 or 1",
        _flag,
        'sets host_memory to "unpinned_host" when 1; write host_memory',
        "host_memory",
        lambda unpinned: "unpinned_host" if unpinned else "auto",
    ),
    "TPU_OFFLOAD_METRICS_LOG_INTERVAL": _Variable(
        "a number", float, "is replaced by vLLM's own metrics (vllm:kv_offload_*, vllm:kvhost_*)"
    ),
}


def take_over(extra_config: dict[str, Any], environment: Mapping[str, str] = os.environ) -> None:
    """Fills in settings that the environment names and `kv_connector_extra_config` does not, in place.

    Raises `ConfigError` for a value that cannot be read.
    """
    for _, variable, read in _found(environment):
        if variable.key and variable.key not in extra_config:
            extra_config[variable.key] = variable.value(read)


def staging_bytes(
    configured: int | None, part_bytes: int, environment: Mapping[str, str] = os.environ
) -> int:
    """Bytes on each device for blocks on their way. `part_bytes`: the largest block's on one device."""
    if configured is not None:
        return configured
    blocks = {name: read for name, _, read in _found(environment)}.get(STAGING_BLOCKS)
    if blocks:
        return int(blocks) * part_bytes
    return max(DEFAULT_STAGING_BYTES, 2 * part_bytes)


def warning(block_bytes: int, environment: Mapping[str, str] = os.environ) -> str:
    """One sentence for each variable that is set, "" when none is. `block_bytes`: a block's, all devices."""
    sentences = []
    for name, variable, read in _found(environment):
        sentence = f"{name} {variable.stands}"
        if name == HOST_CHUNKS:
            sentence += f" (here {read} blocks are {read * block_bytes / (1 << 30):.3g} GiB)"
        elif name == STAGING_BLOCKS:
            sentence += " on each device"
        sentences.append(sentence)
    if not sentences:
        return ""
    return "settings of the in-process offload are set: " + "; ".join(sentences)


def _found(environment: Mapping[str, str]) -> list[tuple[str, _Variable, Any]]:
    found = []
    for name, variable in VARIABLES.items():
        text = environment.get(name, "")
        if text:
            try:
                found.append((name, variable, variable.read(text)))
            except ValueError:
                raise ConfigError(f"{name} must be {variable.allowed}, found {text!r}") from None
    return found
