"""`forebay survive` refuses what it does not know before it runs anything."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from forebay.cli import app


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
