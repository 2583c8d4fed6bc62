"""`kvhostctl`: looks into a running kvhostd, and operates it.

Exit codes: 0 done, or the answer is yes; 1 the answer is no; 2 the command is wrong; 69 kvhostd cannot be
reached. Errors are one line on stderr. What needs time to import is imported when a command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from kvhost_client import acting, bench, looking, top
from kvhost_client.commands import INTERRUPTED, NO, UNREACHABLE, USAGE, YES, Options
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


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  kvhostctl status                        what is in the cache, who holds it, what went wrong
  kvhostctl --socket /tmp/k.sock status   another daemon
  kvhostctl sessions --json | jq .        for programs
  kvhostctl top                           the same, live
  kvhostctl explain chatcmpl-5d1f         why did this request miss?
  kvhostctl pin chatcmpl-5d1f             keep what it uses
  kvhostctl end-session 7                 take everything back from engine 7
  kvhostctl drain --wait 30 && systemctl stop kvhostd
  eval "$(kvhostctl completion bash)"     complete commands and options with Tab

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


for _each in (*looking.COMMANDS, *acting.COMMANDS, top.top, bench.bench):
    command.add_command(_each)


@command.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Prints what makes a shell complete commands and options.

    \b
    bash:  eval "$(kvhostctl completion bash)"       in ~/.bashrc
    zsh:   eval "$(kvhostctl completion zsh)"        in ~/.zshrc
    fish:  kvhostctl completion fish | source        in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click knows no completion for {shell}.")
    click.echo(kind(command, {}, "kvhostctl", "_KVHOSTCTL_COMPLETE").source())
    return YES


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
