"""The page of `forebay demo`: memory over time, the table, where the bytes are, the loss.

Covers: which figure shows what, and the words around it. Does not cover: how a
figure is made (report.py), measuring (bench/). The words follow the numbers:
where forebay is not better, the page says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

from forebay.bench.contest import Contest, Entry
from forebay.bench.contestant import Broken, Finished, Killed, Run
from forebay.bench.machine import Machine
from forebay.bench.sampler import GROUP_PERIOD_S, TREE_PERIOD_S, Sample
from forebay.observe import report
from forebay.units import MIB, format_bytes

COLOURS: Final = {
    "torch": "--torch",
    "torch-prefetch1": "--torch-one",
    "forebay": "--forebay",
}
Y_FROM_FRAC: Final = 0.5
"""The figure of the whole job starts at this part of the job's own need: what lies below is
torch itself, the same for all, and would press the difference flat."""

CURVE_BUCKETS: Final = 700
"""Points of a curve, in pairs (least and most of each bucket): as many as a wide
screen has pixels, and no peak is lost."""

SAME_FRAC: Final = 0.05
"""Differences smaller than this are not called differences: runs vary by as much."""


def demo_page(contest: Contest, machine: Machine) -> str:
    """The whole page as HTML."""
    content = [
        report.tiles(_tiles(contest)),
        _footprint_section(contest),
        _table_section(contest),
        _parts_section(contest),
        _whole_job_section(contest),
        _loss_section(contest),
        _method_section(contest),
    ]
    return report.page(
        "forebay demo", headline(contest), lead(contest), content, f"Measured on: {machine}."
    )


def headline(contest: Contest) -> str:
    """The result in one sentence, whatever it is."""
    ours, theirs = _ours(contest), _theirs(contest)
    if not isinstance(ours.limited.ending, Finished):
        return f"forebay did not finish: {ending_words(ours.limited)}."
    killed = [each for each in theirs if isinstance(each.limited.ending, Killed)]
    if killed and len(killed) == len(theirs):
        return "Under the same limit torch's loader was killed. forebay trained to the end."
    if killed:
        return f"Under the same limit {killed[0].title} was killed. forebay trained to the end."
    least = min(theirs, key=lambda each: each.figures.footprint_bytes)
    ratio = ours.figures.footprint_bytes / max(1, least.figures.footprint_bytes)
    if ratio < 1 - SAME_FRAC:
        return f"The same training with {ratio:.0%} of the memory that {least.title} took."
    return f"forebay took {ratio:.0%} of the memory of {least.title} on this machine."


def lead(contest: Contest) -> str:
    """What was done, in two or three sentences with the numbers."""
    job = contest.job
    words = (
        f"A small residual network was trained for {job.steps} steps on batches of "
        f"{job.batch_size} photographs ({format_bytes(job.batch_bytes)} each), three times: "
        f"fed by torch's DataLoader, by the same with prefetch_factor=1, and by forebay with a "
        f"budget of {format_bytes(job.budget_bytes)}."
    )
    if saw_same_batches(contest):
        words += " All three saw the very same batches, bit for bit."
    if contest.unenforced is not None:
        words += " No limit could be enforced here, so nobody was killed."
    return words


def saw_same_batches(contest: Contest) -> bool:
    """Whether every contestant finished and their checksums agree."""
    endings = [each.measured.ending for each in contest.entries]
    digests = {each.digest if isinstance(each, Finished) else None for each in endings}
    return len(digests) == 1 and None not in digests


def ending_words(run: Run) -> str:
    """How a run ended, for people."""
    match run.ending:
        case Finished(oom_kills=0):
            return "finished"
        case Finished(oom_kills=kills):
            return f"finished, {kills} killed workers replaced"
        case Killed():
            return f"killed {_after(run)}"
        case Broken(why):
            return f"failed {_after(run)}: {why.splitlines()[-1]}"


def _after(run: Run) -> str:
    count = len(run.steps)
    if not count:
        return "before its first step"
    return f"after {count} step{'s' if count > 1 else ''}"


def _ours(contest: Contest) -> Entry:
    return next(each for each in contest.entries if each.name == "forebay")


def _theirs(contest: Contest) -> list[Entry]:
    return [each for each in contest.entries if each.name != "forebay"]


def _tiles(contest: Contest) -> Iterable[report.Tile]:
    for entry in contest.entries:
        colour = COLOURS[entry.name]
        footprint = format_bytes(entry.figures.footprint_bytes)
        yield report.Tile(footprint, f"peak footprint, {entry.title}", colour)
    rate = _ours(contest).figures.images_per_s
    theirs = [each.figures.images_per_s for each in _theirs(contest)]
    known = [each for each in theirs if each is not None]
    if rate is not None and known:
        yield report.Tile(
            f"{rate / max(known):.2f}x", "forebay's images/s, against the faster torch"
        )


Measure: TypeAlias = Callable[[Sample], int]


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


TABLE_COLUMNS: Final = (
    "",
    "under the limit",
    "images/s",
    "peak of the whole job",
    "peak footprint of the loader",
    "workers' own memory",
    "shared memory (batches)",
    "training process above its own need",
    "waited for batches",
    "first batch after",
    "final loss",
)


def table_rows(contest: Contest) -> list[list[str]]:
    """The cells of `TABLE_COLUMNS` as plain text, one row a contestant, for page and terminal."""
    return [_row_words(each, contest.unenforced is None) for each in contest.entries]


def _row_words(entry: Entry, enforced: bool) -> list[str]:
    figures = entry.figures
    return [
        entry.title,
        ending_words(entry.limited) if enforced else "no limit set",
        _number(figures.images_per_s, "{:,.0f}"),
        format_bytes(figures.job_peak_bytes),
        format_bytes(figures.footprint_bytes),
        format_bytes(figures.workers_anon_bytes),
        format_bytes(figures.shmem_bytes),
        format_bytes(figures.main_growth_bytes),
        f"{figures.waited_s:.1f} s",
        _number(figures.first_batch_s, "{:.2f} s"),
        _number(figures.final_loss, "{:.4f}"),
    ]


def _number(value: float | None, form: str) -> str:
    return "not known" if value is None else form.format(value)


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


def _method_section(contest: Contest) -> report.Html:
    job = contest.job
    grouped = contest.unenforced is None
    where = (
        f"a memory cgroup of its own, entered before the program starts, and is read from outside "
        f"every {GROUP_PERIOD_S * 1000:.0f} ms (anonymous and shared memory; file pages that the "
        "kernel can drop are not counted)"
        if grouped
        else f"a process tree that is read from outside every {TREE_PERIOD_S * 1000:.0f} ms "
        "(proportional set sizes; short peaks may be missed), since no cgroup could be made"
    )
    setting = (
        f"Every contestant runs alone in a fresh process, one after another, in {where}. "
        f"Each has {job.workers} workers; training uses {job.threads} thread(s) in all three."
    )
    texts = [setting, *MEANING]
    texts.append(_limit_words(contest) if contest.unenforced is None else contest.unenforced)
    return report.section("How it was measured", report.paragraphs(texts))


MEANING: Final = (
    (
        "The footprint of the loader is, at each moment, what the whole job holds less what the "
        "training process itself holds: the workers' own memory, and all shared memory, which is "
        "the batches, also the one being trained on. Memory that a forked worker only shares with "
        "the training process is not the worker's."
    ),
    (
        "What a loader adds inside the training process cannot be told from training by looking. "
        "It is bounded instead: before it asks for a batch, the job trains a throw-away model on "
        "one made-up batch and gives that memory back. The peak of that, less the made-up batch, "
        "is the job's own need. How far the training process later rises above its own part of "
        "it stands in the table; some 20 MiB of that are training itself, which peaks differently "
        "in each run. Batches that a loader copies into the training process are in there too."
    ),
    (
        "Speed is measured from the end of the first step; the time to the first batch has a "
        "column of its own."
    ),
)


def _limit_words(contest: Contest) -> str:
    return (
        f"The limit was {format_bytes(contest.limit_bytes)}. Unless you chose another it is the "
        f"job's own need ({format_bytes(contest.own_need_bytes)}), plus the budget given to "
        f"forebay ({format_bytes(contest.job.budget_bytes)}), plus a little for the kernel. Swap "
        "counts. Whoever is killed runs once more without it."
    )
