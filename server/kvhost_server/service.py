"""The Cache service: what engines ask, translated and checked, then decided by the manager.

Also the way back: notices to sessions and key events to watchers, through
bounded queues that collapse instead of growing.
"""

import asyncio
import contextlib
import gc
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

import grpc

from kvhost_proto.v1 import cache_pb2, cache_pb2_grpc, common_pb2
from kvhost_server import slices
from kvhost_server.decoding import Malformed, refuse_malformed
from kvhost_server.errors import Code, Refused
from kvhost_server.exchange import Handler, answer
from kvhost_server.identity import Identity
from kvhost_server.ids import NamespaceNumber, PinId, SessionNumber, StoreId
from kvhost_server.log import about
from kvhost_server.lookups import (
    ChainAsked,
    answer_lookup,
    check_chain,
    check_update,
    lookup_reply,
    read_lookup,
)
from kvhost_server.manager import Manager
from kvhost_server.measures import Measures
from kvhost_server.namespace import Namespace
from kvhost_server.notices import Ended, Evicted, KeyEvent, Notice, Resync
from kvhost_server.reading import MAX_KEYS_PER_CALL, ChainAnswer
from kvhost_server.recall import Requests
from kvhost_server.sessions import Session
from kvhost_server.stewardship import namespace_named
from kvhost_server.version import PROTOCOL_MAJOR, version_message
from kvhost_server.watching import Watching
from kvhost_server.wire import MAX_RANKS, answers, chunk_of, notice_message, printable, refuse, spec_of

logger = logging.getLogger(__name__)

_MAX_LABEL = 256
_MAX_PROGRAM = 64
_MAX_QUEUED_NOTICES = 1024
_MAX_QUEUED_KEY_BYTES = 16 << 20
_KEYS_PER_SLICE = 4096


class Doorkeeper(Protocol):
    """The handover socket's side of a session: who asked for a ticket, and is that process still alive."""

    def redeem(self, ticket: bytes) -> Identity | None:
        """Who received this ticket; None when it is unknown, used or expired. Once."""

    def watch_end(self, identity: Identity, on_end: Callable[[], None]) -> Callable[[], None]:
        """Calls back once when that process has ended; returns how to stop watching."""


class NoticeQueue:
    """Notices for one session. When it runs full, all of them become one resync."""

    def __init__(self) -> None:
        self._notices: deque[cache_pb2.Notice | Ended] = deque()
        self._key_bytes = 0
        self._wake = asyncio.Event()
        self.collapsed = 0

    def put(self, notice: cache_pb2.Notice | Ended) -> None:
        if len(self._notices) >= _MAX_QUEUED_NOTICES or self._key_bytes > _MAX_QUEUED_KEY_BYTES:
            kept = [n for n in self._notices if isinstance(n, Ended) or not n.HasField("removed")][-16:]
            resync = notice_message(Resync())
            # A client ends a session whose notices are not of its daemon's boot (I6).
            stamped = next((n for n in reversed(self._notices) if not isinstance(n, Ended)), None)
            if stamped is not None:
                resync.stamp.CopyFrom(stamped.stamp)
            self._notices = deque([resync, *kept])
            self._key_bytes = 0
            self.collapsed += 1
        self._notices.append(notice)
        self._key_bytes += _removed_bytes(notice)
        self._wake.set()

    async def get(self) -> cache_pb2.Notice | Ended:
        while not self._notices:
            self._wake.clear()
            await self._wake.wait()
        notice = self._notices.popleft()
        self._key_bytes -= _removed_bytes(notice)
        return notice


def _removed_bytes(notice: cache_pb2.Notice | Ended) -> int:
    return 0 if isinstance(notice, Ended) else len(notice.removed.keys)


class CacheService(cache_pb2_grpc.CacheServicer):
    """kvhost.v1.Cache.

    Args:
        manager: decides.
        doorkeeper: redeems tickets and watches schedulers' processes.
        populated: fraction of the pool that is populated, 0 to 1.
        measures: takes what lookups found, and what was dropped.
        requests: keeps what was asked, for people.
    """

    def __init__(
        self,
        manager: Manager,
        doorkeeper: Doorkeeper,
        populated: Callable[[], float],
        measures: Measures,
        requests: Requests,
    ) -> None:
        self._manager = manager
        self._books = manager.books
        self._doorkeeper = doorkeeper
        self._populated = populated
        self._measures = measures
        self._requests = requests
        self._streams: dict[SessionNumber, NoticeQueue] = {}
        self._watching = Watching(manager.books, measures.drops)
        self._with_events: set[NamespaceNumber] = set()
        # Messages of a stream are measured as the calls that they stand for.
        self._handlers: dict[str, Handler] = {
            "lookup": measures.calls["Cache", "Lookup"].timing(self._lookup),
            "reserve": measures.calls["Cache", "Reserve"].timing(self._reserve),
            "update": measures.calls["Cache", "Update"].timing(self._update),
        }
        self._chores_run = False

    # What the manager orders.

    def notice(self, session: SessionNumber, notice: Notice) -> None:
        """Queues a notice for a session's stream."""
        stream = self._streams.get(session)
        if stream is None:
            return
        if isinstance(notice, Ended):
            stream.put(notice)
        else:
            message = notice_message(notice)
            message.stamp.CopyFrom(self._stamp(self._books.sessions.get(session)))
            stream.put(message)

    def events(self, namespace: NamespaceNumber) -> None:
        """Key events wait; they are told after the current call."""
        if not self._with_events:
            asyncio.get_running_loop().call_soon(self._tell_events)
        self._with_events.add(namespace)

    def chores(self) -> None:
        """Long work waits; it is done in slices between calls."""
        if not self._chores_run:
            self._chores_run = True
            asyncio.get_running_loop().call_soon(self._run_chores)

    def state_changed(self) -> None:
        """Tells every session what the daemon can do now."""
        for number, stream in self._streams.items():
            stream.put(
                cache_pb2.Notice(
                    stamp=self._stamp(self._books.sessions.get(number)),
                    state=cache_pb2.StateChanged(state=self._state()),
                )
            )

    def going_down(self, reason: str) -> None:
        """Tells every session that the daemon stops; the streams end with it."""
        for stream in self._streams.values():
            stream.put(
                cache_pb2.Notice(stamp=self._stamp(None), going_down=cache_pb2.GoingDown(reason=reason))
            )

    # The RPCs.

    @answers
    async def Ping(self, request: cache_pb2.PingRequest) -> cache_pb2.PingReply:
        return cache_pb2.PingReply(
            stamp=self._stamp(None),
            version=version_message(),
            state=self._state(),
            populated=self._populated(),
        )

    async def OpenSession(
        self, request: cache_pb2.OpenSessionRequest, context: Any
    ) -> AsyncIterator[cache_pb2.Notice]:
        if request.version.major != PROTOCOL_MAJOR:
            ours, program = version_message(), request.version.program[:_MAX_PROGRAM]
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the client {program!r} speaks protocol {request.version.major}."
                f"{request.version.minor}, this daemon {ours.program!r} speaks {ours.major}.{ours.minor}",
            )
        identity = self._doorkeeper.redeem(request.ticket)
        if identity is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the ticket is unknown, used or expired; get a new one from the handover socket",
            )
            return
        try:
            session = self._manager.open_session(identity, printable(request.label, _MAX_LABEL))
        except Refused as refused:
            await refuse(context, refused)
        number = session.number
        stream = self._streams[number] = NoticeQueue()
        unwatch = self._doorkeeper.watch_end(
            identity, lambda: self._end(number, f"the scheduler process {identity.pid} ended")
        )
        logger.info(
            "session %d opened by pid %d uid %d: %s",
            number,
            identity.pid,
            identity.uid,
            session.label,
            extra=about(session=number),
        )
        try:
            yield cache_pb2.Notice(
                stamp=self._stamp(session),
                opened=cache_pb2.Opened(
                    session_id=session.secret, number=number, version=version_message(), state=self._state()
                ),
            )
            while True:
                notice = await stream.get()
                if isinstance(notice, Ended):
                    await context.abort(grpc.StatusCode.ABORTED, f"session {number} ended: {notice.why}")
                else:
                    yield notice
        finally:
            unwatch()
            self._end(number, "its stream was closed")
            self._measures.drops["notices"] += stream.collapsed
            del self._streams[number]

    @answers
    async def DeclareNamespace(
        self, request: cache_pb2.DeclareNamespaceRequest
    ) -> cache_pb2.DeclareNamespaceReply:
        session = self._manager.session(request.session_id)
        if len(request.workers) > MAX_RANKS:
            raise Refused(
                Code.INVALID_ARGUMENT, f"{len(request.workers)} tokens were named; allowed are {MAX_RANKS}"
            )
        tokens = [(worker.rank, worker.token) for worker in request.workers]
        namespace, existed = self._manager.declare(session, spec_of(request.spec), tokens)
        logger.info(
            "session %d is in namespace %d (%s, %s)",
            session.number,
            namespace.number,
            namespace.digest.hex()[:12],
            "known before" if existed else "new",
            extra=about(session.number, namespace.number),
        )
        layout = namespace.spec.layout
        if not existed:
            _leave_out_of_collections()
        return cache_pb2.DeclareNamespaceReply(
            stamp=self._stamp(session),
            digest=namespace.digest,
            namespace_number=namespace.number,
            slot_bytes=layout.slot_bytes,
            shard_stride=layout.shard_stride,
            slots_per_segment=namespace.slots_per_segment,
            existed=existed,
            slots=self._books.bounds(session).slots,
        )

    async def _lookup(self, request: cache_pb2.LookupRequest) -> cache_pb2.LookupReply:
        if request.namespace:
            return await self._lookup_without_session(request)
        session = self._manager.session(request.session_id)
        namespace = self._books.namespace_of(session)
        asked, pin = read_lookup(request, namespace), request.pin

        def ask(chain: ChainAsked, keys: bytes) -> ChainAnswer:
            return self._manager.reading.lookup(session, chain.group, chain.semantics, keys, pin)

        answered = await answer_lookup(asked, ask, namespace.spec.layout.key_bytes, pin)
        self._measures.looked_up(namespace, asked, answered, pin)
        if not pin:  # the lookup before it asked for more
            self._requests.remember(session.number, namespace.number, self._books.clock(), asked, answered)
        self._tell_soon(session)
        reply = lookup_reply(asked, answered)
        self._stamp_on(reply.stamp, session)
        return reply

    async def _reserve(self, request: cache_pb2.ReserveRequest) -> cache_pb2.ReserveReply:
        session = self._manager.session(request.session_id)
        if request.count + len(request.chunks) > MAX_KEYS_PER_CALL:
            raise Refused(
                Code.RESOURCE_EXHAUSTED,
                f"{request.count + len(request.chunks)} slots in one call; allowed are {MAX_KEYS_PER_CALL}",
            )
        chunks = [chunk_of(chunk) for chunk in request.chunks]
        given = await slices.reserve(self._manager, request.session_id, request.count, chunks)
        return cache_pb2.ReserveReply(
            stamp=self._stamp(session),
            store_ids=[store for store, _ in given.grants],
            slots=[slot for _, slot in given.grants],
            chunk_status=[f"RESERVE_STATUS_{status.name}" for status, _, _ in given.chunks],
            chunk_store_ids=[store for _, store, _ in given.chunks],
            chunk_slots=[slot for _, _, slot in given.chunks],
            pending=given.pending,
            reason=given.reason,
        )

    async def _update(self, request: cache_pb2.UpdateRequest) -> cache_pb2.UpdateReply:
        manager = self._manager
        session = manager.session(request.session_id)
        check_update(request)
        reply = cache_pb2.UpdateReply()
        reading, writing = manager.reading, manager.writing

        def fault(kind: str, item: int, refused: Refused) -> None:
            reply.errors.add(
                kind=cache_pb2.ItemKind.Value(kind), id=item, code=refused.code, message=refused.message
            )

        for pin in request.releases:
            try:
                reading.release(session, PinId(pin))
            except Refused as refused:
                fault("ITEM_KIND_RELEASE", pin, refused)
        writing.abort_all(
            session,
            ((StoreId(abort.store_id), abort.unquiet_ranks) for abort in request.aborts),
            lambda store, refused: fault("ITEM_KIND_ABORT", store, refused),
        )
        for place, store in enumerate(request.assigns, 1):
            if place % slices.ITEMS_PER_SLICE == 0:
                session = await slices.others_first(manager, request.session_id)
            try:
                writing.assign(session, StoreId(store.store_id), chunk_of(store.chunk))
            except Refused as refused:
                fault("ITEM_KIND_ASSIGN", store.store_id, refused)
        for place, store in enumerate(request.commits, 1):
            if place % slices.ITEMS_PER_SLICE == 0:
                session = await slices.others_first(manager, request.session_id)
            try:
                if not writing.commit(session, StoreId(store.store_id), chunk_of(store.chunk)):
                    reply.superseded.append(store.store_id)
            except Refused as refused:
                fault("ITEM_KIND_COMMIT", store.store_id, refused)
        for chain in request.touches:
            try:
                await self._touch(session, chain)
            except Refused as refused:
                fault("ITEM_KIND_TOUCH", chain.group, refused)
        reply.stamp.CopyFrom(self._stamp(session))
        return reply

    @answers
    async def Lookup(self, request: cache_pb2.LookupRequest) -> cache_pb2.LookupReply:
        return await self._lookup(request)

    @answers
    async def Reserve(self, request: cache_pb2.ReserveRequest) -> cache_pb2.ReserveReply:
        return await self._reserve(request)

    @answers
    async def Update(self, request: cache_pb2.UpdateRequest) -> cache_pb2.UpdateReply:
        return await self._update(request)

    async def Exchange(
        self, requests: AsyncIterator[cache_pb2.ExchangeRequest], context: Any
    ) -> AsyncGenerator[cache_pb2.ExchangeReply, None]:
        boot_id, handlers = self._books.boot_id, self._handlers
        async for request in requests:
            if isinstance(request, Malformed):
                await refuse_malformed(request, context)
            yield await answer(request, handlers, boot_id)

    @answers
    async def Reset(self, request: cache_pb2.ResetRequest) -> cache_pb2.ResetReply:
        session = self._manager.session(request.session_id)
        namespace = self._manager.reset_session(session, request.weights_version)
        logger.info(
            "session %d was reset into namespace %d",
            session.number,
            namespace.number,
            extra=about(session.number, namespace.number),
        )
        _leave_out_of_collections()
        return cache_pb2.ResetReply(
            stamp=self._stamp(session), digest=namespace.digest, namespace_number=namespace.number
        )

    async def Watch(
        self, request: cache_pb2.WatchRequest, context: Any
    ) -> AsyncGenerator[cache_pb2.WatchEvent, None]:
        try:
            only = namespace_named(self._books, request.namespace) if request.namespace else None
            self._watching.check_room()
        except Refused as refused:
            await refuse(context, refused)
        async with contextlib.aclosing(self._watching.watch(only)) as events:
            async for event in events:
                yield event

    # Inside.

    def _stamp(self, session: Session | None) -> common_pb2.Stamp:
        namespace = session.namespace if session is not None else None
        return common_pb2.Stamp(
            boot_id=self._books.boot_id, generation=namespace.generation if namespace is not None else 0
        )

    def _stamp_on(self, stamp: common_pb2.Stamp, session: Session) -> None:
        """As `_stamp`, in a reply that has one already."""
        stamp.boot_id = self._books.boot_id
        if session.namespace is not None:
            stamp.generation = session.namespace.generation

    def _state(self) -> str:
        return f"SERVICE_STATE_{self._books.state.name}"

    def _end(self, number: SessionNumber, why: str) -> None:
        if number in self._books.sessions:
            pid = self._books.sessions[number].identity.pid
            quarantined = self._manager.end_session(number, why)
            logger.info(
                "session %d of pid %d ended: %s; %d slots quarantined",
                number,
                pid,
                why,
                quarantined,
                extra=about(session=number),
            )

    async def _lookup_without_session(self, request: cache_pb2.LookupRequest) -> cache_pb2.LookupReply:
        """What is stored, for routers: advice, which holds nothing and is no hit of any engine."""
        if request.session_id or request.pin:
            raise Refused(
                Code.INVALID_ARGUMENT,
                "a lookup names a session or a namespace, and only a session can pin; leave the other out",
            )
        namespace = namespace_named(self._books, request.namespace)
        asked = read_lookup(request, namespace)

        def ask(chain: ChainAsked, keys: bytes) -> ChainAnswer:
            return self._manager.reading.advise(namespace, chain.semantics, keys)

        reply = lookup_reply(asked, await answer_lookup(asked, ask, namespace.spec.layout.key_bytes, False))
        reply.stamp.boot_id, reply.stamp.generation = self._books.boot_id, namespace.generation
        return reply

    async def _touch(self, session: Session, chain: cache_pb2.Chain) -> None:
        """Tail first, so that the head ends up newest; others may have their turn in between."""
        check_chain(chain, self._books.namespace_of(session))
        step = _KEYS_PER_SLICE * max(1, chain.key_bytes)
        for start in reversed(range(0, len(chain.keys), step)):
            self._manager.reading.touch(session, chain.group, chain.keys[start : start + step])
            if len(chain.keys) > step:
                await asyncio.sleep(0)

    def _tell_soon(self, session: Session) -> None:
        if session.namespace is not None and session.namespace.events:
            self.events(session.namespace.number)

    def _run_chores(self) -> None:
        self._chores_run = False
        if self._books.run_chores():
            self.chores()

    def _tell_events(self) -> None:
        """Removed keys to the sessions of each namespace, everything to the watchers."""
        numbers, self._with_events = self._with_events, set()
        for number in numbers:
            namespace = self._books.namespaces.get(number)
            if namespace is None:
                continue
            events, lost = namespace.take_events()
            self._tell_sessions(namespace, events, lost)
            self._watching.tell(namespace, events, lost)

    def _tell_sessions(self, namespace: Namespace, events: list[KeyEvent], lost: bool) -> None:
        gone = [event.key for event in events if isinstance(event, Evicted)]
        size = namespace.spec.layout.key_bytes
        for number in namespace.sessions:
            stream = self._streams.get(SessionNumber(number))
            if stream is None:
                continue
            notice = cache_pb2.Notice(stamp=self._stamp(self._books.sessions.get(SessionNumber(number))))
            if lost:
                notice.resync.SetInParent()
                stream.put(notice)
            elif gone:
                notice.removed.keys = b"".join(gone)
                notice.removed.key_bytes = size
                stream.put(notice)


def _leave_out_of_collections() -> None:
    """A namespace has lists with an entry a chunk, which live as long as it does: without this, every full
    collection would go through them, a tenth of a second for millions of chunks."""
    gc.collect()
    gc.freeze()
