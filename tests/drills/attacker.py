"""Peers that mean harm: mutated messages, and a member of a namespace that does as it likes.

Raw sockets and raw gRPC; nothing of the production client stands between them and the daemon.
"""

import os
import random
import secrets
import sys
from collections.abc import Sequence
from types import TracebackType

import grpc

from kvhost_client.handover import fetch_ticket
from kvhost_proto.v1 import cache_pb2, cache_pb2_grpc, common_pb2, handover_pb2
from kvhost_server.packets import MAGIC
from tests.client.engine import KEY_BYTES, key, spec
from tests.server.rawclient import RawClient, hello, scheduler_hello

DEADLINE_S = 10.0
BYE = handover_pb2.ToDaemon(bye=handover_pb2.Bye())
LENGTHS = (0, 1, 2, 3, 4, 5, 31, 33, 100, 4095, 4096, 65535, 65536, 65537, 100_000)


def packets() -> list[bytes]:
    """One good packet of every kind that the handover socket knows."""
    messages = [
        hello(),
        hello(access=handover_pb2.ACCESS_DEVICE_DMA, rank=7),
        hello(with_pidfd=True),
        hello(rank=1023, token=secrets.token_bytes(32), instance_id=secrets.token_bytes(16)),
        scheduler_hello(),
        BYE,
        handover_pb2.ToDaemon(mapped=handover_pb2.MappedSegments(segment_ids=[0, 1, 2, 2**32 - 1])),
        handover_pb2.ToDaemon(fenced=handover_pb2.FenceDone(fence=1)),
        handover_pb2.ToDaemon(fenced=handover_pb2.FenceDone(fence=2**64 - 1)),
        handover_pb2.ToDaemon(retired=handover_pb2.Retired(segment_ids=[1, 1, 1])),
    ]
    return [MAGIC + message.SerializeToString() for message in messages]


def requests(session_ids: Sequence[bytes]) -> dict[str, list[bytes]]:
    """Messages to every method of Cache, with every field set and with odd values, for these sessions."""
    some_key = key("some")
    chains = [
        cache_pb2.Chain(group=group, semantics=kind, key_bytes=size, keys=some_key * count)
        for group, kind, size, count in (
            (0, common_pb2.SEMANTICS_PREFIX, KEY_BYTES, 3),
            (1, common_pb2.SEMANTICS_SET, KEY_BYTES, 1),
            (9, common_pb2.SEMANTICS_SET, KEY_BYTES, 2),
            (0, common_pb2.SEMANTICS_UNSPECIFIED, 0, 0),
            (2**32 - 1, common_pb2.SEMANTICS_PREFIX, 2**32 - 1, 1),
        )
    ]
    chunks = [
        cache_pb2.Chunk(group=group, key=some_key[:size], parent=parent, checksum=2**64 - 1)
        for group, size, parent in ((0, 36, b""), (0, 36, some_key), (1, 31, b"x"), (7, 0, some_key * 9))
    ]
    ids = (0, 1, 2, 3, 2**32, 2**63, 2**64 - 1)
    found: dict[str, list[bytes]] = {
        "Ping": [b""],
        "Watch": [
            cache_pb2.WatchRequest(namespace=name).SerializeToString() for name in ("9999", "zz", "0" * 5000)
        ],
        "OpenSession": [
            cache_pb2.OpenSessionRequest(
                ticket=secrets.token_bytes(size), version=common_pb2.Version(major=major), label="evil"
            ).SerializeToString()
            for size, major in ((32, 1), (0, 1), (31, 1), (100_000, 1), (32, 0), (32, 2**32 - 1))
        ],
    }
    for session in session_ids:
        messages: dict[str, list[object]] = {
            "DeclareNamespace": [
                cache_pb2.DeclareNamespaceRequest(
                    session_id=session,
                    spec=spec("fuzz", ranks),
                    workers=[cache_pb2.WorkerToken(rank=rank, token=secrets.token_bytes(32))],
                )
                for ranks, rank in ((1, 1), (1, 2**32 - 1), (0, 0), (2000, 0))
            ],
            "Lookup": [
                cache_pb2.LookupRequest(
                    session_id=session, pin=pin, queries=[cache_pb2.LookupQuery(tag=2**64 - 1, chains=chains)]
                )
                for pin in (False, True)
            ],
            "Reserve": [
                cache_pb2.ReserveRequest(session_id=session, count=count, chunks=chunks[:number])
                for count, number in ((2**32 - 1, 0), (20_000, 4), (1, 4))
            ],
            "Update": [
                cache_pb2.UpdateRequest(
                    session_id=session,
                    assigns=[cache_pb2.StoreOf(store_id=n, chunk=chunk) for n in ids for chunk in chunks],
                    commits=[cache_pb2.StoreOf(store_id=n, chunk=chunk) for n in ids for chunk in chunks],
                    aborts=[cache_pb2.Abort(store_id=n, unquiet_ranks=[0, 1, 2**32 - 1]) for n in ids],
                    releases=[*ids, *ids],
                    touches=chains,
                )
            ],
        }
        if not session or session == bytes(16):
            messages["Reset"] = [cache_pb2.ResetRequest(session_id=session, weights_version="v" * 70_000)]
        for method, of_method in messages.items():
            found.setdefault(method, []).extend(m.SerializeToString() for m in of_method)  # type: ignore[attr-defined]
    return found


def mutated(dice: random.Random, good: Sequence[bytes]) -> bytes:
    """A good message, a damaged one, or noise."""
    kind = dice.randrange(6)
    if kind == 0:
        return dice.randbytes(dice.choice(LENGTHS))
    message = bytearray(dice.choice(good))
    if kind == 1 or not message:
        return bytes(message)
    if kind == 2:
        for _ in range(dice.randrange(1, 8)):
            message[dice.randrange(len(message))] = dice.randrange(256)
    elif kind == 3:
        del message[dice.randrange(1, len(message) + 1) :]
    elif kind == 4:
        at = dice.randrange(len(message))
        message[at:at] = message[dice.randrange(len(message)) :]
    else:
        message += dice.randbytes(dice.randrange(1, 64))
    return bytes(message)


class Member:
    """A scheduler and one worker of a namespace, with the segments' descriptors in hand. Use it in a `with`.

    Args:
        sockets: the daemon's, first and handover.
        model: names the namespace.
        bye: says BYE at the end, so that what it holds goes at once.
    """

    def __init__(self, sockets: tuple[str, str], model: str, *, bye: bool = True) -> None:
        cache, handover = sockets
        self.instance_id = secrets.token_bytes(16)
        self.token = secrets.token_bytes(32)
        self._bye = bye
        self.worker = RawClient(handover)
        self.worker.send(hello(instance_id=self.instance_id, token=self.token))
        assert self._next().HasField("welcome")
        ticket = fetch_ticket(handover, self.instance_id, DEADLINE_S)
        self.ticket = ticket.ticket
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(f"unix:{cache}", options)
        self.stub = cache_pb2_grpc.CacheStub(self._channel)
        version = common_pb2.Version(major=1)
        self._stream = self.stub.OpenSession(
            cache_pb2.OpenSessionRequest(ticket=self.ticket, version=version, label=f"member {model}")
        )
        opened = next(self._stream).opened
        self.session_id, self.number = opened.session_id, opened.number
        self.declaration = cache_pb2.DeclareNamespaceRequest(
            session_id=self.session_id,
            spec=spec(model),
            workers=[cache_pb2.WorkerToken(rank=0, token=self.token)],
        )
        self.namespace = self.stub.DeclareNamespace(self.declaration, timeout=DEADLINE_S).namespace_number
        self.segments = list(self._next().segments.segments)
        self.fds = self.worker.fds
        ids = [segment.id for segment in self.segments]
        self.worker.send(handover_pb2.ToDaemon(mapped=handover_pb2.MappedSegments(segment_ids=ids)))
        while not next(self._stream).mapped.ready:
            pass

    def __enter__(self) -> "Member":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bye:
            self.worker.send(BYE)
        self.end_session()
        self._channel.close()
        self.worker.close()

    def end_session(self) -> None:
        self._stream.cancel()

    def reserve(self, count: int) -> list[int]:
        """So many slots ahead; their store ids."""
        request = cache_pb2.ReserveRequest(session_id=self.session_id, count=count)
        return list(self.stub.Reserve(request, timeout=DEADLINE_S).store_ids)

    def update(self, **fields: object) -> list[tuple[int, int]]:
        """(Kind, status code) of each error of an update with these fields."""
        request = cache_pb2.UpdateRequest(session_id=self.session_id, **fields)  # type: ignore[arg-type]
        reply = self.stub.Update(request, timeout=DEADLINE_S)
        return [(error.kind, error.code) for error in reply.errors]

    def code(self, method: str, request: object) -> grpc.StatusCode:
        """The status with which a unary call ends."""
        return code_of(self.stub, method, request)

    def _next(self) -> handover_pb2.ToClient:
        message = self.worker.receive_blocking(DEADLINE_S)
        assert message is not None, "the daemon hung up"
        return message


def code_of(stub: object, method: str, request: object) -> grpc.StatusCode:
    """The status with which a unary call ends."""
    try:
        getattr(stub, method)(request, timeout=DEADLINE_S)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def fresh_instance() -> bytes:
    return os.urandom(16)


def main() -> None:
    """`attacker CACHE HANDOVER FENCE`: a member that answers a fence which was never sent; prints the code of
    the refusal."""
    cache, handover, fence = sys.argv[1:]
    with Member((cache, handover), "liar", bye=False) as liar:
        liar.worker.send(handover_pb2.ToDaemon(fenced=handover_pb2.FenceDone(fence=int(fence))))
        answer = liar.worker.receive_blocking(DEADLINE_S)
        print(answer.refused.code if answer is not None else "hung up")


if __name__ == "__main__":
    main()
