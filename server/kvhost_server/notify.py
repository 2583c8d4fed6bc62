"""What the service manager is told: ready, stopping, still populating, still alive (sd_notify(3)).

Speaks the datagrams of systemd's protocol itself: a few lines of text to the socket named in NOTIFY_SOCKET.
Without that variable nothing is sent. A manager that does not listen is no reason not to serve.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, MutableMapping
from types import TracebackType

_EVERY_S = 1.0
_EXTENSION_S = 30.0
"""How long a start may go on without a page populated, beside the wait for room that was asked for."""
_PATIENCE_S = 1.0

log = logging.getLogger(__name__)


class ServiceManager:
    """The connection to the service manager, if there is one.

    Args:
        address: a path, or "@name" for a socket in the abstract namespace; None: nobody is told anything.
        watchdog_s: how long the manager waits for a sign of life; None: it wants none.

    Use it in a `with`, or call `close`.
    """

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._socket: socket.socket | None = None
        if address is None:
            return
        target = "\0" + address[1:] if address.startswith("@") else address
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            sender.connect(target)
        except OSError as error:
            sender.close()
            log.warning(
                "the service manager cannot be told anything: NOTIFY_SOCKET %s: %s", address, error.strerror
            )
            return
        self._socket = sender

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> "ServiceManager":
        """As NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID say. Takes them out of the environment: they are
        for this process, and the manager refuses the word of a child (F10)."""
        address = environment.pop("NOTIFY_SOCKET", None)
        interval = environment.pop("WATCHDOG_USEC", "")
        for_whom = environment.pop("WATCHDOG_PID", "")
        ours = for_whom in ("", str(os.getpid()))
        watchdog_s = int(interval) / 1e6 if interval.isdecimal() and int(interval) and ours else None
        return cls(address, watchdog_s if address else None)

    def __enter__(self) -> "ServiceManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def listens(self) -> bool:
        """Whether there is somebody to tell."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """The service has started."""
        self._send("READY=1", f"STATUS={status}", wait_s=_PATIENCE_S)

    def stopping(self, status: str) -> None:
        """The service is going down."""
        self._send("STOPPING=1", f"STATUS={status}", wait_s=_PATIENCE_S)

    def extend(self, seconds: float, status: str) -> None:
        """The start goes on: wait for the next word so much longer."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}", f"STATUS={status}")

    def alive(self) -> None:
        """A sign of life."""
        self._send("WATCHDOG=1")

    def close(self) -> None:
        """Ends the connection. A second call does nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def report_start(
        self,
        populated_bytes: Callable[[], int],
        status: Callable[[], str],
        wait_s: float,
        every_s: float = _EVERY_S,
    ) -> None:
        """Says for ever how far populating is; to be cancelled when it is over.

        Asks for more time only while pages are added: a start that hangs still times out.

        Args:
            populated_bytes: how far it is now.
            status: the same for people.
            wait_s: how long the start may wait for room without progress, as it was configured.
        """
        last = -1
        while self.listens:
            now = populated_bytes()
            if now != last:
                last = now
                self.extend(_EXTENSION_S + wait_s, status())
            await asyncio.sleep(every_s)

    async def report_life(self) -> None:
        """Gives signs of life for ever, three in each interval of the watchdog. Runs on the loop whose life
        it proves; returns at once when no watchdog is wanted."""
        while self.listens and self.watchdog_s is not None:
            self.alive()
            await asyncio.sleep(self.watchdog_s / 3)

    def _send(self, *lines: str, wait_s: float = 0.0) -> None:
        if self._socket is None:
            return
        text = "\n".join(" ".join(line.splitlines()) for line in lines)
        self._socket.settimeout(wait_s)
        # Of a queue that is full a sign of life may be lost, the next one follows; what is said once waits a
        # moment. A manager that is gone has nothing to decide.
        with contextlib.suppress(OSError):
            self._socket.send(text.encode())
