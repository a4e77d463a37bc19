"""Whatever a machine shows or hides, reading it raises nothing and makes nothing up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.memory.limits import headroom, memory_limit, usable_cpus
from forebay.memory.probe import PeakMeter, Probe
from tests.memory.conftest import give_up
from tests.memory.trees import Tree

# ---------------------------------------------------------------- arbitrary files

WORDS = (
    "max|-1|0|100000|nan|1e999|0-3,7|kB|:| |\n|\r|\0|Pss:|Anonymous:|MemAvailable:|VmRSS:|VmHWM:"
    "|oom_kill |anon |some avg10=|(a) b) S|0::/|4:memory:/../|/a|\N{SUPERSCRIPT TWO}"
    "|\N{ARABIC-INDIC DIGIT THREE}"
)
PIECES = st.sampled_from([*WORDS.split("|"), "9" * 20, "9" * 5000])
TEXTS = st.lists(PIECES, max_size=8).map(lambda pieces: "".join(pieces).encode())
CLOSED, ABSENT = "closed", "absent"
CONTENT = st.one_of(st.binary(max_size=40), TEXTS, st.sampled_from([CLOSED, ABSENT]))


def plant(folder: Path) -> tuple[Tree, list[Path]]:
    """A machine with each kind of file on it, and where these are."""
    tree = Tree(folder)
    tree.host()
    tree.member("4:memory:/a", "2:cpu:/a", "3:cpuset:/a", "0::/b")
    tree.v1("/a", limit=100, procs=(7, 8))
    tree.v1("")
    tree.v2("/b", mount="cgroup/unified", limit=100, local_events=(1, 1, 1))
    tree.v2("", mount="cgroup/unified")
    tree.process(7, children=(8,), Pss=5, Pss_Anon=4, Anonymous=6, SwapPss=1, Swap=1)
    tree.process(8, children=None, Pss=5, Pss_Anon=4, Anonymous=6)
    tree.cpu(7, (1, 1, 1), (2, 2, 2))
    tree.write("cgroup/cpu/a/cpu.cfs_quota_us", 1)
    tree.write("cgroup/cpu/a/cpu.cfs_period_us", 1)
    tree.write("cgroup/unified/b/cpu.max", "1 1")
    tree.write("cgroup/cpuset/a/cpuset.cpus", "0-1")
    for name in ("pressure/memory", "self/statm", "self/status", "self/clear_refs", "7/status"):
        tree.write(f"proc/{name}", "")
    for name in ("sys/vm/max_map_count", "vmstat"):
        tree.write(f"proc/{name}", "")
    tree.write("cgroup/unified/b/memory.pressure", "some avg10=1.00 avg60=0 total=1")
    return tree, [file for file in sorted(folder.rglob("*")) if file.is_file()]


def spoil(file: Path, content: bytes | str) -> None:
    if isinstance(content, bytes):
        file.write_bytes(content)
        return
    file.unlink()
    if content == CLOSED:
        file.mkdir()


def read_everything(tree: Tree) -> list[float | None]:
    """One of each reading; every number that came out."""
    probe = tree.probe
    room, limit = headroom(probe), memory_limit(probe)
    host, statm, pressure = probe.read_host(), probe.read_statm(), probe.read_pressure()
    footprint, events = probe.read_footprint(7, [7, 8]), probe.read_events()
    numbers: list[float | None] = [room.bytes, room.limit, limit.bytes, usable_cpus(probe)]
    numbers += [host.total_bytes, host.available_bytes, probe.read_own_group([7, 8])]
    numbers += [statm.anonymous_bytes] if statm else []
    numbers += [pressure.some_avg10_frac] if pressure else []
    numbers += [footprint.workers_bytes, footprint.main_anonymous_bytes, footprint.shared_bytes]
    numbers += [private for _, private in footprint.by_pid]
    numbers += [events.oom_kills, events.high, events.max]
    numbers += [use.run_s for use in probe.read_cpu([7, 8]).values() if use]
    for group in probe.read_cgroups():
        numbers += [group.limit_bytes, group.binding_bytes, group.held_bytes]
    probe.read_max_map_count()
    probe.read_shm()
    assert all("\n" not in reason and len(reason) < 100 for reason in probe.degraded)
    return numbers


@settings(deadline=None)
@given(st.data())
def test_arbitrary_bytes_in_any_file_raise_nothing_and_make_no_negative_figure(
    data: st.DataObject,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree, files = plant(Path(folder))
        for file in data.draw(st.lists(st.sampled_from(files), unique=True, max_size=6)):
            spoil(file, data.draw(CONTENT, label=str(file.relative_to(folder))))
        assert all(number is None or number >= 0 for number in read_everything(tree))


@settings(deadline=None)
@given(CONTENT, CONTENT)
def test_a_peak_among_arbitrary_bytes_raises_nothing(
    before: bytes | str, after: bytes | str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree, _ = plant(Path(folder))
        status = tree.root / "proc/self/status"
        spoil(status, before)
        meter = PeakMeter(tree.probe._roots)
        meter.start()
        with contextlib.suppress(OSError):  # a folder now
            status.write_bytes(after if isinstance(after, bytes) else b"")
        making = meter.stop()
        meter.close()
    assert min(making.peak_bytes, making.private_bytes, making.blur_bytes) >= 0


def test_garbage_everywhere_is_said_in_a_few_words_once(tmp_path: Path) -> None:
    tree, files = plant(tmp_path)
    for file in files:
        if file.name not in {"cgroup", "cgroup.controllers"}:
            file.write_bytes(b"lots")
    probe = tree.probe
    told = []
    for _ in range(3):
        headroom(probe)
        probe.read_footprint(7, [7])
        told.append(probe.degraded)
    assert told[0] == told[1] == told[2]
    assert 1 <= len(told[0]) <= 10


# ---------------------------------------------------------------- processes that come and go


def test_processes_that_end_while_they_are_read_are_no_gap() -> None:
    probe = Probe()
    script = "i=0; while [ $i -lt 60 ]; do (exec true) & i=$((i+1)); done; wait"
    with subprocess.Popen(["sh", "-c", script]) as top:
        readings = []
        while top.poll() is None:
            readings.append(probe.read_footprint(os.getpid(), [top.pid]))
            probe.read_cpu(probe.read_tree([top.pid]))
    assert all(reading.complete for reading in readings)
    assert probe.degraded == frozenset()


def test_a_process_that_has_given_its_memory_back_is_no_gap(tree: Tree) -> None:
    tree.process(1, Pss_Anon=50, Anonymous=50)
    tree.process(2, state="R")
    (tree.root / "proc/2/smaps_rollup").write_text("")
    assert tree.probe.read_footprint(1, [2]).complete


def test_a_process_whose_folder_vanishes_between_two_files_is_no_gap(tree: Tree) -> None:
    tree.process(1, Pss_Anon=50, Anonymous=50)
    tree.process(2, Pss_Anon=20)
    shutil.rmtree(tree.root / "proc/2/task")
    (tree.root / "proc/2/smaps_rollup").unlink()
    tree.process(3)
    tree.remove("proc/3")
    assert tree.probe.read_tree([2, 3]) == (2, 3)
    assert tree.probe.read_footprint(1, [3]).complete


# ---------------------------------------------------------------- a /proc that hides

FOREIGN = """
import ctypes, json, os, sys
from forebay.memory.probe import Probe
foreign = int(sys.argv[1])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
PR_SET_DUMPABLE = 4  # without it, who gave up rights may not even read a fork of its own
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
end, ending = os.pipe()
own = os.fork()
if not own:
    os.close(ending)
    os.read(end, 1)  # to the end of this script
    os._exit(0)
probe = Probe()
seen = probe.read_footprint(os.getpid(), [own, foreign])
gone = probe.read_footprint(os.getpid(), [own])
told = sorted(probe.degraded)
use = probe.read_cpu([foreign])[foreign]
print(json.dumps([seen.complete, gone.complete, seen.pids == (own,), told, use is not None]))
"""


def read_foreign(mount: Iterable[str] = ()) -> list:
    """What a process without rights reads of one of root's, with /proc mounted so."""
    if os.getuid():
        give_up("reading another user's process needs root to make one")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as foreign:
        command = [sys.executable, "-c", FOREIGN, str(foreign.pid)]
        if mount:
            wrapped = f'{" ".join(mount)} && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", wrapped, "sh", *command]
        answer = subprocess.run(command, capture_output=True, timeout=60, check=False)
    if answer.returncode and b"mount" in answer.stderr:
        give_up(f"cannot mount a /proc of one's own: {answer.stderr.decode()}")
    assert not answer.returncode, answer.stderr.decode()
    return json.loads(answer.stdout)


@pytest.mark.cgroup
def test_a_process_of_another_user_makes_the_footprint_incomplete() -> None:
    seen, gone, only_own, told, has_use = read_foreign()
    assert (seen, gone, only_own) == (False, True, True)
    assert told == ["smaps_rollup cannot be read: Permission denied"]
    assert has_use  # the scheduler's counts are open to all


@pytest.mark.cgroup
@pytest.mark.parametrize("level", [1, 2])
def test_a_process_that_proc_hides_makes_the_footprint_incomplete(level: int) -> None:
    mount = ["mount", "-t", "proc", "-o", f"hidepid={level}", "proc", "/proc"]
    seen, gone, only_own, told, has_use = read_foreign(mount)
    assert (seen, gone, only_own, has_use) == (False, True, True, False)
    assert told


WITHOUT_PROC = """
import json, os, sys
from forebay.memory.probe import Probe
from forebay.memory.limits import headroom, usable_cpus
probe = Probe()
room = headroom(probe)
footprint = probe.read_footprint(os.getpid(), [os.getppid()])
probe.read_events(), probe.read_own_group([os.getpid()]), probe.read_cpu([os.getpid()])
probe.read_pressure(), probe.read_statm(), probe.read_max_map_count(), probe.read_cgroups()
first = probe.degraded
headroom(probe)
print(json.dumps([
    room.bytes, room.limit, footprint.complete, usable_cpus(probe), sorted(first),
    probe.degraded == first,
]))
"""


@pytest.mark.cgroup
def test_without_a_proc_what_can_be_read_is_read_and_the_rest_is_said_once() -> None:
    if os.getuid():
        give_up("hiding /proc needs root")
    wrapped = 'mount -t tmpfs none /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", wrapped, "sh", sys.executable, "-c", WITHOUT_PROC]
    answer = subprocess.run(command, capture_output=True, timeout=60, check=False)
    if answer.returncode and b"mount" in answer.stderr:
        give_up(f"cannot hide /proc: {answer.stderr.decode()}")
    assert not answer.returncode, answer.stderr.decode()
    free_bytes, limit_bytes, complete, cpus, told, same = json.loads(answer.stdout)
    assert 0 < free_bytes <= limit_bytes <= Probe().read_host().total_bytes
    assert (complete, same) == (False, True)
    assert 1 <= cpus <= len(os.sched_getaffinity(0))
    assert any("meminfo" in reason for reason in told)
