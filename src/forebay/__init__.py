"""forebay: a drop-in PyTorch DataLoader that holds a byte budget.

Names are imported when they are first used: `import forebay` alone, and the command line,
need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.datasets.cache import SharedCache
    from forebay.datasets.shuffle import ShuffleBuffer
    from forebay.errors import (
        BatchExceedsBudget,
        BudgetTooSmall,
        BudgetWarning,
        DamagedBatch,
        DuplicateSamplesWarning,
        ForebayError,
        ForeignProcess,
        HoardingWarning,
        InvalidBudget,
        InvalidBudgetType,
        InvalidMemory,
        InvalidOption,
        InvalidState,
        IteratorClosed,
        NestedLoader,
        PoisonSample,
        ReplayWarning,
        ScarcityWarning,
        Stalled,
        StateMismatch,
        StateUnavailable,
        WorkerDied,
        WorkersUnavailable,
    )
    from forebay.events import LoaderStats
    from forebay.loader import DataLoader
    from forebay.memory.budget import Budget
    from forebay.memory.limits import memory_limit, usable_cpus
    from forebay.memory.packed import PackedList
    from forebay.options import set_default_budget
    from forebay.workers.randomness import rng

__version__ = "0.1.0"

__all__ = [
    "BatchExceedsBudget",
    "Budget",
    "BudgetTooSmall",
    "BudgetWarning",
    "DamagedBatch",
    "DataLoader",
    "DuplicateSamplesWarning",
    "ForebayError",
    "ForeignProcess",
    "HoardingWarning",
    "InvalidBudget",
    "InvalidBudgetType",
    "InvalidMemory",
    "InvalidOption",
    "InvalidState",
    "IteratorClosed",
    "LoaderStats",
    "NestedLoader",
    "PackedList",
    "PoisonSample",
    "ReplayWarning",
    "ScarcityWarning",
    "SharedCache",
    "ShuffleBuffer",
    "Stalled",
    "StateMismatch",
    "StateUnavailable",
    "WorkerDied",
    "WorkersUnavailable",
    "memory_limit",
    "rng",
    "set_default_budget",
    "usable_cpus",
]

_HOMES = {
    "Budget": "forebay.memory.budget",
    "DataLoader": "forebay.loader",
    "LoaderStats": "forebay.events",
    "PackedList": "forebay.memory.packed",
    "SharedCache": "forebay.datasets.cache",
    "ShuffleBuffer": "forebay.datasets.shuffle",
    "memory_limit": "forebay.memory.limits",
    "rng": "forebay.workers.randomness",
    "set_default_budget": "forebay.options",
    "usable_cpus": "forebay.memory.limits",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        message = f"module 'forebay' has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(importlib.import_module(_HOMES.get(name, "forebay.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
