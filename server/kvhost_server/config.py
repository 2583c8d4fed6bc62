"""What the daemon was told: one frozen `Config`, validated once, with the source of each value.

Knows nothing of flags or files being parsed; `cli` does that and hands the values over.
"""

import enum
import grp
import json
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from kvhost_server.listener import Address, Listener
from kvhost_server.locking import Lock
from kvhost_server.sizing import HugePages
from kvhost_server.units import exact_size

_LONGEST_WAIT_S = 86400.0


METRICS_OFF = "off"


class LogFormat(enum.StrEnum):
    """What `--log-format` may ask."""

    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """What `--log-level` may ask."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


RELOADED = ("allow_uid", "allow_gid", "log_level", "log_format")
"""Options that a running daemon takes anew on SIGHUP; all others need a restart."""


@dataclass(frozen=True)
class Change:
    """One option that differs after the configuration was read again; values as TOML, None: not set."""

    name: str
    before: str | None
    after: str | None
    taken: bool


class BadValue(ValueError):
    """A value that is not allowed: the option's name (as in `segment_size`) and a sentence."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True)
class Config:
    """Everything the daemon was told. Sizes in bytes, times in seconds, paths absolute."""

    memory: int
    socket: Path
    admin_socket: Path
    handover_socket: Path
    segment_size: int | None
    """None: chosen from `memory`."""
    socket_mode: int
    socket_group: int | None
    """Group of the engines' two sockets and of a folder made for them; its members may say HELLO."""
    admin_group: int | None
    """Group of the admin socket; None: the daemon's own."""
    allow_uid: tuple[int, ...]
    allow_gid: tuple[int, ...]
    tcp: Listener | None
    """None: nothing is served over TCP."""
    metrics: Address | None
    """Where metrics and the web page are served over HTTP; None: nowhere."""
    lock: Lock
    hugepages: HugePages
    policy: str
    """Name of the order of eviction, one of `policies.POLICIES`."""
    memory_wait: float
    strict_memory: bool
    log_level: LogLevel
    log_format: LogFormat
    cgroup_root: str
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each value came from, for people: "command line", "default", ..."""

    @classmethod
    def of(
        cls,
        *,
        memory: int,
        socket: Path,
        admin_socket: Path | None,
        handover_socket: Path | None,
        segment_size: int | None,
        socket_mode: int,
        socket_group: str | None,
        admin_group: str | None,
        allow_uid: Sequence[str],
        allow_gid: Sequence[str],
        tcp: str | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        tls_client_ca: Path | None,
        metrics: str,
        lock: str,
        hugepages: str,
        policy: str,
        memory_wait: float,
        strict_memory: bool,
        log_level: str,
        log_format: str,
        cgroup_root: str,
        sources: Mapping[str, str],
    ) -> "Config":
        """Looks up users and groups, fills in what follows from other values, and checks the rest.

        Raises:
            BadValue: the first value that is not allowed.
        """
        socket = socket.absolute()
        config = cls(
            memory=memory,
            socket=socket,
            admin_socket=admin_socket.absolute() if admin_socket else sibling(socket, "admin"),
            handover_socket=handover_socket.absolute() if handover_socket else sibling(socket, "handover"),
            segment_size=segment_size,
            socket_mode=socket_mode,
            socket_group=_gid("socket_group", socket_group) if socket_group else None,
            admin_group=_gid("admin_group", admin_group) if admin_group else None,
            allow_uid=tuple(_uid("allow_uid", name) for name in allow_uid),
            allow_gid=tuple(_gid("allow_gid", name) for name in allow_gid),
            tcp=_listener(tcp, tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca),
            metrics=_metrics(metrics),
            lock=Lock(lock),
            hugepages=HugePages(hugepages),
            policy=policy,
            memory_wait=memory_wait,
            strict_memory=strict_memory,
            log_level=LogLevel(log_level),
            log_format=LogFormat(log_format),
            cgroup_root=cgroup_root,
            sources=dict(sources),
        )
        config._check()
        return config

    def _check(self) -> None:
        if not 0 <= self.memory_wait <= _LONGEST_WAIT_S:
            raise BadValue("memory_wait", f"{self.memory_wait:g} s is outside 0 to {_LONGEST_WAIT_S:g} s")
        if self.socket_mode & 0o600 != 0o600 or self.socket_mode & ~0o777:
            raise BadValue(
                "socket_mode",
                f"{self.socket_mode:#05o} is no mode for a socket; the owner must read and write, as in 0660",
            )
        paths = {
            "socket": self.socket,
            "admin_socket": self.admin_socket,
            "handover_socket": self.handover_socket,
        }
        for name, path in paths.items():
            if list(paths.values()).count(path) > 1:
                raise BadValue(name, f"{path} is named for two sockets; each of the three needs its own path")

    def to_toml(self, meanings: Mapping[str, str] = MappingProxyType({})) -> str:
        """A configuration file that says the same, with the source of each value as a comment, and above it
        what it means."""
        import textwrap  # not needed where a daemon starts

        lines = []
        for name, value in self._values().items():
            if name in meanings:
                again = " Read again on SIGHUP." if name in RELOADED else ""
                lines += ["", *textwrap.wrap(f"# {meanings[name]}{again}", 100, subsequent_indent="# ")]
            source = self.sources.get(name, "default")
            lines.append(f"# {name}: not set" if value is None else f"{name} = {value}  # {source}")
        return "\n".join(lines).lstrip("\n") + "\n"

    def reloaded(self, fresh: "Config") -> tuple["Config", list[Change]]:
        """This configuration with what `fresh` changes and a running daemon can take; and every change."""
        before, after = self._values(), fresh._values()
        changes = [
            Change(name, before[name], after[name], name in RELOADED)
            for name in before
            if before[name] != after[name]
        ]
        taken = {name: getattr(fresh, name) for name in RELOADED}
        sources = {
            name: (fresh if name in RELOADED else self).sources.get(name, "default")
            for name in {*self.sources, *fresh.sources}
        }
        return replace(self, **taken, sources=sources), changes

    def shown(self) -> dict[str, str]:
        """The values as text, for people who ask a running daemon."""
        return {name: value.strip('"') for name, value in self._values().items() if value is not None}

    def _values(self) -> dict[str, str | None]:
        """Each value as TOML writes it; None where it is not set."""
        return {
            "memory": json.dumps(exact_size(self.memory)),
            "socket": json.dumps(str(self.socket)),
            "admin_socket": json.dumps(str(self.admin_socket)),
            "handover_socket": json.dumps(str(self.handover_socket)),
            "segment_size": None if self.segment_size is None else json.dumps(exact_size(self.segment_size)),
            "socket_mode": f'"{self.socket_mode:04o}"',
            "socket_group": None if self.socket_group is None else f'"{self.socket_group}"',
            "admin_group": None if self.admin_group is None else f'"{self.admin_group}"',
            "allow_uid": json.dumps([str(uid) for uid in self.allow_uid]),
            "allow_gid": json.dumps([str(gid) for gid in self.allow_gid]),
            "tcp": None if self.tcp is None else json.dumps(str(self.tcp.address)),
            "tls_cert": None if self.tcp is None else json.dumps(str(self.tcp.cert)),
            "tls_key": None if self.tcp is None else json.dumps(str(self.tcp.key)),
            "tls_client_ca": None if self.tcp is None else json.dumps(str(self.tcp.client_ca)),
            "metrics": json.dumps(METRICS_OFF if self.metrics is None else str(self.metrics)),
            "lock": json.dumps(self.lock),
            "hugepages": json.dumps(self.hugepages),
            "policy": json.dumps(self.policy),
            "memory_wait": f"{self.memory_wait:g}",
            "strict_memory": json.dumps(self.strict_memory),
            "log_level": json.dumps(self.log_level),
            "log_format": json.dumps(self.log_format),
        }


def sibling(socket: Path, role: str) -> Path:
    """The path of a socket that stands beside the main one: `kvhostd.sock` -> `kvhostd-admin.sock`."""
    return socket.with_name(f"{socket.name.removesuffix('.sock')}-{role}.sock")


def _listener(tcp: str | None, **files: Path | None) -> Listener | None:
    """The TCP port, which needs all three files: a port that anybody may speak to does not exist."""
    given = [name for name, path in files.items() if path is not None]
    if tcp is None:
        if given:
            raise BadValue(given[0], "it says how --tcp is protected, and --tcp HOST:PORT is not given")
        return None
    cert, key, client_ca = (path.absolute() if path else None for path in files.values())
    if cert is None or key is None or client_ca is None:
        missing = " and ".join(f"--{name.replace('_', '-')}" for name in files if name not in given)
        raise BadValue(
            "tcp", f"{missing} must be given too: nothing is served over TCP without TLS on both sides"
        )
    try:
        return Listener(Address.parse(tcp), cert, key, client_ca)
    except ValueError as error:
        raise BadValue("tcp", str(error)) from None


def _metrics(text: str) -> Address | None:
    if text == METRICS_OFF:
        return None
    try:
        return Address.parse(text)
    except ValueError as error:
        raise BadValue("metrics", f"{error}; or write {METRICS_OFF}") from None


def _uid(option: str, name: str) -> int:
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise BadValue(option, f"there is no user {name!r} on this host; give a name or a number") from None


def _gid(option: str, name: str) -> int:
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise BadValue(option, f"there is no group {name!r} on this host; give a name or a number") from None
