"""Stances have an enter and a leave mark, acts come one a reading, noise changes nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.policy import (
    AUTO_FRAC,
    SAFE_FRAC,
    AddToken,
    Evict,
    GiveBack,
    Merge,
    Narrow,
    Policy,
    Position,
    Recycle,
    Split,
    TakeToken,
    Trim,
    WorkerFact,
    decide_promised,
    decide_size,
)
from forebay.units import GIB, MIB

BUDGET = 1000 * MIB


def at(frac: float, t_s: float = 0.0, **more: Any) -> Position:
    """A loader that holds `frac` of its budget, all of it promised."""
    measured = int(frac * BUDGET)
    usual: dict[str, Any] = {
        "t_s": t_s,
        "budget_bytes": BUDGET,
        "promised_bytes": decide_promised(BUDGET),
        "accounted_bytes": measured,
        "unaccounted_bytes": 0,
        "is_waiting": True,
    }
    return Position(**(usual | more))


def growing(frac: float, t_s: float = 0.0, **more: Any) -> Position:
    return at(frac, t_s, growth_bytes_per_s=float(MIB), **more)


def stances(policy: Policy, positions: list[Position]) -> list[str]:
    return [policy.decide(position).stance for position in positions]


# -- sizes ----------------------------------------------------------------------------------------


def test_auto_takes_a_part_of_what_would_be_free_without_it() -> None:
    assert decide_size(None, 10 * GIB) == int(10 * GIB * AUTO_FRAC)


def test_a_given_size_is_the_size_until_the_machine_has_less() -> None:
    assert decide_size(2 * GIB, 10 * GIB) == 2 * GIB
    assert decide_size(2 * GIB, GIB) == int(GIB * SAFE_FRAC)


def test_a_size_falls_at_once_and_rises_in_steps_that_are_worth_it() -> None:
    assert decide_size(None, GIB, 2 * GIB) == int(GIB * AUTO_FRAC)
    now = int(GIB * AUTO_FRAC)
    assert decide_size(None, int(GIB * 1.03), now) == now
    assert decide_size(None, 2 * GIB, now) == int(2 * GIB * AUTO_FRAC)
    assert decide_size(now + MIB, 2 * GIB, now) == now + MIB, "what was asked for is the end of it"


def test_without_a_reading_the_size_stays_what_it_was() -> None:
    assert decide_size(GIB, None) == GIB
    assert decide_size(None, None, 7) == 7


@given(st.integers(0, 2**45), st.one_of(st.none(), st.integers(1, 2**45)), st.integers(0, 2**45))
def test_a_size_never_exceeds_what_was_asked_for_or_can_be_reached(
    reach: int, asked: int | None, now: int
) -> None:
    size = decide_size(asked, reach, now)
    assert size <= reach or size == now
    assert asked is None or size <= asked or size == now
    assert decide_promised(size) <= size


# -- stances --------------------------------------------------------------------------------------


def test_what_was_promised_presses_on_nobody() -> None:
    assert stances(Policy(), [at(0.5), at(0.89), at(0.94)]) == ["grow", "grow", "hold"]


def test_growth_that_nobody_promised_is_met_from_the_shrink_mark_on() -> None:
    policy = Policy()
    positions = [growing(0.7), growing(0.85), growing(0.91), growing(0.87), growing(0.84)]
    assert stances(policy, positions) == ["grow", "hold", "shrink", "shrink", "hold"]


def test_above_what_is_promised_only_the_next_batch_runs() -> None:
    policy = Policy()
    assert stances(policy, [at(0.96), at(0.94), at(0.92)]) == ["pause", "pause", "hold"]


def test_growth_is_seen_coming() -> None:
    slow = at(0.85, growth_bytes_per_s=float(20 * MIB), horizon_s=1.0)
    fast = at(0.85, growth_bytes_per_s=float(200 * MIB), horizon_s=1.0)
    assert stances(Policy(), [slow]) == ["hold"]
    assert stances(Policy(), [fast]) == ["pause"]


def test_others_that_wait_and_memory_that_is_waited_for_make_it_shrink() -> None:
    assert stances(Policy(), [at(0.3, asked_bytes=1)]) == ["shrink"]
    assert stances(Policy(), [at(0.3, pressure_frac=0.3)]) == ["shrink"]
    policy = Policy()
    pressed = [at(0.3, pressure_frac=frac) for frac in (0.25, 0.15, 0.05)]
    assert stances(policy, pressed) == ["shrink", "shrink", "grow"]


@given(st.lists(st.floats(0.861, 0.899), min_size=1, max_size=50))
def test_noise_between_the_marks_changes_no_stance(fracs: list[float]) -> None:
    shrinking, holding = Policy(), Policy()
    shrinking.decide(growing(0.92))
    holding.decide(growing(0.82))
    assert set(stances(shrinking, [growing(frac) for frac in fracs])) == {"shrink"}
    assert set(stances(holding, [growing(frac) for frac in fracs])) == {"hold"}


# -- acts -----------------------------------------------------------------------------------------

GROWN = (WorkerFact(3, 50 * MIB, True), WorkerFact(4, 80 * MIB, True))


def test_what_costs_least_comes_first_and_one_step_a_reading() -> None:
    policy = Policy()
    tight = growing(
        0.97, free_pages_bytes=MIB, workers=GROWN, tokens=2, most_tokens=2, can_merge=True, width=3
    )
    assert policy.decide(tight).acts == (GiveBack(MIB), Trim(), Recycle(4))
    assert policy.decide(tight).stance == "pause"
    assert policy.decide(replace(tight, t_s=0.1)).acts == (GiveBack(MIB),)
    calm = replace(tight, free_pages_bytes=0, workers=())
    assert policy.decide(replace(calm, t_s=1.0)).acts == (TakeToken(),)
    assert policy.decide(replace(calm, t_s=2.0, tokens=1)).acts == (Merge(),)
    alone = replace(calm, tokens=1, can_merge=False)
    assert policy.decide(replace(alone, t_s=3.0)).acts == (Narrow(),)
    assert policy.decide(replace(alone, t_s=4.0, width=1)).acts == ()


def test_what_is_ready_goes_to_disk_only_above_the_budget() -> None:
    fallen = at(0.97, free_pages_bytes=0, ready_bytes=300 * MIB)
    over = fallen.over_bytes
    assert Evict(over) in Policy().decide(fallen).acts
    assert not [a for a in Policy().decide(growing(0.92)).acts if isinstance(a, Evict)]


def test_near_the_mark_a_worker_may_be_replaced_but_nobody_is_slowed_down() -> None:
    near = growing(0.92, workers=GROWN, tokens=2, most_tokens=2, can_merge=True, width=3)
    assert Recycle(4) in Policy().decide(near).acts
    assert Policy().decide(replace(near, workers=())).acts == (Trim(),)


def test_an_idle_loader_gives_its_workers_too_one_at_work_does_not() -> None:
    asked = at(0.4, asked_bytes=5 * MIB, ready_bytes=20 * MIB, can_merge=True)
    assert Policy().decide(asked).acts == (Trim(), Evict(5 * MIB))
    assert Merge() in Policy().decide(replace(asked, is_idle=True)).acts


def test_a_worker_that_has_outgrown_its_share_is_replaced_though_nothing_presses() -> None:
    share = decide_promised(BUDGET) // 2
    grown = at(0.6, workers=(WorkerFact(1, share + 1, True),))
    assert Policy().decide(grown).acts == (Recycle(1),)
    assert Policy().decide(replace(grown, workers=(WorkerFact(1, share - 1, True),))).acts == ()
    assert Policy().decide(replace(grown, workers=(WorkerFact(1, share + 1, False),))).acts == ()


def test_where_memory_is_short_growth_worth_a_batch_is_enough() -> None:
    short = at(0.6, is_short=True, batch_bytes=20 * MIB, workers=(WorkerFact(1, 21 * MIB, True),))
    assert Policy().decide(short).acts == (Recycle(1),)


def test_what_was_taken_comes_back_after_a_while_of_calm() -> None:
    policy = Policy()
    policy.decide(growing(0.92))
    taken = at(0.5, tokens=1, most_tokens=2)
    assert policy.decide(replace(taken, t_s=1.0)).acts == ()
    assert policy.decide(replace(taken, t_s=4.0)).acts == (AddToken(),)
    parted = at(0.5, can_split=True)
    assert policy.decide(replace(parted, t_s=5.0)).acts == (Split(),)
    assert policy.decide(replace(parted, t_s=5.1)).acts == ()
    assert policy.decide(replace(parted, t_s=6.0, is_waiting=False)).acts == ()


def test_workers_that_wait_for_a_processor_are_more_than_the_knee() -> None:
    policy = Policy()
    crowded = at(0.5, cpu_wait_frac=0.5, tokens=4, most_tokens=4, cpus=2)
    assert policy.decide(crowded).acts == (TakeToken(),)
    assert policy.decide(replace(crowded, t_s=1.0, tokens=3)).acts == (TakeToken(),)
    assert policy.decide(replace(crowded, t_s=2.0, tokens=2)).acts == (), "a processor each"
    calm = replace(crowded, tokens=2, cpu_wait_frac=0.05)
    assert policy.decide(replace(calm, t_s=10.0)).acts == (), "it was tried just now"
    assert policy.decide(replace(calm, t_s=40.0)).acts == (AddToken(),)


def test_workers_that_wait_for_a_disk_may_be_many() -> None:
    sleeping = at(0.5, cpu_wait_frac=0.01, tokens=16, most_tokens=16, cpus=2)
    assert Policy().decide(sleeping).acts == ()


@given(
    st.lists(
        st.tuples(st.floats(0, 1.5), st.floats(-1, 1), st.booleans(), st.integers(0, 3)),
        max_size=40,
    )
)
def test_any_history_gives_at_most_one_step_each_half_second(
    history: list[tuple[float, float, bool, int]],
) -> None:
    policy, steps, t_s = Policy(), [], 0.0
    for frac, growth, is_short, asked in history:
        t_s += 0.2
        position = at(
            frac,
            t_s,
            growth_bytes_per_s=growth * MIB,
            is_short=is_short,
            asked_bytes=asked,
            workers=GROWN,
            tokens=2,
            most_tokens=4,
            can_merge=True,
        )
        decision = policy.decide(position)
        assert decision.because
        kinds = (Recycle, TakeToken, AddToken, Merge, Split, Narrow)
        found = [act for act in decision.acts if isinstance(act, kinds)]
        assert len(found) <= 1
        steps += [t_s] * len(found)
    assert all(after - before > 0.49 for before, after in itertools.pairwise(steps))


@pytest.mark.parametrize("t_s", [-5.0, 0.0])
def test_a_clock_that_stands_or_jumps_back_does_no_harm(t_s: float) -> None:
    policy = Policy()
    policy.decide(growing(0.92, 10.0, workers=GROWN))
    assert policy.decide(growing(0.92, t_s, workers=GROWN)).stance == "shrink"
