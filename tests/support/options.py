"""Is what a page, a manifest or a script tells our programs something that they take?"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import click

from kvhost_client.ctl import command as kvhostctl
from kvhost_connector.config import KEYS
from kvhost_server.cli import command as kvhostd

PROGRAMS: Mapping[str, click.Command] = {"kvhostd": kvhostd, "kvhostctl": kvhostctl}
_VLLM_KEYS = {
    *("kv_connector", "kv_connector_module_path", "kv_connector_extra_config"),
    *("kv_role", "kv_load_failure_policy"),
}
_CONNECTORS = ("KVHostConnector", "TPUOffloadConnector")


def check_command(words: Iterable[str]) -> None:
    """A command line of kvhostd or kvhostctl: its options and subcommands exist.

    Raises:
        AssertionError: one does not.
    """
    program, *rest = words
    current = PROGRAMS[program]
    known = _options(current)
    expects_value = False
    for word in rest:
        if expects_value:
            expects_value = False
        elif word.startswith("-") and word not in ("-", "--"):
            flag, equals, _ = word.partition("=")
            assert flag in known, f"{program} has no option {flag}"
            expects_value = not equals and known[flag]
        elif isinstance(current, click.Group):
            if word.isupper():  # a placeholder
                return
            assert word in current.commands, f"{program} has no command {word}"
            current = current.commands[word]
            known = {**known, **_options(current)}


def _options(command: click.Command) -> dict[str, bool]:
    """Flag to whether a value follows."""
    found = {"--help": False, "-h": False}
    for option in command.params:
        if isinstance(option, click.Option):
            takes = not (option.is_flag or option.count)
            found |= dict.fromkeys((*option.opts, *option.secondary_opts), takes)
    return found


def check_transfer(config: Mapping[str, Any]) -> None:
    """The value of --kv-transfer-config, as we tell people to write it.

    Raises:
        AssertionError: a key that vLLM or the connector does not know, or no recomputing.
    """
    assert config["kv_connector"] in _CONNECTORS
    assert config["kv_role"] == "kv_both"
    assert config["kv_load_failure_policy"] == "recompute"
    assert set(config) <= _VLLM_KEYS, config
    assert set(config.get("kv_connector_extra_config", {})) <= {key.name for key in KEYS}, config


def command_lines(text: str) -> Iterable[list[str]]:
    """The command lines of our programs in a block of shell, whatever stands around them."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        words = _words(line)
        for start, word in enumerate(words):
            if word.rpartition("/")[2] in PROGRAMS and (start == 0 or words[start - 1] in _BEFORE):
                found = [word.rpartition("/")[2]]
                for following in words[start + 1 :]:
                    if following in _ENDS:
                        break
                    found.append(following)
                yield found


_ENDS = ("|", "||", "&&", ";", "&", ">", "2>", "2>&1", ")", "\\")
_BEFORE = (
    "&&",
    "||",
    "|",
    ";",
    "(",
    "$",
    "!",
    "exec",
    "nice",
    "until",
    "while",
    "if",
    "do",
    "kvhostd",
    "sudo",
)


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        return list(lexer)
    except ValueError:  # a quote that ends on another line
        return line.split()
