"""Who survived, who was killed, and what follows from it; two real runs under one limit."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from forebay.bench.cgroup import GroupUnavailable, MemoryGroup
from forebay.bench.sampler import FROM_GROUP, Sample, Trace
from forebay.bench.survive.nest import open_nest, start_neighbour
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
from forebay.bench.survive.record import Record, RecordUnreadable, describe_place, load, merge, save
from forebay.bench.survive.run import find_last_words, find_peak, is_twice, judge_end, run_all
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


def test_a_neighbour_that_was_killed_is_named_whatever_became_of_the_job() -> None:
    assert judge_end(0, True, 0, 1) == ("killed", "neighbour")


def held(*points: tuple[float, int]) -> Trace:
    return Trace(FROM_GROUP, tuple(Sample(t_s, mib * MIB, 0) for t_s, mib in points), ())


def test_a_peak_before_the_consumer_kept_anything_counts_in_full() -> None:
    trace = held((0.9, 200), (2.0, 450), (5.0, 480), (8.0, 500))
    assert find_peak(trace, 1.0, 9.0, [(3.0, 120 * MIB), (6.0, 240 * MIB)]) == 250 * MIB


def test_what_the_consumer_keeps_is_taken_off_from_then_on() -> None:
    trace = held((0.9, 200), (2.0, 260), (5.0, 400), (8.0, 500))
    assert find_peak(trace, 1.0, 9.0, [(3.0, 120 * MIB), (6.0, 240 * MIB)]) == 80 * MIB


def test_what_was_held_before_and_after_is_no_peak() -> None:
    trace = held((0.5, 900), (0.9, 200), (2.0, 230), (9.5, 900))
    assert find_peak(trace, 1.0, 9.0, []) == 30 * MIB


def test_without_a_reading_there_is_no_peak() -> None:
    assert find_peak(held(), 1.0, 9.0, []) == 0


def test_the_grid_leaves_out_what_torch_as_it_comes_already_is() -> None:
    left_out = {
        name: [each.label for each in CONTESTANTS if is_twice(each, WORKLOADS[name])]
        for name in ("tiny images", "slow consumer")
    }
    assert left_out == {"tiny images": ["torch 2x2"], "slow consumer": ["torch 4x2"]}


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
    assert (case.best.label, case.ratio) == ("torch 1x1", 1.2)
    (lone,) = make_cases([killed("torch"), outcome("forebay")], CONTESTANTS)
    assert lone.ratio is None
    assert lone.is_lone


def test_torch_without_workers_is_compared_apart() -> None:
    outcomes = [killed("torch"), outcome("torch 0x0", 240.0), outcome("forebay", 120.0)]
    (case,) = make_cases(outcomes, CONTESTANTS)
    assert (case.best, case.ratio, case.ratio_alone) == (None, None, 0.5)
    assert not case.is_lone


@pytest.mark.parametrize(
    ("torchs", "is_same"),
    [
        ([outcome("torch")], True),
        ([outcome("torch", digest="xyz")], False),
        # A split stream yields another order with another number of workers.
        ([outcome("torch"), outcome("torch 1x1", digest="xyz")], True),
        ([killed("torch"), outcome("torch 1x1", digest="xyz")], None),
    ],
)
def test_batches_are_compared_with_torchs_by_as_many_workers(
    torchs: list[Outcome], is_same: bool | None
) -> None:
    (case,) = make_cases([*torchs, outcome("forebay")], CONTESTANTS)
    assert case.is_same is is_same


def test_torch_at_another_budget_will_do_for_the_comparison() -> None:
    roomy = outcome("torch", budget_bytes=80 * MIB, digest="xyz")
    case, _ = make_cases([killed("torch"), outcome("forebay"), roomy], CONTESTANTS)
    assert case.is_same is False


def test_the_table_says_who_was_killed_and_where_forebay_loses() -> None:
    outcomes = [killed("torch", "worker"), outcome("torch 1x1", 100.0), outcome("forebay", 50.0)]
    cases = make_cases(outcomes, CONTESTANTS)
    (row,) = table_rows(cases)
    assert row == (
        *("tiny images", "40 MiB", "killed (worker)", "not run"),
        *("100/s (torch 1x1)", "not run", "50/s", "0.50", "", "30 MiB"),
    )
    assert "tiny images at 40 MiB" in " ".join(summarise_cases(cases))
    head, rule, line = markdown(cases).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|") == len(COLUMNS) + 1


def test_the_summary_does_not_count_who_was_not_run_as_killed() -> None:
    words = " ".join(
        summarise_cases(make_cases([killed("torch"), outcome("forebay")], CONTESTANTS))
    )
    assert "torch as it comes survived 0 of 1" in words
    assert "recipe nowhere, since it was not run" in words


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


PLACE = {"words": "a machine", "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789+"}


def test_a_file_is_named_by_date_and_commit_and_read_back(tmp_path: Path) -> None:
    record = Record(PLACE, (outcome(),), CONTESTANTS)
    path = save(tmp_path, record)
    assert path.name == "20260102T030405-survive-0123456789.json"
    assert load(path) == record


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    save(tmp_path, Record(PLACE, (outcome(),), CONTESTANTS))
    with pytest.raises(FileExistsError):
        save(tmp_path, Record(PLACE, (), CONTESTANTS))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "forebay survive 1"}'])
def test_another_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(RecordUnreadable, match=r"other\.json is no record .* Name a \.json file"):
        load(path)


def test_merging_takes_each_workload_from_the_last_that_has_it() -> None:
    first = Record(PLACE, (outcome(), outcome(workload="volumes")), CONTESTANTS[:1])
    again = Record({**PLACE, "commit": "abc"}, (outcome(speed=7.0),), CONTESTANTS[1:])
    merged = merge([first, again])
    assert merged.outcomes == (first.outcomes[1], again.outcomes[0])
    assert merged.contestants == CONTESTANTS
    sources = [(each["commit"], each["workloads"]) for each in merged.place["sources"]]
    assert sources == [("0123456789+", ["volumes"]), ("abc", ["tiny images"])]
    assert [line[-10:] for line in describe_place(merged.place)] == [": volumes.", "ny images."]


def test_a_note_on_the_conditions_is_told() -> None:
    (words,) = describe_place({**PLACE, "note": "Other work ran beside it."})
    assert words.endswith("commit 0123456789+. Other work ran beside it.")


def test_the_last_words_of_a_job_name_no_folder_of_the_machine() -> None:
    text = 'Traceback\n  File "/home/somebody/x/engine.py", line 7, in _open\n\nValueError: no\n'
    assert find_last_words(text) == 'Traceback\nFile "engine.py", line 7, in _open\nValueError: no'


def test_one_record_merged_is_itself() -> None:
    record = Record(PLACE, (outcome(),), CONTESTANTS)
    assert merge([record]) == record


def needs_group() -> None:
    try:
        with MemoryGroup():
            pass
    except GroupUnavailable as unavailable:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to measure this. {unavailable}")
        pytest.skip(str(unavailable))


@pytest.mark.cgroup
def test_a_neighbour_presses_on_the_limit_and_is_not_read_as_the_jobs() -> None:
    needs_group()
    with open_nest() as nest:
        neighbour = start_neighbour(nest, 64 * MIB, hold_s=60)
        try:
            while nest.around.read().held_bytes < 64 * MIB:
                assert neighbour.poll() is None
                time.sleep(0.01)
            assert nest.job.read().held_bytes == 0
        finally:
            neighbour.kill()
            neighbour.wait()


@pytest.mark.cgroup
def test_under_one_limit_torch_is_killed_and_forebay_survives_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_group()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # 16 batches of 8 MiB ahead are above the limit on any machine; torch as it comes is near it.
    pair = _named("torch 4x4", "forebay")
    told: list[tuple[int, int]] = []
    torchs, ours = run_all(
        ["slow consumer"], [1], pair, 1, 1.0, lambda _, number, total: told.append((number, total))
    )
    assert told == [(1, 2), (2, 2)]
    assert (torchs.verdict, torchs.oom_kills > 0) == ("killed", True), asdict(torchs)
    assert (ours.verdict, ours.oom_kills) == ("survived", 0), asdict(ours)
    assert ours.kept, f"{ours.peak_bytes / MIB:.0f} MiB"
    assert "budget" in ours.explain
    assert list(tmp_path.iterdir()) == [], "a killed job's files have to go too"


def _named(*labels: str) -> Sequence[Contestant]:
    return [contestant for contestant in CONTESTANTS if contestant.label in labels]
