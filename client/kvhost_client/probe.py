"""What is it that answers at a socket? Asked when it does not answer as kvhostd does (F15)."""

from __future__ import annotations

import socket
import time

from kvhost_client.errors import DeadlineExceeded, KVHostError, NotKVHost
from kvhost_client.handover import connection_error

# How an HTTP/2 client begins, with an empty SETTINGS frame; every gRPC server answers with SETTINGS.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_SETTINGS = 4


def bound_name(path: str, deadline_s: float) -> str:
    """The name under which the server bound the socket at `path`; in a container it may be another path.

    Raises an error that says why nothing can be reached there.
    """
    with _connect(path, deadline_s) as connection:
        name = connection.getpeername()
    return name if isinstance(name, str) else ""


def foreign(path: str, deadline_s: float, but: str = "") -> NotKVHost | None:
    """What answers at `path`, as an error, if it is something else than a gRPC server; None otherwise.

    With `but`, a gRPC server is foreign too, for the reason that it says.
    """
    try:
        with _connect(path, deadline_s) as connection:
            connection.sendall(_PREFACE)
            answer = _read(connection, 9, deadline_s)
    except (OSError, KVHostError):
        return None
    if answer[:5] == b"HTTP/":
        found = "an HTTP/1 server"
    elif len(answer) >= 4 and answer[3] == _SETTINGS:
        if not but:
            return None
        found = f"a gRPC server {but}"
    elif answer:
        found = "no gRPC server"
    else:
        return None  # silence may be a daemon that hangs
    return NotKVHost(f"{path} answers, but not as a kvhostd: it is {found}")


def _connect(path: str, deadline_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(max(deadline_s, 0.001))
        connection.connect(path)
    except TimeoutError as error:
        connection.close()
        raise DeadlineExceeded(f"{path} accepts no connection") from error
    except OSError as error:
        connection.close()
        raise connection_error(path, error) from error
    return connection


def _read(connection: socket.socket, wanted: int, deadline_s: float) -> bytes:
    """Up to `wanted` bytes, as many as arrive in time."""
    until = time.monotonic() + deadline_s
    data = b""
    while len(data) < wanted and (left := until - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            part = connection.recv(wanted - len(data))
        except TimeoutError:
            break
        if not part:
            break
        data += part
    return data
