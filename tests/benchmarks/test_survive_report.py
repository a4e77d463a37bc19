"""The survive table gets into its page, between the marker lines and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.bench.survive.outcome import make_contestants
from forebay.bench.survive.record import Record, save
from tests.bench.test_survive import PLACE, outcome

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "survive_report.py"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    outcomes = (outcome("torch", 50.0), outcome("forebay", 100.0))
    return save(tmp_path, Record(PLACE, outcomes, make_contestants(2)))


def report(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_table_is_printed(results: Path) -> None:
    done = report(results)
    assert "| tiny images | 40 MiB | 50/s |" in done.stdout, done.stderr
    assert "commit 0123456789+" in done.stdout


def test_the_table_replaces_what_lies_between_the_markers(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- survive: begin -->\nold\n<!-- survive: end -->\nafter\n")
    assert report(results, "--page", page).returncode == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- survive: begin -->")
    assert text.endswith("<!-- survive: end -->\nafter\n")
    assert ("old" in text, "tiny images" in text) == (False, True)


def test_a_page_without_markers_is_left_alone(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no place\n")
    done = report(results, "--page", page)
    assert (done.returncode, "Add the lines" in done.stderr) == (1, True)
    assert page.read_text() == "no place\n"
