"""One connection on the handover socket: from accept to the proof that its process has ended (I4, I13).

A connection owns its socket and the pidfd of its process. A worker's outlives its socket: end-of-file proves
nothing where a pidfd can prove more, so the pidfd is watched until the process is gone.
"""

import asyncio
import contextlib
import enum
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvhost_proto.v1 import handover_pb2
from kvhost_server import packets
from kvhost_server.errors import Code, Refused
from kvhost_server.identity import Credentials, Identity, check_sent_pidfd
from kvhost_server.ids import MappingId
from kvhost_server.packets import Packet
from kvhost_server.tickets import VALID_S, PidWatch
from kvhost_server.version import PROTOCOL_MAJOR, version_message

INSTANCE_ID_BYTES = 16
TOKEN_BYTES = 32
MOST_RANKS = 1024
_PACKETS_AT_ONCE = 16
_MOST_QUEUED = 1024
_MOST_DRAINED = 64
_LONGEST_NAME = 64
_RETRY_S = 0.05
_BUSY = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where a connection stands."""

    GREETING = "greeting"
    """Accepted; HELLO has not come."""
    WORKER = "worker"
    """A worker that may be given segments."""
    WAITING = "waiting"
    """A worker that hung up, or that we gave up: only the proof of its end is awaited."""
    CLOSED = "closed"


class Desk(Protocol):
    """What a connection asks of the server that accepted it."""

    boot_id: int

    def issue_ticket(self, identity: Identity) -> bytes:
        """A ticket for a scheduler; takes over its pidfd."""

    def worker_arrived(
        self, connection: "Connection", identity: Identity, hello: handover_pb2.Hello
    ) -> MappingId:
        """Introduces a worker to the manager. Raises Refused."""

    def worker_said(self, mapping: MappingId, message: handover_pb2.ToDaemon) -> None:
        """Passes on MAPPED, FENCED or RETIRED. Raises Refused."""

    def worker_lost(self, mapping: MappingId) -> None:
        """The connection is gone, which proves nothing."""

    def worker_ended(self, mapping: MappingId) -> None:
        """Proof: the worker writes nothing and maps nothing any more."""

    def anomaly(self, name: str) -> None:
        """Counts what should not happen."""

    def greeted(self, connection: "Connection") -> None:
        """HELLO came, or never will."""

    def closed(self, connection: "Connection") -> None:
        """The connection is over and holds nothing any more."""


class Connection:
    """One accepted connection.

    Args:
        desk: the server.
        sock: the socket, owned from now on.
        peer: who connected.
        pidfd: of that process, owned from now on; None where the kernel gives none.
        refusal: why this peer may not speak here; said when it has spoken.
    """

    def __init__(
        self, desk: Desk, sock: socket.socket, peer: Credentials, pidfd: int | None, refusal: Refused | None
    ) -> None:
        self.peer = peer
        self.phase = Phase.GREETING
        self.mapping: MappingId | None = None
        self._desk = desk
        self._socket: socket.socket | None = sock
        self._pidfd = pidfd
        self._watch: PidWatch | None = None
        self._refusal = refusal
        self._outgoing: deque[tuple[bytes, Sequence[int]]] = deque()
        self._held = False
        self._given = False
        self._abandoned = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)

    def send(self, message: handover_pb2.ToClient, fds: Sequence[int] = ()) -> None:
        """Sends, now or when the peer reads. The descriptors stay the caller's and must stay open.

        A peer that leaves too much unread is given up, from the loop and not from within this call.
        """
        if self._abandoned or self.phase not in (Phase.WORKER, Phase.GREETING):
            return
        self._given |= bool(fds)
        self._outgoing.append((packets.encode(message), fds))
        if len(self._outgoing) > _MOST_QUEUED:
            self._desk.anomaly("handover_slow_worker")
            log.warning("worker %s leaves %d packets unread: given up", self.peer, len(self._outgoing))
            self._outgoing.clear()
            self._abandoned = True  # nothing may follow what was left out
            self._loop.call_soon(self._give_up)
        elif len(self._outgoing) == 1 and not self._held:
            self._flush()

    def refuse(self, code: Code, message: str) -> None:
        """Says why, and hangs up."""
        refused = handover_pb2.ToClient(refused=handover_pb2.Refused(code=code, message=message))
        if self._socket is not None:
            with contextlib.suppress(OSError):  # whoever does not read its refusal does without
                packets.send(self._socket, packets.encode(refused), ())
        log.warning("handover: %s refused: %s", self.peer, message)
        self._give_up()

    def close(self) -> None:
        """Gives back everything, without a word to the manager. A second call does nothing."""
        self._hang_up()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self.phase is not Phase.CLOSED:
            self.phase = Phase.CLOSED
            self._desk.closed(self)

    # What comes in.

    def _readable(self) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            if self._socket is None:
                return
            try:
                packet = packets.receive(self._socket)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # told once, when it closed with packets of ours unread; its own are behind that
            except OSError:
                packet = Packet(b"", 0, end=True)  # a broken connection ends as any other
            if packet.end:
                self._close_all(packet.fds)
                self._end_of_file()
                return
            try:
                self._take(packet)
            except Refused as refused:
                self._desk.anomaly("handover_bad_packet")
                self.refuse(refused.code, refused.message)
            except Exception:
                log.exception("handover: a packet of %s could not be handled", self.peer)
                self.refuse(Code.UNAVAILABLE, "the daemon failed to handle this packet; its log says why")
            finally:
                self._close_all(packet.fds)

    def _take(self, packet: Packet) -> None:
        if self.phase is Phase.WAITING:
            return  # given up: only its end-of-file matters
        if self.phase is Phase.GREETING:
            self._desk.greeted(self)
            if self._refusal is not None:
                self._desk.anomaly("handover_peer_refused")
                self.refuse(self._refusal.code, self._refusal.message)
            else:
                self._greet(packet)
            return
        # A forked child that inherited the connection proves nothing: its BYE is not the worker's.
        if packet.sender != self.peer.pid:
            self._desk.anomaly("handover_foreign_sender")
            log.warning("handover: a packet of worker %s came from pid %d: ignored", self.peer, packet.sender)
            return
        message = packets.decode(packet)
        if packet.fds:
            self._desk.anomaly("handover_unasked_fd")
        assert self.mapping is not None
        kind = message.WhichOneof("kind")
        if kind == "bye":
            self._proven()
        elif kind in ("mapped", "fenced", "retired"):
            self._desk.worker_said(self.mapping, message)
        else:
            raise Refused(
                Code.FAILED_PRECONDITION,
                "a worker that said HELLO may say MAPPED, FENCED, RETIRED or BYE, and said "
                f"{kind or 'nothing known'}",
            )

    def _greet(self, packet: Packet) -> None:
        message = packets.decode(packet)
        kind = message.WhichOneof("kind")
        if kind != "hello":
            raise Refused(
                Code.FAILED_PRECONDITION, f"the first packet must be HELLO, and is {kind or 'nothing known'}"
            )
        hello = message.hello
        self._check_hello(hello)
        if packet.sender not in (0, self.peer.pid):  # 0: sent before we asked the kernel to name senders
            raise Refused(
                Code.PERMISSION_DENIED,
                f"HELLO comes from process {packet.sender} on a connection that process {self.peer.pid} "
                "opened; each process must open its own",
            )
        self._take_pidfd(hello, packet.fds)
        if self.peer.pid == 0 and self._pidfd is None:
            raise Refused(
                Code.PERMISSION_DENIED,
                "your process is not visible from the daemon's PID namespace and the kernel gives no "
                "pidfd; share the PID namespace, or run on Linux 6.5 or newer",
            )
        if packet.fds:
            self._desk.anomaly("handover_unasked_fd")
        identity = Identity(
            self.peer.pid, self.peer.uid, self.peer.gid, self.peer.groups, self._pidfd, hello.instance_id
        )
        if hello.role == handover_pb2.ROLE_SCHEDULER:
            self._pidfd = None
            ticket = handover_pb2.Ticket(
                ticket=self._desk.issue_ticket(identity),
                valid_s=VALID_S,
                boot_id=self._desk.boot_id,
                version=version_message(),
            )
            self.send(handover_pb2.ToClient(ticket=ticket))
            self.close()
        else:
            self._admit(identity, hello)

    def _admit(self, identity: Identity, hello: handover_pb2.Hello) -> None:
        """A worker: WELCOME first, though the manager may already order segments while it hears of it."""
        if hello.access == handover_pb2.ACCESS_DEVICE_DMA and identity.pidfd is None:
            raise Refused(
                Code.FAILED_PRECONDITION,
                "a worker with device DMA needs a pidfd, or nothing would prove its end; run on Linux "
                "6.5 or newer, or send pidfd_open(getpid()) with HELLO",
            )
        self._held = True
        self.mapping = self._desk.worker_arrived(self, identity, hello)
        self.phase = Phase.WORKER
        if self._pidfd is not None:
            self._watch = PidWatch(self._pidfd, self._proven)
            self._pidfd = None
        welcome = handover_pb2.Welcome(boot_id=self._desk.boot_id, version=version_message())
        self._outgoing.appendleft((packets.encode(handover_pb2.ToClient(welcome=welcome)), ()))
        self._held = False
        self._flush()

    def _check_hello(self, hello: handover_pb2.Hello) -> None:
        if hello.version.major != PROTOCOL_MAJOR:
            ours, program = version_message(), hello.version.program[:_LONGEST_NAME] or "the client"
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"{program} speaks protocol {hello.version.major}.{hello.version.minor}, {ours.program} "
                f"speaks {ours.major}.{ours.minor}; install the same major version on both sides",
            )
        if len(hello.instance_id) != INSTANCE_ID_BYTES:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"instance_id has {len(hello.instance_id)} bytes, and must have {INSTANCE_ID_BYTES}",
            )
        if hello.role not in (handover_pb2.ROLE_SCHEDULER, handover_pb2.ROLE_WORKER):
            raise Refused(
                Code.INVALID_ARGUMENT, f"role is {hello.role}; allowed are 1 (scheduler), 2 (worker)"
            )
        if hello.role == handover_pb2.ROLE_SCHEDULER:
            return
        if hello.access not in (handover_pb2.ACCESS_CPU, handover_pb2.ACCESS_DEVICE_DMA):
            raise Refused(
                Code.INVALID_ARGUMENT, f"access is {hello.access}; allowed are 1 (cpu), 2 (device DMA)"
            )
        if hello.rank >= MOST_RANKS:
            raise Refused(Code.INVALID_ARGUMENT, f"rank is {hello.rank}; allowed are 0 to {MOST_RANKS - 1}")
        if len(hello.token) != TOKEN_BYTES:
            raise Refused(
                Code.INVALID_ARGUMENT, f"token has {len(hello.token)} bytes, and must have {TOKEN_BYTES}"
            )

    def _take_pidfd(self, hello: handover_pb2.Hello, fds: list[int]) -> None:
        """Keeps the pidfd that came with HELLO if we have none and it is the peer's: takes it out of
        `fds`."""
        if self._pidfd is not None or not hello.with_pidfd:
            return
        if not fds:
            raise Refused(
                Code.INVALID_ARGUMENT,
                "HELLO says that a pidfd comes with it, and none arrived; is either side in a sandbox "
                "without fd passing, or at its limit of open files?",
            )
        complaint = check_sent_pidfd(fds[0], self.peer.pid)
        if complaint is not None:
            raise Refused(Code.INVALID_ARGUMENT, complaint)
        self._pidfd = fds.pop(0)

    # How it ends.

    def _end_of_file(self) -> None:
        if self.phase is Phase.WAITING and self._watch is None:
            self._proven()  # it was given up before; now it is gone
        elif self.phase is not Phase.WORKER:
            self._desk.greeted(self)
            self.close()
        elif self._watch is None or not self._given:
            # It has nothing of ours; or copies by CPU only, and nothing better than this could be had (I4).
            self._proven()
        else:
            self._wait_for_proof()

    def _give_up(self) -> None:
        """We hang up. Where end-of-file is the only proof, it is still read."""
        if self.phase is Phase.GREETING:
            self._desk.greeted(self)
            self.close()
        elif self.phase is Phase.WORKER:
            if self._given:
                self._wait_for_proof()
            else:
                self._proven()

    def _wait_for_proof(self) -> None:
        assert self.mapping is not None
        self.phase = Phase.WAITING
        self._outgoing.clear()
        if self._watch is not None:
            self._hang_up()
        elif self._socket is not None:
            self._loop.remove_writer(self._socket)
            with contextlib.suppress(OSError):  # not connected any more: end-of-file follows
                self._socket.shutdown(socket.SHUT_WR)
        self._desk.worker_lost(self.mapping)

    def _proven(self) -> None:
        """The process has ended, or said BYE: it maps nothing and writes nothing."""
        mapping = self.mapping
        self.close()
        if mapping is not None:
            self._desk.worker_ended(mapping)

    # How it goes out.

    def _flush(self) -> None:
        while self._outgoing and self._socket is not None:
            data, fds = self._outgoing[0]
            try:
                packets.send(self._socket, data, fds)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError as error:
                if error.errno in _BUSY:
                    self._loop.call_later(_RETRY_S, self._flush)
                    return
                self._outgoing.clear()  # it hung up: its end-of-file tells
                break
            self._outgoing.popleft()
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _hang_up(self) -> None:
        """Closes the socket. What the peer sent and nobody read goes first: else it gets ECONNRESET
        instead of our last words."""
        if self._socket is None:
            return
        sock, self._socket = self._socket, None
        self._loop.remove_reader(sock)
        self._loop.remove_writer(sock)
        with contextlib.suppress(OSError):  # nothing left to read, or not connected any more
            sock.shutdown(socket.SHUT_RD)
            for _ in range(_MOST_DRAINED):
                packet = packets.receive(sock)
                self._close_all(packet.fds)
                if packet.end:
                    break
        sock.close()

    def _close_all(self, fds: list[int]) -> None:
        while fds:
            os.close(fds.pop())
