"""Who survived, who was killed, and what follows from it; two real runs under one limit."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from forebay.bench.cgroup import GroupUnavailable, MemoryGroup
from forebay.bench.survive.outcome import (
    Contestant,
    Outcome,
    as_data,
    choose_best,
    make_cases,
    make_contestants,
    read_data,
    summarise,
)
from forebay.bench.survive.run import judge_end, run_all
from forebay.bench.survive.workloads import MIB, WORKLOADS, draw
from forebay.observe.survive_words import COLUMNS, markdown, summarise_cases, table_rows

CONTESTANTS = make_contestants(2)


def outcome(contestant: str = "torch", speed: float = 100.0, **more: Any) -> Outcome:
    usual = Outcome(
        workload="tiny images",
        budget_bytes=40 * MIB,
        contestant=contestant,
        round=0,
        verdict="survived",
        who="",
        why="",
        samples_per_s=speed,
        peak_bytes=30 * MIB,
        kept=True,
        batches=50,
        digest="abc",
        oom_kills=0,
        explain="",
    )
    return replace(usual, **more)


def killed(contestant: str = "torch", who: str = "main") -> Outcome:
    return outcome(contestant, 0.0, verdict="killed", who=who, kept=False, oom_kills=1, digest="")


@pytest.mark.parametrize(
    ("status", "has_ended", "kills", "wanted"),
    [
        (0, True, 0, ("survived", "")),
        (0, True, 2, ("survived", "worker")),
        (-9, False, 1, ("killed", "main")),
        (137, False, 3, ("killed", "main")),
        (1, False, 1, ("killed", "worker")),
        (1, False, 0, ("broken", "")),
        (-9, True, 1, ("killed", "main")),
    ],
)
def test_how_a_run_ended_follows_from_its_status_and_the_kernels_count(
    status: int, has_ended: bool, kills: int, wanted: tuple[str, str]
) -> None:
    assert judge_end(status, has_ended, kills) == wanted


def test_the_worst_round_counts_and_the_median_of_speeds() -> None:
    rounds = [outcome(speed=speed, peak_bytes=int(speed)) for speed in (90.0, 100.0, 300.0)]
    row = summarise("torch", rounds)
    assert (row.verdict, row.samples_per_s, row.peak_bytes) == ("survived", 100.0, 300)
    row = summarise("torch", [*rounds, killed()])
    assert (row.verdict, row.samples_per_s, row.who, row.kept) == ("killed", 0.0, "main", False)


def test_the_best_is_the_fastest_that_survived() -> None:
    rows = [summarise("a", [killed()]), summarise("b", [outcome()])]
    assert choose_best(rows) is rows[1]
    assert choose_best(rows[:1]) is None


def test_a_case_compares_forebay_with_the_best_of_torchs_survivors() -> None:
    outcomes = [
        killed("torch"),
        outcome("torch, recipe", 80.0),
        outcome("torch 1x1", 100.0),
        outcome("forebay", 120.0, explain="words"),
    ]
    (case,) = make_cases(outcomes, CONTESTANTS)
    assert case.best is not None
    assert (case.best.label, case.ratio, case.is_same) == ("torch 1x1", 1.2, True)
    (other,) = make_cases([*outcomes[:3], outcome("forebay", digest="xyz")], CONTESTANTS)
    assert not other.is_same
    (lone,) = make_cases([killed("torch"), outcome("forebay")], CONTESTANTS)
    assert lone.ratio is None


def test_the_table_says_who_was_killed_and_where_forebay_loses() -> None:
    outcomes = [killed("torch", "worker"), outcome("torch 1x1", 100.0), outcome("forebay", 50.0)]
    cases = make_cases(outcomes, CONTESTANTS)
    (row,) = table_rows(cases)
    assert row == (
        *("tiny images", "40 MiB", "killed (worker)", "not run"),
        *("100/s (torch 1x1)", "50/s", "0.50", "30 MiB"),
    )
    assert "tiny images at 40 MiB" in " ".join(summarise_cases(cases))
    head, rule, line = markdown(cases).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|") == len(COLUMNS) + 1


def test_a_record_is_read_back_as_it_was_written() -> None:
    outcomes = [outcome(), killed("forebay")]
    data = json.loads(json.dumps(as_data(outcomes, {"words": "a machine"}, CONTESTANTS)))
    assert read_data(data) == (tuple(outcomes), CONTESTANTS)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.pop("schema"),
        lambda data: data["outcomes"][0].pop("kept"),
        lambda data: data["outcomes"][0].update(verdict="fine"),
        lambda data: data["outcomes"][0].update(batches="many"),
        lambda data: data["contestants"][0].update(surprise=1),
    ],
)
def test_what_is_no_record_is_refused(spoil: Any) -> None:
    data = as_data([outcome()], {}, CONTESTANTS)
    spoil(data)
    with pytest.raises(ValueError, match=r"schema|fields|verdict|must be"):
        read_data(data)


def test_every_workload_has_three_rising_budgets_and_samples_that_depend_on_the_index_alone() -> (
    None
):
    assert len(WORKLOADS) == 16
    for workload in WORKLOADS.values():
        assert list(workload.budgets_mib) == sorted(set(workload.budgets_mib))
    assert [draw(number, 3, 9) for number in range(50)] == [draw(n, 3, 9) for n in range(50)]
    assert {draw(number, 3, 9) for number in range(200)} == set(range(3, 9))


@pytest.mark.cgroup
def test_under_one_limit_torch_is_killed_and_forebay_survives_within_its_budget() -> None:
    try:
        with MemoryGroup():
            pass
    except GroupUnavailable as unavailable:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to measure this. {unavailable}")
        pytest.skip(str(unavailable))
    pair = _named("torch", "forebay")
    told: list[tuple[int, int]] = []
    torchs, ours = run_all(
        ["slow consumer"], [0], pair, 1, 1.0, lambda _, number, total: told.append((number, total))
    )
    assert told == [(1, 2), (2, 2)]
    assert (torchs.verdict, torchs.oom_kills > 0) == ("killed", True), asdict(torchs)
    assert (ours.verdict, ours.oom_kills) == ("survived", 0), asdict(ours)
    assert ours.kept, f"{ours.peak_bytes / MIB:.0f} MiB"
    assert "budget" in ours.explain


def _named(*labels: str) -> Sequence[Contestant]:
    return [contestant for contestant in CONTESTANTS if contestant.label in labels]
