"""Why a chunk is not there, in words; what operators keep; and whose request it was."""

import pytest

from kvhost_proto.v1 import admin_pb2, common_pb2
from kvhost_server.errors import Code, Refused
from kvhost_server.explaining import (
    Chain,
    best_namespace,
    chains_of_keys,
    chains_of_request,
    differences,
    explain,
    keys_from_hex,
)
from kvhost_server.ids import ChunkKey, NamespaceNumber, SessionNumber
from kvhost_server.lookups import ChainAsked, QueryAsked
from kvhost_server.namespace import Namespace, Semantics
from kvhost_server.reading import ChainAnswer
from kvhost_server.recall import Requests
from kvhost_server.stewardship import drop, pin, reset_namespace, unpin
from tests.server.world import Engine, World, chain, key, spec


def home_of(engine: Engine) -> Namespace:
    assert engine.session.namespace is not None
    return engine.session.namespace


async def told(world: World, engine: Engine, keys: list[ChunkKey]) -> admin_pb2.ExplainedChain:
    [explained] = await explain(world.books, home_of(engine), chains_of_keys(keys))
    return explained


class TestExplain:
    async def test_what_is_there_and_what_was_never_stored(self) -> None:
        world = World()
        engine = world.engine()
        names = chain("a", 3)
        engine.store(names[:2])
        explained = await told(world, engine, names)
        assert [chunk.state for chunk in explained.chunks] == ["ready", "ready", "unknown"]
        assert (explained.usable, explained.tokens_per_chunk) == (2, 16)
        assert explained.semantics == common_pb2.SEMANTICS_PREFIX
        assert explained.summary.startswith(
            "2 of 3 chunks can be loaded (32 of 48 tokens); chunk 3 is missing: never stored here"
        )

    async def test_where_a_chain_breaks_and_what_is_of_no_use_behind(self) -> None:
        world = World()
        engine = world.engine()
        names = chain("a", 4)
        engine.store(names)
        table = home_of(engine).table
        world.time += 180
        table.evict(table.index[names[1]])
        world.time += 60
        explained = await told(world, engine, names)
        assert explained.chunks[1].state == "evicted"
        assert explained.chunks[1].ago_s == pytest.approx(60, abs=1)
        assert "to make room in its own namespace" in explained.summary
        assert explained.summary.endswith("; 2 behind it are there and of no use without it")

    async def test_for_whom_a_segment_went(self) -> None:
        world = World(segments=1, slots=4)
        engine = world.engine()
        names = chain("a", 4)
        engine.store(names)
        other = world.engine(spec("n"))
        explained = await told(world, engine, names)
        number = home_of(other).number
        assert {chunk.other_namespace for chunk in explained.chunks} == {number}
        assert f"which went to namespace {number}" in explained.chunks[0].why

    async def test_another_namespace_has_it_and_what_differs(self) -> None:
        world = World()
        engine, other = world.engine(), world.engine(spec("m", block_size=32))
        other.store(chain("a", 1))
        [chunk] = (await told(world, engine, chain("a", 1))).chunks
        assert chunk.state == "elsewhere"
        assert chunk.why == f"namespace {home_of(other).number} has it, which differs in: block_size"

    async def test_a_reset_and_a_refusal_are_mentioned(self) -> None:
        world = World(segments=1, slots=4)
        engine = world.engine()
        engine.store(chain("a", 1))
        reset_namespace(world.books, home_of(engine))
        world.time += 5
        assert engine.grants(4)
        [chunk] = (await told(world, engine, chain("a", 1))).chunks
        assert "not stored since the namespace was reset" in chunk.why
        assert f"session {engine.session.number} was refused slots 0 s ago" in chunk.why

    async def test_what_is_being_written_and_what_was_given_up(self) -> None:
        world = World()
        engine = world.engine()
        [store] = engine.reserve(chain("w", 1))
        assert (await told(world, engine, chain("w", 1))).chunks[0].state == "writing"
        engine.manager.writing.abort(engine.session, store)
        assert (await told(world, engine, chain("w", 1))).chunks[0].state == "aborted"

    async def test_keys_that_stand_for_themselves(self) -> None:
        world = World()
        engine = world.engine()
        names = [key(n, 1) for n in range(3)]
        [store] = engine.reserve([names[2]])
        engine.commit(store, names[2], group=1)
        [explained] = await explain(world.books, home_of(engine), [Chain(1, names)])
        assert explained.usable == 1 and "of no use" not in explained.summary

    def test_keys_as_people_write_them(self) -> None:
        world = World()
        home = home_of(world.engine())
        whole = key("a")
        assert keys_from_hex(home, [whole.hex(), whole[:-4].hex().upper()]) == [whole, whole]
        for text, says in (("xyz", "not hexadecimal"), ("abcd", "have 12")):
            with pytest.raises(Refused, match=says):
                keys_from_hex(home, [text])

    def test_the_namespace_where_the_keys_are_is_meant(self) -> None:
        world = World()
        _, other = world.engine(), world.engine(spec("n"))
        other.store(chain("a", 2))
        assert best_namespace(world.books, [k.hex() for k in chain("a", 3)]) == home_of(other).number
        assert best_namespace(world.books, ["zz"]) is None

    def test_what_differs_is_named(self) -> None:
        assert differences(spec("m", a=1, b=2), spec("m", a=1, b=3, c=4)) == ["b", "c"]
        assert differences(spec("m", ranks=1), spec("m", ranks=2)) == ["layout"]


class TestOperatorPins:
    def test_a_pinned_prefix_stays_with_what_it_builds_on(self) -> None:
        world = World(segments=2, slots=8)
        engine = world.engine()
        names = chain("a", 4)
        engine.store(names)
        home = home_of(engine)
        assert pin(world.books, home, [names[2], key("no")]) == (3, 0, 1)
        assert pin(world.books, home, names[:3]) == (0, 3, 0)
        world.check()
        engine.store(chain("b", 30))
        assert engine.lookup(names) == 3
        assert unpin(world.books, home, [names[2], key("no")]) == (3, 1)
        engine.store(chain("c", 30))
        assert engine.lookup(names) == 0
        world.check()

    def test_what_another_pinned_chunk_builds_on_stays(self) -> None:
        world = World()
        engine = world.engine()
        trunk, left, right = chain("t", 2), chain("l", 1), chain("r", 1)
        engine.store(trunk)
        engine.store(left, trunk[-1])
        engine.store(right, trunk[-1])
        home = home_of(engine)
        pin(world.books, home, [*left, *right])
        assert unpin(world.books, home, left) == (1, 0)
        assert set(world.books.operator_pins[home.number]) == {*trunk, *right}
        assert unpin(world.books, home, None) == (3, 0)
        world.check()

    def test_operators_hold_at_most_half(self) -> None:
        world = World(segments=1, slots=4)
        engine = world.engine()
        engine.store(chain("a", 3))
        with pytest.raises(Refused, match="operators may hold 2 of the namespace's 4") as refused:
            pin(world.books, home_of(engine), chain("a", 3))
        assert refused.value.code is Code.RESOURCE_EXHAUSTED
        world.check()

    def test_a_reset_lets_go(self) -> None:
        world = World()
        engine = world.engine()
        engine.store(chain("a", 3))
        pin(world.books, home_of(engine), chain("a", 3))
        reset_namespace(world.books, home_of(engine))
        world.check()
        assert home_of(engine).table.pinned == 0

    def test_a_dropped_namespace_gives_its_segments_back(self) -> None:
        world = World()
        engine = world.engine()
        engine.store(chain("a", 3))
        home = home_of(engine)
        pin(world.books, home, chain("a", 1))
        with pytest.raises(Refused, match="has 1 sessions"):
            drop(world.books, home)
        engine.manager.end_session(engine.session.number, "test")
        world.settle()
        assert drop(world.books, home) == (2, 0)
        world.settle()
        assert world.books.lending.free_segments == 4
        world.check()


def asked(name: str, keys: list[ChunkKey]) -> tuple[QueryAsked, list[ChainAnswer]]:
    chains = [ChainAsked(group=0, semantics=Semantics.PREFIX, keys=b"".join(keys))]
    return QueryAsked(0, chains, name), [ChainAnswer(found=b"\1\0")]


class TestRequests:
    ONE = (SessionNumber(1), NamespaceNumber(1))

    def remember(self, requests: Requests, name: str, keys: list[ChunkKey], now: float = 0.0) -> None:
        query, answer = asked(name, keys)
        requests.remember(*self.ONE, now, [query], [answer])

    def test_by_its_name_or_a_part_of_it(self) -> None:
        requests = Requests()
        self.remember(requests, "chatcmpl-abc", chain("a", 2), 5.0)
        self.remember(requests, "chatcmpl-xyz", chain("b", 2))
        self.remember(requests, "", chain("c", 2))
        assert len(requests) == 2
        found = requests.named("abc")
        assert (found.name, found.at) == ("chatcmpl-abc", 5.0)
        home = home_of(World().engine())
        assert chains_of_request(home, found) == [Chain(0, chain("a", 2), 1)]
        for name, says in (("chatcmpl", "2 requests have"), ("none", "latest are: chatcmpl-xyz"), ("", "no")):
            with pytest.raises(Refused, match=says):
                requests.named(name)

    def test_the_latest_of_a_name_counts(self) -> None:
        requests = Requests()
        self.remember(requests, "r", chain("a", 2), 1.0)
        self.remember(requests, "r", chain("a", 3), 2.0)
        assert (len(requests), requests.named("r").at) == (1, 2.0)

    def test_it_is_bounded_in_number_and_in_bytes(self) -> None:
        requests = Requests(most=5, most_bytes=1000)
        for n in range(20):
            self.remember(requests, f"r{n}", chain("a", 2))
        assert len(requests) == 5
        self.remember(requests, "large", chain("a", 80))
        assert (len(requests), requests.bytes <= 1000) == (2, True)
        self.remember(requests, "larger", chain("a", 1000))
        assert (len(requests), requests.bytes) == (0, 0)
