"""What torch pins follows from the sizes of the tensors alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.pinned import (
    PinnedPool,
    advise_batch_size,
    bound_pool_bytes,
    estimate_pool_bytes,
    pinned_bytes,
    round_pinned,
)
from forebay.units import MIB

SIZES = st.integers(0, 1 << 40)


@pytest.mark.parametrize(
    ("size_bytes", "pinned"),
    [
        (0, 0),
        (1, 1),
        (128 * MIB - 1, 128 * MIB),
        (128 * MIB, 128 * MIB),
        (128 * MIB + 1, 256 * MIB),
        (129_500_000, 128 * MIB),
        (int(129.5 * MIB), 256 * MIB),
    ],
)
def test_an_allocation_is_rounded_to_the_next_power_of_two(size_bytes: int, pinned: int) -> None:
    assert round_pinned(size_bytes) == pinned


def test_each_tensor_of_a_batch_is_rounded_by_itself() -> None:
    assert pinned_bytes([40 * MIB] * 3) == 3 * 64 * MIB


@given(SIZES)
def test_rounding_takes_less_than_twice_and_never_less_than_asked(size_bytes: int) -> None:
    assert size_bytes <= round_pinned(size_bytes) <= max(0, 2 * size_bytes - 1)


def test_one_sample_less_halves_what_is_pinned() -> None:
    assert advise_batch_size(2 * MIB + 1024, 64) == 63


def test_a_batch_that_fills_its_block_has_no_better_size() -> None:
    assert advise_batch_size(2 * MIB, 64) is None


@pytest.mark.parametrize("batch_size", [0, 1])
def test_a_batch_of_one_has_no_smaller_size(batch_size: int) -> None:
    assert advise_batch_size(3 * MIB, batch_size) is None


def test_fields_are_advised_on_together() -> None:
    label_bytes = 8
    assert advise_batch_size([2 * MIB + 1024, label_bytes], 64) is None
    assert advise_batch_size([2 * MIB + 1024, 2 * MIB + 1024], 64) == 63


@given(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=4), st.integers(1, 4096))
def test_the_advised_size_is_the_largest_that_pins_at_most_half(
    fields: list[int], batch_size: int
) -> None:
    def count(samples: int) -> int:
        return pinned_bytes(field * samples for field in fields)

    advised = advise_batch_size(fields, batch_size)
    if advised is not None:
        assert 0 < advised < batch_size
        assert 2 * count(advised) <= count(batch_size)
        assert 2 * count(advised + 1) > count(batch_size)
        assert count(advised) / advised < count(batch_size) / batch_size


def test_a_free_block_serves_only_its_own_size() -> None:
    pool = PinnedPool()
    pool.put(pool.take(20 * MIB))
    pool.take(10 * MIB)
    assert pool.pool_bytes == (32 + 16) * MIB
    pool.take(17 * MIB)
    assert pool.pool_bytes == (32 + 16) * MIB


def draw_batches(count: int) -> list[list[int]]:
    dice = random.Random(14)
    return [[dice.randint(5 * MIB, 20 * MIB)] for _ in range(count)]


def test_sizes_from_5_to_20_mib_reach_a_plateau_of_three_block_sizes() -> None:
    # 16 MiB and less take blocks of 8 and 16, the rest of 32.
    bound_bytes = bound_pool_bytes(5 * MIB, 20 * MIB, in_flight=3)
    assert bound_bytes == 3 * (8 + 16 + 32) * MIB
    pools = [estimate_pool_bytes(draw_batches(count), 3) for count in (50, 500, 5000)]
    assert pools == sorted(pools)
    assert pools[-1] == bound_bytes


def test_the_pool_holds_far_more_than_what_is_in_flight() -> None:
    batches = draw_batches(5000)
    most_bytes = max(sum(size for (size,) in batches[i : i + 8]) for i in range(len(batches)))
    assert estimate_pool_bytes(batches, 8) > 1.5 * most_bytes


@given(st.lists(st.lists(st.integers(1, 64 * MIB), max_size=3), max_size=40), st.integers(1, 5))
def test_the_pool_is_never_above_its_bound(batches: list[list[int]], in_flight: int) -> None:
    bound_bytes = 3 * bound_pool_bytes(1, 64 * MIB, in_flight)
    assert estimate_pool_bytes(batches, in_flight) <= bound_bytes


@given(st.lists(st.lists(st.integers(1, 64 * MIB), max_size=3), max_size=40), st.integers(1, 5))
def test_the_same_batches_again_in_the_same_order_pin_nothing_new_in_the_end(
    batches: list[list[int]], in_flight: int
) -> None:
    enough = in_flight + 2
    passes = [estimate_pool_bytes(batches * count, in_flight) for count in (enough, enough + 1)]
    assert passes[0] == passes[1]
