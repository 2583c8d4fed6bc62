"""What the commands of `kvhostctl` share: options, exit codes, sizes, how a reply is shown."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from kvhost_client.admin import AdminClient

YES = 0
NO = 1
USAGE = 2
UNREACHABLE = 69
INTERRUPTED = 130

_SHIFTS = {"": 0, "b": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40}

# At least a block hash: shorter words of these letters are names.
_KEY = re.compile(r"(?:[0-9a-fA-F]{2}){8,}")

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass
class Options:
    """What every command knows."""

    socket: str
    timeout: float
    json: bool

    def admin(self) -> AdminClient:
        from kvhost_client.admin import AdminClient

        return AdminClient(self.socket, self.timeout)


class Size(click.ParamType[int]):
    """A number of bytes, as 64MiB or 8GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d{1,12})\s*([a-z]*)", str(value).strip().lower(), re.ASCII)
        if found is None or found.group(2) not in _SHIFTS:
            self.fail(f"{value!r} is not a size; write a number and B, KiB, MiB, GiB or TiB, as in 8GiB.")
        return int(found.group(1)) << _SHIFTS[found.group(2)]


def with_json(command: _Command) -> _Command:
    """`--json` may stand after the command as well as before it."""

    @click.pass_obj
    def run(options: Options, /, as_json: bool, **arguments: Any) -> Any:
        options.json = options.json or as_json
        return command(options, **arguments)

    described = functools.update_wrapper(run, command)
    flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
    return cast(_Command, flag(described))


def namespace_option(command: _Command) -> _Command:
    return click.option(
        "--namespace",
        "-n",
        default="",
        metavar="NAMESPACE",
        help="Number, or start of the digest. Not needed while there is only one.",
    )(command)


def show(options: Options, reply: Any, human: str) -> None:
    """Prints a reply: as JSON, as the table called `human`, or `human` itself."""
    from kvhost_client import tables

    if options.json:
        click.echo(json.dumps(tables.plain(reply), indent=2))
    elif human in tables.TABLES:
        tables.TABLES[human](reply)
    else:
        click.echo(human)


def keys_or_request(what: Sequence[str]) -> tuple[Sequence[str], str]:
    """Keys where everything looks like one, else the one name of a request."""
    if all(_KEY.fullmatch(text) for text in what):
        return what, ""
    if len(what) > 1:
        wrong = next(text for text in what if not _KEY.fullmatch(text))
        raise click.UsageError(f"{wrong!r} is no key in hex, and a request is named alone.")
    return (), what[0]


@contextmanager
def progress(what: str) -> Iterator[Callable[[float, float], None]]:
    """A bar on stderr where a person watches: call what it gives with how much is done, and of how much."""
    if not sys.stderr.isatty():
        yield lambda done, whole: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, whole: bars.update(task, completed=done, total=whole or None)
