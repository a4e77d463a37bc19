"""Samplers of users, as they are found in training code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler


class DrawingAsItGoes(Sampler[int]):
    """Draws every index from the global torch generator at the moment when it is asked for it."""

    def __init__(self, length: int, count: int) -> None:
        self.length = length
        self.count = count

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count):
            yield int(torch.randint(self.length, ()))

    def __len__(self) -> int:
        return self.count


class DrawingFromItsOwn(DrawingAsItGoes):
    """Keeps its own generator, which runs on from epoch to epoch."""

    def __init__(self, length: int, count: int) -> None:
        super().__init__(length, count)
        self.generator = torch.Generator().manual_seed(11)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count):
            yield int(torch.randint(self.length, (), generator=self.generator))


class UnevenBatches(Sampler[list[int]]):
    """A batch sampler whose batches grow, drawing where each one starts."""

    def __init__(self, length: int, batches: int) -> None:
        self.length = length
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        for size in range(1, self.batches + 1):
            start = int(torch.randint(self.length, ()))
            yield [(start + n) % self.length for n in range(size)]

    def __len__(self) -> int:
        return self.batches


class Endless(Sampler[int]):
    """Goes round for ever, as samplers of step-based training do."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.length).tolist()


class OfKeys(Sampler[Any]):
    """Yields keys that are no ints."""

    def __init__(self, keys: Sequence[Any]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


class Failing(Sampler[int]):
    """Raises in the middle of the epoch."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __iter__(self) -> Iterator[int]:
        yield from range(self.after)
        raise FileNotFoundError("the list of samples ends here")


class SetByEpoch(Sampler[int]):
    """Orders by the epoch that the training code told it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())

    def __len__(self) -> int:
        return self.length
