"""`forebay survive`: who survives under a real memory limit, and how fast.

Covers: the options, progress, the table, the record and the page. Does not cover: the runs
(bench/survive) or what the page shows (observe/survive_page.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer

from forebay.cli.demo import plain_errors

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.bench.survive.outcome import Case, Contestant, Outcome

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
    seconds: Annotated[float, typer.Option(min=0.5, help="How long each is measured.")] = 3.0,
    out: Annotated[Path, typer.Option(help="Where the record and the page go.")] = Path(
        "forebay-survive"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Run loaders under real memory limits: who survives, and how fast."""
    from rich.console import Console

    console = Console(stderr=True)
    with plain_errors():
        from forebay.bench.machine import read_machine
        from forebay.bench.survive.outcome import as_data, make_cases, make_contestants
        from forebay.bench.survive.run import run_all
        from forebay.bench.survive.workloads import WORKLOADS
        from forebay.memory.limits import usable_cpus

        contestants = make_contestants(usable_cpus())
        labels = [each.label for each in contestants]
        chosen = _choose("--contestant", contestant, labels)
        names = _choose("--workload", workload, list(WORKLOADS))
        numbers = [_BUDGETS.index(each) for each in _choose("--budget", budget, list(_BUDGETS))]
        _check_group()
        fields = [each for each in contestants if each.label in chosen]
        with _Progress(console) as progress:
            outcomes = run_all(names, numbers, fields, rounds, seconds, progress.note)
        machine = read_machine()
        data = as_data(outcomes, {"words": str(machine)}, fields)
        _write(out, data, outcomes, fields, str(machine))
    if as_json:
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        _print_table(make_cases(outcomes, fields))
    console.print(f"Record and page: [bold]{out}[/bold]")


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


def _write(
    out: Path,
    data: dict[str, object],
    outcomes: list[Outcome],
    contestants: list[Contestant],
    machine: str,
) -> None:
    from forebay.bench.survive.outcome import make_cases
    from forebay.observe.survive_page import survive_page

    out.mkdir(parents=True, exist_ok=True)
    (out / "survive.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page = survive_page(make_cases(outcomes, contestants), outcomes, machine)
    (out / "survive.html").write_text(page, encoding="utf-8")


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
