"""Workers that died, and who goes on with what they had.

Covers: noticing deaths, judging them (an accident, memory, a batch that kills), starting a
worker in the place of one, and bringing its streams to where they were; workers that could not
be started, whose streams others take in. Does not cover: the tickets it had in hand
(scheduler.py gives them out again), or the way back (trails.py).

    noticed -> judged -> a fresh worker -> Begin(where the streams stood) -> what they made
    since, once more, for nobody -> the tickets that were lost, in their order

Nothing waits for the fresh worker to start: what it is told waits in its socket. Runs under
the engine's lock.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import psutil

from forebay.errors import (
    PoisonSample,
    ReplayWarning,
    ScarcityWarning,
    StateUnavailable,
    WorkerDied,
    WorkersUnavailable,
    say_end,
)
from forebay.flow.trails import Step, Trails
from forebay.memory.readings import MemoryEvents, events_since
from forebay.workers.messages import Begin

if TYPE_CHECKING:
    from forebay.flow.flight import Flight, Settings
    from forebay.flow.roster import Roster
    from forebay.flow.watcher import Watcher
    from forebay.workers.crew import WorkerProcess
    from forebay.workers.snapshot import Start

_log = logging.getLogger("forebay")

MOST_DEATHS = 3
"""Of workers on one batch, before it is given up. Two may be bad luck: a kill from outside
that hits the same batch twice."""

_REASONS = 16
"""Deaths that are told in words."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """What follows from a death.

    Attributes:
        worker: Who goes on.
        steps: What it makes once more for nobody, for each stream.
        poison: The error in the place of the batch that it died of; None to make it again.
    """

    worker: WorkerProcess
    steps: tuple[tuple[int, list[Step]], ...]
    poison: PoisonSample | None


@final
class Recovery:
    """One crew's deaths.

    Args:
        roster: Who carries which streams.
        trails: How far the streams came.
        settings: Whether the dead are replaced, or the first one ends the epoch; and whether
            streams may share a process.
        read_events: The memory group's counters, for telling whom the kernel killed.

    Attributes:
        lost: Set when the streams of a dead worker cannot go on: no further batch is made.
        restarts: Workers that were replaced.
        reasons: The latest deaths, in words.
        untold: Warnings for the consumer; where they are errors, they must not be raised here,
            between two steps and in whatever thread this is.
    """

    def __init__(
        self,
        roster: Roster,
        trails: Trails,
        settings: Settings,
        read_events: Callable[[], MemoryEvents] | None,
    ) -> None:
        self._crew = roster.crew
        self._roster = roster
        self.trails = trails
        self._may_replay, self._may_share = settings.may_replay, settings.may_share
        self._read_events = read_events
        self._events = read_events() if read_events is not None else None
        self._has_warned = False
        self._has_told_scarcity = False
        self._deaths: Counter[tuple[str, int]] = Counter()
        self.lost: BaseException | None = None
        self.restarts = 0
        self.untold: list[UserWarning] = []
        self.reasons: deque[str] = deque(maxlen=_REASONS)

    def find_dead(self) -> list[WorkerProcess]:
        """Workers to be replaced; none when nobody can be, and `lost` says why."""
        self.lost = self.lost or self._crew.fault
        if self.lost is not None:
            return []
        dead = [each for each in self._crew.workers if each.has_ended and not each.is_retired]
        if self._roster.moves.is_asked:
            # Their host may be one of those whose streams are on the way: a moment, and it is not.
            return [each for each in dead if not each.why_unable]
        return dead

    def note_landing(self, stream: int) -> None:
        """A stream has made a batch: whatever killed its workers is behind it."""
        if self._deaths:
            self._deaths.pop(("stream", stream), None)

    def replace(
        self, worker: WorkerProcess, flights: list[Flight], watcher: Watcher
    ) -> Replacement | None:
        """Have a fresh worker go on in the place of a dead one.

        Args:
            worker: Who died.
            flights: What it had in hand, the batch that it was at first.
            watcher: Who keeps the book of workers.

        Returns:
            What follows; None if nobody can go on, and `lost` says why.
        """
        if worker.why_unable:
            return self._share_out(worker, flights, watcher)
        at = flights[0] if flights else None
        indices = at.ticket.indices if at is not None else None
        pid, code = worker.known_pid or 0, worker.exitcode
        died = WorkerDied.about(pid, code, indices)
        if not self._may_replay or self._crew.is_stillborn:
            self.lost = died
            return None
        held_bytes = watcher.read_held_bytes(worker)
        poison = self._judge(worker, at, held_bytes)
        if poison is not None and (at is None or at.is_again):
            self.lost = poison  # nothing that is delivered could stand for it
            return None
        if poison is not None and at is not None:
            self.trails.forget(at.stream, at.ticket.serial)
        self._say(worker, at)
        try:
            ways = self._find_ways(worker, flights)
            fresh = self._start_instead(worker, watcher, [(s, start) for s, start, _ in ways])
        except OSError as error:
            if self._crew.has_lost_template:
                self._lose(died, error)
                return None
            worker.why_unable = str(error)  # its successor, rather
            if self._roster.moves.is_asked:
                return None  # as in `find_dead`: it is shared out at one of the next looks
            return self._share_out(worker, flights, watcher, poison)
        except StateUnavailable as error:
            self._lose(died, error)
            return None
        return Replacement(fresh, tuple((stream, steps) for stream, _, steps in ways), poison)

    def _find_ways(
        self, worker: WorkerProcess, flights: list[Flight]
    ) -> list[tuple[int, Start, list[Step]]]:
        lost = [flight.ticket.serial for flight in flights if not flight.is_again]
        return [(stream, *self.trails.find_way(stream, lost)) for stream in worker.streams]

    def _lose(self, died: WorkerDied, cause: Exception) -> None:
        died.__cause__ = cause.with_traceback(None)
        self.lost = died

    def _share_out(
        self,
        worker: WorkerProcess,
        flights: list[Flight],
        watcher: Watcher,
        poison: PoisonSample | None = None,
    ) -> Replacement | None:
        """Have another worker make what one that could not be started would have made."""
        number, why = worker.number, worker.why_unable
        host = self._roster.find_host(worker) if self._may_share else None
        if host is None:
            self.lost = WorkersUnavailable.about_worker(number, why, may_share=self._may_share)
            return None
        try:
            ways = self._find_ways(worker, flights)
        except StateUnavailable as error:
            self._lose(WorkerDied.about(worker.known_pid or 0, worker.exitcode, None), error)
            return None
        self._roster.share_out(worker, host)
        self._crew.dismiss(worker)
        watcher.note_replacement(worker, None)
        self._crew.tell(host, Begin(tuple((stream, start) for stream, start, _ in ways)))
        self.reasons.append(f"worker {number} could not be started: {why}")
        if not self._has_told_scarcity:
            self._has_told_scarcity = True
            self.untold.append(ScarcityWarning.about_worker(number, why))
        return Replacement(host, tuple((stream, steps) for stream, _, steps in ways), poison)

    def try_end_stopped(self) -> bool:
        """End workers that somebody has stopped with a batch in hand: they are replaced then.

        Returns:
            Whether there was one.
        """
        busy = [each for each in self._crew.workers if self._roster.count_flights(each)]
        stopped = [each for each in busy if self._may_replay and _is_stopped(each)]
        for worker in stopped:
            worker.kill()
        return bool(stopped)

    def _judge(
        self, worker: WorkerProcess, at: Flight | None, held_bytes: int
    ) -> PoisonSample | None:
        """Count the death; the error if it is one too many."""
        keys = [("stream", stream) for stream in worker.streams[:1]]
        if at is not None:
            keys = [("batch", at.origin)]
        for key in keys:
            self._deaths[key] += 1
        self._lower_if_memory(worker)
        if all(self._deaths[key] < MOST_DEATHS for key in keys):
            return None
        indices = at.ticket.indices if at is not None else None
        pid = worker.known_pid or 0
        return PoisonSample.about_batch(pid, worker.exitcode, indices, MOST_DEATHS, held_bytes)

    def _lower_if_memory(self, worker: WorkerProcess) -> None:
        """After a kill for lack of memory one fetch less runs at once, before it is tried again."""
        if worker.exitcode not in (None, -signal.SIGKILL):
            return
        if self._read_events is None or self._events is None:
            return
        before, self._events = self._events, self._read_events()
        if events_since(before, self._events).oom_kills:
            self._roster.take_token()
            self.reasons.append("the kernel killed for lack of memory: one fetch less at once")

    def _say(self, worker: WorkerProcess, at: Flight | None) -> None:
        end = say_end(worker.known_pid or 0, worker.exitcode)
        where = f"at batch {at.origin}" if at is not None else "between two batches"
        self.reasons.append(f"{end}, {where}")
        # Ctrl-C reaches workers too, and they leave; main, if it ends as well, ends silently.
        level = logging.INFO if worker.exitcode == 0 else logging.WARNING
        _log.log(level, "%s, %s: replaced, and its batches are made again", end, where)
        if self.trails.begins_anew and not self._has_warned:
            self._has_warned = True
            self.untold.append(ReplayWarning.about_skipping())

    def _start_instead(
        self, worker: WorkerProcess, watcher: Watcher, starts: list[tuple[int, Start]]
    ) -> WorkerProcess:
        if self._crew.has_lost_template:
            self._crew.revive()
        self._roster.moves.forget(worker)
        fresh = self._crew.start_spare()
        fresh.streams = worker.streams
        self._crew.install(fresh, worker)
        self._roster.replace(worker, fresh)
        watcher.note_replacement(worker, fresh)
        self._crew.tell(fresh, Begin(tuple(starts)))
        self.restarts += 1
        return fresh


def _is_stopped(worker: WorkerProcess) -> bool:
    try:
        status = psutil.Process(worker.known_pid or 0).status()
    except psutil.Error:
        return False
    return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
