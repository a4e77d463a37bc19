"""What this process' groups have met and hold is told, as far as it is ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.probe import MemoryEvents
from forebay.memory.readings import events_since
from forebay.units import MIB
from tests.memory.conftest import run_inside
from tests.memory.trees import Tree

COUNTS = st.integers(0, 1 << 64)
EVENTS = st.builds(MemoryEvents, COUNTS, COUNTS, COUNTS, st.sampled_from(["cgroup /a", "cgroup /"]))


# ---------------------------------------------------------------- where


def test_a_limit_that_is_set_at_run_time_is_seen(tree: Tree) -> None:
    tree.member("4:memory:/a")
    tree.v1("/a")
    probe = tree.probe
    assert probe.read_limited_groups() == ()
    tree.v1("/a", limit=100)
    assert [group.limit_bytes for group in probe.read_limited_groups()] == [100]


def test_a_move_is_followed(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a", limit=100)
    tree.v2("/b", limit=200)
    probe = tree.probe
    probe.read_limited_groups()
    tree.member("0::/b")
    assert [group.path for group in probe.read_limited_groups()] == ["/b"]


def test_a_group_that_vanishes_leaves_those_above(tree: Tree) -> None:
    tree.member("4:memory:/x/a")
    tree.v1("", limit=300)
    tree.v1("/x/a", limit=100)
    probe = tree.probe
    probe.read_limited_groups()
    tree.remove("cgroup/memory/x")
    assert [group.path for group in probe.read_limited_groups()] == ["/"]


def test_groups_that_come_late_are_found(tree: Tree) -> None:
    probe = tree.probe
    assert probe.read_limited_groups() == ()
    tree.member("0::/a")
    tree.v2("/a", limit=100)
    assert [group.path for group in probe.read_limited_groups()] == ["/a"]


def test_a_closed_membership_leaves_the_mount_and_is_said_once(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a", limit=100)
    tree.v2("", limit=300)
    probe = tree.probe
    probe.read_limited_groups()
    tree.close("proc/self/cgroup")
    for _ in range(3):
        assert [group.path for group in probe.read_limited_groups()] == ["/"]
    assert probe.degraded == {"cgroup cannot be read: Is a directory"}


def test_a_group_with_another_alphabet_is_found(tree: Tree) -> None:
    (tree.root / "proc/self/cgroup").write_bytes("0::/größe".encode())
    tree.v2("/größe", limit=100)
    assert [group.limit_bytes for group in tree.probe.read_cgroups()] == [100]


# ---------------------------------------------------------------- events


def test_v1_events_are_summed_over_the_chain(tree: Tree) -> None:
    tree.member("4:memory:/a/b")
    tree.v1("/a/b", kills=1, fails=20)
    tree.v1("/a", kills=2, fails=30)
    assert tree.probe.read_events() == MemoryEvents(3, 0, 50, "cgroup /a/b, /a")


def test_v2_events_of_groups_above_are_only_their_own(tree: Tree) -> None:
    tree.member("0::/a/b")
    tree.v2("/a/b", events=(1, 10, 100), local_events=(0, 0, 0))
    tree.v2("/a", events=(9, 99, 999), local_events=(2, 20, 200))
    assert tree.probe.read_events() == MemoryEvents(3, 30, 300, "cgroup /a/b, /a")


def test_v2_events_without_a_local_file_are_those_there_are(tree: Tree) -> None:
    tree.member("0::/a/b")
    tree.v2("/a/b", events=(1, 10, 100))
    tree.v2("/a", events=(2, 20, 200))
    assert tree.probe.read_events() == MemoryEvents(3, 30, 300, "cgroup /a/b, /a")


def test_without_groups_the_machine_tells_its_kills(tree: Tree) -> None:
    assert tree.probe.read_events() == MemoryEvents(0, 0, 0, "not told")
    tree.write("proc/vmstat", "nr_free_pages 1\noom_kill 4\npgfault 1")
    assert tree.probe.read_events() == MemoryEvents(4, 0, 0, "host")


@given(EVENTS, EVENTS)
def test_events_between_two_readings_are_never_below_zero(
    before: MemoryEvents, now: MemoryEvents
) -> None:
    since = events_since(before, now)
    assert min(since.oom_kills, since.high, since.max) >= 0


@given(EVENTS, COUNTS)
def test_kills_between_two_readings_are_those_that_were_added(
    before: MemoryEvents, more: int
) -> None:
    now = MemoryEvents(before.oom_kills + more, before.high, before.max, before.source)
    assert events_since(before, now) == MemoryEvents(more, 0, 0, before.source)


def test_events_of_other_groups_are_no_news() -> None:
    before = MemoryEvents(0, 0, 0, "cgroup /a")
    now = MemoryEvents(7, 7, 7, "cgroup /b")
    assert events_since(before, now) == MemoryEvents(0, 0, 0, "cgroup /b")


# ---------------------------------------------------------------- what is held


def test_v1_tells_what_the_own_group_holds_when_the_given_are_alone_in_it(tree: Tree) -> None:
    tree.member("4:memory:/a/b")
    tree.v1("/a/b", anon=30, shmem=20, swap=5, inactive=900, procs=(7, 8))
    tree.v1("/a", anon=99, procs=(9,))
    assert tree.probe.read_own_group([8, 7]) == 55


def test_v2_tells_what_the_own_group_holds_when_the_given_are_alone_in_it(tree: Tree) -> None:
    tree.member("0::/a/b")
    tree.v2("/a/b", anon=30, shmem=20, swap=5, inactive=900, procs=(7, 8))
    tree.v2("/a", anon=99, procs=(9,))
    assert tree.probe.read_own_group([7, 8]) == 55


def test_a_leaf_without_memory_files_means_the_group_above_it(tree: Tree) -> None:
    tree.member("0::/a/leaf")
    tree.v2("/a", anon=30)
    tree.write("cgroup/a/leaf/cgroup.procs", "7")
    assert tree.probe.read_own_group([7]) == 30


@pytest.mark.parametrize("others", [(9,), (0,), (7, 9)])
def test_with_others_in_the_group_nothing_is_told(tree: Tree, others: tuple[int, ...]) -> None:
    tree.member("0::/a")
    tree.v2("/a", anon=30, procs=(7, *others))
    assert tree.probe.read_own_group([7]) is None


def test_with_others_in_a_group_below_nothing_is_told(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a", anon=30, procs=(7,))
    tree.v2("/a/b")
    tree.v2("/a/b/c", procs=(9,))
    assert tree.probe.read_own_group([7]) is None
    assert tree.probe.read_own_group([7, 9]) == 30


def test_with_one_of_the_given_elsewhere_nothing_is_told(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a", anon=30, procs=(7,))
    tree.process(8)
    assert tree.probe.read_own_group([7, 8]) is None


def test_those_of_the_given_that_have_ended_do_not_matter(tree: Tree) -> None:
    tree.process(1)
    tree.process(8, state="Z")
    tree.member("0::/a")
    tree.v2("/a", anon=30, procs=(7,))
    assert tree.probe.read_own_group([7, 8, 9]) == 30


@pytest.mark.parametrize("text", ["7 x", "-7", "7" * 5000])
def test_garbage_among_the_members_tells_nothing(tree: Tree, text: str) -> None:
    tree.member("0::/a")
    tree.v2("/a", anon=30)
    tree.write("cgroup/a/cgroup.procs", text)
    assert tree.probe.read_own_group([7]) is None


def test_closed_members_tell_nothing_and_it_is_said(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a", anon=30)
    tree.close("cgroup/a/cgroup.procs")
    probe = tree.probe
    assert probe.read_own_group([7]) is None
    assert any("cgroup.procs cannot be read" in reason for reason in probe.degraded)


def test_members_are_read_from_tasks_where_there_is_nothing_else(tree: Tree) -> None:
    tree.member("4:memory:/a")
    tree.v1("/a", anon=30)
    (tree.root / "cgroup/memory/a/cgroup.procs").unlink()
    tree.write("cgroup/memory/a/tasks", "7")
    assert tree.probe.read_own_group([7]) == 30


def test_without_groups_nothing_is_told(tree: Tree) -> None:
    assert tree.probe.read_own_group([7]) is None


# ---------------------------------------------------------------- on the machine


GROWN = """
import os
from forebay.memory.probe import Probe
probe = Probe()
ready, told = os.pipe()
end, ending = os.pipe()
before = probe.read_own_group([os.getpid()])
pid = os.fork()
if not pid:
    held = b"x" * (100 << 20)
    os.write(told, b"r")
    os.close(ending)
    os.read(end, 1)
    os._exit(0)
os.read(ready, 1)
alone = probe.read_own_group([os.getpid()])
grown = probe.read_own_group([os.getpid(), pid]) - before
os.close(ending)
os.waitpid(pid, 0)
print(alone, grown)
"""


@pytest.mark.cgroup
def test_a_real_group_tells_what_a_child_added_to_it(memory_group: Callable[[int], Path]) -> None:
    alone, grown_bytes = run_inside(GROWN, memory_group(900 * MIB)).split()
    assert alone == b"None"
    assert int(grown_bytes) == pytest.approx(100 * MIB, abs=3 * MIB)


KILLED = """
import json, os
from forebay.memory.probe import Probe
probe = Probe()
before = probe.read_events()
pid = os.fork()
if not pid:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    held = [bytearray(8 << 20) for _ in range(64)]
    for each in held:
        each[:] = b"x" * len(each)
    os._exit(0)
status = os.waitpid(pid, 0)[1]
now = probe.read_events()
print(json.dumps([status, now.oom_kills - before.oom_kills, now.max - before.max]))
"""


@pytest.mark.cgroup
def test_a_real_kill_and_the_limit_that_was_met_are_told(
    memory_group: Callable[[int], Path],
) -> None:
    status, kills, limit_met = json.loads(run_inside(KILLED, memory_group(200 * MIB)))
    assert os.WTERMSIG(status) == 9
    assert kills == 1
    assert limit_met > 0
