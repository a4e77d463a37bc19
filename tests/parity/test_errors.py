"""Errors of the user's code: the same type, text and moment, and what the iterator does then."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

from .collates import as_list, failing_in_worker_one, failing_on_seven
from .conftest import Parity
from .consumers import Loader, Note, every_attempt, in_another_thread
from .datasets import Blocked, Draws, Failing, FailingIterable, Made, Sharded, Squares
from .harness import Job, cases


class TwoPartError(Exception):
    """Cannot be made from one text, so torch raises RuntimeError in its place."""

    def __init__(self, part: int, other: str) -> None:
        super().__init__(part, other)


class MessageError(Exception):
    """Has a `message`, which torch fills by keyword."""

    message = "a message"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class DerivedError(ValueError):
    """A class of the user's below a builtin one."""


def value_error(index: int) -> Exception:
    return ValueError(f"sample {index} is broken")


def key_error(index: int) -> Exception:
    return KeyError(f"sample {index}")


def index_error(index: int) -> Exception:
    return IndexError(index)


def end_of_iteration(index: int) -> Exception:
    return StopIteration(index)


def two_part(index: int) -> Exception:
    return TwoPartError(index, "other")


def with_message(index: int) -> Exception:
    return MessageError(f"about {index}")


def derived(index: int) -> Exception:
    return DerivedError("né \N{SNOWMAN}", index)


def chained(index: int) -> Exception:
    error = DerivedError("on the outside")
    error.__cause__ = ZeroDivisionError(f"inside, at {index}")
    return error


def missing_file(index: int) -> Exception:
    return FileNotFoundError(2, "No such file or directory", f"{index}.png")


def undecodable(index: int) -> Exception:
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def not_implemented(index: int) -> Exception:
    return NotImplementedError()


ERRORS = (
    *(value_error, key_error, index_error, end_of_iteration, two_part, with_message),
    *(derived, chained, missing_file, undecodable, not_implemented),
)


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: make.__name__.replace("_", " "))
def test_an_error_of_a_sample_arrives_and_iteration_goes_on(parity: Parity, make: Any) -> None:
    parity(
        Job(
            lambda: dict(dataset=Failing(make, [1, 4, 5, 11]), batch_size=2, num_workers=2),
            consumer=every_attempt,
        )
    )


@cases(
    {
        "every sample is broken": Job(
            lambda: dict(dataset=Failing(value_error, range(12)), batch_size=2, num_workers=3)
        ),
        "there are no workers": Job(
            lambda: dict(dataset=Failing(value_error, [1, 4]), batch_size=2)
        ),
        "workers persist and the next epoch is asked for": Job(
            lambda: dict(
                dataset=Failing(key_error, [3, 10]),
                batch_size=2,
                num_workers=2,
                persistent_workers=True,
                shuffle=True,
            ),
            epochs=3,
        ),
        "samples are fetched alone": Job(
            lambda: dict(dataset=Failing(value_error, [0, 7]), batch_size=None, num_workers=2)
        ),
        "little is asked ahead": Job(
            lambda: dict(
                dataset=Failing(value_error, [0, 1, 2, 7]),
                batch_size=1,
                num_workers=3,
                prefetch_factor=1,
            )
        ),
        "the collate function fails": Job(
            lambda: dict(
                dataset=Made(int, 12), batch_size=2, collate_fn=failing_on_seven, num_workers=2
            )
        ),
        "the collate function fails and there are no workers": Job(
            lambda: dict(dataset=Made(int, 12), batch_size=2, collate_fn=failing_on_seven)
        ),
        "the dataset has no items": Job(
            lambda: dict(dataset=WithoutItems(), batch_size=2, num_workers=2)
        ),
        "an index is out of range": Job(
            lambda: dict(dataset=[1, 2, 3], batch_sampler=[[0, 1], [2, 3], [2]], num_workers=2)
        ),
        "whole lists are fetched": Job(
            lambda: dict(dataset=FailingLists(8), batch_size=2, num_workers=2)
        ),
        "the iterable fails in the middle of a shard": Job(
            lambda: dict(
                dataset=FailingIterable(after=5), batch_size=2, num_workers=2, drop_last=True
            )
        ),
        "the iterable fails in each epoch of persistent workers": Job(
            lambda: dict(
                dataset=FailingIterable(after=3),
                batch_size=2,
                num_workers=2,
                persistent_workers=True,
            ),
            epochs=2,
        ),
        "a dataset has no length": Job(
            lambda: dict(dataset=WithoutLength(), batch_size=2, num_workers=2)
        ),
    }
)
def test_what_is_raised_is_the_same_when(parity: Parity, job: Job) -> None:
    parity(Job(job.arguments, epochs=job.epochs, consumer=every_attempt))


@cases(
    {
        "the set-up of one worker fails": Job(
            lambda: dict(dataset=Squares(), num_workers=2, worker_init_fn=failing_in_worker_one)
        ),
        "the set-up of one worker fails and the dataset is iterable": Job(
            lambda: dict(dataset=Sharded(), num_workers=2, worker_init_fn=failing_in_worker_one)
        ),
        "the iterable cannot be started": Job(
            lambda: dict(dataset=FailingIterable(after=None), num_workers=2)
        ),
        "the iterable cannot be started and there are no workers": Job(
            lambda: dict(dataset=FailingIterable(after=None))
        ),
    }
)
def test_the_first_error_of_a_start_is_the_same_when(parity: Parity, job: Job) -> None:
    """What torch raises after it (a worker without a fetcher goes on) is of no use to anyone."""
    parity(Job(job.arguments, consumer=until_the_first_error))


def test_errors_arrive_in_another_thread_too(parity: Parity) -> None:
    parity(
        Job(
            lambda: dict(dataset=Failing(value_error, [1, 4]), batch_size=2, num_workers=2),
            consumer=in_another_thread,
        )
    )


def test_a_sample_that_comes_too_late_raises_torchs_text(parity: Parity) -> None:
    def until_late(loader: Loader, epoch: int) -> Iterator[Note]:
        for note in until_the_first_error(loader, epoch):
            gate_of(loader).value = isinstance(note, BaseException)
            yield note

    def arguments() -> dict[str, Any]:
        dataset = Blocked(multiprocessing.RawValue("i", 0), blocked=1)
        return dict(dataset=dataset, batch_size=1, num_workers=2, timeout=1)

    parity(Job(arguments, consumer=until_late))


def gate_of(loader: Any) -> Any:
    return loader.dataset.gate


def test_samples_within_the_timeout_raise_nothing(parity: Parity) -> None:
    options = {"batch_size": 2, "num_workers": 2, "timeout": 60, "collate_fn": as_list}
    parity(Job(lambda: dict(dataset=Draws(9), **options), epochs=2))


def until_the_first_error(loader: Loader, epoch: int) -> Iterator[Note]:
    for note in every_attempt(loader, epoch):
        yield note
        if isinstance(note, BaseException):
            return


class WithoutItems:
    """Has a length, and forgot the rest."""

    def __len__(self) -> int:
        return 4


class WithoutLength:
    """Has items, and forgot its length."""

    def __getitem__(self, index: int) -> int:
        return index


class FailingLists(Squares):
    """Fetches lists, but not each of them."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        if 4 in indices:
            raise value_error(4)
        return indices
