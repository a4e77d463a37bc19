"""The page of `forebay survive`: speed against budget, and who was killed.

Covers: laying out outcomes as one self-contained page. Does not cover: taking them
(bench/survive), or the pieces of a page (report.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.bench.survive.outcome import Case, Outcome, Row
from forebay.observe import report
from forebay.observe.survive_words import COLUMNS, summarise_cases, table_rows
from forebay.units import MIB

_ROLES = (
    ("default", "torch as it comes", "--torch"),
    ("recipe", "torch, the article's recipe", "--torch-one"),
    ("best", "torch's best with workers", "--ink"),
    ("alone", "torch without workers", "--muted"),
    ("forebay", "forebay", "--forebay"),
)

_METHOD = (
    (
        "Each run is a fresh process in a memory group of its own, entered before it starts. The "
        "limit is what the job holds just before its loader is made, what its consumer keeps by "
        "design, the budget, and 16 MiB for page tables and sockets. Contestants take turns."
    ),
    (
        "A run that the kernel killed is a cross at zero. Speeds count samples after the first "
        "eight batches. The peak is anonymous and shared memory beyond the level before the "
        "loader, read every 10 ms from outside."
    ),
    "torch's best is the fastest of its settings with workers that survived the same limit.",
)


def survive_page(cases: Sequence[Case], outcomes: Sequence[Outcome], machine: str) -> str:
    """The whole page, as HTML."""
    summary = summarise_cases(cases)
    return report.page(
        "forebay survive",
        "Who survives under a memory limit, and how fast",
        summary[0],
        [
            report.paragraphs(summary[1:]),
            *(_workload_section(name, cases) for name in _names(cases)),
            report.section("All figures", report.table(COLUMNS, _cells(cases))),
            *_explain_sections(outcomes),
            report.section("How it was measured", report.notes(_METHOD)),
        ],
        machine,
    )


def _names(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case.workload for case in cases))


def _cells(cases: Sequence[Case]) -> list[list[report.Cell]]:
    return [[report.Text(words) for words in row] for row in table_rows(cases)]


def _workload_section(name: str, cases: Sequence[Case]) -> report.Html:
    mine = [case for case in cases if case.workload == name]
    budgets = [case.budget_bytes / MIB for case in mine]
    if len(budgets) == 1:
        return report.section(name, report.notes(["One budget makes no curve: see the table."]))
    curves, moments = [], []
    for role, label, colour in _ROLES:
        rows: list[Row | None] = [getattr(case, role) for case in mine]
        was_run: list[Row | None] = (
            rows if role != "best" else [case.default or case.recipe for case in mine]
        )
        if not any(rows) and not any(was_run):
            continue
        speeds = [row.samples_per_s if row is not None else 0.0 for row in rows]
        curves.append(report.Curve(label, colour, budgets, speeds))
        moments += [
            report.Moment(f"{label}: {row.verdict if row else 'none'}", colour, budget, 0.0)
            for budget, row in zip(budgets, rows, strict=True)
            if row is None or row.verdict != "survived"
        ]
    figure = report.line_figure(
        curves, x_title="budget, MiB", y_title="samples a second", moments=moments
    )
    return report.section(name, figure)


def _explain_sections(outcomes: Sequence[Outcome]) -> list[report.Html]:
    texts = {o.workload: o.explain for o in outcomes if o.explain}
    return [
        report.section(f"What forebay says of itself: {name}", report.notes(text.splitlines()))
        for name, text in texts.items()
    ]
