"""Who makes what: workers, the streams they carry, and what each has in hand.

Covers: choosing the worker of a ticket, tokens, counting who is busy, and streams that move
from one worker to another. Does not cover: tickets' memory (admission.py) or their order
(scheduler.py, which is the only caller, under the engine's lock).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, final

from forebay.flow.moves import Move, Moves
from forebay.workers.messages import Handed, Keep

if TYPE_CHECKING:
    from forebay.flow.order import Ticket
    from forebay.workers.crew import Crew, WorkerProcess

METER_EVERY_S = 0.05
"""Metering a fetch costs 40 us in the worker: 0.1 % at this pace."""

_METER_FIRST = 4
"""Fetches of each worker that are metered in any case."""


_METER_OFTEN = 128
_METER_SPACING = 4
"""Of so many first fetches every fourth is: growth is to be told within a hundred batches, also
of those that come faster than that pace. Costs 1.3 ms a worker, once."""


@final
class Load:
    """What main knows of one worker's work."""

    __slots__ = ("fetches", "flights", "metered_s")

    def __init__(self) -> None:
        self.flights: deque[int] = deque()
        self.fetches = 0
        self.metered_s = 0.0


@final
class Roster:
    """One crew's work.

    Args:
        crew: Whose.
        tokens: Fetches at once, to begin with.
        keep_bytes: Freed heap that each worker may keep.

    Attributes:
        tokens: Fetches at once now.
        least_tokens: Never fewer: raised when fetches were seen to wait for each other.
        moves: Streams that change their process.
    """

    def __init__(self, crew: Crew, tokens: int, keep_bytes: int) -> None:
        self.crew = crew
        self.tokens = tokens
        self.least_tokens = 1
        self.moves = Moves(crew, self.count_flights)
        self._keep_bytes = keep_bytes
        self._loads = {worker.number: Load() for worker in crew.workers}
        self._worker_of = {s: worker for worker in crew.workers for s in worker.streams}
        self._turn = 0

    # -- who ------------------------------------------------------------------------------

    def worker_of(self, stream: int) -> WorkerProcess:
        """Who carries a stream."""
        return self._worker_of[stream]

    def choose(
        self, ticket: Ticket, tokens: int, width: int, ended: set[int]
    ) -> WorkerProcess | None:
        """Who may make `ticket` now; None when nobody may."""
        if ticket.stream >= 0:
            worker: WorkerProcess | None = self._worker_of[ticket.stream]
        else:
            worker = self._pick(width, ended)
        if worker is None or self.moves.holds_back(worker):
            return None
        if self._loads[worker.number].flights or self.count_busy() < tokens:
            return worker
        return None

    def _pick(self, width: int, ended: set[int]) -> WorkerProcess | None:
        """For tickets bound to no stream: in turn, nobody more than its share (torch's rule)."""
        live = [
            worker
            for worker in self.crew.workers
            if not worker.has_ended
            and not ended.issuperset(worker.streams)
            and not self.moves.holds_back(worker)
        ]
        if not live:
            return None
        share = max(1, width // len(live))
        for step in range(len(live)):
            worker = live[(self._turn + step) % len(live)]
            if len(self._loads[worker.number].flights) < share:
                self._turn = (self._turn + step + 1) % len(live)
                return worker
        return None

    def has(self, worker: WorkerProcess) -> bool:
        """Whether a worker carries streams: neither a spare one yet, nor one that was replaced."""
        return worker.number in self._loads

    # -- what each has in hand --------------------------------------------------------------

    def begin(self, worker: WorkerProcess, serial: int) -> bool:
        """A worker gets a ticket. Returns whether it had none."""
        flights = self._loads[worker.number].flights
        flights.append(serial)
        return len(flights) == 1

    def end(self, worker: WorkerProcess, serial: int) -> bool:
        """A ticket is done. Returns whether the worker has none left."""
        flights = self._loads[worker.number].flights
        flights.remove(serial)
        return not flights

    def flights_of(self, worker: WorkerProcess) -> deque[int]:
        """Serials that a worker has, the one it is at first."""
        return self._loads[worker.number].flights

    def count_flights(self, worker: WorkerProcess) -> int:
        """How many tickets a worker has."""
        load = self._loads.get(worker.number)
        return len(load.flights) if load is not None else 0

    def count_busy(self) -> int:
        """Workers that have something to do."""
        return sum(1 for load in self._loads.values() if load.flights)

    def firsts(self) -> list[int]:
        """The serial that each busy worker is at."""
        return [load.flights[0] for load in self._loads.values() if load.flights]

    def busy_pids(self) -> list[int]:
        """The processes of those that have something to do."""
        return [
            worker.known_pid
            for worker in self.crew.workers
            if worker.known_pid is not None and self.count_flights(worker)
        ]

    def must_meter(self, worker: WorkerProcess, now_s: float, *, is_tight: bool) -> bool:
        """Whether the fetch that begins now is to be metered."""
        load = self._loads[worker.number]
        is_due = load.fetches < _METER_FIRST or now_s - load.metered_s > METER_EVERY_S
        is_due = is_due or (load.fetches < _METER_OFTEN and load.fetches % _METER_SPACING == 0)
        load.fetches += 1
        if is_due or is_tight:
            load.metered_s = now_s
            return True
        return False

    def count_flights_by_worker(self) -> dict[int, int]:
        """How many tickets each busy worker has, by its number."""
        return {number: len(load.flights) for number, load in self._loads.items() if load.flights}

    def count_fetches(self, worker: WorkerProcess) -> int:
        """How many fetches a worker was given."""
        load = self._loads.get(worker.number)
        return load.fetches if load is not None else 0

    # -- tokens -----------------------------------------------------------------------------

    def add_token(self, *, for_good: bool = False) -> None:
        """One more fetch at once; for good when those that run wait for one that does not."""
        if for_good:
            self.tokens = max(self.tokens, self.count_busy()) + 1
            self.least_tokens = max(self.least_tokens, self.tokens)
        else:
            self.tokens = min(self.tokens + 1, len(self.crew.workers))

    def take_token(self) -> None:
        """One fetch less at once; those that run finish."""
        self.tokens = max(self.least_tokens, min(self.tokens, len(self.crew.workers)) - 1)

    # -- deaths -------------------------------------------------------------------------------

    def find_host(self, absent: WorkerProcess) -> WorkerProcess | None:
        """Who may make what `absent` cannot: rather one that runs, with few streams."""
        live = [each for each in self.crew.workers if not each.has_ended and each is not absent]
        return min(
            live,
            key=lambda each: (each.known_pid is None, len(each.streams), each.number),
            default=None,
        )

    def share_out(self, absent: WorkerProcess, host: WorkerProcess) -> None:
        """The streams of a worker that is not there are `host`'s from here on."""
        self.moves.forget(host)
        self.moves.forget(absent)
        del self._loads[absent.number]
        host.streams = (*host.streams, *absent.streams)
        for stream in absent.streams:
            self._worker_of[stream] = host

    def replace(self, dead: WorkerProcess, fresh: WorkerProcess) -> None:
        """A fresh worker has the streams of a dead one, and nothing in hand yet."""
        del self._loads[dead.number]
        self._loads[fresh.number] = Load()
        self.crew.tell(fresh, Keep(self._keep_bytes))
        for stream in fresh.streams:
            self._worker_of[stream] = fresh

    # -- moves --------------------------------------------------------------------------------

    def take_handed(self, handed: Handed) -> Move | None:
        """The streams that a worker gave up are another's from here on; returns the move."""
        move = self.moves.finish(handed)
        if move is None:
            return None
        if move.target.number not in self._loads:
            self._loads[move.target.number] = Load()
            self.crew.tell(move.target, Keep(self._keep_bytes))
        for stream in move.streams:
            self._worker_of[stream] = move.target
        if move.is_last:
            del self._loads[move.source.number]
        return move

    def find_merge(self) -> tuple[WorkerProcess, WorkerProcess] | None:
        """Two workers with the fewest streams, the first to move in with the second."""
        live = [worker for worker in self.crew.workers if not worker.has_ended]
        if len(live) < 2:  # noqa: PLR2004 - it takes two
            return None
        target, source = sorted(live, key=lambda worker: (len(worker.streams), worker.number))[:2]
        return source, target

    def find_split(self) -> WorkerProcess | None:
        """The worker with the most streams, if it has several."""
        fullest = max(self.crew.workers, key=lambda worker: len(worker.streams), default=None)
        if fullest is None or fullest.has_ended or len(fullest.streams) <= 1:
            return None
        return fullest
