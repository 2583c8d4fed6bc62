"""Mooncake's public request traces (FAST'25, Apache-2.0), read from beside the checkout."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
TRACES = {
    "conversation": "mooncake_conversation_trace.jsonl",
    "synthetic": "mooncake_synthetic_trace.jsonl",
}

Trace = list[list[int]]
"""A request's blocks (512 tokens each), by the trace's own numbers; equal numbers mean an equal prefix."""


class NoTraces(Exception):
    """The traces are not on this machine; the message says where they were looked for."""


def load(name: str, requests: int | None = None) -> Trace:
    """The trace of this name, or its first `requests` requests. Raises `NoTraces`."""
    path = FOLDER / TRACES[name]
    if not path.exists():
        raise NoTraces(f"there is no {path.name} in {FOLDER}: the public traces are not part of the checkout")
    with path.open() as file:
        return [json.loads(line)["hash_ids"] for line in islice(file, requests)]
