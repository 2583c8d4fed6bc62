"""The Admin service: what people ask, in hex and small numbers."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvhost_proto.v1 import admin_pb2, admin_pb2_grpc
from kvhost_server.books import ServiceState
from kvhost_server.errors import Code, Refused
from kvhost_server.explaining import (
    best_namespace,
    chains_of_keys,
    chains_of_request,
    explain,
    keys_from_hex,
)
from kvhost_server.ids import ChunkKey, SessionNumber
from kvhost_server.integrity import problems_in_parts
from kvhost_server.log import about
from kvhost_server.manager import Manager
from kvhost_server.namespace import Namespace
from kvhost_server.recall import AskedRequest, Requests
from kvhost_server.stewardship import (
    drop,
    evict,
    namespace_named,
    operator_bound,
    pin,
    reset_namespace,
    resize_pool,
    set_limits,
    unpin,
)
from kvhost_server.telling import PoolFacts, Telling
from kvhost_server.units import format_size
from kvhost_server.version import version_message
from kvhost_server.wire import answers

logger = logging.getLogger(__name__)

_MAX_KEYS = 16384
_KEYS_PER_SLICE = 1024


@dataclass(frozen=True)
class Shown:
    """What the shell tells people: every option with its value, where each came from, the web page's URL."""

    config: Callable[[], Mapping[str, str]]
    sources: Callable[[], Mapping[str, str]]
    url: Callable[[], str]


class AdminService(admin_pb2_grpc.AdminServicer):
    """kvhost.v1.Admin.

    Args:
        manager: whose books are shown.
        pool: facts about memory.
        shown: the configuration, where it came from, and where the web page is, for people.
        requests: what engines asked lately.
        extra_anomalies: counters of the shell (refused peers, bad packets, loop lag).
        set_state: drains the daemon or lets it serve again.
    """

    def __init__(
        self,
        manager: Manager,
        pool: PoolFacts,
        shown: Shown,
        *,
        requests: Requests,
        extra_anomalies: Callable[[], Mapping[str, int]],
        set_state: Callable[[ServiceState], None],
    ) -> None:
        self._manager = manager
        self._books = manager.books
        self._telling = Telling(manager.books, pool)
        self._shown = shown
        self._requests = requests
        self._extra_anomalies = extra_anomalies
        self._set_state = set_state
        self._started = manager.books.clock()

    @answers
    async def Status(self, request: admin_pb2.StatusRequest) -> admin_pb2.StatusReply:
        books = self._books
        return admin_pb2.StatusReply(
            version=version_message(),
            boot_id=f"{books.boot_id:016x}",
            pid=os.getpid(),
            uptime_s=books.clock() - self._started,
            state=self._state(),
            memory=self._telling.memory(),
            namespaces=self._telling.namespaces(),
            sessions=self._telling.sessions(),
            counters=books.counters,
            anomalies={**books.anomalies, **self._extra_anomalies()},
            config=self._shown.config(),
            config_sources=self._shown.sources(),
            evictions=[self._telling.run(run) for run in books.fates.runs],
            metrics_url=self._shown.url(),
        )

    @answers
    async def ListNamespaces(self, request: admin_pb2.ListNamespacesRequest) -> admin_pb2.ListNamespacesReply:
        return admin_pb2.ListNamespacesReply(namespaces=self._telling.namespaces())

    @answers
    async def ListSessions(self, request: admin_pb2.ListSessionsRequest) -> admin_pb2.ListSessionsReply:
        return admin_pb2.ListSessionsReply(sessions=self._telling.sessions())

    @answers
    async def LookupChunks(self, request: admin_pb2.LookupChunksRequest) -> admin_pb2.LookupChunksReply:
        namespace = namespace_named(self._books, request.namespace)
        keys = _keys(namespace, request.keys)
        return admin_pb2.LookupChunksReply(chunks=[self._telling.chunk(namespace, key) for key in keys])

    @answers
    async def Evict(self, request: admin_pb2.EvictRequest) -> admin_pb2.EvictReply:
        if request.all == bool(request.keys):
            raise Refused(Code.INVALID_ARGUMENT, "name keys, or ask for all; one of the two")
        namespace = namespace_named(self._books, request.namespace)
        keys = list(namespace.table.index) if request.all else _keys(namespace, request.keys)
        evicted = held = absent = 0
        for start in range(0, len(keys), _KEYS_PER_SLICE):
            part = evict(self._books, namespace, keys[start : start + _KEYS_PER_SLICE])
            evicted, held, absent = evicted + part[0], held + part[1], absent + part[2]
            await asyncio.sleep(0)  # engines may have their turn
        logger.info(
            "%d chunks of namespace %d evicted by hand, %d held",
            evicted,
            namespace.number,
            held,
            extra=about(namespace=namespace.number),
        )
        return admin_pb2.EvictReply(evicted=evicted, held=held, absent=absent)

    @answers
    async def ResetNamespace(self, request: admin_pb2.ResetNamespaceRequest) -> admin_pb2.ResetNamespaceReply:
        namespace = namespace_named(self._books, request.namespace)
        dropped = reset_namespace(self._books, namespace)
        logger.info(
            "namespace %d reset by hand: %d chunks dropped",
            namespace.number,
            dropped,
            extra=about(namespace=namespace.number),
        )
        return admin_pb2.ResetNamespaceReply(generation=namespace.generation, dropped=dropped)

    @answers
    async def EndSession(self, request: admin_pb2.EndSessionRequest) -> admin_pb2.EndSessionReply:
        number = SessionNumber(request.number)
        quarantined = self._manager.end_session(number, "ended by an operator")
        logger.info(
            "session %d ended by hand; %d slots quarantined", number, quarantined, extra=about(number)
        )
        return admin_pb2.EndSessionReply(quarantined=quarantined)

    @answers
    async def Drain(self, request: admin_pb2.DrainRequest) -> admin_pb2.DrainReply:
        if self._books.state is ServiceState.STARTING:
            raise Refused(Code.FAILED_PRECONDITION, "the daemon is still starting; drain it when it serves")
        self._set_state(ServiceState.SERVING if request.resume else ServiceState.DRAINING)
        return admin_pb2.DrainReply(state=self._state())

    @answers
    async def SetLimits(self, request: admin_pb2.SetLimitsRequest) -> admin_pb2.SetLimitsReply:
        namespace = namespace_named(self._books, request.namespace)
        floor = request.floor_bytes if request.HasField("floor_bytes") else None
        cap = request.cap_bytes if request.HasField("cap_bytes") else None
        set_limits(self._books, self._manager.attachment, namespace, floor, cap)
        return admin_pb2.SetLimitsReply(floor_segments=namespace.floor, cap_segments=namespace.cap)

    @answers
    async def ResizePool(self, request: admin_pb2.ResizePoolRequest) -> admin_pb2.ResizePoolReply:
        if self._books.state is ServiceState.STARTING:
            raise Refused(Code.FAILED_PRECONDITION, "the daemon is still starting; resize it when it serves")
        lending, before = self._books.lending, self._books.lending.segments
        resize_pool(self._books, self._manager.attachment, request.bytes)
        logger.info(
            "the pool is to have %s: %d segments, %d until now",
            format_size(request.bytes),
            lending.budget,
            before,
        )
        return admin_pb2.ResizePoolReply(segments=lending.budget, segment_bytes=lending.segment_bytes)

    @answers
    async def Explain(self, request: admin_pb2.ExplainRequest) -> admin_pb2.ExplainReply:
        books = self._books
        namespace, asked, keys = self._meant(request)
        chains = chains_of_request(namespace, asked) if asked else chains_of_keys(keys)
        reply = admin_pb2.ExplainReply(
            namespace_number=namespace.number, chains=await explain(books, namespace, chains)
        )
        if asked is not None:
            reply.request, reply.session_number = asked.name, asked.session
            reply.age_s = books.clock() - asked.at
        return reply

    @answers
    async def PinChunks(self, request: admin_pb2.PinChunksRequest) -> admin_pb2.PinChunksReply:
        namespace, _, keys = self._meant(request)
        pinned, already, absent = pin(self._books, namespace, keys)
        total = len(self._books.operator_pins[namespace.number])
        logger.info(
            "%d chunks of namespace %d pinned by hand, %d in all",
            pinned,
            namespace.number,
            total,
            extra=about(namespace=namespace.number),
        )
        return admin_pb2.PinChunksReply(
            pinned=pinned, already=already, absent=absent, total=total, bound=operator_bound(namespace)
        )

    @answers
    async def UnpinChunks(self, request: admin_pb2.UnpinChunksRequest) -> admin_pb2.UnpinChunksReply:
        if request.all == bool(request.keys or request.request):
            raise Refused(Code.INVALID_ARGUMENT, "name keys or a request, or ask for all; one of the three")
        if request.all:
            namespace = namespace_named(self._books, request.namespace)
            unpinned, absent = unpin(self._books, namespace, None)
        else:
            namespace, _, keys = self._meant(request)
            unpinned, absent = unpin(self._books, namespace, keys)
        logger.info(
            "%d chunks of namespace %d unpinned by hand",
            unpinned,
            namespace.number,
            extra=about(namespace=namespace.number),
        )
        return admin_pb2.UnpinChunksReply(unpinned=unpinned, absent=absent)

    @answers
    async def DropNamespace(self, request: admin_pb2.DropNamespaceRequest) -> admin_pb2.DropNamespaceReply:
        if not request.namespace:
            raise Refused(Code.INVALID_ARGUMENT, "name the namespace to drop")
        namespace = namespace_named(self._books, request.namespace)
        segments, kept = drop(self._books, namespace)
        self._manager.forget_empty_namespaces()
        logger.info(
            "namespace %d dropped by hand: %d segments, %d kept",
            namespace.number,
            segments,
            kept,
            extra=about(namespace=namespace.number),
        )
        return admin_pb2.DropNamespaceReply(segments=segments, kept=kept)

    @answers
    async def CheckIntegrity(self, request: admin_pb2.CheckIntegrityRequest) -> admin_pb2.CheckIntegrityReply:
        problems: list[str] = []
        parts = problems_in_parts(self._books)
        while True:
            while self._books.run_chores():  # a part is looked at when no chore waits
                await asyncio.sleep(0)
            part = next(parts, None)
            if part is None:
                break
            problems += part
            await asyncio.sleep(0)
        return admin_pb2.CheckIntegrityReply(ok=not problems, problems=problems)

    # Inside.

    def _meant(
        self, request: admin_pb2.ExplainRequest | admin_pb2.PinChunksRequest | admin_pb2.UnpinChunksRequest
    ) -> tuple[Namespace, AskedRequest | None, list[ChunkKey]]:
        """The namespace and the keys that somebody means, by name of a request or one by one.

        Raises:
            Refused: neither or both were named, or there is no such thing.
        """
        books = self._books
        if bool(request.keys) == bool(request.request):
            raise Refused(Code.INVALID_ARGUMENT, "name keys, or a request; one of the two")
        if request.request:
            asked = self._requests.named(request.request)
            namespace = books.namespaces.get(asked.namespace)
            if namespace is None:
                raise Refused(Code.NOT_FOUND, f"namespace {asked.namespace} of that request is gone")
            chains = chains_of_request(namespace, asked)
            return namespace, asked, [key for chain in chains for key in chain.keys]
        name = request.namespace or str(best_namespace(books, request.keys) or "")
        namespace = namespace_named(books, name)
        return namespace, None, keys_from_hex(namespace, request.keys)

    def _state(self) -> str:
        return f"SERVICE_STATE_{self._books.state.name}"


def _keys(namespace: Namespace, texts: Iterable[str]) -> list[ChunkKey]:
    """Keys from hex.

    Raises:
        Refused: not hex, another length than the namespace's keys, or too many.
    """
    size = namespace.spec.layout.key_bytes
    keys: list[ChunkKey] = []
    for text in texts:
        try:
            key = bytes.fromhex(text)
        except ValueError:
            raise Refused(Code.INVALID_ARGUMENT, f"{text[:80]!r} is not hexadecimal") from None
        if len(key) != size:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"{text[:80]!r} has {len(key)} bytes; keys of namespace {namespace.number} have {size} "
                "(block hash, then 4 bytes of group index)",
            )
        keys.append(ChunkKey(key))
    if len(keys) > _MAX_KEYS:
        raise Refused(Code.RESOURCE_EXHAUSTED, f"{len(keys)} keys in one call; allowed are {_MAX_KEYS}")
    return keys
