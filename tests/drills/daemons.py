"""What a daemon must look like after a fault: nothing held, and nothing left over."""

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvhost_client.admin import AdminClient
from kvhost_proto.v1 import admin_pb2
from tests.drills.stage import Stage
from tests.support import Daemon, wait_for

SEGMENT = "1MiB"
CLEAN_WITHIN_S = 2.0


# gRPC keeps a pool of threads that breathes: it may have this many, by its own rules.
GRPC_THREADS = 16
_GRPC_THREAD = "event_engine"


@dataclass(frozen=True)
class Belongings:
    """What a process has of the kernel. Threads of gRPC's own pool and their stacks do not count, up to their
    bound."""

    fds: tuple[str, ...]
    threads: tuple[str, ...]
    maps: tuple[str, ...]

    @classmethod
    def of(cls, pid: int) -> "Belongings":
        return cls(_fds(pid), _threads(pid), _maps(pid))

    def more_than(self, other: "Belongings") -> str:
        """What this has and the other has not; empty when there is nothing."""
        kinds = (
            ("files", self.fds, other.fds),
            ("threads", self.threads, other.threads),
            ("maps", self.maps, other.maps),
        )
        return "; ".join(
            f"{name}: {dict(extra)}"
            for name, mine, theirs in kinds
            if (extra := Counter(mine) - Counter(theirs))
        )


def _fds(pid: int) -> tuple[str, ...]:
    """What the open files are; sockets by their kind, as their numbers are new each time."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")[0])
    return tuple(sorted(found))


def _threads(pid: int) -> tuple[str, ...]:
    names = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(Path(f"/proc/{pid}/task/{task}/comm").read_text().strip())
    pool = [name for name in names if name.startswith(_GRPC_THREAD)]
    assert len(pool) <= GRPC_THREADS, f"gRPC has {len(pool)} threads"
    return tuple(sorted(name for name in names if name not in pool))


def _maps(pid: int) -> tuple[str, ...]:
    """Names of the mapped files, memory files included. Memory without a name is a matter of RSS."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return tuple(sorted(fields[5] for line in lines if len(fields := line.split(None, 5)) == 6))


def small_daemon(memory: str = "8MiB", **more: object) -> Daemon:
    """A daemon with segments of 1 MiB: 17 slots of the drills' namespaces in each."""
    return Daemon(memory, ["--segment-size", SEGMENT], **more)  # type: ignore[arg-type]


def held(status: admin_pb2.StatusReply) -> tuple[int, int, int]:
    """Pinned chunks, granted slots, quarantined slots, over all namespaces."""
    every = status.namespaces
    return (
        sum(n.pinned_chunks for n in every),
        sum(n.granted_slots for n in every),
        sum(n.quarantined_slots for n in every),
    )


def session_of(status: admin_pb2.StatusReply, number: int) -> admin_pb2.SessionStatus | None:
    return next((s for s in status.sessions if s.number == number), None)


def wait_held(daemon: Daemon, expected: tuple[int, int, int], since: float | None = None) -> float:
    """Waits until just this is held: (pinned, granted, quarantined); seconds since the proof of the end.

    Raises:
        AssertionError: it took more than the two seconds of I7.
    """
    since = time.monotonic() if since is None else since
    last: list[tuple[int, int, int]] = []

    def reached() -> bool:
        last[:] = [held(daemon.status())]
        return last[0] == expected

    try:
        wait_for(reached, max(0.0, since + CLEAN_WITHIN_S - time.monotonic()))
    except AssertionError:
        raise AssertionError(
            f"2 s after the end (pinned, granted, quarantined) is {last[0]}, expected {expected}\n"
            f"{daemon.log[-3000:]}"
        ) from None
    return time.monotonic() - since


def wait_belongings(daemon: Daemon, baseline: Belongings, since: float | None = None) -> None:
    """Waits until the daemon has no more than before.

    Raises:
        AssertionError: it took more than the two seconds of I7.
    """
    since = time.monotonic() if since is None else since
    more = [""]

    def back() -> bool:
        more[0] = Belongings.of(daemon.pid).more_than(baseline)
        return not more[0]

    try:
        wait_for(back, max(0.0, since + CLEAN_WITHIN_S - time.monotonic()))
    except AssertionError:
        raise AssertionError(f"2 s after the end the daemon has more than before: {more[0]}") from None


def warm_up(daemon: Daemon, stage: Stage) -> Belongings:
    """Has the daemon do once what it starts threads for (a segment goes from one namespace to another, and is
    zeroed), and returns what it then has."""
    for turn in range(len([fd for fd in Belongings.of(daemon.pid).fds if "memfd:kvhost" in fd]) + 1):
        engine = stage.start()
        engine.call("engine", socket=daemon.socket, model=f"warm{turn}")
        assert engine.call("store", names=["warm"]) == 1
        engine.close()
    wait_held(daemon, (0, 0, 0))
    wait_for(lambda: not daemon.status().sessions, 2.0, "the sessions to be gone")
    wait_for(lambda: not daemon.status().memory.retiring_segments, 2.0, "the segment to be clean")
    return Belongings.of(daemon.pid)


def check_nothing_wedged(daemon: Daemon, stage: Stage, model: str = "test") -> None:
    """Everybody has gone: nothing is held, the books agree, and every slot can be filled again."""
    wait_held(daemon, (0, 0, 0))
    daemon.check_integrity()
    for namespace in daemon.status().namespaces:
        with AdminClient(daemon.socket) as admin:
            evicted = admin.evict(namespace=str(namespace.number), everything=True)
        assert (evicted.evicted, evicted.held) == (namespace.chunks, 0), evicted
    filler = stage.start()
    filler.call("engine", socket=daemon.socket, model=model)
    slots = filler.call("declared_slots")
    stored = filler.call("store", names=[f"fill{i}" for i in range(slots)], timeout_s=60.0)
    assert stored == slots, f"{stored} of {slots} slots could be filled"
    chunks = sum(namespace.chunks for namespace in daemon.status().namespaces)
    assert chunks == slots, f"{chunks} chunks in {slots} slots"
    assert filler.call("wrong", names=[f"fill{i}" for i in range(slots // 2)]) == []
    filler.close()
    wait_held(daemon, (0, 0, 0))
