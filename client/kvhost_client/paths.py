"""Where the three sockets of one daemon stand: everything is derived from the first one.

`NAME.sock` is for engines (gRPC), `NAME-admin.sock` for people (gRPC), `NAME-handover.sock` gives out memory.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from kvhost_client.errors import InvalidArgument

DEFAULT_SOCKET = "/run/kvhost/kvhostd.sock"

# struct sockaddr_un has 108 bytes for a path and its closing zero.
PATH_LIMIT = 107


@dataclass(frozen=True)
class SocketPaths:
    """Absolute paths of one daemon's sockets."""

    cache: str
    admin: str
    handover: str


def beside(socket: str | os.PathLike[str]) -> SocketPaths:
    """The sockets that belong to the daemon at `socket`. A leading `unix:` is allowed and dropped.

    Raises `InvalidArgument` for an empty path and for one that is too long for a socket.
    """
    text = os.fspath(socket).removeprefix("unix:")
    if not text:
        raise InvalidArgument(f"a socket path is needed, for example {DEFAULT_SOCKET}; found an empty one")
    path = Path(os.path.abspath(text))
    stem = path.name.removesuffix(".sock")
    paths = SocketPaths(
        cache=str(path),
        admin=str(path.with_name(f"{stem}-admin.sock")),
        handover=str(path.with_name(f"{stem}-handover.sock")),
    )
    longest = paths.handover
    if len(os.fsencode(longest)) > PATH_LIMIT:
        raise InvalidArgument(
            f"socket path {longest} has {len(os.fsencode(longest))} bytes, {PATH_LIMIT} are possible: "
            f"use a shorter directory"
        )
    return paths


def grpc_target(path: str) -> str:
    """The path as gRPC wants it; characters with a meaning in URIs are escaped."""
    return "unix:" + quote(path)
