"""Drill 8: copies of a real engine that fail, on purpose, one by one and at random.

Under policy "recompute" nobody can tell from the answer; under "fail" the request with the failed load errors
and no other; a store that failed is never seen (A13, A15, C7, D7).
"""

from collections.abc import Iterator

import pytest

from tests.drills import engines
from tests.drills.engines import Oracle, ask, ask_afresh, check, hand, wait_settled, wait_usable
from tests.drills.scale import Record, rounds, scale
from tests.e2e.engine import Engine
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support import Daemon, wait_for

pytestmark = pytest.mark.timeout(scale(600, 1800))

COUNT = 12
# A request whose load failed, alone in the engine, has its answer within so long (C7).
ALONE_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    # Room for every prompt of the long form: chunks are counted here, and none may leave meanwhile.
    with Daemon("128MiB") as one:
        yield one


@pytest.fixture(scope="module")
def writer(daemon: Daemon, oracle: Oracle) -> Iterator[Engine]:
    """An engine with policy "recompute"."""
    oracle.launch()
    with engines.engine(checkpoint(Recipe()), daemon) as one:
        wait_usable(one)
        yield one


_seeds = iter(range(2000, 1 << 30))


def fresh(length: int = 300) -> list[int]:
    return prompt(length, next(_seeds))


def _stored(engine: Engine, asked: list[int], oracle: Oracle) -> None:
    check(ask(engine, asked, COUNT), oracle.tokens(asked, COUNT))
    wait_settled(engine)
    assert engine.reset_prefix_cache()


def _chunks(daemon: Daemon) -> int:
    return sum(namespace.chunks for namespace in daemon.status().namespaces)


def test_a_load_that_fails_is_recomputed_though_nobody_else_is_there(
    writer: Engine, daemon: Daemon, oracle: Oracle
) -> None:
    with Record("8 a real engine: a load fails, alone") as record:
        for number in range(rounds(4, 40)):
            asked = fresh()
            _stored(writer, asked, oracle)
            # The first chunk, one in the middle, the last, in turn; then the same key must not fail for ever.
            hand(writer, "fail", "load", 1, (0, 4, 8)[number % 3])
            answer = ask(writer, asked, COUNT)
            assert hand(writer, "entered")["failed"] == 1
            check(answer, oracle.tokens(asked, COUNT), number)
            record.worst("alone_s", answer.total_s)
            assert answer.total_s < ALONE_WITHIN_S
            again = ask_afresh(writer, asked, COUNT)
            check(again, oracle.tokens(asked, COUNT), number)
            assert again.cached_tokens == 288
            record.rounds += 1
        engines.check_quiet(writer)


def test_requests_that_share_chunks_whose_load_fails(writer: Engine, oracle: Oracle) -> None:
    with Record("8 a real engine: a shared load fails") as record:
        for number in range(rounds(3, 20)):
            shared = fresh()
            _stored(writer, shared, oracle)
            prompts = [shared + [token] * 3 for token in (5, 6, 7)]
            hand(writer, "fail", "load", 1 + number % 2, 2)
            for answer, asked in zip(writer.generate(prompts, COUNT), prompts, strict=True):
                check(answer, oracle.tokens(asked, COUNT), number)
            assert hand(writer, "entered")["failed"] >= 1
            record.rounds += 1
        engines.check_quiet(writer)


def test_a_store_that_fails_is_never_seen(writer: Engine, daemon: Daemon, oracle: Oracle) -> None:
    with Record("8 a real engine: a store fails") as record:
        for number in range(rounds(4, 40)):
            asked = fresh()
            wait_settled(writer)
            before = _chunks(daemon)
            # Every chunk from here on fails; a job that holds a good one before fails as a whole.
            hand(writer, "fail", "store", 1 << 30, (0, 2)[number % 2])
            check(ask(writer, asked, COUNT), oracle.tokens(asked, COUNT), number)
            wait_settled(writer)
            assert hand(writer, "entered")["failed"] >= 1
            good = _chunks(daemon) - before
            assert good in range(0, 3), "a chunk of a failed job was published"
            hand(writer, "fail", "store", 0, 0)
            answer = ask_afresh(writer, asked, COUNT)
            check(answer, oracle.tokens(asked, COUNT), number)
            assert answer.cached_tokens == 32 * good, (answer, good)
            # That one stored what was missing.
            again = ask_afresh(writer, asked, COUNT)
            check(again, oracle.tokens(asked, COUNT), number)
            assert again.cached_tokens == 288
            record.rounds += 1
        engines.check_quiet(writer)
        pinned, _, quarantined = engines.held(daemon)
        assert (pinned, quarantined) == (0, 0)
        daemon.check_integrity()


def test_copies_that_fail_at_random(writer: Engine, daemon: Daemon, oracle: Oracle) -> None:
    with Record("8 a real engine: copies fail at random") as record:
        shared = [fresh(400) for _ in range(3)]
        hand(writer, "trouble", 0.05, 0.002)
        try:
            for _ in range(rounds(2, 20)):
                prompts = [record.random.choice(shared)[: record.random.randint(40, 400)] for _ in range(8)]
                for answer, asked in zip(writer.generate(prompts, COUNT), prompts, strict=True):
                    check(answer, oracle.tokens(asked, COUNT))
                wait_for(writer.reset_prefix_cache, 10, "the device's cache to be emptied")
                record.rounds += 1
            assert hand(writer, "entered")["failed"] > 0
        finally:
            hand(writer, "trouble", 0.0, 0.0)
        engines.check_quiet(writer)
        engines.wait_nothing_held(daemon)


def test_with_policy_fail_that_request_errors_and_no_other(
    writer: Engine, daemon: Daemon, oracle: Oracle
) -> None:
    with (
        Record("8 a real engine: policy fail") as record,
        engines.engine(checkpoint(Recipe()), daemon, policy="fail") as reader,
    ):
        wait_usable(reader)
        for number in range(rounds(3, 20)):
            asked, other = fresh(), fresh(200)
            _stored(writer, asked, oracle)
            hand(reader, "fail", "load", 1, (0, 4, 8)[number % 3])
            failed, fine = reader.generate([asked, other], COUNT)
            assert failed.finish_reason == "error", failed
            check(fine, oracle.tokens(other, COUNT))
            # It is served as ever when it is asked again.
            check(ask_afresh(reader, asked, COUNT), oracle.tokens(asked, COUNT))
            record.rounds += 1
        engines.check_quiet(reader)
