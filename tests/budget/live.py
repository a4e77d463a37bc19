"""Jobs whose surroundings change while they run; the tests watch them from outside.

    python -m tests.budget.live pressed OUT      one automatic loader; the test takes memory away
    python -m tests.budget.live large OUT        one automatic loader, large batches, a tight limit
    python -m tests.budget.live shared OUT       two loaders, one budget, taking turns
    python -m tests.budget.live many OUT         twelve loaders, one budget, a random one each step
    python -m tests.budget.live buckets OUT      24 loaders of threads, the same

Each writes lines of JSON to OUT: what the loader says of itself at each step. It checks each
batch itself: a wrong one ends it with an error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
from torch.utils.data import Dataset

import forebay

MIB = 1024**2
PRESSED_S = 16.0
TELL_S = 0.1
IDLE_S = 2.0
LARGE_MIB = 100
SHARED_MIB = 160
MANY_MIB = 420
BUCKETS_MIB = 300


class Numbers(Dataset[torch.Tensor]):
    """`size_mib` of the number `factor` x index."""

    def __init__(self, size_mib: int, factor: int = 1) -> None:
        self.size_mib = size_mib
        self.factor = factor

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size_mib * MIB // 4,), float(index * self.factor))


class Reader:
    """An iterator that is asked for its next batch now and then, and what it should give."""

    def __init__(self, loader: Any, factor: int = 1) -> None:
        self.iterator = iter(loader)
        self.factor = factor
        self.taken = 0

    def take(self) -> float:
        """One batch, checked; returns the seconds it was waited for."""
        began = time.monotonic()
        batch = next(self.iterator)
        waited_s = time.monotonic() - began
        wanted = float(self.taken * self.factor)
        assert batch.min() == wanted, f"batch {self.taken} is {batch.min()}"
        assert batch.max() == wanted, f"batch {self.taken} is {batch.max()}"
        self.taken += 1
        return waited_s


def tell(out: TextIO, **facts: Any) -> None:
    out.write(json.dumps({"t_s": time.monotonic(), **facts}) + "\n")
    out.flush()


def pressed(out: TextIO) -> None:
    """A consumer in bursts, so that the window is wide, for some seconds."""
    with forebay.DataLoader(
        Numbers(16), num_workers=4, prefetch_factor=8, memory_budget="auto"
    ) as loader:
        reader = Reader(loader)
        began = told_s = time.monotonic()
        while time.monotonic() - began < PRESSED_S:
            reader.take()
            if reader.taken % 24 == 0:
                time.sleep(0.25)
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                stats = loader.stats()
                tell(
                    out,
                    budget=stats.budget_bytes,
                    footprint=stats.footprint_bytes,
                    stance=stats.stance,
                    taken=reader.taken,
                )
        tell(out, explain=loader.explain())


def large(out: TextIO) -> None:
    """Batches of an eighth of the limit, and a consumer that takes its time."""
    with forebay.DataLoader(
        Numbers(LARGE_MIB), num_workers=4, prefetch_factor=4, memory_budget="auto"
    ) as loader:
        reader = Reader(loader)
        for _ in range(20):
            reader.take()
            time.sleep(0.05)
        tell(out, taken=reader.taken, restarts=loader.stats().worker_restarts)


def shared(out: TextIO) -> None:
    """Training and validation in turns; the one that has nothing to do gives way."""
    budget = forebay.Budget(SHARED_MIB * MIB)
    with (
        forebay.DataLoader(
            Numbers(8, 1), num_workers=2, prefetch_factor=8, memory_budget=budget
        ) as train,
        forebay.DataLoader(
            Numbers(8, 3), num_workers=2, prefetch_factor=8, memory_budget=budget
        ) as validate,
    ):
        readers = [Reader(train, 1), Reader(validate, 3)]
        for turn in range(4):
            for name, reader in zip(("train", "validate"), readers, strict=True):
                first_s = reader.take()
                until = time.monotonic() + IDLE_S
                while time.monotonic() < until:
                    reader.take()
                tell(
                    out,
                    turn=turn,
                    name=name,
                    first_s=first_s,
                    train=train.stats().footprint_bytes,
                    validate=validate.stats().footprint_bytes,
                    held=budget.held_bytes,
                )


def many(out: TextIO) -> None:
    """One loader a bucket, as text-to-image training has them."""
    budget = forebay.Budget(MANY_MIB * MIB)
    visit(out, budget, 12, "process", 4)


def buckets(out: TextIO) -> None:
    """Report 42 as it was told: 24 buckets of 2 workers each and samples of 8 MiB."""
    budget = forebay.Budget(BUCKETS_MIB * MIB)
    visit(out, budget, 24, "thread", 8)


def visit(out: TextIO, budget: forebay.Budget, count: int, backend: Any, size_mib: int) -> None:
    """Loaders of one budget, a random one each step."""
    loaders = [
        forebay.DataLoader(
            Numbers(size_mib, factor), num_workers=2, memory_budget=budget, worker_backend=backend
        )
        for factor in range(1, count + 1)
    ]
    readers: dict[int, Reader] = {}
    choose = random.Random(4)
    for _ in range(240):
        number = choose.randrange(len(loaders))
        if number not in readers:
            readers[number] = Reader(loaders[number], number + 1)
        readers[number].take()
    tell(
        out,
        loaders=len(readers),
        processes=len(psutil.Process().children(recursive=True)),
        workers=sum(loaders[number].stats().workers for number in readers),
        held=budget.held_bytes,
    )
    for loader in loaders:
        loader.close()


SCENES: dict[str, Callable[[TextIO], None]] = {
    "pressed": pressed,
    "large": large,
    "shared": shared,
    "many": many,
    "buckets": buckets,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    for _ in forebay.DataLoader(Numbers(1), num_workers=1, sampler=range(4)):
        pass  # what this process itself loads at first use is not the loaders' under test
    with Path(sys.argv[2]).open("w", encoding="utf-8") as file:
        tell(file, pid=os.getpid())
        SCENES[sys.argv[1]](file)
        tell(file, is_done=True)
