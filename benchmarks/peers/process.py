"""Driver processes: started in a cache's environment, asked line by line, ended with all they started."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.driver import Round, Setting
from benchmarks.peers.environments import ROOT, last_line

START_S = 150.0
ANSWER_S = 120.0
STOP_S = 30.0


class DriverFailed(Exception):
    """A driver ended, or did not answer; the text is one line."""


class Driver:
    """One driver; in a `with`, which ends it. `about` is what it says it measures."""

    def __init__(self, python: Path, name: str, setting: Setting) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.peers.drivers.{name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            self.about: str = self._ask(asdict(setting), START_S)["about"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def round(self) -> Round:
        """Stores and loads all blocks once."""
        done = Round(**self._ask({"do": "round"}, ANSWER_S))
        if done.wrong:
            raise DriverFailed(f"{self._name}: {done.wrong} blocks held wrong bytes after a load")
        return done

    def lookup(self, count: int, repeat: int) -> float:
        """Seconds that a lookup of so many chunks takes: the median of `repeat`."""
        return float(self._ask({"do": "lookup", "count": count, "repeat": repeat}, ANSWER_S)["seconds"])

    def close(self) -> None:
        """It may end by itself; whatever is left of its processes is killed then."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # it is killed with its group below
            self._process.wait(STOP_S)
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _ask(self, question: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise DriverFailed(f"{self._name} ended: {self._reason()}") from error
        ready, _, _ = select.select([self._process.stdout], [], [], deadline_s)
        if not ready:
            raise DriverFailed(f"{self._name} gave no answer within {deadline_s:.0f} s: {self._reason()}")
        line = self._process.stdout.readline()
        if not line:
            raise DriverFailed(f"{self._name} ended: {self._reason()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _reason(self) -> str:
        self._errors.seek(0)
        return last_line(self._errors.read().decode(errors="replace"))
