"""Which groups a process is in and what they say, on made-up trees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.memory.cgroup import count_cpus
from forebay.units import MIB
from tests.memory.trees import UNLIMITED_V1, Tree


def test_v1_reads_the_chain_from_the_own_group_to_the_root(tree: Tree) -> None:
    tree.member("4:memory:/a/b", "0::/")
    for path in ("/a/b", "/a", ""):
        tree.v1(path)
    assert [group.path for group in tree.probe.read_cgroups()] == ["/a/b", "/a", "/"]


def test_v1_reads_the_totals_of_the_group_and_all_below(tree: Tree) -> None:
    tree.member("4:memory:/a")
    tree.v1("/a", limit=100, usage=90, anon=30, shmem=20, inactive=25, active=15)
    group = tree.probe.read_cgroups()[0]
    assert (group.version, group.limit_bytes, group.usage_bytes) == (1, 100, 90)
    assert (group.anon_bytes, group.shmem_bytes, group.held_bytes) == (30, 20, 50)
    assert group.source == "cgroup /a memory.limit_in_bytes"


@pytest.mark.parametrize("printed", [UNLIMITED_V1, 2**63 - 65536, 2**63 - 1, -1])
def test_v1_prints_no_limit_in_several_ways(tree: Tree, printed: int) -> None:
    tree.member("4:memory:/a")
    tree.v1("/a", limit=printed)
    assert tree.probe.read_cgroups()[0].limit_bytes is None


def test_v1_tells_a_limit_above_the_container(tree: Tree) -> None:
    tree.member("4:memory:/docker/abc")
    tree.v1("", limit=900 * MIB, usage=10, hierarchical=500 * MIB)
    (group,) = tree.probe.read_cgroups()
    assert group.limit_bytes == 500 * MIB
    assert group.source == "cgroup / hierarchical_memory_limit"


def test_v1_keeps_its_own_limit_when_none_above_is_tighter(tree: Tree) -> None:
    tree.member("4:memory:/docker/abc")
    tree.v1("", limit=500 * MIB, hierarchical=500 * MIB)
    (group,) = tree.probe.read_cgroups()
    assert group.source == "cgroup / memory.limit_in_bytes"


def test_v2_reads_the_chain_and_leaves_out_groups_without_memory_files(tree: Tree) -> None:
    tree.member("0::/a/b/leaf")
    tree.v2("/a/b", limit=200)
    tree.v2("/a", limit=100)
    (tree.root / "cgroup/a/b/leaf").mkdir()
    groups = tree.probe.read_cgroups()
    assert [(g.path, g.version, g.limit_bytes) for g in groups] == [
        ("/a/b", 2, 200),
        ("/a", 2, 100),
    ]


def test_v2_reads_all_lines_that_matter(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a", limit=99, usage=90, anon=10, shmem=20, inactive=5, active=6, slab=7)
    group = tree.probe.read_cgroups()[0]
    assert (group.anon_bytes, group.shmem_bytes, group.held_bytes) == (10, 20, 90 - 5 - 6 - 7)


def test_v2_max_is_no_limit(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a")
    assert tree.probe.read_cgroups()[0].binding_bytes is None


def test_v2_high_binds_below_max(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a", limit=100, high=80)
    group = tree.probe.read_cgroups()[0]
    assert (group.binding_bytes, group.source) == (80, "cgroup /a memory.high")


def test_hybrid_reads_memory_from_v1_and_pressure_from_v2(tree: Tree) -> None:
    tree.member("4:memory:/a", "1:cpu,cpuacct:/", "0::/user")
    tree.v1("/a", limit=100)
    tree.write("cgroup/unified/cgroup.controllers", "")
    tree.write("cgroup/unified/user/memory.pressure", "some avg10=12.50 avg60=0.00 total=1")
    probe = tree.probe
    pressure = probe.read_pressure()
    assert probe.read_cgroups()[0].limit_bytes == 100
    assert pressure is not None
    assert (pressure.some_avg10_frac, pressure.source) == (0.125, "cgroup /user")


def test_hybrid_with_memory_in_the_second_tree_reads_it_there(tree: Tree) -> None:
    tree.member("1:cpu,cpuacct:/", "0::/user")
    tree.v2("/user", mount="cgroup/unified", limit=70)
    assert tree.probe.read_cgroups()[0].limit_bytes == 70


@pytest.mark.parametrize("path", ["/docker/abc", "/../../elsewhere", "/"])
def test_a_path_that_the_container_cannot_see_means_the_mount(tree: Tree, path: str) -> None:
    tree.member(f"0::{path}")
    tree.v2("", limit=100, usage=1)
    assert [(g.path, g.limit_bytes) for g in tree.probe.read_cgroups()] == [("/", 100)]


def test_a_path_below_the_containers_mount_is_found_by_its_tail(tree: Tree) -> None:
    tree.member("4:memory:/docker/abc/init.scope")
    tree.v1("", limit=100)
    tree.v1("/init.scope", limit=200)
    assert [g.limit_bytes for g in tree.probe.read_cgroups()] == [200, 100]


def test_without_proc_self_cgroup_the_mount_still_counts(tree: Tree) -> None:
    tree.v2("", limit=100, usage=1)
    assert [g.limit_bytes for g in tree.probe.read_cgroups()] == [100]


def test_a_machine_without_groups_has_none(tree: Tree) -> None:
    probe = tree.probe
    assert probe.read_cgroups() == ()
    assert probe.read_cpu_groups() == ()
    assert probe.degraded == frozenset()


def test_a_closed_limit_is_none_and_said(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a", limit=100, usage=60)
    tree.close("cgroup/a/memory.max")
    probe = tree.probe
    assert probe.read_cgroups()[0].limit_bytes is None
    assert any("memory.max cannot be read" in reason for reason in probe.degraded)


def test_a_reason_is_said_once_however_often_it_is_met(tree: Tree) -> None:
    tree.member("0::/a/b")
    for path in ("/a/b", "/a"):
        tree.v2(path, limit="lots", usage=60)
    probe = tree.probe
    for _ in range(3):
        probe.read_cgroups()
    assert probe.degraded == {"memory.max is not a number"}


@settings(deadline=None)
@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_list_of_cpus_counts_each_once(cpus: set[int]) -> None:
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    text = ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in ranges)
    assert count_cpus(text + "\n") == len(cpus)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2"])
def test_what_is_no_list_of_cpus_is_none(text: str) -> None:
    assert count_cpus(text) is None
