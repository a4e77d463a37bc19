"""What fits: sizes learned from batches, and how many workers a budget carries.

Covers: estimating what the next batch takes, and the number of processes. Does not cover:
measuring (probe.py, workers), or granting (ledger.py). Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

from forebay.units import KIB, MIB, format_bytes

ZYGOTE_BYTES = 5 * MIB
"""First guess of the template's private memory. Measured with torch 2.13 and Python 3.11
under fork: 4 MiB. Replaced by a reading as soon as there is one, as are the next two."""

WORKER_BYTES = 8 * MIB
"""First guess of a worker at its first fetches. Measured: 5 to 7 MiB with a small dataset."""

PARKED_BYTES = 6 * MIB
"""First guess of a worker between fetches: pages copied because their objects were touched
stay with it. Measured: 5 MiB."""

THREAD_BYTES = 256 * KIB
"""A worker thread: the part of its stack that is used, and its share of the C allocator.
Measured: 20 to 90 KiB with a small dataset."""

_WORKERS_FRAC = 0.5
"""Most of a budget that workers may take before streams share processes: what is left must
hold batches in their making, waiting, and with the consumer."""

_WORKER_FILES = 2
"""Descriptors in the training process for each worker: its socket, and a handle for its end."""

_OWN_FILES = 16
"""Beside them: nine of the template, the arena and the clock, three more while a worker starts,
and some for what the training code opens meanwhile."""

_RECENT = 16
"""Batches whose largest size is expected next: four rounds of four workers."""


_PEAK_MARGIN = 1 / 16
"""Beyond the largest peak seen: metering misses a MiB or so, and the same image decoded twice
differs by allocator rounding (measured: 2 to 5 %)."""


@final
class SizeHistory:
    """How large results were; says how large the next may be."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self.largest_bytes = 0
        self.seen = 0

    def add(self, size_bytes: int) -> None:
        """One more result."""
        self._recent.append(size_bytes)
        self.largest_bytes = max(self.largest_bytes, size_bytes)
        self.seen += 1

    @property
    def spread(self) -> float:
        """The largest recent size to the smallest; 1 before any was seen."""
        return max(self._recent) / max(1, min(self._recent)) if self._recent else 1.0

    def estimate_next(self) -> int:
        """The largest recent size; an eighth more when sizes vary, so that few ask again."""
        if not self._recent:
            return 0
        largest = max(self._recent)
        return largest if min(self._recent) == largest else largest + largest // 8


@final
class PeakHistory:
    """How much making took at its peak; the largest is remembered over one epoch's end.

    Which batch is the next giant nobody knows, but epochs are alike: what was largest in the
    last one is promised from the first batch of the next one on.
    """

    def __init__(self) -> None:
        self._before_bytes = 0
        self._now_bytes = 0
        self.seen = 0

    def add(self, peak_bytes: int) -> None:
        """One more peak."""
        self._now_bytes = max(self._now_bytes, peak_bytes)
        self.seen += 1

    def begin_epoch(self) -> None:
        """What was before the last epoch is forgotten."""
        if self.seen:
            self._before_bytes, self._now_bytes, self.seen = self._now_bytes, 0, 0

    @property
    def largest_bytes(self) -> int:
        """The largest of this epoch and the last."""
        return max(self._before_bytes, self._now_bytes)

    @property
    def promise_bytes(self) -> int:
        """What to promise: the largest, and a margin for the one that is larger still."""
        return int(self.largest_bytes * (1 + _PEAK_MARGIN))


@final
class Lessons:
    """What a loader's batches taught, kept from one iterator to the next.

    Attributes:
        sizes: What results took of their blocks.
        makings: What making them took beside.
        totals: Buffers of a batch, wherever they travelled.
    """

    def __init__(self) -> None:
        self.sizes = SizeHistory()
        self.makings = PeakHistory()
        self.totals = SizeHistory()

    def begin_epoch(self) -> None:
        """A new epoch begins."""
        self.makings.begin_epoch()


@dataclass(frozen=True, slots=True)
class CrewPlan:
    """How many workers carry the streams, and how many fetch at once.

    Attributes:
        workers: Processes, or threads.
        tokens: Fetches at once, at most `workers`.
        because: Why they are fewer, or others, than asked for; empty when they are not.
        in_threads: Whether they are threads of this process.
    """

    workers: int
    tokens: int
    because: str
    in_threads: bool = False


@dataclass(frozen=True, slots=True)
class TooSmall:
    """Not even one worker fits; it would take `needed_bytes`."""

    needed_bytes: int


def plan_crew(budget_bytes: int, num_streams: int, *, may_merge: bool) -> CrewPlan | TooSmall:
    """The crew that a budget carries, before anything was measured.

    Args:
        budget_bytes: All that may exist.
        num_streams: torch's `num_workers`.
        may_merge: Whether several streams may share a process (a map-style dataset without
            `worker_init_fn`).
    """
    least = ZYGOTE_BYTES + WORKER_BYTES
    needed = least if may_merge else least + PARKED_BYTES * (num_streams - 1)
    if budget_bytes < needed:
        return TooSmall(needed)
    fitting = 1 + max(0, int(budget_bytes * _WORKERS_FRAC) - least) // PARKED_BYTES
    workers = min(num_streams, fitting) if may_merge else num_streams
    spare = budget_bytes - ZYGOTE_BYTES - PARKED_BYTES * workers
    tokens = max(1, min(workers, spare // (2 * (WORKER_BYTES - PARKED_BYTES))))
    because = ""
    if workers < num_streams:
        because = f"the budget carries {workers} worker(s), not {num_streams}: streams share them"
    elif tokens < workers:
        because = f"the budget carries {tokens} fetch(es) at once, not {workers}"
    return CrewPlan(workers, tokens, because)


def plan_threads(
    budget_bytes: int, num_streams: int, instead_of: TooSmall | None = None
) -> CrewPlan | TooSmall:
    """The same with a thread of this process for each stream.

    Args:
        budget_bytes: All that may exist.
        num_streams: torch's `num_workers`.
        instead_of: Why there are no processes, if they would be preferred.
    """
    needed = estimate_threads(num_streams)
    if budget_bytes < needed:
        return TooSmall(needed)
    because = ""
    if instead_of is not None:
        because = (
            f"a worker process with its template takes {format_bytes(instead_of.needed_bytes)}, "
            "more than the budget has for it: threads of this process make the batches"
        )
    return CrewPlan(num_streams, num_streams, because, in_threads=True)


def estimate_threads(threads: int) -> int:
    """What so many worker threads take, idle."""
    return THREAD_BYTES * threads


def count_carried(free_files: int) -> int:
    """How many worker processes this process can be connected with; one in any case."""
    return max(1, (free_files - _OWN_FILES) // _WORKER_FILES)


def split_streams(num_streams: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Which worker carries which streams: neighbours in time go to different workers."""
    return tuple(tuple(range(first, num_streams, workers)) for first in range(workers))
