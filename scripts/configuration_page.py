"""Writes `docs/configuration.md` from the options and keys that the code knows; `--check` only compares."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from kvhost_client.ctl import command as kvhostctl
from kvhost_connector.config import KEYS
from kvhost_server.cli import command as kvhostd
from kvhost_server.config import RELOADED
from kvhost_server.exits import ExitCode
from scripts.generated import keep

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

TEXT = """\
# Configuration

This page is made from the code (`make docs`).

## kvhostd

A value comes from the first of these that has it: the flag, the environment variable, the file named
with `--config`, the default. `kvhostd --print-config` prints what it comes to, with the source of each
value, as a file that `--config` takes; `--check-config` only says whether it is right. Sizes are whole
bytes, or a number with KiB, MiB, GiB or TiB.

{daemon}

The file is TOML with the same names, `-` or `_` as you like:

```toml
memory = "8GiB"
socket = "/run/kvhost/kvhostd.sock"
socket-mode = "0660"
lock = "auto"
```

On SIGHUP the file and nothing else is read again (a flag stays above it). {reloaded} are taken at once;
for everything else that changed the log says that it needs a restart. A file that is wrong changes nothing.

Three sockets stand side by side: the one named, for engines; `NAME-admin.sock`, for people;
`NAME-handover.sock`, where workers receive the memory. Beside them stands a lock file that is never
removed: who holds its lock owns the sockets.

| exit code | meaning |
|---|---|
{exits}

## kvhostctl

{tools}

| command | what it does |
|---|---|
{commands}

`kvhostctl COMMAND --help` describes each.

| exit code | meaning |
|---|---|
| 0 | Done, or the answer is yes. |
| 1 | The answer is no: absent, held, not serving, not consistent, no such thing. |
| 2 | The command line is wrong. |
| 69 | kvhostd cannot be reached. |

Completion of commands and options: `eval "$(kvhostctl completion bash)"` in `~/.bashrc`, the same with `zsh`
in `~/.zshrc`, or `kvhostctl completion fish | source` in `~/.config/fish/config.fish`.

## The connector

The keys of `kv_connector_extra_config`, in the JSON of `--kv-transfer-config`. A key that is not in
this table is refused, so that a misspelt one does not silently mean its default.

{connector}

Beside them, vLLM's own `kv_load_failure_policy` should be `"recompute"`: with vLLM's default, `"fail"`, a
request whose blocks cannot be loaded ends with an error.
"""


def page() -> str:
    return TEXT.format(
        daemon=options(kvhostd, "KVHOST_"),
        reloaded=", ".join(f"`{name}`" for name in RELOADED),
        exits="\n".join(f"| {code.value} | {meaning} |" for code, meaning in exit_meanings()),
        tools=options(kvhostctl, ""),
        commands="\n".join(
            f"| `{name}` | {one.get_short_help_str(limit=200)} |"
            for name, one in sorted(kvhostctl.commands.items())
            if not one.hidden
        ),
        connector=table(
            ("key", "allowed", "default", "meaning"),
            ([f"`{key.name}`", key.allowed, shown(key.default), key.meaning] for key in KEYS),
        ),
    )


def options(command: click.Command, prefix: str) -> str:
    """The options of a command; those that only ask for something (help, version) are left out."""
    rows = []
    for option in command.params:
        if not isinstance(option, click.Option) or option.hidden or option.name == "version":
            continue
        variable = option.envvar if isinstance(option.envvar, str) else None
        if variable is None and prefix and not (option.is_flag and not option.secondary_opts):
            variable = f"{prefix}{(option.name or '').upper()}"
        flags = " / ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
        value = "" if option.is_flag else f" {option.metavar or allowed(option.type)}"
        rows.append(
            [flags + value, f"`{variable}`" if variable else "", shown(default(option)), option.help or ""]
        )
    return table(("option", "environment", "default", "meaning"), rows)


def default(option: click.Option) -> object:
    value = option.to_info_dict()["default"]
    # click says "not given" in more than one way.
    return None if value in (None, False, ()) or "UNSET" in str(value) else value


def allowed(kind: click.ParamType[Any]) -> str:
    if isinstance(kind, click.Choice):
        return "\\|".join(str(choice) for choice in kind.choices)
    return "PATH" if isinstance(kind, click.Path) else kind.name.upper()


def shown(value: object) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, enum.Enum):
        value = value.value
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def exit_meanings() -> Iterable[tuple[ExitCode, str]]:
    """Each exit code and what its docstring in `exits.py` says; Python keeps no docstring of a member."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(ExitCode)).body[0]
    if not isinstance(body, ast.ClassDef):
        raise TypeError("ExitCode is not a class")
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            code = ExitCode[statement.targets[0].id]
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            meaning = following.value.value if documented else "Ended as asked."  # type: ignore[union-attr]
            yield code, " ".join(str(meaning).split())


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def main(arguments: list[str] | None = None) -> int:
    stale = "docs/configuration.md is not what the code says: run `make docs`"
    return keep(PAGE, page(), stale=stale, program="configuration_page", what=__doc__, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
