"""What idle workers take: learned from readings that hold their fetches too.

Covers: the account of the zygote and the workers, and how fast it grows. Does not cover:
reading (probe.py), or what is done about growth (policy.py). Pure.

A reading of the processes is the idle workers *and* whatever fetches hold at that moment;
fetches have promises of their own. So two bounds: the account is no more than the least of
the latest readings, and no less than the latest one less what is promised. The second one
makes growth count at once that no fetch was promised.
"""

from __future__ import annotations

from collections import deque
from typing import final

from forebay.units import MIB

WARM_FETCHES = 3
"""Fetches of each worker after which it has touched what it usually touches."""

_READINGS = 4
"""Latest readings that count: what fetches hold is not in all of them."""

_SLOPE_READINGS = 3
"""Readings whose least is compared with the least of as many before: a trend, not a peak."""

_NOISE_BYTES = MIB
"""The kernel's own counters are off by so much (see peak.py)."""


@final
class CrewAccount:
    """The account, reading by reading.

    Args:
        guess_bytes: Before anything was read, and until all workers are warm at least.

    Attributes:
        booked_bytes: What idle workers and their template take now.
        least_bytes: The least that they were ever seen to take.
        growth_bytes_per_s: How fast that grows; 0 while it does not.
        is_warm: Whether every worker has made its first batches.
    """

    def __init__(self, guess_bytes: int) -> None:
        self.booked_bytes = guess_bytes
        self.least_bytes = guess_bytes
        self.growth_bytes_per_s = 0.0
        self.is_warm = False
        self._guess_bytes = guess_bytes
        self._readings: deque[tuple[float, int]] = deque(maxlen=2 * _SLOPE_READINGS)

    def note(self, t_s: float, workers_bytes: int, promised_bytes: int, *, is_warm: bool) -> None:
        """Take in one reading.

        Args:
            t_s: When.
            workers_bytes: As read.
            promised_bytes: Promises to fetches that run.
            is_warm: Whether every worker has made its first batches.
        """
        if is_warm and not self.is_warm:
            self.is_warm = True
            self._readings.clear()
            self.least_bytes = workers_bytes
        self._readings.append((t_s, workers_bytes))
        least = min(size for _, size in list(self._readings)[-_READINGS:])
        self.growth_bytes_per_s = self._estimate_growth()
        if self.is_warm:
            self.least_bytes = min(self.least_bytes, least)
            self.booked_bytes = max(least, workers_bytes - promised_bytes)
        else:
            self.booked_bytes = max(self._guess_bytes, least)

    def start_afresh(self, guess_bytes: int) -> None:
        """Workers were replaced: what was read before says nothing of those that are there."""
        self._readings.clear()
        self._guess_bytes = guess_bytes
        self.growth_bytes_per_s = 0.0

    def _estimate_growth(self) -> float:
        if not self.is_warm or len(self._readings) < 2 * _SLOPE_READINGS:
            return 0.0
        readings = list(self._readings)
        old, new = readings[:_SLOPE_READINGS], readings[_SLOPE_READINGS:]
        grown = min(size for _, size in new) - min(size for _, size in old)
        span_s = new[-1][0] - old[-1][0]
        return grown / span_s if grown > _NOISE_BYTES and span_s > 0 else 0.0
