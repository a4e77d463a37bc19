"""`forebay demo`: the same real training, fed three ways, under one memory limit.

Covers: the options, the photographs, progress, the table in the terminal, the
page. Does not cover: the contest itself (bench/contest.py), the page's content
(observe/demo_page.py, demo_words.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.bench.contest import Contest, Entry


def demo(
    limit: Annotated[
        str | None,
        typer.Option(
            help='Memory limit for the whole job, such as "600MiB". '
            "Default: what the job needs without a loader + the budget + 48 MiB."
        ),
    ] = None,
    budget: Annotated[str, typer.Option(help="The budget that forebay is given.")] = "200MiB",
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each contestant.")] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Photographs in a batch.")] = 64,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of each loader.")] = 2,
    images: Annotated[
        Path | None,
        typer.Option(help="A folder of your own .jpg or .png files, instead of the built-in ones."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html.")] = Path("forebay-demo"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON instead of a table.")
    ] = False,
) -> None:
    """Train the same model on the same photographs, fed by torch and by forebay, and compare.

    Takes about three minutes on two cores. Writes a page that works offline.
    """
    from rich.console import Console

    limit_bytes = None if limit is None else _bytes_of("--limit", limit)
    budget_bytes = _bytes_of("--budget", budget)
    console = Console(stderr=True)
    # Ended by a supervisor: clean up as for Ctrl-C, or a memory group would stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with plain_errors():
        from forebay.bench.contest import broken_entries, default_threads, hold_contest
        from forebay.bench.contestant import Job
        from forebay.cli.progress import Watch

        folder = _photographs(images, console)
        job = Job(folder, steps, batch_size, workers, budget_bytes, default_threads())
        _check_enforcement(limit_bytes, console)
        with Watch(console) as watch:
            contest = hold_contest(job, limit_bytes, watch)
        page_path = _write_page(contest, out)
    if as_json:
        sys.stdout.write(json.dumps(as_data(contest), indent=2) + "\n")
    else:
        _print_table(contest)
    console.print(f"Report: [bold]{page_path}[/bold]")
    if broken_entries(contest):
        raise typer.Exit(1)


def _bytes_of(option: str, text: str) -> int:
    from forebay.units import parse_size

    size_bytes = parse_size(text)
    if size_bytes is None:
        raise typer.BadParameter(
            f'{text!r} is no size. Give bytes, or a number with a unit such as "600MiB" or "2GB".',
            param_hint=option,
        )
    return size_bytes


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Our own errors as one sentence without a traceback: 2 for wrong use, else 1."""
    from forebay.errors import ForebayError

    try:
        yield
    except (ForebayError, ModuleNotFoundError) as error:
        typer.echo(f"Error: {error_words(error)}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None
    except OSError as error:
        typer.echo(f"Error: {error}. Nothing was reported.", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(
            "Interrupted. Every process of the demo was ended; no report was written.", err=True
        )
        raise typer.Exit(130) from None


def error_words(error: Exception) -> str:
    """The sentence for an error that ends the command."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"{error.name} is needed for the demo and not installed. "
            'Install it with: pip install "forebay[demo]"'
        )
    return str(error)


def _photographs(images: Path | None, console: Console) -> Path:
    """The user's folder, checked, or ours, made if it is not there yet."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    from forebay.bench.photos import default_cache_dir, list_images, make_photos

    if images is not None:
        list_images(images)
        return images
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Cutting photographs out of real footage (once)", total=None)
        return make_photos(
            default_cache_dir(),
            lambda done, total: progress.update(task, completed=done, total=total),
        )


def _check_enforcement(limit_bytes: int | None, console: Console) -> None:
    from forebay.bench.contest import why_no_group

    reason = why_no_group()
    if reason is not None:
        refused = "--limit is not enforced. " if limit_bytes is not None else ""
        console.print(f"[yellow]Measured without a limit.[/yellow] {refused}{reason}")


def _write_page(contest: Contest, out: Path) -> Path:
    from forebay.bench.machine import read_machine
    from forebay.observe.demo_page import demo_page

    page = demo_page(contest, read_machine())
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _print_table(contest: Contest) -> None:
    from rich.console import Console
    from rich.table import Table

    from forebay.observe.demo_words import TABLE_COLUMNS, headline, lead, table_rows

    console = Console()
    console.print(f"\n[bold]{headline(contest)}[/bold]\n{lead(contest)}\n")
    table = Table(show_lines=False, pad_edge=False)
    names = [row[0] for row in table_rows(contest)]
    for name in ("", *names):
        table.add_column(name, justify="left" if not name else "right")
    for label, *cells in list(zip(TABLE_COLUMNS, *table_rows(contest), strict=True))[1:]:
        table.add_row(label, *cells)
    console.print(table)


def as_data(contest: Contest) -> dict[str, Any]:
    """The contest as plain values; curves are left out, the page has them."""
    return {
        "job": {**dataclasses.asdict(contest.job), "images": str(contest.job.images)},
        "batch_bytes": contest.job.batch_bytes,
        "own_need_bytes": contest.own_need_bytes,
        "limit_bytes": contest.limit_bytes,
        "unenforced": contest.unenforced,
        "contestants": [_entry_data(each) for each in contest.entries],
    }


def _entry_data(entry: Entry) -> dict[str, Any]:
    from forebay.bench.contestant import Broken, Finished

    ending = entry.measured.ending
    return {
        "name": entry.name,
        "under_the_limit": type(entry.limited.ending).__name__.lower(),
        "steps_under_the_limit": len(entry.limited.steps),
        "figures_are_without_limit": entry.measured is not entry.limited,
        "measured_by": entry.measured.trace.source,
        **dataclasses.asdict(entry.figures),
        "why": ending.why if isinstance(ending, Broken) else None,
        "digest": ending.digest if isinstance(ending, Finished) else None,
        "loader_stats": ending.stats if isinstance(ending, Finished) else None,
    }
