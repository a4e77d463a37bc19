"""The figures of a run follow from its record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.bench.contestant import Job, Run
from forebay.bench.sampler import Sample, Trace
from forebay.bench.verdict import judge
from forebay.units import MIB
from tests.bench.made_up import JOB, NEED_MIB, made_up_run


@pytest.fixture
def run() -> Run:
    return made_up_run("torch", fed_mib=200)


def with_sample(run: Run, sample: Sample) -> Run:
    trace = replace(run.trace, samples=(*run.trace.samples, sample))
    return replace(run, trace=trace)


def test_a_footprint_is_what_is_not_the_training_processs_own(run: Run) -> None:
    assert judge(run, JOB).footprint_bytes == 200 * MIB


def test_the_peak_of_the_whole_job_holds_both(run: Run) -> None:
    assert judge(run, JOB).job_peak_bytes == (NEED_MIB + 200) * MIB


def test_the_own_need_leaves_the_made_up_batch_out(run: Run) -> None:
    assert judge(run, JOB).own_need_bytes == NEED_MIB * MIB - JOB.batch_bytes


def test_workers_and_shared_memory_have_peaks_of_their_own(run: Run) -> None:
    later = with_sample(run, Sample(12.05, 340 * MIB, 10 * MIB, 300 * MIB))
    figures = judge(later, JOB)
    assert (figures.workers_anon_bytes, figures.shmem_bytes) == (40 * MIB, 200 * MIB)


def test_growth_inside_the_training_process_is_seen(run: Run) -> None:
    later = with_sample(run, Sample(12.05, 350 * MIB, 0, 350 * MIB))
    assert judge(later, JOB).main_growth_bytes == 50 * MIB + JOB.batch_bytes


def test_what_is_held_after_the_end_is_not_judged(run: Run) -> None:
    later = with_sample(run, Sample(99.0, 900 * MIB, 0, 0))
    assert judge(later, JOB).footprint_bytes == 200 * MIB


def test_speed_is_taken_from_the_end_of_the_first_step(run: Run) -> None:
    assert judge(run, JOB).images_per_s == pytest.approx(JOB.batch_size / 0.5)


def test_waiting_leaves_the_first_batch_out(run: Run) -> None:
    figures = judge(run, JOB)
    assert (figures.waited_s, figures.first_batch_s) == (19 * 0.125, 0.125)


def test_the_share_of_waiting_is_of_the_time_after_the_first_step(run: Run) -> None:
    assert judge(run, JOB).waited_frac == pytest.approx(19 * 0.125 / 9.5)


def test_a_run_that_never_started_has_no_speed_and_no_loss() -> None:
    empty = Run("torch", None, {}, (), Trace("", (), ()), made_up_run("torch", fed_mib=1).ending)
    figures = judge(empty, JOB)
    assert (figures.images_per_s, figures.final_loss, figures.footprint_bytes) == (None, None, 0)


def test_a_batch_is_its_pictures_and_labels() -> None:
    job = Job(JOB.images, steps=1, batch_size=64, workers=1, budget_bytes=1, threads=1)
    assert job.batch_bytes == 64 * 3 * 224 * 224 * 4 + 64 * 8
