"""However tight the budget: it works, or it is refused with a budget that works. Never a hang."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import forebay

MIB = 1024**2
pytestmark = pytest.mark.filterwarnings(
    "ignore::forebay.errors.BudgetWarning", "ignore:This DataLoader will create:UserWarning"
)


def rows() -> TensorDataset:
    return TensorDataset(torch.arange(64.0)[:, None].expand(64, 150_528).clone())


def firsts(loader: Any) -> list[float]:
    return [float(batch[0, 0]) for (batch,) in loader]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("budget_mib", [26, 30, 40])
def test_a_tight_budget_delivers_every_batch(workers: int, budget_mib: int) -> None:
    loader = forebay.DataLoader(
        rows(), 16, num_workers=workers, memory_budget=budget_mib * MIB, timeout=20
    )
    with loader:
        assert firsts(loader) == [0.0, 16.0, 32.0, 48.0]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("budget_mib", [16, 22])
def test_a_budget_below_one_batch_is_refused_with_one_that_works(
    workers: int, budget_mib: int
) -> None:
    options: dict[str, Any] = {"batch_size": 16, "num_workers": workers, "timeout": 20}
    with pytest.raises(forebay.BudgetTooSmall) as told:
        firsts(forebay.DataLoader(rows(), memory_budget=budget_mib * MIB, **options))
    assert told.value.batch_bytes > 9 * MIB
    offered = told.value.needed_bytes + MIB  # the text rounds up to a MiB
    with forebay.DataLoader(rows(), memory_budget=offered, **options) as loader:
        assert firsts(loader) == [0.0, 16.0, 32.0, 48.0]


class Stuck(Dataset[int]):
    """Its second item waits until it is let go."""

    def __init__(self) -> None:
        self.gate = torch.multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            self.gate.wait()
        return index


def test_a_loader_explains_itself_while_its_consumer_waits() -> None:
    dataset = Stuck()
    loader = forebay.DataLoader(dataset, num_workers=1)
    with loader:
        iterator = iter(loader)
        next(iterator)
        taken: list[Any] = []
        consumer = threading.Thread(target=lambda: taken.append(next(iterator)))
        consumer.start()
        try:
            assert loader.stats().batches == 1
            assert "budget" in loader.explain()
        finally:
            dataset.gate.set()
            consumer.join()
        assert int(taken[0]) == 1


class Touched(Dataset[int]):
    """Records as Python objects: each worker that reads them copies their pages."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = [
            {"key": str(n), "value": float(n)} for n in range(300_000)
        ]

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> int:
        part = self.records[index * 100 : index * 100 + 100]
        return sum(len(record["key"]) for record in part)


class TouchedStream(torch.utils.data.IterableDataset[int]):
    """The same as a stream, which cannot go on in another process."""

    def __init__(self) -> None:
        self.touched = Touched()

    def __iter__(self) -> Iterator[int]:
        return (self.touched[index] for index in range(len(self.touched)))


def test_a_budget_that_touched_records_would_outgrow_is_kept() -> None:
    dataset = Touched()
    # Before the fork: what main itself touches later would be copied for main.
    wanted = list(torch.utils.data.DataLoader(dataset, 4))
    with forebay.DataLoader(dataset, 4, num_workers=2, memory_budget=30 * MIB) as loader:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(loader, wanted, strict=True))
        # Each worker would have come to 60 MiB; tests/budget measures such a table from outside.
        assert loader.stats().peak_footprint_bytes < 60 * MIB
        assert "in another process" in loader.explain()


def test_a_budget_that_the_dataset_outgrows_is_told() -> None:
    loader = forebay.DataLoader(TouchedStream(), 4, num_workers=2, memory_budget=30 * MIB)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            for _ in loader:
                pass
    assert loader.stats().peak_footprint_bytes > 30 * MIB
    assert [w for w in seen if "above its memory_budget" in str(w.message)]
    assert "the budget was exceeded" in loader.explain()
