"""ticket -> grant -> assign -> reorder -> deliver: the mechanism.

Covers: the way of a batch through main, letters A to K, and that it never stops. Does not
cover: what should be (memory/policy.py, planner.py decide), or threads (controller.py).

Everything here runs under the engine's lock, in whichever thread pumps: the consumer's
while it waits in `next()`, the controller's while the consumer is away.

*Liveness.* The batch that is delivered next may always be admitted. While it lacks memory
nothing else is dispatched, and ready batches are evicted from the last one down. So the
chain is: the head lacks memory -> others land -> they are evicted -> the head has memory.
Only a head that does not fit beside what the consumer holds is refused, with numbers.
"""

from __future__ import annotations

import copy
import itertools
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from forebay.flow.admission import Admission
from forebay.flow.ahead import Ahead
from forebay.flow.flight import (
    Delivered,
    End,
    Flight,
    Inline,
    Landed,
    Refused,
    Settings,
    Skipped,
)
from forebay.flow.recovery import Recovery
from forebay.flow.roster import Roster
from forebay.flow.trails import Step, Trails
from forebay.flow.watcher import Unwatched, Watcher
from forebay.memory.readings import MemoryEvents
from forebay.transport.lease import Draft, Ready
from forebay.transport.spill import Spilled
from forebay.workers.messages import (
    DISCARD,
    Done,
    Failed,
    Handed,
    Need,
    Resume,
    Room,
    Stands,
    StreamEnd,
    Task,
)

if TYPE_CHECKING:
    from forebay.flow.order import Order, Ticket
    from forebay.flow.progress import Progress
    from forebay.workers.crew import Crew, Heard, WorkerProcess
    from forebay.workers.snapshot import Start

_MOVE_WAIT_S = 1.0
"""Longest single wait for streams on the move; their worker's end would be noticed too."""


@final
class Scheduler:
    """One iterator's tickets on their way.

    Fields, all under the engine's lock:
        _pending: Drawn, not dispatched; in order.
        _flights: Dispatched, not landed, by serial; stale ones of broken epochs too.
        _landed: Landed, not delivered, by serial.
        _head: The serial that is delivered next. No key of `_landed` is below it.
        is_blocked: Something waits for memory that may come free at any moment.
        is_short: Memory holds the next fetch back; a wider window would not help.
        recovery: Replaces workers that died. Where it cannot, the head fails once it cannot come
            any more.
    """

    def __init__(
        self,
        crew: Crew,
        admission: Admission,
        order: Order,
        settings: Settings,
        progress: Progress,
        starts: tuple[Start, ...] = (),
        read_events: Callable[[], MemoryEvents] | None = None,
    ) -> None:
        self.crew = crew
        self.admission = admission
        self.order = order
        self.settings = settings
        self.progress = progress
        self.watcher: Watcher = Unwatched()
        self.roster = Roster(crew, settings.tokens, settings.keep_bytes)
        self.ahead = Ahead(settings, admission, self.roster)
        self.window = self.ahead.window
        trails = Trails(progress, starts)
        self.recovery = Recovery(self.roster, trails, settings, read_events)
        self._again = itertools.count(-1, -1)  # serials of batches that are made once more
        self.is_paused = False  # memory allows the batch that is delivered next, and no other
        self.delivered = 0  # in this epoch, failed ones too
        self._pending: deque[Ticket] = deque()
        self._flights: dict[int, Flight] = {}
        self._landed: dict[int, Landed] = {}
        self._arrived: deque[int] = deque()  # serials in order of landing, for in_order=False
        self._head = 0
        self._ended_streams: set[int] = set()
        self.is_blocked = False
        self.is_short = False
        self._poller = select.poll()
        crew.register(self._poller)
        self._posted: set[WorkerProcess] = set()
        self._unsent: set[WorkerProcess] = set()
        self._changes = crew.changes
        self.heard_s = time.monotonic()

    # -- epochs -----------------------------------------------------------------------------

    def start_epoch(self, sampler: Any, *, is_first: bool) -> None:
        """Begin an epoch; what is left of a broken one is run, as torch runs it, and dropped."""
        if not is_first:
            self._discard_rest()
            resume = Resume(self.progress.epoch_here + 1)
            self.recovery.trails.note_resume(resume)
            for worker in self.crew.workers:
                self._tell(worker, resume)
        self.order.start_epoch(sampler)
        for ticket in self.progress.start_epoch(self.order):
            self._make_in_vain(ticket)
        self._head = self.order.first_serial
        self._ended_streams = self.progress.ended_streams
        self.delivered = 0
        self._draw_up_to(self.settings.lead)
        self.dispatch()

    def _discard_rest(self) -> None:
        """Have workers do what torch's would have done ahead of the consumer.

        Streams run on over epochs, so the batches that torch makes in vain count: their
        random numbers are used up.
        """
        self._draw_up_to(self.delivered + self.settings.lead)
        self._finish_move()
        for landed in self._landed.values():
            self.admission.drop_landed(landed)
        self._landed.clear()
        self._arrived.clear()
        for ticket in self._pending:
            if ticket.stream >= 0:  # else seeded by itself: it would change nothing
                self._make_in_vain(ticket)
        self._pending.clear()
        for flight in list(self._flights.values()):
            if flight.need_bytes:
                self._deny(flight)

    def close(self) -> None:
        """Let go of all that was not delivered."""
        drafts = [draft for flight in self._flights.values() for draft in flight.drafts]
        self.admission.close(self._landed.values(), drafts)

    def _make_in_vain(self, ticket: Ticket) -> None:
        """Have a stream make a batch that nobody gets, for what it does to the stream."""
        self.recovery.trails.note_sent(ticket, ticket.stream)
        worker = self.roster.worker_of(ticket.stream)
        self._send_in_vain(Flight(ticket, worker, None, ticket.stream))

    def _send_in_vain(self, flight: Flight) -> None:
        self._note_flight(flight)
        ticket = flight.ticket
        what = (ticket.serial, flight.stream, ticket.indices, ticket.seed)
        self._tell(flight.worker, Task(*what, 0, DISCARD, is_metered=False))

    # -- for memory's sake --------------------------------------------------------------------

    def count_evictable_bytes(self) -> int:
        """Ready batches that may wait on disk."""
        return self.admission.count_evictable(self._landed, self._next_wanted())

    def evict(self, size_bytes: int) -> None:
        """Put ready batches on disk, as many as it takes."""
        self.admission.evict(self._landed, self._next_wanted(), size_bytes)

    def _next_wanted(self) -> int:
        if self.settings.in_order:
            return self._head
        return self._arrived[0] if self._arrived else -1

    def _finish_move(self) -> None:
        """Streams between two processes cannot be told anything: wait until they have arrived."""
        while self.roster.moves.is_asked and self.recovery.lost is None:
            self.listen(_MOVE_WAIT_S)

    # -- A: tickets ---------------------------------------------------------------------------

    def _draw_up_to(self, count: int) -> None:
        while self.order.drawn < count:
            ticket = self.order.draw()
            if ticket is None:
                return
            self._pending.append(ticket)

    def _peek_ticket(self) -> Ticket | None:
        if not self._pending and not self.settings.draws_strictly:
            self._draw_up_to(self.order.drawn + 1)
        return self._pending[0] if self._pending else None

    # -- B to E: admit, place, assign -----------------------------------------------------------

    def dispatch(self) -> None:
        """Hand out as many tickets as window, tokens and memory allow."""
        self.is_blocked = self.is_short = False
        # Needs are served after a loss, too: who waits for room has a batch to deliver.
        if self._serve_needs() and self.recovery.lost is None and self._has_gap():
            self._dispatch_tickets()
        self.roster.moves.step()
        self._flush()

    def _has_gap(self) -> bool:
        gap = self.window.width - len(self._flights) - len(self._landed)
        return self.ahead.is_worth_a_message(gap, is_empty=not self._flights)

    def _dispatch_tickets(self) -> None:
        while len(self._flights) + len(self._landed) < self.window.width:
            ticket = self._peek_ticket()
            if ticket is None:
                break
            if self.is_paused and (self._flights or not self._is_next(ticket.serial)):
                self.is_blocked = self.is_short = True
                break
            if not self.admission.has_block_beside_consumer(self.window.width):
                self.is_blocked = True
                self.admission.lender.want_return()
                break
            if self._flights and self.ahead.must_space(len(self.crew.workers)):
                break
            worker = self._choose_worker(ticket)
            if worker is None or not self._try_dispatch(ticket, worker):
                break

    def _choose_worker(self, ticket: Ticket) -> WorkerProcess | None:
        """Who may make `ticket` now; None when nobody may."""
        return self.roster.choose(ticket, self.ahead.tokens, self.window.width, self._ended_streams)

    def _try_dispatch(self, ticket: Ticket, worker: WorkerProcess) -> bool:
        size = self.admission.estimate_block()
        if any(flight.draft is None for flight in self._flights.values()):
            size = 0  # who was sent before, without a block, must not find ours in the way
        if not self._admit(worker, size):
            if not self._is_next(ticket.serial) or self._flights:
                self.is_blocked = self.is_short = True
                return False
            # The head waits for nothing but memory: it is made without a block, asks for
            # what it needs, and is then served before all others.
            self.admission.make_room(self._landed, self._head, size)
            if not self._admit(worker, size):
                if self.watcher.try_relieve():
                    self.is_blocked = self.is_short = True
                    return False  # a worker is replaced: what it has grown by comes free
                self.admission.force(worker.number)
                size = 0
        draft = self.admission.place(size) if size else None
        self._pending.popleft()
        self._send(ticket, worker, draft)
        return True

    def _admit(self, worker: WorkerProcess, size_bytes: int) -> bool:
        is_busy = bool(self.roster.count_flights(worker))
        return self.admission.try_admit(
            worker.number,
            is_busy=is_busy,
            size_bytes=size_bytes,
            step_bytes=self.watcher.estimate_step(worker),
        )

    def _send(self, ticket: Ticket, worker: WorkerProcess, draft: Draft | None) -> None:
        now = time.monotonic()
        is_metered = self.roster.must_meter(worker, now, is_tight=self.admission.is_tight)
        self.ahead.spacing.note_start(now)
        offset, capacity = (draft.block.offset, draft.block.capacity_bytes) if draft else (0, 0)
        stream = ticket.stream if ticket.stream >= 0 else worker.streams[0]
        self._note_flight(Flight(ticket, worker, draft, stream))
        self.watcher.note_dispatch()
        self.recovery.trails.note_sent(ticket, stream)
        is_recorded = self.progress.note_dispatch(ticket, stream, now)
        what = (ticket.serial, stream, ticket.indices, ticket.seed)
        self._tell(worker, Task(*what, offset, capacity, is_metered, is_recorded))

    def _note_flight(self, flight: Flight) -> None:
        if self.roster.begin(flight.worker, flight.ticket.serial):
            flight.started_s = time.monotonic()
        flight.given_back = self.admission.arena.times_given_back
        self._flights[flight.ticket.serial] = flight

    def _tell(self, worker: WorkerProcess, message: object) -> None:
        self.crew.post(worker, message)
        self._posted.add(worker)

    def _flush(self) -> None:
        """Send what was posted; where a socket takes no more, wake up when it does."""
        for worker in self._posted:
            self.crew.flush(worker)
            if worker.channel.has_unsent:
                self._unsent.add(worker)
                self.crew.register_worker(self._poller, worker)
        self._posted.clear()

    # -- G: what workers say ------------------------------------------------------------------

    def listen(self, timeout_s: float) -> None:
        """Wait at most so long for somebody to say something, and take it in."""
        self.admission.lender.settle()  # K: blocks whose last view died are free again
        ready = self.crew.poll(self._poller, timeout_s)
        if not ready:
            return
        self.heard_s = time.monotonic()
        for heard in self.crew.hear(ready):
            self._take(heard)
        self._rewatch()
        self._look_for_losses()

    def _rewatch(self) -> None:
        if self.crew.changes != self._changes:  # a closed descriptor's number is used again
            self._changes = self.crew.changes
            self._poller = select.poll()
            self.crew.register(self._poller)
        for worker in list(self._unsent):
            self.crew.register_worker(self._poller, worker)
            if not worker.channel.has_unsent:
                self._unsent.discard(worker)

    def _take(self, heard: Heard) -> None:
        message = heard.message
        if not self.roster.has(heard.worker):
            return  # the last words of one that was replaced
        if isinstance(message, Handed):
            move = self.roster.take_handed(message)
            if move is not None:
                self.watcher.note_move(move)
            return
        if isinstance(message, Stands):
            self.recovery.trails.note_stands(message)
            self.progress.note_stands(message)
            return
        flight = self._flights.get(message.serial)
        if flight is None:
            return
        if isinstance(message, Need):
            flight.need_bytes, flight.poured_bytes = message.size_bytes, message.poured_bytes
            if flight.ticket.serial < self.order.first_serial:
                self._deny(flight)
            return
        self._end_flight(flight)
        if flight.is_again:
            return
        self.recovery.note_landing(flight.stream)
        self.recovery.trails.note_answer(flight.stream, flight.ticket, message)
        self.progress.note_answer(message)
        if isinstance(message, Done):
            self._land(flight, self._seal(flight, message))
            return
        self._drop_drafts(flight)
        if isinstance(message, StreamEnd):
            if flight.ticket.serial >= self.order.first_serial:
                self.order.end_stream(message.stream)
                self._ended_streams.add(message.stream)
            self._land(flight, Skipped())
        else:
            self._land(flight, message)

    def _end_flight(self, flight: Flight) -> None:
        del self._flights[flight.ticket.serial]
        is_idle = self.roster.end(flight.worker, flight.ticket.serial)
        self.admission.settle(flight.pouring, is_idle=is_idle)

    def _seal(self, flight: Flight, done: Done) -> Landed:
        """H: from draft to ready; what was learned from it."""
        is_blurred = self.admission.note_costs(done, flight.given_back)
        self.watcher.note_report(flight.worker, done, is_blurred=is_blurred)
        if flight.started_s:
            self.ahead.spacing.note_end(time.monotonic() - flight.started_s)
        if not done.spans or flight.draft is None:
            self._drop_drafts(flight)
            return Inline(done.head, done.inline)
        if flight.spare is not None:
            self.admission.drop(flight.spare)
        return self.admission.seal(flight.draft, done)

    def _land(self, flight: Flight, landed: Landed) -> None:
        serial = flight.ticket.serial
        if serial < self.order.first_serial:
            self.admission.drop_landed(landed)
            return
        self._landed[serial] = landed
        self._arrived.append(serial)

    def _drop_drafts(self, flight: Flight) -> None:
        for draft in flight.drafts:
            self.admission.drop(draft)

    def _look_for_losses(self) -> None:
        for worker in self.recovery.find_dead():
            flights = [self._flights[serial] for serial in self.roster.flights_of(worker)]
            replacement = self.recovery.replace(worker, flights, self.watcher)
            if replacement is None:
                return
            for flight in flights:
                del self._flights[flight.ticket.serial]
                self._drop_drafts(flight)
            self.admission.ledger.settle(worker.number)
            for stream, steps in replacement.steps:
                self._lead_back(stream, steps, replacement.worker)
            if replacement.poison is not None:
                self._land(flights.pop(0), Refused(replacement.poison))
            self._take_back(flights)
            self._rewatch()

    def _lead_back(self, stream: int, steps: list[Step], worker: WorkerProcess) -> None:
        """Have a fresh worker do once more what a stream did since it last said where it stood."""
        for step in steps:
            if isinstance(step, Resume):
                self._tell(worker, Resume(step.epoch, (stream,)))
                continue
            flight = Flight(replace(step, serial=next(self._again)), worker, None, stream)
            flight.is_again, flight.origin = True, step.serial
            self._send_in_vain(flight)

    def _take_back(self, flights: list[Flight]) -> None:
        """Tickets that a dead worker had in hand are given out again, in their order."""
        tickets = [f.ticket for f in flights if f.ticket.serial >= self.order.first_serial]
        self._pending = deque(sorted((*tickets, *self._pending), key=lambda t: t.serial))

    # -- needs and liveness ---------------------------------------------------------------------

    def _serve_needs(self) -> bool:
        """Answer workers that wait for a larger block, head first. False: nothing else now."""
        waiting = sorted(serial for serial, flight in self._flights.items() if flight.need_bytes)
        return all(self._serve_need(self._flights[s], is_next=self._is_next(s)) for s in waiting)

    def _serve_need(self, flight: Flight, *, is_next: bool) -> bool:
        if self._try_serve(flight):
            return True
        self.is_short = True
        if not is_next:
            self.is_blocked = True
            return True
        self.admission.make_room(self._landed, self._head, flight.need_bytes, flight.pouring)
        if self._try_serve(flight):
            return True
        # The others land, and are evicted then; or a worker is replaced.
        if self._is_anybody_making() or self.watcher.try_relieve():
            self.is_blocked = True
            return False
        spare = self._count_stranded_bytes() + self.watcher.count_grown_bytes()
        if self.admission.fits_at_best(flight.need_bytes, spare):
            self._serve(flight, self.admission.place(flight.need_bytes))
        else:
            self._refuse(flight)
        return True

    def _is_anybody_making(self) -> bool:
        """Whether a worker is at a batch, rather than waiting for room with others queued."""
        return any(not self._flights[serial].need_bytes for serial in self.roster.firsts())

    def _count_stranded_bytes(self) -> int:
        waiting = (flight.draft for flight in self._flights.values() if flight.need_bytes)
        return sum(draft.block.capacity_bytes for draft in waiting if draft is not None)

    def _is_next(self, serial: int) -> bool:
        """Whether the consumer gets this batch before any other."""
        return serial == self._head if self.settings.in_order else not self._landed

    def _try_serve(self, flight: Flight) -> bool:
        draft = self.admission.try_place(flight.need_bytes, flight.pouring)
        if draft is not None:
            self._serve(flight, draft)
        return draft is not None

    def _serve(self, flight: Flight, draft: Draft | None) -> None:
        if draft is None:  # addresses have run out
            self._refuse(flight)
            return
        flight.draft, flight.spare, flight.need_bytes = draft, flight.draft, 0
        block = draft.block
        self._tell(flight.worker, Room(flight.ticket.serial, block.offset, block.capacity_bytes))

    def _refuse(self, flight: Flight) -> None:
        """The head does not fit beside what the consumer holds."""
        error = self.admission.compose_refusal(
            self.order.number_of(flight.ticket.serial),
            flight.need_bytes,
            self.settings.batch_size,
            is_first=self.delivered == 0,
        )
        self._deny(flight)
        self._land(flight, Refused(error))

    def _deny(self, flight: Flight) -> None:
        """No room: the worker drops the batch and says no more of it."""
        self._tell(flight.worker, Room(flight.ticket.serial, 0, 0))
        self._end_flight(flight)
        self._drop_drafts(flight)

    # -- I: deliver -------------------------------------------------------------------------------

    def try_next(self) -> Delivered | None:
        """What the consumer gets now; None when it has to wait."""
        while True:
            serial = self._next_serial()
            if serial is None:
                return self._conclude()
            landed = self._landed.pop(serial)
            if self.settings.in_order:
                self._head = serial + 1
            else:
                self._arrived.remove(serial)
            if isinstance(landed, Skipped):
                self.progress.note_end(serial)
                self._draw_up_to(self.order.drawn + 1)
                self.dispatch()
                continue
            self.progress.note_delivery(serial)
            return self._hand_over(landed)

    def _next_serial(self) -> int | None:
        if not self.settings.in_order:
            return self._arrived[0] if self._arrived else None
        return self._head if self._head in self._landed else None

    def find_awaited(self) -> Flight | None:
        """The flight that the consumer waits for; None if that batch is with no worker."""
        if self.settings.in_order:
            return self._flights.get(self._head)
        serials = [serial for serial in self.roster.firsts() if serial >= self.order.first_serial]
        return self._flights[min(serials)] if serials else None

    def _conclude(self) -> End | None:
        """Nothing is there to deliver: over, lost, or to be waited for."""
        first = self.order.first_serial
        flights = [flight for serial, flight in self._flights.items() if serial >= first]
        if not flights and self._peek_ticket() is None:
            return End()
        lost = self.recovery.lost
        if lost is not None and not self._may_still_come(flights):
            raise copy.copy(lost) from lost.__cause__  # its traceback would keep us alive
        return None

    def _may_still_come(self, flights: list[Flight]) -> bool:
        """After a loss: whether a worker that lives is still at what would be delivered next."""
        return any(
            not flight.worker.has_ended
            for flight in flights
            if not self.settings.in_order or flight.ticket.serial == self._head
        )

    def _hand_over(self, landed: Ready | Spilled | Inline | Failed | Refused) -> Delivered:
        self.delivered += 1
        if isinstance(landed, Spilled):
            landed = self.admission.bring_back(self._landed, landed)
        if isinstance(landed, Ready):
            self.admission.hand_over(landed)
        # torch draws the next batch here, before an error is raised too.
        self._draw_up_to(self.delivered + self.settings.lead)
        return landed

    def note_delivery(self, waited_s: float, interval_s: float) -> None:
        """Let the window follow the consumer."""
        self.ahead.note_delivery(waited_s, interval_s, len(self._landed))

    @property
    def has_idle_worker(self) -> bool:
        """Whether a worker that might fetch has nothing to do."""
        if self.is_short or self.ahead.spacing.is_waited_for:
            return False  # for lack of memory, or on purpose for a moment: not of width
        return self.roster.count_busy() < min(self.roster.tokens, len(self.crew.workers))

    @property
    def waits_for_token(self) -> bool:
        """Whether an idle worker has a ticket that only the number of tokens holds back."""
        can_more = self.ahead.tokens <= self.roster.count_busy() < len(self.crew.workers)
        return bool(self._pending) and can_more

    def add_token(self) -> None:
        """One more fetch at once: those that run may be waiting for one that does not."""
        self.roster.add_token(for_good=True)
        self.ahead.slow_start.end()
        self.dispatch()

    @property
    def has_lost(self) -> bool:
        """Whether a worker died, also if nobody was told yet: this crew makes no further epoch."""
        self._look_for_losses()
        return self.recovery.lost is not None
