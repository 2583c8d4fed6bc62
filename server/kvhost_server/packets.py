"""Packets of the handover socket: reading and writing one, with its file descriptors (I13).

A packet is the four bytes "KVH1" and one protobuf message. Nothing here decides; every received file
descriptor is handed to the caller, who owns it.
"""

import array
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from kvhost_proto.v1 import handover_pb2
from kvhost_server.errors import Code, Refused
from kvhost_server.version import version_message

MAGIC = b"KVH1"
LARGEST_PACKET = 64 << 10
MOST_FDS = 32
"""File descriptors in one packet; the kernel allows 253."""

_SCM_CREDENTIALS = 2
_UCRED = struct.Struct("=iII")
# Room for the sender's credentials and one descriptor, a pidfd: the kernel itself drops what is beyond.
_ANCILLARY = socket.CMSG_SPACE(_UCRED.size) + socket.CMSG_SPACE(4)
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


@dataclass
class Packet:
    """One received packet, or the end of the connection."""

    data: bytes
    sender: int
    """pid of the process that sent it, which after a fork need not be the one that connected; 0 when
    unknown."""
    fds: list[int] = field(default_factory=list)
    truncated: bool = False
    """It, or what came with it, was larger than allowed; part of it is lost."""
    end: bool = False
    """No packet came and none will. A packet without bytes is none of this: anybody who inherited the
    connection can send one, and it proves nothing."""


def receive(connection: socket.socket) -> Packet:
    """The next packet.

    Raises:
        BlockingIOError: there is none.
        OSError: the connection broke.
    """
    data, ancillary, flags, _ = connection.recvmsg(LARGEST_PACKET + 1, _ANCILLARY, _FLAGS)
    packet = Packet(data, 0, truncated=bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)))
    packet.end = not data and not ancillary  # the kernel names the sender of every packet
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array.array("i")
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            packet.fds.extend(fds)
        elif level == socket.SOL_SOCKET and kind == _SCM_CREDENTIALS and len(payload) >= _UCRED.size:
            packet.sender = _UCRED.unpack(payload[: _UCRED.size])[0]
    packet.truncated |= len(data) > LARGEST_PACKET
    return packet


def send(connection: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Sends one packet, whole or not at all. The descriptors stay the caller's.

    Raises:
        BlockingIOError: the peer does not read.
        OSError: the connection broke, or (ETOOMANYREFS) too many descriptors are on their way.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def encode(message: handover_pb2.ToClient) -> bytes:
    """The packet that carries this message."""
    return MAGIC + message.SerializeToString()


def decode(packet: Packet) -> handover_pb2.ToDaemon:
    """The message in a packet.

    Raises:
        Refused: it is none of ours; the sentence names what came and what is spoken here.
    """
    if packet.truncated:
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"a packet may have {LARGEST_PACKET} bytes and one file descriptor, and this one has more",
        )
    if not packet.data.startswith(MAGIC):
        ours = version_message()
        raise Refused(
            Code.FAILED_PRECONDITION,
            f"the packet starts with {packet.data[:4]!r}; {ours.program} speaks the handover format "
            f"{MAGIC!r}, protocol {ours.major}.{ours.minor}",
        )
    try:
        return handover_pb2.ToDaemon.FromString(packet.data[len(MAGIC) :])
    except DecodeError as error:
        raise Refused(
            Code.INVALID_ARGUMENT, "the packet is no kvhost.v1.ToDaemon message; use a kvhost client"
        ) from error
