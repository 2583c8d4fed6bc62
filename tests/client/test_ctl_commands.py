"""The commands of kvhostctl that look into a miss, watch, keep, and test; in this process, on a daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvhost_client.ctl import main
from kvhost_client.types import ChainQuery, Query, Semantics
from kvhost_proto.v1 import admin_pb2
from tests.client.engine import Engine, keys
from tests.support import Daemon, wait_for

YES, NO, USAGE, UNREACHABLE = 0, 1, 2, 69


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as running:
        yield running


@pytest.fixture(scope="module")
def engine(daemon: Daemon) -> Iterator[Engine]:
    with Engine(daemon.socket) as attached:
        yield attached


class Ctl:
    """kvhostctl for one daemon."""

    def __init__(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        self._socket = daemon.socket
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = YES) -> str:
        """What it prints."""
        self._capsys.readouterr()
        assert main(["--socket", self._socket, *arguments]) == code
        out, err = self._capsys.readouterr()
        return out if code in (YES, NO) and not err else err

    def json(self, *arguments: str, code: int = YES) -> Any:
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture
def ctl(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Ctl:
    return Ctl(daemon, capsys)


def look_up(engine: Engine, request: str, names: Sequence[bytes]) -> None:
    engine.session.lookup([Query(0, [ChainQuery(0, Semantics.PREFIX, names)], request)])


def number_of(engine: Engine) -> str:
    return str(engine.declared.namespace_number)


class TestExplain:
    def test_by_the_name_of_a_request(self, ctl: Ctl, engine: Engine) -> None:
        engine.store(keys("whole", 5))
        look_up(engine, "chatcmpl-whole-0", keys("whole", 5))
        said = ctl("explain", "whole-0")
        assert "request chatcmpl-whole-0: looked up" in said
        assert "5 of 5 chunks can be loaded (80 of 80 tokens); 5 were there" in said

    def test_where_it_breaks(self, ctl: Ctl, engine: Engine) -> None:
        names = keys("broken", 6)
        engine.store(names)
        ctl("evict", names[2].hex(), "-n", number_of(engine))
        look_up(engine, "chatcmpl-broken", names)
        told = ctl.json("explain", "chatcmpl-broken", code=NO)
        [chain] = told["chains"]
        assert (chain["usable"], chain["hits_then"]) == (2, 2)
        assert [chunk["state"] for chunk in chain["chunks"]] == ["ready"] * 2 + ["evicted"] + ["ready"] * 3
        said = ctl("explain", "chatcmpl-broken", code=NO)
        assert "evicted by an operator" in said and "3 behind it are there and of no use" in said
        assert "1 to 2" in said and "4 to 6" in said

    def test_by_keys_without_naming_the_namespace(self, ctl: Ctl, engine: Engine, daemon: Daemon) -> None:
        engine.store(keys("keyed", 2))
        with Engine(daemon.socket, model="another") as other:
            bare = [name[:-4].hex() for name in keys("keyed", 3)]
            assert "2 of 3 chunks" in ctl("explain", *bare, code=NO)
            there = ctl.json("explain", *bare[:1], "-n", number_of(other), code=NO)
            [chunk] = there["chains"][0]["chunks"]
            assert (chunk["state"], chunk["other_namespace"]) == ("elsewhere", int(number_of(engine)))
            assert "differs in: model" in chunk["why"]

    def test_mistakes_are_one_line(self, ctl: Ctl, engine: Engine) -> None:
        for arguments, code, says in (
            (["no-such-request"], NO, "no request 'no-such-request' among the last"),
            (["ab" * 9, "-n", number_of(engine)], USAGE, "keys of namespace"),
            (["a request", "another"], USAGE, "no key in hex"),
            ([], USAGE, "Missing argument"),
        ):
            said = ctl("explain", *arguments, code=code)
            assert says in said and said.count("\n") == 1


class TestPins:
    def test_pin_and_unpin_a_prefix(self, ctl: Ctl, engine: Engine, daemon: Daemon) -> None:
        names = keys("kept", 4)
        engine.store(names)
        home = ("-n", number_of(engine))
        assert "4 pinned, 0 pinned before, 0 absent" in ctl("pin", names[3].hex(), *home)
        assert ctl.json("evict", "--all", *home, code=NO)["held"] >= 4
        assert ctl.json("lookup", names[3].hex(), *home)["chunks"][0]["pins"] == 1
        [mine] = [n for n in ctl.json("namespaces")["namespaces"] if str(n["number"]) == home[1]]
        assert mine["operator_pins"] == 4
        daemon.check_integrity()
        assert ctl("unpin", "--all", *home) == "4 unpinned, 0 were not pinned\n"
        daemon.check_integrity()

    def test_by_request(self, ctl: Ctl, engine: Engine) -> None:
        engine.store(keys("asked", 2))
        look_up(engine, "chatcmpl-asked", keys("asked", 3))
        assert ctl("pin", "chatcmpl-asked", code=NO).startswith("2 pinned, 0 pinned before, 1 absent")
        assert ctl.json("unpin", "chatcmpl-asked") == {"unpinned": 2, "absent": 1}

    def test_what_to_unpin_must_be_said(self, ctl: Ctl) -> None:
        assert "--all" in ctl("unpin", code=USAGE)


def test_namespaces_say_why_they_do_not_share(ctl: Ctl, engine: Engine, daemon: Daemon) -> None:
    with Engine(daemon.socket, model="other weights"):
        said = ctl("namespaces")
        assert "why they do not share" in said and '"other weights"' in said
        assert "layout" not in said.partition("why they")[2]
        assert "layout" in ctl("namespaces", "--parts")


def test_config_says_where_each_value_came_from(ctl: Ctl) -> None:
    config = ctl.json("config")["config"]
    assert config["memory"] == {"value": "8MiB", "source": "command line"}
    assert config["lock"]["source"] == "default"
    assert "segment-size" in ctl("config")


class TestTop:
    def test_for_programs_a_document_a_line(self, ctl: Ctl, engine: Engine) -> None:
        lines = ctl("top", "--count", "2", "--interval", "0.1", "--json").splitlines()
        assert len(lines) == 2
        told = json.loads(lines[1])
        assert told["sessions"] == 1 and told["namespaces"][0]["hit_ratio"] is None

    def test_for_people(self, ctl: Ctl, engine: Engine) -> None:
        assert "lookups/s" in ctl("top", "--count", "1", "--interval", "0.1")

    def test_rates(self) -> None:
        from kvhost_client.top import rates_between

        def look(hits: int, misses: int, stored: int) -> admin_pb2.StatusReply:
            counters = {
                "hit_tokens": hits,
                "miss_tokens": misses,
                "committed_chunks": stored,
                "queries": stored,
            }
            one = admin_pb2.NamespaceStatus(number=1, slot_bytes=100, counters=counters)
            return admin_pb2.StatusReply(boot_id="x", namespaces=[one], counters={"no_space": stored})

        told = rates_between(look(10, 10, 1), look(40, 20, 11), 2.0)
        assert told["no_space_per_s"] == 5.0
        [one] = told["namespaces"]
        assert (one["hit_ratio"], one["stored_bytes_per_s"], one["lookups_per_s"]) == (0.75, 500.0, 5.0)


class TestBench:
    def test_it_measures_and_leaves_nothing_behind(self) -> None:
        with Daemon("8MiB", ["--segment-size", "1MiB"]) as fresh:
            done = subprocess.run(
                [sys.executable, "-m", "kvhost_client.ctl", "--socket", fresh.socket, "bench", "--json"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == YES, done.stderr
            result = json.loads(done.stdout)
            assert (result["wrong_chunks"], result["chunk_bytes"]) == (0, 1 << 20)
            assert result["chunks"] >= 2 and result["lookup_us_p50"] > 0
            wait_for(lambda: fresh.status().memory.free_segments == 8)
            assert not fresh.status().namespaces
            fresh.check_integrity()

    def test_it_takes_nothing_from_others_unasked(self, ctl: Ctl, engine: Engine, daemon: Daemon) -> None:
        for name in "abcdefghijklmnop":
            engine.store(keys(name, 10))
        assert daemon.status().memory.free_segments == 0
        assert "no segment of the pool is free" in ctl("bench", code=NO)


class TestWaiting:
    def test_health_waits_for_a_daemon_that_serves(self, ctl: Ctl) -> None:
        assert ctl("health", "--wait", "5") == "SERVING\n"

    def test_drain_waits_for_those_who_write(self, daemon: Daemon, engine: Engine, ctl: Ctl) -> None:
        [grant] = engine.session.reserve(1).grants
        assert ctl("drain", "--wait", "0.2", code=NO) == "DRAINING\n"
        engine.session.abort(grant.store_id)
        assert ctl("drain", "--wait", "5") == "DRAINING\n"
        assert ctl("health", "--wait", "0.1", code=NO) == "NOT_SERVING\n"
        assert ctl("drain", "--resume") == "SERVING\n"


def test_a_namespace_in_use_is_not_dropped(ctl: Ctl, engine: Engine) -> None:
    assert "end them first" in ctl("drop-namespace", number_of(engine), code=NO)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_for_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == YES
    assert "_KVHOSTCTL_COMPLETE" in capsys.readouterr().out


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    from kvhost_client.ctl import command

    for name in command.commands:
        assert main([name, "--help"]) == YES
        assert len(capsys.readouterr().out.splitlines()) > 4


def test_the_old_name_of_limit_still_works(ctl: Ctl, engine: Engine) -> None:
    told = ctl.json("limits", "--cap", "0", "-n", number_of(engine))
    assert told["cap_segments"] == 0
