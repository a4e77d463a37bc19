"""position -> decision: how wide the window is.

Covers: the width of the window, from what the consumer saw. Does not cover: reading or
acting. Pure. (Following live memory joins it here: facts in, instructions out.)

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


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one `next()` saw.

    Attributes:
        had_to_wait: Its batch was not ready.
        had_idle_worker: Meanwhile a worker had nothing to do.
        ready_left: Batches ready after it.
    """

    had_to_wait: bool
    had_idle_worker: bool
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
        self._calm = 0
        self._least_ready = self.most

    def note(self, delivery: Delivery) -> None:
        """Adapt to one delivery: by one when it is calm, by a quarter when the consumer waits."""
        if delivery.had_to_wait:
            self._calm, self._least_ready = 0, self.most
            if delivery.had_idle_worker and self.width < self.most:
                self.width = min(self.most, self.width + max(1, self.width // 4))
            return
        self._calm += 1
        self._least_ready = min(self._least_ready, delivery.ready_left)
        if self._calm >= ROUNDS * self.width:
            if self._least_ready > LOW_MARK and self.width > self.least:
                self.width -= 1
            self._calm, self._least_ready = 0, self.most

    def set_bounds(self, least: int, most: int) -> None:
        """Other bounds; a window beyond them is brought back at once."""
        self.most = max(1, most)
        self.least = max(1, min(least, self.most))
        self.width = max(self.least, min(self.width, self.most))
