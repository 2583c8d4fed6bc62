"""Asks an engine one question about a document, and says how long the first word took.

    python ask.py http://127.0.0.1:8000 document.md "What is the warehouse called?"

Standard library only. The last line is JSON, for programs.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(server: str, messages: list[dict[str, str]], most_tokens: int = 48) -> dict[str, Any]:
    """The answer, the seconds to its first word, and how many tokens of the prompt were cached."""
    order = {
        "model": "example",
        "messages": messages,
        "max_tokens": most_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{server}/v1/chat/completions", json.dumps(order).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    first: float | None = None
    answer, usage = "", {}
    with NO_PROXY.open(request, timeout=300) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            usage = event.get("usage") or usage
            text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if text and first is None:
                first = time.monotonic() - began
            answer += text
    details = usage.get("prompt_tokens_details") or {}
    return {
        "answer": answer,
        "first_word_s": round(first or time.monotonic() - began, 3),
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "cached_tokens": details.get("cached_tokens") or 0,
    }


def show(result: dict[str, Any]) -> None:
    print(f"   {result['answer'].strip()}")
    print(
        f"   first word after {result['first_word_s']:.2f} s; "
        f"{result['cached_tokens']} of {result['prompt_tokens']} tokens of the prompt were cached"
    )


def main() -> int:
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    _, server, document, question = sys.argv
    with open(document, encoding="utf-8") as file:
        text = file.read()
    result = ask(server, [{"role": "user", "content": f"{text}\n\n{question}"}])
    show(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
