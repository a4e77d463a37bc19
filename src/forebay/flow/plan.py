"""What an engine is built from, and the numbers that follow from it.

Covers: the plan of one iterator, the part of its budget that is promised, its crew, its
order, its arena's addresses. Does not cover: building (engine.py), or what fits in general
(memory/planner.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forebay.errors import BudgetTooSmall
from forebay.flow.flight import Settings
from forebay.flow.order import Order
from forebay.memory.planner import CrewPlan, TooSmall, plan_crew
from forebay.memory.probe import Probe
from forebay.units import GIB, MIB
from forebay.workers.job import Job
from forebay.workers.streams import mix_seed

PROMISED_FRAC = 0.95
"""The `pause` mark of the design. What lies above it is for what no grant foresees: pages
that are copied between two readings, a decoder's odd peak, the kernel's own rounding."""

_MOST_UNPROMISED_BYTES = 256 * MIB
"""Such things do not grow with the budget for ever."""

_RESERVE_FACTOR = 4
"""Address space of the arena, in budgets: addresses are free, and fragments need some."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine is built from.

    Attributes:
        budget_bytes: All that may exist because of the loader.
        limit_source: Which limit the budget was taken from; empty for a fixed size.
        lead: Batches that torch draws ahead.
        most_ahead: Most batches in flight or waiting.
        may_run_ahead: Whether small batches may be ordered further ahead than that.
        draws_strictly: See `Order`.
        in_order: torch's.
        batch_size: For messages.
        may_merge: Whether streams may share a process.
        is_bound: Whether batch i is made by stream i mod W.
        max_workers, max_tokens: Upper bounds set by tests; None for none.
    """

    budget_bytes: int
    limit_source: str
    lead: int
    most_ahead: int
    may_run_ahead: bool
    draws_strictly: bool
    in_order: bool
    batch_size: int | None
    may_merge: bool
    is_bound: bool
    max_workers: int | None
    max_tokens: int | None


def decide_promised(budget_bytes: int) -> int:
    """The part of a budget that is promised; the rest is for what nobody can promise."""
    return max(int(budget_bytes * PROMISED_FRAC), budget_bytes - _MOST_UNPROMISED_BYTES)


def decide_crew(plan: Plan, num_streams: int) -> CrewPlan:
    """How many processes carry the streams.

    Raises:
        BudgetTooSmall: Not even one worker fits.
    """
    promised = decide_promised(plan.budget_bytes)
    planned = plan_crew(promised, num_streams, may_merge=plan.may_merge)
    if isinstance(planned, TooSmall):
        needed = int(planned.needed_bytes / PROMISED_FRAC) + 1
        raise BudgetTooSmall.about(plan.budget_bytes, needed, 0, plan.batch_size)
    most = plan.max_workers if plan.may_merge and plan.max_workers else num_streams
    workers = min(planned.workers, most)
    tokens = min(planned.tokens, plan.max_tokens or num_streams, workers)
    return CrewPlan(workers, tokens, planned.because)


def make_order(plan: Plan, job: Job) -> Order:
    """The order of tickets that the plan asks for."""
    seed_of: Callable[[int, int], int] | None = None
    if job.seeding == "batch":
        base_seed = job.base_seed

        def seed_of(epoch: int, serial: int) -> int:
            return mix_seed(base_seed, epoch, serial)

    return Order(job.num_streams, is_bound=plan.is_bound, seed_of=seed_of)


def make_settings(plan: Plan, job: Job, crew_plan: CrewPlan) -> Settings:
    """What the scheduler is told of the plan."""
    return Settings(
        num_streams=job.num_streams,
        lead=plan.lead,
        most_ahead=plan.most_ahead,
        may_run_ahead=plan.may_run_ahead,
        draws_strictly=plan.draws_strictly,
        in_order=plan.in_order,
        batch_size=plan.batch_size,
        tokens=crew_plan.tokens,
    )


def decide_reserve(budget_bytes: int, probe: Probe) -> int:
    """Addresses to reserve: several budgets, or half of what RLIMIT_AS leaves."""
    wanted = max(budget_bytes * _RESERVE_FACTOR, GIB)
    limit = probe.read_rlimits().address_space_bytes
    if limit is None:
        return wanted
    statm = probe.read_statm()
    free = limit - (statm.vm_bytes if statm else 0)
    return max(min(wanted, budget_bytes, free // 2), MIB)


def decide_heap_share(budget_bytes: int, workers: int) -> int:
    """Freed heap that each worker may keep for its next fetch.

    A sixteenth of the budget for all, within bounds: less costs page faults anew, more is
    memory that does nothing.
    """
    return min(16 * MIB, max(MIB, budget_bytes // (16 * workers)))
