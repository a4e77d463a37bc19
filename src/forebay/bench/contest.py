"""Running contestants one after another, each alone, and judging them by what was read outside.

Covers: starting one contestant's process in its own memory group, collecting
what it reports and what the sampler reads, how it ended, and the figures that
follow (pure, in `judge`).
Does not cover: what happens inside the process (demo_job.py), how results look
(cli/, observe/).

The one idea: a contestant's footprint is the highest that its whole group held
while it was fed, less the highest that the same process held while it trained on one
made-up batch, plus that batch. Both peaks are of the same model in the same
process, so what remains is there because of the loader: batches (also the one in use),
workers, and what the loader does in the training process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from forebay.bench.cgroup import MemoryGroup
from forebay.bench.sampler import Sampler, Trace

CONTESTANTS: Final[dict[str, str]] = {
    "torch": "torch",
    "torch-prefetch1": "torch, prefetch_factor=1",
    "forebay": "forebay",
}
"""Name in demo_job.py -> how it is called in tables."""

SILENCE_S: Final = 120.0
"""A contestant that reports nothing for this long is ended: a step takes under a second."""

PICTURE_BYTES: Final = 3 * 224 * 224 * 4
LABEL_BYTES: Final = 8
SETTLED_STEPS: Final = 10
"""The final loss is a mean over so many last steps: a single one is mostly noise."""


@dataclass(frozen=True, slots=True)
class Job:
    """What every contestant is given alike."""

    images: Path
    steps: int
    batch_size: int
    workers: int
    budget_bytes: int
    threads: int
    seed: int = 0

    @property
    def batch_bytes(self) -> int:
        """The tensors of one batch: float32 pictures of 3x224x224 and int64 labels."""
        return self.batch_size * (PICTURE_BYTES + LABEL_BYTES)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of training: when it ended, its loss, how long it waited for its batch."""

    t_s: float
    number: int
    loss: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """All steps were done; `digest` is equal for equal batches."""

    digest: str
    stats: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Killed:
    """The kernel killed a process of the group at its limit, and the job did not survive it."""

    oom_kills: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The job ended early for another reason; `why` holds the last lines it wrote."""

    why: str


Ending = Finished | Killed | Broken


@dataclass(frozen=True, slots=True)
class Run:
    """One contestant's process from start to end, as reported by it and read from outside."""

    contestant: str
    limit_bytes: int | None
    marks: dict[str, float]
    steps: tuple[Step, ...]
    trace: Trace
    ending: Ending


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


def run_contestant(
    contestant: str,
    job: Job,
    group: MemoryGroup | None,
    on_step: Callable[[Step, int], None] | None = None,
) -> Run:
    """Run one contestant to its end. `group` must be open; None measures the process tree.

    Nothing of it is left when this returns or raises, KeyboardInterrupt too.

    Args:
        contestant: a name in `CONTESTANTS`, or "none" for the job without a loader.
        job: what to do.
        group: entered by the process before it starts.
        on_step: called with each step and the bytes that the job holds at that moment.
    """
    marks: dict[str, float] = {}
    steps: list[Step] = []
    finished: Finished | None = None
    with ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile())
        child = stack.enter_context(_started(_command(contestant, job), group, errors))
        stack.callback(_end_all, child, group)
        sampler = stack.enter_context(Sampler(child.pid, group))
        for event in _events(child):
            match event.pop("event"):
                case "mark":
                    marks[event["name"]] = event["t_s"]
                case "step":
                    steps.append(Step(**event))
                    if on_step is not None:
                        on_step(steps[-1], _held_now(sampler))
                case "end":
                    marks["end"] = event["t_s"]
                    finished = Finished(event["digest"], event["stats"])
        status = child.wait()
        ending = finished or _early_end(status, group, errors)
        trace = sampler.trace()
    limit_bytes = None if group is None else group.limit_bytes
    return Run(contestant, limit_bytes, marks, tuple(steps), trace, ending)


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


def _command(contestant: str, job: Job) -> list[str]:
    options = {
        "--contestant": contestant,
        "--images": job.images,
        "--steps": job.steps,
        "--batch-size": job.batch_size,
        "--workers": job.workers,
        "--budget-bytes": job.budget_bytes,
        "--threads": job.threads,
        "--seed": job.seed,
    }
    pairs = (str(word) for pair in options.items() for word in pair)
    return [sys.executable, "-m", "forebay.bench.demo_job", *pairs]


def _started(
    command: list[str], group: MemoryGroup | None, errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    """The process, leader of a session of its own so that all of it can be ended."""
    return subprocess.Popen(
        command if group is None else group.enter_command(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )


def _end_all(child: subprocess.Popen[bytes], group: MemoryGroup | None) -> None:
    """End the job and everything it started; calling it again does no harm."""
    if group is not None:
        group.kill()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _events(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """What the job reports, until it ends or has been silent for `SILENCE_S`.

    Its end is noticed by its exit, not by end-of-file: workers that outlive a
    killed training process hold the pipe open too.
    """
    assert child.stdout is not None
    ended, wake = os.pipe()
    threading.Thread(
        target=_wake_at_exit, args=(child, wake), name="forebay-contest-exit", daemon=True
    ).start()
    waiting = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while ready := {key.fd for key, _ in selector.select(SILENCE_S)}:
            if child.stdout.fileno() in ready:
                text = os.read(child.stdout.fileno(), 1 << 16)
                *lines, waiting = (waiting + text).split(b"\n")
                yield from (json.loads(line) for line in lines)
                if text:
                    continue
            break
    os.close(ended)


def _wake_at_exit(child: subprocess.Popen[bytes], wake: int) -> None:
    child.wait()
    os.close(wake)


def _held_now(sampler: Sampler) -> int:
    latest = sampler.latest()
    return 0 if latest is None else latest.held_bytes


def _early_end(status: int, group: MemoryGroup | None, errors: IO[bytes]) -> Killed | Broken:
    oom_kills = 0 if group is None else group.read().oom_kills
    if oom_kills:
        return Killed(oom_kills)
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return Broken(f"exit status {status}: " + ("\n".join(lines[-6:]) or "it wrote nothing"))


def without_loader(job: Job, group: MemoryGroup | None) -> int:
    """The job's own need in bytes: measured by running it without a loader.

    Also reads torch's libraries into the page cache once, so that no contestant
    is charged for them.
    """
    run = run_contestant("none", job, group)
    if not isinstance(run.ending, Finished):
        raise RuntimeError(f"The job does not run even without a loader: {run.ending}")
    return judge(run, job).own_need_bytes


def default_threads() -> int:
    """Threads that the training itself uses: half of the usable cores, for all contestants."""
    return max(1, len(os.sched_getaffinity(0)) // 2)
