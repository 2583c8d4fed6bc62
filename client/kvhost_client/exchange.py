"""Questions of a session as messages of one stream (`Cache.Exchange`): a third of the cost of a call each.

Replies carry the number of their question, so that any thread may ask at any time. Whether the daemon knows
such a stream shows itself when it answers the first, empty message: until then, and with a daemon that does
not, every question is a call of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue

import grpc
from google.protobuf.message import Message

from kvhost_client.channel import both_ways
from kvhost_proto.v1 import cache_pb2

LARGEST_MESSAGE = 8 << 20
"""Larger questions are calls of their own: what is too large for gRPC must not end the stream."""

OnLate = Callable[[cache_pb2.ExchangeReply], None]


class Waiter:
    """Somebody who waits for one reply."""

    __slots__ = ("_wake", "number", "on_late", "reply", "waits")

    def __init__(self, number: int, on_late: OnLate | None, waits: bool) -> None:
        self.number = number
        self.on_late = on_late
        self.waits = waits
        self.reply: cache_pb2.ExchangeReply | None = None
        self._wake = threading.Lock()
        self._wake.acquire()

    def sleep(self, seconds: float) -> None:
        """Returns when there is a reply, the stream has ended, or the time is over."""
        self._wake.acquire(timeout=seconds)

    def wake(self) -> None:
        self._wake.release()


class Exchange:
    """One stream. Thread-safe."""

    def __init__(self, channel: grpc.Channel, on_end: Callable[[grpc.RpcError | None], None]) -> None:
        """`on_end` is called once, from the stream's own thread, when a stream that worked has ended."""
        self.ready = False
        """The daemon knows such streams, and this one has not ended."""
        self._on_end = on_end
        self._numbers = count(1)
        self._lock = threading.Lock()  # for a few instructions only
        self._waiting: dict[int, Waiter] = {}
        self._ended = False
        self._questions: SimpleQueue[cache_pb2.ExchangeRequest | None] = SimpleQueue()
        self._questions.put(cache_pb2.ExchangeRequest())
        call = both_ways(channel, "Cache", "Exchange", cache_pb2.ExchangeRequest, cache_pb2.ExchangeReply)
        self._replies = call(iter(self._questions.get, None))
        threading.Thread(target=self._listen, name="kvhost-replies", daemon=True).start()

    def ask(self, kind: str, question: Message, on_late: OnLate | None, waits: bool = True) -> Waiter | None:
        """Sends a question, without waiting; None when the stream has ended.

        A reply for which nobody waits (any more) goes to `on_late`, on the stream's thread.
        """
        message = cache_pb2.ExchangeRequest(id=next(self._numbers))
        getattr(message, kind).MergeFrom(question)
        waiter = Waiter(message.id, on_late, waits)
        with self._lock:
            if self._ended:
                return None
            self._waiting[message.id] = waiter
        self._questions.put(message)
        return waiter

    def wait(self, waiter: Waiter, seconds: float) -> cache_pb2.ExchangeReply | None:
        """The reply; None when the time is over, or the stream. From then on nobody waits for it."""
        try:
            waiter.sleep(max(seconds, 0.0))
        finally:  # the caller may have been interrupted
            with self._lock:
                waiter.waits = False
                reply = waiter.reply
        return reply

    @property
    def ended(self) -> bool:
        return self._ended

    def _listen(self) -> None:
        failed: grpc.RpcError | None = None
        worked = False
        try:
            for reply in self._replies:
                if worked:
                    self._deliver(reply)
                else:
                    worked = self.ready = True
        except grpc.RpcError as error:
            failed = error
        self.ready = False
        with self._lock:
            self._ended = True
            left = list(self._waiting.values())
            self._waiting.clear()
        self._questions.put(None)  # ends gRPC's thread that reads them
        for waiter in left:
            waiter.wake()
        if worked:
            self._on_end(failed)

    def _deliver(self, reply: cache_pb2.ExchangeReply) -> None:
        with self._lock:
            waiter = self._waiting.pop(reply.id, None)
            if waiter is None:
                return
            if waiter.waits:
                waiter.reply = reply
                waiter.wake()
                return
        if waiter.on_late is not None:
            waiter.on_late(reply)
