"""Greedy answers of transformers: `{"model", "prompts", "tokens"}` on standard input, tokens on output."""

from __future__ import annotations

import json
import sys


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    order = json.load(sys.stdin)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32)
    answers = []
    with torch.no_grad():
        for prompt in order["prompts"]:
            given = torch.tensor([prompt])
            past, answer = None, []
            for _ in range(order["tokens"]):
                output = model(given, past_key_values=past, use_cache=True)
                past = output.past_key_values
                answer.append(int(output.logits[0, -1].argmax()))
                given = torch.tensor([answer[-1:]])
            answers.append(answer)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
