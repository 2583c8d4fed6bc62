"""Drill 12: four engines of different namespaces do a bit of everything, and once a second one of them is
killed and another one stopped for a while. The daemon's memory stays flat, its books agree, its counters add
up (C12, B4)."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvhost_proto.v1 import admin_pb2
from tests.drills.daemons import check_nothing_wedged, small_daemon, wait_belongings, wait_held, warm_up
from tests.drills.scale import Record, scale
from tests.drills.stage import Process, Stage
from tests.support import Daemon, memory_kib, wait_for

SECONDS = scale(12, 600)
KILL_EVERY_S = 1.0
CHECK_EVERY_S = scale(2, 5)
ENGINES = 4
FLAT_KIB = 4096
SETTLED_AFTER = 0.25
"""The part of the time after which memory counts: until then pools and tables grow to their size."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with small_daemon("12MiB") as running:
        yield running


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as started:
        yield started


@dataclass
class Crowd:
    """The engines, by the number of their namespace."""

    daemon: Daemon
    stage: Stage
    record: Record

    def __post_init__(self) -> None:
        self.started = 0
        self.seen: dict[str, int] = {}
        self.engines = [self._start(number) for number in range(ENGINES)]

    def _start(self, number: int) -> Process:
        process = self.stage.start()
        process.call("engine", socket=self.daemon.socket, model=f"soak{number}", ready=False)
        process.call(
            "loop",
            kind="mixed",
            family=f"s{number}.",
            chains=12,
            length=14,
            seed=self.record.seed + self.started,
            resets=number % 2 == 1,
        )
        self.started += 1
        return process

    def note(self, process: Process) -> None:
        """Adds up what an engine says it has done. Raises what ended its loop, and for a wrong byte."""
        told = process.call("report", timeout_s=30.0)
        samples = told.pop("samples")
        assert not told.get("wrong"), samples
        for name, count in told.items():
            self.seen[name] = self.seen.get(name, 0) + count

    def kill_one(self) -> None:
        number = self.record.random.randrange(ENGINES)
        self.note(self.engines[number])
        self.engines[number].kill()
        self.engines[number].close()
        self.engines[number] = self._start(number)
        self.record.count("kills")

    def stop_one(self) -> None:
        """Until `wake`."""
        self.engines[self.record.random.randrange(ENGINES)].stop()
        self.record.count("stops")

    def wake(self) -> None:
        for process in self.engines:
            process.go_on()

    def end(self) -> None:
        self.wake()
        for process in self.engines:
            process.call("end_loop", timeout_s=60.0)
            self.note(process)
            process.close()


def counters_add_up(status: admin_pb2.StatusReply) -> list[str]:
    """What must be equal when nobody is there any more."""
    counted, odd = status.counters, status.anomalies
    chunks = sum(namespace.chunks for namespace in status.namespaces)
    ends = (
        counted["committed_chunks"]
        + counted["superseded_chunks"]
        + counted["aborted_stores"]
        + odd["quarantined_slots"]
    )
    wrong = []
    if counted["granted_slots"] != ends:
        wrong.append(f"{counted['granted_slots']} slots were granted, {ends} grants ended")
    if counted["committed_chunks"] - counted["evicted_chunks"] != chunks:
        wrong.append(
            f"{counted['committed_chunks']} chunks came, {counted['evicted_chunks']} went, {chunks} are there"
        )
    return wrong


@pytest.mark.timeout(scale(90, 1800))
def test_engines_come_and_go_for_a_long_time(daemon: Daemon, stage: Stage) -> None:
    with Record("12 soak") as record:
        baseline = warm_up(daemon, stage)
        crowd = Crowd(daemon, stage, record)
        began = time.monotonic()
        memory: list[tuple[float, int]] = []
        next_kill = next_check = began
        next_stop = began + KILL_EVERY_S / 4
        while (now := time.monotonic()) < began + SECONDS:
            if now >= next_kill:
                crowd.wake()
                crowd.kill_one()
                next_kill += KILL_EVERY_S
            if now >= next_stop:
                crowd.stop_one()
                next_stop += KILL_EVERY_S
            if now >= next_check:
                daemon.check_integrity()
                next_check += CHECK_EVERY_S
            memory.append(((now - began) / SECONDS, memory_kib(daemon.pid, "RssAnon")))
            time.sleep(0.05)
        crowd.end()
        wait_held(daemon, (0, 0, 0))
        wait_for(lambda: not daemon.status().sessions, 2.0, "the sessions to be gone")
        daemon.check_integrity()
        _settle(daemon)
        assert counters_add_up(daemon.status()) == []
        _compare(daemon.status(), crowd)
        wait_belongings(daemon, baseline)
        record.rounds = crowd.seen["steps"]
        record.facts.update(
            {name: crowd.seen[name] for name in ("stored", "read", "resets", "double_release")}
        )
        _check_flat(memory, record)
        check_nothing_wedged(daemon, stage)


def _settle(daemon: Daemon) -> None:
    wait_for(lambda: not daemon.status().memory.retiring_segments, 5.0, "segments on their way to arrive")


def _compare(status: admin_pb2.StatusReply, crowd: Crowd) -> None:
    """The daemon counted at least what the engines saw; a killed one did more after its last word."""
    counted, odd = status.counters, status.anomalies
    assert odd["double_release"] >= crowd.seen["double_release"] > 0
    assert odd["stale_commit"] >= crowd.seen["stale_commit"] > 0
    assert counted["committed_chunks"] > 0 < counted["evicted_chunks"]
    assert counted["segments_retired"] > 0
    assert odd["hole_detected"] == odd["false_fence"] == odd["foreign_segment"] == 0


def _check_flat(memory: list[tuple[float, int]], record: Record) -> None:
    """Memory in the last quarter is what it was in the second, give or take."""
    early = [kib for at, kib in memory if SETTLED_AFTER <= at < 0.5]
    late = [kib for at, kib in memory if at >= 0.75]
    grown = statistics.median(late) - statistics.median(early)
    record.facts["rss_anon_kib"] = round(statistics.median(late))
    record.facts["rss_grown_kib"] = round(grown)
    assert grown < FLAT_KIB, f"the daemon's memory grew by {grown} KiB: {early[0]} to {late[-1]}"


def test_the_sums_would_show_a_lost_slot() -> None:
    """The negative control: one grant that never ended, one chunk that went without a word."""
    status = admin_pb2.StatusReply(
        counters={"granted_slots": 10, "committed_chunks": 7, "superseded_chunks": 1, "aborted_stores": 1},
        anomalies={"quarantined_slots": 1},
        namespaces=[admin_pb2.NamespaceStatus(chunks=7)],
    )
    assert counters_add_up(status) == []
    status.counters["granted_slots"] += 1
    status.namespaces[0].chunks -= 1
    assert len(counters_add_up(status)) == 2
