"""What a loader may do under memory pressure must not change a batch.

`_max_tokens = k` lets at most k fetches run at once; `_max_workers = k` merges the streams of the
asked workers into k processes. Both are private attributes of the loader under test, set before
its first iteration; the reference always runs as asked.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .batches import large_images
from .collates import drawing_at_start, mixed_up
from .conftest import Parity
from .consumers import breaking_after, drawing_between, every_attempt, keeping_all
from .datasets import (
    CompressedPictures,
    Draws,
    Failing,
    Made,
    OwnGenerators,
    Sharded,
    UnevenDraws,
    tensor_pairs,
)
from .harness import Job, cases
from .samplers import DrawingAsItGoes

STREAMS = 4

FROM_GLOBAL_GENERATORS = {
    "samples draw unevenly from the global generators": Job(
        lambda: dict(dataset=UnevenDraws(29), batch_size=2, shuffle=True),
        epochs=2,
        consumer=drawing_between,
    ),
    "pictures are augmented by persistent workers": Job(
        lambda: dict(
            dataset=CompressedPictures(), batch_size=2, shuffle=True, persistent_workers=True
        ),
        epochs=3,
    ),
    "the collate function draws": Job(
        lambda: dict(dataset=tensor_pairs(), batch_size=2, collate_fn=mixed_up), epochs=2
    ),
    "an iterable is split over the workers": Job(
        lambda: dict(dataset=Sharded((3, 7, 0, 5)), batch_size=2), epochs=2
    ),
    "the worker set-up function draws": Job(
        lambda: dict(dataset=UnevenDraws(17), batch_size=2, worker_init_fn=drawing_at_start),
        epochs=2,
    ),
    "the sampler draws during the epoch": Job(
        lambda: dict(dataset=Draws(), batch_size=2, sampler=DrawingAsItGoes(24, 22)),
        consumer=drawing_between,
    ),
    "the loop is left in the first epoch": Job(
        lambda: dict(
            dataset=Draws(),
            batch_size=2,
            shuffle=True,
            generator=torch.Generator().manual_seed(2),
        ),
        epochs=2,
        consumer=breaking_after(4),
    ),
    "every batch is kept": Job(
        lambda: dict(dataset=Made(large_images, 14), batch_size=2, shuffle=True),
        consumer=keeping_all,
    ),
    "some samples fail": Job(
        lambda: dict(dataset=Failing(ValueError, bad=[2, 3, 9]), batch_size=1),
        consumer=every_attempt,
    ),
}

WITH_STATE_IN_THE_WORKER = {
    "the dataset keeps generators, a counter and a cache in itself": Job(
        lambda: dict(dataset=OwnGenerators(), batch_size=2, shuffle=True), epochs=2
    ),
    "persistent workers keep the dataset's own generators": Job(
        lambda: dict(dataset=OwnGenerators(), batch_size=2, persistent_workers=True), epochs=3
    ),
    "an iterable counts its passes": Job(
        lambda: dict(dataset=Sharded((3, 7, 0, 5)), batch_size=2, persistent_workers=True),
        epochs=3,
    ),
}


@cases(FROM_GLOBAL_GENERATORS | WITH_STATE_IN_THE_WORKER)
def test_few_fetches_at_once_make_the_same_batches_when(parity: Parity, job: Job) -> None:
    knobs = tuple({"_max_tokens": most} for most in (1, 2, 3))
    parity(replace(job.given(num_workers=STREAMS), knobs=knobs))


@cases(FROM_GLOBAL_GENERATORS)
def test_merged_streams_make_the_same_batches_when(parity: Parity, job: Job) -> None:
    knobs = tuple({"_max_workers": most} for most in (1, 2, 3))
    parity(replace(job.given(num_workers=STREAMS), knobs=knobs))


def test_merged_streams_that_take_turns_make_the_same_batches(parity: Parity) -> None:
    job = FROM_GLOBAL_GENERATORS["samples draw unevenly from the global generators"]
    knobs = ({"_max_workers": 2, "_max_tokens": 1}, {"_max_workers": 3, "_max_tokens": 2})
    parity(replace(job.given(num_workers=STREAMS), knobs=knobs))
