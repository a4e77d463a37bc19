"""The default collate with samples that are unequal or strange: torch's batch or torch's error."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from .batches import MANY, Make
from .compare import NotTheSame
from .conftest import Parity
from .consumers import every_attempt
from .datasets import Made
from .freeze import Frozen
from .harness import Job, LoaderClass, Transcript, cases, compare, run
from .odd_samples import (
    COLLATED_IN_THE_MAIN_PROCESS,
    COLLATED_WITH_CARE,
    OneTensor,
    ReusingItsArray,
    ReusingItsBuffer,
    SlidingWindow,
)


@pytest.mark.parametrize("make", COLLATED_WITH_CARE.values(), ids=COLLATED_WITH_CARE)
def test_the_default_collate_is_torchs_for(parity: Parity, make: Make) -> None:
    parity(
        Job(
            lambda: dict(dataset=Made(make, 7), batch_size=2, num_workers=2),
            consumer=every_attempt,
        )
    )


@pytest.mark.parametrize(
    "make", COLLATED_IN_THE_MAIN_PROCESS.values(), ids=COLLATED_IN_THE_MAIN_PROCESS
)
def test_where_torchs_worker_fails_on_its_own_the_result_without_workers_will_do_for(
    reference: LoaderClass, candidate: LoaderClass, make: Make
) -> None:
    job = Job(lambda: dict(dataset=Made(make, 7), batch_size=2), consumer=every_attempt)
    actual = run(job.given(num_workers=2), candidate)
    try:
        compare(run(job.given(num_workers=2), reference), actual, job)
    except NotTheSame:
        compare(run(job, reference), as_raised_without_workers(actual), job)


def as_raised_without_workers(transcript: Transcript) -> Transcript:
    """The same, with each error's text as it was before it was sent from a worker."""

    def plain(note: Frozen) -> Frozen:
        text = str(note.facts.get("text", ""))
        bare = re.sub(r"^Caught (\w+) in .*\n(?:.*\n)*?\1: ", "", text).rstrip("\n")
        return replace(note, facts={**note.facts, "text": bare}) if note.kind == "error" else note

    epochs = [replace(epoch, notes=tuple(map(plain, epoch.notes))) for epoch in transcript.epochs]
    return replace(transcript, epochs=tuple(epochs))


LARGE_ELEMENTS = 3 * 2**20
"""24 MiB: such a batch is given up piece by piece while it is copied to its block."""


def large(samples: list[int]) -> torch.Tensor:
    return torch.arange(LARGE_ELEMENTS) + samples[0]


class LargeAndKept:
    """The collate function goes on having what it returns."""

    def __init__(self) -> None:
        self.kept = torch.arange(LARGE_ELEMENTS)

    def __call__(self, samples: list[int]) -> Any:
        return {"x": self.kept, "first": self.kept[:10]}


class LargeInAnArray(LargeAndKept):
    """The same through NumPy, whose owners torch does not count."""

    def __call__(self, samples: list[int]) -> Any:
        return torch.from_numpy(self.kept.numpy())


class LargeViews(LargeAndKept):
    """Two looks at one memory, of which only the batch knows."""

    def __call__(self, samples: list[int]) -> Any:
        fresh = large(samples)
        return [fresh[: LARGE_ELEMENTS // 2], (fresh, fresh[100:])]


@pytest.mark.parametrize("collate", [large, LargeAndKept(), LargeInAnArray(), LargeViews()])
def test_a_large_batch_is_torchs_whoever_else_has_its_memory(parity: Parity, collate: Any) -> None:
    parity(Job(lambda: dict(dataset=list(range(4)), num_workers=1, collate_fn=collate)))


@cases(
    {
        "returns one small buffer again and again": Job(lambda: dict(dataset=ReusingItsBuffer(5))),
        "returns one large buffer again and again": Job(
            lambda: dict(dataset=ReusingItsBuffer(MANY))
        ),
        "returns one array again and again": Job(lambda: dict(dataset=ReusingItsArray(MANY))),
        "returns views of a buffer that it shifts": Job(lambda: dict(dataset=SlidingWindow(6))),
        "returns views of a large buffer that it shifts": Job(
            lambda: dict(dataset=SlidingWindow(MANY))
        ),
        "returns the same tensor for many indices": Job(lambda: dict(dataset=OneTensor())),
    }
)
def test_the_default_collate_is_torchs_when_a_dataset(parity: Parity, job: Job) -> None:
    parity(job.given(batch_size=3, num_workers=2))
