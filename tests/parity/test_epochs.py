"""From one epoch to the next: early ends, workers that persist, datasets that change meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Parity
from .consumers import (
    Consumer,
    asking_past_the_end,
    before_each_epoch,
    breaking_after,
    drawing_between,
    every_batch,
    in_another_thread,
    keeping_all,
    nested_in_itself,
    pickled_first,
    with_length,
    zipped_with_itself,
)
from .datasets import Draws, Fetched, OwnGenerators, Tagged, UnevenDraws, tensor_pairs
from .harness import Job, cases


def change_the_dataset(loader: Any, epoch: int) -> None:
    loader.dataset.tag = 10 * epoch


def tell_the_dataset(loader: Any, epoch: int) -> None:
    loader.dataset.set_epoch(epoch)


def grow_the_dataset(loader: Any, epoch: int) -> None:
    loader.dataset.length = 12 + epoch


CONSUMERS: dict[str, Consumer] = {
    "reads all": every_batch,
    "keeps all": keeping_all,
    "draws between batches": drawing_between,
    "leaves the first epoch after one batch": breaking_after(1),
    "leaves the first two epochs in the middle": breaking_after(4, first_epochs=2),
    "reads on past the end": asking_past_the_end,
    "asks for lengths": with_length,
    "changes an attribute of the dataset": before_each_epoch(change_the_dataset, every_batch),
    "tells the dataset the epoch": before_each_epoch(tell_the_dataset, every_batch),
    "lets the dataset grow": before_each_epoch(grow_the_dataset, every_batch),
    "runs two iterators in step": zipped_with_itself,
    "reads in another thread": in_another_thread,
}


@pytest.mark.parametrize("persistent", [False, True], ids=["workers end", "workers persist"])
@pytest.mark.parametrize("consumer", CONSUMERS.values(), ids=CONSUMERS)
def test_three_epochs_are_the_same_when_the_training_code(
    parity: Parity, consumer: Consumer, persistent: bool
) -> None:
    options = {"batch_size": 2, "num_workers": 2, "persistent_workers": persistent}
    parity(Job(lambda: dict(dataset=Tagged(), shuffle=True, **options), 3, consumer))


@cases(
    {
        "a pass is made within a pass": Job(
            lambda: dict(dataset=UnevenDraws(13), batch_size=2, shuffle=True, num_workers=2),
            epochs=2,
            consumer=nested_in_itself,
        ),
        "a pass is made within a pass and there are no workers": Job(
            lambda: dict(dataset=UnevenDraws(13), batch_size=2, shuffle=True),
            epochs=2,
            consumer=nested_in_itself,
        ),
        "two random iterators run in step": Job(
            lambda: dict(dataset=UnevenDraws(13), batch_size=2, shuffle=True, num_workers=2),
            epochs=2,
            consumer=zipped_with_itself,
        ),
        "the loop is left with random samples": Job(
            lambda: dict(dataset=UnevenDraws(), batch_size=2, shuffle=True, num_workers=3),
            epochs=3,
            consumer=breaking_after(3, first_epochs=2),
        ),
        "the loop is left at the last batch": Job(
            lambda: dict(
                dataset=Draws(12),
                batch_size=2,
                shuffle=True,
                num_workers=2,
                persistent_workers=True,
            ),
            epochs=3,
            consumer=breaking_after(6, first_epochs=2),
        ),
        "a loader goes through pickle first": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=5, shuffle=True, num_workers=2),
            epochs=2,
            consumer=pickled_first,
        ),
        "the dataset's own generators start anew in each epoch": Job(
            lambda: dict(dataset=OwnGenerators(8), batch_size=2, num_workers=2), epochs=3
        ),
        "the dataset's own generators run on without workers": Job(
            lambda: dict(dataset=OwnGenerators(8), batch_size=2), epochs=3
        ),
        "the dataset's lists are counted by persistent workers": Job(
            lambda: dict(dataset=Fetched(), batch_size=2, num_workers=3, persistent_workers=True),
            epochs=3,
        ),
        "the loader is left to the garbage collector": Job(
            lambda: dict(dataset=Draws(12), batch_size=2, shuffle=True, num_workers=2),
            epochs=2,
            consumer=breaking_after(2, first_epochs=2),
            closes=False,
        ),
        "persistent workers are left to the garbage collector": Job(
            lambda: dict(
                dataset=tensor_pairs(12), batch_size=2, num_workers=2, persistent_workers=True
            ),
            epochs=2,
            consumer=breaking_after(2, first_epochs=2),
            closes=False,
        ),
    }
)
def test_epochs_are_the_same_when(parity: Parity, job: Job) -> None:
    parity(job)
