"""What user code sees in a worker, and what it shares with other processes."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from .batches import LISTED, large_images
from .collates import (
    CountingRows,
    as_list,
    mixed_up,
    seeding_by_worker,
    tagging_the_dataset,
)
from .conftest import Parity
from .consumers import and_then, every_attempt, every_batch
from .datasets import (
    CompressedPictures,
    Counted,
    Failing,
    Made,
    Meeting,
    OwnGenerators,
    Registered,
    Sharded,
    Tagged,
    UnevenDraws,
    WhoAmI,
    tensor_pairs,
)
from .harness import Job, cases
from .test_errors import key_error

FORK = multiprocessing.get_context("fork")


@cases(
    {
        "workers know who they are": Job(
            lambda: dict(dataset=WhoAmI(), batch_size=2, num_workers=3), epochs=2
        ),
        "persistent workers know who they are": Job(
            lambda: dict(dataset=WhoAmI(), batch_size=2, num_workers=2, persistent_workers=True),
            epochs=2,
        ),
        "there are no workers to be": Job(lambda: dict(dataset=WhoAmI(), batch_size=2), epochs=2),
        "the seed comes from a generator": Job(
            lambda: dict(
                dataset=WhoAmI(),
                batch_size=2,
                num_workers=2,
                generator=torch.Generator().manual_seed(9),
            ),
            epochs=2,
        ),
        "the set-up function changes the dataset of its worker": Job(
            lambda: dict(
                dataset=Tagged(),
                batch_size=2,
                num_workers=3,
                worker_init_fn=tagging_the_dataset,
            ),
            epochs=2,
        ),
        "the set-up function is an object": Job(
            lambda: dict(
                dataset=Tagged(),
                batch_size=2,
                num_workers=3,
                worker_init_fn=CountingRows([5, 6, 7]),
                persistent_workers=True,
            ),
            epochs=2,
        ),
    }
)
def test_user_code_sees_the_same_when(parity: Parity, job: Job) -> None:
    parity(job)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_counter_in_shared_memory_is_counted_once_a_sample(parity: Parity, workers: int) -> None:
    def arguments() -> dict[str, Any]:
        return dict(dataset=Counted(FORK.Value("i", 0)), batch_size=2, num_workers=workers)

    def what_was_counted(loader: Any) -> Any:
        return loader.dataset.value.value

    parity(Job(arguments, epochs=2, consumer=and_then(every_batch, what_was_counted)))


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("persistent", [False, True], ids=["ending", "persistent"])
def test_workers_meet_at_a_barrier(parity: Parity, workers: int, persistent: bool) -> None:
    def arguments() -> dict[str, Any]:
        dataset = Meeting(FORK.Barrier(workers), length=2 * workers)
        return dict(dataset=dataset, num_workers=workers, persistent_workers=persistent)

    parity(Job(arguments, epochs=2))


def test_a_managers_dict_list_and_lock_are_shared(parity: Parity) -> None:
    with FORK.Manager() as manager:

        def arguments() -> dict[str, Any]:
            dataset = Registered(manager.dict(), manager.list(), manager.RLock())
            return dict(dataset=dataset, batch_size=2, num_workers=2, shuffle=True)

        def what_was_seen(loader: Any) -> Any:
            return dict(sorted(loader.dataset.seen.items())), sorted(loader.dataset.order)

        parity(Job(arguments, epochs=2, consumer=and_then(every_batch, what_was_seen)))


# Starting a process by spawn costs seconds, so each of these jobs shows many things at once.
BY_OTHER_MEANS = {
    "augmented pictures, a generator, a random order": Job(
        lambda: dict(
            dataset=CompressedPictures(),
            batch_size=3,
            shuffle=True,
            generator=torch.Generator().manual_seed(8),
            worker_init_fn=seeding_by_worker,
        )
    ),
    "persistent workers, own generators, state in the dataset": Job(
        lambda: dict(dataset=OwnGenerators(torch_too=False), batch_size=2, persistent_workers=True),
        epochs=3,
    ),
    "views, subclasses and other values in lists": Job(
        lambda: dict(dataset=Made(many_values, 4), batch_size=2, collate_fn=as_list, drop_last=True)
    ),
    "failing samples": Job(
        lambda: dict(dataset=Failing(key_error, [1, 6]), batch_size=2), consumer=every_attempt
    ),
}
BY_FORK_SERVER = BY_OTHER_MEANS | {
    "uneven shards of an iterable": Job(
        lambda: dict(dataset=Sharded((3, 7)), batch_size=2), epochs=2
    ),
    "a collate function that draws": Job(
        lambda: dict(dataset=tensor_pairs(), batch_size=4, collate_fn=mixed_up), epochs=2
    ),
    "large images": Job(
        lambda: dict(dataset=Made(large_images, 14), batch_size=2, shuffle=True), epochs=2
    ),
    "worker info": Job(lambda: dict(dataset=WhoAmI(), batch_size=2), epochs=2),
    "uneven draws": Job(lambda: dict(dataset=UnevenDraws(), batch_size=2), epochs=2),
}


@cases(BY_OTHER_MEANS)
def test_spawned_workers_deliver_the_same(parity: Parity, job: Job) -> None:
    parity(job.given(num_workers=2, multiprocessing_context="spawn"))


@cases(BY_FORK_SERVER)
def test_workers_of_a_fork_server_deliver_the_same(parity: Parity, job: Job) -> None:
    context = multiprocessing.get_context("forkserver")
    parity(job.given(num_workers=2, multiprocessing_context=context))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods_share_managers_locks_and_values(parity: Parity, method: str) -> None:
    context = multiprocessing.get_context(method)
    with FORK.Manager() as manager:

        def arguments() -> dict[str, Any]:
            dataset = Shared(context, manager)
            return dict(dataset=dataset, num_workers=2, multiprocessing_context=context)

        def what_was_seen(loader: Any) -> Any:
            return loader.dataset.counted.value.value, dict(sorted(loader.dataset.seen.items()))

        parity(Job(arguments, consumer=and_then(every_batch, what_was_seen)))


class Shared(Dataset[Any]):
    """A barrier over both workers, a counter in shared memory, a manager's dict: all at once."""

    def __init__(self, context: Any, manager: Any) -> None:
        self.meeting = Meeting(context.Barrier(2), length=6)
        self.counted = Counted(context.Value("i", 0))
        self.seen = manager.dict()

    def __len__(self) -> int:
        return len(self.meeting)

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.seen[index] = index * 2
        return self.meeting[index], self.counted[index]


def many_values(index: int) -> dict[str, Any]:
    names = (
        *("views of one storage", "expanded and strided", "labelled tensors", "user classes"),
        *("requiring gradients", "structured arrays", "things seen twice", "sparse coo"),
    )
    return {name: LISTED[name](index) for name in names}
