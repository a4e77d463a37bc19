"""The survive page holds a figure a workload, the table, and forebay's own words."""

from __future__ import annotations

import pytest

from forebay.bench.survive.outcome import Outcome, make_cases, make_contestants
from forebay.observe.survive_page import survive_page

pytest.importorskip("plotly", reason="needs the extra `demo` (plotly)")

MIB = 1024**2


def made_up(contestant: str, budget_mib: int, speed: float) -> Outcome:
    return Outcome(
        workload="tiny <images>",
        budget_bytes=budget_mib * MIB,
        contestant=contestant,
        round=0,
        verdict="survived" if speed else "killed",
        who="" if speed else "main",
        why="",
        samples_per_s=speed,
        peak_bytes=20 * MIB,
        kept=bool(speed),
        batches=9,
        digest="aa",
        oom_kills=0 if speed else 1,
        explain="budget 40 MiB & more" if contestant == "forebay" else "",
    )


def test_the_page_shows_curves_verdicts_and_explanations() -> None:
    outcomes = [
        made_up(name, budget, speed)
        for budget, torchs in ((40, 0.0), (80, 90.0))
        for name, speed in (("torch", torchs), ("forebay", 100.0))
    ]
    cases = make_cases(outcomes, make_contestants(2))
    page = survive_page(cases, outcomes, "a made-up machine")
    assert "tiny &lt;images&gt;" in page
    assert "killed (main)" in page
    assert "budget 40 MiB &amp; more" in page
    assert "a made-up machine" in page
    assert "samples a second" in page


def test_each_kill_has_its_cross_and_no_survivor_is_one() -> None:
    outcomes = [
        made_up(name, budget, speed)
        for budget in (40, 80)
        for name, speed in (("torch", 0.0), ("torch, recipe", 0.0), ("forebay", 100.0))
    ]
    page = survive_page(make_cases(outcomes, make_contestants(2)), outcomes, "a machine")
    crosses = [page.count(f'"name":"{words}"') for words in ("torch as it comes: killed",)]
    crosses.append(page.count('"name":"torch, the article\'s recipe: killed"'))
    crosses.append(page.count('"name":"torch\'s best with workers: none"'))
    assert crosses == [2, 2, 2]
