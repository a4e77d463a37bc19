"""Datasets and samplers for resuming: each draws from every random generator that there is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

import forebay


def draw() -> tuple[float, ...]:
    """One number of each generator that a dataset may use."""
    own = forebay.rng()
    return (
        random.random(),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        own.python.random(),
        float(own.numpy.random()),
        float(torch.rand((), generator=own.torch)),
    )


class Augmented(Dataset[Any]):
    """A map-style dataset whose samples differ at each visit."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch, draw()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Owned(Augmented):
    """The same, of a stream's own generators alone: threads share the others."""

    def __getitem__(self, index: int) -> Any:
        return index, draw()[4:]


class Failing(Augmented):
    """The same; some samples draw, and then cannot be had."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index % 7 == 3:
            message = f"sample {index} is broken"
            raise ValueError(message)
        return sample


def first_of_worker(length: int) -> tuple[int, int]:
    """Where the samples of this worker begin, and how many there are: unequal shares."""
    info = get_worker_info()
    worker = info.id if info is not None else 0
    return 1000 * worker, length + 5 * worker


class Stream(IterableDataset[Any]):
    """An iterable dataset that tells nothing of where it stands, and shuffles as it goes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        first, length = first_of_worker(self.length)
        waiting: list[int] = []
        for index in range(first, first + length):
            waiting.append(index)
            if len(waiting) == 4:
                yield waiting.pop(random.randrange(4)), draw()
        for index in waiting:
            yield index, draw()


class Teller(Stream):
    """One that tells where it stands, from the dataset."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.done = 0
        self.begin = 0

    def __iter__(self) -> Iterator[Any]:
        first, length = first_of_worker(self.length)
        self.done, self.begin = self.begin, 0
        for index in range(first + self.done, first + length):
            self.done += 1
            yield index, draw()
        self.done = 0  # a state taken after the epoch is that of a new one

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["done"]


class TellingIterator:
    """An iterator that can be set to any place."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length, self.done = first, length, 0

    def __iter__(self) -> TellingIterator:
        return self

    def __next__(self) -> Any:
        if self.done == self.length:
            raise StopIteration
        self.done += 1
        return self.first + self.done, draw()

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class IteratorTeller(Stream):
    """One whose iterator tells where it stands."""

    def __iter__(self) -> Iterator[Any]:
        return TellingIterator(*first_of_worker(self.length))


class Forgetful(Stream):
    """One whose `state_dict` fails."""

    def state_dict(self) -> dict[str, int]:
        message = "no place is known"
        raise LookupError(message)

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


class CountingSampler(Sampler[int]):
    """A sampler that tells where it stands, and counts what is drawn from it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.done = self.begin = self.drawn = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.done, self.begin = self.begin, 0
        for index in range(self.done, self.length):
            self.done += 1
            self.drawn += 1
            yield self.length - 1 - index
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["done"]


def noisy_collate(samples: list[Any]) -> Any:
    """A collate function that draws too, as mixup does."""
    return samples, draw()


def seed_by_worker(worker: int) -> None:
    """A `worker_init_fn` as many write it."""
    random.seed(1000 + worker)


DATASETS: dict[str, Any] = {
    "map": Augmented,
    "owned": Owned,
    "failing": Failing,
    "stream": Stream,
    "teller": Teller,
    "iterator": IteratorTeller,
}
