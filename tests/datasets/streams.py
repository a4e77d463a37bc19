"""Streams for the tests of wrappers, in a module that spawned workers can import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Numbers(IterableDataset[int]):
    """0 to `count` - 1, each from one worker."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        yield from range(start, self.count, step)

    def __len__(self) -> int:
        return self.count


class Undivided(IterableDataset[int]):
    """0 to `count` - 1 from every worker."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


class Arrays(IterableDataset[Any]):
    """Arrays of half a MiB that hold their number, from every worker."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield np.full(1 << 16, number, np.int64)


class Sized(IterableDataset[torch.Tensor]):
    """One tensor of each of `sizes` bytes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[torch.Tensor]:
        for size in self.sizes:
            yield torch.zeros(size, dtype=torch.uint8)


class Drawing(IterableDataset[tuple[int, float]]):
    """Numbers, and what the worker's generator gives beside each."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        info = get_worker_info()
        for number in range(30):
            yield (info.id if info else 0) * 100 + number, float(torch.rand(()))
