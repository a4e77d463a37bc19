"""`forebay survive` refuses what it does not know before it runs anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.bench.cgroup import GroupUnavailable, MemoryGroup
from forebay.bench.survive.outcome import make_contestants
from forebay.bench.survive.record import Record, save
from forebay.cli import app
from tests.bench.test_survive import PLACE, outcome


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("--workload", "nothing", "tiny images"),
        ("--contestant", "nobody", "forebay"),
        ("--budget", "huge", "tight, medium, roomy"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    option: str, value: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    result = CliRunner().invoke(app, ["survive", option, value])
    assert result.exit_code == 2
    assert value in result.output
    assert known in result.output


def test_where_no_group_can_be_made_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: MemoryGroup) -> MemoryGroup:
        raise GroupUnavailable("No memory cgroup can be made here.", "Run as root.")

    monkeypatch.setattr(MemoryGroup, "__enter__", refuse)
    result = CliRunner().invoke(app, ["survive"])
    assert (result.exit_code, "Run as root." in result.output) == (1, True)


def test_records_are_put_together_without_a_run(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="needs the extra `demo` (plotly)")
    contestants = make_contestants(2)
    later = {**PLACE, "date": "2026-01-02T03:04:06+00:00"}
    paths = [
        save(tmp_path / "in", Record(PLACE, (outcome(),), contestants)),
        save(tmp_path / "in", Record(later, (outcome(workload="volumes"),), contestants)),
    ]
    words = [word for path in paths for word in ("--merge", str(path))]
    result = CliRunner().invoke(app, ["survive", *words, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("*-survive-*.json")
    found = [each["workload"] for each in json.loads(written.read_text())["outcomes"]]
    assert found == ["tiny images", "volumes"]
    assert written.with_suffix(".html").exists()


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "no.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["survive", "--merge", str(path), "--out", str(tmp_path)])
    assert (result.exit_code, "is no record" in result.output) == (2, True)
