"""The HTTP port: what it answers, and that nobody who comes keeps the loop, memory, or a place."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest

from kvhost_server.exits import StartupError
from kvhost_server.listener import Address
from kvhost_server.web import MOST_CONNECTIONS, MOST_HEAD_BYTES, Answer, WebServer
from tests.support.waiting import wait_for_async

DEADLINE_S = 0.3
PATIENT_S = 10.0
LARGE = bytes(range(256)) * (1 << 16)


class Port:
    """A server with small deadlines, and somebody who speaks to it byte by byte."""

    def __init__(self, server: WebServer, address: Address) -> None:
        self.server = server
        self.address = address

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.address.host, self.address.port)

    async def say(self, request: bytes) -> bytes:
        """Everything that comes back until the connection ends."""
        reader, writer = await self.connect()
        writer.write(request)
        try:
            async with asyncio.timeout(2 * PATIENT_S):
                return await reader.read()
        finally:
            writer.close()

    async def get(self, path: str, headers: str = "Host: localhost\r\n") -> bytes:
        return await self.say(f"GET {path} HTTP/1.1\r\n{headers}\r\n".encode())


@asynccontextmanager
async def serving(deadline_s: float) -> AsyncIterator[Port]:
    async def hello() -> Answer:
        return Answer(b"hello\n")

    async def large() -> Answer:
        return Answer(LARGE, "application/octet-stream", headers={"X-More": "yes"})

    async def broken() -> Answer:
        raise ValueError("what")

    async def never() -> Answer:
        await asyncio.Event().wait()
        return Answer(b"")

    routes = {"/": hello, "/large": large, "/broken": broken, "/never": never}
    server = WebServer(routes, head_deadline_s=deadline_s, answer_deadline_s=deadline_s)
    address = await server.listen(Address("127.0.0.1", 0))
    yield Port(server, address)
    await server.close()


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    async with serving(PATIENT_S) as made:
        yield made


@pytest.fixture
async def hasty() -> AsyncIterator[Port]:
    """For those who must run into a deadline."""
    async with serving(DEADLINE_S) as made:
        yield made


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def test_it_answers_and_closes(port: Port) -> None:
    head, _, body = (await port.get("/?x=1")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    for header in (b"Connection: close", b"Content-Length: 6", b"X-Content-Type-Options: nosniff"):
        assert header in head
    assert body == b"hello\n"
    large = await port.get("/large")
    assert large.endswith(LARGE) and b"X-More: yes" in large


async def test_head_has_no_body(port: Port) -> None:
    answer = await port.say(b"HEAD / HTTP/1.1\r\n\r\n")
    assert status_of(answer) == 200 and answer.endswith(b"\r\n\r\n") and b"Content-Length: 6" in answer


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", HTTPStatus.NOT_FOUND),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", HTTPStatus.NOT_FOUND),
        (b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", HTTPStatus.METHOD_NOT_ALLOWED),
        (b"DELETE / HTTP/1.1\r\n\r\n", HTTPStatus.METHOD_NOT_ALLOWED),
        (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /" + b"a" * MOST_HEAD_BYTES * 3, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (
            b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * MOST_HEAD_BYTES + b"\r\n",
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        ),
        (b"GET /broken HTTP/1.1\r\n\r\n", HTTPStatus.INTERNAL_SERVER_ERROR),
    ],
)
async def test_what_is_no_request_of_ours(port: Port, request_text: bytes, status: HTTPStatus) -> None:
    assert status_of(await port.say(request_text)) == status
    assert status_of(await port.get("/")) == 200


async def test_another_sites_name_does_not_lead_here(port: Port) -> None:
    for host in ("evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example"):
        assert status_of(await port.get("/", f"Host: {host}\r\n")) == HTTPStatus.MISDIRECTED_REQUEST
    for host in (f"127.0.0.1:{port.address.port}", "LOCALHOST", "[::1]:80"):
        assert status_of(await port.get("/", f"Host: {host}\r\n")) == 200


async def test_a_request_that_never_ends_is_ended(hasty: Port) -> None:
    reader, writer = await hasty.connect()
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while not reader.at_eof() and time.monotonic() - began < PATIENT_S:
            writer.write(b"G")  # a byte now and then does not help
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await reader.read(1)
    assert time.monotonic() - began < PATIENT_S
    assert hasty.server.anomalies["web_too_slow"] == 1
    writer.close()


async def test_an_answer_that_nobody_takes_is_dropped(hasty: Port) -> None:
    _, writer = await hasty.connect()
    writer.write(b"GET /large HTTP/1.1\r\n\r\n")
    await wait_for_async(lambda: hasty.server.anomalies["web_too_slow"] == 1)
    writer.close()


async def test_an_answer_that_cannot_be_made_in_time(hasty: Port) -> None:
    assert await hasty.get("/never") == b""
    assert hasty.server.anomalies["web_too_slow"] == 1


async def test_a_crowd_keeps_no_place_from_others(port: Port) -> None:
    crowd = [await port.connect() for _ in range(3 * MOST_CONNECTIONS)]
    assert status_of(await port.get("/")) == 200
    assert port.server.anomalies["web_crowded"] >= 2 * MOST_CONNECTIONS
    for _, writer in crowd:
        writer.close()


async def test_closing_ends_every_connection(port: Port) -> None:
    reader, writer = await port.connect()
    await port.get("/")
    await port.server.close()
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    with pytest.raises(OSError):
        await port.connect()


async def test_a_port_that_is_taken_is_said_in_a_sentence(port: Port) -> None:
    with pytest.raises(StartupError, match=r"cannot be listened on: .*; choose another HOST:PORT, or off"):
        await WebServer({}).listen(port.address)
