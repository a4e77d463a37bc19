"""Random samples: every draw in a worker, and every draw in the main process, is torch's.

The datasets draw from Python's, NumPy's and torch's global generators, or keep generators of
their own; the harness compares the generators of the main process after each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from .batches import large_images
from .collates import Appending, drawing_at_start, mixed_up, seeding_by_worker
from .conftest import Parity
from .consumers import (
    Note,
    before_each_epoch,
    breaking_after,
    drawing_between,
    every_batch,
    keeping_all,
)
from .datasets import CompressedPictures, Draws, Made, OwnGenerators, UnevenDraws, tensor_pairs
from .harness import Job, Loader, LoaderClass, Transcript, cases, compare, run, seed_everything


def seed_anew(loader: Any, epoch: int) -> None:
    """The same seed before every epoch: a run that is meant to repeat itself."""
    seed_everything(99)


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(41)


@pytest.mark.parametrize("workers", range(5))
@cases(
    {
        "pictures are decoded and augmented": Job(
            lambda: dict(dataset=CompressedPictures(), batch_size=3, shuffle=True), epochs=2
        ),
        "each sample draws as often as the dice say": Job(
            lambda: dict(dataset=UnevenDraws(), batch_size=2, shuffle=True),
            epochs=2,
            consumer=drawing_between,
        ),
        "the dataset keeps generators, a counter and a cache in itself": Job(
            lambda: dict(dataset=OwnGenerators(), batch_size=2), epochs=2
        ),
    }
)
def test_with_any_number_of_workers(parity: Parity, job: Job, workers: int) -> None:
    parity(job.given(num_workers=workers))


@pytest.mark.parametrize("workers", [1, 3])
@cases(
    {
        "samples draw from the global generators": Job(
            lambda: dict(dataset=UnevenDraws(), batch_size=2, shuffle=True), epochs=3
        ),
        "the dataset keeps generators, a counter and a cache in itself": Job(
            lambda: dict(dataset=OwnGenerators(), batch_size=2, shuffle=True), epochs=3
        ),
        "the training code draws between batches": Job(
            lambda: dict(dataset=Draws(), batch_size=3, shuffle=True),
            epochs=3,
            consumer=drawing_between,
        ),
        "the first epoch is left early": Job(
            lambda: dict(dataset=Draws(), batch_size=2, shuffle=True, generator=own_generator()),
            epochs=3,
            consumer=breaking_after(12),  # all are made by then, so all generators stand still
        ),
    }
)
def test_persistent_workers_go_on_drawing_when(parity: Parity, job: Job, workers: int) -> None:
    parity(job.given(num_workers=workers, persistent_workers=True))


@cases(
    {
        "a generator is given and the order is random": Job(
            lambda: dict(
                dataset=Draws(),
                batch_size=4,
                shuffle=True,
                num_workers=2,
                generator=own_generator(),
            ),
            epochs=3,
        ),
        "a generator is given and the order is not random": Job(
            lambda: dict(dataset=Draws(), batch_size=4, num_workers=2, generator=own_generator()),
            epochs=3,
        ),
        "a generator is given and there are no workers": Job(
            lambda: dict(dataset=Draws(), batch_size=4, shuffle=True, generator=own_generator()),
            epochs=2,
        ),
        "the seed is set anew before each epoch": Job(
            lambda: dict(dataset=Draws(), batch_size=4, shuffle=True, num_workers=2),
            epochs=2,
            consumer=before_each_epoch(seed_anew, drawing_between),
        ),
        "the seed is set anew before each epoch and workers persist": Job(
            lambda: dict(
                dataset=Draws(),
                batch_size=4,
                shuffle=True,
                num_workers=2,
                persistent_workers=True,
            ),
            epochs=3,
            consumer=before_each_epoch(seed_anew, every_batch),
        ),
        "the collate function draws": Job(
            lambda: dict(
                dataset=tensor_pairs(),
                batch_size=4,
                collate_fn=mixed_up,
                shuffle=True,
                num_workers=3,
            ),
            epochs=2,
        ),
        "the collate function counts its calls": Job(
            lambda: dict(
                dataset=Draws(),
                batch_size=4,
                collate_fn=Appending(),
                num_workers=2,
                persistent_workers=True,
            ),
            epochs=2,
        ),
        "the worker set-up function seeds": Job(
            lambda: dict(
                dataset=Draws(),
                batch_size=4,
                worker_init_fn=seeding_by_worker,
                num_workers=3,
            ),
            epochs=2,
        ),
        "the worker set-up function draws": Job(
            lambda: dict(
                dataset=UnevenDraws(),
                batch_size=4,
                worker_init_fn=drawing_at_start,
                num_workers=3,
                persistent_workers=True,
            ),
            epochs=2,
        ),
        "NumPy's generator is drawn from by large arrays": Job(
            lambda: dict(dataset=Made(_noise), batch_size=2, num_workers=2)
        ),
        "every batch is kept": Job(
            lambda: dict(dataset=CompressedPictures(), batch_size=3, shuffle=True, num_workers=2),
            epochs=2,
            consumer=keeping_all,
        ),
        "large images are shuffled": Job(
            lambda: dict(dataset=Made(large_images, 14), batch_size=3, shuffle=True, num_workers=2),
            epochs=2,
            consumer=drawing_between,
        ),
    }
)
def test_draws_are_the_same_when(parity: Parity, job: Job) -> None:
    parity(job)


def test_two_loaders_in_turn_draw_from_the_same_generators(
    reference: LoaderClass, candidate: LoaderClass
) -> None:
    def of(loader_class: LoaderClass) -> Transcript:
        """A training loader as the job's, and one that checks the model after each epoch."""

        def with_a_check(loader: Loader, epoch: int) -> Iterator[Note]:
            yield from drawing_between(loader, epoch)
            yield from drawing_between(checking, epoch)

        checking = loader_class(Draws(12), batch_size=4, shuffle=True, num_workers=2)
        return run(replace(job, consumer=with_a_check), loader_class)

    job = Job(
        lambda: dict(dataset=UnevenDraws(), batch_size=4, shuffle=True, num_workers=2), epochs=2
    )
    compare(of(reference), of(candidate), job)


def _noise(index: int) -> np.ndarray[Any, Any]:
    return np.random.standard_normal((300, 100))
