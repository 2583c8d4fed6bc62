"""kvhostctl as a person and a script use it: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvhost_client.admin import AdminClient
from kvhost_client.errors import InvalidArgument, NotFound
from kvhost_proto.v1 import admin_pb2, common_pb2
from tests.client.engine import Engine, key, keys
from tests.support import Daemon, ctl, wait_for

YES, NO, USAGE, UNREACHABLE = 0, 1, 2, 69


def answer(daemon: Daemon, *arguments: str, code: int = YES) -> Any:
    """The JSON document of a command that ends with this code."""
    done = ctl("--socket", daemon.socket, *arguments, "--json")
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def complaint(*arguments: str, code: int, env: dict[str, str] | None = None) -> str:
    """The one line of a command that fails with this code."""
    done = ctl(*arguments, env=env)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvhostctl: ")
    return line


def test_status_for_programs(daemon: Daemon, engine: Engine) -> None:
    engine.store(keys("a", 3))
    status = answer(daemon, "status")
    assert status["state"] == "SERVING"
    assert status["pid"] == daemon.pid
    assert status["boot_id"] == f"{engine.session.boot_id:016x}"
    assert status["memory"]["segment_bytes"] == 1 << 20
    assert status["counters"]["committed_chunks"] == 3
    assert status["anomalies"]["stale_commit"] == 0
    assert status["namespaces"][0]["layout"]["groups"][0] == {
        "id": 0,
        "semantics": "PREFIX",
        "tokens_per_chunk": 16,
    }
    assert status["namespaces"][0]["parts"] == [{"name": "model", "value": '"test"'}]
    assert status["sessions"][0]["mappings"][0]["pid"] == os.getpid()


def test_status_for_people(daemon: Daemon, engine: Engine) -> None:
    engine.store(keys("a", 3))
    done = ctl("--socket", daemon.socket, "status")
    assert done.returncode == YES
    for text in ("SERVING", f"pid {daemon.pid}", "8 MiB", "engine under test", "committed_chunks"):
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 160


def test_status_of_an_empty_daemon(daemon: Daemon) -> None:
    done = ctl("--socket", daemon.socket, "status")
    assert "no engine has declared one yet" in done.stdout
    assert "no engine is connected" in done.stdout


def test_namespaces_and_sessions(daemon: Daemon, engine: Engine) -> None:
    (namespace,) = answer(daemon, "namespaces")["namespaces"]
    assert namespace["digest"] == engine.declared.digest.hex()
    (session,) = answer(daemon, "sessions")["sessions"]
    assert session["number"] == engine.session.number
    assert session["label"] == "engine under test"
    people = (
        ctl("--socket", daemon.socket, "sessions").stdout
        + ctl("--socket", daemon.socket, "namespaces").stdout
    )
    assert "engine under test" in people
    assert engine.declared.digest.hex()[:12] in people


def test_lookup_says_which_chunks_are_there(daemon: Daemon, engine: Engine) -> None:
    engine.store(keys("a", 2))
    (pin, *_) = engine.session.pin(0, keys("a", 1))
    here, there, nowhere = key("a-0").hex(), key("a-1").hex(), key("no").hex()
    first, second = answer(daemon, "lookup", here, there)["chunks"]
    assert (first["state"], first["pins"], first["children"]) == ("ready", 1, 1)
    assert (second["state"], second["parent"]) == ("ready", here)
    assert answer(daemon, "lookup", here, nowhere, code=NO)["chunks"][1]["state"] == "absent"
    people = ctl("--socket", daemon.socket, "lookup", here, nowhere)
    assert people.returncode == NO
    assert "absent" in people.stdout
    engine.session.release([pin])


def test_evict_drops_what_nobody_holds(daemon: Daemon, engine: Engine) -> None:
    engine.store(keys("a", 3))
    pins = engine.session.pin(0, keys("a", 1))
    assert answer(daemon, "evict", key("a-2").hex()) == {"evicted": 1, "held": 0, "absent": 0}
    assert answer(daemon, "evict", key("a-2").hex())["absent"] == 1
    assert answer(daemon, "evict", "--all", code=NO) == {"evicted": 1, "held": 1, "absent": 0}
    engine.session.release(pins)
    done = ctl("--socket", daemon.socket, "evict", "--all", "--namespace", "1")
    assert (done.returncode, done.stdout) == (YES, "1 evicted, 0 held, 0 absent\n")


def test_evicting_everything_must_be_said(daemon: Daemon) -> None:
    assert "--all" in complaint("--socket", daemon.socket, "evict", code=USAGE)
    assert "--all" in complaint("--socket", daemon.socket, "evict", "--all", "ff", code=USAGE)


def test_reset_drops_a_namespace(daemon: Daemon, engine: Engine) -> None:
    engine.store(keys("a", 3))
    reset = answer(daemon, "reset", "--namespace", engine.declared.digest.hex()[:8])
    assert reset == {"generation": 2, "dropped": 3}
    assert answer(daemon, "lookup", key("a-0").hex(), code=NO)["chunks"][0]["state"] == "absent"


def test_end_session_takes_everything_back(daemon: Daemon, engine: Engine) -> None:
    done = ctl("--socket", daemon.socket, "end-session", str(engine.session.number))
    assert done.returncode == YES
    assert "slots quarantined" in done.stdout
    wait_for(lambda: engine.ends, what="the session's end")
    assert "not open" in complaint(
        "--socket", daemon.socket, "end-session", str(engine.session.number), code=NO
    )


def test_drain_and_resume(daemon: Daemon) -> None:
    assert answer(daemon, "drain") == {"state": "DRAINING"}
    assert ctl("--socket", daemon.socket, "drain", "--resume").stdout == "SERVING\n"


def test_limits_are_in_whole_segments(daemon: Daemon, engine: Engine) -> None:
    assert answer(daemon, "limits", "--floor", "1MiB", "--cap", "2560KiB") == {
        "floor_segments": 1,
        "cap_segments": 3,
    }
    done = ctl("--socket", daemon.socket, "limits", "--cap", "0")
    assert done.stdout == "at least 1 segments, no cap\n"
    assert "--floor" in complaint("--socket", daemon.socket, "limits", code=USAGE)
    assert "is not a size" in complaint("--socket", daemon.socket, "limits", "--cap", "3MB", code=USAGE)


def test_health_answers_by_its_exit_code(daemon: Daemon) -> None:
    assert ctl("--socket", daemon.socket, "health").stdout == "SERVING\n"
    assert answer(daemon, "health", "liveness")["status"] == "SERVING"
    assert "knows no health" in complaint("--socket", daemon.socket, "health", "nonsense", code=NO)


def test_check_verifies_the_books(daemon: Daemon, engine: Engine) -> None:
    engine.store(keys("a", 3))
    assert answer(daemon, "check") == {"ok": True, "problems": []}
    assert ctl("--socket", daemon.socket, "check").stdout == "consistent\n"


def test_json_may_be_said_before_the_command_too(daemon: Daemon) -> None:
    done = ctl("--socket", daemon.socket, "--json", "sessions")
    assert json.loads(done.stdout) == {"sessions": []}


def test_the_socket_of_the_environment(daemon: Daemon) -> None:
    assert ctl("health", env={"KVHOST_SOCKET": daemon.socket}).returncode == YES


class TestUnreachable:
    def test_nobody_there(self, folder: Path) -> None:
        line = complaint("--socket", str(folder / "k.sock"), "status", code=UNREACHABLE)
        assert f"no socket at {folder}/k-admin.sock: kvhostd is not running" in line

    def test_a_daemon_that_died(self, daemon: Daemon) -> None:
        daemon.kill()
        line = complaint("--socket", daemon.socket, "status", code=UNREACHABLE)
        assert "nobody listens" in line

    def test_a_daemon_that_is_stopped(self, daemon: Daemon) -> None:
        daemon.freeze()
        started = time.monotonic()
        line = complaint("--socket", daemon.socket, "--timeout", "0.3", "status", code=UNREACHABLE)
        assert "did not answer Status in time" in line
        assert time.monotonic() - started < 3.0
        daemon.thaw()

    def test_something_else(self, daemon: Daemon, folder: Path) -> None:
        (folder / "k-admin.sock").symlink_to(daemon.handover_socket)
        line = complaint("--socket", str(folder / "k.sock"), "status", code=UNREACHABLE)
        assert "socket of another kind" in line

    def test_a_path_that_cannot_be(self) -> None:
        line = complaint("--socket", "/" + "x" * 200, "status", code=USAGE)
        assert "107 are possible" in line


class TestMistakes:
    def test_a_key_that_is_no_key(self, daemon: Daemon, engine: Engine) -> None:
        assert "not hexadecimal" in complaint("--socket", daemon.socket, "lookup", "xyz", code=USAGE)
        assert "have 36" in complaint("--socket", daemon.socket, "lookup", "abcd", code=USAGE)

    def test_a_namespace_that_is_not_there(self, daemon: Daemon) -> None:
        line = complaint("--socket", daemon.socket, "reset", "--namespace", "77", code=NO)
        assert "namespace '77' matches 0" in line

    @pytest.mark.parametrize(
        "arguments",
        [
            ["nonsense"],
            ["status", "--nonsense"],
            ["end-session"],
            ["end-session", "0"],
            ["end-session", "x"],
            ["--timeout", "-1", "status"],
            ["lookup"],
        ],
    )
    def test_a_command_line_that_is_wrong(self, arguments: list[str]) -> None:
        assert "kvhostctl --help" in complaint(*arguments, code=USAGE)


class TestHelp:
    def test_it_teaches_with_examples(self) -> None:
        done = ctl("--help")
        assert done.returncode == YES
        for text in ("Examples:", "kvhostctl status", "Exit codes:", "69", "KVHOST_SOCKET", "end-session"):
            assert text in done.stdout

    @pytest.mark.parametrize(
        "command",
        [
            "status",
            "namespaces",
            "sessions",
            "lookup",
            "evict",
            "reset",
            "end-session",
            "drain",
            "limit",
            "health",
            "check",
        ],
    )
    def test_every_command_explains_itself(self, command: str) -> None:
        done = ctl(command, "--help")
        assert done.returncode == YES
        assert "--json" in done.stdout

    def test_it_loads_neither_grpc_nor_rich(self) -> None:
        program = (
            "import sys\nfrom kvhost_client.ctl import main\ncode = main(['--help'])\n"
            "assert code == 0\nassert 'grpc' not in sys.modules and 'rich' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=30)

    def test_without_a_command_the_help_is_shown(self) -> None:
        done = ctl()
        assert done.returncode == USAGE
        assert "Examples:" in done.stderr


def test_a_reader_who_has_seen_enough_is_no_error(daemon: Daemon) -> None:
    done = subprocess.run(
        f"{sys.executable} -m kvhost_client.ctl --socket {daemon.socket} status --json | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""


class TestTables:
    def test_a_peers_text_cannot_move_the_cursor(self, capsys: pytest.CaptureFixture[str]) -> None:
        from kvhost_client import tables

        session = admin_pb2.SessionStatus(number=1, label="\x1b[2J[bold]evil\x07", state="open")
        tables.sessions({"sessions": [session]})
        printed = capsys.readouterr().out
        assert "\x1b" not in printed
        assert "\x07" not in printed
        assert "[bold]evil" in printed

    @pytest.mark.parametrize(
        ("nbytes", "text"),
        [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 << 30, "8 GiB"), (1 << 45, "32 TiB")],
    )
    def test_sizes(self, nbytes: int, text: str) -> None:
        from kvhost_client import tables

        assert tables.size(nbytes) == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(0.25, "0.2 s"), (59.9, "59.9 s"), (61, "1 min 1 s"), (7300, "2 h 1 min"), (180_000, "2 d 2 h")],
    )
    def test_ages(self, seconds: float, text: str) -> None:
        from kvhost_client import tables

        assert tables.age(seconds) == text

    def test_plain_data_has_every_field(self) -> None:
        from kvhost_client import tables

        reply = admin_pb2.StatusReply(state=common_pb2.SERVICE_STATE_STARTING, counters={"b": 2, "a": 2**63})
        data = tables.plain(reply)
        assert data["state"] == "STARTING"
        assert data["counters"] == {"a": 2**63, "b": 2}
        assert data["namespaces"] == []
        assert data["memory"]["notes"] == []
        assert set(data) == {field.name for field in reply.DESCRIPTOR.fields}


class TestAdminClient:
    def test_errors_have_types(self, daemon: Daemon) -> None:
        with AdminClient(daemon.socket) as admin:
            with pytest.raises(NotFound):
                admin.end_session(99)
            with pytest.raises(InvalidArgument):
                admin.evict()

    def test_it_finds_a_daemon_that_came_back(self, folder: Path) -> None:
        """One client object over a restart: what changes nothing is tried a second time."""
        with Daemon("2MiB", folder=folder) as first:
            admin = AdminClient(first.socket)
            boot = admin.status().boot_id
            first.kill()
            with Daemon("2MiB", folder=folder):
                assert admin.status().boot_id != boot
        admin.close()
