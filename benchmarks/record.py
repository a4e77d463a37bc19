"""What a benchmark run leaves behind: measures, and where they were taken.

Covers: the record of a run, its file under `results/` (one a run, never written
twice) and the facts about the machine. Does not cover: taking measures (run.py),
making sense of them (report.py).

The idea: a file holds raw measures only. Medians, ratios and spreads are worked
out when a table is made, so a table can always be made anew from the files.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "numpy", "pillow")  # forebay is named by its commit


@dataclass(frozen=True, slots=True)
class Measure:
    """One contestant, once. `values` is empty when `error` says why there are none."""

    line: str
    workload: str
    contestant: str
    round: int
    values: dict[str, float]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One run of the benchmark. Measures are in the order in which they were taken."""

    date: str
    commit: str
    mode: str
    machine: dict[str, Any]
    versions: dict[str, str]
    notes: dict[str, str]
    measures: tuple[Measure, ...]


def read_machine() -> dict[str, Any]:
    """What a reader has to know about the machine; nothing that names it."""
    facts = _first_lines(Path("/proc/cpuinfo"))
    return {
        "processor": facts.get("model name", platform.processor() or platform.machine()),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "virtual": "hypervisor" in facts.get("flags", "").split(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "shmem_huge_pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def read_versions() -> dict[str, str]:
    """The interpreter and the packages that matter."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def read_commit() -> str:
    """The commit of the tree, with `+` when the measured code differs from it."""
    root = Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        ).stdout.strip()

    commit = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    return (commit or "unknown") + ("+" if changed else "")


def now_utc() -> str:
    """The time in UTC, to the second."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


def save(record: Record) -> Path:
    """Write `record` to a file of its own; raises FileExistsError rather than write over one."""
    RESULTS.mkdir(exist_ok=True)
    stamp = record.date.replace("-", "").replace(":", "").partition("+")[0]
    path = RESULTS / f"{stamp}-{record.mode}-{record.commit.rstrip('+')}.json"
    with path.open("x", encoding="utf-8") as file:
        json.dump(asdict(record), file, indent=1)
        file.write("\n")
    return path


def load(path: Path) -> Record:
    """The record in `path`."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    measures = tuple(Measure(**measure) for measure in raw.pop("measures"))
    return Record(measures=measures, **raw)


def newest(mode: str | None = None) -> Path | None:
    """The latest file of results, or None without one; names start with the date."""
    return max(RESULTS.glob(f"*-{mode or '*'}-*.json"), default=None)


def _first_lines(path: Path) -> dict[str, str]:
    """`key: value` lines up to the first empty one."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _chosen(path: Path) -> str:
    """The word in brackets of a kernel file such as `always [never]`."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"
