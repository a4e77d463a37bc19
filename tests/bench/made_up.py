"""A contest that nobody ran: round numbers, for tests of what is said about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.bench.contest import CONTESTANTS, Contest, Entry
from forebay.bench.contestant import Ending, Finished, Job, Killed, Run, Step
from forebay.bench.sampler import FROM_GROUP, Sample, Trace
from forebay.bench.verdict import judge
from forebay.units import MIB

JOB = Job(Path("photos"), steps=20, batch_size=8, workers=2, budget_bytes=160 * MIB, threads=1)
NEED_MIB = 300
LIMIT_MIB = 500
DIGEST = "0badcafe"


def made_up_run(
    name: str,
    *,
    fed_mib: int,
    ending: Ending | None = None,
    step_s: float = 0.5,
    steps: int = 20,
    wait_s: float = 0.125,
) -> Run:
    """Warm-up from 0 to 10 s, then one step after the other, with a saw-tooth of memory."""
    warm = [Sample(float(t_s), NEED_MIB * MIB, 0, NEED_MIB * MIB) for t_s in range(10)]
    end_s = 10 + steps * step_s
    fed = [
        Sample(10.05 + tick * 0.1, NEED_MIB * MIB, held_mib * MIB, NEED_MIB * MIB)
        for tick in range(int((end_s - 10) * 10))
        for held_mib in [fed_mib - 10 * (tick % 5)]
    ]
    done = tuple(
        Step(10 + (number + 1) * step_s, number, 1.5 / (number + 1), wait_s)
        for number in range(steps)
    )
    marks = {"warmup": 0.0, "baseline": 10.0, "end": end_s}
    trace = Trace(FROM_GROUP, (*warm, *fed), ())
    return Run(name, LIMIT_MIB * MIB, marks, done, trace, ending or Finished(DIGEST, None))


def made_up_entry(name: str, *, killed: bool = False, **run: Any) -> Entry:
    measured = made_up_run(name, **run)
    limited = measured
    if killed:
        limited = replace(measured, ending=Killed(1), steps=measured.steps[:2])
        measured = replace(measured, limit_bytes=None)
    return Entry(name, CONTESTANTS[name], limited, measured, judge(measured, JOB))


def made_up_contest(
    torch: Entry | None = None,
    torch_prefetch1: Entry | None = None,
    forebay: Entry | None = None,
    unenforced: str | None = None,
) -> Contest:
    """torch is killed, torch with prefetch 1 survives just so, forebay holds half of that."""
    entries = (
        torch or made_up_entry("torch", fed_mib=310, killed=True),
        torch_prefetch1 or made_up_entry("torch-prefetch1", fed_mib=190),
        forebay or made_up_entry("forebay", fed_mib=95),
    )
    return Contest(JOB, NEED_MIB * MIB, LIMIT_MIB * MIB, unenforced, entries)
