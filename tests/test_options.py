"""What the user asks for is checked once, and each refusal says what would have been taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import InvalidBudget, InvalidBudgetType, InvalidOption
from forebay.options import (
    BACKENDS,
    ENVIRONMENT_VARIABLE,
    AutoBudget,
    FixedBudget,
    OffBudget,
    ShareBudget,
    parse_backend,
    parse_budget,
    parse_seeding,
    resolve_budget,
    set_default_budget,
)
from forebay.units import ACCEPTED_FORMS, GIB, MIB, Share


@pytest.fixture(autouse=True)
def nothing_is_preset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    set_default_budget(None)
    yield
    set_default_budget(None)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (4 * GIB, FixedBudget(4 * GIB)),
        (1e9, FixedBudget(10**9)),
        (np.float64(1e6), FixedBudget(10**6)),
        ("2GiB", FixedBudget(2 * GIB)),
        ("25%", ShareBudget(Share(0.25))),
        ("auto", AutoBudget()),
        (" AUTO ", AutoBudget()),
        ("off", OffBudget()),
    ],
)
def test_budgets_are_read(raw: Any, expected: object) -> None:
    assert parse_budget(raw) == expected


@pytest.mark.parametrize(
    "raw",
    [
        *("4Gb", "", "  ", "0%", "150%", "lots", "0", "-1", "none"),
        *(0, -1, 0.5, 1.5, float("nan"), float("inf"), -float("inf")),
    ],
)
def test_a_wrong_value_is_named_with_the_accepted_forms(raw: Any) -> None:
    with pytest.raises(InvalidBudget) as refused:
        parse_budget(raw)
    assert repr(raw) in str(refused.value)
    assert ACCEPTED_FORMS in str(refused.value)
    assert refused.value.value is raw


@pytest.mark.parametrize(
    "raw",
    [None, True, False, [1], (1,), {}, 1j, b"1GiB", object()],
    ids=lambda raw: type(raw).__name__,
)
def test_a_wrong_type_is_named_with_the_accepted_forms(raw: Any) -> None:
    with pytest.raises(InvalidBudgetType) as refused:
        parse_budget(raw)
    assert f"is of type {type(raw).__name__}" in str(refused.value)
    assert ACCEPTED_FORMS in str(refused.value)


@pytest.mark.parametrize("raw", [np.int64(MIB), np.uint32(MIB), np.float32(MIB)], ids=repr)
def test_numbers_of_numpy_are_numbers(raw: Any) -> None:
    assert parse_budget(raw) == FixedBudget(MIB)


@given(st.text(max_size=10) | st.integers() | st.floats())
def test_anything_is_a_budget_or_refused_as_a_value(raw: Any) -> None:
    try:
        budget = parse_budget(raw)
    except InvalidBudget:
        return
    assert not isinstance(budget, FixedBudget) or budget.size_bytes >= 1


def test_what_is_given_comes_before_the_default_and_that_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert resolve_budget(None) == AutoBudget()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "1GiB")
    assert resolve_budget(None) == FixedBudget(GIB)
    set_default_budget("50%")
    assert resolve_budget(None) == ShareBudget(Share(0.5))
    assert resolve_budget("off") == OffBudget()
    set_default_budget(None)
    assert resolve_budget(None) == FixedBudget(GIB)


def test_an_empty_environment_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert resolve_budget(None) == AutoBudget()


def test_a_wrong_default_is_refused_at_once_and_changes_nothing() -> None:
    set_default_budget("1GiB")
    with pytest.raises(InvalidBudget, match="'2Gb'"):
        set_default_budget("2Gb")
    assert resolve_budget(None) == FixedBudget(GIB)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (FixedBudget(4 * GIB), "4 GiB"),
        (ShareBudget(Share(0.25)), "0.25 of the limit"),
        (AutoBudget(), "auto"),
        (OffBudget(), "off"),
    ],
)
def test_budgets_say_what_they_are(budget: object, text: str) -> None:
    assert str(budget) == text


def test_seedings_are_a_closed_set() -> None:
    assert parse_seeding("torch") == "torch"
    assert parse_seeding("batch") == "batch"
    with pytest.raises(InvalidOption, match="seeding='epoch' is not one of 'torch', 'batch'"):
        parse_seeding("epoch")


def test_backends_are_a_closed_set() -> None:
    assert [parse_backend(name) for name in ("process", "thread", "auto")] == list(BACKENDS)
    with pytest.raises(InvalidOption, match="worker_backend='fork' is not one of 'process', 'th"):
        parse_backend("fork")
