"""Indices come in torch's order, from torch's generators, and are not listed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import forebay
from forebay.flow.indices import make_compact


def draw(sampler: Any, generator: torch.Generator, most: int | None = None) -> tuple[Any, ...]:
    """What it gives, and where that leaves all generators."""
    torch.manual_seed(3)
    generator.manual_seed(5)
    given = list(sampler) if most is None else [x for x, _ in zip(sampler, range(most))]
    return given, torch.random.get_rng_state().tolist(), generator.get_state().tolist()


SIZES = (1, 7, 4096, 4097, 9000)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own generator", "shared generator"])
@pytest.mark.parametrize("size", SIZES)
def test_every_sampler_of_torchs_gives_what_it_gives_otherwise(size: int, is_shared: bool) -> None:
    generator = torch.Generator()
    shared = generator if is_shared else None
    weights = torch.arange(1.0, size + 1)
    samplers: list[Any] = [
        RandomSampler(range(size), generator=shared),
        RandomSampler(range(size), num_samples=2 * size, generator=shared),
        RandomSampler(range(size), num_samples=size // 2 + 1, generator=shared),
        RandomSampler(range(size), num_samples=2 * size + size // 2, generator=shared),
        RandomSampler(range(size), replacement=True, num_samples=size + 3, generator=shared),
        SubsetRandomSampler([f"sample {at}" for at in range(size)], generator=shared),  # type: ignore[misc]
        SubsetRandomSampler(torch.arange(size), generator=shared),  # type: ignore[arg-type]
        WeightedRandomSampler(weights, size + 1, generator=shared),  # type: ignore[arg-type]
        WeightedRandomSampler(weights, size, replacement=False, generator=shared),  # type: ignore[arg-type]
        SequentialSampler(range(size)),
    ]
    for sampler in samplers:
        for kind in (sampler, BatchSampler(sampler, 5, False), BatchSampler(sampler, 4, True)):
            compact = make_compact(kind)
            assert draw(compact, generator) == draw(kind, generator)
            assert len(compact) == len(kind)


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
def test_every_rank_gets_its_share_as_in_torch(
    size: int, replicas: int, rank: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    sampler: Any = DistributedSampler(
        range(size),  # type: ignore[arg-type]
        replicas,
        rank % replicas,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=1,
    )
    sampler.set_epoch(epoch)
    try:
        wanted = list(sampler)
    except AssertionError:  # torch's own limit: fewer samples than ranks
        with pytest.raises(AssertionError):
            list(make_compact(sampler))
    else:
        assert list(make_compact(sampler)) == wanted


@pytest.mark.parametrize("change", [-3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_dataset_that_changed_behind_its_sampler_meets_torchs_own_check(
    change: int, drop_last: bool
) -> None:
    samples = list(range(20))
    sampler: Any = DistributedSampler(samples, 2, 0, drop_last=drop_last)  # type: ignore[arg-type]
    samples[:] = range(20 + change)
    try:
        wanted: Any = list(sampler)
    except AssertionError:
        with pytest.raises(AssertionError, match="Number of"):
            list(make_compact(sampler))
    else:
        assert list(make_compact(sampler)) == wanted


def test_the_epoch_counts_that_is_set_when_the_iterator_is_asked_for() -> None:
    sampler: Any = DistributedSampler(range(50), 2, 1)  # type: ignore[arg-type]
    wanted, got = iter(sampler), iter(make_compact(sampler))
    sampler.set_epoch(9)
    assert list(got) == list(wanted)


def test_a_sampler_of_ones_own_is_left_as_it_is() -> None:
    class Mine(RandomSampler):
        pass

    mine = Mine(range(5))
    assert make_compact(mine) is mine


def test_a_batch_sampler_may_be_changed_between_epochs() -> None:
    sampler = BatchSampler(SequentialSampler(range(6)), 2, False)
    compact = make_compact(sampler)
    sampler.batch_size = 3
    assert list(compact) == [[0, 1, 2], [3, 4, 5]]


_PEAK = """
import resource, sys
import torch
from torch.utils.data.distributed import DistributedSampler
import forebay

class Numbers:
    def __len__(self): return {size}
    def __getitem__(self, index): return index

numbers = Numbers()
options = {options}
list(forebay.DataLoader(range(8), batch_size=4, num_workers={workers}))
next(iter(torch.randperm(5)))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
got = next(iter(forebay.DataLoader(numbers, batch_size=4, num_workers={workers}, **options)))
assert len(got) == 4
print((peak() - before) / {size})
"""

_RANKS = '{"sampler": DistributedSampler(numbers, 2, 1)}'


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ['{"shuffle": True}', _RANKS], ids=["shuffle", "distributed"])
def test_26_an_order_takes_eight_bytes_a_sample(order: str, workers: int) -> None:
    script = _PEAK.format(size=8_000_000, options=order, workers=workers)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(done.stdout) <= 8 + 0.5, "half a byte: 4 MB for a loader and its batch"


def test_a_loader_has_torchs_own_samplers() -> None:
    loader: Any = forebay.DataLoader(range(10), batch_size=5, shuffle=True)  # type: ignore[arg-type]
    assert type(loader.batch_sampler) is BatchSampler
    assert type(loader.sampler) is RandomSampler
