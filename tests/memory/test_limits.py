"""The tightest limit binds, wherever it is."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.memory.limits import (
    Headroom,
    Limit,
    decide_cpus,
    decide_headroom,
    decide_limit,
    headroom,
    memory_limit,
    usable_cpus,
)
from forebay.memory.probe import (
    CgroupReading,
    CpuReading,
    HostReading,
    RlimitReading,
    StatmReading,
)
from forebay.units import GIB, MIB
from tests.memory.trees import UNLIMITED_V1, Tree

NO_RLIMITS = RlimitReading(None, None, None)
SIZES = st.integers(0, 1 << 45)


@st.composite
def groups(draw: st.DrawFn) -> CgroupReading:
    return CgroupReading(
        path="/a",
        version=2,
        limit_bytes=draw(st.none() | SIZES),
        high_bytes=draw(st.none() | SIZES),
        limit_source="cgroup /a memory.max",
        usage_bytes=draw(st.none() | SIZES),
        anon_bytes=draw(SIZES),
        shmem_bytes=draw(SIZES),
        inactive_file_bytes=draw(SIZES),
        active_file_bytes=draw(SIZES),
    )


HOSTS = st.builds(HostReading, SIZES, SIZES)


def test_a_container_limit_binds_below_the_host(tree: Tree) -> None:
    tree.host()
    tree.member("4:memory:/docker/abc")
    tree.v1("/docker/abc", limit=900 * MIB)
    tree.v1("/docker")
    limit = memory_limit(tree.probe)
    assert limit == Limit(900 * MIB, "cgroup /docker/abc memory.limit_in_bytes")


def test_the_tightest_ancestor_binds(tree: Tree) -> None:
    tree.host()
    tree.member("0::/pod/job/task")
    tree.v2("/pod/job/task", limit=8 * GIB)
    tree.v2("/pod/job", limit=2 * GIB)
    tree.v2("/pod", limit=4 * GIB)
    assert memory_limit(tree.probe) == Limit(2 * GIB, "cgroup /pod/job memory.max")


def test_without_groups_the_host_binds(tree: Tree) -> None:
    tree.host(total_bytes=3 * GIB)
    assert memory_limit(tree.probe) == Limit(3 * GIB, "host memory")


def test_a_limit_above_the_machine_does_not_bind(tree: Tree) -> None:
    tree.host(total_bytes=3 * GIB)
    tree.member("0::/a")
    tree.v2("/a", limit=8 * GIB)
    assert memory_limit(tree.probe).source == "host memory"


def test_the_address_space_binds_when_it_is_least() -> None:
    rlimits = RlimitReading(GIB, None, None)
    host = HostReading(4 * GIB, 3 * GIB)
    own = StatmReading(GIB // 4, 1, 0)
    assert decide_limit((), host, rlimits) == Limit(GIB, "RLIMIT_AS")
    room = decide_headroom((), host, rlimits, own)
    assert room == Headroom(GIB - GIB // 4, GIB, "RLIMIT_AS")


def test_headroom_follows_the_fullest_group_not_the_smallest(tree: Tree) -> None:
    tree.host()
    tree.member("0::/pod/task")
    tree.v2("/pod/task", limit=2 * GIB, usage=GIB)
    tree.v2("/pod", limit=8 * GIB, usage=8 * GIB - 100 * MIB)
    room = headroom(tree.probe)
    assert room == Headroom(100 * MIB, 8 * GIB, "cgroup /pod memory.max")


def test_file_cache_is_headroom(tree: Tree) -> None:
    tree.host()
    tree.member("4:memory:/a")
    tree.v1("/a", limit=GIB, usage=GIB, inactive=300 * MIB, active=200 * MIB)
    assert headroom(tree.probe).bytes == 500 * MIB


def test_a_host_that_is_full_leaves_less_than_a_group(tree: Tree) -> None:
    tree.host(available_bytes=50 * MIB)
    tree.member("0::/a")
    tree.v2("/a", limit=GIB)
    assert headroom(tree.probe) == Headroom(50 * MIB, 64 * GIB, "host memory")


@settings(deadline=None)
@given(st.lists(groups()), HOSTS)
def test_no_limit_is_smaller_than_the_one_found(
    chain: list[CgroupReading], host: HostReading
) -> None:
    found = decide_limit(chain, host, NO_RLIMITS).bytes
    every = [host.total_bytes, *(g.limit_bytes for g in chain), *(g.high_bytes for g in chain)]
    assert found == min(value for value in every if value is not None)


@settings(deadline=None)
@given(st.lists(groups()), HOSTS, groups())
def test_one_group_more_never_leaves_more(
    chain: list[CgroupReading], host: HostReading, more: CgroupReading
) -> None:
    before = decide_headroom(chain, host, NO_RLIMITS, None)
    after = decide_headroom([*chain, more], host, NO_RLIMITS, None)
    assert 0 <= after.bytes <= before.bytes


LIMITS = st.sampled_from(["max", 0, 100 * MIB, 2 * GIB, 1 << 63, UNLIMITED_V1, "lots", ""])
USED = st.integers(0, 3 * GIB)
V1_GROUP = st.fixed_dictionaries(
    {"limit": LIMITS, "usage": USED, "inactive": USED, "hierarchical": st.integers(GIB, 1 << 63)}
)
V2_GROUP = st.fixed_dictionaries(
    {"limit": LIMITS, "high": LIMITS, "usage": USED, "active": USED, "slab": USED}
)
PATHS = st.sampled_from(["", "/a", "/a/b", "/a/b/c", "/d"])
CHANGES = st.one_of(
    st.tuples(st.just("v1"), PATHS, V1_GROUP),
    st.tuples(st.just("v2"), PATHS, V2_GROUP),
    st.tuples(st.just("member"), PATHS, st.sampled_from(["4:memory:", "0::", "2:cpu:"])),
    st.tuples(st.just("remove"), PATHS, st.sampled_from(["memory", "."])),
    st.tuples(st.just("close"), PATHS, st.sampled_from(["memory.max", "memory.stat"])),
    st.tuples(st.just("host"), st.just(""), st.integers(0, 4 * GIB)),
)


def change(tree: Tree, kind: str, path: str, what: Any) -> None:
    match kind:
        case "v1":
            tree.v1(path, **what)
        case "v2":
            tree.v2(path, **what)
        case "member":
            tree.member(f"{what}{path or '/'}")
        case "remove":
            shutil.rmtree(tree.root / "cgroup" / what / path.lstrip("/"), ignore_errors=True)
        case "close":
            tree.close(f"cgroup{path}/{what}")
        case "host":
            tree.host(available_bytes=what)


@settings(deadline=None)
@given(st.lists(CHANGES, max_size=12))
def test_headroom_of_groups_with_a_limit_is_headroom_of_all_groups(
    changes: list[tuple[str, str, Any]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        (tree.root / "proc/self").mkdir(parents=True)
        tree.host()
        probe = tree.probe
        for each in changes:
            with contextlib.suppress(OSError):  # a closed file cannot be written again
                change(tree, *each)
            every = decide_headroom(probe.read_cgroups(), probe.read_host(), NO_RLIMITS, None)
            assert headroom(probe) == every


def test_headroom_sees_the_address_space_bind(monkeypatch: pytest.MonkeyPatch, tree: Tree) -> None:
    tree.host()
    tree.write("proc/self/statm", "10 1 0")
    probe = tree.probe
    monkeypatch.setattr(type(probe), "read_rlimits", lambda _: RlimitReading(100 * MIB, None, None))
    free_bytes = 100 * MIB - 10 * os.sysconf("SC_PAGE_SIZE")
    assert headroom(probe) == Headroom(free_bytes, 100 * MIB, "RLIMIT_AS")


def test_a_quota_is_rounded_up(tree: Tree) -> None:
    tree.member("2:cpu,cpuacct:/a")
    tree.write("cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", 150_000)
    tree.write("cgroup/cpu,cpuacct/a/cpu.cfs_period_us", 100_000)
    assert decide_cpus(8, tree.probe.read_cpu_groups()) == 2


def test_the_tightest_quota_of_all_ancestors_counts(tree: Tree) -> None:
    tree.member("0::/a/b")
    tree.v2("/a/b")
    for path, quota in (("/a/b", "max 100000"), ("/a", "300000 100000"), ("", "500000 100000")):
        tree.write(f"cgroup{path}/cpu.max", quota)
    assert decide_cpus(8, tree.probe.read_cpu_groups()) == 3


def test_a_quota_of_minus_one_is_none(tree: Tree) -> None:
    tree.member("2:cpu:/a")
    tree.write("cgroup/cpu/a/cpu.cfs_quota_us", -1)
    tree.write("cgroup/cpu/a/cpu.cfs_period_us", 100_000)
    assert tree.probe.read_cpu_groups() == ()


@pytest.mark.parametrize("name", ["cpuset.effective_cpus", "cpuset.cpus"])
def test_a_cpuset_counts(tree: Tree, name: str) -> None:
    tree.member("3:cpuset:/a")
    tree.write(f"cgroup/cpuset/a/{name}", "0-2,7")
    assert decide_cpus(8, tree.probe.read_cpu_groups()) == 4


def test_a_tenth_of_a_cpu_is_one(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a")
    tree.write("cgroup/a/cpu.max", "10000 100000")
    assert usable_cpus(tree.probe) == 1


@settings(deadline=None)
@given(
    st.integers(1, 512),
    st.lists(st.builds(CpuReading, st.just("/"), st.none() | st.floats(0.01, 99), st.none())),
)
def test_usable_cpus_are_between_one_and_the_affinity(
    affinity: int, said: list[CpuReading]
) -> None:
    assert 1 <= decide_cpus(affinity, said) <= affinity


def test_a_quota_of_max_below_a_quota_is_that_quota(tree: Tree) -> None:
    tree.member("2:cpu,cpuacct:/a/b", "3:cpuset:/a")
    for path, quota_us in (("/a/b", -1), ("/a", 250_000)):
        tree.write(f"cgroup/cpu,cpuacct{path}/cpu.cfs_quota_us", quota_us)
        tree.write(f"cgroup/cpu,cpuacct{path}/cpu.cfs_period_us", 100_000)
    tree.write("cgroup/cpuset/a/cpuset.cpus", "0-15")
    assert decide_cpus(64, tree.probe.read_cpu_groups()) == 3


def test_what_python_was_told_counts(monkeypatch: pytest.MonkeyPatch, tree: Tree) -> None:
    monkeypatch.setattr(os, "process_cpu_count", lambda: 1, raising=False)
    assert usable_cpus(tree.probe) == 1
