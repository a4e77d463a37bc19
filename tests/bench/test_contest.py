"""Contestants run alone, are measured from outside, and leave nothing."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from forebay.bench import contest
from forebay.bench.cgroup import MemoryGroup
from forebay.bench.contest import LimitTooLow, broken_entries, hold_contest, why_no_group
from forebay.bench.contestant import Broken, Finished, Job, Killed, Run, Step, run_contestant
from forebay.units import MIB
from tests.bench.made_up import made_up_contest, made_up_entry


class Silence:
    """An audience that only counts."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def starts(self, title: str, steps: int) -> None:
        self.titles.append(title)

    def steps(self, step: Step, held_bytes: int) -> None:
        assert held_bytes > 0

    def ends(self, run: Run) -> None:
        pass


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Three steps of four pictures each."""
    noise = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    for number in range(5):
        Image.fromarray(np.roll(noise, number, axis=0)).save(tmp_path / f"{number}.jpg")
    return Job(tmp_path, steps=3, batch_size=4, workers=1, budget_bytes=64 * MIB, threads=1)


def needs_group() -> None:
    reason = why_no_group()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to test the contest under a limit. {reason}")
        pytest.skip(reason)


@pytest.mark.cgroup
def test_a_contestant_trains_all_its_steps(job: Job) -> None:
    needs_group()
    with MemoryGroup() as group:
        run = run_contestant("torch", job, group)
    assert [step.number for step in run.steps] == [0, 1, 2]
    assert isinstance(run.ending, Finished)
    assert list(run.marks) == ["warmup", "baseline", "end"]


def test_without_a_group_a_contestant_runs_too(job: Job) -> None:
    run = run_contestant("none", job, None)
    assert isinstance(run.ending, Finished)
    assert run.trace.peak_bytes() > 50 * MIB


@pytest.mark.cgroup
def test_a_contestant_above_the_limit_is_killed(job: Job) -> None:
    needs_group()
    with MemoryGroup(64 * MIB) as group:
        run = run_contestant("torch", job, group)
    assert isinstance(run.ending, Killed)


def test_a_contestant_that_fails_says_why(job: Job, tmp_path: Path) -> None:
    for image in tmp_path.glob("*.jpg"):
        image.unlink()
    run = run_contestant("torch", job, None)
    assert isinstance(run.ending, Broken)
    assert "holds no .jpg, .jpeg or .png" in run.ending.why


def test_a_limit_below_the_jobs_own_need_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "_own_need_bytes", lambda *_: 300 * MIB)
    with pytest.raises(LimitTooLow, match=r"The limit of 200 MiB is below the 302 MiB"):
        hold_contest(job, 200 * MIB, Silence())


def test_a_killed_contestant_runs_again_without_a_limit(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    contested = made_up_contest()
    asked: list[tuple[str, int | None]] = []

    def pretend(name: str, _job: Job, group: object, *_: object) -> Run:
        limit_bytes = group if isinstance(group, int) else None
        asked.append((name, limit_bytes))
        entry = next(each for each in contested.entries if each.name == name)
        return entry.measured if limit_bytes is None else entry.limited

    monkeypatch.setattr(contest, "_own_need_bytes", lambda *_: 300 * MIB)
    monkeypatch.setattr(contest, "why_no_group", lambda: None)
    monkeypatch.setattr(contest, "_open_group", nullcontext)
    monkeypatch.setattr(contest, "run_contestant", pretend)
    hold_contest(job, None, Silence())
    limit_bytes = 300 * MIB + job.budget_bytes + contest.SLACK_BYTES
    assert asked == [
        ("torch", limit_bytes),
        ("torch", None),
        ("torch-prefetch1", limit_bytes),
        ("forebay", limit_bytes),
    ]


def test_a_contestant_that_broke_is_named() -> None:
    broken = made_up_entry("forebay", fed_mib=95, ending=Broken("exit status 1: no"))
    assert broken_entries(made_up_contest(forebay=broken)) == (broken,)
