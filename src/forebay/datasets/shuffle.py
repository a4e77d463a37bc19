"""A shuffle buffer whose bound is bytes, for all workers together.

Covers: mixing the order of a stream. Does not cover: dividing the stream among the workers;
that is the dataset's affair, as in torch, and what is forgotten there is reported here.

The one idea: a buffer of so many *samples* takes as much memory as samples happen to be large,
times the workers. Here each sample is measured when it comes in, and one leaves before the
bytes pass the worker's part of the bound.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import warnings
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar, final

import torch
from torch.utils.data import IterableDataset, get_worker_info

from forebay.datasets.bounds import parse_memory
from forebay.datasets.sizes import estimate_bytes
from forebay.datasets.witness import SAMPLES, Witness, digest_sample
from forebay.errors import BudgetTooSmall, DuplicateSamplesWarning
from forebay.memory.allowance import get_budget
from forebay.memory.planner import WORKER_BYTES, ZYGOTE_BYTES
from forebay.memory.policy import PROMISED_FRAC
from forebay.units import format_bytes

T = TypeVar("T")
_log = logging.getLogger("forebay")

_FORECAST_FRAC = 0.05


@final
class ShuffleBuffer(IterableDataset[T], Generic[T]):
    """The samples of `dataset` in a mixed order.

    The buffer fills first, then each new sample pushes a random one out, and at the end the
    rest comes out in random order. A sample larger than the bound passes through. What is
    bounded is the buffers of all workers of a loader together, one sample beside each; ranks
    of distributed training have a bound each.

    Args:
        dataset: Any iterable; it divides its samples among workers itself.
        memory: Bytes, a size like `"64MiB"`, or a share like `"5%"` of the memory limit.
        most_samples: An upper bound on the samples in each worker's buffer too.
        seed: Makes the order depend on this, the worker's number and `set_epoch` only.
        generator: Where the order is drawn from when there is no seed. By default the global
            generator of torch, which a loader seeds in each worker.

    Attributes:
        memory_bytes: What `memory` names.

    Raises:
        InvalidMemory: `memory` names no bytes.
        ValueError: `seed` and `generator` are both given, or `most_samples` is below 1.
        BudgetTooSmall: While it is iterated by a loader whose fixed budget cannot hold what the
            buffers hold: from the moment when they would pass it.
    """

    def __init__(
        self,
        dataset: Iterable[T],
        memory: int | str = "64MiB",
        *,
        most_samples: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.dataset = dataset
        self.memory_bytes = parse_memory(memory)
        if most_samples is not None and most_samples < 1:
            raise ValueError(f"most_samples={most_samples} leaves no buffer; give 1 or more.")
        if seed is not None and generator is not None:
            raise ValueError("seed and generator are both given, and either decides the order.")
        self.most_samples = most_samples
        self.seed = seed
        self.generator = generator
        self._epoch = 0
        self._begun = 0
        self._witness = Witness()
        self._forecast_bytes: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Another order from the same seed. Passed on to the dataset if it has the method."""
        self._epoch = epoch
        pass_on = getattr(self.dataset, "set_epoch", None)
        if callable(pass_on):
            pass_on(epoch)

    @property
    def forecast_bytes(self) -> int | None:
        """What the buffers of all workers will hold when full, in the process that fills one.

        Known from the time when a twentieth is filled, and logged then (`"forebay"`, INFO); None
        before.
        """
        return self._forecast_bytes

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type] # a TypeError where it has none, as in torch

    def __iter__(self) -> Iterator[T]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        rng = self._make_rng(worker)
        self._begun += 1
        self._forecast_bytes = None
        source: Iterable[T] = self.dataset
        if info and workers > 1:
            epoch = hash((info.seed - info.id, self._begun)) & (1 << 63) - 1
            source = self._watch(source, worker, epoch)
        return self._shuffle(source, max(1, self.memory_bytes // workers), workers, rng)

    def _make_rng(self, worker: int) -> random.Random:
        # One number is drawn, and the rest from a generator of our own: what the dataset draws
        # does not depend on how full the buffer is.
        if self.seed is not None:
            return random.Random(f"{self.seed}/{self._epoch}/{worker}")
        drawn = torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return random.Random(int(drawn))

    def _shuffle(
        self, source: Iterable[T], bound_bytes: int, workers: int, rng: random.Random
    ) -> Iterator[T]:
        held: list[T] = []
        sizes: list[int] = []
        total = 0
        most, room_bytes = self.most_samples, _find_room_bytes(workers)
        for sample in source:
            size = estimate_bytes(sample)
            if size > bound_bytes:
                yield sample
                continue
            while held and (total + size > bound_bytes or len(held) == most):
                _move_to_end(held, sizes, rng)
                total -= sizes.pop()
                yield held.pop()
            if total + size > room_bytes and self._forecast_bytes:
                self._refuse_above_budget(workers)
            held.append(sample)
            sizes.append(size)
            total += size
            del sample  # it may be pushed out, used and gone while the next one is made
            if self._forecast_bytes is None:
                self._forecast(total, len(held), bound_bytes, workers)
        while held:
            _move_to_end(held, sizes, rng)
            sizes.pop()
            yield held.pop()

    def _forecast(self, total: int, count: int, bound_bytes: int, workers: int) -> None:
        """From the first twentieth of the buffer, in samples or bytes, tell the whole."""
        most = self.most_samples
        if total < _FORECAST_FRAC * bound_bytes and (not most or count < _FORECAST_FRAC * most):
            return
        wanted = bound_bytes if most is None else total * most // count
        self._forecast_bytes = min(wanted, bound_bytes) * workers
        text = "each of %d shuffle buffers will hold about %s, %s in all"
        shares = (format_bytes(self._forecast_bytes // workers), format_bytes(self._forecast_bytes))
        if most is not None and wanted > bound_bytes:
            text += f"; {most} samples would take {format_bytes(wanted * workers)}"
        _log.info(text, workers, *shares)

    def _refuse_above_budget(self, workers: int) -> None:
        """This buffer is as full as its part of the loader's budget allows, and would grow."""
        budget_bytes = get_budget() or 0
        held_bytes = _find_bare_bytes(workers) + (self._forecast_bytes or 0)
        needed_bytes = int(held_bytes / PROMISED_FRAC) + 1
        who = f"{workers} worker(s) with shuffle buffers that are full take"
        raise BudgetTooSmall.about(budget_bytes, needed_bytes, 0, None, who)

    def _watch(self, source: Iterable[T], worker: int, epoch: int) -> Iterator[T]:
        """The samples, the first of which are compared with the other workers'."""
        digests = b""
        samples = iter(source)
        for sample in itertools.islice(samples, SAMPLES):
            digests += digest_sample(sample)
            if len(digests) == 16 * SAMPLES:
                self._report_twin(worker, self._witness.find_twin(worker, epoch, digests))
            yield sample
        yield from samples

    def _report_twin(self, worker: int, twin: int | None) -> None:
        if twin is None:
            return
        warnings.warn(
            f"workers {twin} and {worker} (process {os.getpid()}) begin with the same {SAMPLES} "
            "samples: the dataset does not divide its stream, so every sample comes once from "
            "each worker, and the shuffle buffers are filled with duplicates. Nothing was left "
            "out. Let __iter__ of the dataset take each num_workers-th sample from its "
            "get_worker_info().id on, or use one worker.",
            DuplicateSamplesWarning,
            stacklevel=2,
        )


def _find_room_bytes(workers: int) -> float:
    """What each buffer may hold below the loader's budget; no bound where that is not fixed."""
    budget_bytes = get_budget()
    if budget_bytes is None:
        return math.inf
    return max(0, PROMISED_FRAC * budget_bytes - _find_bare_bytes(workers)) / workers


def _find_bare_bytes(workers: int) -> int:
    return ZYGOTE_BYTES + workers * WORKER_BYTES


def _move_to_end(held: list[T], sizes: list[int], rng: random.Random) -> None:
    """Put a random one last, from where `pop` leaves no reference to it behind."""
    at = rng.randrange(len(held))
    held[at], held[-1] = held[-1], held[at]
    sizes[at], sizes[-1] = sizes[-1], sizes[at]
