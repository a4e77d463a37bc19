"""The order of samples: which index comes when, for every kind of sampler.

The random state of the main process is compared after each epoch by every job; here the sampler
is what draws from it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .batches import counting, large_images
from .collates import as_list
from .conftest import Parity
from .consumers import (
    asking_past_the_end,
    before_each_epoch,
    breaking_after,
    drawing_between,
    every_attempt,
    with_length,
)
from .datasets import ByKey, Draws, Made, Squares, tensor_pairs
from .harness import Job, cases
from .samplers import (
    DrawingAsItGoes,
    DrawingFromItsOwn,
    Endless,
    Failing,
    OfKeys,
    SetByEpoch,
    UnevenBatches,
)


def keys_of_any_type() -> OfKeys:
    plain = ["a", ("b", 2), frozenset({3}), 4.5, None, {"six": 6}, slice(8, 9)]
    return OfKeys([*plain, torch.tensor(7), "last"])


def tell_the_sampler(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch(epoch)


@pytest.mark.parametrize("workers", range(5))
@cases(
    {
        "a dataset is read in order": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=4), epochs=2
        ),
        "a dataset is shuffled anew in each epoch": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=4, shuffle=True), epochs=3
        ),
        "a sampler draws during the epoch while the training code draws too": Job(
            lambda: dict(dataset=Squares(), batch_size=2, sampler=DrawingAsItGoes(23, 26)),
            epochs=2,
            consumer=drawing_between,
        ),
    }
)
def test_with_any_number_of_workers(parity: Parity, job: Job, workers: int) -> None:
    parity(job.given(num_workers=workers))


@pytest.mark.parametrize("prefetch", [1, 3, 7])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_drawing_sampler_runs_ahead_of_the_consumer_by_the_same_number_of_batches(
    parity: Parity, workers: int, prefetch: int
) -> None:
    def arguments() -> dict[str, Any]:
        sampler = DrawingAsItGoes(23, 24)
        ahead = {"num_workers": workers, "prefetch_factor": prefetch}
        return dict(dataset=Draws(), batch_size=2, sampler=sampler, **ahead)

    parity(Job(arguments, epochs=2, consumer=drawing_between))


@cases(
    {
        "the last batch is dropped when it is not full": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=4, drop_last=True, num_workers=3)
        ),
        "samples are weighted": Job(
            lambda: dict(
                dataset=tensor_pairs(),
                batch_size=3,
                sampler=WeightedRandomSampler(list(range(1, 23)), 20),
                num_workers=2,
            ),
            epochs=2,
        ),
        "samples are weighted by a generator of the sampler": Job(
            lambda: dict(
                dataset=tensor_pairs(),
                batch_size=3,
                sampler=WeightedRandomSampler(
                    [1.0] * 22, 13, replacement=False, generator=torch.Generator().manual_seed(4)
                ),
                num_workers=2,
            ),
            epochs=2,
        ),
        "a subset is shuffled": Job(
            lambda: dict(
                dataset=tensor_pairs(), sampler=SubsetRandomSampler([3, 1, 9, 20]), num_workers=2
            ),
            epochs=2,
        ),
        "samples are drawn with replacement": Job(
            lambda: dict(
                dataset=Squares(),
                batch_size=5,
                sampler=RandomSampler(Squares(), replacement=True, num_samples=31),
                num_workers=2,
            ),
            epochs=2,
        ),
        "more samples are drawn than there are": Job(
            lambda: dict(
                dataset=Squares(5),
                batch_size=3,
                sampler=RandomSampler(Squares(5), num_samples=13),
                num_workers=3,
            )
        ),
        "rank 0 of two reads its part and is told the epoch": Job(
            lambda: dict(
                dataset=Squares(),
                batch_size=3,
                sampler=DistributedSampler(Squares(), num_replicas=2, rank=0, seed=3),
                num_workers=2,
            ),
            epochs=3,
            consumer=before_each_epoch(tell_the_sampler, drawing_between),
        ),
        "rank 1 of two reads its part with persistent workers": Job(
            lambda: dict(
                dataset=Squares(),
                batch_size=3,
                sampler=DistributedSampler(Squares(), num_replicas=2, rank=1, drop_last=True),
                num_workers=2,
                persistent_workers=True,
            ),
            epochs=3,
            consumer=before_each_epoch(tell_the_sampler, with_length),
        ),
        "a sampler of the user is told the epoch": Job(
            lambda: dict(dataset=Squares(), batch_size=4, sampler=SetByEpoch(23), num_workers=2),
            epochs=3,
            consumer=before_each_epoch(tell_the_sampler, with_length),
        ),
        "a sampler keeps its own generator from epoch to epoch": Job(
            lambda: dict(
                dataset=Squares(), batch_size=4, sampler=DrawingFromItsOwn(23, 21), num_workers=3
            ),
            epochs=3,
        ),
        "a batch sampler wraps a random sampler": Job(
            lambda: dict(
                dataset=tensor_pairs(),
                batch_sampler=BatchSampler(RandomSampler(range(22)), 5, drop_last=True),
                num_workers=2,
            ),
            epochs=2,
        ),
        "a batch sampler makes batches of many sizes": Job(
            lambda: dict(dataset=tensor_pairs(), batch_sampler=UnevenBatches(22, 7), num_workers=2),
            epochs=2,
            consumer=drawing_between,
        ),
        "a sampler of batches is given as the sampler": Job(
            lambda: dict(
                dataset=tensor_pairs(),
                batch_size=None,
                sampler=BatchSampler(SequentialSampler(range(22)), 6, drop_last=False),
                num_workers=2,
            )
        ),
        "there are no batches": Job(
            lambda: dict(dataset=tensor_pairs(9), batch_size=None, shuffle=True, num_workers=2),
            epochs=2,
        ),
        "a sampler has no end and the loop is left": Job(
            lambda: dict(dataset=Draws(7), batch_size=2, sampler=Endless(7), num_workers=2),
            epochs=2,
            consumer=breaking_after(9, first_epochs=2),
        ),
        "a sampler yields keys of any type": Job(
            lambda: dict(
                dataset=ByKey(),
                batch_size=2,
                sampler=keys_of_any_type(),
                collate_fn=as_list,
                num_workers=2,
            )
        ),
        "a batch sampler yields something else than a list": Job(
            lambda: dict(
                dataset=tensor_pairs(),
                batch_sampler=[(0, 1), range(2, 5), torch.tensor([6, 5])],
                num_workers=2,
            )
        ),
        "a sampler fails in the middle": Job(
            lambda: dict(dataset=Squares(), batch_size=2, sampler=Failing(13), num_workers=2),
            consumer=every_attempt,
        ),
        "a sampler fails while the loader starts": Job(
            lambda: dict(dataset=Squares(), batch_size=2, sampler=Failing(1), num_workers=2),
            consumer=every_attempt,
        ),
        "there are fewer batches than workers": Job(
            lambda: dict(dataset=Squares(3), batch_size=2, num_workers=4),
            epochs=2,
            consumer=asking_past_the_end,
        ),
        "there is nothing to read": Job(
            lambda: dict(dataset=Squares(0), batch_size=2, num_workers=2),
            epochs=2,
            consumer=asking_past_the_end,
        ),
        "dropping the last batch leaves nothing": Job(
            lambda: dict(dataset=Squares(3), batch_size=4, drop_last=True, num_workers=2),
            consumer=asking_past_the_end,
        ),
        "many more batches are asked ahead than there are": Job(
            lambda: dict(dataset=Draws(9), batch_size=2, num_workers=2, prefetch_factor=50),
            epochs=2,
        ),
        "datasets are joined, stacked and cut": Job(
            lambda: dict(
                dataset=ConcatDataset([Subset(Draws(), [4, 2, 0, 9]), Draws(5)]),
                batch_size=2,
                shuffle=True,
                num_workers=2,
            )
        ),
        "a stack of datasets is fetched by lists": Job(
            lambda: dict(
                dataset=StackDataset(image=tensor_pairs(), label=Squares(22)),
                batch_size=4,
                shuffle=True,
                num_workers=2,
            )
        ),
        "a list is the dataset": Job(
            lambda: dict(
                dataset=[counting(n) for n in range(7)], batch_size=2, shuffle=True, num_workers=2
            )
        ),
    }
)
def test_samples_come_in_the_same_order_when(parity: Parity, job: Job) -> None:
    parity(job)


@cases(
    {
        "the dataset is read in order": Job(lambda: dict(dataset=Squares(), batch_size=4)),
        "the dataset is shuffled": Job(
            lambda: dict(dataset=Squares(), batch_size=4, shuffle=True), epochs=2
        ),
        "the dataset is shuffled and workers persist": Job(
            lambda: dict(dataset=Squares(), batch_size=4, shuffle=True, persistent_workers=True),
            epochs=3,
        ),
        "images are large": Job(
            lambda: dict(
                dataset=Made(large_images, 12), batch_size=2, shuffle=True, persistent_workers=True
            ),
            epochs=2,
        ),
    }
)
def test_out_of_order_the_same_set_of_batches_comes_when(parity: Parity, job: Job) -> None:
    parity(job.given(num_workers=3, in_order=False).unordered())
