"""Drill 4, the daemon's half: it is killed with copies in flight and comes back, at once or after a while.

Engines keep storing and reading on their own links meanwhile. No process may die of it, no byte may be wrong,
what was held of the old daemon is refused by the new one, and the old memory is let go (I6, I8; C1, C3, C9).
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drills.daemons import held, wait_held
from tests.drills.scale import Record, rounds, scale
from tests.drills.stage import Process, Stage
from tests.support import Daemon, wait_for

ROUNDS = rounds(4, 50)
AWAY_S = scale(3, 30)
USED_AGAIN_WITHIN_S = 2.0
# A chunk that was just stored is pinned next: in the order of last use nothing else takes its place before.
MEMORY = ("4MiB", ["--segment-size", "1MiB", "--policy", "lru"])
LOOP = {"kind": "linked", "family": "l", "chains": 12, "length": 8}


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvhost-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as started:
        yield started


def memory_files(pid: int) -> set[str]:
    """The inodes of the pool segments that a process maps, whatever its client says."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:kvhost" in line}


def open_memory_files(pid: int) -> int:
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if os.path.islink(entry.path)]
    return sum("memfd:kvhost" in link for link in links)


class Slow:
    """An engine with one copy that takes as long as the test wants."""

    def __init__(self, stage: Stage, daemon: Daemon, name: str) -> None:
        self.name = name
        self.process = stage.start()
        instance = secrets.token_hex(16)
        token = self.process.call("attach", socket=daemon.socket, instance=instance)
        session = self.process.call(
            "open", socket=daemon.socket, instance=instance, model="l", tokens=[token]
        )
        self.process.call("mapped")
        chunk: list[int] = []

        def reserved() -> bool:
            (chunk[:],) = self.process.call("reserve", names=[name])["chunks"]
            return chunk[0] == 1

        wait_for(reserved, 5.0, "a slot")
        assert self.process.call("copy", session=session, slot=chunk[2], name=name, stores=[chunk[1]])
        assert self.process.call("update", names=[name], commits=[chunk[1]]) == []
        ((_, slot),) = self.process.call("pin", names=[name])
        assert self.process.call("begin", session=session, slot=slot, name=name)
        self.files = memory_files(self.process.pid)
        assert self.files

    def finish(self) -> None:
        """The copy ends, in memory of a daemon that is gone; then that memory goes."""
        assert memory_files(self.process.pid) >= self.files, "memory was unmapped under a running copy"
        assert self.process.call("finish"), "wrong bytes"
        wait_for(
            lambda: not memory_files(self.process.pid) & self.files, 2.0, "the old memory to be unmapped"
        )
        self.process.close()


def _used(engines: list[Process]) -> list[dict[str, Any]]:
    return [engine.call("report") for engine in engines]


def _wait_used_again(engines: list[Process], old_boots: set[int], since: float) -> float:
    """Until every engine has stored and read with the new daemon; seconds since `since`."""

    def attached() -> bool:
        return all(told["boot"] not in {0, *old_boots} for told in _used(engines))

    wait_for(
        attached, max(0.0, since + USED_AGAIN_WITHIN_S - time.monotonic()), "the engines to attach again"
    )
    before = _used(engines)

    def used() -> bool:
        return all(
            now.get("committed", 0) > then.get("committed", 0)
            for now, then in zip(_used(engines), before, strict=True)
        )

    wait_for(used, max(0.05, since + USED_AGAIN_WITHIN_S - time.monotonic()), "the cache to be used again")
    return time.monotonic() - since


def _away_and_back(
    daemon: Daemon, stage: Stage, engines: list[Process], away_s: float, record: Record
) -> Daemon:
    """One death and return."""
    slow = Slow(stage, daemon, secrets.token_hex(4))
    for engine in engines:
        engine.call("loop_does", what="hold")
    boots = {told["boot"] for told in _used(engines)}
    old_files = [memory_files(engine.pid) for engine in engines]
    assert all(old_files)
    daemon.process.kill()
    gone = time.monotonic()
    daemon.wait_end()
    while time.monotonic() < gone + away_s:
        time.sleep(min(0.05, max(0.0, gone + away_s - time.monotonic())))
    # From the signal to the start of the next process.
    record.worst("away_s", time.monotonic() - gone)
    again = Daemon(*MEMORY, folder=daemon.folder)
    served = time.monotonic()
    try:
        record.worst("used_again_s", _wait_used_again(engines, boots, served))
        for engine, files in zip(engines, old_files, strict=True):
            assert engine.call("loop_does", what="use_what_was_held") == []
            wait_for(
                lambda engine=engine, files=files: not memory_files(engine.pid) & files,
                2.0,
                "the old memory to be unmapped",
            )
            assert open_memory_files(engine.pid) == 0
        slow.finish()
        again.check_integrity()
    except BaseException:
        again.close()
        raise
    return again


def _drill(folder: Path, stage: Stage, record: Record, times: int, away_s: float) -> None:
    daemon = Daemon(*MEMORY, folder=folder)
    try:
        engines = [stage.start() for _ in range(2)]
        for number, engine in enumerate(engines):
            engine.call("loop", socket=daemon.socket, seed=record.seed + number, **LOOP)
        _wait_used_again(engines, set(), time.monotonic())
        for _ in range(times):
            daemon = _away_and_back(daemon, stage, engines, away_s, record)
            record.rounds += 1
        for engine in engines:
            told = engine.call("end_loop")
            record.failures += told.get("wrong", 0)
            record.count("chunks_read", told["read"])
            record.count("chunks_committed", told["committed"])
            assert told.get("wrong", 0) == 0, told["samples"]
            # Refused by the new daemon, or never sent: nothing but this may have happened to the engines.
            assert not set(told) & {"StaleStore", "NotHeld", "InvalidArgument", "Refused", "BadReply"}, told
            engine.close()
        wait_held(daemon, (0, 0, 0))
        assert held(daemon.status()) == (0, 0, 0)
    finally:
        daemon.close()


@pytest.mark.timeout(scale(60, 600))
def test_it_is_back_within_fifty_milliseconds(folder: Path, stage: Stage) -> None:
    with Record("4 daemon death and fast return") as record:
        _drill(folder, stage, record, ROUNDS, 0.0)


@pytest.mark.timeout(scale(60, 300))
def test_it_is_back_after_a_long_absence(folder: Path, stage: Stage) -> None:
    with Record("4 daemon death and slow return") as record:
        _drill(folder, stage, record, rounds(1, 2), AWAY_S)
