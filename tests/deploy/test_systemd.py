"""The files of deploy/systemd: what systemd's own tools say of them, and a daemon that must live by them."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvhost_server.exits import ExitCode
from tests.client.engine import Engine, keys
from tests.support import Daemon
from tests.support.tools import tool
from tests.support.waiting import wait_for

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNIT = FOLDER / "kvhostd.service"
LIMIT = 3.0
_PR_SET_MDWE = 65
_MDWE_REFUSE_EXEC_GAIN = 1


def settings() -> list[tuple[str, str]]:
    """Name and value of every line of the unit, in order."""
    lines = (line for line in UNIT.read_text().splitlines() if not line.startswith(("#", "[")))
    return [(name, value) for name, found, value in (line.partition("=") for line in lines) if found]


def setting(name: str) -> str:
    [value] = [value for key, value in settings() if key == name]
    return value


def systemd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool(arguments[0]), *arguments[1:]], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a kvhostd that exists on this machine."""
    copy = tmp_path / UNIT.name
    binary = Path(sys.executable).with_name("kvhostd")
    copy.write_text(UNIT.read_text().replace("/opt/kvhost/bin/kvhostd", str(binary)))
    return copy


def test_systemd_reads_the_unit_without_a_word(unit: Path) -> None:
    result = systemd("systemd-analyze", "verify", str(unit))
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_exposure_is_rated_low(unit: Path) -> None:
    result = systemd("systemd-analyze", "security", "--offline=true", "--no-pager", str(unit))
    [rating] = re.findall(r"Overall exposure level for kvhostd.service: ([0-9.]+)", result.stdout)
    assert float(rating) < LIMIT, result.stdout


def test_users_groups_and_the_folder_of_the_sockets(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    made = systemd("systemd-sysusers", f"--root={tmp_path}", str(FOLDER / "sysusers.conf"))
    assert made.returncode == 0, made.stderr
    users = dict(line.split(":", 1) for line in (tmp_path / "etc/passwd").read_text().splitlines())
    groups = dict(line.split(":", 1) for line in (tmp_path / "etc/group").read_text().splitlines())
    assert users["kvhost"].endswith(":/usr/sbin/nologin")
    assert groups["kvhost-admin"].endswith(":kvhost")
    made = systemd("systemd-tmpfiles", f"--root={tmp_path}", "--create", str(FOLDER / "tmpfiles.conf"))
    assert made.returncode == 0, made.stderr
    found = (tmp_path / "run/kvhost").stat()
    assert found.st_uid == int(users["kvhost"].split(":")[1])
    # The same folder as the unit's.
    assert stat.S_IMODE(found.st_mode) == int(setting("RuntimeDirectoryMode"), 8)
    assert setting("RuntimeDirectory") == "kvhost"
    assert {setting("User"), setting("Group"), *setting("SupplementaryGroups").split()} <= {*users, *groups}


def test_the_folder_of_the_sockets_outlives_the_daemon() -> None:
    """A container that mounts it would look at a removed folder for ever (F9)."""
    assert setting("RuntimeDirectoryPreserve") == "yes"


def test_the_shipped_configuration_is_right(tmp_path: Path) -> None:
    shipped = (FOLDER / "kvhostd.toml").read_text()
    file = tmp_path / "kvhostd.toml"
    # The groups are those of sysusers.conf, which this machine need not have.
    file.write_text(re.sub(r'-group = "kvhost(-admin)?"', '-group = "root"', shipped))
    command = [sys.executable, "-m", "kvhost_server", "--config", str(file), "--print-config"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 'socket = "/run/kvhost/kvhostd.sock"' in printed
    assert shipped.count('-group = "kvhost') == 2


def test_what_another_try_cannot_mend_is_not_tried_again() -> None:
    codes = {ExitCode(int(code)) for code in setting("RestartPreventExitStatus").split()}
    assert codes == {ExitCode.USAGE, ExitCode.MEMORY, ExitCode.CONFIG}


def allowed_calls() -> set[str]:
    """The system calls that the unit leaves, as systemd adds the filters up line by line."""
    allowed: set[str] = set()
    for name, value in settings():
        if name == "SystemCallFilter":
            named = set(_members(value.lstrip("~").split()))
            allowed = allowed - named if value.startswith("~") else allowed | named
    return allowed | set(_members(["@default"]))


def _members(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name.startswith("@"):
            listed = systemd("systemd-analyze", "syscall-filter", "--no-pager", name).stdout
            lines = (line.strip() for line in listed.splitlines())
            yield from _members([line for line in lines if line and line[0] != "#" and line != name])
        else:
            yield name


def test_a_daemon_lives_with_what_the_unit_leaves_it(tmp_path: Path) -> None:
    """No capability, no memory that becomes executable; every system call and address family it used is
    among those left."""
    trace = tmp_path / "trace"
    no_new_code = (
        "import ctypes, os, sys; "
        f"ctypes.CDLL(None).prctl({_PR_SET_MDWE}, {_MDWE_REFUSE_EXEC_GAIN}, 0, 0, 0); "
        "os.umask(0o077); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    prefix = [
        *(tool("setpriv"), "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
        *(sys.executable, "-I", "-c", no_new_code),
        # -D: the daemon is our child, and strace its observer.
        *(tool("strace"), "-D", "-f", "-q", "-o", str(trace), "-e", "signal=none"),
    ]
    options = ["--lock", "required", "--hugepages", "auto"]
    with Daemon("4MiB", options, folder=tmp_path, prefix=prefix) as daemon:
        assert daemon.status().memory.locked_bytes == 4 << 20
        with Engine(daemon.socket) as engine:
            names = keys("chain", 4)
            engine.store(names)
            assert engine.wrong_bytes(names) == []
        assert daemon.stop() == 0
        wait_for(
            lambda: re.search(rf"^{daemon.pid} +\+\+\+ exited", trace.read_text(), re.MULTILINE),
            what="strace to write the rest",
        )
    lines = trace.read_text().splitlines()
    used = {call for line in lines if (call := re.sub(r"^\d+ +|\(.*", "", line)).isidentifier()}
    assert {"memfd_create", "accept4", "mlock"} <= used
    assert used - allowed_calls() == set()
    families = set(re.findall(r"socket\((AF_\w+)", trace.read_text()))
    assert families <= set(setting("RestrictAddressFamilies").split())
