"""Who watches memory for the scheduler: what it tells, and what it may ask.

Covers: the seam between moving tickets (scheduler.py) and following memory (controller.py).
Does not cover: either of them. A scheduler alone, as in tests, is unwatched.

All is called by the scheduler, under the engine's lock.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from forebay.flow.moves import Move
    from forebay.workers.crew import WorkerProcess
    from forebay.workers.messages import Done


class Watcher(abc.ABC):
    """Follows what workers take."""

    @abc.abstractmethod
    def note_report(self, worker: WorkerProcess, done: Done, *, is_blurred: bool) -> None:
        """A worker has said how large it is; blurred if pages of the arena went meanwhile."""

    @abc.abstractmethod
    def note_dispatch(self) -> None:
        """A worker has got one more ticket."""

    @abc.abstractmethod
    def note_move(self, move: Move) -> None:
        """Streams have changed their process."""

    @abc.abstractmethod
    def note_replacement(self, dead: WorkerProcess, fresh: WorkerProcess | None) -> None:
        """A worker died, and a fresh one goes on in its place, or one that is there already."""

    @abc.abstractmethod
    def read_held_bytes(self, worker: WorkerProcess) -> int:
        """What a worker had of its own when it was read last; 0 if it never was."""

    @abc.abstractmethod
    def estimate_step(self, worker: WorkerProcess) -> int:
        """What one more fetch will make a worker grow by."""

    @abc.abstractmethod
    def count_grown_bytes(self) -> int:
        """What replacing grown workers would free, sooner or later."""

    @abc.abstractmethod
    def try_relieve(self) -> bool:
        """Whether memory that the head lacks will come free by itself: let it wait."""


@final
class Unwatched(Watcher):
    """Nobody watches: workers take what was promised, and never grow."""

    def note_report(self, worker: WorkerProcess, done: Done, *, is_blurred: bool) -> None:
        """Nothing follows."""

    def note_dispatch(self) -> None:
        """Nothing follows."""

    def note_move(self, move: Move) -> None:
        """Nothing follows."""

    def note_replacement(self, dead: WorkerProcess, fresh: WorkerProcess | None) -> None:
        """Nothing follows."""

    def read_held_bytes(self, worker: WorkerProcess) -> int:  # noqa: ARG002 - nothing is known of any
        """Nothing."""
        return 0

    def estimate_step(self, worker: WorkerProcess) -> int:  # noqa: ARG002 - nothing is known of any
        """Nothing."""
        return 0

    def count_grown_bytes(self) -> int:
        """Nothing."""
        return 0

    def try_relieve(self) -> bool:
        """Nothing will."""
        return False
