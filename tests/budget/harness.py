"""Whether a loader keeps its budget, judged by somebody else than the loader.

Covers: running one job (job.py) in a memory cgroup entered before exec, reading
that group every 10 ms, and working out what the loader's footprint was, with the
first occurrences of each size apart. Run as a program it prints the table:

    python -m tests.budget.harness [--loader torch] [--workload images ...]

The sum, at each reading: anonymous and shared memory of the group, less the same
just before the loader was made, less what the consumer itself holds. Whatever
the loader makes the main process's heap grow by is therefore the loader's.

A first occurrence lasts from the moment when a worker begins a batch of a size
class that nobody has made before until that batch is delivered, and with it those
of its class that were begun before it was over (their cost was not known either).
The start counts as one: until every worker has delivered two batches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

from forebay.bench.cgroup import MemoryGroup
from forebay.bench.sampler import Sampler, Trace
from tests.budget.workloads import START, WORKLOADS, Workload

ROOT = Path(__file__).parents[2]
MIB = 1024**2
RUN_AT_MOST_S = 60.0
NEVER_S = 3600.0  # the split by process walks page tables: not wanted here


@dataclass(frozen=True, slots=True)
class Batch:
    """One delivered batch, as the job told it."""

    asked_s: float
    delivered_s: float
    consumer_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Report:
    """All that a job told: when the level was to be taken, its batches, how it ended."""

    level_s: float
    batches: tuple[Batch, ...]
    ended_s: float
    error: str | None
    stats: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Span:
    """A first occurrence, in `time.monotonic()` seconds."""

    from_s: float
    to_s: float


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run held, in bytes, and whether that is within its budget.

    `peak_bytes` leaves the first occurrences out, `first_peak_bytes` holds only
    them. `readings` counts what `peak_bytes` is the maximum of.
    """

    workload: str
    budget_bytes: int
    peak_bytes: int
    first_peak_bytes: int
    readings: int
    digests: tuple[str, ...]
    error: str | None
    stats: dict[str, Any] | None

    @property
    def kept(self) -> bool:
        """Whether the budget held from the second occurrence of each size class on."""
        return self.error is None and self.peak_bytes <= self.budget_bytes

    @property
    def first_overshoot_bytes(self) -> int:
        """How far first occurrences went beyond the budget; 0 when they did not."""
        return max(0, self.first_peak_bytes - self.budget_bytes)


def run_job(loader: str, workload_name: str, budget_mib: int) -> Verdict:
    """Run one job in a group of its own.

    Raises:
        GroupUnavailable: if no memory cgroup can be made here.
    """
    workload = WORKLOADS[workload_name]
    with tempfile.TemporaryDirectory() as folder, MemoryGroup() as group:
        child = subprocess.Popen(
            group.enter_command(_command(loader, workload_name, budget_mib, folder)),
            cwd=ROOT,
            env=_environment(),
            stderr=subprocess.PIPE,
        )
        with Sampler(child.pid, group, parts_period_s=NEVER_S) as sampler:
            try:
                _, errors = child.communicate(timeout=RUN_AT_MOST_S)
            except subprocess.TimeoutExpired:
                group.kill()
                _, errors = child.communicate()
        report = read_report(Path(folder), child.returncode, errors.decode(errors="replace"))
        starts = read_starts(Path(folder))
        return judge(workload, budget_mib * MIB, report, starts, sampler.trace())


@cache
def torch_digests(workload_name: str) -> tuple[str, ...]:
    """What torch's own loader delivers for a workload, as fingerprints."""
    return run_job("torch", workload_name, 0).digests


def judge(
    workload: Workload,
    budget_bytes: int,
    report: Report,
    starts: list[tuple[int, float]],
    trace: Trace,
) -> Verdict:
    """Pure: the two peaks of a run, from what was told and what was read."""
    spans = first_occurrences(workload, report, starts)
    level_bytes = trace.level_bytes(report.level_s)
    asked = [batch.asked_s for batch in report.batches]
    peak_bytes, first_peak_bytes, readings = 0, 0, 0
    for sample in trace.samples:
        if not report.level_s <= sample.t_s <= report.ended_s:
            continue
        consumer_bytes = _consumer_bytes(report.batches, asked, sample.t_s)
        footprint_bytes = sample.held_bytes - level_bytes - consumer_bytes
        if any(span.from_s <= sample.t_s <= span.to_s for span in spans):
            first_peak_bytes = max(first_peak_bytes, footprint_bytes)
        else:
            peak_bytes = max(peak_bytes, footprint_bytes)
            readings += 1
    return Verdict(
        workload=workload.name,
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        first_peak_bytes=first_peak_bytes,
        readings=readings,
        digests=tuple(batch.digest for batch in report.batches),
        error=report.error,
        stats=report.stats,
    )


def first_occurrences(
    workload: Workload, report: Report, starts: list[tuple[int, float]]
) -> list[Span]:
    """When a size was made for the first time: pure, see the top of this file."""
    batches = report.batches
    start_batches = 2 * workload.workers
    if len(batches) < start_batches:
        return [Span(report.level_s, math.inf)]
    spans = [Span(report.level_s, batches[start_batches - 1].delivered_s)]
    by_class: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for serial, begun_s in starts:
        by_class[workload.size_class(serial)].append((begun_s, serial))
    for begun in by_class.values():
        begun.sort()
        from_s, first = begun[0]
        if first >= len(batches):
            continue
        over_s = batches[first].delivered_s
        with_it = [s for at_s, s in begun if at_s <= over_s and s < len(batches)]
        spans.append(Span(from_s, max(batches[serial].delivered_s for serial in with_it)))
    return spans


def _consumer_bytes(batches: tuple[Batch, ...], asked: list[float], at_s: float) -> int:
    """What the consumer held at `at_s`.

    While it waits for a batch that will lie on its own heap, that copy may exist
    already, so the larger of before and after counts.
    """
    number = bisect_right(asked, at_s) - 1
    if number < 0:
        return 0
    now = batches[number]
    if at_s >= now.delivered_s or number == 0:
        return now.consumer_bytes
    return max(now.consumer_bytes, batches[number - 1].consumer_bytes)


def read_report(folder: Path, status: int, errors: str) -> Report:
    """What the job told; a job that ended early has an error instead of an end."""
    path = folder / "report.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    level_s = next((line["level_s"] for line in lines if "level_s" in line), math.inf)
    end: dict[str, Any] = next((line for line in lines if "ended_s" in line), {})
    error = end.get("error")
    if not end or status != 0:
        error = f"the job ended early with status {status}. {error or ''}\n{errors}"
    return Report(
        level_s=level_s,
        batches=tuple(Batch(**line) for line in lines if "digest" in line),
        ended_s=end.get("ended_s", math.inf),
        error=error,
        stats=end.get("stats"),
    )


def read_starts(folder: Path) -> list[tuple[int, float]]:
    """(serial, time) of each batch whose making was begun, in no particular order."""
    path = folder / "starts"
    return list(START.iter_unpack(path.read_bytes())) if path.exists() else []


def _command(loader: str, workload: str, budget_mib: int, folder: str) -> list[str]:
    arguments = ["--loader", loader, "--workload", workload, "--out", folder]
    return [
        *(sys.executable, "-m", "tests.budget.job"),
        *(*arguments, "--budget-mib", str(budget_mib)),
    ]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {**os.environ, "PYTHONPATH": path}


def render_table(verdicts: list[Verdict]) -> str:
    """The whole table as markdown, in MiB."""
    lines = [
        "| workload | budget | peak | kept | overshoot at first occurrences | batches as torch's |",
        "| --- | --: | --: | --- | --: | --- |",
    ]
    for verdict in verdicts:
        same = verdict.digests == torch_digests(verdict.workload)
        lines.append(
            f"| {verdict.workload} | {verdict.budget_bytes / MIB:.0f} MiB "
            f"| {verdict.peak_bytes / MIB:.1f} MiB | {'yes' if verdict.kept else '**no**'} "
            f"| {verdict.first_overshoot_bytes / MIB:.1f} MiB | {'yes' if same else '**no**'} |"
        )
    kept = sum(verdict.kept for verdict in verdicts)
    over = sum(verdict.first_overshoot_bytes > 0 for verdict in verdicts)
    summary = (
        f"{kept} of {len(verdicts)} kept from the second occurrence of each size on; "
        f"{over} overshot at a first occurrence. Read from outside every 10 ms."
    )
    return "\n".join([*lines, "", summary])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loader", choices=["torch", "forebay"], default="forebay")
    parser.add_argument("--workload", choices=WORKLOADS, nargs="*", default=list(WORKLOADS))
    options = parser.parse_args()
    verdicts = []
    for name in options.workload:
        for budget_mib in WORKLOADS[name].budgets_mib:
            verdict = run_job(options.loader, name, budget_mib)
            if verdict.error:
                print(f"{name}, {budget_mib} MiB: {verdict.error}", file=sys.stderr)
            verdicts.append(verdict)
    print(render_table(verdicts))


if __name__ == "__main__":
    main()
