"""Reports of files, copies and processes that are left over, or that were never needed."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

import forebay
from forebay.units import KIB, MIB

pytestmark = pytest.mark.timeout(120)


class Large(Dataset[torch.Tensor]):
    """Sample i holds i everywhere: 4 MiB."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((MIB,), float(index))


def find_named_files(pids: list[int]) -> set[str]:
    """Files in /dev/shm that these processes have open or mapped."""
    found = set()
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps").read_text()
        links = [
            os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
        ]
        found |= set(re.findall(r"/dev/shm/\S+", "\n".join([maps, *links])))
    return {name for name in found if not name.startswith("/dev/shm/pym-")}


def test_8_9_52_there_is_no_named_file_that_could_be_left_removed_or_met_again() -> None:
    """Nothing is swept and nothing is named by pid: there is nothing to sweep."""
    loader = forebay.DataLoader(Large(), 2, num_workers=2)
    with loader, forebay.DataLoader(Large(), 2, num_workers=2) as other:
        kept = [next(batches := iter(loader)), next(others := iter(other))]
        kept += [next(batches), next(others)]
        tree = [os.getpid(), *(child.pid for child in psutil.Process().children(True))]
        assert not find_named_files(tree)
        assert [int(batch[0, 0]) for batch in kept] == [0, 0, 2, 2]


class Sliced(Dataset[torch.Tensor]):
    """A thin slice of something large."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16 * MIB,), index, dtype=torch.uint8)[:1024]


def test_37_a_slice_travels_without_the_video_that_it_was_cut_from() -> None:
    with forebay.DataLoader(Sliced(), batch_size=None, num_workers=1) as loader:
        batches = list(loader)
        stats = loader.stats()
    assert [int(batch[0]) for batch in batches] == list(range(12))
    assert all(len(batch.untyped_storage()) <= 4 * KIB for batch in batches)
    assert stats.delivered_bytes == 12 * KIB
    assert stats.arena_bytes <= 64 * KIB


class Expanded(Dataset[torch.Tensor]):
    """4 MiB that look like 64."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1, MIB), float(index)).expand(16, -1)


def test_38_an_expanded_sample_counts_as_what_it_becomes() -> None:
    with forebay.DataLoader(Expanded(), 1, num_workers=1, memory_budget="220MiB") as loader:
        assert [int(batch[0, 0, 0]) for batch in loader] == list(range(6))
        stats = loader.stats()
    assert stats.delivered_bytes == 6 * 64 * MIB
    assert stats.peak_footprint_bytes <= 220 * MIB
    small = forebay.DataLoader(Expanded(), 1, num_workers=1, memory_budget="60MiB")
    with small, pytest.raises(forebay.BudgetTooSmall, match="64 MiB"):
        next(iter(small))


def test_47_iterators_that_are_begun_and_dropped_leave_nothing_running() -> None:
    children = psutil.Process().children
    loader = forebay.DataLoader(Large(), 2, num_workers=2, memory_budget="300MiB")
    with loader:
        for _ in range(6):
            assert int(next(iter(loader))[0, 0]) == 0
            gc.collect()
            assert len(children(recursive=True)) <= 3, "two workers and their template"
            assert loader.stats().arena_bytes <= 300 * MIB


class Records(Dataset[Any]):
    """Many small objects that workers have and do not read; says what collecting them costs."""

    def __init__(self, length: int) -> None:
        self.records = [{"number": number} for number in range(length)]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        before = read_private_bytes()
        gc.collect()
        return read_private_bytes() - before


def read_private_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(size) * KIB for size in re.findall(r"Private_\w+:\s+(\d+) kB", text))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_59_a_collection_in_a_worker_copies_none_of_the_parents_pages(method: str) -> None:
    dataset = Records(300_000)
    table_bytes, frozen = 300_000 * 250, gc.get_freeze_count()
    with forebay.DataLoader(dataset, num_workers=2, multiprocessing_context=method) as loader:
        grown = [int(batch) for batch in loader]
    assert max(grown) < 0.1 * table_bytes
    assert gc.get_freeze_count() <= frozen, "and the training code's collector goes on as it was"


class Table(Dataset[Any]):
    """Some 60 MiB of records, read in no order."""

    def __init__(self) -> None:
        self.records = [(f"sample {number}", number) for number in range(400_000)]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return int(self.records[index * 5000][1])


def test_21_a_spawned_dataset_is_there_once_however_many_workers_share_it() -> None:
    held = {}
    for workers in (1, 3):
        with forebay.DataLoader(
            Table(), 2, num_workers=workers, multiprocessing_context="spawn", memory_budget="4GiB"
        ) as loader:
            assert sum(int(batch.sum()) for batch in loader) == sum(range(64)) * 5000
            held[workers] = loader.stats().workers_private_bytes
    own_bytes = 2 * 20 * MIB  # what two more workers have of their own, with or without a table
    assert held[3] - own_bytes < 1.3 * held[1]
