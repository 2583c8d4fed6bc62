"""kvhost.v1.Admin for programs: one method a call, typed, each with a deadline. For people there is `ctl`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from kvhost_client import probe
from kvhost_client.channel import named, open_channel, unary
from kvhost_client.errors import NotFound, Unavailable
from kvhost_client.paths import beside
from kvhost_proto.v1 import admin_pb2

_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)


class AdminClient:
    """A connection to a daemon's admin socket. Namespaces are named by number, or by the start of their
    digest in hex; empty is enough while there is only one.

    Every call raises `Unavailable`, `DeadlineExceeded`, `NotKVHost`, `Refused`, `NotFound`, `InvalidArgument`
    or `FailedPrecondition`. Calls that change nothing are tried a second time when the connection broke.
    """

    def __init__(self, socket: str | os.PathLike[str], deadline_s: float = 5.0) -> None:
        """`socket` is the daemon's first socket; the admin socket stands beside it. Connects when used."""
        self._path = beside(socket).admin
        self._deadline_s = deadline_s
        self._channel = open_channel(self._path)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up. A second call does nothing."""
        self._channel.close()

    def status(self) -> admin_pb2.StatusReply:
        """The daemon, its memory, and every counter."""
        return self._read("Status", admin_pb2.StatusRequest(), admin_pb2.StatusReply)

    def namespaces(self) -> Sequence[admin_pb2.NamespaceStatus]:
        """All namespaces."""
        request = admin_pb2.ListNamespacesRequest()
        return self._read("ListNamespaces", request, admin_pb2.ListNamespacesReply).namespaces

    def sessions(self) -> Sequence[admin_pb2.SessionStatus]:
        """All sessions, with the ended ones whose workers still owe a proof of their end."""
        request = admin_pb2.ListSessionsRequest()
        return self._read("ListSessions", request, admin_pb2.ListSessionsReply).sessions

    def lookup(self, keys: Sequence[str], namespace: str = "") -> Sequence[admin_pb2.ChunkStatus]:
        """The state of each key, given in hex."""
        request = admin_pb2.LookupChunksRequest(namespace=namespace, keys=keys)
        return self._read("LookupChunks", request, admin_pb2.LookupChunksReply).chunks

    def evict(
        self, keys: Sequence[str] = (), namespace: str = "", *, everything: bool = False
    ) -> admin_pb2.EvictReply:
        """Drops these chunks, or every one, that nobody holds."""
        request = admin_pb2.EvictRequest(namespace=namespace, keys=keys, all=everything)
        return self._change("Evict", request, admin_pb2.EvictReply)

    def reset(self, namespace: str = "") -> admin_pb2.ResetNamespaceReply:
        """Drops everything of one namespace and raises its generation."""
        request = admin_pb2.ResetNamespaceRequest(namespace=namespace)
        return self._change("ResetNamespace", request, admin_pb2.ResetNamespaceReply)

    def end_session(self, number: int) -> admin_pb2.EndSessionReply:
        """Ends a session; what its workers may still write is quarantined."""
        request = admin_pb2.EndSessionRequest(number=number)
        return self._change("EndSession", request, admin_pb2.EndSessionReply)

    def drain(self, *, resume: bool = False) -> admin_pb2.DrainReply:
        """Grants nothing from now on, or grants again."""
        return self._change("Drain", admin_pb2.DrainRequest(resume=resume), admin_pb2.DrainReply)

    def set_limits(
        self, namespace: str = "", *, floor_bytes: int | None = None, cap_bytes: int | None = None
    ) -> admin_pb2.SetLimitsReply:
        """Bounds of a namespace; None leaves one as it is, a cap of 0 removes it."""
        request = admin_pb2.SetLimitsRequest(
            namespace=namespace, floor_bytes=floor_bytes, cap_bytes=cap_bytes
        )
        return self._change("SetLimits", request, admin_pb2.SetLimitsReply)

    def resize_pool(self, nbytes: int) -> admin_pb2.ResizePoolReply:
        """Another size for the whole pool, until the daemon's end; `status` shows how far it is."""
        asked = admin_pb2.ResizePoolRequest(bytes=nbytes)
        return self._change("ResizePool", asked, admin_pb2.ResizePoolReply)

    def explain(
        self, keys: Sequence[str] = (), request: str = "", namespace: str = ""
    ) -> admin_pb2.ExplainReply:
        """What became of each chunk of a chain, given by its keys in hex or by the name of a request."""
        asked = admin_pb2.ExplainRequest(namespace=namespace, keys=keys, request=request)
        return self._read("Explain", asked, admin_pb2.ExplainReply)

    def pin(
        self, keys: Sequence[str] = (), request: str = "", namespace: str = ""
    ) -> admin_pb2.PinChunksReply:
        """Keeps these chunks, and what they build on, from being evicted."""
        asked = admin_pb2.PinChunksRequest(namespace=namespace, keys=keys, request=request)
        return self._change("PinChunks", asked, admin_pb2.PinChunksReply)

    def unpin(
        self, keys: Sequence[str] = (), request: str = "", namespace: str = "", *, everything: bool = False
    ) -> admin_pb2.UnpinChunksReply:
        """Lets go of these, or of all that was pinned by hand."""
        asked = admin_pb2.UnpinChunksRequest(namespace=namespace, keys=keys, request=request, all=everything)
        return self._change("UnpinChunks", asked, admin_pb2.UnpinChunksReply)

    def drop(self, namespace: str) -> admin_pb2.DropNamespaceReply:
        """Gives the segments of a namespace without sessions back to the pool."""
        asked = admin_pb2.DropNamespaceRequest(namespace=namespace)
        return self._change("DropNamespace", asked, admin_pb2.DropNamespaceReply)

    def check(self) -> admin_pb2.CheckIntegrityReply:
        """Verifies the daemon's own books."""
        request = admin_pb2.CheckIntegrityRequest()
        return self._read("CheckIntegrity", request, admin_pb2.CheckIntegrityReply)

    def health(self, service: str = "") -> str:
        """SERVING, NOT_SERVING or UNKNOWN, of the whole daemon or of one service ("liveness")."""
        check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = self._call(check, request, "Health/Check", tries=2)
        except NotFound as error:
            raise NotFound(
                f"kvhostd knows no health of {service!r}; it knows that of '' (all), 'liveness', "
                f"'kvhost.v1.Cache' and 'kvhost.v1.Admin'"
            ) from error
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    def _read(self, method: str, request: _Request, reply: type[_Reply]) -> _Reply:
        return self._call(unary(self._channel, "Admin", method, type(request), reply), request, method, 2)

    def _change(self, method: str, request: _Request, reply: type[_Reply]) -> _Reply:
        return self._call(unary(self._channel, "Admin", method, type(request), reply), request, method, 1)

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        what: str,
        tries: int,
    ) -> _Reply:
        probe.bound_name(
            self._path, self._deadline_s
        )  # says more clearly than gRPC why nobody can be reached
        while True:
            tries -= 1
            try:
                return method(request, timeout=self._deadline_s)
            except grpc.RpcError as failed:
                error = named(failed, self._path, what)
                if not isinstance(error, Unavailable):
                    raise error from failed
                if not tries:
                    raise (probe.foreign(self._path, self._deadline_s) or error) from failed
