"""What the web page could have to show: a busy hour of a daemon that three engines share."""

import math
import random
from typing import Any

GIB = 1 << 30
EVERY_S = 10.0


def busy_hour(now: float) -> dict[str, Any]:
    """A document as `/api/status.json` gives it; the same every time but for `now`, in seconds since 1970."""
    chance = random.Random(7)
    columns: dict[str, list[float]] = {
        name: [0.0]
        for name in ("hit_tokens", "miss_tokens", "load_bytes", "commit_bytes", "evictions", "used_bytes")
    }
    for step in range(360):
        busy = 0.55 + 0.35 * math.sin(step / 34) + 0.1 * chance.random()
        ratio = min(0.97, 0.42 + 0.5 * (1 - math.exp(-step / 70)) + 0.05 * math.sin(step / 9))
        if 150 <= step < 163:
            busy, ratio = 0.0, 0.0  # nobody asked
        tokens = int(busy * 260_000 * (0.8 + 0.4 * chance.random()))
        hits = int(tokens * ratio)
        grown = {
            "hit_tokens": hits,
            "miss_tokens": tokens - hits,
            "load_bytes": hits * 12_288 * 0.9,
            "commit_bytes": (tokens - hits) * 12_288 * 0.8,
            "evictions": max(0, int((step - 180) / 3 * chance.random())),
        }
        for name, more in grown.items():
            columns[name].append(columns[name][-1] + more)
        columns["used_bytes"].append(min(43.1, 8 + step / 8) * GIB)
    columns = {name: [*values, values[-1]] for name, values in columns.items()}
    hit, miss = int(columns["hit_tokens"][-1]), int(columns["miss_tokens"][-1])
    return {
        "version": "0.1.0",
        "state": "serving",
        "started": now - 3 * 86400 - 5 * 3600,
        "populated": 1.0,
        "memory": {
            "asked": 64 * GIB,
            "capacity": 64 * GIB,
            "populated": 64 * GIB,
            "locked": 64 * GIB,
            "lock": "auto",
            "hugepages": "2MiB",
            "used": int(48.9 * GIB),
            "pinned": int(2.4 * GIB),
            "reserved": int(1.1 * GIB),
            "quarantined": 0,
            "lent": 59 * GIB,
            "notes": [],
        },
        "namespaces": [
            _namespace(row, hit, miss) if row[0] == 1 else _namespace(row, *_LOOKED_UP[row[0]])
            for row in _NAMESPACES
        ],
        "sessions": [
            {**dict(zip(_OF_A_SESSION, row, strict=True)), "ready": True, "grants": 64} for row in _SESSIONS
        ],
        "totals": {
            "namespaces": 3,
            "sessions": 3,
            "mappings": 5,
            "lookups": 184_311,
            "hit_tokens": hit,
            "miss_tokens": miss,
            "commits": 1_204_113,
            "evictions": {"room": 318_204, "segment": 12_288, "limit": 0, "operator": 64},
            "no_space": 0,
            "bound": 12,
            "loop_lag_max_s": 0.0113,
        },
        "slow_s": {"Lookup": 0.0005, "Reserve": 0.00025, "Update": 0.001, "DeclareNamespace": 0.0025},
        "evictions": [{**dict(zip(_OF_A_RUN, row, strict=True)), "began_s": row[4] + 20} for row in _RUNS],
        "anomalies": {},
        "config": [
            {"name": "memory", "value": "64GiB", "source": "file /etc/kvhost/kvhostd.toml"},
            {"name": "socket", "value": "/run/kvhost/kvhostd.sock", "source": "default"},
            {"name": "hugepages", "value": "2MiB", "source": "environment KVHOST_HUGEPAGES"},
            {"name": "lock", "value": "auto", "source": "file /etc/kvhost/kvhostd.toml"},
        ],
        "history": {"every_s": EVERY_S, "last_s": 4.0, **columns},
    }


_NAMESPACES = (
    # number, digest, model, name, capacity, used, pinned and reserved in GiB, sessions
    (1, "9f2c1ab07e44", "Qwen/Qwen3-32B", "", 40, 33.7, 1.9, 0.8, 2),
    (4, "03d8e5c29a17", "meta-llama/Llama-3.1-8B-Instruct", "", 14, 12.1, 0.5, 0.3, 1),
    (3, "b61fe0a3377d", "Qwen/Qwen3-32B", "canary", 5, 3.1, 0.0, 0.0, 0),
)
_LOOKED_UP = {4: (91, 30), 3: (12, 88)}
_SLOT = 3 << 20
_OF_A_SESSION = ("number", "label", "namespace", "pid", "age_s", "workers", "pins")
_SESSIONS = (
    (17, "vllm 0.32.0 Qwen/Qwen3-32B", 1, 41_882, 96_400, 2, 212),
    (21, "vllm 0.32.0 Qwen/Qwen3-32B", 1, 52_310, 7_420, 2, 96),
    (22, "vllm 0.32.0 meta-llama/Llama-3.1-8B-Instruct", 4, 53_007, 2_140, 1, 64),
)
_OF_A_RUN = ("namespace", "cause", "taker", "chunks", "ended_s", "youngest_s", "oldest_s")
_RUNS = (
    (1, "room", 1, 1_184, 4, 2_310, 2_702),
    (3, "segment", 4, 4_096, 340, 7_800, 15_400),
    (4, "room", 4, 512, 360, 1_260, 1_530),
    (1, "room", 1, 22_630, 410, 1_980, 2_650),
    (3, "operator", 0, 64, 1_900, 3_600, 3_600),
    (3, "reset", 0, 8_190, 5_400, 0, 0),
)


def _namespace(row: tuple[Any, ...], hit: int, miss: int) -> dict[str, Any]:
    number, digest, model, name, capacity, used, pinned, reserved, sessions = row
    return {
        "number": number,
        "digest": digest,
        "model": model,
        "name": name,
        "capacity": int(capacity * GIB),
        "used": int(used * GIB),
        "pinned": int(pinned * GIB),
        "reserved": int(reserved * GIB),
        "quarantined": 0,
        "chunks": int(used * GIB) // _SLOT,
        "slots": int(capacity * GIB) // _SLOT,
        "sessions": sessions,
        "hit_tokens": hit,
        "miss_tokens": miss,
    }
