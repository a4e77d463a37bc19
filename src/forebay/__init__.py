"""forebay: a drop-in PyTorch DataLoader that holds a byte budget."""

from forebay.errors import (
    BatchExceedsBudget,
    BudgetTooSmall,
    BudgetWarning,
    ForebayError,
    ForeignProcess,
    HoardingWarning,
    InvalidBudget,
    InvalidBudgetType,
    InvalidOption,
    NestedLoader,
    WorkerDied,
    WorkersUnavailable,
)
from forebay.events import LoaderStats
from forebay.loader import DataLoader
from forebay.memory.limits import memory_limit, usable_cpus
from forebay.options import set_default_budget

__version__ = "0.1.0"

__all__ = [
    "BatchExceedsBudget",
    "BudgetTooSmall",
    "BudgetWarning",
    "DataLoader",
    "ForebayError",
    "ForeignProcess",
    "HoardingWarning",
    "InvalidBudget",
    "InvalidBudgetType",
    "InvalidOption",
    "LoaderStats",
    "NestedLoader",
    "WorkerDied",
    "WorkersUnavailable",
    "memory_limit",
    "set_default_budget",
    "usable_cpus",
]
