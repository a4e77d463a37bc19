"""Inside real groups the limits found are those that were set, and what is used is used.

Each of these starts an interpreter in a group of its own, so they need root and Linux.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forebay.units import MIB
from tests.memory.conftest import Groups, run_inside

pytestmark = pytest.mark.cgroup

LIMIT = """
import json
from forebay.memory.limits import memory_limit
limit = memory_limit()
print(json.dumps([limit.bytes, limit.source]))
"""

USED = """
import json
from forebay.memory.limits import headroom
before = headroom().bytes
held = b"x" * (200 << 20)
print(json.dumps(before - headroom().bytes))
"""

SHARE = """
import forebay
print(forebay.Budget("80%").size_bytes)
"""

CPUS = "from forebay import usable_cpus; print(usable_cpus())"


def test_a_limit_of_900_mib_is_found_within_1_mib(groups: Groups) -> None:
    group = groups.memory(900 * MIB)
    limit_bytes, source = json.loads(run_inside(LIMIT, group))
    assert limit_bytes == pytest.approx(900 * MIB, abs=MIB)
    assert source.startswith(f"cgroup /{group.name} memory.")


def test_a_parent_that_is_smaller_than_its_child_binds(groups: Groups) -> None:
    parent = groups.memory(500 * MIB)
    child = groups.memory(900 * MIB, above=parent)
    limit_bytes, source = json.loads(run_inside(LIMIT, child))
    assert limit_bytes == 500 * MIB
    assert source.startswith(f"cgroup /{parent.name} memory.")


def test_what_a_process_takes_leaves_that_much_less(groups: Groups) -> None:
    used_bytes = json.loads(run_inside(USED, groups.memory(900 * MIB)))
    assert used_bytes == pytest.approx(200 * MIB, rel=0.05)


def test_eighty_percent_of_900_mib_are_720_mib(groups: Groups) -> None:
    size_bytes = int(run_inside(SHARE, groups.memory(900 * MIB)))
    assert size_bytes == pytest.approx(720 * MIB, abs=MIB)


def test_file_cache_is_not_used_memory(groups: Groups, tmp_path: Path) -> None:
    # Written from inside, so that the pages are charged to the group; and brought to disk,
    # for dirty pages cannot be given back at once.
    code = f"""
import json, os
from forebay.memory.limits import headroom
from forebay.memory.probe import Probe
before = headroom().bytes
with open("{tmp_path / "cached"}", "wb", buffering=0) as file:
    for _ in range(200):
        file.write(b"x" * (1 << 20))
    os.fsync(file.fileno())
group = Probe().read_cgroups()[0]
print(json.dumps([before - headroom().bytes, group.inactive_file_bytes + group.active_file_bytes]))
"""
    used_bytes, cached_bytes = json.loads(run_inside(code, groups.memory(900 * MIB)))
    assert cached_bytes > 150 * MIB
    assert used_bytes < 20 * MIB


def test_half_a_core_is_one_cpu(groups: Groups) -> None:
    assert int(run_inside(CPUS, groups.cpu(0.5))) == 1


def test_a_core_and_a_half_are_two_cpus_at_most(groups: Groups) -> None:
    assert int(run_inside(CPUS, groups.cpu(1.5))) == min(2, len(os.sched_getaffinity(0)))


def test_one_cpu_by_affinity_is_one() -> None:
    cpu = min(os.sched_getaffinity(0))
    assert int(run_inside(CPUS, prefix=f"taskset -c {cpu}")) == 1
