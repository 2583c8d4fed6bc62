"""A peer on the handover socket that says whatever a test wants, well-formed or not."""

import array
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvhost_proto.v1 import handover_pb2
from kvhost_server.packets import MAGIC
from kvhost_server.version import version_message
from tests.support.waiting import wait_for, wait_for_async

INSTANCE = b"engine-instance!"
TOKEN = b"t" * 32


def hello(**fields: object) -> handover_pb2.ToDaemon:
    """HELLO of a CPU worker of rank 0, with these fields changed."""
    values = {
        "version": version_message(),
        "instance_id": INSTANCE,
        "role": handover_pb2.ROLE_WORKER,
        "access": handover_pb2.ACCESS_CPU,
        "token": TOKEN,
        **fields,
    }
    return handover_pb2.ToDaemon(hello=handover_pb2.Hello(**values))  # type: ignore[arg-type]


def scheduler_hello(**fields: object) -> handover_pb2.ToDaemon:
    """HELLO of a scheduler."""
    return hello(role=handover_pb2.ROLE_SCHEDULER, access=0, token=b"", **fields)


class RawClient:
    """One connection. Received descriptors are closed by `close`."""

    def __init__(self, path: Path | str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.fds: list[int] = []
        self.socket.connect(str(path))

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def send(self, message: handover_pb2.ToDaemon, fds: Sequence[int] = ()) -> None:
        self.send_bytes(MAGIC + message.SerializeToString(), fds)

    def send_bytes(self, data: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], rights)

    async def receive(self, deadline_s: float = 5.0) -> handover_pb2.ToClient | None:
        """The next message; None at the end of the connection. The loop goes on meanwhile."""
        return (await wait_for_async(self._poll, deadline_s, "a packet of the daemon"))[0]

    def receive_blocking(self, deadline_s: float = 5.0) -> handover_pb2.ToClient | None:
        """The same where the daemon runs elsewhere."""
        return wait_for(self._poll, deadline_s, "a packet of the daemon")[0]

    async def refused(self) -> handover_pb2.Refused:
        """The refusal that comes next, followed by the end of the connection."""
        message = await self.receive()
        assert message is not None and message.HasField("refused"), message
        assert await self.receive() is None
        return message.refused

    def close(self) -> None:
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())

    def _poll(self) -> tuple[handover_pb2.ToClient | None] | None:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            data, ancillary, _, _ = self.socket.recvmsg(1 << 17, socket.CMSG_SPACE(4 * 253), flags)
        except BlockingIOError:
            return None
        for _, kind, payload in ancillary:
            if kind == socket.SCM_RIGHTS:
                self.fds.extend(struct.unpack(f"{len(payload) // 4}i", payload))
        if not data:
            return (None,)
        assert data.startswith(MAGIC)
        return (handover_pb2.ToClient.FromString(data[len(MAGIC) :]),)
