"""A real headless Chromium, spoken to over a pair of pipes (DevTools protocol), with no driver between."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from queue import Empty, Queue
from types import TracebackType
from typing import Any

from tests.support.tools import missing

START_DEADLINE_S = 60.0
CALL_DEADLINE_S = 30.0
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


class Browser:
    """One page in a browser of its own; use it in a `with`.

    What the page complains of (errors, blocked content) is collected in `complaints`.

    Without a Chromium the test ends here, as `tools.missing` says.
    """

    def __init__(self) -> None:
        binary = next((found for name in _NAMES if (found := shutil.which(name))), None)
        if binary is None:
            missing("the web page is tested in a real Chromium, and there is none: see `make browser`")
        self.complaints: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="kvhost-browser-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._answers: Queue[dict[str, Any]] = Queue()
        self._last_id = 0
        command = [
            binary,
            *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"),
            *("--hide-scrollbars", "--disable-dev-shm-usage", "--no-proxy-server", "--disable-extensions"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(("--no-sandbox",) if os.geteuid() == 0 else ()),
            f"--user-data-dir={self._folder}",
            "about:blank",
        ]
        # Chromium wants its two pipes as descriptors 3 and 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            targets = self._call("Target.getTargets", deadline_s=START_DEADLINE_S)["targetInfos"]
            page = next(target for target in targets if target["type"] == "page")
            attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """The size of the window, and what the person prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        """Opens a page; returns when it is there. What it does afterwards is waited for with `until`."""
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self.until("document.readyState === 'complete'")

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, deadline_s: float = CALL_DEADLINE_S) -> Any:
        """Returns the value once it is true."""
        ends = time.monotonic() + deadline_s
        while not (value := self.ask(expression)):
            assert time.monotonic() < ends, f"waited in vain for {expression} in the page"
        return value

    def press(self, name: str, code: int, text: str = "") -> None:
        """A key, as a person presses it; `code` is the one of Windows, which Chromium wants, and `text` what
        the key writes."""
        for kind in ("keyDown", "keyUp"):
            key: dict[str, Any] = {
                "type": kind,
                "key": name,
                "code": name,
                "windowsVirtualKeyCode": code,
                "text": text,
            }
            self._call("Input.dispatchKeyEvent", **key)

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of what is seen, or of the whole page."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        """Ends the browser. A second call does nothing."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    # Inside.

    def _call(self, method: str, *, deadline_s: float = CALL_DEADLINE_S, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + deadline_s
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, ends - time.monotonic()))
            except Empty:
                raise AssertionError(f"Chromium did not answer {method} in {deadline_s:g} s") from None
            if answer["id"] == self._last_id:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> None:
        buffer = b""
        while data := os.read(self._in, 1 << 16):
            *messages, buffer = (buffer + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.put(message)
                else:
                    self._notice(message["method"], message.get("params", {}))

    def _notice(self, method: str, told: dict[str, Any]) -> None:
        complaints: dict[str, Callable[[], str]] = {
            "Runtime.exceptionThrown": lambda: json.dumps(told["exceptionDetails"]),
            "Log.entryAdded": lambda: str(told["entry"]["text"]),
        }
        if method == "Log.entryAdded" and told["entry"]["level"] not in ("error", "warning"):
            return
        if method in complaints:
            self.complaints.append(complaints[method]())
