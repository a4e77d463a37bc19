"""Jobs that public reports describe, each in a process that a test watches from outside.

    python -m tests.cases.scenes SCENE OUT ARGUMENTS

ARGUMENTS is a JSON object of keywords for the scene. Each writes lines of JSON to OUT with what
the loader says of itself, and checks each batch itself: a wrong one ends it with an error.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset

import forebay
from tests.budget.live import MIB, Numbers, Reader, tell
from tests.datasets.streams import Arrays

GIANT = 40
"""Times the usual length."""

BATCH = 16
UTTERANCES = 256


def large(out: TextIO, budget: int | str, item_mib: int = 128) -> None:
    """Report 10: items of 128 MiB, four workers, prefetch 4, a consumer that takes its time."""
    with forebay.DataLoader(
        Numbers(item_mib), num_workers=4, prefetch_factor=4, memory_budget=budget
    ) as loader:
        reader = Reader(loader)
        for _ in range(12):
            reader.take()
            time.sleep(0.1)
        tell(out, taken=reader.taken, restarts=loader.stats().worker_restarts)


def inherited(out: TextIO, main_mib: int, budget_mib: int) -> None:
    """Report 24: a main process with a large touched array, four forked workers, 1 MiB items."""
    held = np.ones(main_mib * MIB, np.uint8)
    tell(out, is_level=True)
    with forebay.DataLoader(
        Numbers(1),
        num_workers=4,
        memory_budget=budget_mib * MIB,
        multiprocessing_context="fork",
    ) as loader:
        reader = Reader(loader)
        for _ in range(200):
            reader.take()
        time.sleep(0.5)  # until the window is full and nobody is at work
        stats = loader.stats()
        tell(
            out,
            footprint=stats.footprint_bytes,
            workers=stats.workers,
            stance=stats.stance,
            rss=sum_rss(),
            explained=loader.explain(),
        )
    assert held[0] == 1


def sum_rss() -> int:
    """What summing RSS over this process and all below it says."""
    main = psutil.Process()
    return sum(each.memory_info().rss for each in (main, *main.children(recursive=True)))


def buckets(out: TextIO, backend: str, budget_mib: int) -> None:
    """Report 42: 24 loaders of one budget, two workers each; a random one is visited each step."""
    budget = forebay.Budget(budget_mib * MIB)
    loaders = [
        forebay.DataLoader(
            Numbers(8, factor), num_workers=2, memory_budget=budget, worker_backend=backend
        )
        for factor in range(1, 25)
    ]
    readers: dict[int, Reader] = {}
    visits = list(range(len(loaders))) * 4
    random.Random(4).shuffle(visits)
    most_held = most_processes = 0
    for number in visits:
        if number not in readers:
            readers[number] = Reader(loaders[number], number + 1)
        readers[number].take()
        most_held = max(most_held, budget.held_bytes)
        most_processes = max(most_processes, len(psutil.Process().children(recursive=True)))
    tell(out, loaders=len(readers), held=most_held, processes=most_processes)
    for loader in loaders:
        loader.close()


class Utterances(Dataset[torch.Tensor]):
    """Sequences of `usual_kib`, those at `giants` 40 times as long; each holds its number."""

    def __init__(self, usual_kib: int, giants: set[int]) -> None:
        self.usual_kib, self.giants = usual_kib, giants

    def __len__(self) -> int:
        return UTTERANCES

    def measure(self, index: int) -> int:
        """The floats of one."""
        return self.usual_kib * 256 * (GIANT if index in self.giants else 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.measure(index),), float(index + 1))


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def padded(out: TextIO, usual_kib: int, budget_mib: int, giants: list[int], think_s: float) -> None:
    """Report 46: batches of 16, padded to the longest. Two epochs: in the second all was seen."""
    data = Utterances(usual_kib, set(giants))
    with forebay.DataLoader(
        data, BATCH, num_workers=2, collate_fn=pad, memory_budget=budget_mib * MIB
    ) as loader:
        for _ in range(2):
            number = 0
            for batch in loader:
                check_padded(data, number, batch)
                number += 1
                time.sleep(think_s)
                del batch  # two giants at once would be the consumer's doing otherwise
            tell(out, batches=number)


def check_padded(data: Utterances, number: int, batch: torch.Tensor) -> None:
    """Every float, without a copy of the batch."""
    indices = range(number * BATCH, (number + 1) * BATCH)
    lengths = [data.measure(index) for index in indices]
    assert batch.shape == (BATCH, max(lengths))
    for row, index, length in zip(batch, indices, lengths, strict=True):
        assert row[:length].min() == row[:length].max() == index + 1
        assert length == len(row) or row[length:].min() == row[length:].max() == 0


def annotated_images(count: int) -> Iterator[Any]:
    """What a streaming parser hands out of annotations: 20 boxes an image."""
    for number in range(count):
        boxes = [
            {"bbox": [number % 640, box * 1.5, 32, 48.25], "category_id": box, "iscrowd": 0}
            for box in range(20)
        ]
        yield {"file_name": f"{number:012d}.jpg", "id": number, "annotations": boxes}


def ranks(out: TextIO, count: int) -> None:
    """Report 31: the first rank packs, two others that it forks read every record."""
    packed = forebay.PackedList(annotated_images(count))
    tell(out, packed=packed.packed_bytes)
    pids = [fork_rank(packed) for _ in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]


def fork_rank(packed: forebay.PackedList[Any]) -> int:
    pid = os.fork()
    if not pid:
        for number, record in enumerate(packed):
            if record["id"] != number or len(record["annotations"]) != 20:
                os._exit(1)
        os._exit(0)
    return pid


def shuffled(out: TextIO, memory_mib: int, budget_mib: int) -> None:
    """Report 41: buffers of 400 decoded samples of half a MiB in three workers, under a budget."""
    stream = forebay.ShuffleBuffer(Arrays(500), memory_mib * MIB, most_samples=400, seed=0)
    with forebay.DataLoader(stream, None, num_workers=3, memory_budget=budget_mib * MIB) as loader:
        try:
            taken = sum(1 for _ in loader)
        except forebay.BudgetTooSmall:
            tell(out, is_refused=True)
        else:
            tell(out, taken=taken, is_refused=False)


class Bursting(Numbers):
    """The same; making one of them takes 600 MiB more, the first time."""

    def __init__(self, place: str) -> None:
        super().__init__(1)
        self.place = Path(place)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 30 and not self.place.exists():
            self.place.touch()
            assert np.ones(600 * MIB, np.uint8).all()
        return super().__getitem__(index)


def victims(out: TextIO, place: str, main_mib: int) -> None:
    """A worker outgrows the limit beside a training process that is larger until then."""
    held = np.ones(main_mib * MIB, np.uint8)
    with forebay.DataLoader(
        Bursting(place), num_workers=2, memory_budget="150MiB", sampler=range(80)
    ) as loader:
        reader = Reader(loader)
        for _ in range(80):
            reader.take()
        stats = loader.stats()
        tell(
            out,
            restarts=stats.worker_restarts,
            reasons=stats.restart_reasons,
            tokens=cast("Any", reader.iterator)._engine.scheduler.roster.tokens,
        )
    assert held[0] == 1


def share(out: TextIO, budget: str) -> None:
    """Report 49: a loader whose budget is a share of a limit, or follows it."""
    with forebay.DataLoader(
        Numbers(1), num_workers=1, memory_budget=budget, sampler=range(4)
    ) as loader:
        assert len(list(loader)) == 4
        tell(
            out,
            budget=loader.stats().budget_bytes,
            limit=forebay.memory_limit().bytes,
            host=psutil.virtual_memory().total,
        )


SCENES: dict[str, Callable[..., None]] = {
    scene.__name__: scene
    for scene in (large, inherited, buckets, padded, ranks, shuffled, victims, share)
}

SETTLE_S = 0.05
"""Long enough for some readings of the level from outside."""


def warm_up() -> None:
    """What this process itself loads at first use is not the loaders' under test."""
    with forebay.DataLoader(Numbers(1), num_workers=1, sampler=range(4)) as loader:
        assert sum(len(batch) for batch in loader) == 4
    gc.collect()
    time.sleep(SETTLE_S)


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    warm_up()
    with Path(sys.argv[2]).open("w", encoding="utf-8") as file:
        tell(file, is_ready=True)
        SCENES[sys.argv[1]](file, **json.loads(sys.argv[3]))
        tell(file, is_done=True)
