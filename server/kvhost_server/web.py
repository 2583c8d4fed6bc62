"""A small HTTP server in the event loop, for reading: GET, one answer, then the connection is closed.

It knows no routes of its own. Whoever connects is bounded in number, in bytes and in time, so that nobody
keeps the loop, or memory, or a place from others. Not for the open internet: there is no TLS and no login.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from kvhost_server.exits import ExitCode, StartupError
from kvhost_server.listener import Address

MOST_CONNECTIONS = 64
MOST_HEAD_BYTES = 8192
HEAD_DEADLINE_S = 5.0
"""For all of the request: a byte now and then does not help."""
ANSWER_DEADLINE_S = 10.0
"""For making the answer, and for the peer to take it."""
ANOMALIES = ("web_crowded", "web_too_slow")
_END = b"\r\n\r\n"
_PLAIN = "text/plain; charset=utf-8"
_ALWAYS = {
    "Connection": "close",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a route says."""

    body: bytes
    content_type: str = _PLAIN
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Route = Callable[[], Awaitable[Answer]]


class _Bad(Exception):
    """A request that gets no better answer than this."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.answer = Answer(message.encode() + b"\n", status=status)


class WebServer:
    """Serves some paths at one address.

    Args:
        routes: what is answered, by path. Parameters behind a question mark are ignored.
        head_deadline_s, answer_deadline_s: see the constants.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        head_deadline_s: float = HEAD_DEADLINE_S,
        answer_deadline_s: float = ANSWER_DEADLINE_S,
    ) -> None:
        self._routes = routes
        self._head_deadline_s = head_deadline_s
        self._answer_deadline_s = answer_deadline_s
        self._connections: dict[asyncio.Task[None], None] = {}
        self._server: asyncio.Server | None = None
        self._only_local_names = True
        self.anomalies = dict.fromkeys(ANOMALIES, 0)

    async def listen(self, address: Address) -> Address:
        """Opens the port; returns where it is.

        Raises:
            StartupError: nobody may listen there.
        """
        try:
            self._server = await asyncio.start_server(
                self._connected, address.host, address.port, limit=MOST_HEAD_BYTES, backlog=MOST_CONNECTIONS
            )
        except OSError as error:
            raise StartupError(
                f"--metrics {address} cannot be listened on: {error.strerror or error}; choose another "
                "HOST:PORT, or off",
                ExitCode.UNAVAILABLE,
            ) from error
        sockets = self._server.sockets
        self._only_local_names = all(_is_loopback(s.getsockname()[0]) for s in sockets)
        return Address(address.host, sockets[0].getsockname()[1])

    @property
    def is_local(self) -> bool:
        """Only this host can connect."""
        return self._only_local_names

    async def close(self) -> None:
        """Closes the port and ends every connection. A second call does nothing."""
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._server = None

    # One connection.

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            # An honest request takes milliseconds: whoever is here longest is not one.
            self.anomalies["web_crowded"] += 1
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections[task] = None
        task.add_done_callback(lambda ended: self._connections.pop(ended, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                bodiless, answer = await self._answer(reader)
                async with asyncio.timeout(self._answer_deadline_s):
                    writer.write(_message(answer, bodiless))
                    await writer.drain()
                    writer.write_eof()
                    # Closed with unread bytes, a connection is reset, and the answer with it.
                    while await reader.read(MOST_HEAD_BYTES):
                        pass
        except TimeoutError:
            self.anomalies["web_too_slow"] += 1
        finally:
            # What the peer has not taken by now it will not get.
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[bool, Answer]:
        """Reads one request and answers it; and whether the body is to be left out."""
        try:
            async with asyncio.timeout(self._head_deadline_s):
                head = await reader.readuntil(_END)
        except asyncio.LimitOverrunError:
            text = f"the request has more than {MOST_HEAD_BYTES} bytes"
            return False, _Bad(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text).answer
        try:
            method, path = self._understand(head)
            route = self._routes.get(path)
            if route is None:
                known = ", ".join(self._routes)
                raise _Bad(HTTPStatus.NOT_FOUND, f"there is nothing here; there are {known}")
        except _Bad as bad:
            return False, bad.answer
        try:
            async with asyncio.timeout(self._answer_deadline_s):
                return method == "HEAD", await route()
        except TimeoutError:
            raise
        except Exception:
            log.exception("the answer to GET %s failed", path)
            return False, Answer(b"failed; see the log\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)

    def _understand(self, head: bytes) -> tuple[str, str]:
        """Method and path of a request that we would answer.

        Raises:
            _Bad: it is none.
        """
        first, *lines = head[: -len(_END)].decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise _Bad(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
        method, target, _ = words
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise _Bad(HTTPStatus.BAD_REQUEST, "a header has no colon")
            headers[name.strip().lower()] = value.strip()
        if method not in ("GET", "HEAD"):
            raise _Bad(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD: this port is for reading")
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            raise _Bad(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request has no body here")
        host = headers.get("host", "localhost")
        if self._only_local_names and _without_port(host) not in _LOCAL_NAMES:
            # A page of another site whose name was made to lead here must not read this one.
            raise _Bad(HTTPStatus.MISDIRECTED_REQUEST, "ask for localhost: this port is for its own host")
        return method, target.partition("?")[0]


def _message(answer: Answer, bodiless: bool) -> bytes:
    headers = {
        **_ALWAYS,
        "Content-Type": answer.content_type,
        "Content-Length": str(len(answer.body)),
        **answer.headers,
    }
    if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = "GET, HEAD"
    lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if bodiless else answer.body)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and (port.isdecimal() or not port) else host.lower()


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
