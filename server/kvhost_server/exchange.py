"""Many calls of a session as messages of one stream: a third of the processor time of a call each.

What is asked is worked through in order, one after the other, and each message gets one reply. Nothing is
remembered of the stream: its end changes nothing, the session lives by its own (`OpenSession`).
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvhost_proto.v1 import cache_pb2
from kvhost_server.errors import Code, Refused
from kvhost_server.wire import LONGEST_REFUSAL

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Awaitable[Any]]
"""Answers one message of a kind, or raises `Refused`."""


async def answer(
    request: cache_pb2.ExchangeRequest, handlers: Mapping[str, Handler], boot_id: int
) -> cache_pb2.ExchangeReply:
    """The reply to one message. `handlers` are by the names of the message's kinds."""
    kind = request.WhichOneof("kind")
    reply = cache_pb2.ExchangeReply(id=request.id)
    reply.stamp.boot_id = boot_id
    if kind is None:
        return reply
    try:
        getattr(reply, kind).MergeFrom(await handlers[kind](getattr(request, kind)))
    except Refused as refused:
        _refuse(reply, refused.code, refused.message)
    except Exception as error:
        # As with a call that fails: the others on this stream are none the worse for it.
        logger.exception("a message of kind %s failed", kind)
        _refuse(reply, Code.UNKNOWN, f"{type(error).__name__} in the daemon; see its log")
    return reply


def _refuse(reply: cache_pb2.ExchangeReply, code: Code, message: str) -> None:
    reply.refused.code, reply.refused.message = code, message[:LONGEST_REFUSAL]
