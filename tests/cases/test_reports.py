"""Public reports of loaders that ran out of memory, each small, with what its author wanted.

The numbers are those of the project's list of reports. Others of them are shown elsewhere: 10
and 42 in tests/budget/test_live.py, 29 and 46 in tests/budget/workloads.py, 24, 48 and 49 in
tests/memory.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset

import forebay

MIB = 1024**2
T = TypeVar("T")


class Floats(Dataset[torch.Tensor]):
    """`size_mib` of floats that hold the index."""

    def __init__(self, size_mib: int, length: int = 40) -> None:
        self.size_mib, self.length = size_mib, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size_mib * MIB // 4,), float(index))


class Records(Dataset[dict[str, Any]]):
    """A few numbers, and thousands of small dicts beside them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = [{"k": f"{index}/{row}", "v": row / 3} for row in range(4000)]
        return {"x": torch.arange(10.0) + index, "rows": rows}


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def take_records() -> tuple[int, str]:
    """The peak of an epoch, and what is said of it."""
    with forebay.DataLoader(
        Records(),
        4,
        num_workers=2,
        prefetch_factor=8,
        collate_fn=as_it_is,
        memory_budget="48MiB",
        multiprocessing_context="fork",
    ) as loader:
        for number, batch in enumerate(loader):
            assert batch[0]["x"][0] == 4 * number
            assert len(batch[3]["rows"]) == 4000
            if number == 3:
                explained = loader.explain()
        return loader.stats().peak_footprint_bytes, explained


def take_records_beside_holes() -> tuple[int, str]:
    """The same where this process has many half-empty pages, which it goes on to fill."""
    scattered = [{"k": str(number), "v": number / 7} for number in range(400_000)]
    del scattered[::2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", forebay.BudgetWarning)
        return take_records()


def run_fresh(scene: Callable[[], T]) -> T:
    """What `scene` returns in a process whose heap holds nothing of other tests."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(scene).result()


def test_3_python_objects_count_and_are_named() -> None:
    peak_bytes, explained = run_fresh(take_records)
    assert peak_bytes <= 48 * MIB
    assert "of a batch is Python objects" in explained


def test_3_pages_that_main_rewrites_after_the_fork_are_named() -> None:
    _, explained = run_fresh(take_records_beside_holes)
    assert "kept by fork" in explained


def test_13_persistent_workers_come_to_a_plateau() -> None:
    with forebay.DataLoader(
        Floats(1, 64), 16, num_workers=2, persistent_workers=True, memory_budget="120MiB"
    ) as loader:
        after = []
        for _ in range(6):
            for _batch in loader:
                pass
            after.append(loader.stats().workers_private_bytes)
        assert loader.stats().peak_footprint_bytes <= 120 * MIB
    assert max(after[2:]) <= 1.5 * max(after[:2])


def test_14_prefetch_that_was_turned_up_is_held_to_the_budget() -> None:
    budget = 200 * MIB
    with forebay.DataLoader(
        Floats(16), num_workers=4, prefetch_factor=8, memory_budget=budget
    ) as loader:
        for number, batch in enumerate(loader):
            assert batch[0, 0] == number
            time.sleep(0.02)
            stats = loader.stats()
            in_arena = stats.in_flight_bytes + stats.held_by_consumer_bytes
            assert in_arena <= 12 * 16 * MIB
            assert stats.footprint_bytes <= budget


def test_15_a_prefetch_of_256_is_accepted_and_costs_what_the_budget_says() -> None:
    budget = 160 * MIB
    with forebay.DataLoader(
        Floats(16, 30), num_workers=2, prefetch_factor=256, memory_budget=budget
    ) as loader:
        seen = []
        for batch in loader:
            seen.append(int(batch[0, 0]))
            time.sleep(0.02)
            assert loader.stats().footprint_bytes <= budget
        assert seen == list(range(30))
        assert loader.prefetch_factor == 256


class OneSlow(Dataset[torch.Tensor]):
    """Sample 0 is not ready before `others` more were made, by whoever makes them."""

    def __init__(self, place: Path, others: int) -> None:
        self.place, self.others = place, others

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            wait_until(lambda: sum(1 for _ in self.place.iterdir()) >= self.others)
        else:
            (self.place / str(index)).touch()
        return torch.full((MIB // 4,), float(index))


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < until, "the others were not made while the slow one was"
        time.sleep(0.005)


def test_27_others_go_on_while_one_is_slow_and_the_order_stays(tmp_path: Path) -> None:
    loader = forebay.DataLoader(
        OneSlow(tmp_path, others=6),
        num_workers=4,
        prefetch_factor=4,
        seeding="batch",
        memory_budget="160MiB",
    )
    with loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(24))
        assert loader.stats().peak_footprint_bytes <= 160 * MIB
