"""Iterable datasets: who yields what, in which turn, and how each worker comes to its end."""

from __future__ import annotations

import pytest
from torch.utils.data import ChainDataset

from .collates import Appending, as_list, keeping_own_shard
from .conftest import Parity
from .consumers import (
    asking_past_the_end,
    breaking_after,
    drawing_between,
    every_attempt,
    with_length,
    zipped_with_itself,
)
from .datasets import Countdown, FailingIterable, Sharded, SizedSharded, Windows
from .harness import Job, cases


@pytest.mark.parametrize("workers", range(5))
@cases(
    {
        "each worker reads its stride": Job(lambda: dict(dataset=Sharded(), batch_size=4)),
        "workers have shards of unequal length": Job(
            lambda: dict(dataset=Sharded((2, 11, 0, 5)), batch_size=2),
            epochs=2,
            consumer=drawing_between,
        ),
        "the dataset raises the end itself": Job(lambda: dict(dataset=Countdown(), batch_size=3)),
    }
)
def test_with_any_number_of_workers(parity: Parity, job: Job, workers: int) -> None:
    parity(job.given(num_workers=workers))


@cases(
    {
        "rests of shards are dropped": Job(
            lambda: dict(
                dataset=Sharded((2, 11, 0, 5)), batch_size=3, drop_last=True, num_workers=4
            )
        ),
        "no worker has anything": Job(
            lambda: dict(dataset=Sharded(()), batch_size=3, num_workers=3),
            epochs=2,
            consumer=asking_past_the_end,
        ),
        "only the last worker has something": Job(
            lambda: dict(dataset=Sharded((0, 0, 9)), batch_size=2, num_workers=3),
            consumer=asking_past_the_end,
        ),
        "samples are not put into batches": Job(
            lambda: dict(dataset=Sharded((2, 5, 1)), batch_size=None, num_workers=3), epochs=2
        ),
        "the dataset yields ready-made batches": Job(
            lambda: dict(dataset=Windows(), batch_size=None, num_workers=2), epochs=2
        ),
        "more is asked ahead than there is": Job(
            lambda: dict(dataset=Sharded((2, 5)), num_workers=2, prefetch_factor=20)
        ),
        "little is asked ahead": Job(
            lambda: dict(dataset=Sharded((7, 2, 5)), num_workers=3, prefetch_factor=1)
        ),
        "persistent workers start anew in each epoch": Job(
            lambda: dict(
                dataset=Sharded((2, 11, 0, 5)),
                batch_size=2,
                num_workers=4,
                persistent_workers=True,
            ),
            epochs=3,
        ),
        "persistent workers end at once in later epochs": Job(
            lambda: dict(dataset=Countdown(), batch_size=2, num_workers=2, persistent_workers=True),
            epochs=3,
        ),
        "persistent workers are left in the middle": Job(
            lambda: dict(
                dataset=SizedSharded((6, 9)), batch_size=1, num_workers=2, persistent_workers=True
            ),
            epochs=3,
            consumer=breaking_after(14),
        ),
        "the loop is left in the middle": Job(
            lambda: dict(dataset=Sharded((6, 90)), batch_size=1, num_workers=2),
            epochs=2,
            consumer=breaking_after(9),
        ),
        "the dataset states its length": Job(
            lambda: dict(dataset=SizedSharded((4, 4)), batch_size=2, num_workers=2),
            epochs=2,
            consumer=with_length,
        ),
        "the dataset states a length that is too small": Job(
            lambda: dict(dataset=SizedSharded((4, 4), stated=5), batch_size=2, num_workers=2),
            consumer=with_length,
            warns=True,
        ),
        "the set-up function gives each worker its shard": Job(
            lambda: dict(
                dataset=Sharded(()), worker_init_fn=keeping_own_shard, num_workers=3, batch_size=2
            ),
            epochs=2,
        ),
        "iterables are chained": Job(
            lambda: dict(
                dataset=ChainDataset([Sharded((3, 2)), Sharded((1, 4))]),
                batch_size=2,
                num_workers=2,
            )
        ),
        "the collate function is the user's": Job(
            lambda: dict(dataset=Sharded((3, 5)), batch_size=2, collate_fn=as_list, num_workers=2)
        ),
        "the collate function keeps state": Job(
            lambda: dict(
                dataset=Sharded((3, 5)),
                batch_size=2,
                collate_fn=Appending(),
                num_workers=2,
                persistent_workers=True,
            ),
            epochs=2,
        ),
        "two iterators run in step": Job(
            lambda: dict(dataset=Sharded((3, 5)), batch_size=2, num_workers=2),
            consumer=zipped_with_itself,
        ),
        "the iterable fails in the middle of a shard": Job(
            lambda: dict(dataset=FailingIterable(after=5), batch_size=2, num_workers=2),
            consumer=every_attempt,
        ),
        "the iterable fails in the middle and there are no workers": Job(
            lambda: dict(dataset=FailingIterable(after=5), batch_size=2),
            consumer=every_attempt,
        ),
    }
)
def test_an_iterable_is_read_alike_when(parity: Parity, job: Job) -> None:
    parity(job)


@cases(
    {
        "shards are of equal length": Job(lambda: dict(dataset=Sharded(), batch_size=2)),
        "shards are of unequal length": Job(
            lambda: dict(dataset=Sharded((2, 11, 0, 5)), batch_size=2), epochs=2
        ),
        "workers persist": Job(
            lambda: dict(dataset=Sharded((2, 11, 3)), batch_size=2, persistent_workers=True),
            epochs=2,
        ),
    }
)
def test_out_of_order_the_same_set_of_batches_comes_when(parity: Parity, job: Job) -> None:
    parity(job.given(num_workers=3, in_order=False).unordered())
