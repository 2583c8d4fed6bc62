"""Drill 6: the pool is full and stays full. Every answer comes at once, nothing is retried for ever, the log
stays short, and one engine that is stopped holds no more than its bound (I5; D1, E1)."""

import time
from collections.abc import Iterator

import pytest

from kvhost_client.admin import AdminClient
from tests.drills.daemons import check_nothing_wedged, held, session_of, wait_held
from tests.drills.scale import Record, rounds, scale
from tests.drills.stage import Stage
from tests.drills.test_death import Cast
from tests.support import Daemon, wait_for

STORES = rounds(10_000, 30_000)
BATCH = 50
AT_ONCE_S = 0.05
# In a segment of one megabyte.
SLOTS = 17
RESERVED, NO_SPACE = 1, 4


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("1MiB", ["--segment-size", "1MiB"]) as running:
        yield running


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as started:
        yield started


class Seat:
    """An engine in its process, and the number of its session."""

    def __init__(self, stage: Stage, daemon: Daemon, model: str = "test") -> None:
        self.process = stage.start()
        self.number: int = self.process.call("engine", socket=daemon.socket, model=model)
        self.pid = self.process.pid
        self.call = self.process.call
        self.pinned: dict[str, tuple[int, int]] = {}

    def pin(self, names: list[str]) -> int:
        """Pins what is there of a chain, and remembers it."""
        pins = self.call("pin", names=names)
        self.pinned.update(zip(names, map(tuple, pins), strict=False))
        return len(pins)

    def wrong(self) -> list[str]:
        """Pinned chunks whose bytes are not their own."""
        return [
            name
            for name, (_, slot) in self.pinned.items()
            if not self.call("copy", session=self.number, slot=slot, name=name)
        ]


def _fill_and_pin(stage: Stage, daemon: Daemon) -> list[Seat]:
    """Engines that together pin every slot; each may pin half."""
    seats = [Seat(stage, daemon) for _ in range(3)]
    for number, seat in enumerate(seats):
        names = [f"{number}.{i}" for i in range(6 if number else 5)]
        assert seat.call("store", names=names) == len(names)
        assert seat.pin(names) == len(names)
    assert held(daemon.status()) == (SLOTS, 0, 0)
    return seats


def _log_lines(daemon: Daemon) -> int:
    return len(daemon.log.splitlines())


@pytest.mark.timeout(scale(60, 600))
def test_everything_pinned_and_ten_thousand_stores(daemon: Daemon, stage: Stage) -> None:
    with Record("6 full pool: everything pinned, stores through it") as record:
        seats = _fill_and_pin(stage, daemon)
        writer = Seat(stage, daemon)
        before = _log_lines(daemon)
        for batch in range(STORES // BATCH):
            names = [f"n{batch}.{i}" for i in range(BATCH)]
            began = time.monotonic()
            answer = writer.call("reserve", names=names)
            record.worst("slowest_answer_s", time.monotonic() - began)
            assert {status for status, _, _ in answer["chunks"]} == {NO_SPACE}
            assert not answer["pending"]
            assert answer["reason"].startswith("no slot can be had")
            record.rounds += BATCH
        assert _log_lines(daemon) - before < 5, daemon.log[-2000:]
        assert record.facts["slowest_answer_s"] < scale(0.5, 0.5), "an answer that waits for something"
        assert daemon.status().counters["no_space"] >= STORES
        # One release, and the next store finds room.
        pin, _ = seats[0].pinned.pop("0.4")
        assert seats[0].call("update", releases=[pin]) == []
        assert writer.call("store", names=["after"]) == 1
        for seat in seats:
            assert seat.wrong() == []
            seat.process.close()
        writer.process.close()
        check_nothing_wedged(daemon, stage)


@pytest.mark.timeout(scale(60, 600))
def test_ten_thousand_stores_through_sixteen_slots(daemon: Daemon, stage: Stage) -> None:
    """A chunk is pinned all the while, so that sixteen are left."""
    with Record("6 full pool: stores through 16 slots") as record:
        keeper = Seat(stage, daemon)
        assert keeper.call("store", names=["kept"]) == 1
        assert len(keeper.call("pin", names=["kept"])) == 1
        writer = Seat(stage, daemon)
        before = _log_lines(daemon)
        began = time.monotonic()
        for batch in range(STORES // BATCH):
            # A chain longer than the pool keeps its head; the rest is refused at once.
            stored = writer.call("store", names=[f"s{batch}.{i}" for i in range(BATCH)])
            assert stored == SLOTS - 1, stored
            record.rounds += BATCH
        record.facts["stores_per_s"] = round(record.rounds / (time.monotonic() - began))
        for half in (range(8), range(8, 16)):
            assert writer.call("wrong", names=[f"s{batch}.{i}" for i in half]) == []
        assert keeper.call("wrong", names=["kept"]) == []
        assert _log_lines(daemon) - before < 5, daemon.log[-2000:]
        writer.process.close()
        keeper.process.close()
        check_nothing_wedged(daemon, stage)


def test_a_prompt_larger_than_the_pool_keeps_its_head(daemon: Daemon, stage: Stage) -> None:
    writer = Seat(stage, daemon)
    names = [f"p{i}" for i in range(40)]
    assert writer.call("store", names=names) == SLOTS
    assert writer.call("lookup", names=names) == SLOTS
    # What can be pinned at once is bound; what is pinned has its own bytes.
    assert writer.call("wrong", names=names[: SLOTS // 2]) == []


def test_one_stopped_engine_holds_no_more_than_its_bound(stage: Stage) -> None:
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as daemon:
        greedy, other = Seat(stage, daemon), Seat(stage, daemon)
        slots = 8 * SLOTS
        names = [f"g{i}" for i in range(slots)]
        assert greedy.call("store", names=names) == slots
        pins = greedy.call("pin", names=names)
        taken = []
        while got := greedy.call("take", count=8):
            taken += got
        granted = [
            store
            for i in range(slots)
            for status, store, _ in greedy.call("reserve", names=[f"more{i}"])["chunks"]
            if status == RESERVED
        ]
        greedy.process.stop()
        told = session_of(daemon.status(), greedy.number)
        assert told is not None
        assert told.pins == len(pins) <= slots // 2
        assert told.grants == len(taken) + len(granted) <= slots // 4
        assert len(taken) <= slots // 8
        assert (told.pin_bound, told.grant_bound) == (slots // 2, slots // 4)
        assert told.pid == greedy.pid
        assert [mapping.pid for mapping in told.mappings] == [greedy.pid]
        # The rest of the pool is everybody else's, at once.
        rest = slots - told.pins - told.grants
        began = time.monotonic()
        assert other.call("store", names=[f"o{i}" for i in range(slots)]) == rest
        assert time.monotonic() - began < 5.0
        assert other.call("wrong", names=[f"o{i}" for i in range(rest)]) == []
        greedy.process.kill()
        wait_held(daemon, (0, 0, 0))


def test_an_engine_that_is_kicked_again_and_again_holds_no_more_than_its_bound(stage: Stage) -> None:
    """Its worker hangs in a copy, so what it held stays; its next sessions may not add to it for ever."""
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as daemon, AdminClient(daemon.socket) as admin:
        slots = 8 * SLOTS
        filler = Seat(stage, daemon, "ranks1")
        names = [f"f{i}" for i in range(slots)]
        assert filler.call("store", names=names) == slots
        cast = Cast(stage, daemon, 1, "k")
        worker = cast.workers[0]
        assert worker.call("begin", session=cast.session, slot=cast.slots[0], name=cast.stored[0])
        worker.stop()
        for kick in range(4):
            cast.scheduler.call("pin", names=names[kick * 20 : kick * 20 + 50])
            for chunk in range(10):
                cast.scheduler.call("reserve", names=[f"k{kick}.{chunk}"])
            pinned, granted, quarantined = held(daemon.status())
            assert pinned <= slots // 2, f"after {kick} kicks it holds {pinned} of {slots} slots as pins"
            assert granted + quarantined <= slots // 4
            admin.end_session(cast.session)
            wait_for(lambda: cast.scheduler.call("ended"), 5.0, "the scheduler to hear of it")
            cast.open(cast.scheduler, wait=False)
        worker.kill()
        cast.scheduler.kill()
        wait_held(daemon, (0, 0, 0))


def test_a_stopped_engine_bars_nobody_from_the_rest_of_the_pool(stage: Stage) -> None:
    """Its worker cannot let go of a segment that is to move to another namespace. The next one is taken from
    an engine that lives, and status names the one that does not."""
    with Daemon("4MiB", ["--segment-size", "1MiB"]) as daemon:
        stopped = Seat(stage, daemon, "stopped")
        assert stopped.call("store", names=[f"s{i}" for i in range(SLOTS)]) == SLOTS
        living = Seat(stage, daemon, "living")
        assert living.call("store", names=[f"l{i}" for i in range(SLOTS)]) == SLOTS
        assert daemon.status().memory.free_segments == 0, "each has one more, ahead of need"
        assert stopped.pin(["s0"]) == living.pin(["l0"]) == 1
        stopped.process.stop()
        young = stage.start()
        young.call("engine", socket=daemon.socket, model="young", ready=False)
        wait_for(lambda: young.call("store", names=["y"]) == 1, 5.0, "a segment for the third engine")
        assert young.call("wrong", names=["y"]) == []
        assert living.wrong() == []
        (note,) = daemon.status().memory.notes
        assert f"pid {stopped.pid}" in note
        stopped.process.go_on()
        assert stopped.wrong() == []
        wait_for(lambda: not daemon.status().memory.notes, 5.0, "the woken engine to let go")
        for seat in (stopped, living):
            seat.process.kill()
        young.kill()
        wait_held(daemon, (0, 0, 0))
        daemon.check_integrity()
