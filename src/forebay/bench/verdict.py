"""What the record of one run comes to: pure.

Covers: speed, waiting, and above all the footprint. Does not cover: making the
record (contestant.py), showing it (cli/, observe/).

The one idea: a contestant's footprint is the highest that its whole group held
while it was fed, less the highest that the same process held while it trained
on one made-up batch, plus that batch. Both peaks are of the same model in the
same process, so what remains is there because of the loader: batches (also the
one in use), workers, and what the loader does in the training process.
"""

from __future__ import annotations

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
    footprint_bytes: int
    workers_anon_bytes: int
    shmem_bytes: int
    main_growth_bytes: int
    final_loss: float | None


def judge(run: Run, job: Job) -> Figures:
    """The figures of a run: pure."""
    baseline_s = run.marks.get("baseline", float("inf"))
    end_s = run.marks.get("end", float("inf"))
    warm_peak_bytes = run.trace.peak_bytes(run.marks.get("warmup", 0.0), baseline_s)
    own_need_bytes = max(0, warm_peak_bytes - job.batch_bytes)
    peak_bytes = run.trace.peak_bytes(baseline_s, end_s)
    parts = [each for each in run.trace.parts if baseline_s <= each.t_s <= end_s]
    warm_main = [each.main_anon_bytes for each in run.trace.parts if each.t_s < baseline_s]
    main_peak_bytes = max((each.main_anon_bytes for each in parts), default=0)
    shmem = (each.shmem_bytes for each in run.trace.samples if baseline_s <= each.t_s <= end_s)
    last = run.steps[-SETTLED_STEPS:]
    return Figures(
        steps=len(run.steps),
        images_per_s=_images_per_s(run.steps, job.batch_size),
        first_batch_s=run.steps[0].wait_s if run.steps else None,
        waited_s=sum(step.wait_s for step in run.steps[1:]),
        own_need_bytes=own_need_bytes,
        footprint_bytes=max(0, peak_bytes - own_need_bytes),
        workers_anon_bytes=max((each.children_anon_bytes for each in parts), default=0),
        shmem_bytes=max(shmem, default=0),
        main_growth_bytes=max(0, main_peak_bytes - max(warm_main, default=main_peak_bytes)),
        final_loss=sum(step.loss for step in last) / len(last) if last else None,
    )


def _images_per_s(steps: tuple[Step, ...], batch_size: int) -> float | None:
    """Speed from the end of the first step to the end of the last."""
    if len(steps) < 2:  # noqa: PLR2004 - two ends make one span
        return None
    return (len(steps) - 1) * batch_size / (steps[-1].t_s - steps[0].t_s)
