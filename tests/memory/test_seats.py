"""What all seats of one budget hold stays below it, and each can come by what it reserved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.ledger import Ledger, Refusal
from forebay.memory.seats import Table

SIZES = st.integers(0, 60)


def test_a_seat_may_hold_what_the_others_neither_hold_nor_reserved() -> None:
    table = Table(100)
    first, second = table.sit(10), table.sit(20)
    assert (first.allowance_bytes, second.allowance_bytes) == (80, 90)
    first.note(50)
    assert second.allowance_bytes == 50
    assert first.fair_bytes == second.fair_bytes == 50


def test_what_is_refused_is_not_held() -> None:
    table = Table(100)
    first, second = table.sit(), table.sit()
    assert first.try_hold(30, 30) <= 0
    assert second.try_hold(0, 41) == 1
    assert (first.held_bytes, second.held_bytes) == (60, 0)


def test_a_seat_that_is_left_is_the_others() -> None:
    table = Table(100)
    first, second = table.sit(10), table.sit(10)
    second.note(70)
    assert first.allowance_bytes == 30
    second.leave()
    assert first.is_alone
    assert first.allowance_bytes == 100


def test_who_waits_is_heard_by_the_others_only() -> None:
    table = Table(100)
    first, second, third = table.sit(), table.sit(), table.sit()
    first.wanted_bytes = 7
    assert (first.asked_bytes, second.asked_bytes, third.asked_bytes) == (0, 7, 7)


def test_an_idle_loader_gives_way_while_another_is_at_work() -> None:
    table = Table(100)
    first, second = table.sit(), table.sit()
    first.is_idle = True
    assert first.must_give_way
    assert not second.must_give_way
    second.is_idle = True
    assert not first.must_give_way


def test_what_others_hold_beyond_their_reserve_comes_back() -> None:
    table = Table(100)
    first, second = table.sit(10), table.sit(10)
    first.note(35)
    assert (first.lent_bytes, second.lent_bytes) == (0, 25)


def test_a_budget_lowered_below_what_is_held_lets_nobody_enter() -> None:
    table = Table(100, 110)
    seat = table.sit()
    seat.note(80)
    table.resize(50, 55)
    assert seat.try_hold(80, 0) == 30
    assert (seat.whole_bytes, seat.unpromised_bytes) == (55, 5)


@given(st.lists(st.tuples(st.integers(0, 2), SIZES, SIZES), max_size=60), SIZES)
def test_grants_of_several_loaders_never_lift_the_sum_above_the_budget(
    steps: list[tuple[int, int, int]], reserved: int
) -> None:
    table = Table(200)
    ledgers = [Ledger(table.sit(reserved // 3)) for _ in range(3)]
    for number, making, growth in steps:
        ledger = ledgers[number]
        before = table.promised_bytes - sum(seat.held_bytes for seat in table.seats)
        if ledger.open_grants:
            ledger.arena_bytes += growth if ledger.try_grow(growth) else 0
            ledger.settle(0)
        elif not isinstance(ledger.grant(0, making, growth), Refusal):
            ledger.arena_bytes += growth
        held = sum(seat.held_bytes for seat in table.seats)
        assert held <= 200 or before < 0
        assert held == sum(each.accounted_bytes for each in ledgers)


def test_measured_is_accounted_and_unaccounted() -> None:
    ledger = Ledger(100)
    ledger.workers_bytes, ledger.arena_bytes = 20, 30
    ledger.grant(0, 10, 0)
    for workers, resident in ((25, 40), (5, 5)):
        balance = ledger.reconcile(workers, resident)
        assert balance.accounted_bytes == 60
        assert balance.measured_bytes == workers + resident
        assert ledger.seat.measured_bytes == workers + resident
