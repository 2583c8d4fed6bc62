"""Tiny checkpoints with wide random weights, made once into the user's cache.

vLLM's dummy weights give almost the same token for every prompt and would hide wrong KV. Weights
drawn ten times as wide as usual make every token depend on everything before it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from scripts.user_cache import made_once

VOCABULARY = 1024


@dataclass(frozen=True)
class Recipe:
    """A tiny Llama. Two recipes that differ in anything give different models."""

    layers: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    hidden: int = 256
    heads: int = 8
    # Four, so that two ranks hold two each.
    kv_heads: int = 4
    head_dim: int = 32
    positions: int = 4096


def checkpoint(recipe: Recipe) -> Path:
    """The folder of the checkpoint: config and safetensors, no tokenizer (prompts are token ids)."""
    return made_once(
        f"tiny-llama-{recipe.layers}-{recipe.dtype}", asdict(recipe), lambda to: _make(recipe, to)
    )


def _make(recipe: Recipe, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        hidden_size=recipe.hidden,
        intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        vocab_size=VOCABULARY,
        max_position_embeddings=recipe.positions,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(getattr(torch, recipe.dtype)).save_pretrained(folder)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that are the same on every machine; prompts of one seed share their beginning."""
    state = (seed * 2654435761 + 12345) & 0xFFFFFFFF
    tokens = []
    for _ in range(length):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        tokens.append(3 + (state >> 16) % (VOCABULARY - 3))
    return tokens
