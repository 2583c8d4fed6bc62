"""Which kind of worker moves the bytes of an engine: chosen once, by vLLM's platform, in this room only.

A platform or a KV cache layout that nobody has made a worker for is refused when the engine starts, with a
message that names those that are served.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvhost_client.types import Access
from kvhost_connector.config import ConfigError

logger = logging.getLogger("vllm.kvhost")


class Platform(Enum):
    """Where an engine's KV cache lies; the values are the names in logs, reports and metrics."""

    HOST = "host"
    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    JAX = "jax"

    @property
    def has_driver(self) -> bool:
        """Blocks are moved by the device's copy engines, by DMA, with segments that its driver knows of."""
        return self in (Platform.CUDA, Platform.ROCM, Platform.XPU)

    @property
    def access(self) -> Access:
        """How workers of this platform write into segments. JAX's copy with the processor."""
        return Access.DEVICE_DMA if self.has_driver else Access.CPU


@dataclass(frozen=True)
class _Served:
    worker: str
    how: str


_SERVED = {
    Platform.HOST: _Served("copies by processor threads", "vLLM on its CPU platform"),
    Platform.CUDA: _Served("vLLM's batched block copies", "NVIDIA GPUs"),
    Platform.ROCM: _Served("vLLM's batched block copies", "AMD GPUs"),
    Platform.XPU: _Served("vLLM's batched block copies", "Intel GPUs"),
    Platform.JAX: _Served("gather and scatter in JAX", "TPUs, by kvhost_connector.tpu.TPUOffloadConnector"),
}

# Those of vLLM's layouts in which one layer's page of a block lies in one piece. In the others heads lie
# further apart than blocks, at distances that depend on the number of blocks.
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")

CROSS_LAYER = "BLHNC"
"""All layers of a block side by side, and so one copy a block."""


def choose(vllm_platform: Any) -> Platform:
    """The platform of this engine. Raises `ConfigError` for one that `KVHostConnector` does not serve.

    `vllm_platform` is `vllm.platforms.current_platform`.
    """
    if vllm_platform.is_cpu():
        return Platform.HOST
    if vllm_platform.is_rocm():
        return Platform.ROCM
    if vllm_platform.is_cuda_alike():
        return Platform.CUDA
    if vllm_platform.is_xpu():
        return Platform.XPU
    found = vllm_platform.device_name or vllm_platform.device_type or "none"
    if vllm_platform.is_tpu():
        raise ConfigError(
            f"KVHostConnector does not serve the platform {found!r}: use the class TPUOffloadConnector with "
            f'"kv_connector_module_path": "kvhost_connector.tpu"'
        )
    raise ConfigError(f"kvhost has no worker for vLLM's platform {found!r}; it serves {served()}")


def served() -> str:
    """The platforms with a worker, for messages."""
    return ", ".join(f"{platform.value} ({entry.how})" for platform, entry in _SERVED.items())


def refuse_layout(layout: str | None) -> None:
    """Raises `ConfigError` for a KV cache layout in which a block's page is spread. None: not known yet."""
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(
            f"kvhost cannot copy blocks of the KV cache layout {layout}, in which a page is spread over its "
            f"layer; it serves {', '.join(LAYOUTS)}: unset VLLM_KV_CACHE_LAYOUT or set it to one of these"
        )


def refuse_sleep_mode(vllm_config: Any, platform: Platform) -> None:
    """Raises `ConfigError` where vLLM may take the KV cache's memory away under copies (0.32 tells no
    connector): it stays at its addresses, so that a worker would not notice."""
    if platform.has_driver and getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "kvhost serves no engine with sleep mode on a GPU, found enable_sleep_mode: start without it"
        )


def announce(platform: Platform, role: str) -> None:
    """Says once, in each of an engine's processes, what was chosen."""
    logger.info("kvhost: platform %s, %s, %s", platform.value, _SERVED[platform].worker, role)
