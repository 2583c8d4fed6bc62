"""What is remembered of chunks that are gone: why, when, for whom, and never without bound."""

from collections.abc import Sequence

from kvhost_server.fates import Cause, Fate, Fates
from kvhost_server.histogram import Histogram
from kvhost_server.ids import ChunkKey, NamespaceNumber
from kvhost_server.stewardship import evict, reset_namespace
from tests.server.world import World, chain, key, spec

ONE, TWO = NamespaceNumber(1), NamespaceNumber(2)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def found(fates: Fates, keys: Sequence[ChunkKey], namespace: NamespaceNumber = ONE) -> dict[ChunkKey, Fate]:
    return list(fates.of(namespace, keys))[-1]


def test_it_says_when_why_and_for_whom() -> None:
    clock = Clock()
    fates = Fates(clock)
    clock.now = 1010.0
    fates.left(ONE, key("a"), 1_004_000_000)
    with fates.because(Cause.SEGMENT, TWO):
        fates.left(ONE, key("b"), 1_009_000_000)
    fates.not_stored(ONE, key("c"), Cause.BOUND)
    fate = found(fates, [key("a"), key("b"), key("c"), key("d")])
    assert fate == {
        key("a"): Fate(Cause.ROOM, 1010.0, ONE),
        key("b"): Fate(Cause.SEGMENT, 1010.0, TWO),
        key("c"): Fate(Cause.BOUND, 1010.0, NamespaceNumber(0)),
    }
    assert (fates.ages.count, fates.ages.sum) == (2, 7.0)
    assert fates.evicted[Cause.ROOM] == fates.evicted[Cause.SEGMENT] == 1


def test_the_newest_fate_counts_and_namespaces_are_apart() -> None:
    clock = Clock()
    fates = Fates(clock)
    fates.left(ONE, key("a"), 0)
    fates.left(TWO, key("a"), 0)
    clock.now += 5
    fates.not_stored(ONE, key("a"), Cause.ABORTED)
    assert found(fates, [key("a")])[key("a")].cause is Cause.ABORTED
    assert found(fates, [key("a")], TWO)[key("a")].at == 1000.0


def test_the_oldest_is_forgotten() -> None:
    fates = Fates(Clock(), most=10)
    names = chain("a", 25)
    for name in names:
        fates.left(ONE, name, 0)
    assert list(found(fates, names)) == names[:14:-1]
    assert sum(run.chunks for run in fates.runs) == 25


def test_evictions_that_follow_each_other_are_one_run() -> None:
    clock = Clock()
    fates = Fates(clock)
    for age in (3, 1, 2):
        fates.left(ONE, key(age), int((clock.now - age) * 1e6))
        clock.now += 1
    with fates.because(Cause.OPERATOR):
        fates.left(ONE, key("x"), 0)
    fates.reset(ONE, 7)
    first, second, third = fates.runs
    assert (first.chunks, first.youngest_s, first.oldest_s, first.ended - first.began) == (3, 1.0, 3.0, 2.0)
    assert (second.cause, second.taker) == (Cause.OPERATOR, 0)
    assert (third.cause, third.chunks) == (Cause.RESET, 7)
    assert fates.resets == {ONE: clock.now}
    fates.forget(ONE)
    assert fates.resets == {}


def test_runs_are_bounded() -> None:
    fates = Fates(Clock())
    for n in range(1000):
        fates.left(NamespaceNumber(n), key(n), 0)
    assert len(fates.runs) == 64


def test_the_manager_tells_why() -> None:
    world = World(segments=2, slots=4)
    first = world.engine()
    names = chain("a", 9)
    assert first.store(names) == 8  # the pool is full, and the head of the own chain stays
    other = chain("b", 1)
    assert first.store(other) == 1
    home = first.session.namespace
    assert home is not None
    fates = world.books.fates
    gone = found(fates, names, home.number)
    assert {fate.cause for fate in gone.values()} == {Cause.ROOM, Cause.NO_SPACE}
    assert evict(world.books, home, other) == (1, 0, 0)
    assert found(fates, other, home.number)[other[0]].cause is Cause.OPERATOR
    second = world.engine(spec("n"))
    assert second.session.namespace is not None
    taken = {f.taker for f in found(fates, names, home.number).values() if f.cause is Cause.SEGMENT}
    assert taken == {second.session.namespace.number}
    [store] = second.reserve(chain("c", 1))
    second.manager.writing.abort(second.session, store)
    assert (
        found(fates, chain("c", 1), second.session.namespace.number)[chain("c", 1)[0]].cause is Cause.ABORTED
    )
    reset_namespace(world.books, home)
    assert home.number in fates.resets
    world.check()


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    histogram = Histogram((1, 2, 4))
    for value in (0.5, 1, 1.5, 4, 9):
        histogram.observe(value)
    assert histogram.buckets() == [("1", 2), ("2", 3), ("4", 4), ("+Inf", 5)]
    assert (histogram.count, histogram.sum) == (5, 16.0)
    assert (histogram.quantile(0.4), histogram.quantile(0.99), Histogram((1,)).quantile(0.5)) == (1, 4, 0.0)
