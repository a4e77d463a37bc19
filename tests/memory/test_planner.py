"""What is expected next follows what was seen, and a crew never takes more than its budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.planner import (
    PARKED_BYTES,
    WORKER_BYTES,
    ZYGOTE_BYTES,
    CrewPlan,
    SizeHistory,
    TooSmall,
    plan_crew,
    split_streams,
)
from forebay.units import GIB, MIB

BUDGETS = st.integers(1, 4 * GIB)
STREAMS = st.integers(1, 64)
SIZES = st.integers(0, GIB)


def history(sizes: list[int]) -> SizeHistory:
    made = SizeHistory()
    for size in sizes:
        made.add(size)
    return made


def planned(budget_bytes: int, num_streams: int) -> CrewPlan:
    plan = plan_crew(budget_bytes, num_streams, may_merge=True)
    assert isinstance(plan, CrewPlan)
    return plan


# -- sizes ------------------------------------------------------------------------------------


def test_nothing_is_expected_while_nothing_was_seen() -> None:
    assert SizeHistory().estimate_next() == 0


@given(SIZES, st.integers(1, 40))
def test_equal_sizes_are_expected_exactly(size: int, count: int) -> None:
    assert history([size] * count).estimate_next() == size


@given(st.lists(SIZES, min_size=1, max_size=40))
def test_the_largest_recent_size_is_always_covered(sizes: list[int]) -> None:
    seen = history(sizes)
    assert max(sizes[-16:]) <= seen.estimate_next() <= max(sizes[-16:]) * 9 / 8
    assert (seen.seen, seen.largest_bytes) == (len(sizes), max(sizes))


def test_one_giant_is_forgotten_after_sixteen_usual_ones_but_stays_on_record() -> None:
    seen = history([GIB] + [MIB] * 16)
    assert seen.estimate_next() == MIB
    assert seen.largest_bytes == GIB


# -- crews ------------------------------------------------------------------------------------


@given(STREAMS)
def test_a_wide_budget_carries_all_that_was_asked_for(num_streams: int) -> None:
    assert planned(16 * GIB, num_streams) == CrewPlan(num_streams, num_streams, "")


@given(BUDGETS, STREAMS, st.booleans())
def test_a_crew_fits_into_its_budget(budget_bytes: int, num_streams: int, may_merge: bool) -> None:
    plan = plan_crew(budget_bytes, num_streams, may_merge=may_merge)
    if isinstance(plan, TooSmall):
        assert plan.needed_bytes > budget_bytes
        return
    parked = plan.workers - plan.tokens
    taken = ZYGOTE_BYTES + plan.tokens * WORKER_BYTES + parked * PARKED_BYTES
    assert taken <= budget_bytes
    assert 1 <= plan.tokens <= plan.workers <= num_streams


@given(BUDGETS, STREAMS)
def test_streams_share_a_process_only_where_they_may(budget_bytes: int, num_streams: int) -> None:
    plan = plan_crew(budget_bytes, num_streams, may_merge=False)
    assert isinstance(plan, TooSmall) or plan.workers == num_streams


@given(BUDGETS, STREAMS, st.integers(0, GIB))
def test_more_budget_never_means_fewer_workers(
    budget_bytes: int, num_streams: int, more: int
) -> None:
    plan = plan_crew(budget_bytes, num_streams, may_merge=True)
    if isinstance(plan, CrewPlan):
        assert planned(budget_bytes + more, num_streams).workers >= plan.workers


@given(BUDGETS, STREAMS, st.booleans())
def test_a_refusal_names_a_budget_that_is_enough(
    budget_bytes: int, num_streams: int, may_merge: bool
) -> None:
    plan = plan_crew(budget_bytes, num_streams, may_merge=may_merge)
    if isinstance(plan, TooSmall):
        enough = plan_crew(plan.needed_bytes, num_streams, may_merge=may_merge)
        assert isinstance(enough, CrewPlan)
        assert isinstance(
            plan_crew(plan.needed_bytes - 1, num_streams, may_merge=may_merge), TooSmall
        )


@pytest.mark.parametrize("num_streams", [2, 8, 40])
def test_fewer_than_asked_for_says_why(num_streams: int) -> None:
    for budget_bytes in range(20 * MIB, 600 * MIB, 20 * MIB):
        plan = planned(budget_bytes, num_streams)
        is_full = plan.workers == plan.tokens == num_streams
        assert is_full == (not plan.because)


@given(STREAMS, st.data())
def test_every_stream_has_one_worker_and_neighbours_have_different_ones(
    num_streams: int, data: st.DataObject
) -> None:
    workers = data.draw(st.integers(1, num_streams))
    carried = split_streams(num_streams, workers)
    assert len(carried) == workers
    assert sorted(stream for streams in carried for stream in streams) == list(range(num_streams))
    assert max(map(len, carried)) - min(map(len, carried)) <= 1
    owner = {stream: worker for worker, streams in enumerate(carried) for stream in streams}
    assert all(owner[s] != owner[s + 1] for s in range(num_streams - 1)) or workers == 1
