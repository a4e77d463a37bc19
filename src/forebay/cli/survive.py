"""`forebay survive`: who survives under a real memory limit, and how fast.

Covers: the options, progress, the table, the record and the page. Does not cover: the runs
(bench/survive) or what the page shows (observe/survive_page.py).
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer

from forebay.cli.demo import plain_errors

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.bench.survive.outcome import Case, Outcome
    from forebay.bench.survive.record import Record

_BUDGETS = ("tight", "medium", "roomy")


def survive(
    workload: Annotated[
        list[str] | None, typer.Option(help="A workload; again for more. Default: all.")
    ] = None,
    contestant: Annotated[
        list[str] | None, typer.Option(help="A contestant; again for more. Default: all.")
    ] = None,
    budget: Annotated[
        list[str] | None, typer.Option(help="tight, medium or roomy; again for more.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is run.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long each is measured.")] = 6.0,
    merge: Annotated[
        list[Path] | None,
        typer.Option(help="Run nothing: put this record and others together and show them."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the record and the page go.")] = Path(
        "forebay-survive"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Run loaders under real memory limits: who survives, and how fast."""
    from rich.console import Console

    console = Console(stderr=True)
    # Ended by a supervisor: clean up as for Ctrl-C, or a memory group would stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with plain_errors():
        if merge:
            from forebay.bench.survive.record import load
            from forebay.bench.survive.record import merge as put_together

            record = put_together([load(path) for path in merge])
        else:
            record = _measure(workload, contestant, budget, rounds, seconds, console)
        path = _write(out, record)
    _print(record, as_json=as_json)
    console.print(f"Record and page: [bold]{path}[/bold]")


def _measure(
    workload: list[str] | None,
    contestant: list[str] | None,
    budget: list[str] | None,
    rounds: int,
    seconds: float,
    console: Console,
) -> Record:
    """Run what was asked for."""
    from forebay.bench.survive.outcome import make_contestants
    from forebay.bench.survive.record import Record, read_place
    from forebay.bench.survive.run import run_all
    from forebay.bench.survive.workloads import WORKLOADS
    from forebay.memory.limits import usable_cpus

    contestants = make_contestants(usable_cpus())
    chosen = _choose("--contestant", contestant, [each.label for each in contestants])
    names = _choose("--workload", workload, list(WORKLOADS))
    numbers = [_BUDGETS.index(each) for each in _choose("--budget", budget, list(_BUDGETS))]
    _check_group()
    skipped = [why for name in names if (why := WORKLOADS[name].why_skipped)]
    for why in skipped:
        console.print(f"[yellow]Skipped.[/yellow] {why}")
    names = [name for name in names if not WORKLOADS[name].why_skipped]
    fields = tuple(each for each in contestants if each.label in chosen)
    place = {**read_place(rounds, seconds), "skipped": skipped}
    try:
        with _Progress(console) as progress:
            outcomes = run_all(names, numbers, fields, rounds, seconds, progress.note)
    except KeyboardInterrupt:
        typer.echo(
            "Interrupted. Every run was ended; no record and no page were written.", err=True
        )
        raise typer.Exit(130) from None
    return Record(place, tuple(outcomes), fields)


def _choose(option: str, given: list[str] | None, known: list[str]) -> list[str]:
    for name in given or ():
        if name not in known:
            raise typer.BadParameter(
                f"{name!r} is not known. Known: {', '.join(known)}.", param_hint=option
            )
    return list(given or known)


def _check_group() -> None:
    """Fail before the first run where no memory group can be made."""
    from forebay.bench.cgroup import MemoryGroup

    with MemoryGroup():
        pass


@final
class _Progress:
    """One bar over all runs; says how the latest ended."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("Starting", total=None)

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def note(self, outcome: Outcome, number: int, total: int) -> None:
        """A run has ended."""
        said = f"{outcome.workload}, {outcome.contestant}: {outcome.verdict}"
        self._progress.update(self._task, description=said, completed=number, total=total)


def _write(out: Path, record: Record) -> Path:
    """The record, in a file of its own, and its page beside it."""
    from forebay.bench.survive.outcome import make_cases
    from forebay.bench.survive.record import describe_place, save
    from forebay.observe.survive_page import survive_page

    cases = make_cases(record.outcomes, record.contestants)
    page = survive_page(cases, record.outcomes, " ".join(describe_place(record.place)))
    path = save(out, record)
    path.with_suffix(".html").write_text(page, encoding="utf-8")
    return path


def _print(record: Record, *, as_json: bool) -> None:
    from forebay.bench.survive.outcome import as_data, make_cases

    if as_json:
        data = as_data(record.outcomes, record.place, record.contestants)
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        _print_table(make_cases(record.outcomes, record.contestants))


def _print_table(cases: tuple[Case, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    from forebay.observe.survive_words import COLUMNS, summarise_cases, table_rows

    console = Console()
    table = Table(pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    for row in table_rows(cases):
        table.add_row(*row)
    console.print(table)
    for line in summarise_cases(cases):
        console.print(line)
