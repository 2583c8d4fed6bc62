"""A session's calls against a real daemon: what they give, what they refuse, and how a session ends."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvhost_client.admin import AdminClient
from kvhost_client.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KVHostError,
    NotHeld,
    NotMapped,
    NotServing,
    SessionEnded,
    StaleStore,
    Unavailable,
)
from kvhost_client.session import Session
from kvhost_client.types import (
    Abort,
    ChainQuery,
    Chunk,
    Found,
    ItemKind,
    Query,
    ReserveStatus,
    Semantics,
    ServiceState,
    StoreOf,
)
from tests.client.engine import Engine, key, keys, prefix, spec
from tests.support import Daemon, map_count, thread_count, wait_for

CLIENT_TESTS = str(Path(__file__).parent.parent.parent)


def other_process(socket: str, what: str, name: str, count: int) -> dict[str, object]:
    """What an engine in a process of its own says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.client.engine", socket, what, name, str(count)],
        cwd=CLIENT_TESTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


class TestOpening:
    def test_both_sides_know_who_is_there(self, daemon: Daemon) -> None:
        instance = secrets.token_bytes(16)
        session = Session.open(daemon.socket, instance_id=instance, label="vllm 0.32.0 tiny")
        status = daemon.status()
        assert f"{session.boot_id:016x}" == status.boot_id
        assert session.state is ServiceState.SERVING
        assert session.generation == 0
        (told,) = status.sessions
        assert (told.number, told.label, told.pid, told.uid) == (
            session.number,
            "vllm 0.32.0 tiny",
            os.getpid(),
            os.getuid(),
        )
        session.close()
        wait_for(lambda: not daemon.status().sessions, what="the session to end")

    def test_nothing_is_possible_before_a_namespace_is_declared(self, daemon: Daemon) -> None:
        session = Session.open(daemon.socket, instance_id=bytes(16), label="x")
        for act in (
            lambda: session.lookup([prefix(keys("a", 1))]),
            lambda: session.reserve(1),
            session.reset,
        ):
            with pytest.raises(FailedPrecondition, match="declared no namespace"):
                act()
        assert not session.ended
        session.close()

    def test_a_proxy_of_the_environment_is_not_used(
        self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "grpc_proxy", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        with Engine(daemon.socket) as engine:
            engine.store(keys("a", 2))
            assert engine.wrong_bytes(keys("a", 2)) == []

    def test_a_path_with_odd_characters(self, folder: Path) -> None:
        odd = folder / "a b%20#é?"
        odd.mkdir()
        with Daemon(folder=odd, wait=False) as daemon:
            wait_for(lambda: serving(daemon), 10.0, "kvhostd to serve")
            with Engine(daemon.socket) as engine:
                engine.store(keys("a", 1))
                assert engine.wrong_bytes(keys("a", 1)) == []

    def test_it_opens_in_milliseconds(self, daemon: Daemon) -> None:
        spans = []
        for _ in range(5):
            started = time.monotonic()
            session = Session.open(daemon.socket, instance_id=bytes(16), label="x")
            spans.append(time.monotonic() - started)
            session.close()
        assert min(spans) < 0.2

    def test_two_sessions_of_one_engine_are_one(self, daemon: Daemon) -> None:
        """The newer one takes the place of the older one."""
        ends: list[str] = []
        first = Session.open(daemon.socket, instance_id=bytes(16), label="1", on_end=ends.append)
        second = Session.open(daemon.socket, instance_id=bytes(16), label="2")
        wait_for(lambda: ends, what="the older session to be told")
        assert "newer session" in ends[0]
        assert first.ended
        assert not second.ended
        second.close()


class TestBytes:
    def test_stored_chunks_come_back(self, engine: Engine) -> None:
        engine.store(keys("a", 5))
        assert engine.wrong_bytes(keys("a", 5)) == []
        assert engine.session.lookup([prefix(keys("a", 6))])[0].chains[0].found == b"\1" * 5 + b"\0"

    def test_another_process_reads_them(self, daemon: Daemon, engine: Engine) -> None:
        engine.store(keys("a", 7))
        assert other_process(daemon.socket, "read", "a", 7) == {"wrong": []}

    def test_what_another_process_left_is_there_after_its_end(self, daemon: Daemon, engine: Engine) -> None:
        assert other_process(daemon.socket, "store", "b", 6) == {"stored": 6}
        assert engine.wrong_bytes(keys("b", 6)) == []

    def test_wrong_bytes_would_be_seen(self, engine: Engine) -> None:
        """The negative control of every test that reads."""
        engine.store(keys("a", 2))
        (pin, *_) = engine.session.pin(0, keys("a", 2))
        engine.session.release([pin])
        engine.write(pin.slot, b"somebody else")
        assert engine.wrong_bytes(keys("a", 2)) == [key("a-0").hex()]

    def test_each_rank_has_its_own_bytes(self, daemon: Daemon) -> None:
        with Engine(daemon.socket, ranks=3, shards=3) as engine:
            engine.store(keys("a", 3))
            assert engine.wrong_bytes(keys("a", 3)) == []

    def test_ranks_with_identical_bytes_share_them(self, daemon: Daemon) -> None:
        with Engine(daemon.socket, ranks=2, shards=1) as engine:
            ((store, slot),) = engine.grant(1)
            engine.write(slot, b"last writer")
            assert engine.read(slot, rank=0) == engine.read(slot, rank=1)
            engine.session.abort(store)

    def test_namespaces_do_not_share(self, daemon: Daemon, engine: Engine) -> None:
        engine.store(keys("a", 3))
        with Engine(daemon.socket, model="another") as other:
            assert other.session.lookup([prefix(keys("a", 3))])[0].chains[0].found == b"\0"


class TestLookups:
    def test_a_prefix_ends_at_the_first_miss(self, engine: Engine) -> None:
        engine.store(keys("a", 3))
        asked = [*keys("a", 2), key("no"), key("a-2")]
        assert engine.session.lookup([prefix(asked)])[0].chains[0].found == b"\1\1\0"

    def test_in_a_set_every_key_stands_for_itself(self, engine: Engine) -> None:
        wanted = keys("w", 2, group=1)
        grants = engine.grant(2)
        for (store, slot), name in zip(grants, wanted, strict=True):
            engine.write(slot, name)
            assert engine.session.commit(store, Chunk(1, name))
        query = Query(5, [ChainQuery(1, Semantics.SET, [key("no", 1), wanted[1], key("no2", 1), wanted[0]])])
        (answer,) = engine.session.lookup([query], pin=True)
        (result,) = answer.chains
        assert answer.tag == 5
        assert result.found == b"\0\1\0\1"
        assert list(result.slots) == [grants[1][1], grants[0][1]]
        engine.session.release(result.pin_ids)

    def test_many_requests_in_one_call(self, engine: Engine) -> None:
        engine.store(keys("a", 3))
        queries = [prefix(keys("a", n), tag=n) for n in range(4)]
        answers = engine.session.lookup(queries)
        assert [(a.tag, a.chains[0].found) for a in answers] == [(n, b"\1" * n) for n in range(4)]

    def test_a_list_longer_than_a_call(self, engine: Engine) -> None:
        """Found in the second and third page as well as in the first; nothing stays pinned."""
        mine = keys("a", 3)
        grants = engine.grant(3)
        for (store, slot), name in zip(grants, mine, strict=True):
            engine.write(slot, name)
            engine.session.commit(store, Chunk(1, name[:-4] + b"\0\0\0\1"))
        there = [name[:-4] + b"\0\0\0\1" for name in mine]
        asked = [secrets.token_bytes(36) for _ in range(40_000)]
        for place, name in zip((5, 20_000, 39_999), there, strict=True):
            asked[place] = name
        query = Query(0, [ChainQuery(1, Semantics.SET, asked)])
        result = engine.session.lookup([query], pin=True, deadline_s=10.0)[0].chains[0]
        assert [n for n, found in enumerate(result.found) if found == Found.HIT] == [5, 20_000, 39_999]
        assert list(result.slots) == [slot for _, slot in grants]
        engine.session.release(result.pin_ids)
        assert not engine.session.ended

    def test_what_is_being_written_is_told(self, engine: Engine) -> None:
        ((store, _),) = engine.grant(1)
        engine.session.assign(store, Chunk(0, key("w")))
        assert engine.session.lookup([prefix([key("w")])])[0].chains[0].found == bytes([Found.BEING_WRITTEN])
        engine.session.abort(store)

    @pytest.mark.parametrize("wrong", [[b"x" * 35], [b"x" * 37], [b"x"]])
    def test_keys_of_another_length_than_the_namespaces(self, engine: Engine, wrong: list[bytes]) -> None:
        with pytest.raises(InvalidArgument):
            engine.session.lookup([prefix(wrong)])
        assert not engine.session.ended

    def test_an_unknown_group(self, engine: Engine) -> None:
        with pytest.raises(InvalidArgument, match="group 9"):
            engine.session.lookup([Query(0, [ChainQuery(9, Semantics.PREFIX, keys("a", 1))])])


class TestHolds:
    """I5: a hold belongs to its owner, and ends once."""

    def test_a_pin_holds_until_it_is_released(self, daemon: Daemon, engine: Engine) -> None:
        engine.store(keys("a", 2))
        pins = engine.session.pin(0, keys("a", 2))
        with AdminClient(daemon.socket) as admin:
            assert admin.evict([key("a-1").hex()]).held == 1
            engine.session.release(pins)
            assert admin.evict([key("a-1").hex()]).evicted == 1

    def test_a_second_release_is_an_error_and_changes_nothing(self, daemon: Daemon, engine: Engine) -> None:
        engine.store(keys("a", 1))
        (mine,) = engine.session.pin(0, keys("a", 1))
        (again,) = engine.session.pin(0, keys("a", 1))
        engine.session.release([mine])
        with pytest.raises(NotHeld):
            engine.session.release([mine])
        assert daemon.status().sessions[0].pins == 1
        assert daemon.status().anomalies["double_release"] == 1
        engine.session.release([again])

    def test_nobody_releases_or_commits_for_another(self, daemon: Daemon, engine: Engine) -> None:
        engine.store(keys("a", 1))
        (pin,) = engine.session.pin(0, keys("a", 1))
        ((store, slot),) = engine.grant(1)
        with Engine(daemon.socket) as stranger:
            with pytest.raises(NotHeld):
                stranger.session.release([pin])
            with pytest.raises(StaleStore):
                stranger.session.commit(store, Chunk(0, key("stolen")))
            with pytest.raises(StaleStore):
                stranger.session.abort(store)
        engine.write(slot, key("b"))
        assert engine.session.commit(store, Chunk(0, key("b")))
        assert engine.wrong_bytes([key("b")]) == []
        engine.session.release([pin])

    def test_a_store_is_committed_once(self, engine: Engine) -> None:
        ((store, slot),) = engine.grant(1)
        engine.write(slot, key("a"))
        assert engine.session.commit(store, Chunk(0, key("a")))
        for act in (
            lambda: engine.session.commit(store, Chunk(0, key("b"))),
            lambda: engine.session.assign(store, Chunk(0, key("b"))),
            lambda: engine.session.abort(store),
        ):
            with pytest.raises(StaleStore):
                act()
        assert engine.session.lookup([prefix([key("b")])])[0].chains[0].found == b"\0"

    def test_the_first_copy_wins_and_the_second_slot_goes_back(self, engine: Engine) -> None:
        (one, slot), (two, _) = engine.grant(2)
        engine.write(slot, key("a"))
        assert engine.session.commit(one, Chunk(0, key("a")))
        assert not engine.session.commit(two, Chunk(0, key("a")))
        assert engine.wrong_bytes([key("a")]) == []

    def test_an_aborted_store_is_never_seen(self, daemon: Daemon, engine: Engine) -> None:
        ((store, slot),) = engine.grant(1)
        engine.write(slot, key("a"))
        engine.session.abort(store)
        assert engine.session.lookup([prefix([key("a")])])[0].chains[0].found == b"\0"
        assert daemon.status().sessions[0].grants == 0

    def test_an_unquiet_writer_is_fenced_and_its_slot_comes_back(
        self, daemon: Daemon, engine: Engine
    ) -> None:
        """The worker's link answers the fence when its copy has ended (I4)."""
        ((store, _),) = engine.grant(1)
        copy = engine.mapping.begin(engine.session.number, [store])
        engine.session.abort(store, unquiet_ranks=[0])
        assert daemon.status().sessions[0].quarantined == 1
        wait_for(lambda: refused(engine, store), what="the fence to arrive")
        assert daemon.status().sessions[0].quarantined == 1
        engine.mapping.end(copy)
        wait_for(lambda: daemon.status().sessions[0].quarantined == 0, what="the slot to be free")
        wait_for(lambda: any(n.fenced.slots for n in engine.notices), what="the notice")

    def test_errors_of_items_do_not_spoil_the_rest(self, engine: Engine) -> None:
        ((store, slot),) = engine.grant(1)
        engine.write(slot, key("a"))
        result = engine.session.update(
            commits=[StoreOf(999_999, Chunk(0, key("x"))), StoreOf(store, Chunk(0, key("a")))],
            aborts=[Abort(888_888)],
            releases=[777_777],
            touches=[ChainQuery(0, Semantics.PREFIX, keys("a", 2))],
        )
        assert {(e.kind, e.id) for e in result.errors} == {
            (ItemKind.COMMIT, 999_999),
            (ItemKind.ABORT, 888_888),
            (ItemKind.RELEASE, 777_777),
        }
        assert all(e.message and "\n" not in e.message for e in result.errors)
        assert engine.wrong_bytes([key("a")]) == []

    def test_a_chunk_of_another_key_length_is_the_callers_mistake(self, engine: Engine) -> None:
        ((store, _),) = engine.grant(1)
        with pytest.raises(InvalidArgument):
            engine.session.commit(store, Chunk(0, b"short"))
        engine.session.abort(store)

    def test_slots_for_named_chunks(self, engine: Engine) -> None:
        engine.store(keys("a", 1))
        reserved = engine.session.reserve(chunks=[Chunk(0, key("a-0")), Chunk(0, key("new"), key("a-0"))])
        assert [c.status for c in reserved.chunks] == [ReserveStatus.EXISTS, ReserveStatus.RESERVED]
        assert reserved.chunks[0].store_id == 0
        again = engine.session.reserve(chunks=[Chunk(0, key("new"), key("a-0"))])
        assert again.chunks[0].status is ReserveStatus.BEING_WRITTEN
        engine.session.abort(reserved.chunks[1].store_id)

    def test_a_session_gets_no_more_than_its_bound_and_is_told_so(self, engine: Engine) -> None:
        reserved = engine.session.reserve(10_000)
        assert 0 < len(reserved.grants) < 10_000
        assert "bound" in reserved.reason

    @pytest.mark.parametrize("count", [-1, 16_385])
    def test_more_than_a_call_can_carry_is_not_asked(self, engine: Engine, count: int) -> None:
        with pytest.raises(InvalidArgument, match="are possible"):
            engine.session.reserve(count)


class TestReset:
    def test_what_was_stored_or_in_flight_is_never_seen_again(self, daemon: Daemon, engine: Engine) -> None:
        engine.store(keys("a", 4))
        ((store, slot),) = engine.grant(1)
        before = engine.declared.digest
        with Engine(daemon.socket) as other:
            rebased = engine.session.reset("step 2")
            assert rebased.digest != before
            with pytest.raises(NotMapped):  # the worker's segments of the old namespace are retired
                wait_for(lambda: engine.write(slot, key("late")), what="the old segments to go")
            engine.session.update(commits=[StoreOf(store, Chunk(0, key("late")))])
            found = engine.session.lookup([prefix(keys("a", 1)), prefix([key("late")])])
            assert [a.chains[0].found for a in found] == [b"\0", b"\0"]
            assert other.wrong_bytes(keys("a", 4)) == []


class TestStates:
    def test_a_draining_daemon_is_there_and_grants_nothing(self, daemon: Daemon, engine: Engine) -> None:
        engine.store(keys("a", 2))
        with AdminClient(daemon.socket) as admin:
            admin.drain()
            wait_for(lambda: engine.session.state is ServiceState.DRAINING, what="the notice")
            with pytest.raises(NotServing, match="draining"):
                engine.session.reserve(1)
            assert engine.wrong_bytes(keys("a", 2)) == []
            assert engine.session.ping().state is ServiceState.DRAINING
            admin.drain(resume=True)
            wait_for(lambda: engine.session.state is ServiceState.SERVING, what="the notice")
        assert engine.session.reserve(1).grants

    def test_a_ping_says_whose_answer_it_is(self, daemon: Daemon, engine: Engine) -> None:
        pong = engine.session.ping()
        assert pong.boot_id == engine.session.boot_id
        assert pong.populated == 1.0


class TestTheEnd:
    def test_close_gives_everything_back(self, daemon: Daemon) -> None:
        engine = Engine(daemon.socket)
        engine.store(keys("a", 3))
        engine.session.pin(0, keys("a", 3))
        engine.grant(2)
        engine.close()
        wait_for(lambda: not daemon.status().sessions, what="the session to end")
        (namespace,) = daemon.status().namespaces
        assert (namespace.pinned_chunks, namespace.granted_slots, namespace.quarantined_slots) == (0, 0, 0)
        assert engine.ends == ["it was closed"]
        daemon.check_integrity()

    def test_after_the_end_every_call_says_so(self, daemon: Daemon) -> None:
        session = Session.open(daemon.socket, instance_id=bytes(16), label="x")
        session.close()
        session.close()
        for act in (
            session.ping,
            lambda: session.reserve(1),
            lambda: session.lookup([prefix(keys("a", 1))], pin=True),
            lambda: session.lookup([prefix(keys("a", 1))]),
            lambda: session.update(releases=[1]),
            lambda: session.declare(spec(), {}),
            session.reset,
        ):
            with pytest.raises(SessionEnded, match="it was closed"):
                act()

    def test_an_operator_ends_it(self, daemon: Daemon, engine: Engine) -> None:
        with AdminClient(daemon.socket) as admin:
            admin.end_session(engine.session.number)
        wait_for(lambda: engine.ends, what="on_end")
        assert "ended by an operator" in engine.ends[0]
        with pytest.raises(SessionEnded, match="ended by an operator"):
            engine.session.ping()
        assert len(engine.ends) == 1

    @pytest.mark.parametrize("how", ["kill", "stop"])
    def test_the_daemon_ends(self, daemon: Daemon, engine: Engine, how: str) -> None:
        started = time.monotonic()
        getattr(daemon, how)()
        wait_for(lambda: engine.ends, what="on_end")
        assert time.monotonic() - started < 3.0
        with pytest.raises(KVHostError) as caught:
            engine.session.ping()
        assert isinstance(caught.value, SessionEnded | Unavailable)
        wait_for(lambda: map_count(os.getpid(), "memfd:kvhost") == 0, what="everything to be unmapped")

    def test_calls_under_way_end_with_the_session(self, daemon: Daemon, engine: Engine) -> None:
        daemon.freeze()
        caught: list[Exception] = []

        def ask() -> None:
            try:
                engine.session.reserve(1, deadline_s=20.0)
            except KVHostError as error:
                caught.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_for(lambda: thread_waits_in("sleep", thread), what="the call to be under way")
        started = time.monotonic()
        engine.session.close()
        thread.join()
        assert time.monotonic() - started < 2.0
        assert isinstance(caught[0], SessionEnded)
        daemon.thaw()

    def test_threads_end_with_it(self, daemon: Daemon) -> None:
        Session.open(daemon.socket, instance_id=bytes(16), label="warm up").close()
        before = thread_count(os.getpid())
        for _ in range(5):
            session = Session.open(daemon.socket, instance_id=bytes(16), label="x")
            session.ping()
            session.close()
        wait_for(lambda: thread_count(os.getpid()) <= before, what="the threads to end")


class TestRestart:
    """C1: a daemon that is back before anybody noticed that it was gone."""

    def test_nothing_of_the_old_one_reaches_the_new_one(self, folder: Path) -> None:
        options = ["--segment-size", "1MiB"]
        with Daemon("4MiB", options, folder=folder) as first:
            engine = Engine(first.socket)
            engine.store(keys("a", 2))
            ((store, slot),) = engine.grant(1)
            engine.write(slot, key("half"), [store])
            copy = engine.mapping.begin(engine.session.number, [store])
            mapping = engine.mapping
            first.kill()
            with Daemon("4MiB", options, folder=folder, wait=False) as second:
                second.wait_serving()
                with pytest.raises((SessionEnded, Unavailable)):
                    engine.session.commit(store, Chunk(0, key("half")))
                with pytest.raises((SessionEnded, Unavailable)):
                    engine.session.pin(0, keys("a", 2))
                assert not mapping.begin(engine.session.number), "jobs for the old boot are not copied"
                mapping.end(copy)
                wait_for(lambda: map_count(os.getpid(), "memfd:kvhost") == 0, what="old segments to go")
                with Engine(second.socket) as fresh:
                    assert fresh.session.boot_id != engine.session.boot_id
                    for name in ("a-0", "a-1", "half"):
                        found = fresh.session.lookup([prefix([key(name)])])[0].chains[0].found
                        assert found == b"\0"
                    fresh.store(keys("a", 2))
                    assert fresh.wrong_bytes(keys("a", 2)) == []
                engine.close()


class TestADeadlineEach:
    def test_a_stopped_daemon_costs_each_call_its_deadline(self, daemon: Daemon, engine: Engine) -> None:
        daemon.freeze()
        for act in (
            lambda: engine.session.ping(deadline_s=0.1),
            lambda: engine.session.lookup([prefix(keys("a", 1))], deadline_s=0.1),
            lambda: engine.session.lookup([prefix(keys("a", 1))], pin=True, deadline_s=0.1),
            lambda: engine.session.reserve(1, deadline_s=0.1),
            lambda: engine.session.update(releases=[1], deadline_s=0.1),
            lambda: engine.session.declare(spec(), {}, deadline_s=0.1),
            lambda: engine.session.reset(deadline_s=0.1),
        ):
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="did not answer"):
                act()
            assert 0.05 < time.monotonic() - started < 0.5
        with pytest.raises(DeadlineExceeded):
            Session.open(daemon.socket, instance_id=bytes(16), label="x", deadline_s=0.2)
        daemon.thaw()
        assert engine.session.ping(deadline_s=5.0)


def serving(daemon: Daemon) -> bool:
    try:
        with AdminClient(daemon.socket) as admin:
            return admin.health() == "SERVING"
    except Unavailable:
        return False


def refused(engine: Engine, store: int) -> bool:
    copy = engine.mapping.begin(engine.session.number, [store])
    if copy:
        engine.mapping.end(copy)
    return not copy


def thread_waits_in(function: str, thread: threading.Thread) -> bool:
    """Is a function of this name on the thread's stack?"""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False
