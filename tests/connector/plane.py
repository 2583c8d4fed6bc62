"""The fault plane of tests: holds, delays and fails copies of any engine in a process that names it.

Named in the environment as KVHOST_FAULT_PLANE=tests.connector.plane:plane.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvhost_connector.faults import VARIABLE, CopyFault, Direction

NAME = "tests.connector.plane:plane"
ENVIRONMENT = {VARIABLE: NAME}


@dataclass
class Plane:
    """What happens to copies. `entered` counts chunks that asked, `failed` those that were made to fail."""

    gate: threading.Event = field(default_factory=threading.Event)
    held: set[str] = field(default_factory=set)
    fail_next: dict[str, int] = field(default_factory=dict)
    fail_ranks: set[int] = field(default_factory=set)
    skip: int = 0
    rate: float = 0.0
    delay_s: float = 0.0
    chance: random.Random = field(default_factory=random.Random)
    entered: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, direction: Direction, rank: int, job_id: int, chunk: int) -> None:
        with self._lock:
            self.entered[direction] += 1
            fails = self._fails(direction, rank)
        if direction in self.held:
            self.gate.wait(30)
        if self.delay_s:
            time.sleep(self.delay_s * self.chance.random())
        if fails:
            raise CopyFault(f"chunk {chunk} of {direction} {job_id} fails on purpose")

    def _fails(self, direction: Direction, rank: int) -> bool:
        if self.fail_ranks and rank not in self.fail_ranks:
            return False
        left = self.fail_next.get(direction, 0)
        fails = left > 0 and self.skip == 0
        if left > 0:
            if self.skip:
                self.skip -= 1
            else:
                self.fail_next[direction] = left - 1
        fails = fails or self.chance.random() < self.rate
        self.failed += fails
        return fails

    def hold(self, *directions: Direction) -> None:
        """Copies in these directions wait until `go`."""
        self.gate.clear()
        self.held = set(directions)

    def go(self) -> None:
        self.held = set()
        self.gate.set()

    def fail(
        self, direction: Direction, chunks: int = 1, *, skip: int = 0, ranks: set[int] | None = None
    ) -> None:
        """The next chunks in this direction fail, after `skip` good ones; with `ranks`, only theirs."""
        self.fail_next[direction] = chunks
        self.skip = skip
        self.fail_ranks = ranks or set()


plane = Plane()


@contextmanager
def fresh_plane() -> Iterator[Plane]:
    """The plane without any faults, before and after."""
    plane.__init__()  # type: ignore[misc]
    try:
        yield plane
    finally:
        plane.go()
        plane.__init__()  # type: ignore[misc]
