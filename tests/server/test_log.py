"""One line a record, and the same message not without end."""

import json
import logging
from collections.abc import Iterator

import pytest

from kvhost_server import log
from kvhost_server.config import LogFormat, LogLevel


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_text_is_one_line_with_time_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(LogLevel.INFO, LogFormat.TEXT)
    logging.getLogger("kvhost").debug("not shown")
    logging.getLogger("kvhost").warning("session %d ended", 7)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(" WARNING session 7 ended")
    assert lines[0][4] == "-" and lines[0][10] == "T"


def test_a_peers_text_makes_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(LogLevel.INFO, LogFormat.TEXT)
    logging.getLogger("kvhost").info("label %s", "x\n2026 ERROR forged\x1b[2J")
    assert capsys.readouterr().err.endswith(" INFO    label x\\n2026 ERROR forged\\x1b[2J\n")


def test_json_is_one_object_a_line_even_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(LogLevel.DEBUG, LogFormat.JSON)
    try:
        raise ValueError("what\nelse")
    except ValueError:
        logging.getLogger("kvhost.x").exception("it\nfailed: %s", "here")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert (record["level"], record["logger"], record["message"]) == ("error", "kvhost.x", "it\nfailed: here")
    assert "ValueError: what" in record["exception"]


def test_json_has_what_a_record_is_about_as_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(LogLevel.INFO, LogFormat.JSON)
    logging.getLogger("kvhost").info("session %d", 7, extra=log.about(session=7))
    record = json.loads(capsys.readouterr().err)
    assert record["session"] == 7 and "namespace" not in record


def record(text: str, at: float) -> logging.LogRecord:
    made = logging.LogRecord("kvhost", logging.WARNING, __file__, 1, text, (1,), None)
    made.created = at
    return made


def test_the_same_message_is_shown_so_often_and_then_counted() -> None:
    limit = log.RateLimit(burst=3, window_s=10)
    assert [limit.filter(record("refused %d", at / 100)) for at in range(1000)] == [True] * 3 + [False] * 997
    assert limit.filter(record("another %d", 9.0))
    later = record("refused %d", 11.0)
    assert limit.filter(later)
    assert later.getMessage() == "refused 1 (997 like it were not shown)"
    assert limit.filter(record("refused %d", 11.1))
