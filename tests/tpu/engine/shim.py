"""Lets tpu-inference run where there is no TPU: JAX's CPU devices under its real engine and runner.

Six things are replaced, in the process of a test's engine only: options of the TPU compiler, the size of
device memory, the name of the device, the mesh (CPU devices have no coordinates), the attention kernel (which
is written for the TPU), and numpy inputs of `device_put` are copied: the runner uses its buffers again at
once, and on the CPU backend a device array may be the buffer itself.
"""

from __future__ import annotations

import os
from typing import Any

from scripts.user_cache import cache_root

DEVICE_MEMORY = 1 << 30

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_NAME": "none",
    "TPU_WORKER_ID": "0",
    # The forward pass of a tiny model compiles when it is needed; our own programs have a setting.
    "SKIP_JAX_PRECOMPILE": "1",
}


def environment(devices: int) -> dict[str, str]:
    """For an engine process with so many devices."""
    return {
        **ENVIRONMENT,
        # What vLLM remembers of model classes: engines of its other builds overwrite each other's, and
        # looking again costs a process with all of vLLM.
        "VLLM_CACHE_ROOT": str(cache_root() / "vllm-of-tpu-tests"),
        "TPU_ACCELERATOR_TYPE": f"v6e-{devices}",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def install(_: Any = None) -> None:
    """Call it before the engine is made."""
    import jax
    import numpy as np
    import tpu_inference.layers.common.attention_interface as attention
    import tpu_inference.models.common.compiler_options as compiler
    from tpu_inference import utils

    compiler.get_step_fn_compiler_options = dict
    compiler.get_sampling_compiler_options = dict
    utils.hbm_usage_bytes = lambda devices: [(0, DEVICE_MEMORY) for _ in devices]
    utils.get_device_name = lambda count=None: "TPU v6e" + (f"-{count}" if count is not None else "")
    utils.make_optimized_mesh = plain_mesh
    attention.ragged_paged_attention = paged_attention

    put = jax.device_put

    def put_a_copy(value: Any, *arguments: Any, **named: Any) -> Any:
        owned = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)
        return put(owned, *arguments, **named)

    if not os.environ.get("KVHOST_TEST_ALIASING"):
        jax.device_put = put_a_copy


def plain_mesh(shape: Any, names: Any, *, devices: Any = None) -> Any:
    import jax
    import numpy as np

    devices = np.array(list(devices) if devices is not None else jax.devices()).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def paged_attention(  # noqa: PLR0917 - the arguments of the kernel
    queries: Any,
    keys: Any,
    values: Any,
    cache: Any,
    lengths: Any,
    tables: Any,
    starts: Any,
    distribution: Any,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **_: Any,
) -> tuple[Any, Any]:
    """Attention of several sequences over pages, in plain JAX; arguments and results as the TPU kernel's.

    Token t of sequence s is the `lengths[s] - (starts[s + 1] - t)`-th of its sequence. New keys and values
    are written into the cache first, then every token looks at the pages of its own sequence.
    """
    import jax
    import jax.numpy as jnp
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel import merge_kv

    tokens, heads, size = queries.shape
    kv_heads = keys.shape[1]
    blocks, page, _, _, padded = cache.shape
    tables = tables.reshape(lengths.shape[0], -1)
    count = distribution[-1]

    # Which sequence a token is of, and where in it.
    ends = jnp.where(jnp.arange(lengths.shape[0]) < count, starts[1:], jnp.iinfo(jnp.int32).max)
    token = jnp.arange(tokens)
    owner = jnp.minimum(jnp.sum(token[:, None] >= ends[None, :], axis=1), lengths.shape[0] - 1)
    real = token < starts[count]
    position = jnp.where(real, lengths[owner] - starts[owner + 1] + token, 0)

    at = jnp.where(real, tables[owner, position // page], blocks)
    cache = cache.at[at, position % page].set(merge_kv(keys, values).astype(cache.dtype), mode="drop")

    grouped = queries.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, size)

    def of_one_sequence(sequence: Any) -> Any:
        pages = cache[tables[sequence]].astype(jnp.float32)
        both = pages.reshape(-1, pages.shape[2] * pages.shape[3], padded)[:, : 2 * kv_heads]
        # A head's key and value lie behind each other, and are padded together.
        both = both.reshape(-1, kv_heads, 2, padded)
        seen_keys = both[:, :, 0, :size] * (k_scale or 1.0)
        seen_values = both[:, :, 1, :size] * (v_scale or 1.0)
        scores = jnp.einsum("tkgd,lkd->tkgl", grouped, seen_keys) * sm_scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        place = jnp.arange(seen_keys.shape[0])
        visible = place[None, :] <= position[:, None]
        if sliding_window is not None:
            visible &= place[None, :] > position[:, None] - sliding_window
        weights = jax.nn.softmax(jnp.where(visible[:, None, None, :], scores, -1e30), axis=-1)
        result = jnp.einsum("tkgl,lkd->tkgd", weights, seen_values).reshape(tokens, heads, size)
        return jnp.where((real & (owner == sequence))[:, None, None], result, 0)

    def add(total: Any, sequence: Any) -> tuple[Any, None]:
        return total + of_one_sequence(sequence), None

    out, _ = jax.lax.scan(add, jnp.zeros((tokens, heads, size), jnp.float32), jnp.arange(lengths.shape[0]))
    return out.astype(queries.dtype), cache
