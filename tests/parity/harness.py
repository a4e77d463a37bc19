"""One job, run through any loader class, written down so that two runs can be compared.

A `Job` says what a user would write: which dataset and arguments, how many epochs, what the
training loop does between batches. `run` carries it out with a given class and returns a
`Transcript`: every batch, error and warning in the order in which the consumer met them, and the
state of every random generator of the main process after each epoch.

The one idea: what the consumer does is a generator function (see `consumers.py`) that yields
what it met, and all of it is frozen at once. So the harness itself keeps no batch alive.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing import resource_sharer
from typing import Any, cast

import numpy as np
import pytest
import torch

from .compare import assert_same
from .consumers import Consumer, Note, every_batch
from .freeze import Frozen, freeze, freeze_error

Loader = torch.utils.data.DataLoader[Any]
LoaderClass = Callable[..., Loader]


@dataclass(frozen=True, slots=True)
class Job:
    """What to do. `arguments` is called anew for each run: datasets and samplers hold state.

    `epochs` counts how often `consumer` is run over the loader. Each of `knobs` asks for a further
    run of the loader under test, with these private attributes set (the reference knows nothing
    of them); without any there is one run as it is. `warns` says that
    warnings are a subject of the job: they are then written down rather than raised. `ignoring`
    names facts of a value (see `freeze.py`) that need not be equal. `ordered=False` compares the
    batches of an epoch as a set. `closes=False` leaves the loader to the garbage collector.
    """

    arguments: Callable[[], Mapping[str, Any]]
    epochs: int = 1
    consumer: Consumer = every_batch
    knobs: tuple[Mapping[str, Any], ...] = ({},)
    seed: int = 20
    warns: bool = False
    ordered: bool = True
    ignoring: tuple[str, ...] = ()
    closes: bool = True

    def given(self, **more: Any) -> Job:
        """The same job with further arguments for the loader."""
        first = self.arguments
        return replace(self, arguments=lambda: {**first(), **more})

    def unordered(self) -> Job:
        """The same job; the batches of an epoch may come in any order."""
        return replace(self, ordered=False)


@dataclass(frozen=True, slots=True)
class Epoch:
    """What one epoch gave: the consumer's notes, and the random states that it left behind."""

    notes: tuple[Frozen, ...]
    random_state: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Transcript:
    """All that can be seen of a run from the main process."""

    epochs: tuple[Epoch, ...]
    warned: tuple[str, ...] = ()


def run(job: Job, loader_class: LoaderClass, knobs: Mapping[str, Any] | None = None) -> Transcript:
    """Carry out `job` from its seed on with a fresh loader of that class, and end the loader."""
    seed_everything(job.seed)
    arguments = dict(job.arguments())
    with warnings.catch_warnings(record=job.warns) as caught:
        if job.warns:
            warnings.simplefilter("always")
        loader = loader_class(**arguments)
        for name, value in (knobs or {}).items():
            setattr(loader, name, value)
        try:
            epochs = tuple(_epoch(job, loader, arguments, number) for number in range(job.epochs))
        finally:
            if job.closes:
                close(loader)
            del loader
            gc.collect()
    return Transcript(epochs, tuple(f"{w.category.__name__}: {w.message}" for w in caught or ()))


def check_parity(job: Job, reference: LoaderClass, candidate: LoaderClass) -> None:
    """Run `job` with both classes and compare all that came of it."""
    expected = run(job, reference)
    assert any(epoch.notes for epoch in expected.epochs), "the job shows nothing: nothing is tested"
    for knobs in job.knobs:
        compare(expected, run(job, candidate, knobs), job, told=f"with {knobs}: " if knobs else "")


def cases(jobs: Mapping[str, Job]) -> pytest.MarkDecorator:
    """Parametrize a test with `job`; each key is a sentence that says what the job shows."""
    return pytest.mark.parametrize("job", [pytest.param(job, id=key) for key, job in jobs.items()])


def compare(expected: Transcript, actual: Transcript, job: Job, *, told: str = "") -> None:
    """Compare two transcripts of `job`; `told` and a path say in the message where they part."""
    assert_same(expected.warned, actual.warned, path=f"{told}warnings")
    for number, (one, other) in enumerate(zip(expected.epochs, actual.epochs)):
        notes = (one.notes, other.notes) if job.ordered else (_by_text(one), _by_text(other))
        assert_same(*notes, ignoring=job.ignoring, path=f"{told}epoch {number}, note ")
        states = dict(one.random_state), dict(other.random_state)
        assert_same(*states, path=f"{told}random state after epoch {number}")


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def close(loader: Any) -> None:
    """End a loader of either class.

    Ours has `close`. torch's keeps its workers only if they persist, and, where the indices were
    tensors, a thread that serves them to the workers.
    """
    if hasattr(loader, "close"):
        loader.close()
        return
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()
        loader._iterator = None
    resource_sharer.stop(timeout=5)


def _epoch(job: Job, loader: Loader, arguments: Mapping[str, Any], number: int) -> Epoch:
    notes = tuple(_frozen(job.consumer(loader, number)))
    return Epoch(notes, _random_state(arguments.get("generator")))


def _frozen(notes: Iterable[Note]) -> Iterable[Frozen]:
    for note in notes:
        if isinstance(note, BaseException):
            yield freeze_error(note)
            _forget_frames(note)
        else:
            yield freeze(note)
        del note  # a batch is given back before the next one is asked for


def _forget_frames(error: BaseException | None) -> None:
    """Cut the cycle of an error and the frame that made it, which holds torch's iterator.

    Collected as part of a cycle, torch's iterator waits 5 s for each of its workers: the threads
    that would tell them to end are finalised first.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _by_text(epoch: Epoch) -> tuple[Frozen, ...]:
    return tuple(sorted(epoch.notes, key=repr))


def _random_state(generator: torch.Generator | None) -> dict[str, bytes]:
    """The state of each generator of the main process, in bytes."""
    kind, keys, position, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state())
    state = {
        "python": repr(random.getstate()).encode(),
        "numpy": repr((kind, position, has_gauss, cached)).encode() + keys.tobytes(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if generator is not None:
        state["generator"] = generator.get_state().numpy().tobytes()
    return state
