"""What only a worker can see of its engine: where bytes lie inside a page, which backend wrote them, where.

The scheduler half puts it into the namespace.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhost_connector import compat
from kvhost_connector.canonical import canonical
from kvhost_connector.pages import UnusablePages


def host_identity() -> str:
    """Boot id of this kernel: equal for all containers of one host."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else platform.node()


def describe_pages(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> str:
    """Canonical JSON of shapes and strides inside one page, for each layer of each group.

    Raises `UnusablePages` when a page is spread over its layer: then distances inside it depend on the
    number of blocks, and no two engines would agree on them.
    """
    found = []
    for number in compat.offloaded_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[number]
        found.append(
            [_describe_page(name, kv_caches[name], kv_cache_config.num_blocks) for name in group.layer_names]
        )
    return canonical(found)


def _describe_page(name: str, cache: Any, blocks: int) -> dict[str, Any]:
    element = cache.element_size()
    # A layer may count smaller kernel blocks: these lie next to each other inside a block.
    per_block = cache.shape[0] // blocks if cache.shape[0] % blocks == 0 else 1
    shape, strides = list(cache.shape[1:]), [stride * element for stride in cache.stride()[1:]]
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + element
    if reach > cache.stride(0) * element:
        raise UnusablePages(
            f"a block of {name} reaches over {reach} bytes, the next block begins after "
            f"{cache.stride(0) * element}: kvhost needs layouts in which a block lies in one piece"
        )
    return {"dtype": str(cache.dtype), "shape": shape, "strides": strides, "kernel_blocks": per_block}


def describe_backends(vllm_config: Any, kv_cache_config: Any) -> str:
    """Canonical JSON of attention backend and page variant, for each layer of each group."""
    found = []
    for number in compat.offloaded_groups(kv_cache_config):
        layers = []
        for name in kv_cache_config.kv_cache_groups[number].layer_names:
            layer = compat.attention_layer(vllm_config, name)
            backend = getattr(layer, "attn_backend", None)
            # The CPU backend packs pages differently for each instruction set.
            layers.append([backend.get_name() if backend is not None else "", str(getattr(layer, "isa", ""))])
        found.append(layers)
    return canonical(found)


def describe_device() -> str:
    """Architecture of the device that computes the KV."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    version = f"{capability.major}.{capability.minor}" if capability is not None else ""
    return canonical([current_platform.device_type, platform.machine(), version])
