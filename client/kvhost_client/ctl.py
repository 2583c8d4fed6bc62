"""`kvhostctl`: looks into a running kvhostd, and operates it.

Exit codes: 0 done, or the answer is yes; 1 the answer is no; 2 the command is wrong; 69 kvhostd cannot be
reached. Errors are one line on stderr. What needs time to import is imported when a command runs.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from kvhost_client.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KVHostError,
    NotKVHost,
    Refused,
    Unavailable,
    VersionMismatch,
)
from kvhost_client.paths import DEFAULT_SOCKET

if TYPE_CHECKING:
    from kvhost_client.admin import AdminClient

YES = 0
NO = 1
USAGE = 2
UNREACHABLE = 69
INTERRUPTED = 130

_SHIFTS = {"": 0, "b": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40}

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


def _with_json(command: _Command) -> _Command:
    """`--json` may stand after the command as well as before it."""

    @click.pass_obj
    def run(options: Options, /, as_json: bool, **arguments: Any) -> Any:
        options.json = options.json or as_json
        return command(options, **arguments)

    described = functools.update_wrapper(run, command)
    flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
    return cast(_Command, flag(described))


def _namespace_option(command: _Command) -> _Command:
    return click.option(
        "--namespace",
        "-n",
        default="",
        metavar="NAMESPACE",
        help="Number, or start of the digest. Not needed while there is only one.",
    )(command)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  kvhostctl status                        what is in the cache, who holds it, what went wrong
  kvhostctl --socket /tmp/k.sock status   another daemon
  kvhostctl sessions --json | jq .        for programs
  kvhostctl lookup -n 1 5f3a…00000000     is this chunk there?
  kvhostctl end-session 7                 take everything back from engine 7
  kvhostctl drain && systemctl stop kvhostd

\b
Exit codes:
  0   done, or the answer is yes
  1   the answer is no: absent, held, not serving, not consistent, no such thing
  2   the command line is wrong
  69  kvhostd cannot be reached""",
)
@click.option(
    "--socket",
    envvar="KVHOST_SOCKET",
    default=DEFAULT_SOCKET,
    show_default=True,
    show_envvar=True,
    metavar="SOCKET",
    help="The daemon's first socket; the admin socket is found beside it.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.01, max=3600.0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for an answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.version_option(package_name="kvhost", prog_name="kvhostctl", message="%(prog)s %(version)s")
@click.pass_context
def command(context: click.Context, socket: str, timeout: float, as_json: bool) -> None:
    """Looks into a running kvhostd, and operates it.

    All sizes are in bytes in JSON and in binary units in tables.
    """
    context.obj = Options(socket, timeout, as_json)


@command.command()
@_with_json
def status(options: Options) -> int:
    """Everything about the daemon on one page.

    Its memory, namespaces and sessions, all counters, and what should not have happened.
    """
    with options.admin() as admin:
        reply = admin.status()
    _show(options, reply, "status")
    return YES


@command.command()
@_with_json
def namespaces(options: Options) -> int:
    """Which models are cached, and how much of each.

    With --json also every part of each digest: compare two to see why engines do not share.
    """
    with options.admin() as admin:
        reply = admin.namespaces()
    _show(options, {"namespaces": reply}, "namespaces")
    return YES


@command.command()
@_with_json
def sessions(options: Options) -> int:
    """Which engines are connected, and what they hold."""
    with options.admin() as admin:
        reply = admin.sessions()
    _show(options, {"sessions": reply}, "sessions")
    return YES


@command.command()
@click.argument("keys", nargs=-1, required=True, metavar="HEXKEY...")
@_namespace_option
@_with_json
def lookup(options: Options, keys: tuple[str, ...], namespace: str) -> int:
    """Which of these chunks are there. Exit code 1 unless all are ready.

    A key is the block hash followed by the group index (8 hex digits).
    """
    with options.admin() as admin:
        chunks = admin.lookup(keys, namespace)
    _show(options, {"chunks": chunks}, "chunks")
    return YES if all(chunk.state == "ready" for chunk in chunks) else NO


@command.command()
@click.argument("keys", nargs=-1, metavar="[HEXKEY...]")
@click.option("--all", "everything", is_flag=True, help="Every chunk of the namespace that nobody holds.")
@_namespace_option
@_with_json
def evict(options: Options, keys: tuple[str, ...], everything: bool, namespace: str) -> int:
    """Drops chunks that nobody holds.

    Those named, or --all. Exit code 1 if some are held.
    """
    if everything == bool(keys):
        raise click.UsageError("name the chunks to evict, or say --all; one of the two.")
    with options.admin() as admin:
        reply = admin.evict(keys, namespace, everything=everything)
    _show(options, reply, f"{reply.evicted} evicted, {reply.held} held, {reply.absent} absent")
    return NO if reply.held else YES


@command.command()
@_namespace_option
@_with_json
def reset(options: Options, namespace: str) -> int:
    """Drops everything of a namespace.

    Held or not: nobody reads it again.
    """
    with options.admin() as admin:
        reply = admin.reset(namespace)
    _show(options, reply, f"{reply.dropped} chunks dropped, generation {reply.generation}")
    return YES


@command.command("end-session")
@click.argument("number", type=click.IntRange(min=1))
@_with_json
def end_session(options: Options, number: int) -> int:
    """Takes everything back from an engine.

    Its session ends. What its workers may still be writing is quarantined until they prove that they have
    stopped.
    """
    with options.admin() as admin:
        reply = admin.end_session(number)
    _show(options, reply, f"session {number} ended, {reply.quarantined} slots quarantined")
    return YES


@command.command()
@click.option("--resume", is_flag=True, help="Grant again.")
@_with_json
def drain(options: Options, resume: bool) -> int:
    """Grants nothing from now on.

    What is stored can be read, and nothing new is stored, until drain --resume or the daemon's end.
    """
    with options.admin() as admin:
        reply = admin.drain(resume=resume)
    _show(options, reply, "state")
    return YES


@command.command()
@click.option("--floor", type=Size(), help="Never below this much, once it has it.")
@click.option("--cap", type=Size(), help="Never above this much; 0 removes the cap.")
@_namespace_option
@_with_json
def limits(options: Options, floor: int | None, cap: int | None, namespace: str) -> int:
    """Bounds a namespace, in whole segments."""
    if floor is None and cap is None:
        raise click.UsageError("say --floor, --cap, or both, as in --cap 8GiB.")
    with options.admin() as admin:
        reply = admin.set_limits(namespace, floor_bytes=floor, cap_bytes=cap)
    bound = f"at most {reply.cap_segments}" if reply.cap_segments else "no cap"
    _show(options, reply, f"at least {reply.floor_segments} segments, {bound}")
    return YES


@command.command()
@click.argument("service", default="")
@_with_json
def health(options: Options, service: str) -> int:
    """Does it serve?

    SERVICE may be "liveness", or "kvhost.v1.Cache". Exit code 1 if it does not.
    """
    with options.admin() as admin:
        state = admin.health(service)
    _show(options, {"service": service, "status": state}, state)
    return YES if state == "SERVING" else NO


@command.command()
@_with_json
def check(options: Options) -> int:
    """Verifies the daemon's own books. Exit code 1 if they do not add up."""
    with options.admin() as admin:
        reply = admin.check()
    _show(options, reply, "\n".join(reply.problems) or "consistent")
    return YES if reply.ok else NO


def _show(options: Options, reply: Any, human: str) -> None:
    """Prints a reply: as JSON, as the table called `human`, or `human` itself."""
    from kvhost_client import tables

    if options.json:
        click.echo(json.dumps(tables.plain(reply), indent=2))
    elif human in tables.TABLES:
        tables.TABLES[human](reply)
    else:
        click.echo(human)


def _explain(error: KVHostError) -> int:
    print(f"kvhostctl: {' '.join(str(error).split())}", file=sys.stderr)
    if isinstance(error, Unavailable | DeadlineExceeded | NotKVHost | Refused | VersionMismatch):
        return UNREACHABLE
    return USAGE if isinstance(error, InvalidArgument) else NO


def main(arguments: Sequence[str] | None = None) -> int:
    """The `kvhostctl` command; returns the exit code."""
    try:
        code = command.main(arguments, prog_name="kvhostctl", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.ClickException as error:
        print(f"kvhostctl: {' '.join(error.format_message().split())} See kvhostctl --help.", file=sys.stderr)
        return USAGE
    except KVHostError as error:
        return _explain(error)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return int(code or YES)


if __name__ == "__main__":
    sys.exit(main())
