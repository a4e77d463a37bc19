"""How far the workers are ahead of the consumer, and when the next fetch may begin.

Covers: the window that follows the consumer, small batches that run further ahead, the first
fetch that runs alone, and large ones that begin a little apart. Does not cover: whether memory
allows a fetch (admission.py), or who makes it (roster.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from forebay.flow.admission import LARGE_BYTES, Admission
from forebay.flow.slow_start import SlowStart
from forebay.flow.spacing import Spacing
from forebay.memory.window import Delivery, Window
from forebay.units import MIB

if TYPE_CHECKING:
    from forebay.flow.flight import Settings
    from forebay.flow.roster import Roster

RUN_AHEAD_BYTES = MIB
_RUN_AHEAD_BATCHES = 64
"""Small batches may run ahead up to so many bytes and so many for each stream: what costs
there is waking each other up, not memory. 64 of 4 KB are a quarter of a MiB."""


@final
class Ahead:
    """One iterator's lead over its consumer.

    Attributes:
        window: How many batches may be in flight or waiting.
        spacing: When the next large fetch may begin.
        slow_start: Whether the very first one must run alone.
    """

    def __init__(self, settings: Settings, admission: Admission, roster: Roster) -> None:
        self._settings = settings
        self._admission = admission
        self._roster = roster
        self.window = Window(settings.num_streams, settings.most_ahead)
        if not settings.in_order:
            # torch's rule shares a fixed number of tasks among the workers: who is slow keeps
            # its share, and that decides which batch comes when.
            self.window.set_bounds(settings.most_ahead, settings.most_ahead)
        self.spacing = Spacing()
        self.slow_start = SlowStart(admission, settings.num_streams)
        self._idle_s = 0.0

    @property
    def tokens(self) -> int:
        """Fetches at once, now."""
        return 1 if self.slow_start.is_on else self._roster.tokens

    def is_worth_a_message(self, gap: int, *, is_empty: bool) -> bool:
        """Whether enough is missing from the window to tell the workers.

        A wide window (of small batches) is filled by quarters: waking a worker costs more
        than making such a batch.
        """
        return gap >= max(1, self.window.width // 4) or is_empty

    def must_space(self, workers: int) -> bool:
        """Whether the fetch of a large batch should begin a little after the last one."""
        is_tight = self.window.width <= workers
        is_large = self._admission.sizes.estimate_next() >= LARGE_BYTES
        is_concerned = is_tight and is_large and self._settings.in_order
        return is_concerned and self.spacing.must_wait(workers)

    def note_idle(self, idle_s: float) -> None:
        """While the consumer waited, a worker had nothing to do for so long."""
        self._idle_s += idle_s
        self.window.note_stall(self._idle_s)

    def note_delivery(self, waited_s: float, interval_s: float, ready: int) -> None:
        """Let the window follow the consumer.

        Args:
            waited_s: For how long the consumer waited for this batch.
            interval_s: Since the one before.
            ready: Batches that are ready beside it.
        """
        if self._settings.may_run_ahead and self._settings.in_order:
            self.window.set_bounds(*self._count_ahead())
        before = self.window.width
        self.window.note(Delivery(interval_s, waited_s, min(self._idle_s, waited_s), ready))
        self._idle_s = 0.0
        if self.window.width < before:
            self._admission.give_back_beyond(self.window.width)

    def _count_ahead(self) -> tuple[int, int]:
        """Least and most batches of the window: a MiB of them costs nothing worth saving."""
        by_bytes = RUN_AHEAD_BYTES // max(1, self._admission.totals.estimate_next())
        # Some times as far as it has come, at most: what is queued is not asked for memory again.
        known = 2 * self._settings.num_streams + self._admission.landings
        free = min(by_bytes, _RUN_AHEAD_BATCHES * self._settings.num_streams, known)
        return max(1, free), max(self._settings.most_ahead, free)
