"""What the user asked for, checked once and frozen.

Covers: turning the raw keywords of `DataLoader` into closed values. Does not cover: what a
share or "auto" amounts to on this machine (memory/limits.py), or what fits (planner.py).
"""

from __future__ import annotations

import abc
import math
import numbers
import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

from forebay.errors import InvalidBudget, InvalidBudgetType, InvalidOption
from forebay.units import Share, format_bytes, parse_share, parse_size

ENVIRONMENT_VARIABLE = "FOREBAY_MEMORY_BUDGET"

Seeding: TypeAlias = Literal["torch", "batch"]
SEEDINGS: tuple[Seeding, ...] = ("torch", "batch")

OnDeath: TypeAlias = Literal["replay", "raise"]
ON_DEATHS: tuple[OnDeath, ...] = ("replay", "raise")

Backend: TypeAlias = Literal["process", "thread", "auto"]
BACKENDS: tuple[Backend, ...] = ("process", "thread", "auto")


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """So many bytes, whatever the machine has."""

    size_bytes: int

    def __str__(self) -> str:
        return format_bytes(self.size_bytes)


@dataclass(frozen=True, slots=True)
class ShareBudget:
    """A part of the tightest memory limit that binds."""

    share: Share

    def __str__(self) -> str:
        return f"{self.share.frac:.4g} of the limit"


@dataclass(frozen=True, slots=True)
class AutoBudget:
    """What is free below the tightest limit when iteration starts, less a reserve."""

    def __str__(self) -> str:
        return "auto"


@dataclass(frozen=True, slots=True)
class OffBudget:
    """torch's own engine, to tell a fault of forebay's from one of the job's."""

    def __str__(self) -> str:
        return "off"


class SharedBudget(abc.ABC):  # noqa: B024 - which class it is, is all that is asked here
    """One budget for several loaders (memory/budget.py makes them)."""

    __slots__ = ()


BudgetSpec: TypeAlias = FixedBudget | ShareBudget | AutoBudget | OffBudget | SharedBudget

_default: object = None


def set_default_budget(budget: object) -> None:
    """Set the budget of every loader of this process that is given none itself.

    It comes before the environment's `FOREBAY_MEMORY_BUDGET`. It serves frameworks that
    build loaders themselves (Hugging Face's Trainer), where no keyword can be given.

    Args:
        budget: As `memory_budget` of `DataLoader`; None takes the default away again.

    Raises:
        InvalidBudget: `budget` is text or a number that names no budget.
        InvalidBudgetType: `budget` is of another type.
    """
    global _default
    if budget is not None:
        parse_budget(budget)
    _default = budget


def resolve_budget(raw: object) -> BudgetSpec:
    """The budget that `raw` means: itself, else the process's default, else the environment's."""
    for value in (raw, _default):
        if value is not None:
            return parse_budget(value)
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if not named:
        return AutoBudget()
    try:
        return parse_budget(named)
    except InvalidBudget as error:
        raise InvalidBudget.about(named, error.why, ENVIRONMENT_VARIABLE) from None


def parse_budget(raw: object) -> BudgetSpec:
    """The budget that one given value means.

    Raises:
        InvalidBudget: Text or a number that names no budget.
        InvalidBudgetType: Neither a number nor text.
    """
    if isinstance(raw, SharedBudget):
        return raw
    if isinstance(raw, str):
        return _parse_text(raw)
    if isinstance(raw, bool) or not isinstance(raw, numbers.Real):  # NumPy's numbers are Real
        raise InvalidBudgetType.about(raw)
    if not math.isfinite(raw):
        raise InvalidBudget.about(raw, "it is not finite")
    value = float(raw)
    if value <= 0:
        raise InvalidBudget.about(raw, "it must be above 0 bytes")
    if value != int(value):
        raise InvalidBudget.about(raw, "a number means bytes, and there are no fractions of one")
    return FixedBudget(int(value))


def _parse_text(raw: str) -> BudgetSpec:
    text = raw.strip().lower()
    if text == "auto":
        return AutoBudget()
    if text == "off":
        return OffBudget()
    if text.endswith("%"):
        share = parse_share(raw)
        if share is None:
            raise InvalidBudget.about(raw, "a share must be above 0 % and at most 100 %")
        return ShareBudget(share)
    if text and not text.strip("0. "):
        raise InvalidBudget.about(raw, "it must be above 0 bytes")
    size_bytes = parse_size(raw)
    if size_bytes is None:
        raise InvalidBudget.about(raw, "it is no size with a unit that we know")
    return FixedBudget(size_bytes)


def parse_seeding(raw: object) -> Seeding:
    """`raw` if it is one of `SEEDINGS`.

    Raises:
        InvalidOption: It is not.
    """
    for known in SEEDINGS:
        if raw == known:
            return known
    raise InvalidOption.about("seeding", raw, SEEDINGS)


def parse_on_death(raw: object) -> OnDeath:
    """`raw` if it is one of `ON_DEATHS`.

    Raises:
        InvalidOption: It is not.
    """
    for known in ON_DEATHS:
        if raw == known:
            return known
    raise InvalidOption.about("on_worker_death", raw, ON_DEATHS)


def parse_stall_report(raw: object) -> float | None:
    """`raw` as seconds above 0; None for no report.

    Raises:
        InvalidOption: It is neither.
    """
    if raw is None:
        return None
    is_number = isinstance(raw, numbers.Real) and not isinstance(raw, bool)
    if is_number and float(raw) > 0:  # type: ignore[arg-type]
        return float(raw)  # type: ignore[arg-type]
    raise InvalidOption.about("stall_report_s", raw, ("seconds above 0", None))


def parse_backend(raw: object) -> Backend:
    """`raw` if it is one of `BACKENDS`.

    Raises:
        InvalidOption: It is not.
    """
    for known in BACKENDS:
        if raw == known:
            return known
    raise InvalidOption.about("worker_backend", raw, BACKENDS)
