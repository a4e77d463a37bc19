"""One iterator's machinery, put together: arena, crew, ledger, scheduler, clock.

Covers: building it from a loader's settings, taking the next batch, accounting for it, and
ending it. Does not cover: torch's iterator protocol (iterator.py).

Order of locks: there is one, `_lock`. It guards all of the scheduler's state and is held
for arithmetic and short system calls, and by the consumer while it waits in `next`.
Finalisers take none: they append to a queue.
"""

from __future__ import annotations

import atexit
import copy
import os
import threading
import time
import warnings
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from forebay.errors import (
    BudgetWarning,
    ForeignProcess,
    HoardingWarning,
    IteratorClosed,
)
from forebay.events import LoaderStats
from forebay.flow.admission import Admission
from forebay.flow.clock import LOOK_S, Clock
from forebay.flow.controller import Controller
from forebay.flow.explanation import Situation, explain
from forebay.flow.flight import End, Inline, Refused
from forebay.flow.plan import (
    Plan,
    count_free_files,
    decide_crew,
    decide_reserve,
    guess_workers,
    make_order,
    make_settings,
    take_seat,
)
from forebay.flow.scheduler import Scheduler
from forebay.flow.stall import StallWatch
from forebay.flow.tally import Tally, read_cpu_s
from forebay.memory.ledger import Ledger
from forebay.memory.planner import Lessons, split_streams
from forebay.memory.probe import Probe
from forebay.memory.tables import find_tables
from forebay.transport.arena import Arena
from forebay.transport.codec import decode
from forebay.transport.lease import Lender, Ready
from forebay.units import MIB, format_budget, format_bytes
from forebay.workers.backend import start_crew
from forebay.workers.messages import Failed, Keep, Report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.flow.progress import Progress
    from forebay.workers.job import Job

_WAIT_S = LOOK_S
"""Longest single wait in `next`: then the clock's work is done in passing."""

_BLOCKED_WAIT_S = 0.02
"""The same while a view that dies in another thread may be what is waited for."""

_LONE_S = 2.0
"""After so long without a word or CPU use, a lone fetch may be waiting for another stream
(datasets may hold a barrier over all workers): one more is let in."""

_HOARD_BYTES = 64 * MIB
"""Kept heap copies below this are nobody's worry."""

_ASK_PATIENCE_S = 0.2
"""How long `stats()` and finalisers wait for the lock: a delivery holds it for far less."""

_EXIT_PATIENCE_S = 2.0
"""At exit another thread may sit in `next` for ever: then the workers are killed instead."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()

_EXITING = threading.Event()


def _find_zygotes() -> list[int]:
    """The templates of all engines of this process."""
    pids = [engine.crew.zygote_pid for engine in list(_engines)]
    return [pid for pid in pids if pid]  # threads have none


@atexit.register
def _close_all() -> None:
    """An orderly end, exit functions included, for iterators that live until the end."""
    _EXITING.set()
    for engine in list(_engines):
        engine.close(patience_s=_EXIT_PATIENCE_S)


@final
class Legacy:
    """What an engine leaves to its loader when it ends: its last words."""

    def __init__(self) -> None:
        self.stats: LoaderStats | None = None
        self.lines: list[str] = []


@final
class Engine:
    """Makes one iterator's batches.

    Raises:
        BudgetTooSmall: Not even one worker fits.
        NestedLoader: This process may not start others.
    """

    def __init__(
        self,
        plan: Plan,
        job: Job,
        context: Any,
        legacy: Legacy,
        lessons: Lessons,
        progress: Progress,
    ) -> None:
        lessons.begin_epoch()
        seat = take_seat(plan, job.num_streams)
        try:
            free_files = count_free_files(Probe())
            crew_plan = decide_crew(plan, seat, job.num_streams, free_files)
            reserve_bytes = decide_reserve(plan.budget, seat.whole_bytes, Probe())
            self.arena = Arena(reserve_bytes, is_private=crew_plan.in_threads)
        except BaseException:
            seat.leave()
            raise
        self._legacy = legacy
        self._lessons = lessons
        self._plan = plan
        self._job = job
        self._seat = seat
        self.crew_plan = crew_plan
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._probe = Probe()
        self._is_closed = False
        self._is_unwanted = self._is_asked_to_close = False
        self._is_exhausted = False
        self._is_consumer_here = False
        self._delivered_s = time.monotonic()
        self._lone_cpu_s = 0.0
        self._lone_since_s = time.monotonic()
        self.lender = Lender(self.arena)
        self.ledger = Ledger(seat)
        guess_bytes = guess_workers(crew_plan)
        self.ledger.workers_bytes = guess_bytes
        self.ledger.sync()
        try:
            streams_of = split_streams(job.num_streams, crew_plan.workers)
            self.crew = start_crew(
                context, job, self.arena, streams_of, in_threads=crew_plan.in_threads
            )
        except BaseException:
            self.arena.close()
            seat.leave()
            raise
        self._has_warned_hoarding = False
        self._has_warned_outgrown = False
        try:
            self._arrange(progress)
        except BaseException:  # Ctrl-C comes at any time
            self.crew.retire()
            self.arena.close()
            seat.leave()
            raise

    def _arrange(self, progress: Progress) -> None:
        """Put around the crew who decides and who looks."""
        plan, job, seat, lessons = self._plan, self._job, self._seat, self._lessons
        self.admission = Admission(self.arena, self.lender, self.ledger, lessons)
        self.scheduler = Scheduler(
            self.crew,
            self.admission,
            make_order(plan, job, progress.first_epoch),
            make_settings(plan, seat, job, self.crew_plan),
            progress,
            job.starts,
            self._probe.read_events,
        )
        self.controller = Controller(
            self.scheduler, plan.budget, self._probe, self._owner_pid, _find_zygotes
        )
        self._stalls = StallWatch(self.scheduler, self._probe, plan.stall_report_s)
        self._stats = Tally()
        for worker in self.crew.workers:
            self.crew.tell(worker, Keep(self.scheduler.settings.keep_bytes))
        _engines.add(self)
        with self._lock:  # its thread may tick before this returns
            self._clock = Clock(self)
        self.lender.attach_bell(self._clock.bell)

    # -- the consumer's side ------------------------------------------------------------------

    def start_epoch(self, sampler: Iterator[Any], *, is_first: bool) -> None:
        """Draw the first tickets and hand them out."""
        with self._lock:
            self._is_exhausted = False
            if not is_first:
                self._lessons.begin_epoch()
            self.scheduler.start_epoch(sampler, is_first=is_first)

    def take(self, timeout_s: float) -> Any:
        """The next batch.

        Args:
            timeout_s: As torch's `timeout`; 0 waits for ever.

        Raises:
            StopIteration: The epoch is over.
            RuntimeError: torch's own sentence, after `timeout_s`.
            IteratorClosed: The loader was closed, perhaps by another thread meanwhile.
            Exception: What the user's code raised in the worker.
        """
        self._refuse_foreign()
        try:
            return self._take(timeout_s)
        except IteratorClosed:
            if _EXITING.is_set():  # only daemon threads are left: the interpreter ends under them
                threading.Event().wait()
            raise

    def _take(self, timeout_s: float) -> Any:
        with self._lock:
            if self._is_exhausted:  # another thread met the end first
                raise StopIteration
            if self._is_closed:
                raise IteratorClosed.about()
            self._is_consumer_here = True
            try:
                landed, waited_s = self._wait(timeout_s)
            finally:
                self._is_consumer_here = False
            if isinstance(landed, End):
                self._is_exhausted = self.scheduler.progress.is_over = True
                raise StopIteration
            now = time.monotonic()
            self.scheduler.note_delivery(waited_s, now - self._delivered_s)
            self._delivered_s = now
            self.controller.look(now, is_waiting=waited_s > 0, away_s=0.0)
            try:
                head, buffers = self._open(landed)
            finally:
                self.scheduler.dispatch()
        batch = decode(head, buffers)
        self._stats.note(buffers, waited_s, self.scheduler.progress.last_samples)
        return batch

    def _refuse_foreign(self) -> None:
        if os.getpid() != self._owner_pid:
            raise ForeignProcess.about(self._owner_pid, os.getpid())

    def _wait(self, timeout_s: float) -> tuple[Any, float]:
        scheduler = self.scheduler
        self.admission.note_arrival()
        scheduler.listen(0)
        landed = scheduler.try_next()
        if landed is not None:
            return landed, 0.0
        began = time.monotonic()
        scheduler.dispatch()
        last = patient_since = began
        self._stalls.begin()
        while True:
            had_idle = scheduler.has_idle_worker
            scheduler.listen(self._choose_wait(patient_since, timeout_s))
            if self._is_asked_to_close:
                raise IteratorClosed.about()
            now = time.monotonic()
            if had_idle:
                scheduler.ahead.note_idle(now - last)
            last = now
            landed = scheduler.try_next()
            if landed is not None:
                return landed, now - began
            if timeout_s > 0 and now - patient_since >= timeout_s:
                if not scheduler.recovery.try_end_stopped():
                    message = f"DataLoader timed out after {timeout_s} seconds"
                    raise RuntimeError(message)
                patient_since = now
            stalled = self._stalls.look(now - began)
            if stalled is not None:
                warnings.warn(stalled, stacklevel=5)  # this, take, _next_data, __next__, the loop
            scheduler.dispatch()
            self._look_after(now)

    def _choose_wait(self, began_s: float, timeout_s: float) -> float:
        wait = _BLOCKED_WAIT_S if self.scheduler.is_blocked else _WAIT_S
        due_s = self.scheduler.ahead.spacing.due_s - time.monotonic()
        if due_s > 0:
            wait = min(wait, due_s)
        if timeout_s > 0:
            wait = min(wait, max(0.0, began_s + timeout_s - time.monotonic()))
        return wait

    def _open(self, landed: Any) -> tuple[bytes, list[object]]:
        """J: what the batch is rebuilt from; its block is lent, or copied and free again."""
        if isinstance(landed, Inline):
            return landed.head, list(landed.buffers)
        if isinstance(landed, Failed):
            landed.error.reraise()
        if isinstance(landed, Refused):
            raise copy.copy(landed.error)  # else its traceback and our frame hold each other
        assert isinstance(landed, Ready)
        return self._lend(landed)

    def _lend(self, ready: Ready) -> tuple[bytes, list[object]]:
        head = ready.head
        if ready.head_in_block:
            offset, length = ready.spans[-1]
            head = bytes(memoryview(self.arena.mapping)[offset : offset + length])
            ready = Ready(head, ready.spans[:-1], ready.block)
        if self.admission.should_copy_out(ready):
            buffers = self.lender.copy_out(ready)
            self._warn_of_hoarding()
        else:
            buffers = self.lender.lend(ready)
        return head, buffers

    def warn_if_outgrown(self) -> None:
        """Say once that a reading was above the budget, in the thread that reads warnings.

        Only after every worker has made some batches: what a first one of its kind takes is
        known once it was made, and its overshoot is told by `explain()` alone.
        """
        peak, budget_bytes = self.controller.warm_peak_bytes, self._seat.whole_bytes
        if not self._plan.budget.is_fixed or not self._seat.is_alone:
            return  # what it is now says nothing of what it was at the peak
        if peak > budget_bytes and not self._has_warned_outgrown:
            self._has_warned_outgrown = True
            warnings.warn(
                f"the loader's footprint was {format_bytes(peak)}, above its memory_budget of "
                f"{format_bytes(budget_bytes)}: the workers' own memory grew after "
                "they were started. Python objects of the dataset are copied into each worker "
                "that touches them: keep records in arrays or tensors, use fewer workers, or "
                f"raise the budget to {format_budget(peak)}.",
                BudgetWarning,
                stacklevel=4,  # this, _next_data, __next__, the loop
            )

    def warn_of_deaths(self) -> None:
        """Say what recovery could not do as well as it would."""
        untold = self.scheduler.recovery.untold
        while untold:
            warnings.warn(untold.pop(0), stacklevel=4)  # this, _next_data, __next__, the loop

    def _warn_of_hoarding(self) -> None:
        kept = self.lender.copied_bytes
        if kept < _HOARD_BYTES or self._has_warned_hoarding:
            return
        self._has_warned_hoarding = True
        warnings.warn(
            f"the training code keeps delivered batches: {format_bytes(kept)} were copied out of "
            f"the loader's budget of {format_bytes(self._seat.whole_bytes)} to the heap of this "
            "process and no longer count against it. If that is not meant, keep batch.clone() of "
            "the parts that you need, or drop batches after use.",
            HoardingWarning,
            stacklevel=7,  # this, _lend, _open, take, _next_data, __next__, the loop
        )

    def refresh_dataset(self, dataset: Any) -> None:
        """Have every stream draw from `dataset` from the next epoch on."""
        with self._lock:
            self.crew.refresh(dataset)

    def wait_for_streams(self) -> None:
        """Until streams have said where they stand, as far as a checkpoint needs it now.

        At the begin of an epoch those say it whose dataset has a state of its own; after one,
        when they are idle, all are asked.
        """
        progress, scheduler = self.scheduler.progress, self.scheduler
        with self._lock:
            if self._is_closed or os.getpid() != self._owner_pid:
                return
            if progress.lacks_end:
                for worker in self.crew.workers:
                    self.crew.tell(worker, Report())
            while (progress.lacks_begin or progress.lacks_end) and not scheduler.has_lost:
                scheduler.listen(_WAIT_S)

    # -- the clock's side ----------------------------------------------------------------------

    def try_tick(self, tick_s: float) -> bool:
        """Pump for up to a tick if the consumer is away.

        Returns:
            Whether the consumer is away for longer: then the clock goes on listening to the
            workers instead of sleeping.
        """
        if os.getpid() != self._owner_pid or self._is_consumer_here:
            return False
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._is_closed:
                return False
            if self._is_unwanted:
                return False
            self.scheduler.listen(0)
            self.scheduler.dispatch()
            now = time.monotonic()
            self._look_after(now)
            is_away = now - self._delivered_s > tick_s
        finally:
            self._release()
        if is_away:
            self.crew.wait(tick_s, self._clock.bell)
        return is_away

    def _look_after(self, now_s: float) -> None:
        """What is to be done now and then, by whoever holds the lock."""
        away_s = 0.0 if self._is_consumer_here else now_s - self._delivered_s
        self.controller.look(now_s, is_waiting=self._is_consumer_here, away_s=away_s)
        if self.scheduler.waits_for_token and now_s - self.scheduler.heard_s > _LONE_S:
            self._rescue_lone_fetch(now_s)

    def _rescue_lone_fetch(self, now_s: float) -> None:
        cpu_s = read_cpu_s(self.scheduler.roster.busy_pids())
        is_working = cpu_s - self._lone_cpu_s > 0.1 * _LONE_S
        if is_working and not self.scheduler.ahead.slow_start.is_cheap:  # leave it alone
            self._lone_cpu_s, self._lone_since_s = cpu_s, now_s
        elif now_s - self._lone_since_s > _LONE_S:
            self._lone_since_s = now_s
            self.scheduler.add_token()

    # -- facts -----------------------------------------------------------------------------------

    def read_stats(self) -> LoaderStats:
        """The state now; for any thread."""
        # While the consumer waits in `next` it holds the lock, perhaps for ever: then what it
        # read last must do, since that is when somebody else wants to know.
        if not self._lock.acquire(timeout=_ASK_PATIENCE_S):
            return self._compose_stats()
        try:
            if not self._is_closed:
                self.lender.settle()
                self.controller.read(time.monotonic())
            return self._compose_stats()
        finally:
            self._release()

    def _compose_stats(self) -> LoaderStats:
        arena_bytes = 0 if self._is_closed else self.arena.read_resident_bytes()
        sizes = self.admission.sizes.estimate_next()
        tally = self._stats
        workers_bytes = self.controller.workers_bytes
        footprint = workers_bytes + arena_bytes
        growth = self.controller.account.judge_growth()
        return LoaderStats(
            batches=tally.batches,
            samples=tally.samples,
            delivered_bytes=tally.bytes,
            consumer_wait_s=tally.wait_s,
            budget_bytes=self._seat.whole_bytes,
            footprint_bytes=footprint,
            peak_footprint_bytes=max(self.controller.peak_bytes, footprint),
            arena_bytes=arena_bytes,
            workers_private_bytes=workers_bytes,
            in_flight_bytes=self.admission.in_flight_bytes,
            held_by_consumer_bytes=self.lender.lent_bytes + self.lender.copied_bytes,
            workers=sum(not worker.has_ended for worker in self.crew.workers),
            window_bytes=self.scheduler.window.width * sizes,
            growth_bytes_per_batch=growth.bytes_a_batch if growth is not None else 0,
            worker_restarts=self.scheduler.recovery.restarts,
            restart_reasons=tuple(self.scheduler.recovery.reasons),
            stance=self.controller.stance,
        )

    def explain(self) -> list[str]:
        """Sentences on where the bytes are and why it runs as it runs."""
        return self._compose_lines(self.read_stats())

    def _compose_lines(self, stats: LoaderStats) -> list[str]:
        scheduler, hatched = self.scheduler, self.crew.hatched
        return explain(
            Situation(
                stats=stats,
                limit_source=self._plan.budget.source,
                num_streams=self._job.num_streams,
                tokens=scheduler.roster.tokens,
                start_method=self.crew.start_method,
                plan_reason=self.crew_plan.because,
                found_unpickling=hatched.found if hatched is not None else (),
                lent_bytes=self.lender.lent_bytes,
                copied_bytes=self.lender.copied_bytes,
                lost_bytes=self.lender.lost_bytes,
                batch_bytes=self.admission.totals.estimate_next(),
                making_bytes=self.admission.makings.largest_bytes,
                kept_by_fork_bytes=self.controller.kept_by_fork_bytes,
                growth=self.controller.account.judge_growth(),
                unshared_bytes=self.controller.account.unshared_bytes,
                tables=find_tables(self._job.dataset),
                objects_bytes=self.admission.objects_bytes,
                width=scheduler.window.width,
                most=scheduler.window.most,
                evictions=self.admission.evictions,
                is_short=scheduler.is_short,
                moves=self.controller.moves,
                events=tuple(self.controller.events),
                unmeasured=tuple(sorted(self._probe.degraded)),
            )
        )

    # -- the end -----------------------------------------------------------------------------------

    def close_soon(self) -> None:
        """End everything; if the lock stays taken, whoever has it does so after releasing it.

        For finalisers: they run inside whatever holds the lock, also inside the clock's own
        tick, and must not wait for it without end. A tick of the other thread is over soon:
        then all has ended when `del iterator` returns, as with torch.
        """
        self._is_unwanted = True
        if not self._is_closed and self._lock.acquire(timeout=_ASK_PATIENCE_S):
            self._lock.release()
            self.close()

    def _release(self) -> None:
        """Release the lock, and do what a finaliser could not do meanwhile.

        It sets its mark before it tries the lock, so one that failed is always seen here.
        """
        self._lock.release()
        if self._is_unwanted:
            self.close()

    def _is_over(self) -> bool:
        return self._is_closed

    def close(self, patience_s: float = -1) -> None:
        """End all processes and let go of everything. Delivered batches stay valid.

        Args:
            patience_s: How long to wait for the lock; -1 is for ever. A thread that waits in `next`
                lets go of it at its next look, and is told `IteratorClosed`; user code that a
                sampler runs there may take longer. After that the workers are killed.
        """
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        self._is_asked_to_close = True
        if not self._lock.acquire(timeout=patience_s):
            self.crew.kill()
            return
        try:
            if self._is_over():  # by another thread, meanwhile
                return
            self.controller.read(time.monotonic())
            self._legacy.stats = self._compose_stats()
            self._legacy.lines = self._compose_lines(self._legacy.stats)
            self._legacy.stats = replace(self._legacy.stats, workers=0)
            self._is_closed = True
            self.lender.attach_bell(-1)
            self.crew.retire()
            self.scheduler.close()
            self.lender.close()
            self.arena.close()
            self._seat.leave()
            _engines.discard(self)
        finally:
            self._lock.release()
        self._clock.stop()
