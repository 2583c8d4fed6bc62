"""What people do to namespaces: find one by name, drop its content, evict by hand, bound its size, and
that of the pool."""

from collections.abc import Iterator, Sequence

from kvhost_server.attachment import Attachment
from kvhost_server.books import Books
from kvhost_server.errors import Code, Refused
from kvhost_server.fates import Cause
from kvhost_server.ids import ChunkKey, SessionNumber, SlotIndex
from kvhost_server.namespace import Namespace
from kvhost_server.notices import Resync
from kvhost_server.units import format_size


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
    for number in namespace.sessions:
        books.outbox.notice(SessionNumber(number), Resync())
    dropped = _drop_chunks(books, namespace)
    books.fates.reset(namespace.number, dropped)
    return dropped


def give_up(books: Books, namespace: Namespace) -> None:
    """Everybody leaves a namespace that nobody can name any more: its chunks go now, its segments when
    somebody needs them."""
    books.lending.give_up(namespace)
    dropped = _drop_chunks(books, namespace)
    # Nobody is there to be told; they count as what went with its segment, which they would have done.
    namespace.counters["evicted"] += dropped
    books.fates.evicted[Cause.SEGMENT] += dropped
    books.tell_evictions(namespace)


def _drop_chunks(books: Books, namespace: Namespace) -> int:
    """Forgets all chunks at once; their slots become free one by one. Returns how many."""
    table = namespace.table
    old = table.forget_all()
    books.writing[namespace.number].clear()
    namespace.cleared()
    books.outbox.events(namespace.number)
    pins = books.operator_pins.pop(namespace.number, {})

    def discard() -> Iterator[None]:
        while pins:
            table.let_go(pins.popitem()[1])
            yield
        while old:
            key, slot = old.popitem()
            table.discard(slot, key)
            yield

    dropped = len(old)
    books.add_chore(discard())
    return dropped


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


def pin(books: Books, namespace: Namespace, keys: Sequence[ChunkKey]) -> tuple[int, int, int]:
    """Keeps these chunks, and all that they build on, for an operator. Returns (pinned, before, absent).

    Raises:
        Refused: operators would hold more than half of the namespace's slots. Nothing is pinned then.
    """
    table = namespace.table
    held = books.operator_pins.setdefault(namespace.number, {})
    wanted: dict[ChunkKey, SlotIndex] = {}
    absent = 0
    for key in keys:
        at: ChunkKey | None = key
        if key not in table.index:
            absent += 1
        while at is not None and at not in wanted and (slot := table.index.get(at)) is not None:
            wanted[at] = slot
            at = table.parent(slot)
    fresh = {key: slot for key, slot in wanted.items() if key not in held}
    bound = operator_bound(namespace)
    if len(held) + len(fresh) > bound:
        raise Refused(
            Code.RESOURCE_EXHAUSTED,
            f"{len(fresh)} more chunks to pin beside {len(held)}; operators may hold {bound} of the "
            f"namespace's {table.slots} slots: unpin others, or let the namespace grow",
        )
    for slot in fresh.values():
        table.hold(slot)
    held.update(fresh)
    return len(fresh), len(wanted) - len(fresh), absent


def unpin(books: Books, namespace: Namespace, keys: Sequence[ChunkKey] | None) -> tuple[int, int]:
    """Lets these chunks go, with what only they build on; or all when None. Returns (unpinned, absent)."""
    table = namespace.table
    held = books.operator_pins.get(namespace.number, {})
    absent = 0
    going: set[ChunkKey] = set(held if keys is None else ())
    for key in keys or ():
        if key not in held:
            absent += 1
        at: ChunkKey | None = key
        while at is not None and at in held and at not in going:
            going.add(at)
            at = table.parent(held[at])
    for key in held.keys() - going:
        above = table.parent(held[key])
        while above is not None and above in going:  # others that are pinned build on it
            going.discard(above)
            above = table.parent(held[above])
    for key in going:
        table.let_go(held.pop(key))
    return len(going), absent


def operator_bound(namespace: Namespace) -> int:
    """How many chunks operators may keep in a namespace."""
    return namespace.table.slots // 2


def drop(books: Books, namespace: Namespace) -> tuple[int, int]:
    """Gives back the segments of a namespace that no engine uses. Returns (segments, those that are held).

    Raises:
        Refused: an engine is in it.
    """
    if namespace.sessions:
        raise Refused(
            Code.FAILED_PRECONDITION,
            f"namespace {namespace.number} has {len(namespace.sessions)} sessions; end them first",
        )
    unpin(books, namespace, None)
    namespace.floor = 0
    lending = books.lending
    going = lending.unheld(lending.loans_of(namespace))
    with books.fates.because(Cause.OPERATOR):
        for loan in going:
            lending.retire(loan)
    books.counters["segments_retired"] += len(going)
    books.tell_evictions(namespace)
    return len(going), namespace.segments


def resize_pool(books: Books, attachment: Attachment, nbytes: int) -> None:
    """Another size for the whole pool, in whole segments, rounded up. What is above it and not held goes at
    once, the least recently used first; what is missing is allocated.

    Raises:
        Refused: smaller than a segment, or than what namespaces keep by their floors.
    """
    size = books.lending.segment_bytes
    floors = sum(namespace.floor for namespace in books.namespaces.values())
    least = max(1, floors)
    if -(-nbytes // size) < least:
        kept = f", what namespaces keep by their floors: {floors} segments" if floors else ", one segment"
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"a pool of {format_size(nbytes)}; allowed is {format_size(least * size)} at least{kept}",
        )
    attachment.resize(nbytes)


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
    total = books.lending.budget
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
