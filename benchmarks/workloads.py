"""What the benchmark loaders are asked to deliver.

Covers: the datasets of every line of the benchmark and how a consumer touches
a batch. Does not cover: which loader delivers them (contestants.py), or how
the lines are measured (transport.py, feeding.py, starting.py).

The idea: a transport workload does no work in the dataset. `__getitem__` hands
out a tensor made in advance, so what is measured is what it
costs to collate a batch and to get it to the consumer.
"""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

FLOATS_PER_PAGE = 1024  # 4 KiB of float32: a stride of one element a page
BATCH_SAMPLES = 64
ENDLESS_SAMPLES = BATCH_SAMPLES * 10_000_000  # the clock ends a transport run, not the data


class PremadeTensors(Dataset[torch.Tensor]):
    """One tensor made in advance, which is every item: the dataset does no work at all."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        elements = int(np.prod(shape))
        # Small whole numbers: a float32 sum of them is exact, so it can be checked.
        self.sample = (torch.arange(elements) % 7).to(torch.float32).view(shape)

    def __len__(self) -> int:
        return ENDLESS_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


class PremadeFields(Dataset[dict[str, torch.Tensor]]):
    """A dict of vectors made in advance, which is every item."""

    def __init__(self, fields: int, length: int) -> None:
        self.fields = {
            f"field_{number:02d}": ((torch.arange(length) + number) % 7).to(torch.float32)
            for number in range(fields)
        }

    def __len__(self) -> int:
        return ENDLESS_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.fields


@dataclass(frozen=True, slots=True)
class TransportWorkload:
    """One size of batch; exactly one of `shape` and `fields` describes the sample."""

    name: str
    batch_bytes: int
    shape: tuple[int, ...] = ()
    fields: tuple[int, int] = (0, 0)

    def make_dataset(self) -> Dataset[Any]:
        """The dataset of this workload, built anew."""
        if self.shape:
            return PremadeTensors(self.shape)
        return PremadeFields(*self.fields)


def _tensor_workload(name: str, *shape: int) -> TransportWorkload:
    return TransportWorkload(name, BATCH_SAMPLES * int(np.prod(shape)) * 4, shape=shape)


TRANSPORT_WORKLOADS = {
    workload.name: workload
    for workload in (
        _tensor_workload("38.5 MB", 3, 224, 224),
        _tensor_workload("3.1 MB", 3, 64, 64),
        _tensor_workload("0.8 MB", 3, 32, 32),
        _tensor_workload("4 KB", 16),
        TransportWorkload("16-field dict", BATCH_SAMPLES * 16 * 48 * 4, fields=(16, 48)),
    )
}


def touch(batch: Any) -> float:
    """Read one element of every page of `batch`; returns their sum."""
    if isinstance(batch, torch.Tensor):
        return float(batch.view(-1)[::FLOATS_PER_PAGE].sum())
    if isinstance(batch, dict):
        return sum(touch(value) for value in batch.values())
    return sum(touch(value) for value in batch)


class GeneratedPhotos(Dataset[tuple[torch.Tensor, int]]):
    """JPEGs of 500 x 375 made here, decoded and cropped to 3 x 224 x 224 float32.

    Stands in where the clips that real photographs are cut from are missing. The
    pictures are smoothed noise over a gradient: their size as JPEG (about 60 KB)
    and their decoding time are those of photographs.
    """

    def __init__(self, samples: int, pictures: int = 64) -> None:
        self.samples = samples
        self.files = [_make_jpeg(seed) for seed in range(pictures)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        with Image.open(io.BytesIO(self.files[index % len(self.files)])) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        top, left = index * 37 % 151, index * 53 % 276
        crop = pixels[top : top + 224, left : left + 224]
        image = torch.from_numpy(crop.transpose(2, 0, 1).copy()).float().div_(255)
        return image, index % 1000


def _make_jpeg(seed: int) -> bytes:
    from PIL import Image

    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = random.normal(0, 9, (375, 500, 3)).astype(np.int16)
    pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, "JPEG", quality=90)
    return target.getvalue()


class PremadeBatches(Dataset[torch.Tensor]):
    """For the slow consumer: 64 samples of 3 x 102 x 102 float32 are 8.0 MB."""

    SHAPE = (3, 102, 102)

    def __init__(self, samples: int, make_s: float = 0.0002) -> None:
        self.samples = samples
        self.make_s = make_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.make_s)  # waiting for storage: no memory, no processor
        return torch.full(self.SHAPE, float(index % 1000))


class SmallRecords(Dataset[int]):
    """A list of small Python records: what a start by pickling has to carry."""

    def __init__(self, records: int) -> None:
        self.records = [
            {
                "path": f"shard-{number % 997:04d}/{number:09d}.jpg",
                "label": number % 1000,
                "row": number,
            }
            for number in range(records)
        ]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> int:
        record = self.records[index]
        return int(record["label"]) + len(str(record["path"]))
