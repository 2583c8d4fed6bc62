"""Who is at the other end of a Unix socket, as the kernel says, and who may be there (I13).

Nothing a peer says about itself counts here: uid, groups and pid come from the socket, and the pidfd from the
socket too (SO_PEERPIDFD) or, on kernels before 6.5, from the peer but checked against its pid.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_libc = ctypes.CDLL(None, use_errno=True)
_UCRED = struct.Struct("=iII")
_MOST_GROUPS = 65536  # NGROUPS_MAX of the kernel
_PIDFD_THREAD = os.O_EXCL  # the flag by which fdinfo shows a pidfd of one thread (Linux 6.9)


@dataclass(frozen=True)
class Identity:
    """One process that said HELLO."""

    pid: int
    """As seen from here; 0 when the process lives in a PID namespace that is not visible to us."""
    uid: int
    gid: int
    groups: tuple[int, ...]
    pidfd: int | None
    """Becomes readable when the process has ended: the proof of I4. Owned by the handover server."""
    instance_id: bytes


@dataclass(frozen=True)
class Credentials:
    """What the kernel says about the process that connected, taken when it did."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...]

    def __str__(self) -> str:
        return f"pid {self.pid or 'unknown'}, uid {self.uid}, gid {self.gid}"


class ProcessGone(Exception):
    """The process that connected has ended already."""


def credentials_of(connection: socket.socket) -> Credentials:
    """Reads SO_PEERCRED and SO_PEERGROUPS."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return Credentials(pid, uid, gid, _groups_of(connection))


def _groups_of(connection: socket.socket) -> tuple[int, ...]:
    """SO_PEERGROUPS, through ctypes: `socket.getsockopt` reads at most 1,024 bytes, which is 256 groups."""
    groups = (ctypes.c_uint32 * _MOST_GROUPS)()
    size = ctypes.c_uint32(ctypes.sizeof(groups))
    where = (connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS)
    if _libc.getsockopt(*where, ctypes.byref(groups), ctypes.byref(size)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return tuple(groups[: size.value // ctypes.sizeof(ctypes.c_uint32)])


def pidfd_of(connection: socket.socket) -> int | None:
    """A new pidfd of the process that connected; the caller owns it. None before Linux 6.5.

    Raises:
        ProcessGone: the process has ended.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return None
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENODATA):
            raise ProcessGone from error
        raise


def check_sent_pidfd(fd: int, pid: int) -> str | None:
    """What is wrong with a descriptor that was sent as the pidfd of process `pid`; None when it is one."""
    if pid == 0:
        return (
            "a pidfd was sent, but its process is not visible from the daemon's PID namespace; share that "
            "namespace, or run on Linux 6.5 or newer"
        )
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        link = os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        return f"the file descriptor sent as a pidfd cannot be looked at: {error}"
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "pidfd" not in link or "Pid" not in fields:
        return f"the file descriptor sent as a pidfd is {link!r}; send pidfd_open(getpid())"
    if int(fields["flags"], 8) & _PIDFD_THREAD:
        return "the pidfd that was sent is of one thread; send pidfd_open(getpid()) without PIDFD_THREAD"
    if int(fields["Pid"]) != pid:
        return f"the pidfd that was sent is of process {int(fields['Pid'])}, but process {pid} is connected"
    return None


@dataclass(frozen=True)
class AllowList:
    """Who may speak on the handover socket.

    Args:
        uids: user ids, besides root and the daemon's own.
        gids: groups, primary or supplementary.
    """

    uids: frozenset[int]
    gids: frozenset[int]
    overflow_uid: int
    overflow_gid: int = -1

    @classmethod
    def of(cls, uids: Iterable[int], gids: Iterable[int]) -> "AllowList":
        """The list with root and the daemon's own uid added, for this kernel's overflow ids."""
        overflow_uid, overflow_gid = (
            int(Path(f"/proc/sys/kernel/overflow{kind}").read_text()) for kind in ("uid", "gid")
        )
        return cls(frozenset((0, os.geteuid(), *uids)), frozenset(gids), overflow_uid, overflow_gid)

    def refusal(self, peer: Credentials) -> str | None:
        """Why this peer may not speak, as a sentence; None when it may.

        The overflow uid stands for every user that has no number in our user namespace, so it names nobody.
        """
        if peer.uid == self.overflow_uid:
            return (
                f"uid {peer.uid} is the kernel's overflow uid and names nobody; run the engine in a user "
                "namespace "
                "whose users the daemon can see"
            )
        # Groups without a number here all look like the overflow gid, whichever they are.
        if peer.uid in self.uids or self.gids & ({peer.gid, *peer.groups} - {self.overflow_gid}):
            return None
        allowed = [f"uid {uid}" for uid in sorted(self.uids)] + [f"gid {gid}" for gid in sorted(self.gids)]
        return (
            f"uid {peer.uid}, gid {peer.gid} may not use this daemon (allowed: {', '.join(allowed)}); see "
            "--allow-uid and --allow-gid"
        )
