"""Bytes that are no message: a typed refusal in one line, instead of a stack trace and UNKNOWN (I13)."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from inspect import isasyncgenfunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError

_OURS = "/kvhost.v1."


@dataclass(frozen=True)
class _Malformed:
    """Stands for a request that could not be read."""

    method: str


class TypedDecoding(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT where a request of kvhost's own services cannot be read."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        known = self._known.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith(_OURS):
            return handler
        self._known[method] = careful = _careful(handler, method)
        return careful


def _careful(handler: Any, method: str) -> Any:
    decode = handler.request_deserializer

    def deserialize(data: bytes) -> object:
        try:
            return decode(data)
        except DecodeError:
            return _Malformed(method)

    behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def call(request: object, context: Any) -> object:
        if isinstance(request, _Malformed):
            await _refuse(request, context)
        return await behaviour(request, context)

    async def stream(request: object, context: Any) -> AsyncGenerator[object, None]:
        if isinstance(request, _Malformed):
            await _refuse(request, context)
        async with aclosing(behaviour(request, context)) as replies:
            async for reply in replies:
                yield reply

    encode = handler.response_serializer
    if not handler.response_streaming:
        return grpc.unary_unary_rpc_method_handler(call, deserialize, encode)
    serve = stream if isasyncgenfunction(behaviour) else call
    return grpc.unary_stream_rpc_method_handler(serve, deserialize, encode)


async def _refuse(malformed: _Malformed, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"the bytes sent to {malformed.method} are no message of that method; use the protocol files",
    )
