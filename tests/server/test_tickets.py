"""Tickets are good once and for a while; no pidfd outlives its use."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from kvhost_server import tickets as tickets_module
from kvhost_server.identity import Identity
from kvhost_server.tickets import TICKET_BYTES, PidWatch, Tickets
from tests.support.forks import fork_child
from tests.support.processes import fd_count
from tests.support.waiting import wait_for_async


@pytest.fixture
def child() -> Iterator[int]:
    pid = fork_child(signal.pause)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.fixture
def no_leak() -> Iterator[None]:
    before = fd_count(os.getpid())
    yield
    assert fd_count(os.getpid()) == before


def identity(pid: int, pidfd: bool = True) -> Identity:
    return Identity(pid, 0, 0, (), os.pidfd_open(pid) if pidfd else None, b"i" * 16)


async def test_a_ticket_is_good_once(child: int) -> None:
    tickets = Tickets()
    one, two = tickets.issue(identity(child)), tickets.issue(identity(os.getpid(), pidfd=False))
    assert len(one) == len(two) == TICKET_BYTES and one != two
    found = tickets.redeem(one)
    assert found is not None and found.pid == child
    assert tickets.redeem(one) is None
    assert tickets.redeem(two) is not None
    tickets.close()


@pytest.mark.parametrize("wrong", [b"", b"x", bytes(32), b"x" * 33, b"x" * 100_000])
async def test_what_is_no_ticket_is_none(child: int, wrong: bytes) -> None:
    tickets = Tickets()
    tickets.issue(identity(child))
    assert tickets.redeem(wrong) is None
    assert tickets.waiting == 1
    tickets.close()


async def test_a_ticket_expires_and_its_pidfd_is_closed(
    child: int, monkeypatch: pytest.MonkeyPatch, no_leak: None
) -> None:
    monkeypatch.setattr(tickets_module, "VALID_S", 0.02)
    tickets = Tickets()
    ticket = tickets.issue(identity(child))
    await wait_for_async(lambda: tickets.waiting == 0)
    assert tickets.redeem(ticket) is None


async def test_a_redeemed_pidfd_that_nobody_watches_is_closed(
    child: int, monkeypatch: pytest.MonkeyPatch, no_leak: None
) -> None:
    monkeypatch.setattr(tickets_module, "VALID_S", 0.02)
    tickets = Tickets()
    before = fd_count(os.getpid())
    assert tickets.redeem(tickets.issue(identity(child))) is not None
    await wait_for_async(lambda: fd_count(os.getpid()) == before)


async def test_a_watch_outlives_the_tickets_time(
    child: int, monkeypatch: pytest.MonkeyPatch, no_leak: None
) -> None:
    monkeypatch.setattr(tickets_module, "VALID_S", 0.0)
    tickets = Tickets()
    found = tickets.redeem(tickets.issue(identity(child)))
    assert found is not None
    ended: list[int] = []
    tickets.watch_end(found, lambda: ended.append(1))
    for _ in range(3):
        await asyncio.sleep(0)
    os.kill(child, signal.SIGKILL)
    await wait_for_async(lambda: ended)


async def test_unwatching_closes_once_and_tells_nothing(child: int, no_leak: None) -> None:
    tickets = Tickets()
    found = tickets.redeem(tickets.issue(identity(child)))
    assert found is not None
    unwatch = tickets.watch_end(found, pytest.fail)
    unwatch()
    reused = os.pidfd_open(child)  # very likely the same number
    unwatch()
    os.fstat(reused)
    os.close(reused)
    os.kill(child, signal.SIGKILL)
    await asyncio.sleep(0)


async def test_a_process_that_ended_before_it_was_watched_is_told(child: int, no_leak: None) -> None:
    tickets = Tickets()
    found = tickets.redeem(tickets.issue(identity(child)))
    assert found is not None and found.pidfd is not None
    os.kill(child, signal.SIGKILL)
    await wait_for_async(lambda: not os.path.exists(f"/proc/self/fd/{found.pidfd}"))
    ended: list[int] = []
    tickets.watch_end(found, lambda: ended.append(1))()
    await wait_for_async(lambda: ended)


async def test_the_oldest_makes_room(child: int, monkeypatch: pytest.MonkeyPatch, no_leak: None) -> None:
    monkeypatch.setattr(tickets_module, "_MOST_WAITING", 3)
    tickets = Tickets()
    issued = [tickets.issue(identity(child)) for _ in range(5)]
    assert tickets.waiting == 3
    assert [tickets.redeem(ticket) is not None for ticket in issued] == [False, False, True, True, True]
    tickets.close()


async def test_a_watch_fires_once(child: int, no_leak: None) -> None:
    ended: list[int] = []
    watch = PidWatch(os.pidfd_open(child), lambda: ended.append(1))
    os.kill(child, signal.SIGKILL)
    await wait_for_async(lambda: ended)
    await asyncio.sleep(0)
    watch.close()
    assert ended == [1]


async def test_too_many_tickets_of_one_user_drop_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets_module, "_MOST_WAITING", 4)
    tickets = Tickets()
    first = tickets.issue(Identity(1, 1001, 0, (), None, b"i" * 16))
    flood = [tickets.issue(Identity(2, 1002, 0, (), None, b"j" * 16)) for _ in range(10)]
    assert tickets.waiting == 4
    assert tickets.redeem(first) is not None
    assert [tickets.redeem(ticket) is not None for ticket in flood] == [False] * 7 + [True] * 3
    tickets.close()
