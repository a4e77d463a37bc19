"""What every worker of one iterator is given: the user's objects and torch's settings.

Covers: the value that crosses to the zygote. Does not cover: budgets or places; those are
main's affair and reach a worker with each task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay.options import Seeding
from forebay.workers.snapshot import Start


@dataclass(frozen=True, slots=True)
class Job:
    """How to make the batches of one iterator.

    Attributes:
        dataset: The user's dataset.
        kind: torch's dataset kind (map or iterable).
        auto_collation: Whether tasks carry lists of indices.
        collate_fn: The user's, or torch's default.
        has_default_collate: Whether `collate_fn` is torch's `default_collate` itself.
        drop_last: For iterable datasets.
        num_streams: torch's `num_workers`.
        base_seed: Drawn by torch's iterator from the loader's generator.
        init_fn: The user's `worker_init_fn`.
        exit_fn: The user's `worker_exit_fn`.
        seeding: How random state relates to batches.
        snapshot_every: A dataset with a state of its own tells it after each so many batches.
        starts: Where each stream begins, when the loader resumes.
        budget_bytes: The loader's budget if it is a fixed one.
    """

    dataset: Any
    kind: int
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    has_default_collate: bool
    drop_last: bool
    num_streams: int
    base_seed: int
    init_fn: Callable[[int], None] | None
    exit_fn: Callable[[int], None] | None
    seeding: Seeding
    snapshot_every: int = 1
    starts: tuple[Start, ...] = ()
    budget_bytes: int | None = None
