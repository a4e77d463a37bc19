"""A loop that waits and waits: what for, where that is, and why it may be.

Covers: noticing it, finding out, and putting it into one report. Does not cover: ending it
(torch's `timeout`), or the workers' side of telling their stacks (workers/stacks.py).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

import psutil

from forebay.errors import Finding, Stalled
from forebay.workers.stacks import read_stack, read_thread_stack

if TYPE_CHECKING:
    from forebay.flow.flight import Flight
    from forebay.flow.scheduler import Scheduler
    from forebay.memory.probe import Probe
    from forebay.workers.crew import WorkerProcess


@final
class StallWatch:
    """One iterator's. At most one report for each wait.

    Args:
        scheduler: Whose batches.
        probe: Where to read a worker's memory.
        period_s: After how long to report; None for never.
    """

    def __init__(self, scheduler: Scheduler, probe: Probe, period_s: float | None) -> None:
        self._scheduler = scheduler
        self._probe = probe
        self._period_s = period_s
        self._has_told = False
        is_forked = scheduler.crew.start_method == "fork"
        self._other_threads = find_other_threads() if is_forked else ()

    def begin(self) -> None:
        """The loop begins to wait."""
        self._has_told = False

    def look(self, waited_s: float) -> Stalled | None:
        """The report, when it is time for it."""
        if self._period_s is None or waited_s < self._period_s or self._has_told:
            return None
        self._has_told = True
        return Stalled.about(self._find_out(waited_s))

    def _find_out(self, waited_s: float) -> Finding:
        scheduler = self._scheduler
        flight = scheduler.find_awaited()
        state, held_bytes, stack = "", 0, ""
        if flight is not None:
            state, held_bytes, stack = self._examine(flight.worker)
        return Finding(
            waited_s=waited_s,
            number=scheduler.order.number_of(flight.origin) if flight is not None else None,
            indices=flight.ticket.indices if flight is not None else None,
            pid=flight.worker.known_pid if flight is not None else None,
            state=state,
            held_bytes=held_bytes,
            stack=stack,
            other_threads=self._other_threads,
            lacks_memory=scheduler.is_short or _asks_for_room(flight),
        )

    def _examine(self, worker: WorkerProcess) -> tuple[str, int, str]:
        if not self._scheduler.crew.zygote_pid:
            return "thread", 0, read_thread_stack(worker.name)
        pid = worker.known_pid
        if pid is None:
            return "not started", 0, ""
        try:
            state = psutil.Process(pid).status()
        except psutil.Error:
            return "gone", 0, ""
        reading = self._probe.read_process(pid)
        held_bytes = reading.private_bytes if reading is not None else 0
        return state, held_bytes, read_stack(pid)


def _asks_for_room(flight: Flight | None) -> bool:
    return flight is not None and flight.need_bytes > 0


def find_other_threads() -> tuple[str, ...]:
    """Python threads of this process that are neither this one nor the loaders'."""
    here = threading.current_thread()
    names = (each.name for each in threading.enumerate() if each is not here)
    return tuple(sorted(name for name in names if not name.startswith("forebay-")))
