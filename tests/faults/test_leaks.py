"""Workers that grow: what it is, is told; who outgrows its share is replaced, and nothing lost.

Reports 1, 33, 39 and 44: pages copied by reading objects, a native leak, a handle that leaks in
children alone, and a cache by shape that comes to an end.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import forebay
from forebay.units import KIB, MIB

pytestmark = pytest.mark.timeout(120)

BATCH = 2
MALLOC: Any = ctypes.CDLL(None).malloc
MALLOC.restype, MALLOC.argtypes = ctypes.c_void_p, [ctypes.c_size_t]


class Growing(Dataset[Any]):
    """Sample i holds i everywhere; making it leaves something behind.

    Args:
        kind: What.
        length: Samples.
        sleep_s: What one takes.
    """

    def __init__(self, kind: str, length: int, sleep_s: float = 0.0) -> None:
        self.kind, self.length, self.sleep_s = kind, length, sleep_s
        self.kept: list[Any] = []
        self.creator = os.getpid()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        if self.kind == "native" or (self.kind == "handle" and os.getpid() != self.creator):
            _lose(256 * KIB)
        elif self.kind == "python":
            self.kept.append([float(at) for at in range(8192)])
        elif self.kind == "settling" and len(self.kept) < 30:
            self.kept.append(bytearray(os.urandom(1024) * 1024))
        return torch.full((64 * KIB,), float(index))


def _lose(size: int) -> None:
    """What nobody can free any more."""
    ctypes.memset(MALLOC(size), 1, size)


def run(dataset: Any, **options: Any) -> tuple[list[str], Any, list[int]]:
    """An epoch: the last explanation, figures, and the first value of each batch."""
    with forebay.DataLoader(dataset, BATCH, num_workers=2, **options) as loader:
        seen = [int(batch.flatten()[0]) for batch in loader]
        return loader.explain().splitlines(), loader.stats(), seen


def find(lines: list[str], words: str) -> str:
    return next((line for line in lines if words in line), "")


@pytest.mark.parametrize(
    ("kind", "made_of"),
    [("native", "memory below Python"), ("handle", "memory below Python"), ("python", "Python ob")],
)
def test_33_39_what_a_worker_grows_by_is_told_with_what_it_is_made_of(
    kind: str, made_of: str
) -> None:
    lines, stats, _ = run(Growing(kind, 240, 0.003), memory_budget="1GiB")
    said = find(lines, "a worker grows by")
    assert made_of in said, lines
    batches = re.search(r"not slowed over (\d+) batches", said)
    assert batches is not None
    assert int(batches[1]) <= 100, "a verdict needs under 100 batches"
    assert 0.8 * 512 * KIB < stats.growth_bytes_per_batch < 1.3 * 512 * KIB


def test_44_growth_that_comes_to_an_end_is_no_leak() -> None:
    lines, stats, _ = run(Growing("settling", 400), memory_budget="1GiB")
    assert not find(lines, "a worker grows by"), lines
    assert stats.growth_bytes_per_batch == 0


@pytest.mark.parametrize("kind", ["native", "python"])
@pytest.mark.parametrize("persistent", [False, True])
def test_33_an_epoch_that_leaks_twice_its_budget_is_whole_and_keeps_it(
    kind: str, persistent: bool
) -> None:
    """600 samples leave 150 MiB behind, and more than the workers' share of 100 MiB."""
    lines, stats, seen = run(
        Growing(kind, 600), memory_budget="100MiB", persistent_workers=persistent
    )
    assert seen == list(range(0, 600, BATCH))
    assert stats.peak_footprint_bytes <= 100 * MIB
    assert find(lines, "streams went on in another process"), lines
    assert stats.worker_restarts == 0, "replaced in an orderly way, and not killed"
    assert find(lines, "a worker grows by"), "told over several of them, each short-lived"


class Records(Dataset[Any]):
    """Reads one of many small records, a dict as a parser gives it."""

    def __init__(self, length: int) -> None:
        self.records = [{"path": f"image {at}.jpg", "label": at} for at in range(length)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.records[index]["label"])


class Packed(Records):
    """The same, packed."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.records = forebay.PackedList(self.records)  # type: ignore[assignment]


def measure_unshared(dataset: Any) -> tuple[int, list[str]]:
    options: dict[str, Any] = {"memory_budget": "1GiB", "multiprocessing_context": "fork"}
    options |= {"shuffle": True, "persistent_workers": True}
    with forebay.DataLoader(dataset, 512, num_workers=2, **options) as loader:
        for _ in range(3):  # what they have is read five times a second
            for _ in loader:
                pass
        lines = loader.explain().splitlines()
    said = re.search(r"have copied ([\d.]+) (\w+) of pages", find(lines, "have copied"))
    if said is None:
        return 0, lines
    return int(float(said[1]) * {"MiB": MIB, "GiB": 1024 * MIB}[said[2]]), lines


def test_1_pages_that_reading_copies_are_named_with_their_owner_and_packed_ones_are_not() -> None:
    copied, lines = measure_unshared(Records(300_000))
    assert copied > 20 * MIB, lines
    said = find(lines, "have copied")
    assert "is no leak" in said
    assert "dataset.records (list of 300,000)" in said
    assert "PackedList" in said
    assert not find(lines, "a worker grows by"), "what a worker has allocated stays"
    assert measure_unshared(Packed(300_000))[0] == 0
