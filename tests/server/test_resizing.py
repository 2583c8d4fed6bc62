"""The pool gets another size while engines use it: the real daemon, asked by the real kvhostctl."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.client.engine import Engine, keys
from tests.server.hosts import MIB, cgroup_v2
from tests.support import Daemon, ctl, pat, wait_for

SEGMENT = MIB
# A session may hold so many slots in a pool of one segment, which has 17.
AT_ONCE = 2
# What stays is known there.
LRU = ["--policy", "lru"]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB", *LRU]) as running:
        yield running


def limit(daemon: Daemon, *words: str, code: int = 0) -> dict[str, Any]:
    """What `kvhostctl limit` says of the pool's memory."""
    done = ctl("--socket", daemon.socket, "limit", *words, "--json")
    assert done.returncode == code, done.stderr
    memory: dict[str, Any] = json.loads(done.stdout)
    return memory


def store(engine: Engine, names: list[bytes]) -> None:
    for at in range(0, len(names), AT_ONCE):
        engine.store(names[at : at + AT_ONCE])


def wrong_bytes(engine: Engine, names: list[bytes]) -> list[str]:
    parts = [names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE)]
    return [wrong for part in parts for wrong in engine.wrong_bytes(part)]


def memory_held(daemon: Daemon) -> int:
    """Bytes of all memfds that the daemon has open: what the kernel has allocated for the pool."""
    total = 0
    for entry in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # one that was closed between the two looks
            if "memfd:kvhost" in os.readlink(entry):
                total += entry.stat().st_blocks * 512
    return total


def test_a_smaller_pool_gives_memory_back_and_keeps_what_was_used_last(daemon: Daemon) -> None:
    with Engine(daemon.socket) as engine:
        old, young = keys("old", 17), keys("young", 17)
        store(engine, old)
        store(engine, young)
        assert memory_held(daemon) == 8 * SEGMENT
        memory = limit(daemon, "--pool", "2MiB")
        assert (memory["segments"], int(memory["capacity_bytes"])) == (2, 2 * SEGMENT)
        wait_for(lambda: memory_held(daemon) == 2 * SEGMENT, what="the memory to be given back")
        assert not wrong_bytes(engine, young)
        # It goes on: what is stored next takes the place of what is there.
        more = keys("more", 17)
        store(engine, more)
        assert not wrong_bytes(engine, more)
    daemon.check_integrity()


def test_held_chunks_stay_until_they_are_let_go(daemon: Daemon) -> None:
    with Engine(daemon.socket) as engine:
        names = keys("held", 48)
        store(engine, names)
        pins = engine.session.pin(0, names)
        assert len(pins) == 48
        memory = limit(daemon, "--pool", "1MiB", "--wait", "0.5", code=1)
        assert memory["segments"] == 3
        for pin in pins:
            data = engine.read(pin.slot)
            assert data == pat(pin.key, 0, len(data))
        engine.session.release(pins)
        wait_for(lambda: memory_held(daemon) == SEGMENT, what="the rest to be given back")
        assert daemon.status().memory.segments == 1
    daemon.check_integrity()


def test_a_larger_pool_holds_more(daemon: Daemon) -> None:
    with Engine(daemon.socket) as engine:
        first = keys("first", 120)
        store(engine, first)
        memory = limit(daemon, "--pool", "12MiB")
        assert (memory["segments"], int(memory["populated_bytes"])) == (12, 12 * SEGMENT)
        assert memory_held(daemon) == 12 * SEGMENT
        more = keys("more", 60)
        store(engine, more)
        assert not wrong_bytes(engine, [*first, *more])  # 8 MiB have room for 136 of these 180
    daemon.check_integrity()


def test_down_and_up_again(daemon: Daemon) -> None:
    with Engine(daemon.socket) as engine:
        for size in ("3MiB", "9MiB", "1MiB", "8MiB"):
            assert limit(daemon, "--pool", size)["segments"] == int(size[0])
            names = keys(size, 16)
            store(engine, names)
            assert not wrong_bytes(engine, names)
    wait_for(lambda: memory_held(daemon) == 8 * SEGMENT, what="as much as asked for")
    daemon.check_integrity()


def test_what_cannot_be_had_is_said_and_the_pool_stays_as_it_is(tmp_path: Path) -> None:
    cgroup = cgroup_v2(tmp_path, limit=100 * MIB, current=50 * MIB)
    options = ["--segment-size", "1MiB", *LRU, "--cgroup-root", str(tmp_path), "--memory-wait", "0.2"]
    with Daemon("8MiB", options) as daemon, Engine(daemon.socket) as engine:
        names = keys("kept", 100)
        store(engine, names)
        cgroup_v2(tmp_path, limit=100 * MIB, current=100 * MIB)
        memory = limit(daemon, "--pool", "16MiB", code=1)
        assert memory["segments"] == 8
        (note,) = memory["notes"]
        assert note.startswith(f"the pool did not grow to 16MiB, it has 8MiB: {cgroup}/memory.max leaves")
        assert not wrong_bytes(engine, names)
        daemon.check_integrity()


def test_mistakes(daemon: Daemon) -> None:
    for words, code, said in (
        (["--pool", "8MiB", "--cap", "1MiB"], 2, "--pool goes without"),
        (["--pool", "0"], 2, "allowed is 1MiB at least"),
    ):
        done = ctl("--socket", daemon.socket, "limit", *words)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
