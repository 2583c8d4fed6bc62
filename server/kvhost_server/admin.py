"""The Admin service: what people ask, in hex and small numbers."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from kvhost_proto.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from kvhost_server.books import ServiceState
from kvhost_server.custody import Mapping as WorkerMapping
from kvhost_server.custody import Quarantine
from kvhost_server.errors import Code, Refused
from kvhost_server.ids import ChunkKey, SessionNumber
from kvhost_server.lending import SegmentState
from kvhost_server.manager import Manager
from kvhost_server.namespace import Namespace
from kvhost_server.sessions import Session
from kvhost_server.slots import SlotState
from kvhost_server.stewardship import evict, namespace_named, reset_namespace, set_limits
from kvhost_server.version import version_message
from kvhost_server.wire import answers, layout_message

logger = logging.getLogger(__name__)

_MAX_KEYS = 16384
_KEYS_PER_SLICE = 1024
_MOST_PARTS_BYTES = 4 << 20
_MICROSECONDS = 1_000_000


class PoolFacts(Protocol):
    """What the pool can say of its memory, in bytes; `notes` are warnings of one line each."""

    @property
    def asked_bytes(self) -> int: ...
    @property
    def populated_bytes(self) -> int: ...
    @property
    def locked_bytes(self) -> int: ...
    @property
    def hugepages(self) -> str: ...
    @property
    def notes(self) -> list[str]: ...


class AdminService(admin_pb2_grpc.AdminServicer):
    """kvhost.v1.Admin.

    Args:
        manager: whose books are shown.
        pool: facts about memory.
        config: every option with its value, for people.
        extra_anomalies: counters of the shell (refused peers, bad packets, loop lag).
        set_state: drains the daemon or lets it serve again.
    """

    def __init__(
        self,
        manager: Manager,
        pool: PoolFacts,
        config: Mapping[str, str],
        extra_anomalies: Callable[[], Mapping[str, int]],
        set_state: Callable[[ServiceState], None],
    ) -> None:
        self._manager = manager
        self._books = manager.books
        self._pool = pool
        self._config = config
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
            memory=self._memory(),
            namespaces=self._namespaces(),
            sessions=self._sessions(),
            counters=books.counters,
            anomalies={**books.anomalies, **self._extra_anomalies()},
            config=self._config,
        )

    @answers
    async def ListNamespaces(self, request: admin_pb2.ListNamespacesRequest) -> admin_pb2.ListNamespacesReply:
        return admin_pb2.ListNamespacesReply(namespaces=self._namespaces())

    @answers
    async def ListSessions(self, request: admin_pb2.ListSessionsRequest) -> admin_pb2.ListSessionsReply:
        return admin_pb2.ListSessionsReply(sessions=self._sessions())

    @answers
    async def LookupChunks(self, request: admin_pb2.LookupChunksRequest) -> admin_pb2.LookupChunksReply:
        namespace = namespace_named(self._books, request.namespace)
        keys = _keys(namespace, request.keys)
        return admin_pb2.LookupChunksReply(chunks=[self._chunk(namespace, key) for key in keys])

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
        logger.info("%d chunks of namespace %d evicted by hand, %d held", evicted, namespace.number, held)
        return admin_pb2.EvictReply(evicted=evicted, held=held, absent=absent)

    @answers
    async def ResetNamespace(self, request: admin_pb2.ResetNamespaceRequest) -> admin_pb2.ResetNamespaceReply:
        namespace = namespace_named(self._books, request.namespace)
        dropped = reset_namespace(self._books, namespace)
        logger.info("namespace %d reset by hand: %d chunks dropped", namespace.number, dropped)
        return admin_pb2.ResetNamespaceReply(generation=namespace.generation, dropped=dropped)

    @answers
    async def EndSession(self, request: admin_pb2.EndSessionRequest) -> admin_pb2.EndSessionReply:
        number = SessionNumber(request.number)
        quarantined = self._manager.end_session(number, "ended by an operator")
        logger.info("session %d ended by hand; %d slots quarantined", number, quarantined)
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
    async def CheckIntegrity(self, request: admin_pb2.CheckIntegrityRequest) -> admin_pb2.CheckIntegrityReply:
        while self._books.run_chores():
            pass
        problems = self._manager.check_integrity()
        return admin_pb2.CheckIntegrityReply(ok=not problems, problems=problems)

    # Inside.

    def _state(self) -> str:
        return f"SERVICE_STATE_{self._books.state.name}"

    def _memory(self) -> admin_pb2.Memory:
        lending, pool = self._books.lending, self._pool
        used = pinned = granted = quarantined = 0
        for status in self._namespaces():
            used += status.chunks * status.slot_bytes
            pinned += status.pinned_chunks * status.slot_bytes
            granted += status.granted_slots * status.slot_bytes
            quarantined += status.quarantined_slots * status.slot_bytes
        return admin_pb2.Memory(
            asked_bytes=pool.asked_bytes,
            capacity_bytes=len(lending.states) * lending.segment_bytes,
            populated_bytes=pool.populated_bytes,
            segment_bytes=lending.segment_bytes,
            segments=len(lending.states),
            free_segments=lending.free_segments,
            locked_bytes=pool.locked_bytes,
            hugepages=pool.hugepages,
            used_bytes=used,
            pinned_bytes=pinned,
            granted_bytes=granted,
            quarantined_bytes=quarantined,
            retiring_segments=sum(
                s in (SegmentState.RETIRING, SegmentState.CLEANING) for s in lending.states
            ),
            notes=[*pool.notes, *self._slow_workers()],
        )

    def _slow_workers(self) -> list[str]:
        """Who keeps segments from everybody else, one line each (I5)."""
        lending, mappings = self._books.lending, self._books.custody.mappings
        slow = [(mappings[mapping], kept) for mapping, kept in lending.slow_holders().items()]
        return [
            f"worker pid {worker.identity.pid} (uid {worker.identity.uid}, rank {worker.rank}) keeps "
            f"{kept} segments that it was told to let go of: it is stopped, or hangs"
            for worker, kept in slow
        ]

    def _namespaces(self) -> list[admin_pb2.NamespaceStatus]:
        """All of them; the newest ones' digest parts are left out when the reply would grow too large."""
        told = []
        room = _MOST_PARTS_BYTES
        for namespace in self._books.namespaces.values():
            status = self._namespace(namespace)
            room -= sum(len(part.name) + len(part.value) for part in status.parts)
            if room < 0:
                del status.parts[:]
            told.append(status)
        return told

    def _namespace(self, namespace: Namespace) -> admin_pb2.NamespaceStatus:
        books, table = self._books, namespace.table
        sessions = [books.sessions[SessionNumber(n)] for n in namespace.sessions]
        pinned: set[int] = set()
        granted = 0
        for session in books.sessions.values():
            granted += sum(g.namespace is namespace for g in session.grants.values())
            pinned.update(slot for home, slot in session.former_pins.values() if home is namespace)
        for session in sessions:
            pinned.update(session.pins.values())
        entries = [q for q in books.custody.quarantines if q.namespace is namespace]
        for entry in entries:
            pinned.update(entry.read)
        return admin_pb2.NamespaceStatus(
            number=namespace.number,
            digest=namespace.digest.hex(),
            name=namespace.spec.name,
            model=namespace.spec.model,
            generation=namespace.generation,
            parts=[
                common_pb2.DigestPart(name=name, value=value)
                for name, value in sorted(namespace.spec.parts.items())
            ],
            layout=layout_message(namespace.spec.layout),
            slot_bytes=namespace.spec.layout.slot_bytes,
            segments=namespace.segments,
            slots=table.slots,
            chunks=len(table.index),
            pinned_chunks=len(pinned),
            granted_slots=granted,
            quarantined_slots=sum(len(q.slots) for q in entries),
            sessions=len(sessions),
            floor_segments=namespace.floor,
            cap_segments=namespace.cap,
            policy=table.policy.describe(),
            counters={name: count for name, count in namespace.counters.items() if name != "evicted_told"},
        )

    def _sessions(self) -> list[admin_pb2.SessionStatus]:
        """Open sessions, and ended ones whose workers still owe a proof: who holds every byte (I5)."""
        books = self._books
        told = [self._session(session) for session in books.sessions.values()]
        ended: dict[int, list[Quarantine]] = {}
        for entry in books.custody.quarantines:
            if entry.session not in books.sessions:
                ended.setdefault(entry.session, []).append(entry)
        for number, entries in ended.items():
            first = entries[0]
            waiting = {m for entry in entries for m in entry.waiting}
            told.append(
                admin_pb2.SessionStatus(
                    number=number,
                    label=first.label,
                    namespace_number=first.namespace.number,
                    pid=first.identity.pid,
                    uid=first.identity.uid,
                    age_s=books.clock() - first.since,
                    pins=sum(len(e.read) for e in entries),
                    quarantined=sum(len(e.slots) for e in entries),
                    mappings=[_mapping(books.custody.mappings[m]) for m in sorted(waiting)],
                    state="ended",
                )
            )
        return told

    def _session(self, session: Session) -> admin_pb2.SessionStatus:
        books, namespace = self._books, session.namespace
        bounds = books.bounds(session) if namespace is not None else None
        return admin_pb2.SessionStatus(
            number=session.number,
            label=session.label,
            namespace_number=namespace.number if namespace is not None else 0,
            pid=session.identity.pid,
            uid=session.identity.uid,
            age_s=books.clock() - session.opened_at,
            pins=session.pin_count,
            grants=len(session.grants),
            quarantined=books.quarantined(session),
            pin_bound=bounds.pins if bounds else 0,
            grant_bound=bounds.grants if bounds else 0,
            mappings=[_mapping(m) for m in books.custody.of_instance(session.identity.instance_id)],
            state="open",
        )

    def _chunk(self, namespace: Namespace, key: ChunkKey) -> admin_pb2.ChunkStatus:
        books, table = self._books, namespace.table
        slot = table.index.get(key)
        if slot is None or table.state(slot) is not SlotState.READY:
            writing = key in books.writing[namespace.number]
            return admin_pb2.ChunkStatus(key=key.hex(), state="writing" if writing else "absent")
        parent = table.parent(slot)
        return admin_pb2.ChunkStatus(
            key=key.hex(),
            state="ready",
            slot=table.wire(slot),
            pins=table.holds(slot),
            parent=parent.hex() if parent is not None else "",
            children=table.children(slot),
            idle_s=max(0.0, books.clock() - table.stamp(slot) / _MICROSECONDS),
        )


def _mapping(mapping: WorkerMapping) -> admin_pb2.MappingStatus:
    return admin_pb2.MappingStatus(
        rank=mapping.rank,
        pid=mapping.identity.pid,
        uid=mapping.identity.uid,
        access=mapping.access.name.lower(),
        segments=len(mapping.segments) + len(mapping.retiring),
        open_fences=len(mapping.open_fences),
    )


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
