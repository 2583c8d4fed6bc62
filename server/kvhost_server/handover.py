"""The handover socket: accepts engines, gives them segments and fences, and watches for their end (I4, I13).

One `Connection` (see `peer`) per engine process; this room owns the listener and the table of workers. It
translates for the manager and decides nothing about memory.
"""

import asyncio
import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from kvhost_proto.v1 import common_pb2, handover_pb2
from kvhost_server.errors import Code, Refused
from kvhost_server.identity import AllowList, Identity, ProcessGone, credentials_of, pidfd_of
from kvhost_server.ids import MappingId, SegmentId, SessionNumber, StoreId
from kvhost_server.notices import Assignment
from kvhost_server.packets import MOST_FDS
from kvhost_server.peer import Connection
from kvhost_server.tickets import Tickets

HELLO_DEADLINE_S = 5.0
MOST_WITHOUT_HELLO = 256
MOST_CONNECTIONS = 4096
_BACKLOG = 1024
_ACCEPTS_AT_ONCE = 64
_ACCEPT_PAUSE_S = 0.1
_STORE_IDS_PER_PACKET = 4096
_OUT_OF_FDS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

ANOMALIES = (
    "handover_peer_refused",
    "handover_bad_packet",
    "handover_unasked_fd",
    "handover_foreign_sender",
    "handover_no_hello",
    "handover_slow_worker",
    "handover_accept_failed",
)

log = logging.getLogger(__name__)


class Workers(Protocol):
    """The manager, as far as workers are concerned; see `Manager` for what each call means."""

    def worker_hello(
        self, instance_id: bytes, rank: int, access: int, token: bytes, identity: Identity
    ) -> MappingId: ...
    def worker_mapped(self, mapping_id: MappingId, segment_ids: Iterable[SegmentId]) -> None: ...
    def worker_fenced(self, mapping_id: MappingId, fence: int) -> None: ...
    def worker_retired(self, mapping_id: MappingId, segment_ids: Iterable[SegmentId]) -> None: ...
    def worker_ended(self, mapping_id: MappingId) -> None: ...
    def worker_disconnected(self, mapping_id: MappingId) -> None: ...


class HandoverServer:
    """Listens on the handover socket.

    Args:
        boot_id: of this daemon process.
        workers: the manager.
        segment_fd: the file descriptor of a pool segment; stays the pool's.
        allow: who may speak here.
        kernel_pidfd: asks the kernel for the peer's pidfd; gives None where it cannot (before Linux 6.5).
        hello_deadline_s: seconds from connecting to HELLO.
        most_connections: open at once; more are refused.
    """

    def __init__(
        self,
        boot_id: int,
        workers: Workers,
        segment_fd: Callable[[int], int],
        allow: AllowList,
        *,
        kernel_pidfd: Callable[[socket.socket], int | None] = pidfd_of,
        hello_deadline_s: float = HELLO_DEADLINE_S,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.boot_id = boot_id
        self.tickets = Tickets()
        self.anomalies = Counter(dict.fromkeys(ANOMALIES, 0))
        self._workers = workers
        self._segment_fd = segment_fd
        self._allow = allow
        self._kernel_pidfd = kernel_pidfd
        self._hello_deadline_s = hello_deadline_s
        self._most_connections = most_connections
        self._listener: socket.socket | None = None
        # In the order of accepting, with the timer that ends each: the first is the oldest.
        self._greeting: dict[Connection, asyncio.TimerHandle] = {}
        self._connections: set[Connection] = set()
        self._by_mapping: dict[MappingId, Connection] = {}
        self._arriving: Connection | None = None

    # Listening.

    def listen(self, path: Path) -> None:
        """Binds and listens. Connections wait in the backlog until `start`.

        Raises:
            OSError: the path cannot be bound.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(path))
            listener.listen(_BACKLOG)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        except OSError:
            listener.close()
            raise
        self._listener = listener

    def start(self) -> None:
        """Begins to accept."""
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stops listening and hangs up on everybody."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.close()
        self.tickets.close()

    # Tickets: what the Cache service asks.

    def redeem(self, ticket: bytes) -> Identity | None:
        """See `Tickets.redeem`."""
        return self.tickets.redeem(ticket)

    def watch_end(self, identity: Identity, on_end: Callable[[], None]) -> Callable[[], None]:
        """See `Tickets.watch_end`."""
        return self.tickets.watch_end(identity, on_end)

    # What the manager orders.

    def offer(self, mapping: MappingId, segments: Sequence[Assignment]) -> None:
        """Sends SEGMENTS with their descriptors, in as many packets as it takes."""
        connection = self._connection(mapping)
        if connection is None:
            return
        for start in range(0, len(segments), MOST_FDS):
            part = segments[start : start + MOST_FDS]
            message = handover_pb2.Segments(
                stamp=common_pb2.Stamp(boot_id=self.boot_id, generation=part[0].generation),
                slot_bytes=part[0].slot_bytes,
                shard_stride=part[0].shard_stride,
                shards=part[0].shards,
                segments=[handover_pb2.Segment(id=s.segment_id, bytes=s.bytes, slots=s.slots) for s in part],
            )
            connection.send(
                handover_pb2.ToClient(segments=message), [self._segment_fd(s.pool_index) for s in part]
            )

    def retire(self, mapping: MappingId, segment_ids: Sequence[SegmentId]) -> None:
        """Sends RETIRE."""
        connection = self._connection(mapping)
        if connection is not None:
            connection.send(handover_pb2.ToClient(retire=handover_pb2.Retire(segment_ids=segment_ids)))

    def fence(
        self, mapping: MappingId, fence: int, session_below: SessionNumber, store_ids: Sequence[StoreId]
    ) -> None:
        """Sends FENCE. A long list of store ids goes ahead in packets numbered 0, whose answers mean
        nothing: the answer to the last packet stands for all."""
        connection = self._connection(mapping)
        if connection is None:
            return
        parts = [
            store_ids[start : start + _STORE_IDS_PER_PACKET]
            for start in range(0, max(1, len(store_ids)), _STORE_IDS_PER_PACKET)
        ]
        for part in parts:
            number = fence if part is parts[-1] else 0
            message = handover_pb2.Fence(fence=number, session_below=session_below, store_ids=part)
            connection.send(handover_pb2.ToClient(fence=message))

    def _connection(self, mapping: MappingId) -> Connection | None:
        return self._by_mapping.get(mapping, self._arriving)

    # What connections ask (see `Desk`).

    def issue_ticket(self, identity: Identity) -> bytes:
        return self.tickets.issue(identity)

    def worker_arrived(
        self, connection: Connection, identity: Identity, hello: handover_pb2.Hello
    ) -> MappingId:
        self._arriving = connection  # it may be offered segments before we know its number
        try:
            mapping = self._workers.worker_hello(
                hello.instance_id, hello.rank, hello.access, hello.token, identity
            )
        finally:
            self._arriving = None
        self._by_mapping[mapping] = connection
        log.info("worker %d arrived: %s, rank %d", mapping, connection.peer, hello.rank)
        return mapping

    def worker_said(self, mapping: MappingId, message: handover_pb2.ToDaemon) -> None:
        kind = message.WhichOneof("kind")
        if kind == "mapped":
            self._workers.worker_mapped(mapping, [SegmentId(i) for i in message.mapped.segment_ids])
        elif kind == "retired":
            self._workers.worker_retired(mapping, [SegmentId(i) for i in message.retired.segment_ids])
        elif message.fenced.fence:
            self._workers.worker_fenced(mapping, message.fenced.fence)

    def worker_lost(self, mapping: MappingId) -> None:
        log.info("worker %d hung up; what it holds waits for the end of its process", mapping)
        self._workers.worker_disconnected(mapping)

    def worker_ended(self, mapping: MappingId) -> None:
        log.info("worker %d ended", mapping)
        self._by_mapping.pop(mapping, None)
        self._workers.worker_ended(mapping)

    def anomaly(self, name: str) -> None:
        self.anomalies[name] += 1

    def allow(self, allow: AllowList) -> None:
        """Who may come from now on; who is here stays."""
        self._allow = allow

    def greeted(self, connection: Connection) -> None:
        timer = self._greeting.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)

    # Accepting.

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_FDS:
                    self._pause(error)
                return
            self._receive(sock)

    def _receive(self, sock: socket.socket) -> None:
        """Takes over one accepted socket."""
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            peer = credentials_of(sock)
            stranger = self._allow.refusal(peer)
            pidfd = self._kernel_pidfd(sock)
        except (ProcessGone, OSError) as error:
            sock.close()
            if isinstance(error, OSError) and error.errno in _OUT_OF_FDS:
                self._pause(error)
            return
        refusal = None
        if stranger is not None:
            refusal = Refused(Code.PERMISSION_DENIED, stranger)
        elif len(self._connections) >= self._most_connections:
            most = f"{self._most_connections} connections are open, which is the most this daemon allows"
            refusal = Refused(Code.RESOURCE_EXHAUSTED, most)
        if len(self._greeting) >= MOST_WITHOUT_HELLO:
            self.anomaly("handover_no_hello")
            oldest = next(iter(self._greeting))
            oldest.refuse(
                Code.RESOURCE_EXHAUSTED, f"{MOST_WITHOUT_HELLO} others also connected without HELLO"
            )
        connection = Connection(self, sock, peer, pidfd, refusal)
        self._connections.add(connection)
        loop = asyncio.get_running_loop()
        self._greeting[connection] = loop.call_later(self._hello_deadline_s, self._too_late, connection)

    def _too_late(self, connection: Connection) -> None:
        self.anomaly("handover_no_hello")
        connection.refuse(
            Code.FAILED_PRECONDITION, f"no HELLO came within {self._hello_deadline_s:g} s of connecting"
        )

    def _pause(self, error: OSError) -> None:
        """Out of file descriptors: lets the backlog wait a little instead of spinning."""
        self.anomaly("handover_accept_failed")
        log.warning("handover: no connection can be accepted: %s; raise LimitNOFILE", error.strerror)
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            loop.call_later(_ACCEPT_PAUSE_S, self.start)
