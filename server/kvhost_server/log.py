"""What the daemon writes to stderr: one line a record, as text or JSON, the same message not without end."""

import json
import logging
import sys
import time

from kvhost_server.config import LogFormat, LogLevel

_TEXT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(message)s"
_BURST = 20
_WINDOW_S = 10.0
_MOST_TEMPLATES = 1000


_FIELDS = ("session", "namespace")


def about(session: int | None = None, namespace: int | None = None) -> dict[str, int | None]:
    """What a record is about, as `extra` of a logging call: fields of their own in JSON, for programs. The
    text says the same in words."""
    return {"session": session, "namespace": namespace}


class _TextFormatter(logging.Formatter):
    """A peer's text may be part of a message, and must not make a line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.message)
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in _FIELDS:
            if (value := getattr(record, name, None)) is not None:
                fields[name] = value
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class RateLimit(logging.Filter):
    """Lets `burst` records of one message template through in `window_s` seconds; then tells how many were
    not shown. A peer can make the daemon log (E1); it cannot fill the disk."""

    def __init__(self, burst: int = _BURST, window_s: float = _WINDOW_S) -> None:
        super().__init__()
        self._burst = burst
        self._window_s = window_s
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, str(record.msg))
        began, count = self._seen.get(key, (record.created, 0))
        if record.created - began >= self._window_s:
            hidden = max(0, count - self._burst)
            if hidden:
                record.msg = f"{record.msg} ({hidden} like it were not shown)"
            began, count = record.created, 0
        if len(self._seen) > _MOST_TEMPLATES:
            self._seen.clear()
        self._seen[key] = (began, count + 1)
        return count < self._burst


def setup(level: LogLevel, form: LogFormat) -> None:
    """Sends every record of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if form is LogFormat.JSON:
        formatter: logging.Formatter = _JsonFormatter()
    else:
        formatter = _TextFormatter(_TEXT, "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
