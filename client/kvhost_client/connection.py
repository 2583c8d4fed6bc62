"""The life of one session: ticket, channel, the stream it lives by, its end; and how a question is asked.

What is asked is in `session`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
from google.protobuf.message import Message

from kvhost_client import fork, handover, probe, version
from kvhost_client.breaker import Breaker
from kvhost_client.channel import named, named_status, open_channel, stream
from kvhost_client.errors import (
    BadReply,
    BreakerOpen,
    DeadlineExceeded,
    FailedPrecondition,
    KVHostError,
    NotFound,
    NotServing,
    SessionEnded,
    Unavailable,
    VersionMismatch,
)
from kvhost_client.exchange import LARGEST_MESSAGE, Exchange
from kvhost_client.paths import SocketPaths, beside
from kvhost_client.types import ServiceState
from kvhost_proto.v1 import cache_pb2, common_pb2

logger = logging.getLogger(__name__)

OnNotice = Callable[[cache_pb2.Notice], None]
OnEnd = Callable[[str], None]

_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)


@dataclass(frozen=True)
class Method(Generic[_Request, _Reply]):
    """One method, as a call of its own and as a kind of message on the stream for questions."""

    kind: str
    call: grpc.UnaryUnaryMultiCallable[_Request, _Reply]


_STATUS: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

_CLOSED = "it was closed"
_FORKED = "it belongs to the process that opened it, not to a forked child"

# A forked child must not run gRPC's clean-up for the parent's channels: they are kept here, untouched.
_left_behind: list[object] = []


class Connection:
    """One session's channel and stream. Thread-safe; holds no lock while it waits."""

    def __init__(
        self,
        path: str,
        deadline_s: float,
        breaker: Breaker | None,
        on_notice: OnNotice | None,
        on_end: OnEnd | None,
    ) -> None:
        """Use `open`."""
        self.path = path
        self.channel = open_channel(path)
        self.boot_id = 0
        self.number = 0
        self.session_id = b""
        self.state = ServiceState.UNSPECIFIED
        self.generation = 0
        self.deadline_s = deadline_s
        self._breaker = breaker
        self._on_notice = on_notice
        self._on_end = on_end
        self._pid = os.getpid()
        self._lock = threading.Lock()  # for a few instructions only
        self._namespaces = 0  # how often the namespace changed: stamps of earlier ones do not count
        self._reason = ""
        self._established = False
        self._failure: KVHostError | None = None
        self._opened = threading.Event()
        self._exchange: Exchange | None = None
        self._thread = threading.Thread(target=self._listen, name="kvhost-notices", daemon=True)
        with fork.guard:
            fork.watch(self)

    @classmethod
    def open(
        cls,
        socket: str | os.PathLike[str],
        instance_id: bytes,
        label: str,
        *,
        deadline_s: float,
        breaker: Breaker | None,
        on_notice: OnNotice | None,
        on_end: OnEnd | None,
    ) -> Connection:
        """Fetches a ticket and opens the session with it, within `deadline_s`."""
        until = time.monotonic() + deadline_s
        paths = beside(socket)
        ticket = _ticket(paths, instance_id, until)
        fork.watch_peer(probe.bound_name(paths.cache, until - time.monotonic()))
        connection = cls(paths.cache, deadline_s, breaker, on_notice, on_end)
        try:
            connection._begin(ticket, label, until)
        except BaseException:
            connection.close()
            raise
        if breaker is not None:
            breaker.success()
        return connection

    @property
    def ended(self) -> bool:
        """The session is over, for this process."""
        return bool(self._reason) or os.getpid() != self._pid

    @property
    def end_reason(self) -> str:
        """Why it is over, in one line; empty while it is not."""
        return _FORKED if os.getpid() != self._pid else self._reason

    def close(self) -> None:
        """Ends the session; calls under way raise `SessionEnded`. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self.finish(_CLOSED)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def abandon(self) -> None:
        """In a forked child: over, without a word to the daemon."""
        _left_behind.append(self)

    def finish(self, reason: str) -> None:
        """Ends the session, once; `on_end` is told if `open` had succeeded."""
        with self._lock:
            if self._reason:
                return
            self._reason = reason
            tell = self._established
        self.channel.close()  # cancels the stream and every call
        if tell and self._on_end is not None:
            try:
                self._on_end(reason)
            except Exception:
                logger.exception("on_end of session %d failed", self.number)

    # Asking.

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        deadline_s: float | None,
        what: str,
        late: Callable[[_Reply], None] | None = None,
    ) -> _Reply:
        """A call that changes something, sent once.

        gRPC gets no deadline, because a cancelled call may or may not have taken effect: when ours is over,
        the answer goes to `late`, on a thread of gRPC.
        """
        self._may_ask(what)
        namespace = self._namespaces
        try:
            call = method.future(request)
        except ValueError as closed:  # what gRPC raises for a channel that was closed
            raise self._over(what) from closed
        answered = False
        try:
            reply = call.result(self.deadline_s if deadline_s is None else max(deadline_s, 0.0))
            answered = True
        except grpc.FutureTimeoutError:
            error = DeadlineExceeded(f"kvhostd at {self.path} did not answer {what} in time")
            self._learn(error)
            raise error from None
        except grpc.FutureCancelledError:
            raise self._over(what) from None
        except grpc.RpcError as failed:
            answered = True
            raise self._failed(failed, what) from failed
        finally:
            if not answered:  # the deadline is over, or the caller was interrupted
                call.add_done_callback(lambda done: self._came_late(done, late))
        self._check(reply, namespace)
        return reply

    def ask(
        self,
        method: Method[_Request, _Reply],
        request: _Request,
        deadline_s: float | None,
        what: str,
        late: Callable[[_Reply], None] | None = None,
    ) -> _Reply:
        """A question that may change something, sent once: as `call`, but by the stream for questions where
        there is one."""
        stream = self._exchange
        if stream is None or not stream.ready or request.ByteSize() > LARGEST_MESSAGE:
            return self.call(method.call, request, deadline_s, what, late)
        self._may_ask(what)
        namespace = self._namespaces
        waiter = stream.ask(method.kind, request, lambda reply: self._reply_came_late(method, reply, late))
        if waiter is None:
            raise self._over(what)
        answer = stream.wait(waiter, self.deadline_s if deadline_s is None else deadline_s)
        if answer is None:
            if stream.ended or self.ended:
                raise self._over(what)
            error: KVHostError = DeadlineExceeded(f"kvhostd at {self.path} did not answer {what} in time")
            self._learn(error)
            raise error
        kind = answer.WhichOneof("kind")
        if kind == "refused":
            self._check(answer, namespace)
            raise self._refused(_status(answer.refused.code), answer.refused.message, what)
        if kind != method.kind:
            error = BadReply(f"kvhostd at {self.path} answered {what} with {kind or 'nothing'}")
            self.finish(str(error))
            raise error
        reply: _Reply = getattr(answer, method.kind)
        self._check(reply, namespace)
        return reply

    def ask_only(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        deadline_s: float | None,
        what: str,
    ) -> _Reply:
        """A call that changes nothing: it is cancelled when the deadline is over."""
        self._may_ask(what)
        namespace = self._namespaces
        try:
            reply = method(request, timeout=self.deadline_s if deadline_s is None else max(deadline_s, 0.001))
        except grpc.RpcError as failed:
            raise self._failed(failed, what) from failed
        except ValueError as closed:
            raise self._over(what) from closed
        self._check(reply, namespace)
        return reply

    def send(self, method: Method[_Request, _Reply], request: _Request) -> None:
        """A question whose answer is of no interest. Never waits."""
        if self.ended:
            return
        stream = self._exchange
        if stream is not None and stream.ready and request.ByteSize() <= LARGEST_MESSAGE:
            stream.ask(method.kind, request, None, waits=False)
            return
        try:
            call = method.call.future(request)
        except ValueError:  # the channel was closed meanwhile, and the session with it
            return
        # gRPC cancels a call that nobody refers to; the callback refers to it until its end.
        call.add_done_callback(lambda done: None)

    def enter_namespace(self, stamp: common_pb2.Stamp) -> None:
        """The session has another namespace from here on; its generations are not those of the last one."""
        with self._lock:
            self._namespaces += 1
            self.generation = stamp.generation

    def note_state(self, value: int) -> None:
        """The daemon said what it does."""
        try:
            self.state = ServiceState(value)
        except ValueError:
            self.state = ServiceState.UNSPECIFIED

    def _may_ask(self, what: str) -> None:
        if self.ended:
            raise self._over(what)
        if self._breaker is not None and not self._breaker.allow():
            raise BreakerOpen(f"{what} was not sent: kvhostd at {self.path} did not answer a moment ago")

    def _over(self, what: str) -> SessionEnded:
        return SessionEnded(
            f"{what}: session {self.number} is over: {self.end_reason or 'its channel closed'}"
        )

    def _failed(self, failed: grpc.RpcError, what: str) -> KVHostError:
        return self._refused(failed.code(), failed.details() or "", what)

    def _refused(self, code: grpc.StatusCode, details: str, what: str) -> KVHostError:
        if self.ended:
            return self._over(what)
        error = named_status(code, details, self.path, what)
        if isinstance(error, NotFound):  # the daemon does not know this session (any more)
            self.finish(str(error))
            error = self._over(what)
        elif type(error) is Unavailable and self.state in (ServiceState.STARTING, ServiceState.DRAINING):
            error = NotServing(str(error))
        self._learn(error)
        return error

    def _learn(self, error: KVHostError) -> None:
        if self._breaker is not None:
            self._breaker.failure(error)

    def _check(self, reply: Message, namespace: int) -> None:
        """Every reply says whose it is (I6)."""
        if self._breaker is not None:
            self._breaker.success()
        stamp: common_pb2.Stamp = reply.stamp  # type: ignore[attr-defined]
        if stamp.boot_id != self.boot_id:
            self.finish(f"another daemon answers: boot {stamp.boot_id:016x}, was {self.boot_id:016x}")
            raise self._over("the answer")
        with self._lock:
            if namespace == self._namespaces:
                self.generation = max(self.generation, stamp.generation)

    def _came_late(self, call: grpc.Future[_Reply], late: Callable[[_Reply], None] | None) -> None:
        """An answer that nobody waits for any more."""
        if call.cancelled() or call.exception() is not None or self.ended:
            return
        if self._breaker is not None:
            self._breaker.success()
        reply = call.result()
        if reply.stamp.boot_id == self.boot_id and late is not None:  # type: ignore[attr-defined]
            late(reply)

    def _reply_came_late(
        self,
        method: Method[_Request, _Reply],
        answer: cache_pb2.ExchangeReply,
        late: Callable[[_Reply], None] | None,
    ) -> None:
        if self.ended:
            return
        if self._breaker is not None:
            self._breaker.success()
        if answer.stamp.boot_id == self.boot_id and late is not None and answer.HasField(method.kind):
            late(getattr(answer, method.kind))

    def _exchange_ended(self, failed: grpc.RpcError | None) -> None:
        """Nobody knows what became of the questions on their way: the end of the session settles it (I7)."""
        why = "" if failed is None else failed.details() or named(failed, self.path, "Exchange")
        self.finish(f"kvhostd closed its stream for questions: {why or 'no reason given'}")

    # The stream.

    def _begin(self, ticket: handover.Ticket, label: str, until: float) -> None:
        open_session = stream(
            self.channel, "Cache", "OpenSession", cache_pb2.OpenSessionRequest, cache_pb2.Notice
        )
        self._notices = open_session(
            cache_pb2.OpenSessionRequest(ticket=ticket.ticket, version=version.own(), label=label)
        )
        self._thread.start()
        if not self._opened.wait(max(0.0, until - time.monotonic())):
            raise DeadlineExceeded(f"kvhostd at {self.path} did not open a session in time")
        if self._failure is not None:
            raise self._failure
        if self.boot_id != ticket.boot_id:
            raise Unavailable(f"kvhostd at {self.path} was restarted while the session was opened")
        with self._lock:
            self._established = not self._reason
        if not self._established:
            raise Unavailable(f"kvhostd at {self.path} ended the session at once: {self._reason}")
        try:
            self._exchange = Exchange(self.channel, self._exchange_ended)
        except ValueError as closed:  # the channel was closed meanwhile, and the session with it
            raise Unavailable(f"kvhostd at {self.path} ended the session at once: {self._reason}") from closed

    def _listen(self) -> None:
        reason = "kvhostd closed its stream"
        try:
            for notice in self._notices:
                self._hear(notice)
        except grpc.RpcError as failed:
            error = named(failed, self.path, "OpenSession")
            if not self._opened.is_set():
                foreign = isinstance(error, FailedPrecondition)
                self._failure = VersionMismatch(str(error)) if foreign else error
            reason = failed.details() or str(error)
        except KVHostError as error:
            self._failure = error
            reason = str(error)
        self.finish(reason)
        self._opened.set()

    def _hear(self, notice: cache_pb2.Notice) -> None:
        kind = notice.WhichOneof("kind")
        if not self._opened.is_set():
            if kind != "opened":
                raise BadReply(f"kvhostd at {self.path} began a session with {kind}, not with opened")
            version.check(notice.opened.version, self.path)
            self.boot_id = notice.stamp.boot_id
            self.number = notice.opened.number
            self.session_id = notice.opened.session_id
            self.note_state(notice.opened.state)
            self._opened.set()
            return
        if notice.stamp.boot_id != self.boot_id:
            raise BadReply(
                f"a notice of boot {notice.stamp.boot_id:016x} in a session of {self.boot_id:016x}"
            )
        if kind == "state":
            self.note_state(notice.state.state)
        if self._on_notice is not None:
            try:
                self._on_notice(notice)
            except Exception:
                logger.exception("on_notice of session %d failed", self.number)


def _status(code: int) -> grpc.StatusCode:
    return _STATUS.get(code, grpc.StatusCode.UNKNOWN)


def _ticket(paths: SocketPaths, instance_id: bytes, until: float) -> handover.Ticket:
    try:
        return handover.fetch_ticket(paths.handover, instance_id, until - time.monotonic())
    except Unavailable:
        if os.path.exists(paths.handover):
            raise
        why = f"without a handover socket ({paths.handover}); is this the first socket of a kvhostd?"
        other = probe.foreign(paths.cache, until - time.monotonic(), but=why)
        if other is not None:
            raise other from None
        raise
