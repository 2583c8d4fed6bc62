"""Drill 1: a small pool is flooded while a reader, stopped at random for longer than any timeout, copies long
batches. No byte may be wrong and no slot may be lost (I1, I3, I4; D1, D2)."""

import math
import time
from collections.abc import Iterator

import pytest

from tests.drills.daemons import check_nothing_wedged, small_daemon
from tests.drills.scale import Record, scale
from tests.drills.stage import Process, Stage
from tests.support import Daemon, wait_for

SECONDS = scale(8, 600)
WRITERS = 2
SLOTS = 4 * 17
BATCHES = {"family": "f", "chains": 20, "length": 30}
PASSES = 5
# Most stops are short, some last longer than a call's deadline, one longer than anything that has a limit.
STOPPED_S = (0.01, 1.6)
STOPPED_LONG_S = scale(3.0, 35.0)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with small_daemon("4MiB") as running:
        yield running


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as started:
        yield started


def _engine(stage: Stage, daemon: Daemon) -> Process:
    process = stage.start()
    process.call("engine", socket=daemon.socket)
    return process


def _flood(stage: Stage, daemon: Daemon, seed: int) -> list[Process]:
    """Writers that store far more than the pool holds."""
    writers = [_engine(stage, daemon) for _ in range(WRITERS)]
    for number, writer in enumerate(writers):
        writer.call("loop", kind="store", **BATCHES, seed=seed + number)
    wait_for(lambda: daemon.status().counters["evicted_chunks"] > 0, 10.0, "the pool to be full")
    return writers


@pytest.mark.timeout(scale(60, 1200))
def test_a_reader_stopped_at_random_reads_no_wrong_byte(daemon: Daemon, stage: Stage) -> None:
    with Record("1 torn reads") as record:
        writers = _flood(stage, daemon, record.seed)
        readers = [_engine(stage, daemon) for _ in range(2)]
        for number, reader in enumerate(readers):
            reader.call("loop", kind="read", **BATCHES, passes=PASSES, seed=record.seed + number)
        until = time.monotonic() + SECONDS
        longest_at = time.monotonic() + SECONDS / 2
        while time.monotonic() < until:
            victim = readers[record.random.randrange(2)]
            pause = math.exp(record.random.uniform(*map(math.log, STOPPED_S)))
            if time.monotonic() > longest_at:
                pause, longest_at = STOPPED_LONG_S, float("inf")
            victim.stop()
            evicted = daemon.status().counters["evicted_chunks"]
            _pause(pause)
            if daemon.status().counters["evicted_chunks"] > evicted:
                record.count("churned_while_stopped")
            record.worst("longest_stop_s", pause)
            victim.go_on()
            record.count("stops")
            _pause(record.random.uniform(0.0, 0.05))
        told = [process.call("end_loop", timeout_s=60.0) for process in (*readers, *writers)]
        for one in told[:2]:
            record.rounds += one["batches"]
            record.count("chunks_read", one["read"])
            record.failures += one.get("wrong", 0)
            assert one.get("wrong", 0) == 0, one["samples"]
            assert "refused" not in one, one
        record.count("chunks_evicted", daemon.status().counters["evicted_chunks"])
        assert record.facts["churned_while_stopped"]
        for process in (*readers, *writers):
            process.call("close_engine")
            process.close()
        check_nothing_wedged(daemon, stage)


def test_a_reader_without_pins_is_caught_by_the_same_check(daemon: Daemon, stage: Stage) -> None:
    """The negative control: pins given back before the copy, everything else as above."""
    _flood(stage, daemon, 1)
    reader = _engine(stage, daemon)
    reader.call("loop", kind="read", **BATCHES, passes=PASSES, protected=False)
    seen: list[dict[str, object]] = []

    def caught() -> bool:
        reader.stop()
        _wait_evicted(daemon, SLOTS)
        reader.go_on()
        seen[:] = [reader.call("report")]
        return bool(seen[0].get("wrong"))

    wait_for(caught, 30.0, "a wrong byte")
    assert all("of nobody known" not in str(sample) for sample in seen[0]["samples"]), seen  # type: ignore[attr-defined]


def test_a_reader_that_stops_in_the_middle_of_a_copy(daemon: Daemon, stage: Stage) -> None:
    """D2 by hand: half of a chunk is read before the pool is turned over, half after."""
    reader = _engine(stage, daemon)
    names = [f"d2.{i}" for i in range(6)]
    reader.call("store", names=names)
    pins = reader.call("pin", names=names)
    assert len(pins) == len(names)
    session = daemon.status().sessions[0].number
    assert reader.call("begin", session=session, slot=pins[3][1], name=names[3])
    reader.stop()
    _flood(stage, daemon, 2)
    _wait_evicted(daemon, 3 * SLOTS)
    reader.go_on()
    assert reader.call("finish")
    assert reader.call("wrong", names=names) == []
    assert reader.call("update", releases=[pin for pin, _ in pins]) == []


def test_the_same_read_without_a_pin_is_seen_to_be_torn(daemon: Daemon, stage: Stage) -> None:
    """The negative control of the test above."""
    reader = _engine(stage, daemon)
    reader.call("store", names=["torn"])
    ((pin, slot),) = reader.call("pin", names=["torn"])
    session = daemon.status().sessions[0].number
    assert reader.call("begin", session=session, slot=slot, name="torn")
    assert reader.call("update", releases=[pin]) == []
    _flood(stage, daemon, 3)
    wait_for(lambda: reader.call("lookup", names=["torn"]) == 0, 30.0, "the chunk to be evicted")
    _wait_evicted(daemon, SLOTS)
    assert not reader.call("finish")


def _wait_evicted(daemon: Daemon, chunks: int) -> None:
    """Waits until so many more chunks were evicted."""
    goal = daemon.status().counters["evicted_chunks"] + chunks
    wait_for(lambda: daemon.status().counters["evicted_chunks"] >= goal, 30.0, f"{chunks} evictions")


def _pause(seconds: float) -> None:
    """Lets time pass, where time is what the drill is about."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))
