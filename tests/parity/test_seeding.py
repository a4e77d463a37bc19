"""`seeding="batch"`, which torch does not have: batches do not depend on the number of workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .collates import mixed_up
from .consumers import breaking_after, drawing_between
from .datasets import CompressedPictures, Draws, UnevenDraws, tensor_pairs
from .harness import Job, LoaderClass, cases, compare, run

JOBS = {
    "samples draw unevenly": Job(
        lambda: dict(dataset=UnevenDraws(), batch_size=2, shuffle=True),
        epochs=2,
        consumer=drawing_between,
    ),
    "pictures are augmented": Job(
        lambda: dict(
            dataset=CompressedPictures(),
            batch_size=3,
            shuffle=True,
            generator=torch.Generator().manual_seed(6),
        ),
        epochs=2,
    ),
    "the collate function draws": Job(
        lambda: dict(dataset=tensor_pairs(), batch_size=3, collate_fn=mixed_up)
    ),
}


@pytest.fixture
def seeded_by_batch(candidate: LoaderClass) -> LoaderClass:
    if candidate is torch.utils.data.DataLoader:
        pytest.skip("torch has no seeding by batch")
    return lambda **arguments: candidate(**arguments, seeding="batch")


@pytest.mark.parametrize("workers", [2, 3, 4])
@cases(JOBS)
def test_any_number_of_workers_makes_the_batches_of_one_when(
    seeded_by_batch: LoaderClass, job: Job, workers: int
) -> None:
    alone = run(job.given(num_workers=1), seeded_by_batch)
    compare(alone, run(job.given(num_workers=workers), seeded_by_batch), job)


@cases(JOBS)
def test_persistent_workers_make_the_batches_of_workers_that_end_when(
    seeded_by_batch: LoaderClass, job: Job
) -> None:
    """Each epoch of a loader whose workers end draws a new base seed; one epoch is alike."""
    once = replace(job, epochs=1)
    ending = run(once.given(num_workers=2), seeded_by_batch)
    persistent = once.given(num_workers=2, persistent_workers=True)
    compare(ending, run(persistent, seeded_by_batch), job)


def test_a_later_epoch_does_not_depend_on_how_far_the_first_one_went(
    seeded_by_batch: LoaderClass,
) -> None:
    job = Job(
        lambda: dict(dataset=UnevenDraws(), batch_size=2, num_workers=2, persistent_workers=True),
        epochs=2,
    )
    complete = run(job, seeded_by_batch)
    broken_off = run(replace(job, consumer=breaking_after(3)), seeded_by_batch)
    last = (
        replace(complete, epochs=complete.epochs[1:]),
        replace(broken_off, epochs=broken_off.epochs[1:]),
    )
    compare(*last, job)


def test_the_epochs_of_one_loader_differ(seeded_by_batch: LoaderClass) -> None:
    job = Job(
        lambda: dict(dataset=Draws(8), batch_size=2, num_workers=2, persistent_workers=True),
        epochs=2,
    )
    first, second = run(job, seeded_by_batch).epochs
    assert first.notes != second.notes


def test_merged_streams_make_the_same_batches(seeded_by_batch: LoaderClass) -> None:
    job = JOBS["samples draw unevenly"].given(num_workers=4)
    compare(run(job, seeded_by_batch), run(job, seeded_by_batch, {"_max_workers": 2}), job)
