"""A byte budget is kept, measured from outside, and costs no batch.

`python -m tests.budget.harness` prints what these tests judge as one table.
"""

from __future__ import annotations

import os

import pytest

from forebay.bench.cgroup import GroupUnavailable, MemoryGroup
from tests.budget.harness import MIB, run_job, torch_digests
from tests.budget.workloads import WORKLOADS

CASES = [(name, budget) for name, each in WORKLOADS.items() for budget in each.budgets_mib]

pytestmark = pytest.mark.cgroup


@pytest.fixture(autouse=True)
def memory_group() -> None:
    """Without a memory cgroup nothing can be said: a reason here, a failure in CI."""
    try:
        with MemoryGroup():
            pass
    except GroupUnavailable as unavailable:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to measure budgets. {unavailable}")
        pytest.skip(str(unavailable))


@pytest.mark.parametrize(("workload", "budget_mib"), CASES)
def test_torchs_batches_arrive_within_the_budget(workload: str, budget_mib: int) -> None:
    verdict = run_job("forebay", workload, budget_mib)
    assert verdict.error is None
    assert verdict.digests == torch_digests(workload), "not the batches that torch gives"
    assert verdict.readings > 0, "nothing was read outside of first occurrences"
    peak_mib = verdict.peak_bytes / MIB
    assert verdict.kept, f"{peak_mib:.1f} MiB were held, the budget is {budget_mib} MiB"


@pytest.mark.parametrize("workload", ["hoarder", "slow consumer", "decoding peak"])
def test_a_loader_without_a_budget_is_seen_to_break_it(workload: str) -> None:
    assert not run_job("torch", workload, WORKLOADS[workload].budgets_mib[0]).kept
