"""gRPC as kvhost uses it: one way to open a channel, one to make calls, one to name errors.

Options matter here: a proxy of the environment must not be used, a channel must not inherit the back-off of
an earlier one, and pings are not sent (a server may take them for abuse, F12).
"""

from __future__ import annotations

from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kvhost_client import version
from kvhost_client.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KVHostError,
    NotFound,
    NotKVHost,
    Refused,
    SessionEnded,
    Unavailable,
)
from kvhost_client.paths import grpc_target

MESSAGE_LIMIT = 16 << 20


_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)


def open_channel(path: str) -> grpc.Channel:
    """A channel to the socket at `path`. Connects when first used; nothing is retried by itself."""
    options: list[tuple[str, Any]] = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", MESSAGE_LIMIT),
        ("grpc.max_receive_message_length", MESSAGE_LIMIT),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.primary_user_agent", version.program().replace(" ", "/")),
    ]
    return grpc.insecure_channel(grpc_target(path), options=options)


def unary(
    channel: grpc.Channel, service: str, method: str, request: type[_Request], reply: type[_Reply]
) -> grpc.UnaryUnaryMultiCallable[_Request, _Reply]:
    """A method with one request and one reply."""
    return channel.unary_unary(
        f"/kvhost.v1.{service}/{method}",
        request_serializer=request.SerializeToString,
        response_deserializer=reply.FromString,
    )


def stream(
    channel: grpc.Channel, service: str, method: str, request: type[_Request], reply: type[_Reply]
) -> grpc.UnaryStreamMultiCallable[_Request, _Reply]:
    """A method with one request and many replies."""
    return channel.unary_stream(
        f"/kvhost.v1.{service}/{method}",
        request_serializer=request.SerializeToString,
        response_deserializer=reply.FromString,
    )


def both_ways(
    channel: grpc.Channel, service: str, method: str, request: type[_Request], reply: type[_Reply]
) -> grpc.StreamStreamMultiCallable[_Request, _Reply]:
    """A method with many requests and many replies."""
    return channel.stream_stream(
        f"/kvhost.v1.{service}/{method}",
        request_serializer=request.SerializeToString,
        response_deserializer=reply.FromString,
    )


def named(error: grpc.RpcError, path: str, what: str) -> KVHostError:
    """The error of a call as one of ours. `what` is the call, for people."""
    return named_status(error.code(), error.details() or "", path, what)


def named_status(code: grpc.StatusCode, details: str, path: str, what: str) -> KVHostError:
    """The same for a status that came in another way."""
    details = (details or "no reason given").replace("\n", " ")
    sentence = f"{what}: {details}"
    if code is grpc.StatusCode.UNAVAILABLE:
        if "http1" in details.lower() or "http2 settings" in details.lower():
            return NotKVHost(f"{path} answers, but not as a kvhostd ({details})")
        return Unavailable(f"kvhostd at {path} is not available for {sentence}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"kvhostd at {path} did not answer {what} in time")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return NotKVHost(f"{path} answers, but knows no {what}: it is another server, or a kvhostd too old")
    simple: dict[grpc.StatusCode, type[KVHostError]] = {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
        grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidArgument,
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
        grpc.StatusCode.CANCELLED: SessionEnded,
        grpc.StatusCode.ABORTED: SessionEnded,
    }
    if code in simple:
        return simple[code](sentence)
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return Refused(sentence, code.value[0])
    return Unavailable(f"kvhostd at {path} failed in {sentence} ({code.name})")
