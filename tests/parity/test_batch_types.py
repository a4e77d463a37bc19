"""What arrives is what was made: every type of batch, bit for bit, with its types and its views.

Each kind of value goes through the default collate where it can, as a list of samples through a
collate function of the user, and alone with `batch_size=None`.
"""

from __future__ import annotations

import pytest
import torch

from .batches import COLLATED, LISTED, Make, large_images, numbers_of_every_dtype, quantized
from .collates import (
    as_array,
    as_dataclass,
    as_list,
    as_named_tuple,
    as_tuple,
    nothing,
    padded,
    views_over_one_batch,
)
from .conftest import Parity
from .consumers import every_attempt, keeping_all, keeping_past_the_end, writing_into_each
from .datasets import CompressedPictures, Fetched, Made, tensor_pairs
from .harness import Job, LoaderClass, cases, compare, run
from .odd_samples import conjugated, growing_rows, negated, pictures


@pytest.mark.parametrize("make", COLLATED.values(), ids=COLLATED)
def test_the_default_collate_delivers(parity: Parity, make: Make) -> None:
    parity(Job(lambda: dict(dataset=Made(make, 7), batch_size=3, num_workers=2)))


@pytest.mark.parametrize("make", LISTED.values(), ids=LISTED)
def test_a_list_of_samples_delivers(parity: Parity, make: Make) -> None:
    parity(
        Job(lambda: dict(dataset=Made(make, 5), batch_size=2, collate_fn=as_list, num_workers=2))
    )


ALONE = {
    name: {**COLLATED, **LISTED}[name]
    for name in (
        *("numbers of every dtype", "nested dicts", "named tuples", "numpy arrays"),
        *("structured arrays", "object arrays"),
        *("user classes", "sparse coo", "views of one storage", "python values"),
        *("numpy scalars", "ordered and default dicts", "large images"),
    )
}


@pytest.mark.parametrize("make", ALONE.values(), ids=ALONE)
def test_a_sample_alone_delivers(parity: Parity, make: Make) -> None:
    parity(
        Job(
            lambda: dict(dataset=Made(make, 4), batch_size=None, num_workers=2),
            consumer=every_attempt,
        )
    )


@pytest.mark.parametrize("make", [quantized, conjugated, negated], ids=lambda make: make.__name__)
def test_what_torch_loses_on_its_way_from_a_worker_arrives_as_it_was_made(
    candidate: LoaderClass, make: Make
) -> None:
    """torch sends these tensors without their quantizer, or without the sign of a part."""
    if candidate is torch.utils.data.DataLoader:
        pytest.skip("torch's own loader delivers something else than was made")
    ignoring = ("conj", "neg", "stride")  # whether a view is resolved on the way is no matter
    job = Job(
        lambda: dict(dataset=Made(make, 5), batch_size=2, collate_fn=as_list), ignoring=ignoring
    )
    made_here = run(job, torch.utils.data.DataLoader)
    compare(made_here, run(job.given(num_workers=2), candidate), job)


@cases(
    {
        "rows of unequal length are padded": Job(
            lambda: dict(dataset=Made(growing_rows, 9), batch_size=4, collate_fn=padded)
        ),
        "a dataclass is made": Job(
            lambda: dict(dataset=Made(large_images, 5), batch_size=2, collate_fn=as_dataclass)
        ),
        "a named tuple is made": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=5, collate_fn=as_named_tuple)
        ),
        "a tuple is made": Job(
            lambda: dict(dataset=tensor_pairs(7), batch_size=3, collate_fn=as_tuple)
        ),
        "an array is made": Job(lambda: dict(dataset=Fetched(), batch_size=4, collate_fn=as_array)),
        "views of the whole batch are made": Job(
            lambda: dict(
                dataset=Made(large_images, 6), batch_size=3, collate_fn=views_over_one_batch
            )
        ),
        "nothing is made": Job(
            lambda: dict(dataset=tensor_pairs(7), batch_size=3, collate_fn=nothing)
        ),
        "the dataset fetches whole lists": Job(
            lambda: dict(dataset=Fetched(), batch_size=4, shuffle=True, persistent_workers=True),
            epochs=2,
        ),
        "every batch is kept": Job(
            lambda: dict(dataset=Made(large_images, 14), batch_size=2), consumer=keeping_all
        ),
        "batches are read when their loader is gone": Job(
            lambda: dict(dataset=Made(large_images, 14), batch_size=2),
            consumer=keeping_past_the_end,
        ),
        "small batches are read when their loader is gone": Job(
            lambda: dict(dataset=Made(numbers_of_every_dtype, 14), batch_size=2),
            consumer=keeping_past_the_end,
        ),
        "the training code writes into large batches": Job(
            lambda: dict(dataset=Made(large_images, 14), batch_size=2, shuffle=True),
            epochs=2,
            consumer=writing_into_each,
        ),
        "the training code writes into small batches": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=2, shuffle=True),
            epochs=2,
            consumer=writing_into_each,
        ),
    }
)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_when(parity: Parity, job: Job, workers: int) -> None:
    given = job.arguments()
    persistent = given.get("persistent_workers", False) and workers > 0
    parity(job.given(num_workers=workers, persistent_workers=persistent))


def test_pictures_of_pillow_arrive(parity: Parity) -> None:
    pytest.importorskip("PIL")
    parity(
        Job(lambda: dict(dataset=Made(pictures), batch_size=2, collate_fn=as_list, num_workers=2))
    )


def test_pinning_without_an_accelerator_warns_and_delivers_alike(parity: Parity) -> None:
    arguments = {"batch_size": 3, "pin_memory": True, "num_workers": 2}
    parity(Job(lambda: dict(dataset=CompressedPictures(7), **arguments), warns=True))
