"""Watch streams: stored and removed keys for routers, in bounded queues that start anew and do not grow."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator

from kvhost_proto.v1 import cache_pb2, common_pb2
from kvhost_server.books import Books
from kvhost_server.errors import Code, Refused
from kvhost_server.ids import ChunkKey, NamespaceNumber
from kvhost_server.namespace import Namespace
from kvhost_server.notices import Cleared, Evicted, KeyEvent, Stored
from kvhost_server.wire import pack

MAX_WATCHERS = 256
_MAX_QUEUED_EVENTS = 4096
_MAX_QUEUED_KEY_BYTES = 16 << 20
_KEYS_PER_EVENT = 1024


class Watching:
    """All Watch streams of the daemon.

    Args:
        books: what is watched.
        drops: counts under "watch_events" how often a stream that was read too slowly had to start anew.
    """

    def __init__(self, books: Books, drops: Counter[str]) -> None:
        self._books = books
        self._drops = drops
        self._watchers: set[_Watcher] = set()

    def check_room(self) -> None:
        """Whether one more may watch.

        Raises:
            Refused: as many watch as may.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise Refused(Code.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watches are open, which is the limit")

    async def watch(self, only: Namespace | None) -> AsyncGenerator[cache_pb2.WatchEvent, None]:
        """What one stream tells, without end: of one namespace, or of all."""
        watcher = _Watcher(only.number if only else None, self._drops)
        self._watchers.add(watcher)
        try:
            for namespace in [only] if only else list(self._books.namespaces.values()):
                watcher.gaps.add(namespace.number)
            while True:
                while watcher.gaps:
                    known = self._books.namespaces.get(watcher.gaps.pop())
                    # Made page by page; events since it began stand in the queue.
                    for event in self._snapshot(known) if known is not None else ():
                        yield watcher.numbered(event)
                following = await watcher.next()
                if following is not None:
                    yield watcher.numbered(following)
        finally:
            self._watchers.discard(watcher)

    def tell(self, namespace: Namespace, events: list[KeyEvent], lost: bool) -> None:
        """What happened in a namespace; `lost`: and before that something nobody kept."""
        for watcher in self._watchers:
            if watcher.only in (None, namespace.number):
                if lost or any(isinstance(event, Cleared) for event in events):
                    watcher.lost(namespace.number)
                else:
                    watcher.put(namespace.number, self._watch_events(namespace, events))

    def _watch_events(self, namespace: Namespace, events: list[KeyEvent]) -> list[cache_pb2.WatchEvent]:
        """Consecutive events of one kind as one message."""
        told: list[cache_pb2.WatchEvent] = []
        run: list[KeyEvent] = []
        for event in [*events, Cleared()]:
            if run and (type(event) is not type(run[0]) or len(run) >= _KEYS_PER_EVENT):
                told.append(self._watch_event(namespace, run))
                run = []
            run.append(event)
        return told

    def _watch_event(self, namespace: Namespace, run: list[KeyEvent]) -> cache_pb2.WatchEvent:
        event = self._event(namespace)
        stored = [(e.key, e.parent) for e in run if isinstance(e, Stored)]
        if stored:
            self._fill(event, namespace, stored)
        else:
            event.removed.key_bytes = namespace.spec.layout.key_bytes
            event.removed.keys = b"".join(e.key for e in run if isinstance(e, Evicted))
        return event

    def _snapshot(self, namespace: Namespace) -> Iterator[cache_pb2.WatchEvent]:
        """A gap, all keys there are when it begins, and a mark that this was all."""
        pages = namespace.table.pages(_KEYS_PER_EVENT)
        gap = self._event(namespace)
        gap.gap.SetInParent()
        yield gap
        for page in pages:
            yield self._fill(self._event(namespace), namespace, page)
        synced = self._event(namespace)
        synced.synced.SetInParent()
        yield synced

    def _fill(
        self,
        event: cache_pb2.WatchEvent,
        namespace: Namespace,
        stored: list[tuple[ChunkKey, ChunkKey | None]],
    ) -> cache_pb2.WatchEvent:
        size = namespace.spec.layout.key_bytes
        event.stored.key_bytes = size
        event.stored.keys = pack((key for key, _ in stored), size)
        event.stored.parents = pack((parent for _, parent in stored), size)
        return event

    def _event(self, namespace: Namespace) -> cache_pb2.WatchEvent:
        stamp = common_pb2.Stamp(boot_id=self._books.boot_id, generation=namespace.generation)
        return cache_pb2.WatchEvent(stamp=stamp, namespace_number=namespace.number)


class _Watcher:
    """One Watch stream. When its queue runs full, the namespaces in it start anew with a gap."""

    def __init__(self, only: NamespaceNumber | None, drops: Counter[str]) -> None:
        self.only = only
        self._drops = drops
        self.gaps: set[NamespaceNumber] = set()
        self._events: deque[tuple[NamespaceNumber, cache_pb2.WatchEvent]] = deque()
        self._bytes = 0
        self._sequences: Counter[int] = Counter()
        self._wake = asyncio.Event()

    def put(self, namespace: NamespaceNumber, events: list[cache_pb2.WatchEvent]) -> None:
        if namespace in self.gaps:
            return  # a snapshot will tell
        more = sum(map(_key_bytes, events))
        if len(self._events) + len(events) > _MAX_QUEUED_EVENTS or self._bytes + more > _MAX_QUEUED_KEY_BYTES:
            self._drops["watch_events"] += 1
            self.lost(namespace)
            return
        self._bytes += more
        self._events.extend((namespace, event) for event in events)
        self._wake.set()

    def lost(self, namespace: NamespaceNumber) -> None:
        self.gaps.add(namespace)
        self._events = deque((n, e) for n, e in self._events if n != namespace)
        self._bytes = sum(_key_bytes(event) for _, event in self._events)
        self._wake.set()

    def numbered(self, event: cache_pb2.WatchEvent) -> cache_pb2.WatchEvent:
        """The event with its number among those of its namespace on this stream: one more each time."""
        self._sequences[event.namespace_number] += 1
        event.sequence = self._sequences[event.namespace_number]
        return event

    async def next(self) -> cache_pb2.WatchEvent | None:
        """The next event; None when a snapshot is due first."""
        while not self._events and not self.gaps:
            self._wake.clear()
            await self._wake.wait()
        if self.gaps:
            return None
        _, event = self._events.popleft()
        self._bytes -= _key_bytes(event)
        return event


def _key_bytes(event: cache_pb2.WatchEvent) -> int:
    return len(event.stored.keys) + len(event.stored.parents) + len(event.removed.keys)
