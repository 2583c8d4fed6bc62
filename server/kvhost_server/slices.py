"""Long calls in slices: a call that takes or publishes thousands of slots lets others have their turn.

In between a session may end; then its grants are what its end makes of them, and the rest of the call is
refused (I5).
"""

import asyncio
from collections.abc import Sequence

from kvhost_server.checks import ChunkRequest
from kvhost_server.errors import Refused
from kvhost_server.ids import StoreId
from kvhost_server.manager import Manager
from kvhost_server.sessions import Session
from kvhost_server.writing import Reservation, ReserveStatus

ITEMS_PER_SLICE = 512
"""Of slots taken or chunks published, each of which may evict another: some milliseconds."""


async def others_first(manager: Manager, secret: bytes) -> Session:
    """Lets everybody else have their turn.

    Raises:
        Refused: the session has ended meanwhile.
    """
    await asyncio.sleep(0)
    return manager.session(secret)


async def reserve(manager: Manager, secret: bytes, count: int, chunks: Sequence[ChunkRequest]) -> Reservation:
    """As `Writing.reserve`, in slices. Everything is checked before anything is granted.

    Raises:
        Refused: no such session, no namespace, a chunk that is none of it, or the daemon does not serve.
    """
    session = manager.session(secret)
    if count + len(chunks) <= ITEMS_PER_SLICE:
        return manager.writing.reserve(session, count, chunks)
    manager.writing.check(session, chunks)
    parts = [(0, chunks[at : at + ITEMS_PER_SLICE]) for at in range(0, len(chunks), ITEMS_PER_SLICE)]
    parts += [(min(ITEMS_PER_SLICE, count - at), ()) for at in range(0, count, ITEMS_PER_SLICE)]
    total = Reservation([], [], False, "")
    for place, (ahead, named) in enumerate(parts):
        if place:
            session = await others_first(manager, secret)
        try:
            part = manager.writing.reserve(session, ahead, named)
        except Refused as refused:
            if not place:
                raise
            # It drains since: what was granted before stays granted, and must be told.
            total = total.and_then(Reservation([], [], False, refused.message))
            break
        total = total.and_then(part)
        if len(part.grants) < ahead:
            break
    missing = len(chunks) - len(total.chunks)
    nothing = (ReserveStatus.NO_SPACE, StoreId(0), 0)
    return total.and_then(Reservation([], [nothing] * missing, False, ""))
