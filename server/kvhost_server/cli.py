"""The command line of kvhostd: flags, environment and configuration file become one `Config`.

Precedence: flag, then KVHOST_* variable, then file, then default. Every error is one line on stderr.
"""

import difflib
import enum
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvhost_server import __version__
from kvhost_server.config import BadValue, Config, LogFormat, LogLevel
from kvhost_server.exits import ExitCode, StartupError
from kvhost_server.locking import Lock
from kvhost_server.policies import DEFAULT_POLICY, POLICIES
from kvhost_server.sizing import HugePages
from kvhost_server.units import parse_size

DEFAULT_SOCKET = "/run/kvhost/kvhostd.sock"
DEFAULT_METRICS = "127.0.0.1:9640"
_PREFIX = "KVHOST"
_NOT_IN_FILE = ("config", "print_config", "check_config", "version", "help")


def _size(ctx: click.Context, param: click.Parameter, value: str | int | None) -> int | None:
    if value is None:
        return None
    try:
        return parse_size(str(value))
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _mode(ctx: click.Context, param: click.Parameter, value: str | int) -> int:
    if isinstance(value, int):
        return value  # a file may say 0o660
    try:
        return int(value, 8)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not an octal mode; write it as in 0660", ctx, param) from None


def _choices(kind: type[enum.StrEnum]) -> click.Choice[str]:
    return click.Choice([item.value for item in kind])


def _load_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Makes the file's values the defaults of this command; runs before the other options are looked at."""
    if value is not None:
        ctx.default_map = _read_file(Path(value), _options(ctx))
    return value


def _read_file(path: Path, options: Mapping[str, click.Parameter]) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise StartupError(
            f"--config {path} cannot be read: {error.strerror}; name a TOML file", ExitCode.CONFIG
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"--config {path} is not TOML: {error}", ExitCode.CONFIG) from error
    values: dict[str, object] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        option = options.get(name)
        if option is None or name in _NOT_IN_FILE:
            known = [known for known in options if known not in _NOT_IN_FILE]
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise StartupError(
                f"--config {path}: unknown key {key!r}; the nearest known one is {near!r}", ExitCode.CONFIG
            )
        values[name] = _file_value(path, key, value, option)
    return values


def _file_value(path: Path, key: str, value: object, option: click.Parameter) -> object:
    """A value of the file as click takes it; refuses types that click would bend (true as 1, 5 as a path)."""
    wanted: tuple[type, ...] = (str,)
    if isinstance(option, click.Option) and option.is_flag:
        wanted = (bool,)
    elif option.type is click.FLOAT:
        wanted = (int, float)
    elif option.type is click.UNPROCESSED or option.multiple:
        wanted = (int, str)
    items = value if isinstance(value, list) and option.multiple else [value]
    if not all(type(item) in wanted for item in items):
        names = {bool: "true or false", float: "a number", str: "text"}[wanted[-1]]
        raise StartupError(
            f"--config {path}: {key} has the value {value!r}, which is of the wrong type; write {names}",
            ExitCode.CONFIG,
        )
    return [str(item) for item in items] if option.multiple else value


@click.command(
    name="kvhostd",
    context_settings={"auto_envvar_prefix": _PREFIX, "max_content_width": 110},
    help="Serves a host-memory KV cache to the vLLM engines of this host.",
    epilog="Every option may also be given as KVHOST_NAME in the environment, or as name in the file.",
)
@click.option(
    "--memory",
    type=click.UNPROCESSED,
    callback=_size,
    metavar="SIZE",
    required=True,
    help="Host memory of the pool, as 8GiB.",
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    default=DEFAULT_SOCKET,
    show_default=True,
    help="Unix socket for engines.",
)
@click.option(
    "--admin-socket", type=click.Path(path_type=Path), help="Unix socket for people. [NAME-admin.sock]"
)
@click.option(
    "--handover-socket", type=click.Path(path_type=Path), help="Unix socket for memory. [NAME-handover.sock]"
)
@click.option(
    "--segment-size",
    type=click.UNPROCESSED,
    callback=_size,
    metavar="SIZE",
    help="Size of one segment of the pool. [about memory / 128]",
)
@click.option(
    "--socket-mode",
    type=click.UNPROCESSED,
    callback=_mode,
    metavar="MODE",
    default="0660",
    show_default=True,
    help="Mode of the sockets.",
)
@click.option("--socket-group", help="Group of the engines' sockets; its members may use the cache.")
@click.option("--admin-group", help="Group of the admin socket.")
@click.option("--allow-uid", multiple=True, help="User that may use the cache, besides root and our own.")
@click.option("--allow-gid", multiple=True, help="Group whose members may use the cache.")
@click.option(
    "--tcp",
    metavar="HOST:PORT",
    help="Serve other hosts too: admin, health, lookups that hold nothing. Needs the --tls options.",
)
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate shown on --tcp (PEM).")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its private key, unencrypted (PEM).")
@click.option(
    "--tls-client-ca",
    type=click.Path(path_type=Path),
    help="Authorities of the clients that --tcp serves (PEM); a client without a certificate is refused.",
)
@click.option(
    "--metrics",
    metavar="HOST:PORT|off",
    default=DEFAULT_METRICS,
    show_default=True,
    help="Serve metrics (/metrics), probes (/livez, /readyz) and a web page (/) over HTTP, without a login.",
)
@click.option(
    "--lock",
    type=_choices(Lock),
    default=Lock.OFF.value,
    show_default=True,
    help="Keep the pool in memory with mlock.",
)
@click.option(
    "--hugepages",
    type=_choices(HugePages),
    default=HugePages.OFF.value,
    show_default=True,
    help="Huge pages for the pool.",
)
@click.option(
    "--policy",
    type=click.Choice(list(POLICIES)),
    default=DEFAULT_POLICY,
    show_default=True,
    help="Which chunk leaves when room is needed: adaptive learns from what comes back; lru takes the one "
    "whose last use is longest ago.",
)
@click.option(
    "--memory-wait",
    type=float,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for memory that is in use now.",
)
@click.option(
    "--strict-memory/--no-strict-memory", help="Exit rather than start with less memory than asked."
)
@click.option(
    "--config", callback=_load_file, is_eager=True, metavar="FILE", help="Configuration file (TOML)."
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the configuration as a file with comments and the source of each value, and exit.",
)
@click.option("--check-config", is_flag=True, help="Only say whether the configuration is right.")
@click.option(
    "--log-level",
    type=_choices(LogLevel),
    default=LogLevel.INFO.value,
    show_default=True,
    help="What is logged, from this on upwards.",
)
@click.option(
    "--log-format",
    type=_choices(LogFormat),
    default=LogFormat.TEXT.value,
    show_default=True,
    help="Lines for people, or a JSON object a line.",
)
@click.option("--cgroup-root", default="/sys/fs/cgroup", hidden=True)
@click.version_option(__version__, prog_name="kvhostd")
@click.pass_context
def command(
    ctx: click.Context, /, config: str | None, print_config: bool, check_config: bool, **values: Any
) -> int:
    """Builds the Config and runs the daemon; returns the exit code. `values` are the options by name."""
    made = _config_of(ctx, values)
    if print_config:
        click.echo(made.to_toml(meanings()), nl=False)
    if check_config:
        click.echo("kvhostd: the configuration is right")
    if print_config or check_config:
        return ExitCode.OK
    # gRPC's newer engine reads sockets in threads of its own and hands each message on: with the older one
    # the thread that waits reads, which halves the context switches of a message. Read when gRPC is loaded.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
    from kvhost_server.daemon import run  # gRPC takes 0.1 s to load: not needed above

    return run(made, partial(_read_again, ctx.obj))


def meanings() -> dict[str, str]:
    """What each option means, by name."""
    return {
        param.name: " ".join((param.help or "").split())
        for param in command.params
        if isinstance(param, click.Option) and param.name and param.help
    }


def _config_of(ctx: click.Context, values: Mapping[str, Any]) -> Config:
    sources = {name: _source(ctx, name) for name in values}
    try:
        return Config.of(**values, sources=sources)
    except BadValue as error:
        raise click.BadParameter(str(error), ctx, _options(ctx)[error.option]) from error


def _read_again(arguments: Sequence[str]) -> Config:
    """What the same command line comes to now, with the file as it is now.

    Raises:
        StartupError: it is wrong now.
    """
    try:
        with command.make_context("kvhostd", list(arguments)) as ctx:
            values = {name: value for name, value in ctx.params.items() if name not in _NOT_IN_FILE}
            return _config_of(ctx, values)
    except click.ClickException as error:
        message, code = _explain(error)
        raise StartupError(" ".join(message.split()), code) from error


def _options(ctx: click.Context) -> dict[str, click.Parameter]:
    return {param.name: param for param in ctx.command.params if param.name}


def _source(ctx: click.Context, name: str) -> str:
    """Where a value came from, for people."""
    source = ctx.get_parameter_source(name)
    if source is ParameterSource.ENVIRONMENT:
        return f"environment {_PREFIX}_{name.upper()}"
    if source is ParameterSource.DEFAULT_MAP:
        return f"file {ctx.params['config']}"
    return "command line" if source is ParameterSource.COMMANDLINE else "default"


def _explain(error: click.ClickException | StartupError) -> tuple[str, ExitCode]:
    """One sentence, and the exit code."""
    if isinstance(error, StartupError):
        return str(error), error.code
    if isinstance(error, click.BadParameter) and error.param is not None and error.ctx is not None:
        flag, name = error.param.opts[0], error.param.name or ""
        if isinstance(error, click.MissingParameter):
            return f"{flag} is missing; give it, as in --memory 8GiB", ExitCode.USAGE
        source = _source(error.ctx, name)
        in_file = error.ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
        return f"{flag} ({source}): {error.message}", ExitCode.CONFIG if in_file else ExitCode.USAGE
    return f"{error.format_message()} See kvhostd --help.", ExitCode.USAGE


def main(arguments: Sequence[str] | None = None) -> int:
    """The `kvhostd` command. Returns the exit code (see `ExitCode`), and says why in one line."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        code = command.main(given, standalone_mode=False, obj=given)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.ClickException, StartupError) as error:
        message, code = _explain(error)
        print(f"kvhostd: {' '.join(message.split())}", file=sys.stderr)
    return int(code)
