"""Drill 2: a writer is stopped, its session is ended by an operator, the pool is churned through, and it
wakes up, writes and commits. It must be refused, and no other chunk's byte may change (I4, I5; B6)."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvhost_client.admin import AdminClient
from tests.drills.daemons import check_nothing_wedged, held, session_of, small_daemon, wait_held
from tests.drills.scale import Record, rounds, scale
from tests.drills.stage import ActorFailed, Process, Stage
from tests.support import Daemon, wait_for

ROUNDS = rounds(4, 100)
SLOTS = 4 * 17
CHURNS = 3
RESERVED = 6


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with small_daemon("4MiB") as running:
        yield running


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as started:
        yield started


class Writer:
    """An engine with reserved slots, half of them being written when it is stopped."""

    def __init__(self, stage: Stage, daemon: Daemon, name: str) -> None:
        self.process = stage.start()
        self.number: int = self.process.call("engine", socket=daemon.socket)
        self.names = [f"{name}.{i}" for i in range(RESERVED)]
        granted: list[list[int]] = []

        def reserved() -> bool:
            granted[:] = self.process.call("reserve", names=self.names)["chunks"]
            return all(chunk[0] == 1 for chunk in granted) or not self._abort(granted)

        wait_for(reserved, 5.0, f"{RESERVED} slots for the writer")
        self.stores = [store for _, store, _ in granted]
        self.slots = [slot for _, _, slot in granted]

    def _abort(self, granted: list[list[int]]) -> bool:
        """Gives a partial reservation back: more segments are being mapped."""
        self.process.call("update", aborts=[store for status, store, _ in granted if status == 1])
        return True

    def begin(self) -> None:
        """A copy that is half done."""
        assert self.process.call(
            "begin", session=self.number, slot=self.slots[0], name=self.names[0], stores=[self.stores[0]]
        )

    def commit(self) -> Any:
        """Commits everything; the errors, or the class of what it raised."""
        try:
            return self.process.call("update", names=self.names, commits=self.stores)
        except ActorFailed as failed:
            return failed.kind


def churn(daemon: Daemon, other: Process, label: str) -> dict[str, int]:
    """Stores the pool's size three times over; the length of each chain that is there now."""
    goal = daemon.status().counters["committed_chunks"] + CHURNS * SLOTS
    turn = 0
    lengths: dict[str, int] = {}
    while daemon.status().counters["committed_chunks"] < goal:
        chain = [f"{label}{turn}.{i}" for i in range(20)]
        lengths[f"{label}{turn}"] = other.call("store", names=chain)
        turn += 1
    return lengths


def check_others(other: Process, label: str, lengths: dict[str, int]) -> int:
    """Every chunk that is there has its own bytes; how many were looked at."""
    seen = 0
    for name, length in lengths.items():
        chain = [f"{name}.{i}" for i in range(length)]
        there = other.call("lookup", names=chain) if chain else 0
        assert other.call("wrong", names=chain[:there]) == [], name
        seen += there
    return seen


@pytest.mark.timeout(scale(60, 1200))
@pytest.mark.parametrize("copying", [True, False], ids=["amid a copy", "before its copy"])
def test_a_writer_that_wakes_up_late_changes_nothing(daemon: Daemon, stage: Stage, copying: bool) -> None:
    with Record(f"2 stale writer, stopped {'amid a copy' if copying else 'before its copy'}") as record:
        other = stage.start()
        other.call("engine", socket=daemon.socket)
        for turn in range(ROUNDS):
            _one_round(daemon, stage, other, f"w{turn}", copying)
            record.rounds += 1
        record.facts["chunks_churned"] = daemon.status().counters["committed_chunks"]
        record.facts["stale_commits"] = daemon.status().anomalies["stale_commit"]
        other.close()
        check_nothing_wedged(daemon, stage)


def _one_round(daemon: Daemon, stage: Stage, other: Process, name: str, copying: bool) -> None:
    writer = Writer(stage, daemon, name)
    if copying:
        writer.begin()
    writer.process.stop()
    with AdminClient(daemon.socket) as admin:
        assert admin.end_session(writer.number).quarantined == RESERVED
    lengths = churn(daemon, other, f"{name}o")
    # Churned three times over, and its slots are still nobody's.
    assert held(daemon.status())[2] == RESERVED
    told = session_of(daemon.status(), writer.number)
    assert told is not None
    assert (told.state, told.pid, told.quarantined) == ("ended", writer.process.pid, RESERVED)
    assert [mapping.open_fences for mapping in told.mappings] == [1]
    writer.process.go_on()
    # It writes, through the mapping and past it, and commits.
    if copying:
        assert writer.process.call("finish")
    for own, slot, store in list(zip(writer.names, writer.slots, writer.stores, strict=True))[copying:]:
        writer.process.call("copy", session=writer.number, slot=slot, name=own, stores=[store])
    assert writer.commit() == "SessionEnded"
    wait_held(daemon, (0, 0, 0))
    # Now that it is proven quiet, its mapping refuses what it did not refuse before.
    assert writer.process.call("refuses", session=writer.number, stores=writer.stores)
    assert other.call("lookup", names=writer.names) == 0
    assert check_others(other, name, lengths) > SLOTS // 2
    writer.process.close()
    daemon.check_integrity()


def test_its_old_store_ids_are_refused_in_its_next_session(daemon: Daemon, stage: Stage) -> None:
    """The engine reconnects and commits what it held before: one error each, counted, nothing published."""
    writer = Writer(stage, daemon, "again")
    with AdminClient(daemon.socket) as admin:
        admin.end_session(writer.number)
    wait_for(lambda: writer.process.call("ended"), 5.0, "the writer to hear of its session's end")
    wait_held(daemon, (0, 0, 0))
    stale = daemon.status().anomalies["stale_commit"]
    writer.process.call("open", socket=daemon.socket, instance=writer.process.call("instance"), model="test")
    errors = writer.commit()
    assert [(kind, store) for kind, store, _ in errors] == [("COMMIT", store) for store in writer.stores]
    assert daemon.status().anomalies["stale_commit"] == stale + RESERVED
    assert sum(namespace.chunks for namespace in daemon.status().namespaces) == 0


def test_a_writer_that_asks_nobody_is_seen_by_the_same_check(daemon: Daemon, stage: Stage) -> None:
    """The negative control: the writer calls itself quiet, and writes all the same into what is reissued."""
    writer = Writer(stage, daemon, "rogue")
    other = stage.start()
    other.call("engine", socket=daemon.socket)
    writer.process.call("update", aborts=writer.stores)
    lengths = churn(daemon, other, "o")
    for slot in writer.slots:
        writer.process.call("scribble", slot=slot, name="rogue")
    with pytest.raises(AssertionError):
        check_others(other, "o", lengths)
