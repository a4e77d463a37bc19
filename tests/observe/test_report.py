"""The pieces of a report hold their data and need nothing from outside."""

from __future__ import annotations

import json
import re

import pytest

from forebay.observe import report

pytest.importorskip("plotly", reason="needs the extra `demo` (plotly)")


def spec_of(figure: report.Html) -> dict[str, list[dict[str, object]]]:
    found = re.search(r'<script type="application/json">(.*?)</script>', figure.source, re.DOTALL)
    assert found is not None
    spec: dict[str, list[dict[str, object]]] = json.loads(found.group(1))
    return spec


def a_line(name: str = "a") -> report.Html:
    curve = report.Curve(name, "--forebay", [0, 1, 2], [5, 7, 6])
    return report.line_figure([curve], x_title="x", y_title="y")


def test_a_line_figure_holds_its_points() -> None:
    (line,) = spec_of(a_line())["data"]
    assert (line["x"], line["y"]) == ([0, 1, 2], [5, 7, 6])


def test_a_bar_figure_holds_its_values() -> None:
    parts = [report.Bars("p", "--ink", [3, 4]), report.Bars("q", "--ink", [1, 2])]
    figure = report.bar_figure(["one", "two"], parts, value_title="MiB")
    assert [bar["x"] for bar in spec_of(figure)["data"]] == [[3, 4], [1, 2]]


def test_data_cannot_end_its_script() -> None:
    assert spec_of(a_line("</script><b>"))["data"][0]["name"] == "</script><b>"


def test_words_are_escaped() -> None:
    table = report.table(["", "<i>"], [[report.Text("<b>"), report.Text("a & b")]])
    assert "<b>" not in table.source
    assert "<i>" not in table.source
    assert "a &amp; b" in table.source


def test_every_cell_names_its_column_for_the_phone() -> None:
    table = report.table(["", "speed"], [[report.Text("x"), report.Text("9")]])
    assert '<td data-label="speed">9</td>' in table.source


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        report.table(["", "speed"], [[report.Text("x")]])


def test_every_colour_has_a_meaning_by_day_and_by_night() -> None:
    style = report._beside("report.css")
    day, night = style.split("@media (prefers-color-scheme: dark)")
    night = night[: night.index("\n}\n")]
    names = set(re.findall(r"(--[\w-]+):", day[: day.index("\n}\n")]))
    assert names == set(re.findall(r"(--[\w-]+):", night))
    assert names >= set(re.findall(r"var\((--[\w-]+)\)", style))


def test_a_missing_plotly_is_a_sentence_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(report.PlotlyMissing, match=r'pip install "forebay\[demo\]"'):
        a_line()
