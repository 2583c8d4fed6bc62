"""Tiny models that tests/e2e/models.py has not: with windowed layers, with latent attention."""

import shutil
from pathlib import Path
from typing import Any

from scripts.user_cache import made_once
from tests.e2e.models import VOCABULARY, Recipe, checkpoint

# Two windowed layers for one that sees everything: several KV cache groups.
WINDOWED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 96,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

# Multi-head latent attention: all ranks hold the same cache. No experts.
LATENT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def windowed() -> Path:
    """The folder of a tiny Gemma 3 with a window of 96 tokens in two layers of three."""

    def make(folder: Path) -> None:
        import torch
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        torch.manual_seed(0)
        Gemma3ForCausalLM(Gemma3TextConfig(**WINDOWED)).save_pretrained(folder)

    return made_once("tiny-windowed", WINDOWED, make)


def latent() -> Path:
    """The folder of a tiny DeepSeek V2 without experts."""

    def make(folder: Path) -> None:
        import torch
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        torch.manual_seed(0)
        DeepseekV2ForCausalLM(DeepseekV2Config(**LATENT)).save_pretrained(folder)

    return made_once("tiny-latent", LATENT, make)


def copy_weights(recipe: Recipe, folder: Path) -> None:
    """Writes a model into the folder, over what is there: file by file, under the same names."""
    folder.mkdir(exist_ok=True)
    for file in checkpoint(recipe).iterdir():
        shutil.copyfile(file, folder / file.name)
