"""Budgets that are none, or too small for anything: refused with numbers and the way out."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.units import GIB, MIB

from .datasets import Gated, Numbered, count_lines, note

pytestmark = pytest.mark.timeout(60)

NO_BUDGETS = ("4Gb", -1, 0, "150%", "0%", "", "-1GiB", "nan", "inf", "1e400GiB", 0.5, "lots")
NO_NUMBERS = (math.nan, math.inf, -math.inf)
NO_TYPES: tuple[Any, ...] = (True, False, [4], (1,), {}, b"4GiB", 4j, object)


@pytest.fixture(autouse=True)
def no_other_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FOREBAY_MEMORY_BUDGET", raising=False)
    yield
    forebay.set_default_budget(None)


def make_loader(dataset: Any = None, **options: Any) -> Any:
    return forebay.DataLoader(dataset or Numbered(12), **{"num_workers": 2, **options})


# -- values that name no budget ------------------------------------------------------------------


@pytest.mark.parametrize("value", [*NO_BUDGETS, *NO_NUMBERS], ids=repr)
def test_a_value_that_names_no_budget_is_refused_by_the_constructor(value: Any) -> None:
    with pytest.raises(ValueError) as told:
        make_loader(memory_budget=value)
    assert isinstance(told.value, forebay.InvalidBudget)
    check_names(str(told.value), value)


@pytest.mark.parametrize("value", NO_TYPES, ids=repr)
def test_a_type_that_names_no_budget_is_refused_by_the_constructor(value: Any) -> None:
    with pytest.raises(TypeError) as told:
        make_loader(memory_budget=value)
    assert isinstance(told.value, forebay.InvalidBudgetType)
    check_names(str(told.value), value)


def check_names(text: str, value: Any) -> None:
    """The value, and every accepted form."""
    assert f"memory_budget={value!r}" in text
    for form in ("int", '"2GiB"', '"25%"', '"auto"', '"off"'):
        assert form in text


@pytest.mark.parametrize("value", ["64 MiB", 64 * MIB, "64m", "67108864", float(64 * MIB)])
def test_a_size_may_be_written_in_many_ways(value: Any) -> None:
    loader = make_loader(memory_budget=value)
    assert len(list(loader)) == 12
    assert loader.stats().budget_bytes == 64 * MIB


def test_the_environment_sets_the_budget_of_loaders_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FOREBAY_MEMORY_BUDGET", "300MiB")
    loader, own = make_loader(), make_loader(memory_budget="200MiB")
    assert len(list(loader)) == len(list(own)) == 12
    assert loader.stats().budget_bytes == 300 * MIB
    assert own.stats().budget_bytes == 200 * MIB


def test_the_default_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_MEMORY_BUDGET", "300MiB")
    forebay.set_default_budget("250MiB")
    loader = make_loader()
    assert len(list(loader)) == 12
    assert loader.stats().budget_bytes == 250 * MIB
    forebay.set_default_budget(None)
    assert len(list(loader)) == 12
    assert loader.stats().budget_bytes == 300 * MIB


@pytest.mark.parametrize("value", ["4Gb", True, -1])
def test_a_default_that_names_no_budget_is_refused_at_once(value: Any) -> None:
    with pytest.raises(forebay.ForebayError, match=f"{value!r}"):
        forebay.set_default_budget(value)
    assert len(list(make_loader())) == 12


def test_an_empty_environment_variable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_MEMORY_BUDGET", "")
    loader = make_loader()
    assert len(list(loader)) == 12
    assert loader.stats().budget_bytes > 64 * MIB


def test_a_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_MEMORY_BUDGET", "4Gb")
    with pytest.raises(forebay.InvalidBudget, match="FOREBAY_MEMORY_BUDGET='4Gb'"):
        iter(make_loader())


def test_an_unknown_seeding_is_refused_with_what_is_known() -> None:
    with pytest.raises(forebay.InvalidOption, match="seeding='numpy' is not one of 'torch'"):
        make_loader(seeding="numpy")


# -- budgets that are too small -------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, MIB, "0.5MiB"])
def test_a_budget_below_one_worker_is_refused_before_any_work(tmp_path: Path, budget: Any) -> None:
    loader = make_loader(Gated(tmp_path, at=0), memory_budget=budget)
    with pytest.raises(forebay.BudgetTooSmall) as told:
        iter(loader)
    assert told.value.budget_bytes <= MIB < told.value.needed_bytes == told.value.workers_bytes
    for word in ("memory_budget is", "one worker", "Raise the budget to", "num_workers=0"):
        assert word in str(told.value)
    assert count_lines(tmp_path / "waiting") == 0
    loader.memory_budget = "200MiB"
    (tmp_path / "open").touch()
    assert len(list(loader)) == 24


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_template_of_its_own_is_weighed_before_a_batch_is_delivered(method: str) -> None:
    """It holds its own copy of torch, which it shares with none but the workers."""
    chosen: Any = {"num_workers": 2, "multiprocessing_context": method, "batch_size": 2}
    with pytest.raises(forebay.BudgetTooSmall) as told:
        list(make_loader(Numbered(24, 1000), memory_budget="48MiB", **chosen))
    needed = told.value.needed_bytes
    assert needed > 64 * MIB
    with make_loader(Numbered(24, 1000), memory_budget=needed + needed // 20, **chosen) as loader:
        assert len(list(loader)) == 12
        assert loader.stats().peak_footprint_bytes <= needed + needed // 20


class Images(Numbered):
    """24 samples of 1 MiB."""

    def __init__(self) -> None:
        super().__init__(24, MIB)


def refuse_one_batch(**options: Any) -> forebay.BudgetTooSmall:
    with pytest.raises(forebay.BudgetTooSmall) as told:
        list(make_loader(Images(), memory_budget="28MiB", **options))
    return told.value


def test_a_budget_below_one_batch_is_refused_with_numbers() -> None:
    error = refuse_one_batch(batch_size=24, num_workers=1)
    assert error.budget_bytes == 28 * MIB
    assert error.batch_bytes == 24 * MIB
    assert error.workers_bytes > MIB
    assert error.needed_bytes == error.workers_bytes + error.batch_bytes > 28 * MIB
    assert "24 MiB" in str(error)
    assert "28 MiB" in str(error)


def test_the_budget_that_is_named_works() -> None:
    """A little more is given: processes do not take the same to the page each time."""
    needed = refuse_one_batch(batch_size=24, num_workers=1).needed_bytes
    loader = make_loader(
        Images(), batch_size=24, num_workers=1, memory_budget=needed + needed // 20
    )
    assert sum(len(batch) for batch in loader) == 24


def test_the_batch_size_that_is_named_fits() -> None:
    text = str(refuse_one_batch(batch_size=24, num_workers=1))
    found = re.search(r"lower batch_size from 24 to (\d+)", text)
    assert found
    fits = int(found.group(1))
    assert 1 <= fits < 24
    loader = make_loader(Images(), batch_size=fits, num_workers=1, memory_budget="28MiB")
    assert sum(len(batch) for batch in loader) == 24


def test_a_loader_that_was_refused_leaves_its_iterator_usable_for_nothing_else() -> None:
    iterator = iter(make_loader(Images(), batch_size=24, num_workers=1, memory_budget="28MiB"))
    with pytest.raises(forebay.BudgetTooSmall):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def identity(samples: list[Any]) -> Any:
    return samples[0]


class Growing(Numbered):
    """Sample 6 is 200 MiB, the others are 2 MiB; it is made in pieces that can be dropped."""

    def __getitem__(self, index: int) -> torch.Tensor:
        size = 200 * MIB if index == 6 else 2 * MIB
        return torch.full((size,), index, dtype=torch.uint8)


@pytest.mark.parametrize("collate", [None, identity], ids=["default collate", "own collate"])
def test_a_later_batch_beyond_the_budget_is_refused_and_iteration_goes_on(collate: Any) -> None:
    options = {"memory_budget": "120MiB", "timeout": 3}
    seen: list[int] = []
    refused: list[forebay.BatchExceedsBudget] = []
    with make_loader(Growing(12), collate_fn=collate, **options) as loader:
        iterator = iter(loader)
        for _ in range(12):
            try:
                seen.append(int(next(iterator).flatten()[0]))
            except forebay.BatchExceedsBudget as caught:
                refused.append(caught)
        with pytest.raises(StopIteration):
            next(iterator)
    assert seen == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    (error,) = refused
    assert (error.serial, error.batch_bytes) == (6, 200 * MIB)
    assert error.budget_bytes == 120 * MIB
    assert 0 < error.available_bytes < 120 * MIB
    for word in ("batch 6", "200 MiB", "120 MiB", "iteration can go on", "Raise the budget"):
        assert word in str(error)


def test_every_batch_beyond_the_budget_is_refused_on_its_own() -> None:
    class Alternating(Numbered):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(100 * MIB if index % 3 == 2 else MIB, dtype=torch.uint8)

    options = {"memory_budget": "80MiB", "prefetch_factor": 1, "timeout": 20}
    iterator = iter(make_loader(Alternating(9), **options))
    answers = []
    for _ in range(9):
        try:
            answers.append(next(iterator).numel())
        except forebay.BatchExceedsBudget as error:
            answers.append(-error.serial)
    assert answers == [MIB, MIB, -2, MIB, MIB, -5, MIB, MIB, -8]
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_share_of_a_machine_is_a_budget() -> None:
    loader = make_loader(memory_budget="25%")
    assert len(list(loader)) == 12
    assert MIB < loader.stats().budget_bytes < os.sysconf("SC_PHYS_PAGES") * 4096
    assert "0.25 of the limit" in loader.explain()


def test_an_automatic_budget_says_what_it_was_taken_from() -> None:
    loader = make_loader()
    assert len(list(loader)) == 12
    assert loader.stats().budget_bytes < 1024 * GIB
    assert "auto: 80% of what is free" in loader.explain()


def test_off_is_torchs_own_engine(tmp_path: Path) -> None:
    loader = make_loader(memory_budget="off", worker_init_fn=lambda n: note(tmp_path / "n", n))
    assert len(list(loader)) == 12
    assert count_lines(tmp_path / "n") == 2
    assert loader.stats().batches == 0


@pytest.mark.filterwarnings("ignore::forebay.BudgetWarning")
def test_a_loader_for_which_others_leave_no_room_is_told_what_all_of_them_need() -> None:
    budget = forebay.Budget("30MiB")
    options: dict[str, Any] = {"num_workers": 2, "memory_budget": budget}
    loaders: list[Any] = [forebay.DataLoader(Numbered(64, 50_000), 8, **options) for _ in range(3)]
    iterators: list[Any] = []
    try:
        with pytest.raises(forebay.BudgetTooSmall) as told:
            iterators.extend(map(iter, loaders))
        assert told.value.budget_bytes == 30 * MIB
        assert told.value.needed_bytes > 30 * MIB
        assert "its other loaders hold" in str(told.value)
    finally:
        for loader in loaders:
            loader.close()
