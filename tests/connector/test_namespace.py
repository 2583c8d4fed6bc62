"""What two engines must have in common to share: one difference keeps them apart, nothing else does (A9)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvhost_connector.config import ConfigError, ConnectorConfig
from kvhost_connector.metadata import WorkerReport
from kvhost_connector.namespace import (
    EngineParts,
    Group,
    WorkersDisagree,
    namespace_spec,
    refuse_unsupported,
    tokens_of,
)
from kvhost_connector.pages import UnusablePages
from kvhost_connector.report import describe_backends, describe_device, describe_pages, host_identity
from kvhost_proto.v1 import common_pb2
from tests.connector.sim import Shape, kv_cache_config, kv_transfer, vllm_config

SHAPE = Shape()
CONFIG = ConnectorConfig(socket="/s.sock")


@pytest.fixture(scope="module")
def engine() -> Any:
    return vllm_config(SHAPE, kv_transfer("/s.sock"))


def parts(engine: Any, caches: Any = None, config: ConnectorConfig = CONFIG, **more: Any) -> EngineParts:
    fields: dict[str, Any] = {
        "groups": [Group(0, True, 16)],
        "tokens_per_hash": 16,
        "blocks_per_chunk": 1,
        "replicated": False,
        **more,
    }
    return EngineParts.of(engine, caches or kv_cache_config(SHAPE), config, **fields)


def report(rank: int = 0, **more: Any) -> WorkerReport:
    fields: dict[str, Any] = {
        "token": bytes([rank]) * 32,
        "shard_bytes": 4096,
        "pages": "[]",
        "backends": '[["CPU_ATTN","vec"]]',
        "device": '["cpu","x86_64",""]',
        "host": host_identity(),
        **more,
    }
    return WorkerReport(rank=rank, **fields)


def spec(made: EngineParts, *reports: WorkerReport, name: str = "") -> common_pb2.NamespaceSpec:
    given = reports or (report(),)
    return namespace_spec(made, {entry.rank: entry for entry in given}, name)


def identity(made: common_pb2.NamespaceSpec) -> bytes:
    return made.SerializeToString(deterministic=True)


def changed(path: str, value: Any) -> Callable[[Any], None]:
    def change(engine: Any) -> None:
        *holders, last = path.split(".")
        holder = engine
        for name in holders:
            inner = copy.copy(getattr(holder, name))
            object.__setattr__(holder, name, inner)
            holder = inner
        object.__setattr__(holder, last, value)

    return change


ENGINE_CHANGES: dict[str, Callable[[Any], None]] = {
    "model dtype": changed("model_config.dtype", torch.float16),
    "rope": changed("model_config.hf_config.rope_theta", 5e5),
    "rope scaling": changed("model_config.hf_config.rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    "layers": changed("model_config.hf_config.num_hidden_layers", 3),
    "hf overrides": changed("model_config.hf_overrides", {"rope_theta": 5e5}),
    "quantization": changed("model_config.quantization", "fp8"),
    "code revision": changed("model_config.code_revision", "abc"),
    "implementation": changed("model_config.model_impl", "transformers"),
    "kv dtype": changed("cache_config.cache_dtype", "fp8"),
    "layout": changed("cache_config.kv_cache_layout", "LBNHC"),
    "hash algorithm": changed("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "load format": changed("load_config.load_format", "dummy"),
    "loader settings": changed("load_config.model_loader_extra_config", {"a": 1}),
    "tensor parallel": changed("parallel_config.tensor_parallel_size", 2),
}


@pytest.mark.parametrize("change", ENGINE_CHANGES.values(), ids=list(ENGINE_CHANGES))
def test_one_difference_of_the_engine_keeps_it_apart(engine: Any, change: Callable[[Any], None]) -> None:
    other = copy.copy(engine)
    change(other)
    assert identity(spec(parts(engine))) != identity(spec(parts(other)))


def test_equal_engines_share(engine: Any) -> None:
    assert identity(spec(parts(engine))) == identity(spec(parts(engine)))


def test_what_memory_profiling_decides_does_not_count(engine: Any) -> None:
    larger = kv_cache_config(replace(SHAPE, blocks=1000))
    other = copy.copy(engine)
    changed("cache_config.num_gpu_blocks", 1000)(other)
    changed("model_config.max_model_len", 1024)(other)
    changed("scheduler_config.max_num_seqs", 77)(other)
    assert identity(spec(parts(engine))) == identity(spec(parts(other, larger)))


def test_the_maximal_length_counts_where_positions_depend_on_it(engine: Any) -> None:
    long, longer = copy.copy(engine), copy.copy(engine)
    for other, length in ((long, 1024), (longer, 2048)):
        changed("model_config.hf_config.rope_scaling", {"rope_type": "longrope"})(other)
        changed("model_config.max_model_len", length)(other)
    assert identity(spec(parts(long))) != identity(spec(parts(longer)))


@pytest.mark.parametrize(
    "more",
    [
        {"tokens_per_hash": 8},
        {"blocks_per_chunk": 2},
        {"replicated": True},
        {"groups": [Group(0, False, 16)]},
        {"groups": [Group(0, True, 32)]},
    ],
    ids=str,
)
def test_one_difference_of_chunks_keeps_it_apart(engine: Any, more: dict[str, Any]) -> None:
    assert identity(spec(parts(engine))) != identity(spec(parts(engine, **more)))


@pytest.mark.parametrize(
    "more",
    [
        {"shard_bytes": 8192},
        {"pages": "[1]"},
        {"backends": '[["CPU_ATTN","amx"]]'},
        {"device": '["cpu","aarch64",""]'},
    ],
    ids=str,
)
def test_one_difference_of_a_worker_keeps_it_apart(engine: Any, more: dict[str, Any]) -> None:
    made = parts(engine)
    assert identity(spec(made, report())) != identity(spec(made, report(**more)))


def test_tokens_and_hosts_are_not_part_of_the_namespace(engine: Any) -> None:
    made = parts(engine)
    assert identity(spec(made, report())) == identity(spec(made, report(token=b"x" * 32)))
    assert tokens_of({0: report()}) == {0: bytes(32)}


def test_a_block_size_or_layer_shape_keeps_it_apart(engine: Any) -> None:
    caches = kv_cache_config(SHAPE)
    for field, value in (
        ("block_size", 32),
        ("num_kv_heads", 4),
        ("head_size", 8),
        ("dtype", torch.bfloat16),
    ):
        other = copy.deepcopy(caches)
        group = other.kv_cache_groups[0]
        group.kv_cache_spec = replace(group.kv_cache_spec, **{field: value})
        assert identity(spec(parts(engine))) != identity(spec(parts(engine, other))), field


def test_names_and_versions_add_to_it(engine: Any) -> None:
    made = parts(engine)
    assert identity(spec(made)) != identity(spec(made, name="mine"))
    versioned = parts(engine, config=replace(CONFIG, weights_version="v2"))
    assert identity(spec(made)) != identity(spec(versioned))
    assert identity(spec(made.with_weights("v2"))) != identity(spec(made))


def test_a_hash_without_fixed_seed_is_private_to_the_engine(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeded(name: str) -> str:
        from kvhost_connector import compat

        monkeypatch.setattr(compat, "hash_algorithm", lambda config: ("xxhash", name, 16))
        return str(spec(parts(engine)))

    assert seeded("one") != seeded("two")
    assert spec(parts(engine)).layout.key_bytes == 20


def test_parts_are_canonical_json_that_a_person_can_read(engine: Any) -> None:
    made = spec(parts(engine))
    named = {part.name: json.loads(part.value) for part in made.parts}
    assert named["kv_cache"]["layout"] == "LBHNC"
    assert named["groups"][0]["spec"]["type"] == "FullAttentionSpec"
    assert named["hash"] == {"algorithm": "sha256", "seed": "vllm-none-hash", "tokens": 16}
    assert str(engine.model_config.model) not in "".join(part.value for part in made.parts)


def test_the_layout_says_what_the_workers_need(engine: Any) -> None:
    two = copy.copy(engine)
    changed("parallel_config.world_size", 2)(two)
    made = spec(parts(two), report(0), report(1, shard_bytes=8192))
    assert (made.layout.shard_bytes, made.layout.shards, made.layout.ranks) == (8192, 2, 2)
    assert made.layout.key_bytes == 36
    replicated = spec(parts(two, replicated=True), report(0), report(1))
    assert (replicated.layout.shards, replicated.layout.ranks) == (1, 2)


# Refusals.


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        ([report(0)], "missing \\[1\\]"),
        ([report(0), report(1, problem="found device cuda")], "rank 1 cannot use kvhost: found device cuda"),
        ([report(0), report(1, host="elsewhere")], "2 hosts"),
    ],
)
def test_ranks_that_cannot_share_are_refused(engine: Any, reports: list[WorkerReport], says: str) -> None:
    two = copy.copy(engine)
    changed("parallel_config.world_size", 2)(two)
    with pytest.raises(WorkersDisagree, match=says):
        spec(parts(two), *reports)


@pytest.mark.parametrize(
    "field", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_unsupported_parallelism_is_refused_in_one_line(engine: Any, field: str) -> None:
    other = copy.copy(engine)
    changed(f"parallel_config.{field}", 2)(other)
    with pytest.raises(ConfigError, match=f"serves {field} 1 only, found 2"):
        refuse_unsupported(other, None, CONFIG)


def test_chunks_of_several_blocks_are_refused_with_windowed_layers(engine: Any) -> None:
    windowed = kv_cache_config(replace(SHAPE, window=40))
    refuse_unsupported(engine, windowed, CONFIG)
    refuse_unsupported(engine, kv_cache_config(SHAPE), replace(CONFIG, blocks_per_chunk=4))
    for config in (replace(CONFIG, blocks_per_chunk=2), replace(CONFIG, block_size=32)):
        with pytest.raises(ConfigError, match=r"must be 1 for a model with windowed .*SlidingWindowSpec"):
            refuse_unsupported(engine, windowed, config)


# What a worker reports.


def test_pages_are_described_without_the_number_of_blocks() -> None:
    described = []
    for blocks in (8, 64):
        backing = torch.zeros((2, blocks, 2, 16, 8))
        caches = {f"full.{n}": backing[n] for n in range(2)}
        described.append(describe_pages(caches, kv_cache_config(replace(SHAPE, blocks=blocks))))
    assert described[0] == described[1]
    (layers,) = json.loads(described[0])
    assert layers[0] == {
        "dtype": "torch.float32",
        "kernel_blocks": 1,
        "shape": [2, 16, 8],
        "strides": [512, 32, 4],
    }


def test_a_block_that_is_spread_over_its_layer_is_refused() -> None:
    heads_first = torch.zeros((2, 64, 16, 8)).transpose(0, 1)
    with pytest.raises(UnusablePages, match="a block lies in one piece"):
        describe_pages({f"full.{n}": heads_first for n in range(2)}, kv_cache_config(SHAPE))


def test_backends_and_device_are_named(engine: Any) -> None:
    assert json.loads(describe_backends(engine, kv_cache_config(SHAPE))) == [[["", ""], ["", ""]]]
    assert json.loads(describe_device())[0] == "cpu"
