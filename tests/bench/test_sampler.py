"""What a job holds is read from outside, in a group and without one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from forebay.bench.cgroup import GroupUnavailable, MemoryGroup
from forebay.bench.sampler import FROM_GROUP, FROM_TREE, Parts, Sample, Sampler, Trace, read_parts
from forebay.units import MIB

# A child that forks: 96 MiB before the fork (shared by both), 32 MiB after it in the forked one,
# and 16 MiB of shared memory behind a descriptor that nobody maps.
FORKING = f"""
import multiprocessing, os, sys, time
old = bytearray(os.urandom(1) * {96 * MIB})
shared = os.memfd_create("demo")
os.write(shared, b"x" * {16 * MIB})
def child(ready, end):
    new = bytearray(b"y" * {32 * MIB})
    ready.set()
    end.wait()
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    process = context.Process(target=child, args=(ready, end))
    process.start()
    ready.wait()
    print(process.pid, flush=True)
    sys.stdin.read()
    end.set()
    process.join()
"""

Start = Callable[[MemoryGroup | None], tuple[subprocess.Popen[bytes], int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the forking child; ends it afterwards."""
    with ExitStack() as stack:

        def begin(group: MemoryGroup | None) -> tuple[subprocess.Popen[bytes], int]:
            command = [sys.executable, "-c", FORKING]
            job = subprocess.Popen(
                command if group is None else group.enter_command(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(job.communicate, timeout=30)
            assert job.stdout is not None
            return job, int(job.stdout.readline())

        yield begin


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        opened = MemoryGroup().__enter__()
    except GroupUnavailable as unavailable:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to test the group. {unavailable}")
        pytest.skip(str(unavailable))
    yield opened
    opened.__exit__(None, None, None)


def first_sample(sampler: Sampler) -> Sample:
    with sampler:
        while (sample := sampler.latest()) is None:
            pass
    return sample


def is_about(value_bytes: int, expected_mib: int, within_mib: int = 14) -> bool:
    """An interpreter brings some MiB of its own."""
    return expected_mib * MIB <= value_bytes <= (expected_mib + within_mib) * MIB


@pytest.mark.cgroup
def test_a_group_is_split_into_the_main_process_and_what_feeds_it(
    start: Start, group: MemoryGroup
) -> None:
    job, _ = start(group)
    sample = first_sample(Sampler(job.pid, group, parts_period_s=None))
    assert is_about(sample.main_anon_bytes, 96)
    assert is_about(sample.children_anon_bytes, 32)
    assert is_about(sample.shmem_bytes, 16, 1)


def test_without_a_group_the_process_tree_tells_the_same(start: Start) -> None:
    job, _ = start(None)
    sample = first_sample(Sampler(job.pid, None, parts_period_s=None))
    assert is_about(sample.main_anon_bytes, 96)
    assert is_about(sample.children_anon_bytes, 32)
    assert is_about(sample.shmem_bytes, 16, 1)


def test_memory_that_a_child_only_shares_is_not_its_own(start: Start) -> None:
    job, child_pid = start(None)
    parts = read_parts(job.pid, [child_pid])
    assert parts is not None
    assert is_about(parts.children_anon_bytes, 32)


@pytest.mark.cgroup
def test_the_record_says_that_it_is_from_a_group(start: Start, group: MemoryGroup) -> None:
    job, _ = start(group)
    assert Sampler(job.pid, group).trace().source == FROM_GROUP


def test_the_record_says_that_it_is_from_a_tree(start: Start) -> None:
    job, _ = start(None)
    assert Sampler(job.pid, None).trace().source == FROM_TREE


def test_a_job_that_is_gone_leaves_no_reading() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert read_parts(gone.pid, []) is None


def test_a_peak_is_the_most_between_two_marks() -> None:
    trace = made_up_trace(10, 50, 90, 20)
    assert trace.peak_bytes(0.5, 1.5) == 50


def test_a_level_is_the_last_reading_not_after_the_mark() -> None:
    assert made_up_trace(10, 50, 90).level_bytes(1.9) == 50


def test_a_footprint_is_the_rise_above_the_level() -> None:
    assert made_up_trace(10, 50, 90, 20).footprint_bytes(since_s=1) == 40


def test_a_footprint_is_never_negative() -> None:
    assert made_up_trace(90, 50).footprint_bytes(since_s=1) == 0


def test_an_empty_record_has_no_peak() -> None:
    assert Trace(FROM_TREE, (), ()).peak_bytes() == 0


def test_the_largest_split_is_found() -> None:
    small, large = Parts(0.0, 1, 2, 3, 1), Parts(1.0, 2, 3, 4, 1)
    assert Trace(FROM_TREE, (), (small, large)).peak_parts() == large


def made_up_trace(*anon_bytes: int) -> Trace:
    samples = (Sample(float(t_s), held, 0) for t_s, held in enumerate(anon_bytes))
    return Trace(FROM_TREE, tuple(samples), ())
