"""Streams on the move: from a grown worker to a fresh one, together, and apart again.

Covers: the steps of a move, each at a batch boundary, with order and random state kept.
Does not cover: whether a move is wanted (memory/policy.py), or forking (workers/zygote.py).

    start a spare -> it runs -> the old worker has nothing in flight -> HandOver
    -> Handed(states) -> Adopt(states) at the spare -> the old one retires

While its streams are between two processes no ticket of theirs is handed out: a millisecond,
since the spare runs before the old worker is asked. What a move cannot carry is what the
dataset object itself wrote into the old process; `moves` counts, and `explain()` tells.
Runs under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from forebay.workers.messages import Adopt, Handed, HandOver

if TYPE_CHECKING:
    from forebay.workers.crew import Crew, WorkerProcess


_MOST_FAILURES = 3
"""Spares that could not be started or died, after which no further move is tried."""


@final
class Move:
    """One move under way.

    Attributes:
        source: Who carries the streams now.
        target: Who will.
        streams: Which.
        is_last: Whether nothing is left at the source, which then ends.
        is_asked: Whether the source was told.
    """

    __slots__ = ("is_asked", "is_last", "source", "streams", "target")

    def __init__(
        self, source: WorkerProcess, target: WorkerProcess, streams: tuple[int, ...]
    ) -> None:
        self.source, self.target, self.streams = source, target, streams
        self.is_last = streams == source.streams
        self.is_asked = False


@final
class Moves:
    """At most one move at a time.

    Args:
        crew: Whose workers.
        count_flights: How many tickets a worker has.

    Attributes:
        done: How many moves there were.
    """

    def __init__(self, crew: Crew, count_flights: Callable[[WorkerProcess], int]) -> None:
        self._crew = crew
        self._count_flights = count_flights
        self._move: Move | None = None
        self._failures = 0
        self.done = 0

    @property
    def may_be_made(self) -> bool:
        """Whether moves have a chance: where spares cannot be started, nobody waits for one."""
        return self._failures < _MOST_FAILURES

    @property
    def is_busy(self) -> bool:
        """Whether a move is under way."""
        return self._move is not None

    @property
    def is_asked(self) -> bool:
        """Whether streams are between two processes: told to come, and not there yet."""
        return self._move is not None and self._move.is_asked

    @property
    def is_under_way(self) -> bool:
        """Whether a move will come to its end by itself: nobody has to let its source go first."""
        move = self._move
        return move is not None and (move.is_asked or not self._count_flights(move.source))

    def holds_back(self, worker: WorkerProcess) -> bool:
        """Whether a worker gets no ticket now, since its streams are about to leave it."""
        move = self._move
        return move is not None and worker is move.source and self._is_target_up(move)

    def recycle(self, worker: WorkerProcess) -> None:
        """Replace a worker by a fresh one."""
        self._move = Move(worker, self._crew.start_spare(), worker.streams)

    def merge(self, source: WorkerProcess, target: WorkerProcess) -> None:
        """Have the streams of one worker move in with another's."""
        self._move = Move(source, target, source.streams)

    def split(self, source: WorkerProcess) -> None:
        """Give half of a worker's streams a process of their own."""
        self._move = Move(source, self._crew.start_spare(), source.streams[1::2])

    def step(self) -> None:
        """Take the next step of the move under way, if it may be taken now."""
        move = self._move
        if move is None or move.is_asked:
            return
        if move.target.has_ended:  # it could not be started, or died: all stays as it is
            self._give_up()
        elif self._is_target_up(move) and not self._count_flights(move.source):
            move.is_asked = True
            self._crew.tell(move.source, HandOver(move.streams))

    def finish(self, handed: Handed) -> Move | None:
        """The streams are on their way to their new process; returns the move that is done."""
        move, self._move = self._move, None
        if move is None:
            return None
        source, target = move.source, move.target
        if target.has_ended:
            self._crew.tell(source, Adopt(handed.streams))  # back where they came from
            self._give_up()
            return None
        self._crew.tell(target, Adopt(handed.streams))
        target.streams = (*target.streams, *move.streams)
        source.streams = tuple(s for s in source.streams if s not in move.streams)
        if target.is_spare:
            self._crew.install(target, source if move.is_last else None)
        if move.is_last:
            self._crew.dismiss(source)
        self.done += 1
        return move

    def forget(self, worker: WorkerProcess) -> None:
        """A worker died: streams that were to leave it stay together, wherever they go on."""
        move = self._move
        if move is None or worker is not move.source:
            return
        self._move = None
        if move.target.is_spare:
            self._crew.dismiss(move.target)

    def _give_up(self) -> None:
        self._move = None
        self._failures += 1

    @staticmethod
    def _is_target_up(move: Move) -> bool:
        return move.target.known_pid is not None
