"""Grants held ahead: enough for the next steps, none for an idle engine, none of another authority (I5)."""

from __future__ import annotations

import pytest

from kvhost_client.types import Grant, Slot, StoreId
from kvhost_connector import supply as supply_module
from kvhost_connector.supply import Supply


def grants(*numbers: int) -> list[Grant]:
    return [Grant(StoreId(number), Slot(number)) for number in numbers]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def supply(clock: Clock) -> Supply:
    made = Supply(4, clock)
    made.renew(1)
    made.engine_active()
    return made


def test_grants_are_taken_oldest_first(supply: Supply) -> None:
    assert supply.put(1, grants(1, 2, 3))
    assert supply.take(1, 2) == grants(1, 2)
    assert supply.take(1, 5) == grants(3)


def test_grants_of_another_authority_are_neither_kept_nor_given(supply: Supply) -> None:
    supply.put(1, grants(1, 2))
    assert supply.take(2, 1) == []
    assert supply.renew(2) == grants(1, 2)
    assert not supply.put(1, grants(3))
    assert len(supply) == 0


def test_more_is_asked_for_when_half_is_used(supply: Supply) -> None:
    assert supply.missing() == 4
    supply.put(1, grants(1, 2, 3, 4))
    supply.take(1, 1)
    assert supply.missing() == 0
    supply.take(1, 1)
    assert supply.missing() == 2


@pytest.mark.parametrize("pending", [True, False])
def test_after_too_few_it_waits_before_it_asks_again(supply: Supply, clock: Clock, pending: bool) -> None:
    supply.fell_short(0, pending=pending)
    assert supply.missing() == 0
    assert supply.has_hope is pending
    pause = supply_module.PENDING_PAUSE_S if pending else supply_module.FULL_PAUSE_S
    assert supply.due() == [clock.now + pause]
    clock.now += pause
    assert supply.missing() == 4


def test_room_that_became_free_ends_the_wait(supply: Supply) -> None:
    supply.fell_short(0, pending=False)
    supply.freed()
    assert supply.missing() == 4
    assert supply.has_hope


def test_what_is_recalled_goes_back_newest_first_and_is_not_asked_for_at_once(
    supply: Supply, clock: Clock
) -> None:
    supply.put(1, grants(1, 2, 3, 4))
    supply.recall(3)
    assert supply.surplus() == grants(4, 3, 2)
    supply.freed()
    assert supply.missing() == 0
    clock.now += supply_module.RECALL_PAUSE_S
    assert supply.missing() == 3
    assert supply.surplus() == []


def test_an_idle_engine_holds_nothing(supply: Supply, clock: Clock) -> None:
    supply.put(1, grants(1, 2, 3, 4))
    assert supply.due() == [clock.now + supply_module.IDLE_GIVES_BACK_S]
    clock.now += supply_module.IDLE_GIVES_BACK_S + 0.1
    assert supply.surplus() == grants(4, 3, 2, 1)
    assert supply.missing() == 0
    supply.engine_active()
    clock.now += 1
    assert supply.missing() == 4


def test_a_closed_supply_gives_everything_back(supply: Supply) -> None:
    supply.put(1, grants(1, 2))
    supply.close()
    assert supply.surplus() == grants(2, 1)
    assert supply.missing() == 0
