"""The clock: pumps while the consumer is away, and says when to read memory again.

Covers: one thread an iterator that takes in what workers say while the consumer computes,
so that needs are served and the window fills, and looks at memory in passing; the pace of
readings. Does not cover: what a look does (controller.py).

The thread holds no reference to the iterator, only a weak one to its engine: an iterator
that nobody can reach any more is collected, and its engine with it, as if there were no
thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import weakref
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from forebay.flow.engine import Engine

_log = logging.getLogger("forebay")

TICK_S = 0.05
"""20 Hz: a twentieth of the second within which the loader must follow a change."""

READING_SHARE = 200
"""Between two readings lies two hundred times what the last one took: with the looks, less than
1 % of one core (benchmarks/control.py)."""

READING_LEAST_S = 0.2
"""And never less than this: four readings a second show any growth that matters."""

URGENT_LOOK_S = 0.02
"""The least between two looks while workers say that they grow."""

URGENT_SHARE = 10
"""Then up to 10 % of one core may go into readings: it is that, or the budget."""

LOOK_S = 0.2
"""Between two cheap looks (headroom, the group's sum, the arena): some 0.3 ms each, 0.15 % of
a core, and five of them in the second within which a fallen limit must have shown."""


@final
class Clock:
    """Ticks until its engine is closed or gone. One thread, named for what it is.

    Where the system has no thread for it, nothing is pumped while the consumer is away: the
    loader is slower, and follows memory only when it is asked for a batch.

    Attributes:
        bell: A descriptor; whoever writes eight bytes to it wakes the thread at once.
    """

    def __init__(self, engine: Engine) -> None:
        self.bell = _make_bell()
        self._bell_lock = threading.Lock()  # guards the bell against being closed while it rings
        self._is_stopped = False
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(engine), self), name="forebay-clock", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            self._is_stopped = True
            _log.warning("no thread to fill the window while the consumer is away: %s", str(error))

    @property
    def is_stopped(self) -> bool:
        """Whether the thread is to end."""
        return self._is_stopped

    def stop(self) -> None:
        """End the thread; from within it, ask it to end."""
        self._is_stopped = True
        if not self._thread.ident:  # it never ran
            self.take_down()
        elif threading.current_thread() is not self._thread:
            self.ring()
            self._thread.join()

    def ring(self) -> None:
        """Wake the thread."""
        with self._bell_lock:  # it closes the bell when it ends, which may be now
            if self.bell >= 0:
                os.write(self.bell, (1).to_bytes(8, "little"))

    def take_down(self) -> None:
        """Close the bell; for the thread, when it ends."""
        with self._bell_lock:
            if self.bell >= 0:
                os.close(self.bell)
                self.bell = -1


def _make_bell() -> int:
    """An eventfd; -1 where there is none (then the clock just ticks)."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if hasattr(os, "eventfd") else -1


def _run(reference: weakref.ref[Engine], clock: Clock) -> None:
    poller = select.poll()
    if clock.bell >= 0:
        poller.register(clock.bell, select.POLLIN)
    while not clock.is_stopped:
        if poller.poll(TICK_S * 1000):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(clock.bell)
        engine = reference()
        if engine is None:
            break
        while engine.try_tick(TICK_S):
            pass
        del engine
    clock.take_down()


@final
class Pace:
    """When to read memory again, so that reading stays below its share of a core."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self._urgent_s = 0.0
        self._cost_s = 0.0

    @property
    def interval_s(self) -> float:
        """Between two full readings, as things are."""
        return max(READING_LEAST_S, READING_SHARE * self._cost_s)

    def is_due(self, now_s: float, *, is_urgent: bool = False) -> bool:
        """Whether the time has come; earlier when growth is likely."""
        return now_s >= (self._urgent_s if is_urgent else self._due_s)

    def note(self, now_s: float, cost_s: float) -> None:
        """A reading took so long."""
        self._cost_s = cost_s
        self._due_s = now_s + self.interval_s
        self._urgent_s = now_s + max(URGENT_LOOK_S, URGENT_SHARE * cost_s)
