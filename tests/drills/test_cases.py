"""Field cases that no other drill plays: small faults that users of similar systems met (B4, B5, C5, C9, D1).

Each stands for a kind. What tests of the client or the daemon show in one process is not repeated here.
"""

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drills.daemons import (
    Belongings,
    check_nothing_wedged,
    held,
    small_daemon,
    wait_belongings,
    wait_held,
    warm_up,
)
from tests.drills.scale import Record, rounds, scale
from tests.drills.stage import Stage
from tests.drills.test_full_pool import SLOTS, Seat
from tests.support import Daemon, wait_for

RESERVED = 1


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with small_daemon("2MiB") as running:
        yield running


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as started:
        yield started


@pytest.mark.timeout(scale(60, 300))
def test_what_a_dead_engine_was_writing_can_be_stored_by_another(daemon: Daemon, stage: Stage) -> None:
    """B4: keys stay neither "being written" nor half-written."""
    with Record("B4 keys of a dead writer") as record:
        baseline = warm_up(daemon, stage)
        other = Seat(stage, daemon)
        assert other.call("store", names=["mine"]) == 1
        assert other.pin(["mine"]) == 1
        for turn in range(rounds(10, 100)):
            victim = Seat(stage, daemon)
            names = [f"{turn}.{i}" for i in range(4)]
            assert victim.call("store", names=[f"{name}p" for name in names]) == 4
            assert victim.pin([f"{name}p" for name in names]) == 4
            taken = victim.call("reserve", names=names)["chunks"]
            assert [status for status, _, _ in taken] == [RESERVED] * 4
            for (_, store, slot), name in zip(taken[:2], names, strict=False):
                assert victim.call("begin", session=victim.number, slot=slot, name=name, stores=[store])
            assert other.call("reserve", names=names[:1])["chunks"][0][0] != RESERVED, "it is being written"
            wait_held(daemon, (1, 0, 0), victim.process.kill())
            assert other.call("store", names=names) == 4
            assert other.call("wrong", names=names) == []
            victim.process.close()
            record.rounds += 1
        assert other.wrong() == []
        other.process.close()
        wait_held(daemon, (0, 0, 0))
        wait_belongings(daemon, baseline)


def test_releasing_more_than_one_holds_takes_nothing_from_another(daemon: Daemon, stage: Stage) -> None:
    """B5: two engines pin a chunk, one gives it back three times, the pool is flooded: it stays."""
    first, second, flood = Seat(stage, daemon), Seat(stage, daemon), Seat(stage, daemon)
    assert first.call("store", names=["k"]) == 1
    assert first.pin(["k"]) == second.pin(["k"]) == 1
    before = daemon.status().anomalies["double_release"]
    pin, slot = first.pinned["k"]
    errors = [first.call("update", releases=[pin]) for _ in range(3)]
    # The other's pin is not the first's to give back either.
    errors.append(first.call("update", releases=[second.pinned["k"][0]]))
    assert [len(one) for one in errors] == [0, 1, 1, 1]
    assert daemon.status().anomalies["double_release"] == before + 3
    for turn in range(6):
        flood.call("store", names=[f"{turn}.{i}" for i in range(2 * SLOTS)])
    assert held(daemon.status()) == (1, 0, 0)
    assert second.wrong() == []
    assert second.call("update", releases=[second.pinned["k"][0]]) == []
    wait_held(daemon, (0, 0, 0))
    flood.call("store", names=[f"last.{i}" for i in range(2 * SLOTS)])
    assert first.call("lookup", names=["k"]) == 0
    # The negative control: without a pin the same read is wrong by now.
    assert not first.call("copy", session=first.number, slot=slot, name="k")


def test_a_hit_is_a_pin_in_hand(stage: Stage) -> None:
    """D1: what was found is loaded, whatever others store between the lookup and the load."""
    with Daemon("1MiB", ["--segment-size", "1MiB"]) as daemon:
        reader, other = Seat(stage, daemon), Seat(stage, daemon)
        names = [f"d1.{i}" for i in range(8)]
        assert reader.call("store", names=names) == 8
        assert reader.pin(names) == 8
        for turn in range(4):
            stored = other.call("store", names=[f"o{turn}.{i}" for i in range(2 * SLOTS)])
            assert stored == SLOTS - 8, "there is room for what is not pinned, at once, and for no more"
        assert reader.wrong() == []


def test_an_engine_that_crashes_takes_nobody_with_it(daemon: Daemon) -> None:
    """C9: its process dies of SIGBUS or SIGSEGV; the daemon and others go on, and the log names it."""
    with Stage() as stage:
        other = Seat(stage, daemon)
        assert other.call("store", names=["k"]) == 1
        assert other.pin(["k"]) == 1
    with pytest.raises(AssertionError, match="an actor crashed"), Stage() as stage:
        for number in (signal.SIGBUS, signal.SIGSEGV):
            victim = Seat(stage, daemon)
            victim.call("store", names=[f"v{number}"])
            victim.pin([f"v{number}"])
            victim.process.signal(number)
            wait_for(lambda victim=victim: victim.process.ended, 5.0)
            wait_held(daemon, (0, 0, 0))
            daemon.wait_log(f"session {victim.number} of pid {victim.pid} ended")
    with Stage() as stage:
        check_nothing_wedged(daemon, stage)


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_worker_at_its_limit_of_open_files_leaves_no_trace_of_its_tries(
    daemon: Daemon, stage: Stage, spare: int
) -> None:
    """It can open no connection, or not greet, or not take the segments. It says so once, it goes on trying,
    and the daemon keeps nothing of the tries that failed."""
    other = Seat(stage, daemon, "ranks1")
    assert other.call("store", names=[f"s{i}" for i in range(2 * SLOTS)]) == 2 * SLOTS
    baseline = Belongings.of(daemon.pid)
    scheduler, worker = stage.start(), stage.start()
    instance = secrets.token_hex(16)
    worker.call("limit_files", spare=spare)
    tries: set[str] = set()

    def tried() -> bool:
        token = (
            worker.call("token") if tries else worker.call("attach", socket=daemon.socket, instance=instance)
        )
        if token not in tries:
            tries.add(token)
            scheduler.call("open", socket=daemon.socket, instance=instance, model="ranks1", tokens=[token])
        return bool(worker.call("problem")) and len(tries) >= (4 if spare == 2 else 1)

    wait_for(tried, 20.0, "the worker to try and fail")
    assert "open files" in worker.call("problem")
    told = [session for session in daemon.status().sessions if session.pid == scheduler.pid]
    assert sum(len(session.mappings) for session in told) <= 1
    scheduler.kill()
    worker.kill()
    wait_held(daemon, (0, 0, 0))
    wait_belongings(daemon, baseline)


def _segments_alive(inodes: set[str]) -> set[str]:
    """Which of these memory files some process still maps or has open."""
    alive: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
            alive |= inodes & {line.split()[4] for line in lines if "memfd:kvhost" in line}
            for fd in (process / "fd").iterdir():
                if "memfd:kvhost" in os.readlink(fd):
                    alive |= inodes & {str(fd.stat().st_ino)}
        except OSError:
            continue  # it ended meanwhile
    return alive


@pytest.mark.timeout(scale(60, 300))
def test_crashes_leave_no_memory_behind(stage: Stage) -> None:
    """C5: the daemon and its engines are killed, again and again. Segments go with their last holder."""
    with Record("C5 memory after crashes") as record:
        files = set(os.listdir("/dev/shm"))
        for _ in range(rounds(3, 20)):
            with small_daemon("4MiB") as daemon:
                seats = [Seat(stage, daemon) for _ in range(2)]
                assert seats[0].call("store", names=["k"]) == 1
                inodes = {
                    str(os.stat(f"/proc/{daemon.pid}/fd/{fd}").st_ino)
                    for fd in os.listdir(f"/proc/{daemon.pid}/fd")
                    if "memfd:kvhost" in os.readlink(f"/proc/{daemon.pid}/fd/{fd}")
                }
                assert _segments_alive(inodes) == inodes
                # In the worst order: the engines are stopped, so that they cannot unmap.
                for seat in seats:
                    seat.process.stop()
                daemon.kill()
                assert _segments_alive(inodes), "the negative control: the engines still hold them"
                for seat in seats:
                    seat.process.kill()
                wait_for(lambda inodes=inodes: not _segments_alive(inodes), 2.0, "the memory to be free")
            record.rounds += 1
        assert not [name for name in set(os.listdir("/dev/shm")) - files if "kvhost" in name]


def test_belongings_would_show_what_is_left_over() -> None:
    """The negative control of every drill that compares the daemon with itself."""
    before = Belongings.of(os.getpid())
    with open("/dev/zero", "rb"):
        assert "/dev/zero" in Belongings.of(os.getpid()).more_than(before)
    assert "/dev/zero" not in Belongings.of(os.getpid()).more_than(before)
