"""Large tables of Python objects in a dataset.

Covers: naming the attributes whose objects workers copy by reading them. Does not cover: how much
they copied (growth.py), a remedy (packed.py). Nothing of the dataset's own code runs but what
`len` of a table takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_LEAST_LENGTH = 10_000
"""Entries from which a table is worth naming: about a MiB of small objects."""

_MOST_DEPTH = 4
"""How far wrappers are followed: a Subset of a ConcatDataset of a dataset's own holder."""

_MOST_NAMES = 3


def find_tables(dataset: Any) -> tuple[str, ...]:
    """The largest ones, as `dataset.records (list of 1,000,000)`."""
    found: list[tuple[int, str]] = []
    with contextlib.suppress(Exception):  # whatever a user's class does: these are words only
        found += _walk(dataset, "dataset", _MOST_DEPTH)
    found.sort(reverse=True)
    return tuple(text for _, text in found[:_MOST_NAMES])


def _walk(owner: Any, name: str, depth: int) -> Iterator[tuple[int, str]]:
    kind = _tell_kind(owner)
    if kind:
        if len(owner) >= _LEAST_LENGTH:
            yield len(owner), f"{name} ({kind} of {len(owner):,})"
        elif isinstance(owner, (list, tuple)) and depth:  # the parts of a ConcatDataset
            for at, value in enumerate(owner[:8]):
                yield from _walk(value, f"{name}[{at}]", depth - 1)
        return
    fields = getattr(owner, "__dict__", None)
    if depth and isinstance(fields, dict):
        for field, value in list(fields.items())[:256]:
            yield from _walk(value, f"{name}.{field}", depth - 1)


def _tell_kind(value: Any) -> str:
    """What a table of objects is called; empty for everything else."""
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return type(value).__name__
    dtypes = [getattr(value, "dtype", None)]  # of an array or a column
    if dtypes == [None]:
        of_columns = getattr(value, "dtypes", None)  # of a DataFrame
        dtypes = list(of_columns) if of_columns is not None else []
    has_objects = any(getattr(dtype, "kind", "") == "O" for dtype in dtypes)
    return f"{type(value).__name__} with objects" if has_objects else ""
