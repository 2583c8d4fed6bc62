"""What a service manager hears: a real daemon, a real datagram socket in the place of systemd (F4, F10)."""

import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost_server.notify import ServiceManager
from tests.server.hosts import MIB, cgroup_v2
from tests.support import Daemon
from tests.support.waiting import wait_for_async


class Ear:
    """The manager's end of the notify socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(20)

    def hear(self) -> tuple[dict[str, str], int]:
        """The next message, and the pid it came from."""
        data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
        [(_, _, credentials)] = ancillary
        pid, _, _ = struct.unpack("3i", credentials)
        return dict(line.split("=", 1) for line in data.decode().splitlines()), pid

    def until(self, key: str) -> list[tuple[dict[str, str], int]]:
        """All messages up to the first that has the key."""
        heard = [self.hear()]
        while key not in heard[-1][0]:
            heard.append(self.hear())
        return heard

    def waiting(self) -> int:
        """How many messages came meanwhile; they are taken."""
        self._socket.setblocking(False)
        count = 0
        try:
            while True:
                self.hear()
                count += 1
        except BlockingIOError:
            return count

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def ear(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ear]:
    ear = Ear(f"@kvhost-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify"))
    yield ear
    ear.close()


def test_ready_once_after_populating_and_stopping_at_the_end(ear: Ear) -> None:
    with Daemon("8MiB", env={"NOTIFY_SOCKET": ear.address}, wait=False) as daemon:
        before_ready = ear.until("READY")
        words, _ = before_ready[-1]
        assert words["READY"] == "1"
        assert words["STATUS"] == "serving with a pool of 8MiB"
        assert daemon.status().memory.populated_bytes == 8 * MIB
        first = before_ready[0][0]
        assert int(first["EXTEND_TIMEOUT_USEC"]) == 60_000_000
        assert first["STATUS"].startswith("populating: ")
        daemon.process.send_signal(signal.SIGTERM)
        after = ear.until("STOPPING")
        assert after[-1][0] == {"STOPPING": "1", "STATUS": "going down: got SIGTERM"}
        assert all("READY" not in words for words, _ in after)
        # The main process itself: systemd does not believe a child.
        assert {pid for _, pid in (*before_ready, *after)} == {daemon.pid}
        assert daemon.wait_end() == 0


def test_no_more_time_is_asked_for_while_no_page_is_added(tmp_path: Path) -> None:
    ear = Ear(str(tmp_path / "notify"))
    cgroup = cgroup_v2(tmp_path / "cgroup", limit=100 * MIB, current=99 * MIB)
    options = ["--cgroup-root", str(cgroup), "--memory-wait", "2.5"]
    with Daemon("64MiB", options, folder=tmp_path, env={"NOTIFY_SOCKET": ear.address}, wait=False) as daemon:
        assert int(ear.hear()[0]["EXTEND_TIMEOUT_USEC"]) == 32_500_000
        daemon.wait_end(20)
        # It waited for room for 2.5 s, long enough to ask twice more: what follows is the end.
        assert "STOPPING" in ear.hear()[0]
    ear.close()


def test_signs_of_life_three_in_each_interval(tmp_path: Path) -> None:
    ear = Ear(str(tmp_path / "notify"))
    watchdog = {"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "300000"}
    with Daemon("4MiB", env=watchdog, wait=False):
        ear.until("READY")
        began = time.monotonic()
        for _ in range(10):
            ear.until("WATCHDOG")
        assert time.monotonic() - began >= 0.8
    ear.close()


def test_the_watchdog_of_another_process_is_not_ours(tmp_path: Path) -> None:
    ear = Ear(str(tmp_path / "notify"))
    environment = {"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "300000", "WATCHDOG_PID": "1"}
    with ServiceManager.from_environment(environment) as manager:
        assert (manager.listens, manager.watchdog_s) == (True, None)
    # Nothing is left for child processes to speak by.
    assert environment == {}
    ear.close()


@pytest.mark.parametrize("address", [None, "/no/such/socket", "@nobody-is-there"])
def test_nobody_listens(address: str | None) -> None:
    environment = {} if address is None else {"NOTIFY_SOCKET": address}
    with ServiceManager.from_environment(environment) as manager:
        manager.ready("serving")
        manager.alive()
        assert not manager.listens


def test_a_daemon_starts_although_its_manager_cannot_be_reached() -> None:
    with Daemon("4MiB", env={"NOTIFY_SOCKET": "/no/such/socket"}) as daemon:
        assert "the service manager cannot be told anything" in daemon.log
        assert daemon.stop() == 0


async def test_a_full_queue_or_a_dead_manager_stops_nobody(tmp_path: Path) -> None:
    ear = Ear(str(tmp_path / "notify"))
    with ServiceManager(ear.address, watchdog_s=0.003) as manager:
        life = asyncio.ensure_future(manager.report_life())
        for _ in range(500):
            manager.alive()
        assert ear.waiting() < 500
        await wait_for_async(ear.waiting, what="signs of life after the queue had been full")
        ear.close()
        manager.stopping("going down")
        assert not life.done()
        life.cancel()
