"""Records of what the loader did: frozen, for users, reports and logs.

Covers: the shape of `stats()`. Does not cover: gathering it (flow/scheduler.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Stance: TypeAlias = Literal["grow", "hold", "shrink", "pause"]


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """One moment of a loader. Bytes unless the name says otherwise.

    Attributes:
        batches: Delivered so far, over all epochs of the current iterator.
        samples: In them, by the sampler's indices; iterable datasets count what was asked for.
        delivered_bytes: Size of the delivered batches' buffers.
        consumer_wait_s: Seconds that `next()` waited for a batch that was not ready.
        budget_bytes: The budget in force; 0 for torch's own engine.
        footprint_bytes: What exists because of the loader, by the last full reading of the
            processes and the arena's exact size now.
        peak_footprint_bytes: The largest `footprint_bytes` seen.
        arena_bytes: Resident bytes of the arena, exact.
        workers_private_bytes: Anonymous memory that would not exist without the workers and
            their template, by the last full reading.
        in_flight_bytes: Blocks being written or waiting to be delivered.
        held_by_consumer_bytes: Views and heap copies of delivered batches that still live.
        workers: Worker processes alive.
        window_bytes: What may be in flight or waiting now.
        growth_bytes_per_batch: What a worker grows by with each batch, while that does not slow;
            else 0. `explain()` says what it is made of.
        worker_restarts: Workers replaced after a death.
        restart_reasons: The latest of those deaths, in words.
        stance: What the controller does now.
    """

    batches: int = 0
    samples: int = 0
    delivered_bytes: int = 0
    consumer_wait_s: float = 0.0
    budget_bytes: int = 0
    footprint_bytes: int = 0
    peak_footprint_bytes: int = 0
    arena_bytes: int = 0
    workers_private_bytes: int = 0
    in_flight_bytes: int = 0
    held_by_consumer_bytes: int = 0
    workers: int = 0
    window_bytes: int = 0
    growth_bytes_per_batch: int = 0
    worker_restarts: int = 0
    restart_reasons: tuple[str, ...] = ()
    stance: Stance = "hold"


@dataclass(frozen=True, slots=True)
class Decided:
    """A change of stance, or an act, with its reason.

    Attributes:
        t_s: Seconds since the iterator began.
        stance: What the controller does from here on.
        acts: Names of the acts, in order; empty for a change of stance alone.
        because: The reason in words.
        measured_bytes: The footprint then.
        budget_bytes: The budget then.
    """

    t_s: float
    stance: Stance
    acts: tuple[str, ...]
    because: str
    measured_bytes: int
    budget_bytes: int
