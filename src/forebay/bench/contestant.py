"""One contestant, alone in its own process and memory group, from start to end.

Covers: starting `demo_job`, collecting what it reports and what the sampler reads
from outside, how it ended; and ending all of it, whatever happens.
Does not cover: what happens inside the process (demo_job.py), what the record
comes to (verdict.py), who runs in which order (contest.py).
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
from typing import IO, Any, Final, TypeAlias

from forebay.bench.cgroup import MemoryGroup
from forebay.bench.sampler import Sampler, Trace

SILENCE_S: Final = 120.0
"""A contestant that reports nothing for this long is ended: a step takes under a second."""

PICTURE_BYTES: Final = 3 * 224 * 224 * 4
LABEL_BYTES: Final = 8


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
    """All steps were done; `digest` is equal for equal batches.

    `oom_kills` above 0: the kernel killed workers, and the loader replaced them.
    """

    digest: str
    stats: dict[str, Any] | None
    oom_kills: int = 0


@dataclass(frozen=True, slots=True)
class Killed:
    """The kernel killed a process of the group at its limit, and the job did not survive it."""

    oom_kills: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The job ended early for another reason; `why` holds the last lines it wrote."""

    why: str


Ending: TypeAlias = Finished | Killed | Broken


@dataclass(frozen=True, slots=True)
class Run:
    """One contestant's process from start to end, as reported by it and read from outside."""

    contestant: str
    limit_bytes: int | None
    marks: dict[str, float]
    steps: tuple[Step, ...]
    trace: Trace
    ending: Ending


def run_contestant(
    contestant: str,
    job: Job,
    group: MemoryGroup | None,
    on_step: Callable[[Step, int], None] | None = None,
) -> Run:
    """Run one contestant to its end. `group` must be open; None measures the process tree.

    Nothing of it is left when this returns or raises, KeyboardInterrupt too.

    Args:
        contestant: a name in `demo_job.LOADERS`; "none" is the job without a loader.
        job: what to do.
        group: entered by the process before it starts.
        on_step: called with each step and the bytes that the job holds at that moment.
    """
    marks: dict[str, float] = {}
    steps: list[Step] = []
    report: tuple[str, dict[str, Any] | None] | None = None
    with ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile())
        child = stack.enter_context(_started(_command(contestant, job), group, errors))
        stack.callback(_end_all, child, group)
        sampler = stack.enter_context(Sampler(child.pid, group, parts_period_s=None))
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
                    report = (event["digest"], event["stats"])
        status = child.wait()
        oom_kills = 0 if group is None else group.read().oom_kills
        if report is not None:
            ending: Ending = Finished(*report, oom_kills)
        elif oom_kills:
            ending = Killed(oom_kills)
        else:
            ending = Broken(f"exit status {status}: {_last_lines(errors)}")
        trace = sampler.trace()
    limit_bytes = None if group is None else group.limit_bytes
    return Run(contestant, limit_bytes, marks, tuple(steps), trace, ending)


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


def _last_lines(errors: IO[bytes]) -> str:
    """The end of what the job wrote to standard error."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-6:]) or "it wrote nothing"
