"""How long a drill runs, and what is left of it: one line of result."""

import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

LONG = os.environ.get("KVHOST_DRILLS", "") == "long"

# Where the long form leaves its results, one JSON object a line.
RESULTS = Path(os.environ.get("KVHOST_DRILL_RESULTS", "build/drills.jsonl"))


def scale(short: float, long: float) -> float:
    """The size of a drill: rounds, seconds, whatever it counts in. The second value in the long form.

    KVHOST_DRILL_FACTOR shortens (or lengthens) all long forms, to try them out.
    """
    return long * float(os.environ.get("KVHOST_DRILL_FACTOR", "1")) if LONG else short


def rounds(short: int, long: int) -> int:
    """As `scale`, in whole rounds, at least one."""
    return max(1, round(scale(short, long)))


def _random_seed() -> int:
    return random.getrandbits(32)


@dataclass
class Record:
    """What a drill did. Use it in a `with`; the line is written at its end, also when the drill failed."""

    drill: str
    rounds: int = 0
    failures: int = 0
    facts: dict[str, object] = field(default_factory=dict)
    seed: int = field(default_factory=lambda: int(os.environ.get("KVHOST_DRILL_SEED", _random_seed())))

    def __enter__(self) -> "Record":
        self._began = time.monotonic()
        self.random = random.Random(self.seed)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        line = json.dumps(
            {
                "drill": self.drill,
                "form": "long" if LONG else "short",
                "rounds": self.rounds,
                "failures": self.failures + (kind is not None),
                "seconds": round(time.monotonic() - self._began, 1),
                "seed": self.seed,
                **self.facts,
            }
        )
        print(line)
        if LONG:
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(line + "\n")

    def worst(self, name: str, value: float) -> None:
        """Keeps the largest value seen, rounded to milliseconds."""
        known = self.facts.get(name, 0.0)
        assert isinstance(known, float)
        self.facts[name] = round(max(known, value), 3)

    def count(self, name: str, more: int = 1) -> None:
        known = self.facts.get(name, 0)
        assert isinstance(known, int)
        self.facts[name] = known + more
