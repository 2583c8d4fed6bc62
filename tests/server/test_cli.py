"""Flags, environment and file become one Config; every mistake is one line and a documented exit code."""

import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from kvhost_server.cli import command, main, meanings
from kvhost_server.config import Config, sibling
from kvhost_server.exits import ExitCode

Printed = Callable[..., dict[str, object]]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVHOST_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """What `--print-config` says for these arguments, read back as TOML."""

    def ask(*arguments: str) -> dict[str, object]:
        assert main([*arguments, "--print-config"]) == ExitCode.OK
        return tomllib.loads(capsys.readouterr().out)

    return ask


def test_the_other_sockets_stand_beside_the_first(printed: Printed) -> None:
    values = printed("--memory", "1GiB", "--socket", "/run/x/one.sock")
    assert values["admin_socket"] == "/run/x/one-admin.sock"
    assert values["handover_socket"] == "/run/x/one-handover.sock"
    assert sibling(Path("/a/name"), "admin") == Path("/a/name-admin.sock")


def test_flag_beats_environment_beats_file_beats_default(
    printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvhost.toml"
    file.write_text(
        'memory = "1GiB"\nlock = "auto"\nhugepages = "auto"\nmemory-wait = 1\nallow_uid = [0, "root"]\n'
    )
    monkeypatch.setenv("KVHOST_LOCK", "required")
    monkeypatch.setenv("KVHOST_HUGEPAGES", "off")
    values = printed("--config", str(file), "--hugepages", "2MiB")
    assert (values["memory"], values["lock"], values["hugepages"]) == ("1GiB", "required", "2MiB")
    assert (values["memory_wait"], values["strict_memory"], values["allow_uid"]) == (1, False, ["0", "0"])
    main(["--config", str(file), "--hugepages", "2MiB", "--print-config"])
    text = capsys.readouterr().out
    assert f'memory = "1GiB"  # file {file}' in text
    assert 'lock = "required"  # environment KVHOST_LOCK' in text
    assert 'hugepages = "2MiB"  # command line' in text
    assert 'log_level = "info"  # default' in text


def test_what_is_printed_can_be_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [
        *("--memory", "100000001", "--socket", str(tmp_path / 's "q".sock'), "--segment-size", "4MiB"),
        *("--socket-mode", "0600", "--socket-group", "root", "--allow-uid", "nobody", "--allow-uid", "7"),
        *("--lock", "auto", "--memory-wait", "0.5", "--strict-memory", "--log-format", "json"),
    ]
    assert main([*first, "--print-config"]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "again.toml"
    file.write_text(text)
    monkeypatch.setenv("KVHOST_CONFIG", str(file))
    assert main(["--print-config"]) == 0
    assert tomllib.loads(capsys.readouterr().out) == tomllib.loads(text)
    assert 'segment_size = "4MiB"' in text


def test_check_config_says_that_it_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--memory", "1GiB", "--check-config"]) == 0
    assert capsys.readouterr().out == "kvhostd: the configuration is right\n"


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Config.__setattr__(object.__new__(Config), "memory", 5)


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ([], 64, ["--memory is missing", "--memory 8GiB"]),
        (["--memory", "lots"], 64, ["--memory (command line)", "'lots' is not a size", "8GiB"]),
        (["--memory", "8G"], 64, ["'8G' is not a size", "GiB"]),
        (["--memory", "0"], 64, ["--memory", "1 byte to"]),
        (["--memory", "1GiB", "--segment-size", "-1"], 64, ["--segment-size", "'-1' is not a size"]),
        (["--memory", "1GiB", "--lock", "maybe"], 64, ["--lock", "'maybe'", "off", "auto", "required"]),
        (["--memory", "1GiB", "--hugepages", "3MiB"], 64, ["--hugepages", "2MiB", "1GiB"]),
        (["--memory", "1GiB", "--socket-mode", "rw"], 64, ["--socket-mode", "'rw'", "0660"]),
        (["--memory", "1GiB", "--socket-mode", "0060"], 64, ["--socket-mode", "0o060", "owner"]),
        (["--memory", "1GiB", "--socket-mode", "7777"], 64, ["--socket-mode"]),
        (
            ["--memory", "1GiB", "--allow-uid", "no body"],
            64,
            ["--allow-uid", "'no body'", "name or a number"],
        ),
        (["--memory", "1GiB", "--allow-gid", "-5"], 64, ["--allow-gid", "'-5'"]),
        (["--memory", "1GiB", "--socket-group", "nobodys"], 64, ["--socket-group", "'nobodys'"]),
        (["--memory", "1GiB", "--memory-wait", "soon"], 64, ["--memory-wait", "'soon'"]),
        (["--memory", "1GiB", "--memory-wait", "nan"], 64, ["--memory-wait", "0 to 86400"]),
        (["--memory", "1GiB", "--memory-wait", "-1"], 64, ["--memory-wait", "-1"]),
        (["--memory", "1GiB", "--admin-socket", "/run/kvhost/kvhostd.sock"], 64, ["two sockets", "--socket"]),
        (["--memory", "1GiB", "--memry", "2GiB"], 64, ["--memry", "--memory"]),
        (["--memory", "1GiB", "serve"], 64, ["serve"]),
        (["--config", "/nonexistent/kvhost.toml"], 78, ["/nonexistent/kvhost.toml", "No such file"]),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: list[str], code: int, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--check-config"]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("kvhostd: ")
    assert output.err.count("\n") == 1
    for part in parts:
        assert part in output.err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("memory = ", ["is not TOML", "at end of document"]),
        ('memry = "1GiB"', ["unknown key 'memry'", "'memory'"]),
        ('scoket-mode = "0660"', ["unknown key 'scoket-mode'", "'socket_mode'"]),
        ('config = "x"', ["unknown key 'config'"]),
        ("print_config = true", ["unknown key 'print_config'"]),
        ('[server]\nmemory = "1GiB"', ["unknown key 'server'"]),
        ("memory = true", ["memory", "True", "text"]),
        ("memory = 1.5", ["memory", "1.5"]),
        ('memory = "1GiB"\nstrict-memory = "yes"', ["strict-memory", "true or false"]),
        ('memory = "1GiB"\nmemory_wait = "5"', ["memory_wait", "a number"]),
        ('memory = "1GiB"\nsocket = 5', ["socket", "text"]),
        ('memory = "1GiB"\nallow_uid = [[1]]', ["allow_uid"]),
        ('memory = "1GiB"\nlock = "maybe"', ["--lock (file ", "'maybe'", "required"]),
        ('memory = "1GiB"\nallow_uid = "nobodys"', ["--allow-uid (file ", "'nobodys'"]),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(
    text: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvhost.toml"
    file.write_text(text)
    assert main(["--config", str(file), "--check-config"]) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert error.startswith("kvhostd: ")
    assert error.count("\n") == 1
    for part in [str(file), *parts]:
        assert part in error


def test_a_wrong_variable_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVHOST_MEMORY", "plenty")
    assert main(["--check-config"]) == ExitCode.USAGE
    assert "--memory (environment KVHOST_MEMORY): 'plenty' is not a size" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--handover-socket" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvhostd, version ")


def test_what_is_printed_is_a_file_with_comments_that_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--memory", "1GiB", "--log-level", "debug", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "# Host memory of the pool, as 8GiB.\nmemory = " in printed
    assert "# What is logged, from this on upwards. Read again on SIGHUP.\nlog_level = " in printed
    for name, meaning in meanings().items():
        if name not in ("config", "print_config", "check_config", "version"):
            assert meaning.split()[0] in printed, name
    file = tmp_path / "kvhost.toml"
    file.write_text(printed)
    assert main(["--config", str(file), "--print-config"]) == 0
    again = capsys.readouterr().out
    assert tomllib.loads(again) == tomllib.loads(printed)


def test_every_option_has_a_meaning() -> None:
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, option.name
