"""The tables of the benchmark say what the raw measures say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPORT = Path(__file__).parents[2] / "benchmarks" / "report.py"


def transport(contestant: str, number: int, batches_per_s: float | None) -> dict[str, Any]:
    failed = batches_per_s is None
    return {
        "line": "transport",
        "workload": "3.1 MB",
        "contestant": contestant,
        "round": number,
        "values": {} if failed else {"batches_per_s": batches_per_s},
        "error": "no answer within 60 s" if failed else None,
    }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two rounds in which torch halves: the ratios are 4 and 10, that of the medians is 6."""
    record = {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789",
        "mode": "quick",
        "machine": {
            "processor": "a processor",
            "cpus": 2,
            "memory_gib": 8.0,
            "virtual": True,
            "system": "Linux",
        },
        "versions": {"torch": "2.13.0"},
        "notes": {},
        "measures": [
            transport("torch", 0, 200.0),
            transport("forebay", 0, 800.0),
            transport("torch", 1, 100.0),
            transport("forebay", 1, 1000.0),
            transport("ceiling: two processes", 0, 1800.0),
            transport("torch prefetch 1", 0, None),
        ],
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(record))
    return path


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPORT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_ratios_are_taken_within_a_round(results: Path) -> None:
    assert "**7.00 x (4.00 to 10.0)**" in report(results).stdout


def test_the_share_of_the_ceiling_is_that_of_the_medians(results: Path) -> None:
    assert "| 50% |" in report(results).stdout


def test_a_contestant_that_failed_is_named_with_its_reason(results: Path) -> None:
    assert "3.1 MB, torch prefetch 1, round 1: no answer within 60 s" in report(results).stdout


def test_the_page_is_changed_between_the_markers_only(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark: begin -->\nold\n<!-- benchmark: end -->\nafter\n")
    report(results, "--page", page)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1], "old" in lines) == ("before", "after", False)


def test_a_page_without_markers_is_left_alone(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n")
    assert report(results, "--page", page).returncode != 0
    assert page.read_text() == "before\n"
