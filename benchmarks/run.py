"""Measure forebay against torch, on this machine, now: `make bench`.

    python benchmarks/run.py            about five minutes: transport, JPEG, slow consumer
    python benchmarks/run.py --full     about half an hour: more rounds, and starting by spawn

Covers: the plan of a run (who, what, how often, in which order), starting each
contestant in a fresh process, reading its memory from outside where a footprint
is asked for, and saving what came out. Does not cover: the measuring inside a
process (transport.py, feeding.py, starting.py) and the tables (report.py).

The idea: contestants take turns, round by round, so that whatever else the machine
does hits all of them, and a ratio is taken between neighbours in time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import record as records
from contestants import FOREBAY, FOREBAY_THREADS, TORCH, TORCH_PREFETCH_1
from feeding import JPEG, SLOW
from record import Measure, Record
from report import SPAWN, TRANSPORT, render_markdown
from transport import CEILING_IN_PROCESS, CEILING_TWO_PROCESSES
from workloads import TRANSPORT_WORKLOADS

from forebay.bench.cgroup import GroupUnavailable, MemoryGroup
from forebay.bench.photos import PhotosUnavailable, default_cache_dir, make_photos
from forebay.bench.sampler import Sampler

HERE = Path(__file__).parent
SRC = HERE.parent / "src"
JPEG_TIGHT = f"{FOREBAY}:140MiB"
SLOW_TIGHT = f"{FOREBAY}:48MiB"
START_WORKERS = (1, 4)
NEVER_S = 3600.0  # the split by process walks page tables: not wanted here


@dataclass(frozen=True, slots=True)
class Step:
    """One contestant once: which program, with which arguments, for how long at most."""

    line: str
    workload: str
    contestant: str
    round: int
    program: str
    arguments: tuple[str, ...]
    in_group: bool
    limit_s: float


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. Rounds of `main` are compared in pairs, `others` give context."""

    main_rounds: int
    other_rounds: int
    transport_s: float
    warm_up_s: float
    feeding_rounds: int
    jpeg_batches: int
    slow_batches: int
    start_rounds: int


QUICK = Scale(5, 1, 1.0, 0.3, 1, 30, 25, 0)
FULL = Scale(7, 5, 2.0, 0.5, 5, 60, 50, 3)


def plan_transport(scale: Scale) -> Iterator[Step]:
    """All sizes of batch, contestants in turn within each."""
    others = (TORCH_PREFETCH_1, CEILING_IN_PROCESS, CEILING_TWO_PROCESSES)
    span = ("--seconds", str(scale.transport_s), "--warm-up-s", str(scale.warm_up_s))
    for name in TRANSPORT_WORKLOADS:
        for number in range(scale.main_rounds):
            turn = (
                TORCH,
                FOREBAY,
                FOREBAY_THREADS,
                *(others if number < scale.other_rounds else ()),
            )
            for contestant in turn:
                arguments = ("--contestant", contestant, "--workload", name, *span)
                yield Step(
                    TRANSPORT, name, contestant, number, "transport.py", arguments, False, 60.0
                )


def plan_feeding(scale: Scale, line: str, photos: Path | None) -> Iterator[Step]:
    """Decoding, or a slow consumer, with the footprint read from outside."""
    if line == JPEG:
        turn = (TORCH, FOREBAY, TORCH_PREFETCH_1, JPEG_TIGHT, CEILING_TWO_PROCESSES)
        batches = scale.jpeg_batches
    else:
        turn = (TORCH, FOREBAY, TORCH_PREFETCH_1, SLOW_TIGHT)
        batches = scale.slow_batches
    folder = ("--photos", str(photos)) if photos and line == JPEG else ()
    for number in range(scale.feeding_rounds):
        for contestant in turn:
            arguments = ("--line", line, "--contestant", contestant, "--batches", str(batches))
            yield Step(
                line, line, contestant, number, "feeding.py", (*arguments, *folder), True, 120.0
            )


def plan_starting(scale: Scale, records_count: int, limit_s: float) -> Iterator[Step]:
    """Spawn with a large dataset: one worker against four."""
    for number in range(scale.start_rounds):
        for workers in START_WORKERS:
            for contestant in (TORCH, FOREBAY):
                arguments = (
                    *("--contestant", contestant, "--workers", str(workers)),
                    *("--records", str(records_count)),
                )
                name = f"{workers} workers, {records_count:,} records"
                yield Step(SPAWN, name, contestant, number, "starting.py", arguments, True, limit_s)


def run_step(step: Step) -> Measure:
    """Start the contestant, wait, and take its answer; a failure is an answer too."""
    command = [sys.executable, str(HERE / step.program), *step.arguments]
    try:
        values = _run_in_group(command, step) if step.in_group else _run(command, step.limit_s)
    except (subprocess.SubprocessError, GroupUnavailable, ValueError) as error:
        return Measure(step.line, step.workload, step.contestant, step.round, {}, str(error))
    return Measure(step.line, step.workload, step.contestant, step.round, values)


def _run(command: list[str], limit_s: float) -> dict[str, float]:
    return _answer(_start(command), limit_s)


def _run_in_group(command: list[str], step: Step) -> dict[str, float]:
    with MemoryGroup() as group:
        child = _start(group.enter_command(command))
        with Sampler(child.pid, group, parts_period_s=NEVER_S) as sampler:
            try:
                values = _answer(child, step.limit_s)
            finally:
                group.kill()
        trace = sampler.trace()
    level_bytes = trace.level_bytes(values["level_s"])
    peak_bytes = trace.peak_bytes(values["level_s"], values["ended_s"])
    values["peak_footprint_mib"] = (peak_bytes - level_bytes) / 2**20
    values["end_footprint_mib"] = (trace.level_bytes(values["ended_s"]) - level_bytes) / 2**20
    return values


def _start(command: list[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def _end(child: subprocess.Popen[str]) -> None:
    """Kill a contestant that hangs and, in the session of its own, its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.communicate(timeout=10)


def _answer(child: subprocess.Popen[str], limit_s: float) -> dict[str, float]:
    """The JSON on the last line; SubprocessError with the last line of stderr without one."""
    try:
        out, errors = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(child)
        raise subprocess.SubprocessError(f"no answer within {limit_s:.0f} s") from None
    if child.returncode != 0:
        reason = (errors.strip().splitlines() or ["no message"])[-1]
        raise subprocess.SubprocessError(f"status {child.returncode}: {reason[:300]}")
    answer: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return answer


def find_photos() -> Path | None:
    """Photographs cut from real clips, or None where the clips are not installed."""
    try:
        return make_photos(default_cache_dir())
    except PhotosUnavailable as unavailable:
        print(f"JPEGs are generated instead of cut from clips. {unavailable}", file=sys.stderr)
        return None


def plan(options: argparse.Namespace, scale: Scale, photos: Path | None) -> list[Step]:
    """All steps of a run, in their order."""
    steps: list[Step] = []
    if TRANSPORT in options.lines:
        steps += plan_transport(scale)
    for line in (JPEG, SLOW):
        if line in options.lines:
            steps += plan_feeding(scale, line, photos)
    if SPAWN in options.lines:
        steps += plan_starting(scale, options.records, options.start_limit_s)
    if options.contestants:
        steps = [step for step in steps if step.contestant in options.contestants]
    return steps


def parse_options() -> argparse.Namespace:
    lines = [TRANSPORT, JPEG, SLOW, SPAWN]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="more rounds, and starting by spawn")
    parser.add_argument("--lines", nargs="+", choices=lines, default=lines)
    parser.add_argument("--contestants", nargs="+", help="only these")
    parser.add_argument("--records", type=int, default=1_000_000, help="of the spawn line")
    parser.add_argument("--start-limit-s", type=float, default=300.0, help="a spawn step's limit")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    scale = FULL if options.full else QUICK
    photos = find_photos() if JPEG in options.lines else None
    machine, measures = records.read_machine(), []
    steps = plan(options, scale, photos)
    for number, step in enumerate(steps, start=1):
        measure = run_step(step)
        measures.append(measure)
        told = measure.error or ", ".join(f"{k} {v:.4g}" for k, v in measure.values.items())
        print(
            f"[{number}/{len(steps)}] {step.workload} · {step.contestant}: {told}",
            file=sys.stderr,
            flush=True,
        )
    outcome = Record(
        date=records.now_utc(),
        commit=records.read_commit(),
        mode="full" if options.full else "quick",
        machine=machine,
        versions=records.read_versions(),
        notes={"photographs": "cut from real clips" if photos else "generated"},
        measures=tuple(measures),
    )
    if not options.no_save:
        print(f"saved as {records.save(outcome).relative_to(HERE.parent)}", file=sys.stderr)
    print(render_markdown(outcome))


if __name__ == "__main__":
    main()
