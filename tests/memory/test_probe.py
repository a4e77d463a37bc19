"""Processes and the machine are read as the kernel tells them, and gaps are said."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.memory import probe as probe_module
from forebay.memory.probe import Probe, ProcessReading, Roots
from forebay.units import MIB
from tests.memory.conftest import Groups, give_up, run_inside
from tests.memory.trees import Tree


def test_a_process_is_read_from_its_rollup(tree: Tree) -> None:
    tree.process(
        7, Rss=90, Pss=50, Pss_Anon=30, Anonymous=60, Private_Clean=1, Private_Dirty=24, SwapPss=2
    )
    assert tree.probe.read_process(7) == ProcessReading(
        7, 90 * MIB, 50 * MIB, 30 * MIB, 60 * MIB, 25 * MIB, 2 * MIB
    )


def test_a_process_that_has_vanished_is_none_and_no_gap(tree: Tree) -> None:
    tree.process(6)
    probe = tree.probe
    assert probe.read_process(7) is None
    assert probe.degraded == frozenset()


def test_a_process_that_is_closed_is_none_and_a_gap(tree: Tree) -> None:
    tree.process(7)
    tree.close("proc/7/smaps_rollup")
    probe = tree.probe
    assert probe.read_process(7) is None
    assert any("smaps_rollup cannot be read" in reason for reason in probe.degraded)


def test_garbage_in_a_rollup_is_a_gap(tree: Tree) -> None:
    tree.process(7)
    tree.write("proc/7/smaps_rollup", "Pss: a lot")
    probe = tree.probe
    assert probe.read_process(7) is None
    assert probe.degraded == {"smaps_rollup has no Pss or Anonymous line"}


def test_an_old_kernel_without_pss_anon_gives_an_upper_bound_and_says_so(tree: Tree) -> None:
    tree.process(7)
    tree.write("proc/7/smaps_rollup", "Rss: 9 kB\nPss: 5 kB\nAnonymous: 8 kB")
    probe = tree.probe
    reading = probe.read_process(7)
    assert reading is not None
    assert reading.pss_anon_bytes == 5 * 1024
    assert any("footprint too high" in reason for reason in probe.degraded)


def test_a_zombie_has_no_memory_and_is_no_gap() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    probe = Probe()
    footprint = probe.read_footprint(os.getpid(), [pid])
    os.waitpid(pid, 0)
    assert (footprint.by_pid, footprint.complete) == ((), True)
    assert probe.degraded == frozenset()


def test_without_a_rollup_unique_bytes_stand_in(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / str(os.getpid())).mkdir()
    probe = Probe(Roots(proc=tmp_path))
    reading = probe.read_process(os.getpid())
    assert reading is not None
    assert 0 < reading.private_bytes <= reading.rss_bytes
    assert any("no smaps_rollup" in reason for reason in probe.degraded)


def test_the_footprint_is_the_formula_of_the_design(tree: Tree) -> None:
    tree.process(1, Pss_Anon=200, Anonymous=210, Pss=220, Private_Dirty=190)
    tree.process(2, children=(3, 4), Pss_Anon=70, Private_Dirty=1)
    tree.process(3, Pss_Anon=96, Private_Dirty=30, SwapPss=4)
    tree.process(4, Pss_Anon=96, Private_Dirty=30)
    footprint = tree.probe.read_footprint(1, [2])
    assert footprint.workers_bytes == (200 + 70 + 96 + 4 + 96 - 210) * MIB
    assert footprint.main_anonymous_bytes == 210 * MIB
    assert footprint.by_pid == ((2, MIB), (3, 30 * MIB), (4, 30 * MIB))
    assert footprint.shared_bytes == footprint.workers_bytes - 61 * MIB
    assert footprint.complete


def test_what_main_has_in_swap_is_not_the_loaders(tree: Tree) -> None:
    tree.process(1, Pss_Anon=50, Anonymous=50, SwapPss=40, Swap=90)
    tree.write("proc/1/status", f"VmSwap:\t{40 * 1024} kB")
    tree.process(2, Pss_Anon=30)
    assert tree.probe.read_footprint(1, [2]).workers_bytes == 30 * MIB


def test_the_footprint_is_never_below_zero(tree: Tree) -> None:
    tree.process(1, Pss_Anon=50, Anonymous=100)
    assert tree.probe.read_footprint(1, []).workers_bytes == 0


def test_main_among_the_roots_is_counted_once(tree: Tree) -> None:
    tree.process(1, children=(2,), Pss_Anon=50, Anonymous=60)
    tree.process(2, Pss_Anon=20)
    assert tree.probe.read_footprint(1, [1, 2]).workers_bytes == 10 * MIB


def test_a_closed_worker_makes_the_footprint_incomplete(tree: Tree) -> None:
    tree.process(1, Pss_Anon=50, Anonymous=50)
    tree.process(2, Pss_Anon=20)
    tree.close("proc/2/smaps_rollup")
    assert not tree.probe.read_footprint(1, [2]).complete


def test_a_worker_that_ended_meanwhile_leaves_the_footprint_complete(tree: Tree) -> None:
    tree.process(1, Pss_Anon=50, Anonymous=50)
    tree.process(2, children=(3,), Pss_Anon=20)
    footprint = tree.probe.read_footprint(1, [2])
    assert (footprint.pids, footprint.complete) == ((2,), True)


def test_without_main_the_footprint_is_incomplete(tree: Tree) -> None:
    tree.process(2, Pss_Anon=20)
    footprint = tree.probe.read_footprint(1, [2])
    assert (footprint.workers_bytes, footprint.complete) == (20 * MIB, False)


def test_children_are_found_by_parent_where_the_kernel_does_not_list_them(tree: Tree) -> None:
    tree.process(2, children=None)
    tree.process(3, parent=2, children=None)
    tree.process(4, parent=3, children=None)
    tree.process(5, parent=1, children=None)
    assert tree.probe.read_tree([2]) == (2, 3, 4)


def test_grandchildren_of_a_real_process_are_found() -> None:
    with subprocess.Popen(
        ["sh", "-c", "exec 3<&0; sh -c 'sh -c \"echo \\$\\$; read x\" <&3; true'; true"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as top:
        assert top.stdin is not None
        assert top.stdout is not None
        grandchild = int(top.stdout.readline())
        found = Probe().read_tree([top.pid])
        top.stdin.close()
    assert {top.pid, grandchild} <= set(found)


def test_the_arena_is_counted_by_the_pages_it_has() -> None:
    fd = os.memfd_create("forebay-test")
    try:
        os.truncate(fd, 8 * MIB)
        empty = Probe().read_arena_bytes(fd)
        os.pwrite(fd, b"x" * MIB, 0)
        assert (empty, Probe().read_arena_bytes(fd)) == (0, MIB)
    finally:
        os.close(fd)


def test_statm_tells_anonymous_from_shared(tree: Tree) -> None:
    tree.write("proc/7/statm", "1000 500 100 1 0 300 0")
    reading = tree.probe.read_statm(7)
    page = os.sysconf("SC_PAGE_SIZE")
    assert reading is not None
    assert (reading.vm_bytes, reading.anonymous_bytes) == (1000 * page, 400 * page)


def test_statm_of_a_process_that_is_gone_is_none(tree: Tree) -> None:
    assert tree.probe.read_statm(7) is None


def test_the_host_is_read_and_psutil_stands_in(tree: Tree) -> None:
    assert tree.probe.read_host().total_bytes > 0
    tree.host(total_bytes=9 * MIB, available_bytes=4 * MIB)
    host = tree.probe.read_host()
    assert (host.total_bytes, host.available_bytes) == (9 * MIB, 4 * MIB)


def test_pressure_falls_back_to_the_host_and_then_to_none(tree: Tree) -> None:
    assert tree.probe.read_pressure() is None
    tree.write(
        "proc/pressure/memory", "some avg10=3.00 avg60=1.00 avg300=0.0 total=5\nfull avg10=9"
    )
    pressure = tree.probe.read_pressure()
    assert pressure is not None
    assert (pressure.some_avg10_frac, pressure.source) == (0.03, "host")


def test_the_map_count_is_read(tree: Tree) -> None:
    assert tree.probe.read_max_map_count() is None
    tree.write("proc/sys/vm/max_map_count", 65530)
    assert tree.probe.read_max_map_count() == 65530


def test_shared_memory_is_read_and_may_be_missing(tree: Tree) -> None:
    assert tree.probe.read_shm() is None
    (tree.root / "shm").mkdir()
    shm = tree.probe.read_shm()
    assert shm is not None
    assert 0 < shm.free_bytes <= shm.total_bytes


def test_rlimits_of_a_real_process_are_found() -> None:
    code = (
        "from forebay.memory.probe import Probe; r = Probe().read_rlimits(); "
        "print(r.address_space_bytes, r.data_bytes, r.open_files)"
    )
    limited = f"ulimit -Sv 4194304; ulimit -Sn 321; exec {sys.executable} -c '{code}'"
    answer = subprocess.run(["sh", "-c", limited], capture_output=True, timeout=60, check=True)
    assert answer.stdout.split() == [b"4294967296", b"None", b"321"]


@pytest.fixture(scope="module")
def fork_scene() -> list[dict[str, Any]]:
    scene = [sys.executable, "-m", "tests.memory.fork_scene"]
    answer = subprocess.run(scene, capture_output=True, timeout=100, check=True)
    return json.loads(answer.stdout)


def test_the_footprint_of_a_real_fork_is_the_workers_own_memory(
    fork_scene: list[dict[str, Any]],
) -> None:
    assert fork_scene[0]["workers_bytes"] == pytest.approx(60 * MIB, rel=0.10)


def test_pages_that_main_rewrote_after_the_fork_are_in_the_footprint(
    fork_scene: list[dict[str, Any]],
) -> None:
    assert fork_scene[1]["workers_bytes"] == pytest.approx(260 * MIB, rel=0.05)
    assert len(fork_scene[1]["by_pid"]) == 3
    assert fork_scene[1]["complete"]


def test_nothing_is_left_in_the_footprint_when_all_have_ended(
    fork_scene: list[dict[str, Any]],
) -> None:
    assert fork_scene[2]["workers_bytes"] == 0
    assert fork_scene[2]["complete"]


@pytest.mark.cgroup
def test_the_footprint_is_the_groups_own_delta_where_rss_says_many_times_that(
    groups: Groups,
) -> None:
    code = "from tests.memory.rss_scene import main; main()"
    footprint, delta, rss = json.loads(run_inside(code, groups.memory(2000 * MIB)))
    assert footprint == pytest.approx(delta, rel=0.03)
    assert rss > 5 * delta


def test_the_real_map_count_and_shared_memory_are_read() -> None:
    probe = Probe()
    shm = probe.read_shm()
    assert (probe.read_max_map_count() or 0) > 1000
    assert shm is not None
    assert 0 < shm.free_bytes <= shm.total_bytes


def test_the_real_pressure_is_a_fraction() -> None:
    pressure = Probe().read_pressure()
    if pressure is None:
        give_up("this kernel tells no pressure")
    assert 0 <= pressure.some_avg10_frac <= 1


@pytest.mark.parametrize("avg10", ["nan", "-1", "inf", "101", "", "x"])
def test_pressure_that_is_no_percentage_is_none(tree: Tree, avg10: str) -> None:
    tree.write("proc/pressure/memory", f"some avg10={avg10} avg60=0 total=1")
    assert tree.probe.read_pressure() is None


def test_the_address_space_limit_of_a_real_process_binds() -> None:
    code = (
        "from forebay.memory.limits import headroom, memory_limit; "
        "print(memory_limit().source, headroom().source, headroom().bytes < 2**30, sep=chr(44))"
    )
    limited = f"ulimit -Sv 1048576; exec {sys.executable} -c '{code}'"
    answer = subprocess.run(["sh", "-c", limited], capture_output=True, timeout=60, check=True)
    assert answer.stdout.split() == [b"RLIMIT_AS,RLIMIT_AS,True"]


def test_nothing_beside_the_readers_asks_for_rss() -> None:
    """RSS charges each fork with all that it shares; a decision on it would be on fiction."""
    readers = {"probe.py", "readings.py", "peak.py"}
    words = {"rss", "rss_bytes", "memory_info", "memory_percent", "ru_maxrss", "hwm_bytes"}
    source = Path(probe_module.__file__).parents[1]
    wrong = [
        f"{file.relative_to(source)}:{node.lineno}: {node.attr}"
        for file in source.rglob("*.py")
        if file.name not in readers and "bench" not in file.parts
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in words
    ]
    assert not wrong
