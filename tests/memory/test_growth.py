"""What goes on growing is told from what settles, and Python's from what lies below."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.growth import GrowthTrail, SharedTrail
from forebay.memory.peak import BlockCounter
from forebay.memory.tables import find_tables
from forebay.units import KIB, MIB


def follow(
    sizes: Sequence[float], blocks: list[int] | None = None, trail: GrowthTrail | None = None
) -> GrowthTrail:
    """A worker that had so much after each batch."""
    trail = trail or GrowthTrail()
    for number, size in enumerate(sizes):
        trail.note_batch((0, int(size), blocks[number] if blocks else -1))
    return trail


@pytest.mark.parametrize(("a_batch", "kind"), [(0, "native"), (2, "python"), (40, "python")])
def test_a_leak_is_told_within_a_hundred_batches(a_batch: int, kind: str) -> None:
    noise = random.Random(1)
    sizes = [50 * MIB + n * 256 * KIB + noise.choice((0, 3 * MIB)) for n in range(100)]
    blocks = [200_000 + n * a_batch + noise.randrange(4) for n in range(100)]
    found = follow(sizes, blocks).judge()
    assert found is not None
    assert found.kind == kind
    assert 0.8 * 256 * KIB < found.bytes_a_batch < 1.2 * 256 * KIB


def test_one_object_a_batch_is_told_once_free_lists_are_full() -> None:
    sizes = [50 * MIB + n * 256 * KIB for n in range(600)]
    found = follow(sizes, [200_000 + min(n, 60) + n for n in range(600)]).judge()
    assert found is not None
    assert found.kind == "python"
    found = follow(sizes, [200_000 + min(n, 60) for n in range(600)]).judge()
    assert found is not None
    assert found.kind == "native"


def test_garbage_that_comes_and_goes_is_not_taken_for_a_leak_of_pythons() -> None:
    sizes = [50 * MIB + n * 256 * KIB for n in range(100)]
    found = follow(sizes, [200_000 + 70 * (n % 11) + n for n in range(100)]).judge()
    assert found is not None
    assert found.kind == "unknown"
    found = follow(sizes, [200_000 + 7 * (n % 11) + 9 * n for n in range(100)]).judge()
    assert found is not None
    assert found.kind == "python"


def test_where_blocks_are_not_counted_it_says_so() -> None:
    found = follow([n * MIB for n in range(60)]).judge()
    assert found is not None
    assert found.kind == "unknown"


@pytest.mark.parametrize(
    "size",
    [
        lambda n: 80 * MIB,
        lambda n: 80 * MIB * (1 - 2.718 ** (-n / 60)),
        lambda n: MIB * min(n, 100),
        lambda n: 20 * MIB * np.log1p(n),  # a cache by shape: new ones come ever more rarely
        lambda n: 80 * MIB - n * KIB,
        lambda n: (n % 10) * MIB,
        lambda n: n * 100,
    ],
    ids=["flat", "settling", "a bounded cache", "shapes", "shrinking", "sawtooth", "tiny"],
)
def test_what_settles_is_no_leak(size: Any) -> None:
    assert follow([float(size(n)) for n in range(400)]).judge() is None


def test_a_leak_goes_on_in_the_one_that_takes_the_place() -> None:
    first = follow([10 * MIB + n * MIB for n in range(17)])
    assert first.judge() is None
    first.go_on()
    found = follow([10 * MIB + n * MIB for n in range(17)], trail=first).judge()
    assert found is not None
    assert 0.8 * MIB < found.bytes_a_batch < 1.2 * MIB


@given(st.lists(st.integers(0, 2**33), max_size=200), st.booleans())
def test_any_history_is_judged_without_a_fault(sizes: list[int], counts: bool) -> None:
    trail = follow([float(size) for size in sizes], sizes if counts else None)
    found = trail.judge()
    assert found is None or found.bytes_a_batch > 0


def test_pages_that_were_shared_and_are_ones_own_now_are_counted() -> None:
    shared = SharedTrail()
    assert shared.copied_bytes == 0
    for private in (10, 20, 60, 45, 90):
        shared.note_reading(100 * MIB, private * MIB)
    assert shared.copied_bytes == 35 * MIB, "90 at first, and 55 in one of the latest readings"


def test_blocks_are_counted_seldom_enough_to_cost_nothing() -> None:
    counter = BlockCounter()
    counts = [counter.count() for _ in range(1000)]
    assert counts[0] > 1000
    assert counts.count(-1) > 900


class _Holder:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class _Unwilling:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_large_tables_of_objects_are_named() -> None:
    records = [{"path": "a"}] * 20_000
    dataset = _Holder(
        inner=_Holder(records=records),
        few=[1, 2],
        parts=[_Holder(table={at: at for at in range(11_000)})],
        array=np.zeros(50_000),
        objects=np.array(["a", None] * 10_000, dtype=object),
    )
    assert set(find_tables(dataset)) == {
        "dataset.inner.records (list of 20,000)",
        "dataset.objects (ndarray with objects of 20,000)",
        "dataset.parts[0].table (dict of 11,000)",
    }
    assert find_tables(records) == ("dataset (list of 20,000)",)
    assert find_tables(_Unwilling()) == ()
    assert find_tables(None) == ()


def test_a_dataset_that_holds_itself_ends() -> None:
    dataset = _Holder()
    dataset.itself = dataset  # type: ignore[attr-defined]
    assert find_tables(dataset) == ()
