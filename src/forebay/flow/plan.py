"""What an engine is built from, and the numbers that follow from it.

Covers: the plan of one iterator, the part of its budget that is promised, its crew, its
order, its arena's addresses. Does not cover: building (engine.py), or what fits in general
(memory/planner.py).
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from forebay.errors import BudgetTooSmall, ScarcityWarning
from forebay.flow.flight import Settings
from forebay.flow.order import Order
from forebay.memory.budget import Budget
from forebay.memory.planner import (
    PARKED_BYTES,
    WORKER_BYTES,
    ZYGOTE_BYTES,
    CrewPlan,
    TooSmall,
    count_carried,
    estimate_threads,
    plan_crew,
    plan_threads,
)
from forebay.memory.policy import PROMISED_FRAC
from forebay.memory.probe import Probe
from forebay.memory.seats import Seat
from forebay.options import Backend
from forebay.units import GIB, MIB, format_bytes
from forebay.workers.job import Job
from forebay.workers.streams import mix_seed

_SEAT_PATIENCE_S = 2.5
"""Idle loaders of a shared budget give their part back within 2 s (docs/design.md)."""

_WISH_PATIENCE_S = 1.0
"""Of it, for room for all workers: with less of it a loader begins with fewer."""

_SEAT_LOOK_S = 0.01
"""Between two looks at what they have given back meanwhile."""

_RESERVE_FACTOR = 4
"""Address space of the arena, in budgets: addresses are free, and fragments need some."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine is built from.

    Attributes:
        budget: All that may exist because of the loader, and who else has a part of it.
        lead: Batches that torch draws ahead.
        most_ahead: Most batches in flight or waiting.
        may_run_ahead: Whether small batches may be ordered further ahead than that.
        draws_strictly: See `Order`.
        in_order: torch's.
        batch_size: For messages.
        may_merge: Whether streams may share a process.
        may_move: Whether they can go on in another one.
        is_bound: Whether batch i is made by stream i mod W.
        backend: Processes or threads.
        may_replay: Whether workers that died are replaced.
        stall_report_s: After how long a waiting loop is told what it waits for; None for never.
        max_workers, max_tokens: Upper bounds set by tests; None for none.
    """

    budget: Budget
    lead: int
    most_ahead: int
    may_run_ahead: bool
    draws_strictly: bool
    in_order: bool
    batch_size: int | None
    may_merge: bool
    may_move: bool
    is_bound: bool
    backend: Backend
    may_replay: bool
    stall_report_s: float | None
    max_workers: int | None
    max_tokens: int | None


def take_seat(plan: Plan, num_streams: int) -> Seat:
    """A seat at the plan's budget, once there is room for a worker at it.

    Other loaders of the budget are asked for what they hold beyond their own seats; that
    takes them a moment, and what their consumers keep they cannot give.

    Raises:
        BudgetTooSmall: Their seats leave too little, now and for good.
    """
    streams = 1 if plan.may_merge else num_streams
    least = ZYGOTE_BYTES + WORKER_BYTES + PARKED_BYTES * (streams - 1)
    if plan.backend == "thread" or (plan.backend == "auto" and plan.budget.size_bytes < least):
        least = estimate_threads(num_streams)
    seat = plan.budget.sit(least)
    if not seat.is_alone:
        wish = ZYGOTE_BYTES + 2 * WORKER_BYTES * num_streams
        _wait_for_room(seat, max(least, min(wish, seat.fair_bytes)), _WISH_PATIENCE_S)
        _wait_for_room(seat, least, _SEAT_PATIENCE_S - _WISH_PATIENCE_S)
    return seat


def _wait_for_room(seat: Seat, size_bytes: int, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while seat.allowance_bytes < size_bytes and time.monotonic() < until:
        seat.wanted_bytes = size_bytes - seat.allowance_bytes
        time.sleep(_SEAT_LOOK_S)
    seat.wanted_bytes = 0


def decide_crew(plan: Plan, seat: Seat, num_streams: int, free_files: int) -> CrewPlan:
    """How many processes or threads carry the streams.

    Args:
        plan: What is to be built.
        seat: Its part of the budget.
        num_streams: torch's `num_workers`.
        free_files: Descriptors that this process may still open.

    Raises:
        BudgetTooSmall: Not even one worker fits.
    """
    planned: CrewPlan | TooSmall
    if plan.backend == "thread":
        planned = plan_threads(seat.allowance_bytes, num_streams)
    else:
        planned = plan_crew(seat.allowance_bytes, num_streams, may_merge=plan.may_merge)
        if isinstance(planned, TooSmall) and plan.backend == "auto":
            planned = plan_threads(seat.allowance_bytes, num_streams, instead_of=planned)
    if isinstance(planned, TooSmall):
        needed = int(planned.needed_bytes / PROMISED_FRAC) + 1
        others = seat.others_bytes
        if not others:
            raise BudgetTooSmall.about(seat.whole_bytes, needed, 0, plan.batch_size)
        who = (
            f"its other loaders hold {format_bytes(others)}, and together with one worker and its "
            "template that is"
        )
        whole = seat.whole_bytes + others
        raise BudgetTooSmall.about(whole, needed + others, 0, plan.batch_size, who)
    most = plan.max_workers if plan.may_merge and plan.max_workers else num_streams
    workers = min(planned.workers, most)
    because = planned.because
    if plan.may_merge and not planned.in_threads:
        carried = count_carried(free_files)
        if carried < workers:
            warnings.warn(
                ScarcityWarning.about_descriptors(carried, workers, free_files), stacklevel=6
            )
            because = f"{free_files} more open files carry {carried} worker(s), not {workers}"
            workers = carried
    tokens = min(planned.tokens, plan.max_tokens or num_streams, workers)
    return replace(planned, workers=workers, tokens=tokens, because=because)


def make_order(plan: Plan, job: Job, epoch: int) -> Order:
    """The order of tickets that the plan asks for."""
    seed_of: Callable[[int, int], int] | None = None
    if job.seeding == "batch":
        base_seed = job.base_seed

        def seed_of(epoch: int, serial: int) -> int:
            return mix_seed(base_seed, epoch, serial)

    return Order(job.num_streams, is_bound=plan.is_bound, seed_of=seed_of, epoch=epoch)


def make_settings(plan: Plan, seat: Seat, job: Job, crew_plan: CrewPlan) -> Settings:
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
        # A thread would leave nothing behind, and sharing one would save next to nothing.
        may_move=plan.may_move and not crew_plan.in_threads,
        may_merge=plan.may_merge and not crew_plan.in_threads,
        may_share=plan.may_merge,
        most_workers=min(job.num_streams, plan.max_workers or job.num_streams),
        may_replay=plan.may_replay and not crew_plan.in_threads,
        keep_bytes=_decide_heap_share(seat.whole_bytes, crew_plan.workers),
    )


def count_free_files(probe: Probe) -> int:
    """Descriptors that this process may still open; many where there is no limit."""
    limit = probe.read_rlimits().open_files
    return sys.maxsize if limit is None else max(0, limit - probe.count_descriptors())


def decide_reserve(budget: Budget, budget_bytes: int, probe: Probe) -> int:
    """Addresses to reserve: several budgets, or half of what RLIMIT_AS leaves.

    A budget that follows the machine may become as large as the machine.
    """
    wanted = max(budget_bytes * _RESERVE_FACTOR, GIB)
    if not budget.is_fixed:
        wanted = max(wanted, probe.read_host().total_bytes)
    limit = probe.read_rlimits().address_space_bytes
    if limit is None:
        return wanted
    statm = probe.read_statm()
    free = limit - (statm.vm_bytes if statm else 0)
    return max(min(wanted, budget_bytes, free // 2), MIB)


def _decide_heap_share(budget_bytes: int, workers: int) -> int:
    """Freed heap that each worker may keep for its next fetch.

    A sixteenth of the budget for all, within bounds: less costs page faults anew, more is
    memory that does nothing.
    """
    return min(16 * MIB, max(MIB, budget_bytes // (16 * workers)))


def guess_workers(plan: CrewPlan) -> int:
    """What zygote and workers may take, before anything was read."""
    if plan.in_threads:
        return estimate_threads(plan.workers)
    parked = max(0, plan.workers - plan.tokens)
    return ZYGOTE_BYTES + plan.tokens * WORKER_BYTES + parked * PARKED_BYTES
