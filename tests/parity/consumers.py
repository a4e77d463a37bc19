"""What a training loop does with a loader: each consumer runs one epoch and yields its notes.

A note is a batch, an exception that `next` raised, or any other value worth comparing. Consumers
are generator functions of (loader, number of the epoch), so that each batch is written down and
given back before the next one is asked for, unless keeping it is the point.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

Loader = torch.utils.data.DataLoader[Any]
Note = Any
Consumer = Callable[[Loader, int], Iterator[Note]]
MOST_ERRORS = 24  # a loader that raises for ever is cut off here, at the same place for each class


def attempts(batches: Iterator[Note]) -> Iterator[Note]:
    """Every batch and every exception, going on after each exception until the end."""
    errors = 0
    while errors < MOST_ERRORS:
        try:
            yield next(batches)
        except StopIteration as end:
            if end.value is not None:  # raised by a sample: torch passes it on, so a loop ends
                yield end
            return
        except Exception as error:
            errors += 1
            yield error


def every_batch(loader: Loader, epoch: int) -> Iterator[Note]:
    """A plain `for` loop."""
    yield from loader


def every_attempt(loader: Loader, epoch: int) -> Iterator[Note]:
    """`next` until the end, errors included, those of `iter` too."""
    try:
        batches = iter(loader)
    except Exception as error:
        yield error
        return
    yield from attempts(batches)


def drawing_between(loader: Loader, epoch: int) -> Iterator[Note]:
    """Draws from all three global generators after each batch, as dropout and mixup do."""
    for batch in loader:
        yield batch
        yield random.random(), np.random.rand(), torch.rand(2)


def keeping_all(loader: Loader, epoch: int) -> Iterator[Note]:
    """Keeps every batch of the epoch, and looks at them only after the loop."""
    yield from list(loader)


def keeping_past_the_end(loader: Loader, epoch: int) -> Iterator[Note]:
    """Keeps every batch, and reads them when the loader and its workers are gone."""
    kept = list(loader)
    getattr(loader, "close", lambda: None)()  # torch's class has none
    yield from kept


def writing_into_each(loader: Loader, epoch: int) -> Iterator[Note]:
    """Writes into every tensor that it was given, as in-place augmentation does."""
    for batch in loader:
        for tensor in batch:
            tensor.mul_(-1)
        yield batch


def with_length(loader: Loader, epoch: int) -> Iterator[Note]:
    """Asks for the length of loader and iterator before and after."""
    batches = iter(loader)
    yield len(loader)
    yield _length_of(batches)
    yield from batches
    yield len(loader)


def asking_past_the_end(loader: Loader, epoch: int) -> Iterator[Note]:
    """Asks twice more after the end: each time the iterator must say that it is over."""
    batches = iter(loader)
    yield from batches
    yield [next(batches, "over"), next(batches, "over")]


def breaking_after(count: int, *, first_epochs: int = 1) -> Consumer:
    """Leaves the loop after `count` batches in the first epochs; later epochs are complete."""

    def consume(loader: Loader, epoch: int) -> Iterator[Note]:
        for taken, batch in enumerate(loader, start=1):
            yield batch
            if epoch < first_epochs and taken == count:
                break

    return consume


def zipped_with_itself(loader: Loader, epoch: int) -> Iterator[Note]:
    """Two iterators of one loader, in step."""
    yield from zip(loader, loader)


def nested_in_itself(loader: Loader, epoch: int) -> Iterator[Note]:
    """A second, complete pass over the loader while the first one is after its first batch."""
    outer = iter(loader)
    yield next(outer)
    yield from loader
    yield from outer


def before_each_epoch(change: Callable[[Loader, int], None], consumer: Consumer) -> Consumer:
    """Calls `change(loader, epoch)` first: `set_epoch`, a new attribute of the dataset."""

    def consume(loader: Loader, epoch: int) -> Iterator[Note]:
        change(loader, epoch)
        yield from consumer(loader, epoch)

    return consume


def and_then(consumer: Consumer, look: Callable[[Loader], Note]) -> Consumer:
    """Adds a last note to each epoch: a counter that lies in shared memory, for instance."""

    def consume(loader: Loader, epoch: int) -> Iterator[Note]:
        yield from consumer(loader, epoch)
        yield look(loader)

    return consume


def pickled_first(loader: Loader, epoch: int) -> Iterator[Note]:
    """Reads a copy of the loader that went through pickle."""
    yield from pickle.loads(pickle.dumps(loader))


def in_another_thread(loader: Loader, epoch: int) -> Iterator[Note]:
    """Runs the whole loop in a thread that is not the main one."""
    notes: list[Note] = []
    thread = threading.Thread(target=lambda: notes.extend(attempts(iter(loader))))
    thread.start()
    thread.join()
    yield from notes


def _length_of(batches: Iterator[Note]) -> Note:
    """Its length, or the error that asking for it raises: iterators over iterables have none."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError as error:
        return error
