"""The survive table in words: one row a workload and budget. Pure.

Covers: cells, the markdown table, the summary. Does not cover: the page (survive_page.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.bench.survive.outcome import Case, Row
from forebay.units import MIB

COLUMNS = (
    "workload",
    "budget",
    "torch as it comes",
    "the recipe",
    "torch's best with workers",
    "torch without workers",
    "forebay",
    "of the best with workers",
    "of that without",
    "peak",
)

GOAL_FRAC = 0.95
"""Of torch's best that survives: below it forebay loses."""


def say_row(row: Row | None, *, with_label: bool = False) -> str:
    """How one contestant fared: samples/s, or how it ended."""
    if row is None:
        return "not run"
    if row.verdict == "killed":
        return f"killed ({row.who})" if row.who else "killed"
    if row.verdict == "broken":
        return "failed"
    speed = f"{row.samples_per_s:,.0f}/s"
    return f"{speed} ({row.label})" if with_label else speed


def say_ratio(case: Case) -> str:
    """forebay's speed beside that of torch's best workers."""
    if case.forebay is None or case.forebay.verdict != "survived":
        return ""
    if case.ratio is None:
        return "only one alive" if case.is_lone else ""
    return f"{case.ratio:.2f}"


def say_ratio_alone(case: Case) -> str:
    """The same beside torch without workers."""
    return f"{case.ratio_alone:.2f}" if case.ratio_alone else ""


def say_peak(case: Case) -> str:
    """What forebay held at most, and whether that was within its budget."""
    if case.forebay is None or case.forebay.verdict != "survived":
        return ""
    peak = f"{case.forebay.peak_bytes / MIB:.0f} MiB"
    return peak if case.forebay.kept else f"{peak}, broken"


def table_rows(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """One row a case, without the head."""
    return [
        (
            case.workload,
            f"{case.budget_bytes / MIB:.0f} MiB",
            say_row(case.default),
            say_row(case.recipe),
            say_row(case.best, with_label=True) if case.best else "none survived",
            say_row(case.alone),
            say_row(case.forebay),
            say_ratio(case),
            say_ratio_alone(case),
            say_peak(case),
        )
        for case in cases
    ]


def summarise_cases(cases: Sequence[Case]) -> list[str]:
    """What the whole table comes to, one sentence a line; where forebay loses, too."""
    ours = [case for case in cases if case.forebay is not None]
    alive = [case for case in ours if case.forebay and case.forebay.verdict == "survived"]
    kept = [case for case in alive if case.forebay and case.forebay.kept]
    lone = [case for case in alive if case.is_lone]
    default = _count_alive([case.default for case in cases])
    recipe = _count_alive([case.recipe for case in cases])
    slow = [case for case in alive if case.ratio is not None and case.ratio < GOAL_FRAC]
    outrun = [case for case in alive if (case.ratio_alone or 1.0) < GOAL_FRAC]
    first = (
        f"Of {len(ours)} workloads within a budget, forebay survived {len(alive)} and kept the "
        f"budget in {len(kept)}; torch as it comes survived {default}, with the article's "
        f"recipe {recipe}."
    )
    lines = [first, f"In {len(lone)} no setting of torch's survived where forebay did."]
    lines += [
        (
            f"Slower than {GOAL_FRAC:.2f} of torch's best surviving workers in {len(slow)}"
            f"{_name(slow)}."
        ),
        (
            f"Slower than {GOAL_FRAC:.2f} of torch without workers in {len(outrun)}"
            f"{_name(outrun)}. There each batch is made in the training process itself, and moves "
            "nowhere: which is fastest where making one costs less than moving it, or where the "
            "consumer, as in most of these workloads, has nothing to do meanwhile."
        ),
    ]
    odd = [case.workload for case in cases if case.is_same is False]
    unknown = sum(case.is_same is None for case in cases)
    lines.append(
        f"Other batches than torch's: {', '.join(odd) if odd else 'none'}; not compared, since "
        f"torch with as many workers survived nowhere: {unknown} of {len(cases)}."
    )
    return lines


def _name(cases: Sequence[Case]) -> str:
    names = [f"{case.workload} at {case.budget_bytes / MIB:.0f} MiB" for case in cases]
    return f": {', '.join(names)}" if names else ""


def _count_alive(rows: Sequence[Row | None]) -> str:
    run = [row for row in rows if row is not None]
    if not run:
        return "nowhere, since it was not run"
    return f"{sum(row.verdict == 'survived' for row in run)} of {len(run)}"


def markdown(cases: Sequence[Case]) -> str:
    """The table for a page of the docs."""
    head = f"| {' | '.join(COLUMNS)} |"
    rule = "| --- | " + " | ".join("---:" for _ in COLUMNS[1:]) + " |"
    rows = [f"| {' | '.join(row)} |" for row in table_rows(cases)]
    return "\n".join([head, rule, *rows])
