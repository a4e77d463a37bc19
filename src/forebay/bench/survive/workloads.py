"""Sixteen ways in which training data uses memory, scaled to a small machine.

Covers: the datasets, how they are collated, what each consumer does between batches, and
three budgets for each. Does not cover: running them (job.py, run.py).

The idea: every sample is a function of its index and costs what the real one costs, in
memory and in time, so that no file has to be fetched and every run is the same.
"""

from __future__ import annotations

import abc
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

MIB = 1024**2
_ENDLESS = 100_000_000


class Samples(Dataset[Any], abc.ABC):
    """As many samples as anybody asks for; a subclass says what one is."""

    def __len__(self) -> int:
        return _ENDLESS

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Any:
        """The sample, the same for the same index."""


def draw(index: int, low: int, high: int) -> int:
    """A number of [low, high) that belongs to `index` alone (Knuth's multiplicative hash)."""
    return low + index * 2_654_435_761 % 2**32 * (high - low) // 2**32


def work(seconds: float) -> None:
    """Use the processor for so long, as decoding does."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@final
class FixedImages(Samples):
    """Photographs as 3 x 224 x 224 float32: all of one size, 37 MiB a batch.

    Each takes 2 ms of work, and this sets the pace: the usual case of computer vision.
    """

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        work(0.002)
        return torch.full((3, 224, 224), float(index % 251)), index % 10


@final
class TinyImages(Samples):
    """32 x 32 pictures, next to no work.

    What a loader itself costs is nearly all of the time, and its processes are nearly all of
    the memory.
    """

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 32, 32), float(index % 251)), index % 10


@final
class Clips(Samples):
    """Video of 8 to 32 frames of 112 x 112, one in sixty of 240 frames.

    A batch is padded to its longest clip: most have 9 MiB, a few have 69. What fitted a
    hundred times does not fit the next time.
    """

    def __getitem__(self, index: int) -> torch.Tensor:
        frames = 240 if index % 61 == 1 else draw(index, 8, 33)
        work(frames * 0.0001)
        return torch.full((frames, 3, 112, 112), index % 251, dtype=torch.uint8)


@final
class Tokens(Samples):
    """Sequences of 64 to 4,000 tokens, most of them short, padded to the longest of a batch."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((draw(index, 8, 64) ** 2,), index % 50_000)


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    """One tensor, as long as the longest of them."""
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@final
class Annotations(Samples):
    """A table of records as Python dicts, made before the workers are; every sample reads some.

    With fork each worker ends up with a copy of nearly the whole table: reading an object
    writes its reference count. Nothing leaks, and no batch shows it.
    """

    def __init__(self, records: int = 1_000_000) -> None:
        self.records = [
            {"id": number, "label": f"class {number % 80}", "score": number / 7}
            for number in range(records)
        ]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        chosen = [self.records[draw(index * 8 + step, 0, len(self.records))] for step in range(8)]
        return torch.full((3, 64, 64), float(index % 251)), sum(r["score"] for r in chosen)  # type: ignore[misc]


@final
class ObjectColumn(Samples):
    """A pandas DataFrame with a column of Python strings, read row by row.

    Its numbers are arrays and stay shared after a fork; the strings are objects, and reading one
    writes its reference count, so a worker copies the page that it lies on.
    """

    def __init__(self, rows: int = 600_000) -> None:
        import pandas as pd

        captions = [f"a caption of row {row}" for row in range(rows)]
        columns = {"caption": pd.Series(captions, dtype=object), "price": np.arange(rows) / 7}
        self.frame = pd.DataFrame(columns)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        row = self.frame.iloc[draw(index, 0, len(self.frame))]
        return torch.full((3, 64, 64), float(row["price"] % 251)), row["caption"]


@final
class ShuffledStream(IterableDataset[torch.Tensor]):
    """A stream split over the workers, each with a shuffle buffer of 100 half-MiB samples.

    50 MiB a worker that no batch shows, filled before the first batch comes.
    """

    SLOTS = 100

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        buffer: list[torch.Tensor] = []
        for number in range(first, _ENDLESS, step):
            sample = torch.full((MIB // 8,), float(number % 251))
            if len(buffer) < self.SLOTS:
                buffer.append(sample)
                continue
            at = draw(number, 0, len(buffer))
            buffer[at], sample = sample, buffer[at]
            yield sample


@final
class Volumes(Samples):
    """3-D scans: 96 MiB of scratch for a patch of half a MiB.

    In each worker and for each sample, gone again when the patch is cut out. The batches are
    small and say nothing of what making them takes.
    """

    def __getitem__(self, index: int) -> torch.Tensor:
        volume = np.full((96, 512, 512), index % 251, dtype=np.float32)
        return torch.from_numpy(volume[:32, :64, :64].copy())


@final
class Audio(Samples):
    """Speech of 1 to 16 seconds at 16 kHz, one in fifty of 40; padded to the longest."""

    def __getitem__(self, index: int) -> torch.Tensor:
        seconds = 40 if index % 53 == 1 else draw(index, 1, 17)
        work(0.0005)
        return torch.full((seconds * 16_000,), float(index % 251))


@final
class MappedFile(Samples):
    """A memory-mapped file that is larger than the limit.

    Its pages are the kernel's to keep and to drop, and must not be taken for memory that the
    loader holds.
    """

    FILE_MIB = 768

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="forebay-survive-"))
        self.path = folder / "mapped"
        with self.path.open("wb") as file:
            block = np.arange(MIB, dtype=np.uint8).tobytes()
            for _ in range(self.FILE_MIB):
                file.write(block)
            file.flush()
            # Dirty pages cannot be dropped, and the limit that comes next asks for it.
            os.fsync(file.fileno())
        self._owner_pid = os.getpid()
        self._array: np.ndarray[Any, Any] | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._array is None:
            self._array = np.memmap(self.path, np.uint8, "r")
        start = draw(index, 0, self.FILE_MIB - 1) * MIB
        return torch.from_numpy(self._array[start : start + 256 * 1024].copy())

    def __del__(self) -> None:
        if os.getpid() == self._owner_pid:
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()


@final
class NestedDicts(Samples):
    """Dicts in dicts with strings, numbers, boxes and a picture.

    Many small parts a sample, which a loader has to take apart and put together.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "key": f"sample {index}",
            "image": torch.full((3, 96, 96), float(index % 251)),
            "boxes": {"xyxy": torch.full((16, 4), float(index)), "names": ["cat", "dog"] * 8},
            "caption": " ".join(f"word{draw(index + step, 0, 999)}" for step in range(30)),
        }


@final
class Floats(Samples):
    """8 MiB batches of floats, with nothing to do for them."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((MIB // 32,), float(index % 251))


@final
class Bursty(Samples):
    """Quick samples, and one in 640 that takes half a second: a cold shard, a retry.

    It uses no processor meanwhile. Who has enough batches ahead does not notice.
    """

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 640 == 0:
            time.sleep(0.5)
        return torch.full((MIB // 32,), float(index % 251))


@final
class Leaking(Samples):
    """Keeps 32 KiB of every sample for ever, in the process that makes it.

    A cache without a bound, or a library that leaks.
    """

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.kept.append(bytes([index % 251]) * 32_768)
        work(0.0005)
        return torch.full((3, 64, 64), float(index % 251))


@final
@dataclass(frozen=True, slots=True)
class Workload:
    """One way to use memory.

    Attributes:
        name: For the command line and the tables.
        make: Makes the dataset.
        batch_size: Samples of a batch.
        budgets_mib: Tight, medium and roomy: what a loader may hold beside the job itself.
        workers: `num_workers` that a user would write.
        collate: The collate function; None for torch's.
        think_s: What the consumer does for each batch, in seconds.
        keep_every: The consumer keeps every so many-th batch; 0 for none.
        keep_mib: What it keeps of memory so, about, in all.
        pressure_mib: Another process takes so much in mid-run, and gives it back.
        needs: A package that its dataset is made of, beside forebay's own; empty for none.
    """

    name: str
    make: Callable[[], Any]
    batch_size: int
    budgets_mib: tuple[int, int, int]
    workers: int = 2
    collate: Callable[[list[Any]], Any] | None = None
    think_s: float = 0.0
    keep_every: int = 0
    keep_mib: int = 0
    pressure_mib: int = 0
    needs: str = ""

    @property
    def why_skipped(self) -> str:
        """Why it cannot be run here, and what to do; empty where it can."""
        if not self.needs or importlib.util.find_spec(self.needs) is not None:
            return ""
        return f"{self.name} needs {self.needs}. Install it with: pip install {self.needs}"


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("fixed images", FixedImages, 64, (120, 240, 480)),
        Workload("tiny images", TinyImages, 256, (40, 80, 160)),
        Workload("video clips", Clips, 8, (160, 320, 640), collate=pad),
        Workload("padded tokens", Tokens, 64, (40, 80, 160), collate=pad),
        Workload("annotation dicts", Annotations, 64, (160, 320, 800)),
        Workload("object column", ObjectColumn, 64, (60, 120, 300), needs="pandas"),
        Workload("shuffled stream", ShuffledStream, 8, (140, 240, 400)),
        Workload("volumes", Volumes, 2, (140, 260, 520)),
        Workload("variable audio", Audio, 32, (140, 280, 560), collate=pad),
        Workload("memory-mapped file", MappedFile, 32, (60, 120, 240)),
        Workload("nested dicts", NestedDicts, 64, (50, 100, 200)),
        Workload("slow consumer", Floats, 64, (60, 120, 240), workers=4, think_s=0.03),
        Workload("bursty dataset", Bursty, 64, (60, 120, 240), workers=4, think_s=0.004),
        Workload("leaking dataset", Leaking, 64, (60, 120, 240)),
        Workload("outside pressure", Floats, 64, (400, 600, 800), workers=4, pressure_mib=250),
        Workload("hoarding consumer", Floats, 64, (60, 120, 240), keep_every=4, keep_mib=240),
    )
}
