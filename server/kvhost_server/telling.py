"""What the Admin service tells of the books, as messages."""

from typing import Protocol

from kvhost_proto.v1 import admin_pb2, common_pb2
from kvhost_server.books import Books
from kvhost_server.custody import Mapping as WorkerMapping
from kvhost_server.custody import Quarantine
from kvhost_server.fates import Run
from kvhost_server.ids import ChunkKey, SessionNumber
from kvhost_server.lending import SegmentState
from kvhost_server.namespace import Namespace
from kvhost_server.sessions import Session
from kvhost_server.slots import SlotState
from kvhost_server.wire import layout_message

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


class Telling:
    """Reads and changes nothing."""

    def __init__(self, books: Books, pool: PoolFacts) -> None:
        self._books = books
        self._pool = pool

    def run(self, run: Run) -> admin_pb2.EvictionRun:
        now = self._books.clock()
        return admin_pb2.EvictionRun(
            namespace_number=run.namespace,
            cause=run.cause.name.lower(),
            taker=run.taker,
            chunks=run.chunks,
            began_s=now - run.began,
            ended_s=now - run.ended,
            youngest_s=run.youngest_s,
            oldest_s=run.oldest_s,
        )

    def memory(self) -> admin_pb2.Memory:
        lending, pool = self._books.lending, self._pool
        used = pinned = granted = quarantined = 0
        for status in self.namespaces():
            used += status.chunks * status.slot_bytes
            pinned += status.pinned_chunks * status.slot_bytes
            granted += status.granted_slots * status.slot_bytes
            quarantined += status.quarantined_slots * status.slot_bytes
        return admin_pb2.Memory(
            asked_bytes=pool.asked_bytes,
            capacity_bytes=lending.segments * lending.segment_bytes,
            populated_bytes=pool.populated_bytes,
            segment_bytes=lending.segment_bytes,
            segments=lending.segments,
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

    def namespaces(self) -> list[admin_pb2.NamespaceStatus]:
        """All of them; the newest ones' digest parts are left out when the reply would grow too large."""
        told = []
        room = _MOST_PARTS_BYTES
        for namespace in self._books.namespaces.values():
            status = self.namespace(namespace)
            room -= sum(len(part.name) + len(part.value) for part in status.parts)
            if room < 0:
                del status.parts[:]
            told.append(status)
        return told

    def namespace(self, namespace: Namespace) -> admin_pb2.NamespaceStatus:
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
        by_hand = books.operator_pins.get(namespace.number, {})
        pinned.update(by_hand.values())
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
            operator_pins=len(by_hand),
        )

    def sessions(self) -> list[admin_pb2.SessionStatus]:
        """Open sessions, and ended ones whose workers still owe a proof: who holds every byte (I5)."""
        books = self._books
        told = [self.session(session) for session in books.sessions.values()]
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

    def session(self, session: Session) -> admin_pb2.SessionStatus:
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

    def chunk(self, namespace: Namespace, key: ChunkKey) -> admin_pb2.ChunkStatus:
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
