"""The breaker: when it opens, how often it lets somebody try, when it closes (I6, I8)."""

import pytest

from kvhost_client.breaker import Breaker
from kvhost_client.errors import (
    BreakerOpen,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotServing,
    Refused,
    SessionEnded,
    StaleStore,
    Unavailable,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def test_it_opens_after_three_failures_in_a_row(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.failure(DeadlineExceeded("late"))
    assert not breaker.is_open
    breaker.failure(DeadlineExceeded("late"))
    assert breaker.is_open
    assert breaker.times_opened == 1


def test_a_success_between_starts_the_count_again(breaker: Breaker) -> None:
    for _ in range(5):
        breaker.failure(DeadlineExceeded("late"))
        breaker.failure(DeadlineExceeded("late"))
        breaker.success()
    assert not breaker.is_open


def test_it_opens_at_once_when_nobody_is_there(breaker: Breaker) -> None:
    breaker.failure(Unavailable("gone"))
    assert breaker.is_open


@pytest.mark.parametrize(
    "error",
    [
        NotServing("starting"),
        InvalidArgument("?"),
        FailedPrecondition("?"),
        Refused("?"),
        StaleStore("?"),
        SessionEnded("?"),
    ],
)
def test_an_answer_that_is_a_refusal_shows_that_somebody_is_there(breaker: Breaker, error: Exception) -> None:
    breaker.failure(DeadlineExceeded("late"))
    breaker.failure(DeadlineExceeded("late"))
    breaker.failure(error)
    breaker.failure(DeadlineExceeded("late"))
    assert not breaker.is_open


def test_its_own_refusals_do_not_count(breaker: Breaker) -> None:
    breaker.failure(Unavailable("gone"))
    breaker.failure(BreakerOpen("not asked"))
    assert breaker.is_open


def test_while_open_one_question_a_second_is_allowed(breaker: Breaker, clock: Clock) -> None:
    breaker.failure(Unavailable("gone"))
    asked = 0
    for _ in range(100):
        clock.now += 0.05
        asked += breaker.allow()
    assert asked in (4, 5)


def test_the_first_answer_closes_it(breaker: Breaker, clock: Clock) -> None:
    breaker.failure(Unavailable("gone"))
    assert not breaker.allow()
    clock.now += 1.0
    assert breaker.allow()
    breaker.success()
    assert breaker.allow()
    assert breaker.allow()
    assert not breaker.is_open
