"""How wide the window is: the smallest at which the consumer does not wait.

Covers: the width of the window, from what the consumer saw. Does not cover: memory, which
may keep it from widening (policy.py), or acting. Pure.

Little's law says how much must be in flight: consumption rate x time to make a batch. Both
change, so neither is computed; what is watched is whether the consumer waits while a
worker idles. That, and only that, means the window is too narrow. If it waits while all
work, production is the limit and a wider window would only hold more memory. If ready
batches never run low over a whole round, it is too wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

LOW_MARK = 1
"""Ready batches that suffice: the one the consumer takes next is there when it asks."""

ROUNDS = 2
"""Windows' worth of deliveries without waiting before it is narrowed by one: fewer, and
noise in step times makes it breathe; more, and memory is held for longer than needed."""

IDLE_FRAC = 0.15
"""Part of the time that a worker may idle while the consumer waits. Batches do not all take
equally long, so with order kept somebody always waits for somebody: a batch more in memory
for less than that is a bad bargain (a worker in two idling so much costs 7 % of speed)."""

STALL_S = 0.1
"""Idling, while one batch is waited for, that is worth a batch more ahead: a slow shard, not a
fetch that takes a little longer than another."""

_LEAST_ROUND = 4
"""Deliveries at least over which idling is averaged."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one `next()` saw.

    Attributes:
        interval_s: Time since the last delivery.
        waited_s: Of it, how long the consumer waited in `next()`.
        idle_s: Of that, how long a worker had nothing to do.
        ready_left: Batches ready after it.
    """

    interval_s: float
    waited_s: float
    idle_s: float
    ready_left: int


@final
class Window:
    """The number of batches that may be in flight or waiting.

    Args:
        start: Width to begin with: one batch for each worker, so that all begin at once.
        most: Never wider.
    """

    def __init__(self, start: int, most: int) -> None:
        self.least = 1
        self.most = max(1, most)
        self.width = max(1, min(start, self.most))
        self.may_widen = True  # false while memory says hold
        self._stalled_s = 0.0
        self._seen = 0
        self._waits = 0
        self._interval_s = 0.0
        self._idle_s = 0.0
        self._least_ready = self.most

    def note(self, delivery: Delivery) -> None:
        """Adapt to one delivery; at most one step a round."""
        self._seen += 1
        self._stalled_s = 0.0
        self._interval_s += delivery.interval_s
        self._idle_s += delivery.idle_s
        self._least_ready = min(self._least_ready, delivery.ready_left)
        self._waits += delivery.waited_s > 0
        if self._idle_s > 0 and self._seen >= max(_LEAST_ROUND, self.width):
            if self.may_widen and self._idle_s > IDLE_FRAC * self._interval_s:
                self._widen()
            self._begin_round()
        elif self._seen >= max(_LEAST_ROUND, ROUNDS * self.width):
            if not self._waits and self._least_ready > LOW_MARK:
                self.width = max(self.least, self.width - 1)
            self._begin_round()

    def note_stall(self, idle_s: float) -> None:
        """The consumer waits for one slow batch, and a worker has idled for so long meanwhile.

        No delivery will tell: what is behind the slow one may be made while it lasts.
        """
        if self.may_widen and idle_s - self._stalled_s >= STALL_S:
            self._stalled_s = idle_s
            self._widen()

    def _widen(self) -> None:
        self.width = min(self.most, self.width + max(1, self.width // 4))

    def set_bounds(self, least: int, most: int) -> None:
        """Other bounds; a window beyond them is brought back at once."""
        self.most = max(1, most)
        self.least = max(1, min(least, self.most))
        self.width = max(self.least, min(self.width, self.most))

    def narrow(self) -> None:
        """One batch less, for the sake of memory."""
        self.width = max(self.least, self.width - 1)

    def _begin_round(self) -> None:
        self._seen = 0
        self._waits = 0
        self._interval_s = 0.0
        self._idle_s = 0.0
        self._least_ready = self.most
