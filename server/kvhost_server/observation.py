"""What people and monitors see of the daemon over HTTP: the paths, and what stands behind them."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kvhost_server.config import Config
from kvhost_server.console import Console, page, sample
from kvhost_server.exits import StartupError
from kvhost_server.history import EVERY_S, History
from kvhost_server.metrics import CONTENT_TYPE, Sources, gather, render
from kvhost_server.web import Answer, WebServer

_FRESH_S = 0.05
"""Who asks more often than this gets the same text again: a flood of scrapes costs the loop no more."""

log = logging.getLogger(__name__)


class Observation:
    """The HTTP port and the last hour.

    Args:
        config: what is shown, and whether and where there is a port.
        sources: where the numbers are; the port's own anomalies are added.
    """

    def __init__(self, config: Callable[[], Config], sources: Callable[["Observation"], Sources]) -> None:
        self._config = config
        self._sources = sources(self)
        self._history = History(lambda: sample(self._sources))
        self._scrape = asyncio.Lock()
        self._text = b""
        self._text_at = float("-inf")
        console = Console(
            self._sources,
            self._history,
            lambda: config().shown(),
            lambda: config().sources,
        )
        self._server = WebServer(
            {
                "/": page,
                "/metrics": self._metrics,
                "/livez": console.alive,
                "/readyz": console.ready,
                "/api/status.json": console.status,
            }
        )
        self.url = ""

    @property
    def anomalies(self) -> Mapping[str, int]:
        """Who came and did not behave."""
        return self._server.anomalies

    async def open(self) -> None:
        """Opens the port, if there is to be one.

        Raises:
            StartupError: it was asked for, and cannot be opened.
        """
        address = self._config().metrics
        if address is None:
            return
        try:
            where = await self._server.listen(address)
        except StartupError as error:
            if self._config().sources.get("metrics", "default") != "default":
                raise
            log.warning("no metrics and no web page: %s", error)
            return
        self.url = f"http://{where}"
        log.info("metrics on %s/metrics, a page for people on %s/", self.url, self.url)
        if not self._server.is_local:
            log.info("whoever reaches %s can read what they say; there is no login", where)

    async def watch(self) -> None:
        """Takes samples for ever."""
        while self.url:
            self._history.sample()
            await asyncio.sleep(EVERY_S)

    async def close(self) -> None:
        await self._server.close()

    async def _metrics(self) -> Answer:
        async with self._scrape:
            if time.monotonic() - self._text_at > _FRESH_S:
                gathered = gather(self._sources)
                # Making text of it takes milliseconds, and the first time an import.
                self._text = await asyncio.to_thread(render, gathered)
                self._text_at = time.monotonic()
        return Answer(self._text, CONTENT_TYPE)
