"""A handover server that a test drives by hand, and segments to hand over.

The place for what a right daemon never does: broken packets, missing descriptors, orders out of order.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvhost_proto.v1 import common_pb2, handover_pb2

MAGIC = b"KVH1"
DEADLINE_S = 5.0
MIB = 1 << 20
ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def version(major: int = 1, program: str = "fake 1.0") -> common_pb2.Version:
    return common_pb2.Version(major=major, minor=0, program=program)


def sealed_file(nbytes: int, seals: int = ALL_SEALS) -> int:
    """A memory file like the daemon's; the caller closes it."""
    descriptor = os.memfd_create("kvhost-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class FakePeer:
    """The daemon's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(DEADLINE_S)

    def receive(self) -> handover_pb2.ToDaemon | None:
        """The client's next packet; None at its end. Fails the test when nothing comes."""
        data = self.socket.recv(65537)
        if not data:
            return None
        assert data[:4] == MAGIC
        return handover_pb2.ToDaemon.FromString(data[4:])

    def expect(self, kind: str) -> handover_pb2.ToDaemon:
        """The client's next packet, which must be of this kind."""
        message = self.receive()
        assert message is not None, f"the client hung up instead of sending {kind}"
        assert message.WhichOneof("kind") == kind
        return message

    def expect_end(self) -> None:
        assert self.receive() is None

    def expect_silence(self, seconds: float = 0.05) -> None:
        """Nothing comes meanwhile."""
        self.socket.settimeout(seconds)
        try:
            data = self.socket.recv(65537)
        except TimeoutError:
            return
        finally:
            self.socket.settimeout(DEADLINE_S)
        raise AssertionError(f"the client sent {data!r}")

    def send(self, message: handover_pb2.ToClient, descriptors: Sequence[int] = ()) -> None:
        self.send_raw(MAGIC + message.SerializeToString(), descriptors)

    def send_raw(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        self.socket.sendmsg([data], rights)

    def welcome(self, boot_id: int = 7, major: int = 1) -> None:
        self.send(
            handover_pb2.ToClient(welcome=handover_pb2.Welcome(boot_id=boot_id, version=version(major)))
        )

    def ticket(self, ticket: bytes = b"t" * 32, boot_id: int = 7, major: int = 1) -> None:
        self.send(
            handover_pb2.ToClient(
                ticket=handover_pb2.Ticket(ticket=ticket, valid_s=30, boot_id=boot_id, version=version(major))
            )
        )

    def refuse(self, code: int, message: str) -> None:
        self.send(handover_pb2.ToClient(refused=handover_pb2.Refused(code=code, message=message)))

    def segments(
        self,
        *numbers: int,
        boot_id: int = 7,
        nbytes: int = MIB,
        slots: int = 4,
        slot_bytes: int = MIB // 4,
        shards: int = 2,
        generation: int = 1,
        descriptors: Sequence[int] | None = None,
    ) -> list[int]:
        """Hands over segments; new ones without `descriptors`. Returns the files: the caller closes them."""
        files = [sealed_file(nbytes) for _ in numbers] if descriptors is None else list(descriptors)
        message = handover_pb2.Segments(
            stamp=common_pb2.Stamp(boot_id=boot_id, generation=generation),
            slot_bytes=slot_bytes,
            shard_stride=slot_bytes // shards,
            shards=shards,
            segments=[handover_pb2.Segment(id=number, bytes=nbytes, slots=slots) for number in numbers],
        )
        self.send(handover_pb2.ToClient(segments=message), files)
        return files

    def fence(self, fence: int, session_below: int = 0, store_ids: Sequence[int] = ()) -> None:
        order = handover_pb2.Fence(fence=fence, session_below=session_below, store_ids=store_ids)
        self.send(handover_pb2.ToClient(fence=order))

    def retire(self, *segment_ids: int) -> None:
        self.send(handover_pb2.ToClient(retire=handover_pb2.Retire(segment_ids=segment_ids)))

    def close(self) -> None:
        self.socket.close()


class FakeHandover:
    """Listens at a daemon's handover socket; the test accepts and speaks."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "kvhostd.sock")
        self.path = str(folder / "kvhostd-handover.sock")
        self._peers: list[FakePeer] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(8)
        self._listener.settimeout(DEADLINE_S)

    def __enter__(self) -> FakeHandover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def accept(self) -> FakePeer:
        peer = FakePeer(self._listener.accept()[0])
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        """As a daemon that dies: every connection ends, the socket file stays."""
        for peer in self._peers:
            peer.close()
        self._listener.close()

    def remove(self) -> None:
        """Closes, and removes the socket file, so that another may take the place."""
        self.close()
        os.unlink(self.path)
