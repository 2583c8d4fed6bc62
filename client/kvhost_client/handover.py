"""The handover socket, seen from the client: framing, tickets, file descriptors. One packet is one message.

Nothing here keeps a connection open by itself; `worker` does.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from google.protobuf.message import DecodeError

from kvhost_client import fork, version
from kvhost_client.errors import (
    DeadlineExceeded,
    HandoverFailed,
    InvalidArgument,
    KVHostError,
    NotKVHost,
    Refused,
    Unavailable,
    VersionMismatch,
)
from kvhost_proto.v1 import handover_pb2

MAGIC = b"KVH1"
PACKET_LIMIT = 64 * 1024
INSTANCE_ID_BYTES = 16
# The kernel passes no more at once (SCM_MAX_FD).
DESCRIPTORS_LIMIT = 253
# Python 3.11's socket module does not name it; Linux 6.5.
_SO_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)

_PERMISSION_DENIED = 7
_FAILED_PRECONDITION = 9

_FD_BYTES = array.array("i").itemsize


@dataclass
class Packet:
    """One message of the daemon and the descriptors that came with it. Whoever receives it closes them."""

    message: handover_pb2.ToClient
    descriptors: list[int]

    def close(self) -> None:
        """Closes what is left of the descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())


@dataclass(frozen=True)
class Ticket:
    """Proof, for one OpenSession, of who asked at the handover socket."""

    ticket: bytes
    valid_s: int
    boot_id: int


class HandoverSocket:
    """One connection to a daemon's handover socket. Not for several threads at once."""

    def __init__(self, path: str, deadline_s: float) -> None:
        """Connects. Raises `Unavailable`, `Refused`, `NotKVHost` or `DeadlineExceeded`, each one sentence."""
        self.path = path
        with fork.guard:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            fork.watch(self)
        # A full backlog makes connect wait; this is the deadline for that, and for a send.
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(deadline_s))
        try:
            self._socket.connect(path)
        except OSError as error:
            self.close()
            raise connection_error(path, error) from error

    def __enter__(self) -> HandoverSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up. A second call does nothing."""
        self._socket.close()

    def abandon(self) -> None:
        """In a forked child: close our copy; the parent's connection goes on."""
        self._socket.close()

    def fileno(self) -> int:
        """For poll; -1 when closed."""
        return self._socket.fileno()

    def send(self, message: handover_pb2.ToDaemon, descriptors: tuple[int, ...] = ()) -> None:
        """Sends one packet. Raises `Unavailable` when the daemon has hung up or takes nothing more."""
        packet = MAGIC + message.SerializeToString()
        if len(packet) > PACKET_LIMIT:
            raise InvalidArgument(
                f"a handover packet of {len(packet)} bytes; at most {PACKET_LIMIT} are allowed"
            )
        try:
            if descriptors:
                socket.send_fds(self._socket, [packet], list(descriptors))
            else:
                self._socket.send(packet)
        except OSError as error:
            raise Unavailable(f"kvhostd at {self.path} takes no more packets ({error})") from error

    def hello(self, hello: handover_pb2.Hello) -> None:
        """Sends HELLO with our version, and with our pidfd where the kernel cannot tell the daemon (I4)."""
        hello.version.CopyFrom(version.own())
        with fork.guard:
            pidfd = None if self._kernel_names_process() else os.pidfd_open(os.getpid())
            try:
                hello.with_pidfd = pidfd is not None
                self.send(handover_pb2.ToDaemon(hello=hello), () if pidfd is None else (pidfd,))
            finally:
                if pidfd is not None:
                    os.close(pidfd)

    def receive(self, deadline_s: float) -> handover_pb2.ToClient | None:
        """Waits for the next message; None when the daemon hung up. Descriptors that come are not kept.

        Raises `DeadlineExceeded`, and what `receive_now` raises.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(max(0, int(deadline_s * 1000))):
            raise DeadlineExceeded(f"kvhostd at {self.path} did not answer within {deadline_s:.3g} s")
        with fork.guard:
            packet = self.receive_now()
            if packet is not None:
                packet.close()
        return None if packet is None else packet.message

    def receive_now(self) -> Packet | None:
        """The packet that is there; None when the daemon hung up. Raises `BlockingIOError` when none is.

        Raises `NotKVHost`, `VersionMismatch` or `HandoverFailed` for what this client cannot read. Hold
        `fork.guard` until the descriptors are closed: a child would inherit them.
        """
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                PACKET_LIMIT + 1,
                socket.CMSG_SPACE(DESCRIPTORS_LIMIT * _FD_BYTES),
                socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
            )
        except ConnectionError:
            return None
        packet = Packet(handover_pb2.ToClient(), _descriptors(ancillary))
        try:
            if not data:
                packet.close()
                return None
            if flags & socket.MSG_CTRUNC:
                raise HandoverFailed(_lost_descriptors(self.path, "some", len(packet.descriptors)))
            if flags & socket.MSG_TRUNC or len(data) > PACKET_LIMIT:
                raise NotKVHost(f"{self.path} sent a packet of more than {PACKET_LIMIT} bytes: not a kvhostd")
            packet.message = _parse(self.path, data)
            expected = len(packet.message.segments.segments)
            if len(packet.descriptors) != expected:
                raise HandoverFailed(_lost_descriptors(self.path, str(expected), len(packet.descriptors)))
        except KVHostError:
            packet.close()
            raise
        return packet

    def _kernel_names_process(self) -> bool:
        """Can the daemon get a pidfd of us from the kernel (SO_PEERPIDFD)? Then none need be sent."""
        try:
            os.close(self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            return False
        return True


def fetch_ticket(path: str, instance_id: bytes, deadline_s: float) -> Ticket:
    """Proves who we are at the handover socket and brings back the ticket for one OpenSession.

    Raises `Unavailable` (nobody there), `Refused` (not for us), `NotKVHost`, `VersionMismatch` or
    `DeadlineExceeded`.
    """
    check_instance_id(instance_id)
    until = time.monotonic() + deadline_s
    with HandoverSocket(path, deadline_s) as handover:
        handover.hello(handover_pb2.Hello(instance_id=instance_id, role=handover_pb2.ROLE_SCHEDULER))
        message = handover.receive(until - time.monotonic())
    if message is None:
        raise Unavailable(f"kvhostd at {path} hung up without an answer: it is going down, or no kvhostd")
    if message.HasField("refused"):
        raise refused(path, message.refused)
    if not message.HasField("ticket"):
        raise NotKVHost(
            f"{path} answered HELLO with {message.WhichOneof('kind') or 'nothing known'}, not a ticket"
        )
    version.check(message.ticket.version, path)
    return Ticket(message.ticket.ticket, message.ticket.valid_s, message.ticket.boot_id)


def check_instance_id(instance_id: bytes) -> None:
    """Raises `InvalidArgument` unless this can name an engine instance."""
    if len(instance_id) != INSTANCE_ID_BYTES:
        raise InvalidArgument(f"an instance id has {INSTANCE_ID_BYTES} bytes, found {len(instance_id)}")


def refused(path: str, answer: handover_pb2.Refused) -> KVHostError:
    """The daemon's refusal of our HELLO as an error."""
    sentence = f"kvhostd at {path} refused: {answer.message or 'no reason given'}"
    if answer.code == _FAILED_PRECONDITION:  # how a daemon of any version refuses another one
        return VersionMismatch(sentence)
    return Refused(sentence, answer.code)


def _parse(path: str, data: bytes) -> handover_pb2.ToClient:
    magic = data[: len(MAGIC)]
    if magic != MAGIC:
        if magic[:3] == MAGIC[:3]:
            raise VersionMismatch(
                f"{path} speaks handover framing {magic!r}, this client {MAGIC!r} ({version.program()}): "
                f"install the same kvhost major version on both sides"
            )
        raise NotKVHost(
            f"{path} answers, but not as a kvhostd: its packet begins with {magic!r}, not {MAGIC!r}"
        )
    try:
        return handover_pb2.ToClient.FromString(data[len(MAGIC) :])
    except DecodeError as error:
        raise NotKVHost(f"{path} sent a handover packet that cannot be read ({error})") from error


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return list(numbers)


def _lost_descriptors(path: str, expected: str, found: int) -> str:
    return (
        f"kvhostd at {path} sent {expected} segments, but {found} file descriptors arrived here. Usual "
        f"causes: this process is at its limit of open files (ulimit -n), a security module forbids passing "
        f"memory files between these two (AppArmor, SELinux), or one of them runs in a sandbox without "
        f"shared host memory (gVisor, Kata)"
    )


def _timeval(seconds: float) -> bytes:
    whole = int(max(seconds, 0.001))
    return array.array("l", [whole, int((max(seconds, 0.001) - whole) * 1e6)]).tobytes()


def connection_error(path: str, error: OSError) -> KVHostError:
    """Why a connection could not be made, and what to do about it."""
    explain: dict[int, Callable[[], KVHostError]] = {
        errno.ENOENT: lambda: Unavailable(
            f"no socket at {path}: kvhostd is not running, or it has another --socket"
        ),
        errno.ENOTDIR: lambda: Unavailable(f"no socket at {path}: a part of the path is not a directory"),
        errno.ECONNREFUSED: lambda: _nobody_listens(path),
        errno.EPROTOTYPE: lambda: NotKVHost(
            f"{path} is a socket of another kind: something else than kvhostd's handover socket"
        ),
        errno.EACCES: lambda: Refused(
            f"this process (uid {os.geteuid()}, gid {os.getegid()}) may not connect to {path}"
            f"{_mode(path)}: run it as a member of the socket's group",
            code=_PERMISSION_DENIED,
        ),
        errno.EAGAIN: lambda: DeadlineExceeded(
            f"kvhostd at {path} accepts no connection: it hangs or is stopped"
        ),
    }
    if error.errno in explain:
        return explain[error.errno]()
    return Unavailable(f"cannot connect to {path}: {error}")


def _nobody_listens(path: str) -> KVHostError:
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        is_socket = True
    if not is_socket:
        return NotKVHost(f"{path} is a file, not a socket")
    return Unavailable(f"nobody listens at {path}: the kvhostd that made this socket is gone")


def _mode(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f" (mode {stat.S_IMODE(status.st_mode):04o}, uid {status.st_uid}, gid {status.st_gid})"
