"""Processes for drills, started in milliseconds and told what to do over a socket.

A `Stage` is a small process that has imported the client and forks an actor whenever one is asked for: no
gRPC runs in it, so its forks are clean. What an actor can do is in `actor`. A `Process` is the test's end.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

LARGEST_ANSWER = 1 << 20


class ActorEnded(Exception):
    """The process ended, or was killed, before it answered."""


class ActorFailed(Exception):
    """What an actor was told to do raised there; `kind` is the name of the exception's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Process:
    """One actor. Every method may be called after its end."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self._line = line
        self._pidfd = os.pidfd_open(pid)

    def call(self, verb: str, timeout_s: float = 20.0, **args: object) -> Any:
        """Tells the actor what to do and returns its answer.

        Raises:
            ActorFailed: it raised.
            ActorEnded: it is gone.
        """
        self.tell(verb, **args)
        return self.answer(timeout_s)

    def tell(self, verb: str, **args: object) -> None:
        """Tells it, without waiting for the answer."""
        try:
            self._line.send(json.dumps([verb, args]).encode())
        except OSError as error:
            raise ActorEnded(f"process {self.pid} is gone") from error

    def answer(self, timeout_s: float = 20.0) -> Any:
        """The answer to the oldest `tell` that has none yet."""
        self._line.settimeout(timeout_s)
        try:
            data = self._line.recv(LARGEST_ANSWER)
        except TimeoutError:
            raise AssertionError(f"process {self.pid} did not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise ActorEnded(f"process {self.pid} is gone") from error
        if not data:
            raise ActorEnded(f"process {self.pid} is gone")
        kind, value = json.loads(data)
        if kind:
            raise ActorFailed(kind, value)
        return value

    @property
    def ended(self) -> bool:
        """The process has ended, by the same proof that the daemon takes."""
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], 0)[0])

    def signal(self, number: int) -> None:
        """Sends a signal; to a process that has ended, nothing."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def stop(self) -> None:
        """SIGSTOP; returns when it has stopped or ended."""
        self.signal(signal.SIGSTOP)
        until = time.monotonic() + 5.0
        while not self.ended and _state(self.pid) not in "TtZX":
            assert time.monotonic() < until, f"process {self.pid} does not stop"
            time.sleep(0.0005)

    def go_on(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> float:
        """SIGKILL; returns the monotonic time at which the end was proven."""
        self.signal(signal.SIGKILL)
        assert self._pidfd < 0 or select.select([self._pidfd], [], [], 10.0)[0], f"{self.pid} does not end"
        return time.monotonic()

    def close(self) -> None:
        """Kills what is left. A second call does nothing."""
        if self._pidfd >= 0:
            self.kill()
            os.close(self._pidfd)
            self._pidfd = -1
            self._line.close()


class Stage:
    """Use it in a `with`; every process that it started ends with it.

    Args:
        env: added to the environment of all its processes.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._processes: list[Process] = []
        self._orphans: list[int] = []
        with theirs:
            self._stage = subprocess.Popen(
                [sys.executable, "-m", "tests.drills.actor", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
                env={**os.environ, **(env or {})},
            )

    def __enter__(self) -> "Stage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.close()
        for pidfd in self._orphans:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._control.close()
        code = self._stage.wait(10.0)
        assert error is not None or code == 0, "an actor crashed; see stderr"

    def start(self) -> Process:
        """A new process that waits for what it is told."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * LARGEST_ANSWER)
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LARGEST_ANSWER)
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        answer = self._control.recv(64)
        assert answer, "the stage ended; see stderr"
        process = Process(int(answer), ours)
        self._processes.append(process)
        return process

    def adopt(self, pid: int) -> None:
        """A child that an actor forked: killed at the end at the latest."""
        self._orphans.append(os.pidfd_open(pid))

    def bury(self) -> None:
        """Kills the adopted children."""
        for pidfd in self._orphans:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], 10.0)
            os.close(pidfd)
        self._orphans.clear()


def _state(pid: int) -> str:
    """The state of the process's threads, as one letter: T only when all of them have stopped."""
    states = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat") as file:
                states.add(file.read().rpartition(")")[2].split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return states.pop() if len(states) == 1 else "R"
