"""Random order without a list of Python integers.

Covers: iterating torch's own samplers so that an order over n samples costs the 8 n bytes of
its permutation. Does not cover: batches and tickets (order.py), samplers of anyone else.

torch turns a permutation into a list before it gives the first index: 50 million samples are
1.9 GB of integers and seconds of work, once a rank, and every collection walks the list. The
permutation itself is drawn as torch draws it, so order and generators are torch's exactly;
only the step to Python integers happens in small pieces.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

_PIECE = 4096
"""Indices made into Python integers at a time: 0.15 MB, and the cost of a piece is lost in it."""


def make_compact(sampler: Any) -> Any:
    """What gives the indices or batches of `sampler`, and holds 8 bytes an index.

    Args:
        sampler: Any sampler or batch sampler. Only torch's own classes are known: a subclass
            may do anything in its `__iter__`, and is given back as it is.
    """
    open_order = _KNOWN.get(type(sampler))
    return sampler if open_order is None else _Compact(sampler, open_order)


@final
class _Compact:
    """A sampler whose order is not listed."""

    def __init__(self, sampler: Any, open_order: Callable[[Any], Iterator[Any]]) -> None:
        self._sampler = sampler
        self._open_order = open_order

    def __iter__(self) -> Iterator[Any]:
        return self._open_order(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def _spell(order: torch.Tensor) -> Iterator[int]:
    """The elements of a 1-D int64 tensor, as Python integers."""
    pieces = (order[at : at + _PIECE].tolist() for at in range(0, len(order), _PIECE))
    return itertools.chain.from_iterable(pieces)


def _open_batches(sampler: BatchSampler) -> Iterator[list[int]]:
    compact = copy.copy(sampler)
    compact.sampler = make_compact(sampler.sampler)
    return iter(compact)


def _open_random(sampler: RandomSampler) -> Iterator[int]:
    length = len(sampler.data_source)
    if sampler.replacement or not length:
        yield from sampler  # draws 32 at a time itself
        return
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    rounds, rest = divmod(sampler.num_samples, length)
    for _ in range(rounds):
        yield from _spell(torch.randperm(length, generator=generator))
    if rest or sampler.generator is not None:  # torch draws once more, if only for nothing
        yield from _spell(torch.randperm(length, generator=generator)[:rest])


def _open_subset(sampler: SubsetRandomSampler) -> Iterator[Any]:
    order = torch.randperm(len(sampler.indices), generator=sampler.generator)
    for at in _spell(order):
        yield sampler.indices[at]


def _open_weighted(sampler: WeightedRandomSampler) -> Iterator[int]:
    yield from _spell(
        torch.multinomial(
            sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
        )
    )


def _open_distributed(sampler: DistributedSampler[Any]) -> Iterator[int]:
    """Every R-th place of the order, which begins again where it is too short.

    No generator: torch draws at once when asked for an iterator, with the epoch set then.
    """
    length = len(sampler.dataset)  # type: ignore[arg-type]
    is_odd = length < sampler.total_size if sampler.drop_last else length > sampler.total_size
    if is_odd or not length:  # it changed after the sampler was made: torch's own words
        return iter(sampler)
    places = range(sampler.rank, sampler.total_size, sampler.num_replicas)
    if not sampler.shuffle:
        return (place % length for place in places)
    generator = torch.Generator()
    generator.manual_seed(sampler.seed + sampler.epoch)
    order = torch.randperm(length, generator=generator)
    within = range(sampler.rank, min(length, sampler.total_size), sampler.num_replicas)
    padding = (int(order[place % length]) for place in places[len(within) :])
    return itertools.chain(_spell(order[within.start : within.stop : within.step]), padding)


_KNOWN: dict[type, Callable[[Any], Iterator[Any]]] = {
    BatchSampler: _open_batches,
    RandomSampler: _open_random,
    SubsetRandomSampler: _open_subset,
    WeightedRandomSampler: _open_weighted,
    DistributedSampler: _open_distributed,
}
