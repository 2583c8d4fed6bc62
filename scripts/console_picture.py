"""Makes `docs/images/console.png`: the daemon's web page in a real Chromium, with a made-up busy hour."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from kvhost_server.console import page
from kvhost_server.listener import Address
from kvhost_server.web import Answer, WebServer
from tests.support.browser import Browser
from tests.support.console import busy_hour

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "console.png"
WIDTH, HEIGHT = 1280, 900


async def make() -> None:
    async def status() -> Answer:
        return Answer(json.dumps(busy_hour(time.time())).encode(), "application/json")

    server = WebServer({"/": page, "/api/status.json": status})
    address = await server.listen(Address("127.0.0.1", 0))
    try:
        await asyncio.to_thread(_show, f"http://{address}/")
    finally:
        await server.close()


def _show(url: str) -> None:
    with Browser() as browser:
        browser.look(WIDTH, HEIGHT)
        browser.go(url)
        browser.until("document.documentElement.dataset.drawn")
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        PICTURE.write_bytes(browser.picture(whole=True))


if __name__ == "__main__":
    sys.exit(asyncio.run(make()))
