"""The file of one `forebay survive`: named by date and commit, and never written over.

Covers: its name, where it was taken, writing, reading, merging. Does not cover: what is in an
outcome (outcome.py), tables (observe/survive_words.py).
"""

from __future__ import annotations

import datetime as dt
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from forebay.bench.machine import read_machine
from forebay.bench.survive.outcome import Contestant, Outcome, as_data, read_data
from forebay.errors import ForebayError


class RecordUnreadable(ForebayError, ValueError):  # noqa: N818 - named for what it is about
    """A file was named that no `forebay survive` of this format wrote."""

    def __init__(self, path: Path, why: Exception) -> None:
        super().__init__(
            f"{path} is no record of `forebay survive` ({why}). Nothing was shown or written. "
            "Name a .json file that the command wrote."
        )
        self.path = path


def read_place(rounds: int, seconds: float) -> dict[str, Any]:
    """Where and how it is measured: the machine in words, date, commit, lengths."""
    date = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
    return {
        "words": str(read_machine()),
        "date": date,
        "commit": read_commit(Path(__file__).parent),
        "rounds": rounds,
        "seconds": seconds,
    }


def read_commit(folder: Path) -> str:
    """The commit of the source, `+` behind it when files differ; "released" where there is none."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words],  # noqa: S607 - whichever git the user has
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:  # no git here
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A package that is installed inside somebody else's checkout is not of its commit.
    if not git("ls-files", "--", "record.py"):
        return "released"
    changed = git("status", "--porcelain", "--", "../..")
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


@final
@dataclass(frozen=True, slots=True)
class Record:
    """What one command measured, or several put together.

    Attributes:
        place: Where, when and how; a merged one names each of its sources.
        outcomes: In the order in which they were taken.
        contestants: Those that were run.
    """

    place: dict[str, Any]
    outcomes: tuple[Outcome, ...]
    contestants: tuple[Contestant, ...]


def save(folder: Path, record: Record) -> Path:
    """Write a file of its own.

    Raises:
        FileExistsError: There is one of this second and commit already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stamp = record.place["date"].replace("-", "").replace(":", "").partition("+")[0]
    path = folder / f"{stamp}-survive-{record.place['commit'].rstrip('+')}.json"
    with path.open("x", encoding="utf-8") as file:
        json.dump(as_data(record.outcomes, record.place, record.contestants), file, indent=1)
        file.write("\n")
    return path


def load(path: Path) -> Record:
    """What `save` wrote.

    Raises:
        RecordUnreadable: The file is no such record.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        outcomes, contestants = read_data(data)
        place = dict(data["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordUnreadable(path, error) from None
    # The first version of the command kept neither.
    written = dt.datetime.fromtimestamp(path.stat().st_mtime, dt.timezone.utc)
    place.setdefault("date", written.isoformat(timespec="seconds"))
    place.setdefault("commit", "unknown")
    return Record(place, outcomes, contestants)


def merge(records: Sequence[Record]) -> Record:
    """Several as one: of a workload that is in more than one, the last counts. Pure.

    Whole workloads are taken, never rows of one: what stands side by side in a row was measured
    side by side.
    """
    last = {o.workload: number for number, each in enumerate(records) for o in each.outcomes}
    outcomes = tuple(
        outcome
        for number, each in enumerate(records)
        for outcome in each.outcomes
        if last[outcome.workload] == number
    )
    contestants = {each.label: each for record in records for each in record.contestants}
    sources = [
        {**each.place, "workloads": [name for name, at in last.items() if at == number]}
        for number, each in enumerate(records)
    ]
    place = {**records[-1].place, "sources": sources} if len(records) > 1 else records[-1].place
    return Record(place, outcomes, tuple(contestants.values()))


def describe_place(place: dict[str, Any]) -> list[str]:
    """Where and when, one sentence a source. Pure."""
    return [_describe(each) for each in place.get("sources", [place])]


def _describe(source: dict[str, Any]) -> str:
    words = source.get("words", "a machine that is not named")
    if "date" in source:
        words = f"{source['date'][:10]} on {words}; commit {source['commit']}"
    if "seconds" in source:
        words += f"; {source['rounds']} round(s), {source['seconds']:g} s each"
    workloads = source.get("workloads")
    what = f": {', '.join(workloads)}" if workloads else ""
    note = source.get("note", "")
    return f"Measured {words}{what}.{' ' if note else ''}{note}"
