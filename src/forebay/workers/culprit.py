"""Which part of a job cannot be pickled.

Covers: the path to it, as `dataset.transform.functions[1]`, after pickling the whole has failed.
Does not cover: pickling (zygote.py), or the error itself, which is the user's class's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

_MOST_DEPTH = 6
_MOST_PARTS = 64
"""Of one container; a list of a million samples is not tried one by one."""

_PARTS = {
    "dataset": "dataset",
    "collate_fn": "collate_fn",
    "init_fn": "worker_init_fn",
    "exit_fn": "worker_exit_fn",
}


def find_culprit(job: Any) -> str:
    """The innermost part that fails alone; empty when none does.

    Pickles what it tries, each level once: as long as the attempt that failed, at most.
    """
    for field, name in _PARTS.items():
        value = getattr(job, field, None)
        if _fails(value):
            return _descend(value, name, _MOST_DEPTH)
    return ""


def name_culprit(value: Any, name: str) -> str:
    """The same for one object that goes by `name`; empty when it can be pickled."""
    return _descend(value, name, _MOST_DEPTH) if _fails(value) else ""


def _descend(value: Any, name: str, depth: int) -> str:
    for part, part_name in _parts_of(value, name) if depth else ():
        if _fails(part):
            return _descend(part, part_name, depth - 1)
    return f"{name} ({type(value).__module__}.{type(value).__qualname__})"


def _parts_of(value: Any, name: str) -> Iterator[tuple[Any, str]]:
    if isinstance(value, dict):
        for key, part in list(value.items())[:_MOST_PARTS]:
            yield part, f"{name}[{key!r}]"
    elif isinstance(value, (list, tuple)):
        for at, part in enumerate(value[:_MOST_PARTS]):
            yield part, f"{name}[{at}]"
    fields = getattr(value, "__dict__", None)
    if isinstance(fields, dict) and not isinstance(value, type):
        for field, part in list(fields.items()):
            yield part, f"{name}.{field}"


def _fails(value: Any) -> bool:
    try:
        ForkingPickler.dumps(value)
    except Exception:  # whatever a class of the user's raises
        return True
    return False
