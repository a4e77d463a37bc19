"""Reports of wrong numbers: pinned bytes, summed RSS, the host's CPUs and the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.memory.limits import Limit, decide_cpus, memory_limit
from forebay.memory.pinned import advise_batch_size, pinned_bytes
from forebay.units import GIB, KIB
from tests.cases.conftest import MIB, Watch
from tests.memory.trees import UNLIMITED_V1, Tree

HOST_CPUS = 80
LIMIT_MIB = 900


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A made-up machine of 24 GiB."""
    made = Tree(tmp_path)
    made.host(24 * GIB, 20 * GIB)
    return made


# ---------------------------------------------------------------- 17


@pytest.mark.parametrize(
    ("batches", "pinned"),
    [
        ([128 * MIB - 1], 128 * MIB),
        ([128 * MIB + 1], 256 * MIB),
        ([40 * MIB] * 3, 192 * MIB),
        ([int(129.5 * MIB)], 256 * MIB),
    ],
)
def test_17_what_torch_pins_is_predicted(batches: list[int], pinned: int) -> None:
    assert pinned_bytes(batches) == pinned


def test_17_eight_gib_are_pinned_where_four_were_asked_for() -> None:
    weights = [128 * MIB + KIB] * 32
    assert pinned_bytes(weights) == 8 * GIB
    assert sum(weights) < 4.001 * GIB


def test_17_a_batch_of_63_instead_of_64_halves_it() -> None:
    image_bytes, mask_bytes = 2 * MIB + KIB, MIB + KIB
    assert advise_batch_size([image_bytes, mask_bytes], 64) == 63
    before, after = (pinned_bytes([size * image_bytes, size * mask_bytes]) for size in (64, 63))
    assert 2 * after == before


# ---------------------------------------------------------------- 24


@pytest.mark.cgroup
def test_24_the_footprint_is_the_groups_and_rss_reduces_nothing(watch: Watch) -> None:
    """Within 3 % of what the group holds more, the main process' array included, as reported."""
    budget_mib, main_mib = 160, 500
    seen = watch("inherited", main_mib=main_mib, budget_mib=budget_mib)
    before, told = seen.facts
    risen_bytes = seen.risen_bytes(before["t_s"], told["t_s"])
    main_bytes = main_mib * MIB
    assert told["footprint"] + main_bytes == pytest.approx(risen_bytes + main_bytes, rel=0.03)
    # RSS charges the array to each of the four workers and to their template.
    assert told["rss"] > 15 * budget_mib * MIB
    assert told["workers"] == 4
    assert told["stance"] == "grow"
    assert "4 fetch(es) at once" in told["explained"]


# ---------------------------------------------------------------- 48


def limit_v1(tree: Tree, path: str, quota_us: int) -> None:
    tree.write(f"cgroup/cpu,cpuacct{path}/cpu.cfs_quota_us", quota_us)
    tree.write(f"cgroup/cpu,cpuacct{path}/cpu.cfs_period_us", 100_000)


def half_a_core_v1(tree: Tree) -> None:
    tree.member("2:cpu,cpuacct:/pod")
    limit_v1(tree, "/pod", 50_000)


def half_a_core_v2(tree: Tree) -> None:
    tree.member("0::/pod")
    tree.v2("/pod")
    tree.write("cgroup/pod/cpu.max", "50000 100000")


def unlimited_below_half_a_core_v1(tree: Tree) -> None:
    tree.member("2:cpu,cpuacct:/pod/task")
    limit_v1(tree, "/pod/task", -1)
    limit_v1(tree, "/pod", 50_000)


def more_below_half_a_core_v2(tree: Tree) -> None:
    tree.member("0::/pod/task")
    for path, quota in (("/pod/task", "400000 100000"), ("/pod", "50000 100000"), ("", "max")):
        tree.v2(path)
        tree.write(f"cgroup{path}/cpu.max", quota)


def one_by_cpuset(tree: Tree) -> None:
    tree.member("3:cpuset:/pod")
    tree.write("cgroup/cpuset/pod/cpuset.cpus", "0")


@pytest.mark.parametrize(
    "limited",
    [
        half_a_core_v1,
        half_a_core_v2,
        unlimited_below_half_a_core_v1,
        more_below_half_a_core_v2,
        one_by_cpuset,
    ],
)
def test_48_a_container_of_one_cpu_on_a_host_of_eighty(
    tree: Tree, limited: Callable[[Tree], None]
) -> None:
    limited(tree)
    assert decide_cpus(HOST_CPUS, tree.probe.read_cpu_groups()) == 1


def test_48_a_quota_of_max_leaves_the_affinity(tree: Tree) -> None:
    tree.member("0::/pod")
    tree.v2("/pod")
    tree.write("cgroup/pod/cpu.max", "max 100000")
    assert decide_cpus(HOST_CPUS, tree.probe.read_cpu_groups()) == HOST_CPUS


# ---------------------------------------------------------------- 49


def test_49_a_limit_is_found_in_both_versions_where_the_parent_is_smaller(tree: Tree) -> None:
    tree.member("4:memory:/job/step")
    tree.v1("/job/step", limit=2 * GIB)
    tree.v1("/job", limit=LIMIT_MIB * MIB)
    tree.v1("", limit=UNLIMITED_V1)
    assert memory_limit(tree.probe) == Limit(LIMIT_MIB * MIB, "cgroup /job memory.limit_in_bytes")
    tree.remove("cgroup")
    tree.member("0::/job/step")
    tree.v2("/job/step", limit="max")
    tree.v2("/job", limit=LIMIT_MIB * MIB)
    assert memory_limit(tree.probe) == Limit(LIMIT_MIB * MIB, "cgroup /job memory.max")


@pytest.mark.cgroup
def test_49_a_loaders_share_is_one_of_the_limit_and_not_of_the_host(watch: Watch) -> None:
    (told,) = watch("share", limit_mib=LIMIT_MIB, budget="70%").facts
    assert told["limit"] == pytest.approx(LIMIT_MIB * MIB, abs=MIB)
    assert told["host"] > 2 * told["limit"]
    assert told["budget"] == pytest.approx(0.7 * LIMIT_MIB * MIB, abs=MIB)


@pytest.mark.cgroup
@pytest.mark.parametrize("budget", ["80%", "100%", "auto"])
def test_49_no_budget_is_larger_than_what_the_limit_leaves(watch: Watch, budget: str) -> None:
    seen = watch("share", limit_mib=LIMIT_MIB, budget=budget)
    main_bytes = seen.trace.level_bytes(seen.ready_s)
    assert 0 < seen.facts[0]["budget"] <= LIMIT_MIB * MIB - main_bytes
