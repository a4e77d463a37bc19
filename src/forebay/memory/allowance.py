"""The budget that the code of a worker runs under, for datasets that hold memory of their own.

Covers: one figure a thread. Does not cover: where it comes from (flow/iterator.py), what it is
compared with (datasets/shuffle.py).
"""

from __future__ import annotations

import threading

_here = threading.local()


def set_budget(size_bytes: int | None) -> None:
    """From here on this thread makes batches for a loader with so fixed a budget, in bytes.

    None: for none, or for one that follows the machine.
    """
    _here.size_bytes = size_bytes


def get_budget() -> int | None:
    """The fixed budget of the loader that this thread works for; None if there is none."""
    size_bytes: int | None = getattr(_here, "size_bytes", None)
    return size_bytes
