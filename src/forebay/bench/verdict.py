"""What the record of one run comes to: pure.

Covers: speed, waiting, and above all the footprint. Does not cover: making the
record (contestant.py), showing it (cli/, observe/).

The one idea: at each moment, what the whole job holds less what the training
process itself holds is there because of the loader: the workers and whatever is
shared, which is the batches, also the one in use. What the loader adds inside the training
process cannot be told from training by looking; it is bounded by comparing that
process's peak with its own peak while it trained on one made-up batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from forebay.bench.contestant import Job, Run, Step

SETTLED_STEPS: Final = 10
"""The final loss is a mean over so many last steps: a single one is mostly noise."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run comes to. None where the run was too short to say.

    `first_batch_s` includes starting the workers. `waited_s` and
    `images_per_s` leave it out: a real run is longer than this one.
    """

    steps: int
    images_per_s: float | None
    first_batch_s: float | None
    waited_s: float
    own_need_bytes: int
    job_peak_bytes: int
    footprint_bytes: int
    workers_anon_bytes: int
    shmem_bytes: int
    main_growth_bytes: int
    final_loss: float | None
    trained_s: float

    @property
    def waited_frac(self) -> float | None:
        """The share of the time after the first step in which training waited for a batch."""
        return self.waited_s / self.trained_s if self.trained_s > 0 else None


def judge(run: Run, job: Job) -> Figures:
    """The figures of a run: pure."""
    baseline_s = run.marks.get("baseline", math.inf)
    warming = run.trace.between(run.marks.get("warmup", 0.0), baseline_s)
    feeding = run.trace.between(baseline_s, run.marks.get("end", math.inf))
    warm_main_bytes = max((each.main_anon_bytes for each in warming), default=0) - job.batch_bytes
    main_bytes = max((each.main_anon_bytes for each in feeding), default=0)
    warm_peak_bytes = max((each.held_bytes for each in warming), default=0)
    last = run.steps[-SETTLED_STEPS:]
    return Figures(
        steps=len(run.steps),
        images_per_s=_images_per_s(run.steps, job.batch_size),
        first_batch_s=run.steps[0].wait_s if run.steps else None,
        waited_s=sum(step.wait_s for step in run.steps[1:]),
        own_need_bytes=max(0, warm_peak_bytes - job.batch_bytes),
        job_peak_bytes=max((each.held_bytes for each in feeding), default=0),
        footprint_bytes=max((each.fed_bytes for each in feeding), default=0),
        workers_anon_bytes=max((each.children_anon_bytes for each in feeding), default=0),
        shmem_bytes=max((each.shmem_bytes for each in feeding), default=0),
        main_growth_bytes=max(0, main_bytes - warm_main_bytes),
        final_loss=sum(step.loss for step in last) / len(last) if last else None,
        trained_s=run.steps[-1].t_s - run.steps[0].t_s if run.steps else 0.0,
    )


def _images_per_s(steps: tuple[Step, ...], batch_size: int) -> float | None:
    """Speed from the end of the first step to the end of the last."""
    if len(steps) < 2:  # noqa: PLR2004 - two ends make one span
        return None
    return (len(steps) - 1) * batch_size / (steps[-1].t_s - steps[0].t_s)
