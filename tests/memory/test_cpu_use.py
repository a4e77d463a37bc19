"""Running is told from waiting for a CPU, and that from waiting for something else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.probe import CpuUse, Probe, Roots
from forebay.memory.readings import cpu_since
from tests.memory.trees import Tree

TIMES = st.floats(0, 1e9)
USES = st.builds(CpuUse, TIMES, st.none() | TIMES)


def test_the_threads_of_a_process_are_summed(tree: Tree) -> None:
    tree.cpu(7, (2_000_000_000, 500_000_000, 3), (1_000_000_000, 250_000_000, 1))
    assert tree.probe.read_cpu([7]) == {7: CpuUse(3.0, 0.75)}


def test_a_process_that_has_vanished_has_no_use(tree: Tree) -> None:
    probe = tree.probe
    assert probe.read_cpu([7]) == {7: None}
    assert probe.degraded == frozenset()


def test_a_thread_that_ends_while_it_is_read_is_left_out(tree: Tree) -> None:
    tree.cpu(7, (2_000_000_000, 500_000_000, 3))
    (tree.root / "proc/7/task/8").mkdir()
    assert tree.probe.read_cpu([7]) == {7: CpuUse(2.0, 0.5)}


def test_a_process_that_has_had_no_turn_yet_has_had_nothing(tree: Tree) -> None:
    tree.write("proc/self/schedstat", "9 9 9")
    tree.cpu(7, (0, 0, 0))
    probe = tree.probe
    assert probe.read_cpu([7]) == {7: CpuUse(0, 0)}
    assert probe.degraded == frozenset()


@pytest.mark.parametrize("text", ["0 0 0", "", "a b c", "1 2", "9" * 5000])
def test_where_the_kernel_does_not_count_the_running_is_still_told(
    tmp_path: Path, text: str
) -> None:
    own = os.getpid()
    tree = Tree(tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    tree.write(f"proc/{own}/task/{own}/schedstat", text)
    probe = tree.probe
    use = probe.read_cpu([own])[own]
    assert use is not None
    assert use.run_s > 0
    assert use.wait_s is None
    assert any("no schedstat" in reason for reason in probe.degraded)


@given(USES, USES)
def test_use_between_two_readings_is_never_below_zero(before: CpuUse, now: CpuUse) -> None:
    since = cpu_since(before, now)
    assert since.run_s >= 0
    assert since.wait_s is None or since.wait_s >= 0


SPIN = "print(flush=True)\nwhile True: pass"


@contextlib.contextmanager
def children(count: int, code: str) -> Iterator[list[int]]:
    """Processes on one and the same CPU, once all of them have begun."""
    cpu = min(os.sched_getaffinity(0))
    started = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", f"import os; os.sched_setaffinity(0, [{cpu}])\n{code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(count)
    ]
    try:
        for child in started:
            assert child.stdout is not None
            child.stdout.readline()
        yield [child.pid for child in started]
    finally:
        for child in started:
            child.kill()
            child.communicate()


def read_until_run(pids: list[int], run_s: float) -> list[CpuUse]:
    """What each of `pids` has had since now, as soon as all together ran for `run_s`."""
    probe = Probe(Roots())
    before = probe.read_cpu(pids)
    while True:
        uses = []
        for pid, now in probe.read_cpu(pids).items():
            first = before[pid]
            assert first is not None
            assert now is not None
            uses.append(cpu_since(first, now))
        if sum(use.run_s for use in uses) >= run_s:
            return uses


def test_real_processes_that_share_a_cpu_wait_for_it() -> None:
    with children(2, SPIN) as pids:
        uses = read_until_run(pids, 0.2)
    run_s = sum(use.run_s for use in uses)
    wait_s = sum(use.wait_s or 0 for use in uses)
    # While one runs the other waits, to the slice that is not counted before it ends.
    assert wait_s > 0.5 * run_s


def test_a_real_process_that_waits_for_data_neither_runs_nor_waits_for_a_cpu() -> None:
    with children(1, "print(flush=True)\ninput()") as idle, children(1, SPIN) as busy:
        uses = read_until_run([*idle, *busy], 0.1)
    idle_use, busy_use = uses
    assert idle_use.run_s + (idle_use.wait_s or 0) < 0.5 * busy_use.run_s
