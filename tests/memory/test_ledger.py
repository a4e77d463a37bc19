"""Promises equal open grants, no grant lifts promises above the budget, and nothing is revoked."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.memory.ledger import Grant, Ledger, Refusal
from forebay.memory.seats import Table
from forebay.units import MIB

SIZES = st.integers(0, 40)


def test_what_is_accounted_is_the_sum_of_the_accounts_and_the_promises() -> None:
    ledger = Ledger(100)
    ledger.workers_bytes, ledger.arena_bytes, ledger.heap_bytes = 10, 20, 5
    assert ledger.grant(0, 30, 0) == Grant(0, 30)
    assert (ledger.accounted_bytes, ledger.free_bytes) == (65, 35)


def test_a_refusal_tells_how_much_is_missing() -> None:
    ledger = Ledger(100)
    ledger.arena_bytes = 60
    assert ledger.grant(3, 30, 25) == Refusal(3, 15)
    assert ledger.open_grants == ()
    assert isinstance(ledger.grant(3, 30, 10), Grant)


def test_growth_of_the_arena_is_asked_for_but_not_promised() -> None:
    ledger = Ledger(100)
    ledger.grant(0, 10, 50)
    assert ledger.promised_bytes == 10


@pytest.mark.parametrize("verb", ["grant", "force"])
def test_nobody_is_promised_twice(verb: str) -> None:
    ledger = Ledger(MIB)
    ledger.grant(1, 10, 0)
    rest = (10, 0) if verb == "grant" else (10,)
    with pytest.raises(ValueError, match="worker 1 has a grant already"):
        getattr(ledger, verb)(1, *rest)
    assert ledger.promised_bytes == 10


def test_a_forced_grant_counts_even_above_the_budget() -> None:
    ledger = Ledger(100)
    assert ledger.force(0, 150) == Grant(0, 150)
    assert ledger.free_bytes == -50
    assert isinstance(ledger.grant(1, 0, 0), Refusal)
    ledger.settle(0)
    assert ledger.free_bytes == 100


def test_settling_nothing_and_amending_nothing_change_nothing() -> None:
    ledger = Ledger(100)
    ledger.settle(7)
    ledger.amend(7, 50)
    assert ledger.accounted_bytes == 0


def test_a_promise_is_corrected_to_what_the_fetch_took() -> None:
    ledger = Ledger(100)
    ledger.grant(0, 10, 0)
    ledger.amend(0, 25)
    assert ledger.open_grants == (Grant(0, 25),)
    assert ledger.promised_bytes == 25


class LedgerLife(RuleBasedStateMachine):
    """Accounts that move, a budget that moves, grants that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(100)
        self.ledger = Ledger(self.table.sit())
        self.open: dict[int, int] = {}

    def vacant(self) -> int:
        return next(n for n in range(100) if n not in self.open)

    @rule(making=SIZES, growth=SIZES)
    def grant(self, making: int, growth: int) -> None:
        free, holder = self.ledger.free_bytes, self.vacant()
        answer = self.ledger.grant(holder, making, growth)
        if isinstance(answer, Refusal):
            assert answer.short_bytes == making + growth - free > 0
        else:
            assert making + growth <= free
            assert self.ledger.accounted_bytes + growth <= self.ledger.budget_bytes
            self.open[holder] = making

    @rule(making=SIZES)
    def force(self, making: int) -> None:
        holder = self.vacant()
        self.ledger.force(holder, making)
        self.open[holder] = making

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.open)))
        self.ledger.settle(holder)
        del self.open[holder]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), making=SIZES)
    def amend(self, data: st.DataObject, making: int) -> None:
        holder = data.draw(st.sampled_from(sorted(self.open)))
        self.ledger.amend(holder, making)
        self.open[holder] = making

    @rule(workers=SIZES, arena=SIZES, heap=SIZES)
    def read(self, workers: int, arena: int, heap: int) -> None:
        ledger = self.ledger
        ledger.workers_bytes, ledger.arena_bytes, ledger.heap_bytes = workers, arena, heap

    @rule(budget=st.integers(0, 200))
    def move_the_budget(self, budget: int) -> None:
        before = self.ledger.open_grants
        self.table.resize(budget, budget)
        assert self.ledger.open_grants == before

    @invariant()
    def promises_equal_open_grants(self) -> None:
        grants = self.ledger.open_grants
        assert {grant.holder: grant.making_bytes for grant in grants} == self.open
        assert self.ledger.promised_bytes == sum(self.open.values())


TestLedgerLife = LedgerLife.TestCase
TestLedgerLife.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
