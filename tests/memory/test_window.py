"""The window widens only while the consumer waits and a worker idles, and narrows when calm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.window import IDLE_FRAC, LOW_MARK, ROUNDS, STALL_S, Delivery, Window

TIMES = st.floats(0, 10)


def starved(idle_s: float = 1.0) -> Delivery:
    """The consumer waited all the time, and for `idle_s` of it a worker had nothing to do."""
    return Delivery(interval_s=1.0, waited_s=1.0, idle_s=idle_s, ready_left=0)


BUSY = starved(idle_s=0.0)


def calm(ready_left: int = 9) -> Delivery:
    return Delivery(interval_s=1.0, waited_s=0.0, idle_s=0.0, ready_left=ready_left)


def deliveries(most_idle_frac: float) -> st.SearchStrategy[Delivery]:
    """Any that are possible: a worker idles, as it counts here, only while the consumer waits."""

    def make(interval_s: float, waited: float, idle: float, ready_left: int) -> Delivery:
        idle_s = interval_s * min(waited, idle * most_idle_frac)
        return Delivery(interval_s, interval_s * waited, idle_s, ready_left)

    parts = st.floats(0, 1)
    return st.builds(make, TIMES, parts, parts, st.integers(0, 40))


def note_all(window: Window, notes: list[Delivery]) -> list[int]:
    widths = []
    for note in notes:
        window.note(note)
        widths.append(window.width)
    return widths


def test_it_begins_with_a_batch_for_each_worker_if_so_many_may_be() -> None:
    assert Window(4, 16).width == 4
    assert Window(4, 3).width == 3
    assert Window(0, 0).width == 1


def test_a_waiting_consumer_with_an_idle_worker_widens_it_step_by_step() -> None:
    widths = note_all(Window(2, 100), [starved()] * 60)
    assert sorted(set(widths)) == [2, 3, 4, 5, 6, 7, 8, 10, 12, 15]
    assert widths == sorted(widths)


def test_while_one_slow_batch_is_waited_for_it_widens_step_by_step() -> None:
    window = Window(4, 9)
    widths = []
    for tenths in range(1, 9):
        window.note_stall(1.01 * STALL_S * tenths)
        widths.append(window.width)
    assert widths == [5, 6, 7, 8, 9, 9, 9, 9]
    window = Window(4, 9)
    window.note_stall(STALL_S / 2)
    assert window.width == 4
    window.may_widen = False
    window.note_stall(1.0)
    assert window.width == 4


def test_one_short_wait_is_no_reason_to_widen_it() -> None:
    wait = Delivery(interval_s=1.0, waited_s=0.5, idle_s=0.5, ready_left=0)
    widths = note_all(Window(2, 100), [wait, *[calm(1)] * 40])
    assert set(widths) == {2}


@given(st.lists(deliveries(IDLE_FRAC * 0.99), max_size=80))
def test_nothing_else_ever_widens_it(notes: list[Delivery]) -> None:
    widths = note_all(Window(6, 20), notes)
    assert widths == sorted(widths, reverse=True)


def test_a_consumer_that_waits_for_busy_workers_changes_nothing() -> None:
    assert set(note_all(Window(4, 20), [BUSY] * 200)) == {4}


def test_a_little_idling_is_no_reason_either() -> None:
    assert set(note_all(Window(4, 20), [starved(IDLE_FRAC / 2)] * 200)) == {4}


def test_ready_batches_that_never_run_low_narrow_it_by_one_after_calm_rounds() -> None:
    widths = note_all(Window(8, 20), [calm()] * (ROUNDS * 8))
    assert widths == [8] * (ROUNDS * 8 - 1) + [7]


def test_calm_deliveries_narrow_it_down_to_its_least_and_no_further() -> None:
    window = Window(8, 20)
    window.set_bounds(3, 20)
    assert note_all(window, [calm()] * 1000)[-1] == 3


@pytest.mark.parametrize("low", [calm(LOW_MARK), BUSY], ids=["few ready", "a wait"])
def test_one_low_moment_in_a_round_keeps_it(low: Delivery) -> None:
    calm_round = [calm()] * (ROUNDS * 4 - 1)
    assert set(note_all(Window(4, 20), [*calm_round, low] * 20)) == {4}


@given(st.lists(st.tuples(TIMES, st.integers(0, LOW_MARK)), max_size=80))
def test_noise_without_waiting_at_the_low_mark_changes_nothing(
    steps: list[tuple[float, int]],
) -> None:
    notes = [Delivery(interval_s, 0.0, 0.0, left) for interval_s, left in steps]
    assert set(note_all(Window(5, 20), notes)) <= {5}


@given(
    st.integers(0, 30),
    st.integers(0, 30),
    st.lists(deliveries(1.0) | st.tuples(st.integers(-1, 30), st.integers(-1, 30)), max_size=80),
)
def test_it_stays_within_its_bounds(
    start: int, most: int, steps: list[Delivery | tuple[int, int]]
) -> None:
    window = Window(start, most)
    for step in steps:
        if isinstance(step, Delivery):
            window.note(step)
        else:
            window.set_bounds(*step)
        assert 1 <= window.least <= window.width <= window.most


@pytest.mark.parametrize(("width", "expected"), [(9, 4), (2, 3)])
def test_new_bounds_bring_it_back_at_once(width: int, expected: int) -> None:
    window = Window(width, 20)
    window.set_bounds(3, 4)
    assert window.width == expected
