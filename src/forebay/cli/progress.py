"""What the terminal shows while a contest is held: one bar a run, with live numbers.

Covers: being an `Audience` (bench/contest.py) on a rich console. Does not cover: results.
"""

from __future__ import annotations

from types import TracebackType
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

from forebay.bench.contestant import Broken, Finished, Killed, Run, Step
from forebay.units import format_bytes


@final
class Watch:
    """A context manager; draws on `console` while open, and leaves the finished bars there."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description:<32}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            console=console,
        )
        self._task = TaskID(0)
        self._highest_bytes = 0

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
        self._highest_bytes = 0
        self._task = self._progress.add_task(title, total=steps or None, news="starting")

    def steps(self, step: Step, held_bytes: int) -> None:
        """Move the bar."""
        self._highest_bytes = max(self._highest_bytes, held_bytes)
        news = f"loss {step.loss:.3f}  job holds {format_bytes(held_bytes)}"
        self._progress.update(self._task, completed=step.number + 1, news=news)

    def ends(self, run: Run) -> None:
        """Say how it ended."""
        match run.ending:
            case Finished():
                news = f"[green]done[/green], peak {format_bytes(run.trace.peak_bytes())}"
            case Killed():
                news = f"[red]killed at the limit[/red] after {len(run.steps)} steps"
            case Broken(why):
                news = f"[red]failed[/red]: {why.splitlines()[-1]}"
        done = len(run.steps) or 1
        total = max(done, 1) if isinstance(run.ending, Finished) else None
        self._progress.update(self._task, completed=done, news=news)
        if total is not None:
            self._progress.update(self._task, total=total)
        self._progress.stop_task(self._task)
