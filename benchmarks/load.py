"""Engines that do nothing but ask, in a process of their own: `python -m benchmarks.load SOCKET ENGINES PER`.

Each asks its next question, of `PER` lookups of 64 hashes, when the last is answered. Waits for a line on
standard input, asks for so many seconds as it says, and prints how many lookups were answered.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.small import Engine, chain, engines, keys

HASHES = 64
DIFFERENT = 16
"""So many different lookups; the daemon must have their chunks."""


class Load:
    """Processes that ask, from the side of whoever measures."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def run(self, seconds: float) -> int:
        """Lookups answered in so many seconds."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        return sum(int(_line(process)) for process in self._processes)


@contextmanager
def load(socket: str, sessions: int, per_message: int) -> Iterator[Load]:
    """So many engines in at most four processes, attached and ready."""
    count = min(4, sessions)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load", socket, str(sessions // count), str(per_message)],
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


def main() -> None:
    socket, count, per_message = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    names = keys(0, DIFFERENT * HASHES)
    asked = [
        chain(names[HASHES * (n % DIFFERENT) :][:HASHES] or names[:HASHES], n) for n in range(per_message)
    ]
    with engines(socket, count) as attached:
        print("ready", flush=True)
        for line in sys.stdin:
            answered = [0] * count

            def ask(place: int, engine: Engine, until: float, answered: list[int] = answered) -> None:
                while time.monotonic() < until:
                    engine.session.lookup(asked)
                    answered[place] += per_message

            until = time.monotonic() + float(line)
            threads = [
                threading.Thread(target=ask, args=(place, engine, until))
                for place, engine in enumerate(attached)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(sum(answered), flush=True)


if __name__ == "__main__":
    main()
