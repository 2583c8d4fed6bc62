"""What the client's tests share: a short folder for sockets, a running daemon, an engine attached to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.engine import Engine
from tests.client.fakes import FakeHandover
from tests.support import Daemon


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    path = Path(tempfile.mkdtemp(prefix="kvhc-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def handover(folder: Path) -> Iterator[FakeHandover]:
    with FakeHandover(folder) as server:
        yield server


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as running:
        yield running


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    with Engine(daemon.socket) as attached:
        yield attached
