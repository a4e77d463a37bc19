"""Jobs whose workers are killed: each kind of dataset, small enough for many epochs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset

from forebay.units import MIB


class Noisy(Dataset[Any]):
    """Draws from the three global generators."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return index, torch.rand(40), np.random.rand(3), random.random()


class Large(Dataset[Any]):
    """Batches of 32 MiB: a kill meets the writing of one."""

    def __len__(self) -> int:
        return 192

    def __getitem__(self, index: int) -> Any:
        return torch.full((MIB,), index % 251, dtype=torch.uint8), torch.rand(2)


class Nested(Dataset[Any]):
    """Dicts with texts, and tensors of several sizes."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        boxes = torch.rand(index % 5 + 1, 4)
        return {"name": f"{index:012d}.jpg", "boxes": boxes, "at": {"x": index, "y": -index}}


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


class Varied(Dataset[Any]):
    """Lengths from 1 KiB to 4 MiB."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        return torch.full((1024 << random.Random(index).randrange(13),), index, dtype=torch.int32)


class Stream(IterableDataset[Any]):
    """Each worker its part; no state."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for number in range(info.id, 200, info.num_workers):
            time.sleep(0.001)
            yield number, torch.rand(40), random.random()


class Told(IterableDataset[Any]):
    """The same with a state."""

    def __init__(self) -> None:
        self.at = 0
        self.numbers = range(0)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        self.numbers = range(info.id, 200, info.num_workers)
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.numbers):
            self.at = 0
            raise StopIteration
        self.at += 1
        time.sleep(0.001)
        return self.numbers[self.at - 1], torch.rand(40), random.random()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@dataclass(frozen=True)
class Job:
    """What is loaded, and how.

    Attributes:
        batches: Roughly, of an epoch.
        most_processes: Fewer than workers make several share one.
        is_anywhere: Under every start method; the rest under fork alone, for the sake of time.
    """

    name: str
    make_dataset: Callable[[], Any]
    batches: int
    options: dict[str, Any] = field(default_factory=dict)
    budget: str = "1GiB"
    seeding: str = "torch"
    most_processes: int | None = None
    is_shuffled: bool = True
    is_anywhere: bool = True


JOBS = (
    Job("noise", Noisy, 60, {"batch_size": 4, "num_workers": 4}),
    Job("large batches", Large, 6, {"batch_size": 32, "num_workers": 3}, budget="400MiB"),
    Job(
        "noise, persistent",
        Noisy,
        60,
        {"batch_size": 4, "num_workers": 2, "persistent_workers": True},
    ),
    Job("stream", Stream, 50, {"batch_size": 4, "num_workers": 3}, is_shuffled=False),
    Job(
        "dicts",
        Nested,
        40,
        {"batch_size": 4, "num_workers": 2, "collate_fn": as_it_is},
    ),
    Job(
        "stream with a state, persistent",
        Told,
        50,
        {"batch_size": 4, "num_workers": 2, "persistent_workers": True},
        is_shuffled=False,
    ),
    Job(
        "noise, shared processes",
        Noisy,
        60,
        {"batch_size": 4, "num_workers": 4},
        most_processes=2,
        is_anywhere=False,
    ),
    Job("seeded one by one", Noisy, 60, {"batch_size": 4, "num_workers": 3}, seeding="batch"),
    Job("lengths", Varied, 120, {"batch_size": 1, "num_workers": 2}, budget="300MiB"),
)
