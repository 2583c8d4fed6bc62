"""Everything that must be equal for two engines to share bytes, named part by part (design section 6).

The scheduler half knows the configuration, the workers know where the bytes lie inside a page. The parts
stay readable, so that a person can see in `kvhostctl namespaces` why two engines do not share. Never among
them: the number of blocks, and distances between blocks or layers (memory profiling decides those).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvhost_connector import compat
from kvhost_connector.canonical import canonical
from kvhost_connector.config import ConfigError, ConnectorConfig
from kvhost_connector.metadata import WorkerReport
from kvhost_connector.report import host_identity
from kvhost_connector.weights import model_identity
from kvhost_proto.v1 import common_pb2

FORMAT = 1
"""Version of what kvhost's connector writes into a slot."""

# Fields of a model's config that say where it was read and by whom, not what it is.
_NOT_MODEL = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "_attn_implementation")

# Models whose KV depends on the maximal length that the engine was started with.
_LENGTH_DEPENDENT = ("longrope", '"su"', "dynamic", "llama4", "attn_temperature", "cohere_compass")

# Speculation without a model of its own leaves the KV cache alone.
_MODELLESS_DRAFTS = {"ngram", "ngram_gpu", "suffix"}


class WorkersDisagree(ValueError):
    """The ranks of one engine cannot share a namespace; the message is one line."""


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
    """Raises `ConfigError` for set-ups that this version does not serve (design section 8)."""
    parallel = vllm_config.parallel_config
    for what, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise ConfigError(f"kvhost serves {what} 1 only, found {size}: set it to 1 or leave kvhost out")
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        raise ConfigError(
            f"kvhost serves engines with all ranks on one host, found {parallel.nnodes_within_dp} hosts: "
            f"one kvhostd cannot hand its memory to another host"
        )
    if kv_cache_config is None:
        return
    groups = [kv_cache_config.kv_cache_groups[number] for number in compat.offloaded_groups(kv_cache_config)]
    blocks = config.blocks_per_chunk
    if config.block_size is not None:
        blocks = -(-config.block_size // min(group.kv_cache_spec.block_size for group in groups))
    windowed = [
        group
        for group in groups
        if not compat.is_full_attention(group.kv_cache_spec, group.kv_cache_spec.block_size)
    ]
    if blocks > 1 and windowed:
        raise ConfigError(
            f"blocks_per_chunk must be 1 for a model with windowed or state layers "
            f"({type(windowed[0].kv_cache_spec).__name__}), found {blocks}: vLLM publishes half-written ones"
        )


def _model_parts(model_config: Any, weights_version: str) -> dict[str, Any]:
    """One model, target or draft."""
    hf_config = model_config.hf_config
    plain = hf_config.to_dict()
    shown = {key: value for key, value in plain.items() if key not in _NOT_MODEL}
    weights = getattr(model_config, "model_weights", "") or model_config.model
    return {
        "weights": model_identity(
            weights,
            revision=model_config.revision,
            commit=getattr(hf_config, "_commit_hash", None),
            weights_version=weights_version,
        ),
        "hf_config": shown,
        "dtype": str(model_config.dtype),
        "quantization": model_config.quantization,
        "quantization_config": getattr(model_config, "quantization_config", None),
        "code_revision": getattr(model_config, "code_revision", None),
        "model_impl": getattr(model_config, "model_impl", "auto"),
        "disable_sliding_window": getattr(model_config, "disable_sliding_window", False),
    }


def _draft(vllm_config: Any, weights_version: str) -> Any:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _MODELLESS_DRAFTS:
        return None
    return {
        "method": speculative.method,
        "model": _model_parts(speculative.draft_model_config, weights_version),
        "kv_cache_dtype": getattr(speculative, "kv_cache_dtype", None),
    }


def _groups(kv_cache_config: Any, blocks_per_chunk: int) -> list[dict[str, Any]]:
    found = []
    for number in compat.offloaded_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[number]
        found.append(
            {
                "id": number,
                "layers": list(group.layer_names),
                "spec": group.kv_cache_spec,
                "draft": group.is_eagle_group,
                "blocks_per_chunk": blocks_per_chunk,
            }
        )
    return found


@dataclass(frozen=True)
class Group:
    """One KV cache group as the namespace sees it."""

    id: int
    prefix: bool
    tokens_per_chunk: int


@dataclass(frozen=True)
class EngineParts:
    """The parts that the scheduler half knows by itself. Made once per engine: seeds may be random."""

    model: str
    values: Mapping[str, Any]
    groups: tuple[Group, ...]
    key_bytes: int
    ranks: int
    replicated: bool

    def with_weights(self, version: str) -> EngineParts:
        """The same engine after its weights changed. The daemon's Reset makes the same change (I12)."""
        return replace(self, values={**self.values, "weights_version": version})

    @classmethod
    def of(
        cls,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        *,
        groups: Sequence[Group],
        tokens_per_hash: int,
        blocks_per_chunk: int,
        replicated: bool,
    ) -> EngineParts:
        model_config, cache, parallel = (
            vllm_config.model_config,
            vllm_config.cache_config,
            vllm_config.parallel_config,
        )
        algorithm, seed, hash_bytes = compat.hash_algorithm(vllm_config)
        load = vllm_config.load_config
        dummy = str(load.load_format) == "dummy"
        model = _model_parts(model_config, config.weights_version)
        if dummy:
            # Such weights come from the seed, whatever files are there.
            model["weights"] = {"seed": model_config.seed}
        values: dict[str, Any] = {
            "format": FORMAT,
            "page_format": compat.page_format(),
            "model": model,
            "weights_version": config.weights_version,
            "load": {"format": str(load.load_format), "extra": load.model_loader_extra_config},
            "hf_overrides": model_config.hf_overrides,
            "draft": _draft(vllm_config, config.weights_version),
            "multimodal": _multimodal(model_config),
            "kv_cache": {
                "dtype": str(cache.cache_dtype),
                "skip_layers": list(getattr(cache, "kv_cache_dtype_skip_layers", ())),
                "mamba_dtype": str(getattr(cache, "mamba_cache_dtype", "auto")),
                "mamba_ssm_dtype": str(getattr(cache, "mamba_ssm_cache_dtype", "auto")),
                "mamba_mode": str(getattr(cache, "mamba_cache_mode", "none")),
                "sharing_fast_prefill": bool(getattr(cache, "kv_sharing_fast_prefill", False)),
                "layout": str(cache.kv_cache_layout),
            },
            "groups": _groups(kv_cache_config, blocks_per_chunk),
            "parallel": {
                "tensor": parallel.tensor_parallel_size,
                "pipeline": parallel.pipeline_parallel_size,
                "decode_context": parallel.decode_context_parallel_size,
                "prefill_context": parallel.prefill_context_parallel_size,
                "replicated": replicated,
            },
            "hash": {"algorithm": algorithm, "seed": seed, "tokens": tokens_per_hash},
        }
        if any(mark in canonical(model).lower() for mark in _LENGTH_DEPENDENT):
            values["max_model_len"] = model_config.max_model_len
        return cls(
            model=str(model_config.model),
            values=values,
            groups=tuple(groups),
            key_bytes=hash_bytes + 4,
            ranks=parallel.world_size,
            replicated=replicated,
        )


def _multimodal(model_config: Any) -> Any:
    """How inputs that are not text become embeddings; their content is in the block hash already."""
    settings = getattr(model_config, "multimodal_config", None)
    if settings is None:
        return None
    names = ("media_io_kwargs", "mm_processor_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")
    return {name: getattr(settings, name, None) for name in names}


def check_reports(reports: Mapping[int, WorkerReport], ranks: int) -> None:
    """Raises `WorkersDisagree` unless the reports of all ranks can make one namespace."""
    for rank, report in sorted(reports.items()):
        if report.problem:
            raise WorkersDisagree(f"rank {rank} cannot use kvhost: {report.problem}")
    missing = sorted(set(range(ranks)) - set(reports))
    if missing or len(reports) != ranks:
        raise WorkersDisagree(
            f"an engine of {ranks} ranks has reports of {sorted(reports)}, missing {missing}"
        )
    hosts = {report.host for report in reports.values()} | {host_identity()}
    if len(hosts) > 1:
        raise WorkersDisagree(
            f"the ranks and the scheduler of this engine run on {len(hosts)} hosts: kvhostd hands its memory "
            f"to processes of one host only"
        )


def namespace_spec(
    parts: EngineParts, reports: Mapping[int, WorkerReport], name: str
) -> common_pb2.NamespaceSpec:
    """The declaration of this engine's namespace. Raises `WorkersDisagree`."""
    check_reports(reports, parts.ranks)
    ordered = [reports[rank] for rank in range(parts.ranks)]
    values = {
        **parts.values,
        "workers": [
            {"pages": report.pages, "backends": report.backends, "device": report.device}
            for report in ordered
        ],
    }
    layout = common_pb2.Layout(
        shard_bytes=max(report.shard_bytes for report in ordered),
        shards=1 if parts.replicated else parts.ranks,
        ranks=parts.ranks,
        key_bytes=parts.key_bytes,
        groups=[
            common_pb2.Group(
                id=group.id,
                semantics=common_pb2.SEMANTICS_PREFIX if group.prefix else common_pb2.SEMANTICS_SET,
                tokens_per_chunk=group.tokens_per_chunk,
            )
            for group in parts.groups
        ],
    )
    return common_pb2.NamespaceSpec(
        name=name,
        model=parts.model,
        parts=[
            common_pb2.DigestPart(name=key, value=canonical(value)) for key, value in sorted(values.items())
        ],
        layout=layout,
    )


def tokens_of(reports: Mapping[int, WorkerReport]) -> dict[int, bytes]:
    """rank -> the token it presents on the handover socket."""
    return {rank: report.token for rank, report in reports.items()}
