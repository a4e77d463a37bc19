"""What the terminal shows while a contest is held: one bar a run, with live numbers.

Covers: being an `Audience` (bench/contest.py) on a rich console. Does not cover: results.
"""

from __future__ import annotations

from types import TracebackType
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

from forebay.bench.contestant import Broken, Finished, Killed, Run, Step
from forebay.units import format_bytes


@final
class Watch:
    """A context manager; draws on `console` while open, and leaves the finished bars there."""

    def __init__(self, console: Console) -> None:
        # Fits 80 columns with the longest title.
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=34)),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}", table_column=Column(no_wrap=True)),
            console=console,
        )
        self._task = TaskID(0)

    def __enter__(self) -> Watch:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def starts(self, title: str, steps: int) -> None:
        """A new bar; one that only pulses where there are no steps to count."""
        self._task = self._progress.add_task(title, total=steps or None, news="starting")

    def steps(self, step: Step, held_bytes: int) -> None:
        """Move the bar."""
        news = f"loss {step.loss:.2f}, {format_bytes(held_bytes)}"
        self._progress.update(self._task, completed=step.number + 1, news=news)

    def ends(self, run: Run) -> None:
        """Say how it ended."""
        match run.ending:
            case Finished():
                news = f"[green]done[/green], peak {format_bytes(run.trace.peak_bytes())}"
            case Killed():
                news = "[red]killed at the limit[/red]"
            case Broken(why):
                news = f"[red]failed[/red]: {why.splitlines()[-1]}"
        done = len(run.steps) or 1
        total = done if isinstance(run.ending, Finished) else None
        self._progress.update(self._task, completed=done, total=total, news=news)
        self._progress.stop_task(self._task)
