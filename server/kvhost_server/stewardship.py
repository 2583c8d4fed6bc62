"""What people do to namespaces: find one by name, drop its content, evict by hand, bound its size."""

from collections.abc import Iterator, Sequence

from kvhost_server.attachment import Attachment
from kvhost_server.books import Books
from kvhost_server.errors import Code, Refused
from kvhost_server.fates import Cause
from kvhost_server.ids import ChunkKey, SessionNumber
from kvhost_server.namespace import Namespace
from kvhost_server.notices import Resync


def namespace_named(books: Books, name: str) -> Namespace:
    """The namespace of this number or start of digest; of no name when there is just one.

    Raises:
        Refused: none, or more than one.
    """
    every = list(books.namespaces.values())
    if not name and len(every) == 1:
        return every[0]
    found = [n for n in every if name and (str(n.number) == name or n.digest.hex().startswith(name.lower()))]
    exact = [n for n in found if str(n.number) == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    known = ", ".join(f"{n.number} ({n.digest.hex()[:12]})" for n in every[:8]) or "none"
    asked = (
        f"namespace {name!r} matches {len(found)}"
        if name
        else f"no namespace was named and there are {len(every)}"
    )
    raise Refused(Code.NOT_FOUND, f"{asked}; known: {known}")


def reset_namespace(books: Books, namespace: Namespace) -> int:
    """Drops all chunks of a namespace at once and raises its generation. Returns how many."""
    namespace.generation += 1
    table = namespace.table
    old = table.forget_all()
    books.writing[namespace.number].clear()
    namespace.cleared()
    books.outbox.events(namespace.number)
    for number in namespace.sessions:
        books.outbox.notice(SessionNumber(number), Resync())

    def discard() -> Iterator[None]:
        while old:
            key, slot = old.popitem()
            table.discard(slot, key)
            yield

    books.add_chore(discard())
    books.fates.reset(namespace.number, len(old))
    return len(old)


def evict(books: Books, namespace: Namespace, keys: Sequence[ChunkKey]) -> tuple[int, int, int]:
    """Drops those of these chunks that nobody holds. Returns (evicted, held, absent)."""
    table = namespace.table
    evicted = held = absent = 0
    for key in keys:
        slot = table.index.get(key)
        if slot is None:
            absent += 1
        elif table.evictable(slot):
            with books.fates.because(Cause.OPERATOR):
                table.evict(slot)
            evicted += 1
        else:
            held += 1
    books.tell_evictions(namespace)
    return evicted, held, absent


def set_limits(
    books: Books,
    attachment: Attachment,
    namespace: Namespace,
    floor_bytes: int | None,
    cap_bytes: int | None,
) -> None:
    """Bounds of a namespace in whole segments, rounded up. What is above the cap and not held goes at once.

    Raises:
        Refused: a floor above the cap or above the pool.
    """
    size = books.lending.segment_bytes
    floor = namespace.floor if floor_bytes is None else -(-floor_bytes // size)
    cap = namespace.cap if cap_bytes is None else -(-cap_bytes // size)
    total = len(books.lending.states)
    if floor > total or (cap and floor > cap):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"a floor of {floor} segments; allowed are at most {min(cap or total, total)}",
        )
    namespace.floor, namespace.cap = floor, cap
    with books.fates.because(Cause.LIMIT):
        books.counters["segments_retired"] += books.lending.shrink(namespace)
    books.tell_evictions(namespace)
    attachment.refresh_sessions_of(namespace)
