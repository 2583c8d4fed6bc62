"""KV events of stored and removed chunks, in vLLM's keys (contract 17).

Only what this engine announced is ever retracted: a router that listens to one engine need not hear of
chunks that another one stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadKey

from kvhost_connector.requests import StoredKeys

_LIMIT = 1 << 20


class EventLog:
    """Events since the last time vLLM took them. Keeps nothing when events are off."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._announced = StoredKeys(_LIMIT)
        # Keys of requests with adapters are others on the wire.
        self._own: dict[bytes, bytes] = {}
        self._pending: list[OffloadingEvent] = []

    def learn(self, own_by_wire: Mapping[bytes, bytes]) -> None:
        """vLLM's keys of chunks that will be announced under their wire keys."""
        if self._enabled:
            self._own.update((wire, own) for wire, own in own_by_wire.items() if wire != own)

    def stored(self, wires: Iterable[bytes]) -> None:
        """These chunks can be loaded from now on, whoever wrote them first."""
        if not self._enabled:
            return
        keys = list(wires)
        for wire in keys:
            self._announced.add(wire)
        self._add([self._own.get(wire, wire) for wire in keys], removed=False)

    def removed(self, wires: Iterable[bytes]) -> None:
        """These chunks are gone."""
        if self._enabled:
            gone = [wire for wire in wires if wire in self._announced]
            for wire in gone:
                self._announced.discard(wire)
            self._add([self._own.pop(wire, wire) for wire in gone], removed=True)

    def all_removed(self) -> None:
        """Nothing that was announced can be relied on any more."""
        if self._enabled:
            self._add([self._own.pop(wire, wire) for wire in self._announced.clear()], removed=True)

    def take(self) -> list[OffloadingEvent]:
        """Events since the last call, in order."""
        events, self._pending = self._pending, []
        return events

    def _add(self, keys: list[bytes], *, removed: bool) -> None:
        if keys:
            own = [OffloadKey(key) for key in keys]
            self._pending.append(OffloadingEvent(keys=own, medium=Medium.CPU, removed=removed))
