"""The default collate with samples that are unequal or strange: torch's batch or torch's error."""

from __future__ import annotations

import pytest

from .batches import MANY, Make
from .conftest import Parity
from .consumers import every_attempt
from .datasets import Made
from .harness import Job, cases
from .odd_samples import (
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
