"""The demo's contest: the same job, fed by each contestant in turn under one memory limit.

Covers: the order of things. First the job runs without a loader, which tells
its own need; the limit follows from that; then each contestant runs under the
limit, and one that is killed runs once more without it, to see what it would
have needed. Does not cover: one run (contestant.py), its figures (verdict.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

from forebay.bench.cgroup import GroupUnavailable, MemoryGroup
from forebay.bench.contestant import Broken, Finished, Job, Killed, Run, Step, run_contestant
from forebay.bench.verdict import Figures, judge
from forebay.errors import ForebayError
from forebay.units import MIB, format_bytes

CONTESTANTS: Final[dict[str, str]] = {
    "torch": "torch",
    "torch-prefetch1": "torch, prefetch_factor=1",
    "forebay": "forebay",
}
"""Name in demo_job.py -> how it is called in tables."""

SLACK_BYTES: Final = 48 * MIB
"""What a limit counts beside the job's need and the budget: page tables and other
kernel memory (5 MiB measured), pages of files in use, and that the job's own
peak varies from run to run (365 to 402 MiB in ten runs on a busy machine)."""


class LimitTooLow(ForebayError, ValueError):  # noqa: N818 - named for what it is about
    """The limit would kill the job even without a loader."""

    def __init__(self, limit_bytes: int, need_bytes: int) -> None:
        super().__init__(
            f"The limit of {format_bytes(limit_bytes)} is below the {format_bytes(need_bytes)} "
            "that the job needs without any loader. Nothing was run under it. Raise --limit, "
            "or lower --batch-size."
        )
        self.limit_bytes, self.need_bytes = limit_bytes, need_bytes


class JobDoesNotRun(ForebayError, RuntimeError):  # noqa: N818
    """The job fails already without a loader."""

    def __init__(self, why: object) -> None:
        super().__init__(
            f"The job does not run even without a loader ({why}). Nothing was compared."
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant: how it fared under the limit, and the run that its figures are from.

    `measured` is the run under the limit, or, where that one was killed, the
    one without limit.
    """

    name: str
    title: str
    limited: Run
    measured: Run
    figures: Figures


@dataclass(frozen=True, slots=True)
class Contest:
    """All that was measured. `unenforced` says why no limit could be set; None if one was."""

    job: Job
    own_need_bytes: int
    limit_bytes: int
    unenforced: str | None
    entries: tuple[Entry, ...]


class Audience(Protocol):
    """Is told how it goes; called from the thread that holds the contest."""

    def starts(self, title: str, steps: int) -> None:
        """A run begins, of so many steps (0: one without a loader)."""

    def steps(self, step: Step, held_bytes: int) -> None:
        """A step ended, and the whole job holds so much now."""

    def ends(self, run: Run) -> None:
        """The run that began last is over."""


def hold_contest(job: Job, limit_bytes: int | None, audience: Audience) -> Contest:
    """Run every contestant; takes minutes.

    Args:
        job: what each of them does.
        limit_bytes: for the whole job; None for its own need + the budget + `SLACK_BYTES`.
        audience: is told how it goes.

    Raises:
        JobDoesNotRun: the job fails without a loader.
        LimitTooLow: `limit_bytes` cannot even hold the job without a loader.
    """
    unenforced = why_no_group()
    open_group = _open_group if unenforced is None else _open_nothing
    need_bytes = _own_need_bytes(job, open_group, audience)
    if limit_bytes is None:
        limit_bytes = need_bytes + job.budget_bytes + SLACK_BYTES
    if limit_bytes <= need_bytes + job.batch_bytes:
        raise LimitTooLow(limit_bytes, need_bytes + job.batch_bytes)
    entries = tuple(_enter(name, job, limit_bytes, open_group, audience) for name in CONTESTANTS)
    return Contest(job, need_bytes, limit_bytes, unenforced, entries)


def why_no_group() -> str | None:
    """Why no memory group can be made here, with what to do; None where it can."""
    try:
        with MemoryGroup():
            return None
    except GroupUnavailable as error:
        return str(error)


OpenGroup = Callable[[int | None], AbstractContextManager[MemoryGroup | None]]


def _open_group(limit_bytes: int | None) -> AbstractContextManager[MemoryGroup | None]:
    return MemoryGroup(limit_bytes)


def _open_nothing(limit_bytes: int | None) -> AbstractContextManager[MemoryGroup | None]:  # noqa: ARG001
    return nullcontext()


def _own_need_bytes(job: Job, open_group: OpenGroup, audience: Audience) -> int:
    """Also reads torch's libraries into the page cache, so no contestant is charged for them."""
    audience.starts("the job without a loader", 0)
    with open_group(None) as group:
        run = run_contestant("none", job, group)
    audience.ends(run)
    if not isinstance(run.ending, Finished):
        raise JobDoesNotRun(run.ending)
    return judge(run, job).own_need_bytes


def _enter(
    name: str, job: Job, limit_bytes: int, open_group: OpenGroup, audience: Audience
) -> Entry:
    title = CONTESTANTS[name]
    measured = limited = _run_once(name, title, job, open_group(limit_bytes), audience)
    if isinstance(limited.ending, Killed):
        measured = _run_once(name, f"{title}, no limit", job, open_group(None), audience)
    return Entry(name, title, limited, measured, judge(measured, job))


def _run_once(
    name: str,
    title: str,
    job: Job,
    opening: AbstractContextManager[MemoryGroup | None],
    audience: Audience,
) -> Run:
    audience.starts(title, job.steps)
    with opening as group:
        run = run_contestant(name, job, group, audience.steps)
    audience.ends(run)
    return run


def broken_entries(contest: Contest) -> tuple[Entry, ...]:
    """Those that ended for a reason of their own: nothing can be said about them."""
    return tuple(each for each in contest.entries if isinstance(each.measured.ending, Broken))


def default_threads() -> int:
    """Threads that the training itself uses: half of the usable cores, for all contestants."""
    return max(1, len(os.sched_getaffinity(0)) // 2)
