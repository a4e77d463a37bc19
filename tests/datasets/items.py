"""Map-style datasets for the tests of the cache, in a module that spawned workers can import."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from forebay import SharedCache


class Blocks(Dataset[Any]):
    """Arrays of `size_bytes` that hold their number, which is beside them."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.count = count
        self.size_bytes = size_bytes

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(self.size_bytes // 8, index, np.int64), index

    def __len__(self) -> int:
        return self.count


class Told(Blocks):
    """The same; each sample is told by a byte in `pipe` before it is made."""

    pipe = -1

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        os.write(self.pipe, b".")
        return super().__getitem__(index)


class Given(Dataset[Any]):
    """The samples it was given, and the indices it was asked for, in this process."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples
        self.asked: list[Any] = []

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        sample = self.samples[index]
        if isinstance(sample, Exception):
            raise sample
        return sample

    def __len__(self) -> int:
        return len(self.samples)


class InLists(Given):
    """The same, asked for lists."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(list(indices))
        return [self.samples[index] for index in indices]


class Collated(Given):
    """Gives one thing for all of a list."""

    def __getitems__(self, indices: list[int]) -> tuple[Any, ...]:
        return tuple(self.samples[index] for index in indices)


def check_whole(sample: tuple[np.ndarray, int], index: int, size_bytes: int) -> None:
    """Every byte of a sample of `Blocks` is as it was made."""
    array, number = sample
    assert (number, array.nbytes) == (index, size_bytes // 8 * 8)
    assert (array == index).all()


def read_all(cache: SharedCache[Any]) -> None:
    """Ask for each sample once and check it."""
    for index in range(len(cache)):
        dataset: Any = cache.dataset
        check_whole(cache[index], index, dataset.size_bytes)
