"""One engine process of the demo: starts vLLM, warms it, answers one question, reports, ends.

It runs `AsyncLLM`, which is what `vllm serve` runs. The order comes as a line of JSON on standard
input, and a second line lets the engine end; what happened goes as JSON lines to the file
descriptor named on the command line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

WARM_UP = "Name three colours of the rainbow."


async def main() -> None:
    order = json.loads(sys.stdin.readline())
    events = os.fdopen(int(sys.argv[1]), "w")

    def say(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    from transformers import AutoTokenizer
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = KVTransferConfig(**order["kv_transfer"]) if order["kv_transfer"] else None
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**order["arguments"], kv_transfer_config=transfer))
    await answer(engine, {"prompt": WARM_UP}, 8, "warm-up")
    say(event="ready")

    tokenizer = AutoTokenizer.from_pretrained(order["arguments"]["model"])
    text = tokenizer.apply_chat_template(order["messages"], add_generation_prompt=True, tokenize=False)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    result = await answer(engine, {"prompt_token_ids": tokens}, order["max_tokens"], "question")
    say(event="answer", **result)

    # The engine goes on while its last blocks are stored; the parent sees them arrive.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    say(event="bytes", stored=transferred("store"), loaded=transferred("load"))
    engine.shutdown()


async def answer(engine: Any, prompt: dict[str, Any], max_tokens: int, name: str) -> dict[str, Any]:
    """Streams one answer and notes when its first token came, as a client sees it."""
    from vllm import SamplingParams

    started = time.monotonic()
    first: float | None = None
    last: Any = None
    async for output in engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), name):
        if first is None and output.outputs[0].token_ids:
            first = time.monotonic()
        last = output
    if last is None or first is None:
        raise RuntimeError(f"the engine gave no token for the {name}")
    return {
        "prompt_tokens": len(last.prompt_token_ids),
        "cached_tokens": last.num_cached_tokens or 0,
        "ttft_s": first - started,
        "total_s": time.monotonic() - started,
        "tokens": list(last.outputs[0].token_ids),
        "text": last.outputs[0].text.strip(),
    }


def transferred(direction: str) -> int:
    """Bytes the connector has stored or loaded, as vLLM's metrics have them."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    name = f"vllm:kv_offload_{direction}_bytes"
    return sum(m.value for m in get_metrics_snapshot() if isinstance(m, Counter) and m.name == name)


if __name__ == "__main__":
    asyncio.run(main())
