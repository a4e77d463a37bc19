"""Collate functions and worker set-up functions of the parity jobs, importable by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from .batches import Pair, Sample


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def as_tuple(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(samples)


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of unequal length, padded, with their lengths: what text pipelines do."""
    lengths = torch.tensor([len(row) for row in samples])
    rows = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)
    return {"rows": rows, "lengths": lengths, "mask": rows.ne(-1)}


def as_dataclass(samples: list[tuple[torch.Tensor, int]]) -> Sample:
    pixels, labels = zip(*samples)
    return Sample(torch.stack(pixels), len(labels), {"labels": torch.tensor(labels)})


def as_named_tuple(samples: list[tuple[torch.Tensor, int]]) -> Pair:
    pixels, labels = default_collate(samples)
    return Pair(left=pixels, right=labels)


def as_array(samples: list[Any]) -> np.ndarray[Any, Any]:
    return np.asarray(samples)


def mixed_up(samples: list[tuple[torch.Tensor, int]]) -> list[Any]:
    """Mixup: random in the collate function itself, from all three generators."""
    rows, labels = default_collate(samples)
    share = random.random() * float(np.random.beta(0.5, 0.5))
    order = torch.randperm(len(rows))
    return [rows * share + rows[order] * (1 - share), labels, labels[order], share]


def views_over_one_batch(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    rows, _ = default_collate(samples)
    return {"all": rows, "first": rows[0], "turned": rows.mT}


def nothing(samples: list[Any]) -> None:
    return None


class Appending:
    """A collate function that is an object, and keeps state from one batch to the next."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        self.batches += 1
        return self.batches, default_collate(samples)


def failing_on_seven(samples: list[int]) -> list[int]:
    if 7 in samples:
        raise ArithmeticError(f"cannot put {samples} together")
    return samples


def own_worker_info() -> Any:
    """torch's, for use where there is a worker for sure."""
    return get_worker_info()


def seeding_by_worker(worker: int) -> None:
    """The set-up that reproducibility guides recommend."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed + worker)


def drawing_at_start(worker: int) -> None:
    """Uses the generators before the first sample is made."""
    for _ in range(worker + 1):
        random.random()
        np.random.rand()
        torch.rand(1)


def tagging_the_dataset(worker: int) -> None:
    """Changes the worker's own copy of the dataset."""
    info = own_worker_info()
    info.dataset.tag = 100 + worker + info.num_workers


def keeping_own_shard(worker: int) -> None:
    """Gives each worker its share of an iterable, as torch's documentation shows."""
    info = own_worker_info()
    info.dataset.sizes = [0] * worker + [3 + worker]


def failing_in_worker_one(worker: int) -> None:
    if worker == 1:
        raise PermissionError("worker 1 may not start")


class CountingRows:
    """A worker set-up function that is an object."""

    def __init__(self, tags: Sequence[int]) -> None:
        self.tags = tags

    def __call__(self, worker: int) -> None:
        own_worker_info().dataset.tag = self.tags[worker]
