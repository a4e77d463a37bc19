"""The `forebay` command: one small file a subcommand.

Covers: the entry point and which subcommands there are. Does not cover: what they
do (demo.py and its neighbours, each of which imports what it needs when it runs,
so that `forebay --help` answers at once).

Exit codes: 0 fine, 1 what was asked for could not be done, 2 wrong use,
130 interrupted.
"""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.demo import demo
from forebay.cli.survive import survive

app = typer.Typer(
    name="forebay",
    help="A drop-in PyTorch DataLoader that holds a byte budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(survive)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"forebay {version('forebay')}")
        except PackageNotFoundError:
            typer.echo("forebay, run from its source without being installed")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """A drop-in PyTorch DataLoader that holds a byte budget."""


def main() -> None:
    """What the console script calls."""
    app()
