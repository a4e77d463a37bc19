"""Large fetches that begin a little apart.

Covers: how long a fetch takes, and when the next may begin. Does not cover: whether it is
one of those (scheduler.py).

Workers that begin together end together, and with order kept the quicker one then waits for
the slower, batch after batch: a window of one batch each loses a tenth of its speed so
(measured, decoding). Begun apart by a part of their share of the time a fetch takes, they
hardly meet; it costs that much once, not a block more for ever.
"""

from __future__ import annotations

import time
from typing import final

SPACING_FRAC = 0.4
"""Part of (time of a fetch / workers) that lies between two beginnings at least. Even spacing
would be 1; what is needed is more than the usual scatter of a fetch, some 5 to 10 %."""

_SMOOTHING = 0.2
"""Weight of the newest fetch in the average: a change shows after five."""


@final
class Spacing:
    """When the next large fetch may begin.

    Attributes:
        due_s: When, if that is what is waited for; monotonic seconds.
    """

    def __init__(self) -> None:
        self.due_s = 0.0
        self._started_s = 0.0  # when the last fetch was handed out
        self._fetch_s = 0.0  # how long fetches of idle workers take, averaged

    @property
    def is_waited_for(self) -> bool:
        """Whether that moment is still to come."""
        return self.due_s > time.monotonic()

    def note_start(self, now_s: float) -> None:
        """A fetch was handed out."""
        self._started_s = now_s

    def note_end(self, took_s: float) -> None:
        """A fetch that was handed to an idle worker took so long."""
        self._fetch_s += _SMOOTHING * (took_s - self._fetch_s) if self._fetch_s else took_s

    def must_wait(self, workers: int) -> bool:
        """Whether the next one of `workers` should begin a little later."""
        if self._fetch_s <= 0:
            return False
        self.due_s = self._started_s + SPACING_FRAC * self._fetch_s / workers
        return time.monotonic() < self.due_s
