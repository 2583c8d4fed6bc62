"""The manager's sanity as a function: every contradiction between its rooms, one line each."""

from collections import Counter
from collections.abc import Iterator

from kvhost_server.books import Books
from kvhost_server.ids import SlotIndex
from kvhost_server.lending import SegmentState
from kvhost_server.namespace import Namespace
from kvhost_server.slotchecks import table_problems
from kvhost_server.slots import SlotState


def find_problems(books: Books) -> list[str]:
    """Contradictions in the books; empty when they agree. Meaningful when no chore waits. O(slots)."""
    return [problem for part in problems_in_parts(books) for problem in part]


def problems_in_parts(books: Books) -> Iterator[list[str]]:
    """The same in parts of some milliseconds: between two, others may have their turn, and chores too. Each
    part looks at the books as they are when it is asked for."""
    for namespace in list(books.namespaces.values()):
        where = f"namespace {namespace.number}: "
        for part in table_problems(namespace.table):
            yield [where + problem for problem in part]
        yield [where + problem for problem in _holds(books, namespace)]
    yield _sessions(books) + _segments(books) + _custody(books)


def _holds(books: Books, namespace: Namespace) -> list[str]:
    """Slots say they are held; somebody must say that he holds them, and the other way round."""
    table = namespace.table
    pins: Counter[SlotIndex] = Counter()
    granted: Counter[SlotIndex] = Counter()
    quarantined: Counter[SlotIndex] = Counter()
    for session in books.sessions.values():
        if session.namespace is namespace:
            pins.update(session.pins.values())
        pins.update(slot for home, slot in session.former_pins.values() if home is namespace)
        granted.update(g.slot for g in session.grants.values() if g.namespace is namespace)
    pins.update(books.operator_pins.get(namespace.number, {}).values())
    for entry in books.custody.quarantines:
        if entry.namespace is namespace:
            quarantined.update(entry.slots)
            pins.update(entry.read)
    problems = [
        f"slot {slot} counts {table.holds(slot)} holds, holders say {count}"
        for slot, count in pins.items()
        if table.holds(slot) != count
    ]
    if table.held_slots() != len(pins):
        problems.append(f"{table.held_slots()} slots count holds, holders name {len(pins)}")
    for state, slots in ((SlotState.GRANTED, granted), (SlotState.QUARANTINED, quarantined)):
        problems += [
            f"slot {slot} is {table.state(slot).name} and {state.name.lower()} {count} times"
            for slot, count in slots.items()
            if table.state(slot) is not state or count != 1
        ]
        if table.count(state) != len(slots):
            problems.append(f"{table.count(state)} slots are {state.name}, the books name {len(slots)}")
    return problems


def _sessions(books: Books) -> list[str]:
    problems: list[str] = []
    for session in books.sessions.values():
        where = f"session {session.number}: "
        if session.unassigned != sum(g.key is None for g in session.grants.values()):
            problems.append(where + f"counts {session.unassigned} unassigned grants wrongly")
        if session.namespace is None:
            continue
        if session.number not in session.namespace.sessions:
            problems.append(where + "its namespace does not know it")
        if not session.usable_rows <= set(session.namespace.row_of_segment.values()):
            problems.append(where + "uses rows that have no segment")
    for namespace in books.namespaces.values():
        if not namespace.sessions <= books.sessions.keys():
            problems.append(f"namespace {namespace.number} knows sessions that ended")
    return problems


def _segments(books: Books) -> list[str]:
    problems: list[str] = []
    lending = books.lending
    lent = [s.pool_index for s in lending.loans.values()]
    if len(lent) != len(set(lent)):
        problems.append("a segment is lent twice")
    for loan in lending.loans.values():
        state = lending.states[loan.pool_index]
        owned = loan.segment_id in loan.namespace.row_of_segment
        if (state is SegmentState.LENT) != owned or state not in (SegmentState.LENT, SegmentState.RETIRING):
            problems.append(f"segment {loan.segment_id} is {state.value} but in its namespace: {owned}")
    free = sum(s is SegmentState.FREE for s in lending.states)
    if free != lending.free_segments:
        problems.append(f"{lending.free_segments} segments are listed free, {free} are")
    if len(lent) != sum(s in (SegmentState.LENT, SegmentState.RETIRING) for s in lending.states):
        problems.append("loans and segments on loan differ in number")
    return problems


def _custody(books: Books) -> list[str]:
    problems: list[str] = []
    mappings = books.custody.mappings
    for entry in books.custody.quarantines:
        if not entry.waiting:
            problems.append(f"a quarantine of session {entry.session} waits for nobody")
        for mapping in entry.waiting:
            if mapping not in mappings:
                problems.append(f"a quarantine of session {entry.session} waits for a worker that is gone")
            elif entry not in mappings[mapping].open_fences.values():
                problems.append(f"a quarantine of session {entry.session} waits for an unfenced worker")
    for loan in books.lending.loans.values():
        for mapping in loan.holders:
            known = mappings.get(mapping)
            if known is None or loan.segment_id not in known.segments.keys() | known.retiring:
                problems.append(f"segment {loan.segment_id} is held by worker {mapping}, who does not know")
    return problems
