"""What an iterator counts beside memory.

Covers: what was delivered, and the processor time of workers. Does not cover: memory
(controller.py).
"""

from __future__ import annotations

from typing import Any, final

import psutil


@final
class Tally:
    """Counters of what was delivered."""

    def __init__(self) -> None:
        self.batches = 0
        self.samples = 0
        self.bytes = 0
        self.wait_s = 0.0

    def note(self, buffers: list[Any], waited_s: float, samples: int) -> None:
        """A batch of these buffers, for which the consumer waited so long."""
        self.batches += 1
        self.samples += samples
        self.bytes += sum(map(len, buffers))
        self.wait_s += waited_s


def read_cpu_s(pids: list[int]) -> float:
    """Seconds that these processes have used so far; those that are gone count nothing."""
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total
