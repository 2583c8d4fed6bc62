"""Engines that do nothing but ask, in a process of their own: `python -m benchmarks.load SOCKET ENGINES PER`.

Each asks its next question, of `PER` lookups of 64 hashes, when the last is answered. With `PER` as `~4` each
is an engine at work: a step every 20 ms, in which requests arrive by chance, four on average, and are asked
for in one message, as the connector does. Waits for a line on standard input, asks for so many seconds as it
says, and prints how many lookups were answered in how many messages.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import exp

from benchmarks.small import Engine, chain, engines, keys

HASHES = 64
STEP_S = 0.02
DIFFERENT = 16
"""So many different lookups; the daemon must have their chunks."""


class Load:
    """Processes that ask, from the side of whoever measures."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def run(self, seconds: float) -> tuple[int, int]:
        """Lookups answered in so many seconds, and the messages that carried them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        lines = [_line(process).split() for process in self._processes]
        return sum(int(line[0]) for line in lines), sum(int(line[1]) for line in lines)


@contextmanager
def load(socket: str, sessions: int, per: str) -> Iterator[Load]:
    """So many engines in at most four processes, attached and ready."""
    count = min(4, sessions)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load", socket, str(sessions // count), per],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        for process in processes:
            _line(process)
        yield Load(processes)
    finally:
        for process in processes:
            process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process that asks ended with {process.wait()}")
    return line


class Asker:
    """One engine, and what was answered to it."""

    def __init__(self, engine: Engine, per: str, number: int) -> None:
        self._engine = engine
        self._per_message = 0 if per.startswith("~") else int(per)
        self._a_step = float(per.removeprefix("~"))
        self._dice = random.Random(number)
        names = keys(0, DIFFERENT * HASHES)
        self._asked = [chain(names[HASHES * n :][:HASHES], n) for n in range(DIFFERENT)]
        self.lookups = self.messages = 0

    def run(self, seconds: float) -> None:
        self.lookups = self.messages = 0
        until = time.monotonic() + seconds
        if self._per_message:
            while time.monotonic() < until:
                self._ask(self._per_message)
            return
        step = time.monotonic() + self._dice.random() * STEP_S
        while step < until:
            time.sleep(max(0.0, step - time.monotonic()))
            self._ask(min(DIFFERENT, self._arrivals()))
            step += STEP_S

    def _ask(self, count: int) -> None:
        if count:
            self._engine.session.lookup(self._asked[:count])
            self.lookups += count
            self.messages += 1

    def _arrivals(self) -> int:
        """So many as come in a step when each comes by itself (Poisson)."""
        count, left = 0, self._dice.random()
        while left > exp(-self._a_step):
            count, left = count + 1, left * self._dice.random()
        return count


def main() -> None:
    socket, count, per = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with engines(socket, count) as attached:
        askers = [Asker(engine, per, os.getpid() + n) for n, engine in enumerate(attached)]
        print("ready", flush=True)
        for line in sys.stdin:
            threads = [threading.Thread(target=asker.run, args=(float(line),)) for asker in askers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(sum(a.lookups for a in askers), sum(a.messages for a in askers), flush=True)


if __name__ == "__main__":
    main()
