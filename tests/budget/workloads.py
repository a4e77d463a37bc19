"""Fourteen ways to use memory that a byte budget has to survive.

Covers: the datasets and collate functions, what each consumer does with its
batches, and which batches cost alike (`size_class`). Does not cover: running
them (job.py) and judging them (harness.py).

The idea: every item is a pure function of its index and of the random state of
its worker, so that torch's own loader tells what must be delivered; and every
dataset notes when the making of a batch begins, so that the first occurrence of
a size can be told from the later ones, from outside.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

MIB = 1024**2
START = struct.Struct("<qd")  # serial of the batch, time.monotonic() seconds


class Starts:
    """Notes when the making of a batch begins; appended to by all workers at once.

    A line is 16 bytes in one `write` to a file opened with O_APPEND, so lines of
    several processes do not mix.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._opened_by = 0
        self._descriptor = -1

    def note(self, serial: int) -> None:
        if self._opened_by != os.getpid():
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._opened_by = os.getpid()
        os.write(self._descriptor, START.pack(serial, time.monotonic()))

    def __getstate__(self) -> str:
        return self.path

    def __setstate__(self, path: str) -> None:
        self.__init__(path)  # type: ignore[misc]


class _Items(Dataset[Any]):
    """`batches` x `batch_samples` items; a subclass says what one is."""

    def __init__(self, starts: Starts, batches: int, batch_samples: int) -> None:
        self.starts = starts
        self.batches = batches
        self.batch_samples = batch_samples

    def __len__(self) -> int:
        return self.batches * self.batch_samples

    def __getitem__(self, index: int) -> Any:
        serial, row = divmod(index, self.batch_samples)
        if row == 0:
            self.starts.note(serial)
        return self.make(index)

    def make(self, index: int) -> Any:
        raise NotImplementedError


class Images(_Items):
    """3 x 224 x 224 float32 with noise and a flip from the worker's generators."""

    def make(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.rand(3, 224, 224).add_(index)
        return (image.flip(-1) if random.random() < 0.5 else image), index


class Tiny(_Items):
    """16 floats."""

    def make(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.full((16,), float(index)), float(np.random.random())


def ragged_rows(index: int) -> int:
    """Rows of a sequence: most near 128, a tail of Pareto's kind, and giants of 8,192."""
    draw = random.Random(index).random()
    rows = int(96 / (1.0 - 0.9375 * draw))  # 96 to 1,536
    return 8192 if index in {120, 264, 328, 424} else rows


class Ragged(_Items):
    """Sequences of very different length, padded to the longest of their batch."""

    def make(self, index: int) -> torch.Tensor:
        return torch.full((ragged_rows(index), 128), float(index))


def pad(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"padded": padded, "rows": torch.tensor([len(sample) for sample in samples])}


class Nested(_Items):
    """Dicts in dicts, with strings, numbers, tensors and an array."""

    def make(self, index: int) -> dict[str, Any]:
        return {
            "key": f"sample-{index:06d}",
            "image": torch.randn(3, 64, 64),
            "boxes": {"xyxy": np.full((12, 4), index, dtype=np.float64), "names": ["cat", "dog"]},
            "caption": " ".join(f"word{(index * step) % 997}" for step in range(20)),
            "score": index / 7,
        }


class Cloud(NamedTuple):
    points: torch.Tensor
    offsets: torch.Tensor
    sources: list[str]


class Clouds(_Items):
    """Point clouds of 2,000 to 6,000 points."""

    def make(self, index: int) -> tuple[torch.Tensor, str]:
        points = 2000 + (index * 7919) % 4000
        return torch.rand(points, 4), f"cloud-{index}"


def join_clouds(samples: list[tuple[torch.Tensor, str]]) -> Cloud:
    clouds = [points for points, _ in samples]
    offsets = torch.tensor([0, *(len(points) for points in clouds)]).cumsum(0)
    return Cloud(torch.cat(clouds), offsets, [source for _, source in samples])


class Stream(IterableDataset[torch.Tensor]):
    """A stream split over the workers, whose parts end at different times."""

    def __init__(self, starts: Starts, batches: int, batch_samples: int) -> None:
        self.starts = starts
        self.samples = batches * batch_samples
        self.batch_samples = batch_samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        share = self.samples // workers - number * self.batch_samples * 3
        for row in range(share):
            if row % self.batch_samples == 0:
                self.starts.note(row // self.batch_samples)
            yield torch.rand(8192).add_(row)


class Payloads(_Items):
    """Plain Python: a list of 800 small dicts an item."""

    def make(self, index: int) -> list[dict[str, Any]]:
        return [
            {"id": index * 10_000 + row, "name": f"item {index}/{row}", "weight": row / 3}
            for row in range(800)
        ]


class Records(_Items):
    """Small dicts that exist before the fork; reading one copies the page it lies on."""

    RECORDS = 120_000  # about 32 MiB

    def __init__(self, starts: Starts, batches: int, batch_samples: int) -> None:
        super().__init__(starts, batches, batch_samples)
        self.records: list[dict[str, Any]] = [
            {"id": row, "name": f"record {row}"} for row in range(self.RECORDS)
        ]

    def make(self, index: int) -> torch.Tensor:
        # A step that has no factor in common with the length: every page, in no order.
        chosen = [self.records[(index * 20 + row) * 7919 % self.RECORDS] for row in range(20)]
        return torch.tensor([record["id"] for record in chosen])


class ManyRecords(Records):
    """The same, so many that every worker's copies alone outgrow the budget: about 160 MiB."""

    RECORDS = 600_000


class Leaking(_Items):
    """Keeps 256 KiB of each item for ever, in the process that made it."""

    def __init__(self, starts: Starts, batches: int, batch_samples: int) -> None:
        super().__init__(starts, batches, batch_samples)
        self.kept: list[np.ndarray[Any, Any]] = []

    def make(self, index: int) -> torch.Tensor:
        self.kept.append(np.full(256 * 1024, index % 251, dtype=np.uint8))
        return torch.full((16_384,), float(index)) + torch.rand(1)


class Caching(_Items):
    """Caches what it made: 100 items of 2 MiB, drawn again and again, in each worker's copy."""

    ITEMS = 100

    def __init__(self, starts: Starts, batches: int, batch_samples: int) -> None:
        super().__init__(starts, batches, batch_samples)
        self.cache: dict[int, torch.Tensor] = {}

    def make(self, index: int) -> torch.Tensor:
        number = index * 37 % self.ITEMS
        if number not in self.cache:
            self.cache[number] = torch.arange(MIB // 2, dtype=torch.float32).add_(number)
        return self.cache[number][: MIB // 8] + torch.rand(1)


class Decoded(_Items):
    """A large peak for a small result: 60 MiB of scratch, of which 2 MiB stay."""

    def make(self, index: int) -> torch.Tensor:
        scratch = np.full(60 * MIB, index % 251, dtype=np.uint8)
        return torch.from_numpy(scratch[: 2 * MIB].copy())


class Blocks(_Items):
    """2 MiB of float32 in each item."""

    def make(self, index: int) -> torch.Tensor:
        return torch.rand(MIB // 2).add_(index)


class Pictures(_Items):
    """64 items are 8.0 MB of float32."""

    def make(self, index: int) -> torch.Tensor:
        return torch.full((3, 102, 102), float(index))


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def one_size(serial: int) -> int:
    return 0


def ragged_class(serial: int, batch_samples: int = 8) -> int:
    """The power of two above the padded rows of a batch."""
    first = serial * batch_samples
    rows = max(ragged_rows(index) for index in range(first, first + batch_samples))
    return rows.bit_length()


@dataclass(frozen=True, slots=True)
class Workload:
    """One way to use memory, and three budgets for it.

    `budgets_mib` go from about the smallest that works on Linux with Python 3.11
    and torch 2.13 to a generous one. `think_s` is what the consumer does for a
    step; it keeps every batch when `keeps` is true.
    """

    name: str
    dataset: Callable[[Starts, int, int], Any]
    batches: int
    batch_samples: int
    budgets_mib: tuple[int, int, int]
    workers: int = 2
    collate: Callable[[list[Any]], Any] | None = None
    size_class: Callable[[int], int] = one_size
    think_s: float = 0.0
    keeps: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def loader_arguments(self, starts_path: str) -> dict[str, Any]:
        """What both loaders are built from."""
        return {
            "dataset": self.dataset(Starts(starts_path), self.batches, self.batch_samples),
            "batch_size": self.batch_samples,
            "num_workers": self.workers,
            "collate_fn": self.collate,
            "multiprocessing_context": "fork",
            **self.arguments,
        }


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("images", Images, 60, 16, (64, 96, 192)),
        Workload("tiny", Tiny, 1500, 64, (32, 48, 96)),
        Workload("ragged", Ragged, 60, 8, (160, 224, 384), collate=pad, size_class=ragged_class),
        Workload("nested", Nested, 100, 32, (40, 64, 128)),
        Workload("custom collate", Clouds, 100, 32, (40, 64, 128), collate=join_clouds),
        Workload("stream", Stream, 200, 32, (40, 64, 128)),
        Workload("python objects", Payloads, 32, 8, (48, 64, 128), collate=as_it_is),
        Workload("touched records", Records, 160, 64, (80, 96, 192)),
        Workload("many records", ManyRecords, 500, 64, (224, 256, 384)),
        Workload("leaking", Leaking, 400, 4, (64, 128, 256)),
        Workload("caching", Caching, 300, 4, (96, 128, 256)),
        Workload("decoding peak", Decoded, 40, 1, (96, 160, 320)),
        Workload("hoarder", Blocks, 60, 1, (40, 64, 128), think_s=0.015, keeps=True),
        Workload("slow consumer", Pictures, 40, 64, (64, 96, 192), workers=4, think_s=0.03),
    )
}
