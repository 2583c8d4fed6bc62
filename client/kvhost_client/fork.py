"""What a forked child must let go of.

Engines fork. A child that keeps the parent's sockets hides the parent's end from the daemon, and one that
used them would speak for the parent. So in the child every owner of such things is told to abandon them,
and the sockets that lead to a daemon, gRPC's own among them, are closed.
"""

import os
import socket
import stat
import threading
import weakref
from typing import Protocol

guard = threading.Lock()
"""Held while a descriptor or a mapping exists that no owner has recorded yet: a fork waits for it. Keep it
for microseconds, and never fork inside."""


class Owner(Protocol):
    """Something that holds descriptors or mappings of this process."""

    def abandon(self) -> None:
        """Called in a forked child: close descriptors, answer "gone" from now on, touch no lock."""


_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()
_daemon_sockets: set[str] = set()


def watch(owner: Owner) -> None:
    """From now on `owner.abandon()` runs in every forked child, as long as somebody holds the owner.

    Call it inside `guard`, together with the opening of what is to be abandoned.
    """
    _owners.add(owner)


def watch_peer(name: str) -> None:
    """Connections of this process to the socket bound as `name` are cut in forked children.

    Meant for connections whose descriptors a library keeps to itself. `name` is what `getpeername()` says,
    which in a container may differ from the path that was connected to.
    """
    if name:
        with guard:
            _daemon_sockets.add(name)


def _in_child() -> None:
    guard.release()
    for owner in list(_owners):
        owner.abandon()
    if _daemon_sockets:
        _cut_connections()


def _cut_connections() -> None:
    """Puts /dev/null in the place of every connection to a daemon.

    The numbers stay taken: their owner, a library, may close them later, and must not hit a stranger's file.
    """
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:  # no /proc: the daemon still learns of the parent's end by its pidfd
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in numbers:
        if _leads_to_daemon(number):
            os.dup2(null, number, inheritable=False)
    os.close(null)


def _leads_to_daemon(number: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        borrowed = socket.socket(fileno=number)
    except OSError:  # closed meanwhile: the listing's own descriptor
        return False
    try:
        return borrowed.family == socket.AF_UNIX and borrowed.getpeername() in _daemon_sockets
    except OSError:  # not connected
        return False
    finally:
        borrowed.detach()


os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=_in_child)
