"""The page of `forebay demo`: memory over time, the table, where the bytes are, the loss.

Covers: which figure shows what, and in which order. Does not cover: what is said
(demo_words.py), how a figure is made (report.py), measuring (bench/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

from forebay.bench.contest import Contest, Entry
from forebay.bench.contestant import Broken, Finished, Killed
from forebay.bench.machine import Machine
from forebay.bench.sampler import Sample
from forebay.observe import report
from forebay.observe.demo_words import (
    TABLE_COLUMNS,
    ending_words,
    headline,
    lead,
    method,
    own_entry,
    saw_same_batches,
    table_rows,
)
from forebay.units import MIB, format_bytes

COLOURS: Final = {
    "torch": "--torch",
    "torch-prefetch1": "--torch-one",
    "forebay": "--forebay",
}
Y_FROM_FRAC: Final = 0.5
"""The figure of the whole job starts at this part of the job's own need: what lies below is
torch itself, the same for all, and would press the difference flat."""

SELDOM_FRAC: Final = 0.05
"""Below this share of waiting, the loader is not what sets the speed."""

CURVE_BUCKETS: Final = 700
"""Points of a curve, in pairs (least and most of each bucket): as many as a wide
screen has pixels, and no peak is lost."""


Measure: TypeAlias = Callable[[Sample], int]


def demo_page(contest: Contest, machine: Machine) -> str:
    """The whole page as HTML."""
    content = [
        report.tiles(_tiles(contest)),
        _footprint_section(contest),
        _table_section(contest),
        _parts_section(contest),
        _whole_job_section(contest),
        _loss_section(contest),
        report.section("How it was measured", report.paragraphs(method(contest))),
    ]
    return report.page(
        "forebay demo", headline(contest), lead(contest), content, f"Measured on: {machine}."
    )


def _tiles(contest: Contest) -> Iterable[report.Tile]:
    for entry in contest.entries:
        colour = COLOURS[entry.name]
        footprint = format_bytes(entry.figures.footprint_bytes)
        yield report.Tile(footprint, f"peak footprint, {entry.title}", colour)
    waited_frac = own_entry(contest).figures.waited_frac
    if waited_frac is not None:
        yield report.Tile(f"{waited_frac:.1%}", "of its time training waited for forebay")


def _footprint_section(contest: Contest) -> report.Html:
    budget_mib = contest.job.budget_bytes / MIB
    figure = report.line_figure(
        [_curve(each, _fed) for each in contest.entries],
        x_title="seconds since the first batch was asked for",
        y_title="held for feeding, MiB",
        levels=[report.Level(f"budget of forebay: {budget_mib:,.0f} MiB", "--forebay", budget_mib)],
        bands=[report.Band("--forebay-soft", 0, budget_mib)],
        moments=_kills(contest, _fed),
    )
    words = (
        "Batches in shared memory and the workers' own memory, read from outside while the model "
        "trains."
    )
    return report.section("What the loader held", figure, lead=words + _about_kills(contest))


def _whole_job_section(contest: Contest) -> report.Html:
    need_bytes, limit_bytes = contest.own_need_bytes, contest.limit_bytes
    limit = "limit" if contest.unenforced is None else "limit, not enforced here"
    own = f"the job without a loader: {format_bytes(need_bytes)}"
    figure = report.line_figure(
        [_curve(each, _held) for each in contest.entries],
        x_title="seconds since the first batch was asked for",
        y_title="memory of the whole job, MiB",
        levels=[
            report.Level(f"{limit}: {format_bytes(limit_bytes)}", "--limit", limit_bytes / MIB),
            report.Level(own, "--muted", need_bytes / MIB),
        ],
        y_from=Y_FROM_FRAC * need_bytes / MIB,
        moments=_kills(contest, _held),
    )
    words = (
        "The same runs with the training itself: all anonymous and shared memory of the training "
        "process and its workers. The waves are the training's own, one a step."
    )
    return report.section("The whole job", figure, lead=words)


def _about_kills(contest: Contest) -> str:
    if all(each.limited is each.measured for each in contest.entries):
        return ""
    return (
        " A cross marks where the kernel killed a run at the limit; the line of its colour is the "
        "same run again without a limit, to show what it would have needed."
    )


def _curve(entry: Entry, measure: Measure) -> report.Curve:
    run = entry.measured
    start_s = run.marks.get("baseline", 0.0)
    kept = thinned(run.trace.between(start_s, run.marks.get("end", math.inf)), measure)
    again = run is not entry.limited
    return report.Curve(
        name=f"{entry.title}, without limit" if again else entry.title,
        colour=COLOURS[entry.name],
        x=[round(each.t_s - start_s, 3) for each in kept],
        y=[round(measure(each) / MIB, 1) for each in kept],
        width=1.6 if again else 2.4,
    )


def _kills(contest: Contest, measure: Measure) -> list[report.Moment]:
    killed = (each for each in contest.entries if isinstance(each.limited.ending, Killed))
    return [_kill(each, measure) for each in killed if each.limited.trace.samples]


def _kill(entry: Entry, measure: Measure) -> report.Moment:
    """The kernel kills when the whole job is largest."""
    run = entry.limited
    top = max(run.trace.samples, key=_held)
    return report.Moment(
        name=f"{entry.title} {ending_words(run)}",
        colour=COLOURS[entry.name],
        x=round(max(0.0, top.t_s - run.marks.get("baseline", top.t_s)), 3),
        y=round(measure(top) / MIB, 1),
    )


def thinned(
    samples: Sequence[Sample], measure: Measure, buckets: int = CURVE_BUCKETS
) -> list[Sample]:
    """At most two samples of each bucket, the least and the most, in the order of time."""
    if len(samples) <= 2 * buckets:
        return list(samples)
    edges = [index * len(samples) // buckets for index in range(buckets + 1)]
    kept: list[Sample] = []
    for low, high in pairwise(edges):
        within = samples[low:high]
        pair = {min(within, key=measure), max(within, key=measure)}
        kept.extend(sorted(pair, key=lambda each: each.t_s))
    return kept


def _held(sample: Sample) -> int:
    return sample.held_bytes


def _fed(sample: Sample) -> int:
    return sample.fed_bytes


def _table_section(contest: Contest) -> report.Html:
    rows = [
        _html_row(entry, words)
        for entry, words in zip(contest.entries, table_rows(contest), strict=True)
    ]
    notes = []
    if any(each.limited is not each.measured for each in contest.entries):
        notes.append(
            "Figures of a contestant that was killed are from its second run, without a limit."
        )
    waits = [each.figures.waited_frac for each in contest.entries]
    if all(each is not None and each < SELDOM_FRAC for each in waits):
        notes.append(
            "Training hardly waited for batches in any of them: images/s is then the speed of the "
            "training itself, and of whatever else the machine did at that time."
        )
    if saw_same_batches(contest):
        notes.append("Equal losses are no accident: the batches were equal bit for bit.")
    return report.section(
        "The three in numbers", report.table(TABLE_COLUMNS, rows), report.notes(notes)
    )


def _html_row(entry: Entry, words: Sequence[str]) -> list[report.Cell]:
    name, ending, *rest = words
    mood = {Finished: "good", Killed: "bad", Broken: "bad"}[type(entry.limited.ending)]
    source = report.swatch(name, COLOURS[entry.name])
    return [source, report.marked(ending, mood), *(report.Text(_unbroken(each)) for each in rest)]


def _unbroken(words: str) -> str:
    """A number and its unit stay on one line."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def _parts_section(contest: Contest) -> report.Html:
    figures = [each.figures for each in contest.entries]
    figure = report.bar_figure(
        [each.title for each in contest.entries],
        [
            report.Bars(
                "workers' own memory",
                "--part-workers",
                [each.workers_anon_bytes / MIB for each in figures],
            ),
            report.Bars(
                "shared memory (batches)",
                "--part-shared",
                [each.shmem_bytes / MIB for each in figures],
            ),
        ],
        value_title="MiB, each part at its own peak",
    )
    words = (
        "Each part of the footprint at its highest. Their peaks need not fall together, so a bar "
        "may be longer than the peak footprint."
    )
    return report.section("Where the bytes were", figure, lead=words)


def _loss_section(contest: Contest) -> report.Html:
    figure = report.line_figure(
        [
            report.Curve(
                name=entry.title,
                colour=COLOURS[entry.name],
                x=[step.number + 1 for step in entry.measured.steps],
                y=[round(step.loss, 5) for step in entry.measured.steps],
                dash=dash,
            )
            for entry, dash in zip(contest.entries, ("solid", "dash", "dot"), strict=True)
        ],
        x_title="step",
        y_title="loss",
    )
    words = (
        "The task: by how many quarters was this photograph turned? Nobody had to label anything."
    )
    if saw_same_batches(contest):
        words += " The three lines lie on each other, since all saw the same batches."
    return report.section("The training was real", figure, lead=words)
