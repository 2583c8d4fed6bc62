"""What this engine believes the daemon has: keys stored, keys removed, and the events that follow from it.

A belief saves a store, or makes a request ask for a pin; only the pin proves it (I3).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from vllm.v1.kv_offload.base import OffloadingEvent

from kvhost_connector.events import EventLog
from kvhost_connector.orders import News, NewsKind
from kvhost_connector.requests import RequestView, StoredKeys

# So many removed keys are remembered, to store nothing that builds on them.
_REMOVED_LIMIT = 1 << 16


class Beliefs:
    """Wire keys only."""

    def __init__(self, *, events: bool) -> None:
        """`events`: keep what KV events need."""
        self._stored = StoredKeys()
        # Keys that were removed and not stored again, and how often this changed.
        self._removed = StoredKeys(_REMOVED_LIMIT)
        self._changes = 0
        self._events = EventLog(events)

    @property
    def stored(self) -> Container[bytes]:
        """The chunks that are believed to be there."""
        return self._stored.keys

    def found(self, wires: Iterable[bytes]) -> None:
        """A lookup saw these."""
        known = list(wires)
        self._stored.add_all(known)
        self._restored(known)

    def missed(self, wire: bytes) -> None:
        """A pin did not find this one."""
        self._stored.discard(wire)

    def storing(self, own_by_wire: Mapping[bytes, bytes]) -> None:
        """These are being stored: what builds on them may be, too. The values are vLLM's own keys."""
        self._restored(own_by_wire)
        self._events.learn(own_by_wire)

    def mark_cuts(self, view: RequestView) -> None:
        """Brings up to date where the chains of a request are cut by removals."""
        view.find_cuts(self._removed, self._changes)

    def absorb(self, news: Iterable[News]) -> bool:
        """Takes news in. True when what is on its way must not take effect any more."""
        stale = False
        for entry in news:
            if entry.kind is NewsKind.STORED:
                self.found(entry.keys)
                self._events.stored(entry.keys)
            elif entry.kind is NewsKind.REMOVED:
                self._changes += 1
                for wire in entry.keys:
                    self._stored.discard(wire)
                    self._removed.add(wire)
                self._events.removed(entry.keys)
            else:
                stale = stale or entry.kind is NewsKind.STALE
                self.forget()
        return stale

    def forget(self) -> None:
        """Nothing is believed any more."""
        self._stored.clear()
        self._removed.clear()
        self._changes += 1
        self._events.all_removed()

    def take_events(self) -> list[OffloadingEvent]:
        return self._events.take()

    def _restored(self, wires: Iterable[bytes]) -> None:
        if not len(self._removed):
            return
        for wire in wires:
            if wire in self._removed:
                self._removed.discard(wire)
                self._changes += 1
