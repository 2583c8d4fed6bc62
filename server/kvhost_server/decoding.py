"""Around every call of kvhost's own services: bytes that are no message get a typed refusal in one line,
instead of a stack trace and UNKNOWN (I13); the others are measured.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from inspect import isasyncgenfunction
from time import perf_counter
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvhost_server.measures import CANCELLED, CallMeasure, Measures

_OURS = "/kvhost.v1."


@dataclass(frozen=True)
class Malformed:
    """Stands for a request that could not be read. A handler of a stream of requests must look for it."""

    method: str


class TypedDecoding(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT where a request of kvhost's own services cannot be read; measures the others.

    Args:
        measures: takes how long each call took, and how it failed.
    """

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
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
        measure = self._measures.of(method)
        if measure is None:
            return handler
        self._known[method] = careful = _careful(handler, method, measure)
        return careful


def _careful(handler: Any, method: str, measure: CallMeasure) -> Any:
    decode = handler.request_deserializer

    def deserialize(data: bytes) -> object:
        try:
            return decode(data)
        except DecodeError:
            return Malformed(method)

    behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def call(request: object, context: Any) -> object:
        began = perf_counter()
        try:
            if isinstance(request, Malformed):
                await refuse_malformed(request, context)
            return await behaviour(request, context)
        except BaseException as error:
            measure.failed(_code_of(error, context))
            raise
        finally:
            measure.seconds.observe(perf_counter() - began)

    async def stream(request: object, context: Any) -> AsyncGenerator[object, None]:
        try:
            if isinstance(request, Malformed):
                await refuse_malformed(request, context)
            async with aclosing(behaviour(request, context)) as replies:
                async for reply in replies:
                    yield reply
        except Exception as error:
            measure.failed(_code_of(error, context))
            raise

    encode = handler.response_serializer
    if handler.request_streaming:
        # It looks at what it reads, and measures it, itself: a wrapper would cost something for each message.
        return grpc.stream_stream_rpc_method_handler(handler.stream_stream, deserialize, encode)
    if not handler.response_streaming:
        return grpc.unary_unary_rpc_method_handler(call, deserialize, encode)
    serve = stream if isasyncgenfunction(behaviour) else call
    return grpc.unary_stream_rpc_method_handler(serve, deserialize, encode)


def _code_of(error: BaseException, context: Any) -> int:
    """The gRPC status that a failed call ends with."""
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    code = context.code()
    return int(code.value[0] if isinstance(code, grpc.StatusCode) else code or 0)


async def refuse_malformed(malformed: Malformed, context: Any) -> None:
    """Ends the call, or the stream that the bytes came by."""
    await context.abort(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"the bytes sent to {malformed.method} are no message of that method; use the protocol files",
    )
