"""Worker threads give torch's batches, as far as nothing is drawn from the global generators.

Those are one for all threads of a process; what is drawn from `forebay.rng()` is the same under
threads, under processes and in torch's own worker processes, and that is shown here as well.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, Dataset, IterableDataset, Subset, get_worker_info

import forebay

from .batches import large_images
from .collates import (
    as_dataclass,
    as_named_tuple,
    failing_in_worker_one,
    failing_on_seven,
    keeping_own_shard,
    padded,
    tagging_the_dataset,
    views_over_one_batch,
)
from .consumers import (
    asking_past_the_end,
    breaking_after,
    drawing_between,
    every_attempt,
    in_another_thread,
    keeping_all,
    keeping_past_the_end,
    nested_in_itself,
    writing_into_each,
    zipped_with_itself,
)
from .datasets import Countdown, Failing, Made, Squares, Tagged, WhoAmI, tensor_pairs
from .harness import Job, LoaderClass, cases, check_parity, compare, run
from .samplers import DrawingAsItGoes, UnevenBatches


@pytest.fixture
def threads(candidate: LoaderClass) -> LoaderClass:
    if candidate is torch.utils.data.DataLoader:
        pytest.skip("torch has no worker threads")
    return functools.partial(candidate, worker_backend="thread")


class Strides(IterableDataset[Any]):
    """Each worker yields its stride of `sizes[worker]` samples; nothing is drawn."""

    def __init__(self, sizes: tuple[int, ...] = (9, 4, 0)) -> None:
        self.sizes: Any = sizes

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        size = (*self.sizes, *[0] * info.num_workers)[info.id]
        for n in range(size):
            yield info.id + n * info.num_workers, torch.full((3,), float(n))


class OwnDraws(Dataset[Any]):
    """Draws from all three generators of the stream, a number of times that was drawn."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        own = forebay.rng()
        for _ in range(own.python.randint(0, 3)):
            own.numpy.random()
        noise = torch.randn(2, generator=own.torch)
        info = get_worker_info()
        assert info is not None
        return index, info.id, own.python.random(), float(own.numpy.normal()), noise


class OwnShuffle(IterableDataset[Any]):
    """An iterable with a shuffle buffer of its stream's."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        samples = list(range(info.id, 30, info.num_workers))
        forebay.rng().python.shuffle(samples)
        yield from samples


def mixed_by_own(samples: list[tuple[torch.Tensor, int]]) -> list[Any]:
    """Mixup with the stream's generators."""
    rows = torch.stack([row for row, _ in samples])
    order = torch.randperm(len(rows), generator=forebay.rng().torch)
    share = float(forebay.rng().numpy.beta(0.5, 0.5))
    return [rows * share + rows[order] * (1 - share), order]


def waking_generators(worker: int) -> None:
    """Uses the stream's generators before the first sample is made."""
    for _ in range(worker + 1):
        forebay.rng().python.random()


@cases(
    {
        "samples are shuffled": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=4, shuffle=True, num_workers=3),
            epochs=3,
            consumer=drawing_between,
        ),
        "batches are large": Job(
            lambda: dict(dataset=Made(large_images, 14), batch_size=3, shuffle=True, num_workers=2),
            epochs=2,
        ),
        "samples ask who makes them": Job(
            lambda: dict(dataset=WhoAmI(), batch_size=2, num_workers=3),
            # Global generators are not a thread's own: their seed is the training code's.
            consumer=lambda loader, _: ([batch[:5] for batch in loader]),  # type: ignore[arg-type,return-value]
        ),
        "a batch sampler draws": Job(
            lambda: dict(
                dataset=Squares(), batch_sampler=UnevenBatches(length=23, batches=7), num_workers=2
            ),
            epochs=2,
        ),
        "a sampler draws as it goes": Job(
            lambda: dict(
                dataset=Squares(), sampler=DrawingAsItGoes(23, 19), batch_size=3, num_workers=2
            ),
            consumer=drawing_between,
        ),
        "samples are fetched alone": Job(
            lambda: dict(dataset=tensor_pairs(7), batch_size=None, num_workers=2)
        ),
        "the rest is dropped": Job(
            lambda: dict(dataset=Squares(), batch_size=4, drop_last=True, num_workers=2)
        ),
        "the collate function makes views": Job(
            lambda: dict(
                dataset=tensor_pairs(), batch_size=4, collate_fn=views_over_one_batch, num_workers=2
            )
        ),
        "the collate function makes a class of its own": Job(
            lambda: dict(
                dataset=tensor_pairs(), batch_size=4, collate_fn=as_dataclass, num_workers=2
            )
        ),
        "the collate function calls torch's": Job(
            lambda: dict(
                dataset=tensor_pairs(), batch_size=4, collate_fn=as_named_tuple, num_workers=2
            )
        ),
        "rows are padded": Job(
            lambda: dict(
                dataset=[torch.arange(n) for n in range(1, 12)],
                batch_size=3,
                collate_fn=padded,
                num_workers=2,
            )
        ),
        "workers persist": Job(
            lambda: dict(
                dataset=tensor_pairs(),
                batch_size=4,
                shuffle=True,
                num_workers=2,
                persistent_workers=True,
            ),
            epochs=3,
        ),
        "workers persist and the loop is left early": Job(
            lambda: dict(
                dataset=tensor_pairs(),
                batch_size=2,
                shuffle=True,
                num_workers=2,
                persistent_workers=True,
            ),
            epochs=3,
            consumer=breaking_after(3),
        ),
        "the loop is left early": Job(
            lambda: dict(dataset=Made(large_images, 14), batch_size=2, num_workers=2),
            epochs=2,
            consumer=breaking_after(2),
        ),
        "the set-up function changes the worker's dataset": Job(
            lambda: dict(
                dataset=Tagged(), worker_init_fn=tagging_the_dataset, batch_size=2, num_workers=3
            ),
            epochs=2,
        ),
        "two iterators run in step": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=4, shuffle=True, num_workers=2),
            consumer=zipped_with_itself,
        ),
        "a pass is made within a pass": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=4, shuffle=True, num_workers=2),
            consumer=nested_in_itself,
        ),
        "the loop runs in another thread": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=4, num_workers=2),
            consumer=in_another_thread,
        ),
        "every batch is kept": Job(
            lambda: dict(dataset=Made(large_images, 14), batch_size=2, num_workers=2),
            consumer=keeping_all,
        ),
        "every batch is kept past the end": Job(
            lambda: dict(dataset=Made(large_images, 14), batch_size=2, num_workers=2),
            consumer=keeping_past_the_end,
        ),
        "batches are written to": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=4, num_workers=2),
            epochs=2,
            consumer=writing_into_each,
        ),
        "the loader is left to the garbage collector": Job(
            lambda: dict(dataset=tensor_pairs(), batch_size=4, num_workers=2),
            consumer=breaking_after(2),
            closes=False,
        ),
    }
)
def test_threads_give_torchs_batches_when(
    reference: LoaderClass, threads: LoaderClass, job: Job
) -> None:
    check_parity(job, reference, threads)


@cases(
    {
        "workers read strides of unequal length": Job(
            lambda: dict(dataset=Strides(), batch_size=2, num_workers=3),
            epochs=2,
            consumer=asking_past_the_end,
        ),
        "rests are dropped": Job(
            lambda: dict(dataset=Strides(), batch_size=2, drop_last=True, num_workers=3)
        ),
        "workers persist": Job(
            lambda: dict(dataset=Strides(), batch_size=2, num_workers=3, persistent_workers=True),
            epochs=3,
            consumer=breaking_after(2),
        ),
        "the set-up function gives each worker its shard": Job(
            lambda: dict(
                dataset=Strides(()), worker_init_fn=keeping_own_shard, batch_size=2, num_workers=3
            ),
            epochs=2,
        ),
        "the dataset is its own iterator": Job(
            lambda: dict(dataset=Countdown(), batch_size=3, num_workers=2), epochs=2
        ),
        "iterables are chained": Job(
            lambda: dict(
                dataset=ChainDataset([Strides((3, 2)), Strides((1, 4))]),
                batch_size=2,
                num_workers=2,
            )
        ),
    }
)
def test_threads_read_iterables_as_torchs_workers_when(
    reference: LoaderClass, threads: LoaderClass, job: Job
) -> None:
    check_parity(job, reference, threads)


def test_out_of_order_the_same_set_of_batches_comes(
    reference: LoaderClass, threads: LoaderClass
) -> None:
    job = Job(lambda: dict(dataset=tensor_pairs(), batch_size=2, num_workers=3, in_order=False))
    check_parity(job.unordered(), reference, threads)


@cases(
    {
        "samples are broken": Job(
            lambda: dict(dataset=Failing(_broken, [1, 4, 5, 11]), batch_size=2, num_workers=2)
        ),
        "a sample ends the iteration": Job(
            lambda: dict(dataset=Failing(StopIteration, [4]), batch_size=2, num_workers=2)
        ),
        "the collate function raises": Job(
            lambda: dict(
                dataset=Squares(), collate_fn=failing_on_seven, batch_size=2, num_workers=2
            )
        ),
        "the set-up of one worker fails": Job(
            lambda: dict(
                dataset=Subset(Squares(), range(2)),
                worker_init_fn=failing_in_worker_one,
                batch_size=1,
                num_workers=2,
            )
        ),
        "a parameter cannot be collated": Job(
            lambda: dict(dataset=Made(_parameter, 4), batch_size=2, num_workers=2)
        ),
    }
)
def test_threads_raise_torchs_errors_when(
    reference: LoaderClass, threads: LoaderClass, job: Job
) -> None:
    check_parity(replace(job, consumer=every_attempt), reference, threads)


OWN_DRAWS = {
    "samples draw unevenly": Job(
        lambda: dict(dataset=OwnDraws(), batch_size=4, shuffle=True, num_workers=3), epochs=2
    ),
    "workers persist": Job(
        lambda: dict(
            dataset=OwnDraws(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
        ),
        epochs=3,
        consumer=breaking_after(2),
    ),
    "the collate function draws": Job(
        lambda: dict(dataset=tensor_pairs(), batch_size=4, collate_fn=mixed_by_own, num_workers=2)
    ),
    "an iterable shuffles": Job(
        lambda: dict(dataset=OwnShuffle(), batch_size=4, num_workers=2), epochs=2
    ),
    "the set-up function draws": Job(
        lambda: dict(
            dataset=OwnDraws(), batch_size=4, num_workers=2, worker_init_fn=waking_generators
        )
    ),
}


@pytest.mark.parametrize("backend", ["thread", "process"])
@cases(OWN_DRAWS)
def test_own_generators_draw_alike_in_torchs_workers_and_in(
    reference: LoaderClass, threads: LoaderClass, candidate: LoaderClass, job: Job, backend: str
) -> None:
    check_parity(job, reference, threads if backend == "thread" else candidate)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_own_generators_of_streams_that_share_a_worker_stay_apart(
    reference: LoaderClass, candidate: LoaderClass, threads: LoaderClass, backend: str
) -> None:
    job = replace(OWN_DRAWS["samples draw unevenly"], knobs=({"_max_workers": 2},))
    check_parity(job, reference, threads if backend == "thread" else candidate)


@pytest.mark.parametrize("workers", [2, 3])
def test_seeded_by_batch_own_draws_do_not_depend_on_the_workers(
    threads: LoaderClass, candidate: LoaderClass, workers: int
) -> None:
    job = Job(
        lambda: dict(dataset=tensor_pairs(), batch_size=3, collate_fn=mixed_by_own, shuffle=True),
        epochs=2,
    ).given(seeding="batch")
    alone = run(job.given(num_workers=0), candidate)
    compare(alone, run(job.given(num_workers=workers), threads), job)
    compare(alone, run(job.given(num_workers=workers), candidate), job)


def test_the_training_codes_generators_are_left_alone(threads: LoaderClass) -> None:
    before = random.getstate()
    torch.manual_seed(3)
    expected = [torch.rand(()).item() for _ in range(2)]
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(1)
    loader = threads(tensor_pairs(), batch_size=4, num_workers=2, generator=generator)
    drawn = [torch.rand(()).item() for _, batch in zip(range(2), loader)]
    loader.close()  # type: ignore[attr-defined]
    assert drawn == expected
    assert random.getstate() == before


def _broken(index: int) -> Exception:
    return ValueError(f"sample {index} is broken")


def _parameter(index: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((2,), float(index)))
