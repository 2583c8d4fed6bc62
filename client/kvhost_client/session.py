"""The scheduler's calls to kvhostd, each with a deadline.

A session ends with its stream, with another boot id in any reply (I6), or by `close`. It is never revived:
`link` opens the next one. Calls that change something are sent once and never taken back: if the answer is
late, what it grants or pins is given back (I8).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvhost_client import calls
from kvhost_client.breaker import Breaker
from kvhost_client.channel import unary
from kvhost_client.connection import Connection, Method, OnEnd, OnNotice
from kvhost_client.errors import (
    BadReply,
    BreakerOpen,
    DeadlineExceeded,
    InvalidArgument,
    KVHostError,
    NotHeld,
    StaleStore,
)
from kvhost_client.types import (
    Abort,
    Answer,
    ChainQuery,
    Chunk,
    Declared,
    Found,
    ItemKind,
    Pin,
    PinId,
    Pong,
    Query,
    Rebased,
    Reserved,
    Semantics,
    ServiceState,
    Slot,
    StoreOf,
    Updated,
)
from kvhost_proto.v1 import cache_pb2, common_pb2

_INVALID_ARGUMENT = 3


class Session:
    """An open session. Every method may be called from any thread; none holds a lock while it waits.

    Each call takes `deadline_s`, seconds; without it the session's own applies. All raise `SessionEnded`
    (open another session), `DeadlineExceeded`, `Unavailable` (with the subclasses `BreakerOpen`, not sent,
    and `NotServing`), `InvalidArgument`, and `FailedPrecondition` before a namespace is declared.
    """

    def __init__(self, connection: Connection) -> None:
        """Use `open`."""
        self._connection = connection
        self.late_gifts = 0
        """Pins and grants that came too late to be used and were given back, so far."""
        channel = connection.channel
        self._ping = unary(channel, "Cache", "Ping", cache_pb2.PingRequest, cache_pb2.PingReply)
        self._declare = unary(
            channel,
            "Cache",
            "DeclareNamespace",
            cache_pb2.DeclareNamespaceRequest,
            cache_pb2.DeclareNamespaceReply,
        )
        self._lookup = Method(
            "lookup", unary(channel, "Cache", "Lookup", cache_pb2.LookupRequest, cache_pb2.LookupReply)
        )
        self._reserve = Method(
            "reserve", unary(channel, "Cache", "Reserve", cache_pb2.ReserveRequest, cache_pb2.ReserveReply)
        )
        self._update = Method(
            "update", unary(channel, "Cache", "Update", cache_pb2.UpdateRequest, cache_pb2.UpdateReply)
        )
        self._reset = unary(channel, "Cache", "Reset", cache_pb2.ResetRequest, cache_pb2.ResetReply)

    @classmethod
    def open(
        cls,
        socket: str | os.PathLike[str],
        *,
        instance_id: bytes,
        label: str,
        deadline_s: float = 1.0,
        on_notice: OnNotice | None = None,
        on_end: OnEnd | None = None,
        breaker: Breaker | None = None,
    ) -> Session:
        """Opens a session with the daemon at `socket` within `deadline_s`, also each call's default.

        `instance_id` has 16 bytes and is shared with the workers of the engine; `label` is for people.
        `on_notice` is called for every notice but the first, from the session's own thread; `on_end` once,
        with the reason, when the session ends, from whichever thread ends it. Keep both short. `breaker`
        learns from every call, and forbids calls while it is open.

        Raises `Unavailable`, `Refused`, `NotKVHost`, `VersionMismatch` or `DeadlineExceeded`, one sentence.
        """
        connection = Connection.open(
            socket,
            instance_id,
            label,
            deadline_s=deadline_s,
            breaker=breaker,
            on_notice=on_notice,
            on_end=on_end,
        )
        return cls(connection)

    @property
    def boot_id(self) -> int:
        """Random id of the daemon process (I6)."""
        return self._connection.boot_id

    @property
    def number(self) -> int:
        """Public number of the session; the worker's mapping asks for it."""
        return self._connection.number

    @property
    def state(self) -> ServiceState:
        """What the daemon does, as far as it has told."""
        return self._connection.state

    @property
    def generation(self) -> int:
        """Counter of the namespace's content (I6); 0 before a namespace was declared."""
        return self._connection.generation

    @property
    def ended(self) -> bool:
        """The session is over, for this process: also in a forked child."""
        return self._connection.ended

    @property
    def end_reason(self) -> str:
        """Why it is over, in one line; empty while it is not."""
        return self._connection.end_reason

    def close(self) -> None:
        """Ends the session: pins and grants go back, calls under way raise `SessionEnded`. Idempotent."""
        self._connection.close()

    def declare(
        self, spec: common_pb2.NamespaceSpec, tokens: Mapping[int, bytes], deadline_s: float | None = None
    ) -> Declared:
        """Names the session's namespace and, by rank, the tokens of the workers that may map it.

        May be repeated, with the same spec and new tokens, for workers that must attach again.
        """
        request = cache_pb2.DeclareNamespaceRequest(session_id=self._connection.session_id, spec=spec)
        for rank, token in sorted(tokens.items()):
            request.workers.add(rank=rank, token=token)
        reply = self._connection.call(self._declare, request, deadline_s, "DeclareNamespace")
        self._connection.enter_namespace(reply.stamp)
        return Declared(
            reply.digest,
            reply.namespace_number,
            reply.slot_bytes,
            reply.shard_stride,
            reply.slots_per_segment,
            reply.existed,
            reply.slots,
        )

    def lookup(
        self, queries: Iterable[Query], pin: bool = False, deadline_s: float | None = None
    ) -> list[Answer]:
        """Which keys are there, one answer a query. With `pin`, those that are are held: release each pin id.

        Long lists go in several calls under one deadline; pins of the first go back if a later one fails.
        """
        until = self._until(deadline_s)
        lookups = calls.Lookups(queries, pin)
        try:
            while (request := lookups.next_request(self._connection.session_id)) is not None:
                left = until - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded("Lookup: its deadline passed between two parts of a long list")
                late = self._unpin if pin else None
                lookups.add(self._connection.ask(self._lookup, request, left, "Lookup", late))
        except BadReply as error:
            self._connection.finish(str(error))
            raise
        except BaseException:
            self._give_back(releases=lookups.pin_ids())
            raise
        return lookups.answers()

    def reserve(
        self, count: int = 0, chunks: Sequence[Chunk] = (), deadline_s: float | None = None
    ) -> Reserved:
        """Takes slots to write into: `count` ahead, and one for each chunk that nobody has stored.

        Answers at once, with fewer when there is no room. At most 16,384 together. Raises `NotServing` while
        the daemon starts or drains.
        """
        if count < 0 or count + len(chunks) > calls.KEYS_PER_CALL:
            raise InvalidArgument(
                f"{count} slots ahead and {len(chunks)} for chunks were asked for; "
                f"0 to {calls.KEYS_PER_CALL} together are possible"
            )
        request = cache_pb2.ReserveRequest(
            session_id=self._connection.session_id,
            count=count,
            chunks=[calls.chunk_message(chunk) for chunk in chunks],
        )
        reply = self._connection.ask(self._reserve, request, deadline_s, "Reserve", self._ungrant)
        try:
            return calls.reserved(reply, count, len(chunks))
        except BadReply as error:
            self._connection.finish(str(error))
            raise

    def update(
        self,
        assigns: Iterable[StoreOf] = (),
        commits: Iterable[StoreOf] = (),
        aborts: Iterable[Abort] = (),
        releases: Iterable[int] = (),
        touches: Iterable[ChainQuery] = (),
        *,
        deadline_s: float | None = None,
        on_late: Callable[[Updated], None] | None = None,
    ) -> Updated:
        """Everything a step changed, in one message. An item that fails is an error of its own; others count.

        After `DeadlineExceeded` never send an update again: it is on its way, and takes effect when the
        daemon goes on, unless the session ends. `on_late` then gets the result, on a thread of gRPC.
        """
        until = self._until(deadline_s)
        result = Updated([], [])

        def late(reply: cache_pb2.UpdateReply) -> None:
            if on_late is not None:
                on_late(calls.updated(reply))

        items = calls.Items(assigns, commits, aborts, releases, touches)
        requests = calls.update_requests(self._connection.session_id, items)
        for place, request in enumerate(requests):
            left = until - time.monotonic()
            try:
                reply = self._connection.ask(self._update, request, left, "Update", late)
            except DeadlineExceeded:
                self._send(requests[place + 1 :])
                raise
            except BreakerOpen as error:
                if not place:
                    raise
                self._send(requests[place:])
                raise DeadlineExceeded("Update: kvhostd answered only a part of it in time") from error
            part = calls.updated(reply)
            result.errors.extend(part.errors)
            result.superseded.extend(part.superseded)
        return result

    def reset(self, weights_version: str = "", deadline_s: float | None = None) -> Rebased:
        """Leaves the namespace for a fresh one: the engine's weights changed (I12).

        After any error the old namespace must not be used either: close the session.
        """
        request = cache_pb2.ResetRequest(
            session_id=self._connection.session_id, weights_version=weights_version
        )
        reply = self._connection.call(self._reset, request, deadline_s, "Reset")
        self._connection.enter_namespace(reply.stamp)
        return Rebased(reply.digest, reply.namespace_number)

    def ping(self, deadline_s: float | None = None) -> Pong:
        """A round trip that does nothing."""
        reply = self._connection.ask_only(self._ping, cache_pb2.PingRequest(), deadline_s, "Ping")
        self._connection.note_state(reply.state)
        return Pong(reply.stamp.boot_id, self._connection.state, reply.populated)

    # One thing at a time, with errors of their own.

    def pin(
        self,
        group: int,
        keys: Sequence[bytes],
        semantics: Semantics = Semantics.PREFIX,
        deadline_s: float | None = None,
    ) -> list[Pin]:
        """Holds those of the keys that are there."""
        (answer,) = self.lookup([Query(0, [ChainQuery(group, semantics, keys)])], True, deadline_s)
        (result,) = answer.chains
        hits = [key for key, found in zip(keys, result.found, strict=False) if found == Found.HIT]
        held = zip(result.pin_ids, result.slots, hits, strict=True)
        return [Pin(PinId(pin_id), Slot(slot), key) for pin_id, slot, key in held]

    def release(self, pins: Iterable[Pin | int], deadline_s: float | None = None) -> None:
        """Gives pins back. Raises `NotHeld` if one is not held; the others are released all the same."""
        numbers = [pin.pin_id if isinstance(pin, Pin) else pin for pin in pins]
        _raise_first(self.update(releases=numbers, deadline_s=deadline_s), NotHeld)

    def assign(self, store_id: int, chunk: Chunk, deadline_s: float | None = None) -> None:
        """Says which chunk a slot taken ahead is being written with. Raises `StaleStore`."""
        _raise_first(self.update(assigns=[StoreOf(store_id, chunk)], deadline_s=deadline_s), StaleStore)

    def commit(self, store_id: int, chunk: Chunk, deadline_s: float | None = None) -> bool:
        """Publishes a slot that every rank has written (I2). False when somebody else's copy was first.

        Raises `StaleStore`: the grant is not held any more, and nothing was published.
        """
        result = self.update(commits=[StoreOf(store_id, chunk)], deadline_s=deadline_s)
        _raise_first(result, StaleStore)
        return store_id not in result.superseded

    def abort(
        self, store_id: int, unquiet_ranks: Sequence[int] = (), deadline_s: float | None = None
    ) -> None:
        """Gives a slot back unpublished; `unquiet_ranks` may still write it (I4). Raises `StaleStore`."""
        _raise_first(self.update(aborts=[Abort(store_id, unquiet_ranks)], deadline_s=deadline_s), StaleStore)

    # What came too late.

    def _until(self, deadline_s: float | None) -> float:
        return time.monotonic() + (self._connection.deadline_s if deadline_s is None else deadline_s)

    def _send(self, requests: Iterable[cache_pb2.UpdateRequest]) -> None:
        """What belongs to a call that took effect in part must follow it, even if nobody waits."""
        for request in requests:
            self._connection.send(self._update, request)

    def _unpin(self, reply: cache_pb2.LookupReply) -> None:
        self._give_back(releases=calls.pins_in(reply))

    def _ungrant(self, reply: cache_pb2.ReserveReply) -> None:
        self._give_back(aborts=calls.grants_in(reply))

    def _give_back(self, releases: Sequence[int] = (), aborts: Sequence[int] = ()) -> None:
        self.late_gifts += len(releases) + len(aborts)
        items = calls.Items(aborts=[Abort(store) for store in aborts], releases=releases)
        self._send(calls.update_requests(self._connection.session_id, items))


def _raise_first(result: Updated, stale: type[KVHostError]) -> None:
    """Raises for the first item error: `stale` unless the item was malformed."""
    for error in result.errors:
        if error.code == _INVALID_ARGUMENT or error.kind is ItemKind.TOUCH:
            raise InvalidArgument(error.message)
        raise stale(error.message)
