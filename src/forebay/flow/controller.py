"""The clock: reads what the loader costs, and pumps while the consumer is away.

Covers: one thread an iterator that (a) takes in what workers say while the consumer
computes, so that needs are served and the window fills, and (b) reads the processes'
memory now and then, on at most 1 % of one core. Does not cover: deciding (memory/).

The thread holds no reference to the iterator, only a weak one to its engine: an iterator
that nobody can reach any more is collected, and its engine with it, as if there were no
thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from forebay.flow.engine import Engine

TICK_S = 0.05
"""20 Hz: a twentieth of the second within which the loader must follow a change."""

READING_SHARE = 100
"""Between two readings lies a hundred times what the last one took: 1 % of one core."""

READING_LEAST_S = 0.2
"""And never less than this: four readings a second show any growth that matters."""


@final
class Clock:
    """Ticks until its engine is closed or gone. One thread, named for what it is."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run, args=(self._engine, self._stop), name="forebay-clock", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread; from within it, ask it to end."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _run(reference: weakref.ref[Engine], stop: threading.Event) -> None:
    while not stop.wait(TICK_S):
        engine = reference()
        if engine is None:
            return
        # While the consumer is away, listen for as long as a tick instead of sleeping.
        while not stop.is_set() and engine.try_tick(TICK_S):
            pass
        del engine


@final
class Pace:
    """When to read memory again, so that reading stays below its share of a core."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self._cost_s = 0.0

    def is_due(self) -> bool:
        """Whether the time has come."""
        return time.monotonic() >= self._due_s

    def note(self, cost_s: float) -> None:
        """A reading took so long."""
        self._cost_s = cost_s
        self._due_s = time.monotonic() + max(READING_LEAST_S, READING_SHARE * cost_s)

    def hurry(self) -> None:
        """Something changed: read at the next tick."""
        self._due_s = 0.0
