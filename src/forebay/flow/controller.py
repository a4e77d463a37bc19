"""read -> reconcile -> decide -> apply: the way of one reading.

Covers: when to read what, the facts that a decision needs, and carrying out its acts. Does
not cover: deciding (memory/policy.py), or the thread that comes by (clock.py).

Two kinds of reading. A *look*, five times a second and some 0.3 ms: headroom, the arena's
pages, and, where the loader's processes are alone in their memory group, the group's own
sum, which is exact. A *full reading* walks the page tables of all processes (16 ms a GiB),
on at most 1 % of one core. Between two full readings without such a group, what is known of
the workers is the last one and how fast they grew.

Runs under the engine's lock, in whichever thread pumps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from forebay.errors import BudgetTooSmall
from forebay.events import Decided, Stance
from forebay.flow.clock import LOOK_S, URGENT_LOOK_S, Pace
from forebay.flow.watcher import Watcher
from forebay.memory.crew_account import WARM_FETCHES, CrewAccount
from forebay.memory.limits import headroom, usable_cpus
from forebay.memory.peak import trim_heap
from forebay.memory.planner import PARKED_BYTES, WORKER_BYTES, ZYGOTE_BYTES, estimate_threads
from forebay.memory.policy import (
    GROWN_LEAST_BYTES,
    PROMISED_FRAC,
    Act,
    AddToken,
    Decision,
    Evict,
    GiveBack,
    Merge,
    Narrow,
    Policy,
    Position,
    Recycle,
    Split,
    TakeToken,
    Trim,
    WorkerFact,
    find_grown,
)
from forebay.memory.readings import CpuUse, FootprintReading, cpu_since
from forebay.units import format_bytes
from forebay.workers.crew import RETIRE_S
from forebay.workers.messages import Keep

if TYPE_CHECKING:
    from forebay.flow.moves import Move
    from forebay.flow.scheduler import Scheduler
    from forebay.memory.budget import Budget
    from forebay.memory.probe import Probe
    from forebay.workers.crew import WorkerProcess
    from forebay.workers.messages import Done

_log = logging.getLogger("forebay")

_IDLE_S = 1.0
"""A consumer that has been away for so long is idle: another loader's is not."""

_PRESSURE_S = 1.0
"""Between two readings of PSI: it is an average over 10 s."""

_TELLING_FRAC = 0.05
"""Estimated growth, as a part of the budget, from which a full reading is worth having
early: what is kept for the unforeseen is as much."""

_BEGIN_S = 0.5
"""After so long a first reading is made although not every worker has made a batch."""

_ASKING_S = 3.0
"""How long the next batch waits for what other loaders were lent. They have 2 s."""

_CPU_S = 1.0
"""Between two looks at the processor time of workers."""

_CPU_LEAST_FRAC = 0.2
"""Of it, what workers must have worked together for their waiting to say something."""

_EVENTS = 64
"""Decisions that are kept for `explain()`."""

_TRIMMED_BYTES = 0
"""Heap that workers keep while memory is short."""


@final
class Controller(Watcher):
    """Follows one iterator's memory.

    Args:
        scheduler: Whose tickets, crew and memory.
        budget: The iterator's, or one that it shares.
        probe: Where to read.
        main_pid: This process.
        find_zygotes: The templates of all iterators of this process.

    Attributes:
        account: What the workers take.
        events: The latest decisions that changed something.
        peak_bytes: The largest footprint seen.
        warm_peak_bytes: The same since every worker made its first batches.
        workers_bytes: Of the latest reading.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        budget: Budget,
        probe: Probe,
        main_pid: int,
        find_zygotes: Callable[[], list[int]],
    ) -> None:
        self._scheduler = scheduler
        self._budget = budget
        self._probe = probe
        self._main_pid = main_pid
        self._find_zygotes = find_zygotes
        self._crew = scheduler.crew
        self._admission = scheduler.admission
        self._ledger = scheduler.admission.ledger
        self._arena = scheduler.admission.arena
        self._policy = Policy()
        self._pace = Pace()
        # Threads have no memory of their own that could be read: they take what they take.
        self._is_readable = self._crew.zygote_pid > 0
        numbers = tuple(worker.number for worker in self._crew.workers if self._is_readable)
        threads_bytes = estimate_threads(len(self._crew.workers))
        self.account = CrewAccount(ZYGOTE_BYTES if self._is_readable else threads_bytes, numbers)
        self._began_s = time.monotonic()
        self._looked_s = 0.0
        self._pressure_s = 0.0
        self._pressure_frac = 0.0
        self._cpus = usable_cpus(probe)
        self._cpu_s = 0.0
        self._cpu: dict[int, CpuUse] = {}
        self._cpu_wait_frac = 0.0
        self._group: tuple[int, int, int] | None = None  # the group, main, the arena: when read
        self._has_moved = False  # whether a worker was replaced since
        self._grown_bytes = 0  # since then, by the group's sum or by what workers say
        self._has_trimmed = False
        self._untrimmed_bytes: int | None = None  # of threads: this process after its last trim
        self._is_weighed = False
        self._leaving: dict[WorkerProcess, float] = {}  # told to end, and when
        self._asking_since_s: float | None = None  # other loaders of the budget
        self._most_tokens = scheduler.roster.tokens
        self._most_workers = scheduler.settings.most_workers
        self.events: deque[Decided] = deque(maxlen=_EVENTS)
        self.workers_bytes = 0
        self.peak_bytes = 0
        self.warm_peak_bytes = 0
        self._book()
        scheduler.watcher = self

    @property
    def stance(self) -> Stance:
        """What it does now."""
        return self._policy.stance

    @property
    def kept_by_fork_bytes(self) -> int:
        """Pages that main rewrote or freed since the fork, and its copies still have."""
        is_forked = self._crew.start_method == "fork" and self._is_readable
        return max(0, self.account.rest_bytes - ZYGOTE_BYTES) if is_forked else 0

    @property
    def moves(self) -> int:
        """How often streams changed their process."""
        return self._scheduler.roster.moves.done

    # -- read -------------------------------------------------------------------------------

    def look(self, now_s: float, *, is_waiting: bool, away_s: float) -> None:
        """See how things stand, if it is time to, and act on it.

        Args:
            now_s: Monotonic.
            is_waiting: Whether the consumer waits.
            away_s: How long it has been away.
        """
        seat, account = self._ledger.seat, self.account
        self._weigh_template()
        seat.wanted_bytes = self._count_wanted() if is_waiting else 0
        seat.is_idle = away_s >= _IDLE_S
        telling_bytes = _TELLING_FRAC * self._ledger.budget_bytes
        is_soon = account.has_unread or account.suspected_bytes > telling_bytes
        if now_s - self._looked_s < (URGENT_LOOK_S if is_soon or seat.asked_bytes else LOOK_S):
            return
        self._looked_s = now_s
        self._sum_up()
        if not self._is_readable:
            self._trim_threads()
        self._follow()
        self._note_cpu(now_s)
        for worker, since_s in self._leaving.items():
            if now_s - since_s > RETIRE_S:
                worker.kill()
        is_urgent = account.has_unread or self._grown_bytes > telling_bytes
        is_begun = account.is_begun or now_s - self._began_s > _BEGIN_S
        # While processes come and go, readings of one after the other do not fit together.
        is_settled = not self._scheduler.roster.moves.is_busy and not self._leaving
        if is_begun and is_settled and self._pace.is_due(now_s, is_urgent=is_urgent):
            self.read(now_s)
        self._apply(self._decide(now_s, is_waiting=is_waiting))

    def read(self, now_s: float) -> None:
        """One full reading of the processes: replaces the ledger's guess of the workers."""
        if not self._is_readable:
            self._note(now_s, FootprintReading(0, 0, (), complete=True), self.account.idle_bytes)
            return
        began = time.perf_counter()
        own = self._probe.read_tree([self._crew.zygote_pid])
        # Forks of other loaders share main's pages, too: read alone, each would seem smaller.
        # Templates that were started otherwise share nothing with anybody.
        is_forked = self._crew.start_method == "fork"
        roots = self._find_zygotes() if is_forked else [self._crew.zygote_pid]
        reading = self._probe.read_footprint(self._main_pid, roots)
        self._pace.note(now_s, time.perf_counter() - began)
        if reading.pids:
            self._note(now_s, reading, reading.count_part(own))
            self._group = self._read_group(own)
            self._has_moved = False

    def _weigh_template(self) -> None:
        """End it before a batch is delivered if no worker fits beside the template.

        Under fork a template costs next to nothing. Under the other start methods it has its
        own copy of what was imported, 150 MiB for torch alone, and of the dataset.
        """
        hatched = self._crew.hatched
        if self._is_weighed or hatched is None:
            return
        self._is_weighed = True
        if self._crew.start_method == "fork" or self._scheduler.delivered:
            return
        # All together cannot be read right now: workers are being forked, and with each one
        # a shared page is divided by one more. What these two have alone is not.
        template = self._probe.read_process(hatched.pid)
        if template is None:
            return
        held = template.anonymous_bytes + WORKER_BYTES
        bare = self._probe.read_process(self._crew.zygote_pid)
        if bare is not None and bare.pid != template.pid:
            held += min(bare.private_bytes, bare.pss_anon_bytes)
        needed = int(held / PROMISED_FRAC) + 1
        asked, settings = self._ledger.seat.whole_bytes, self._scheduler.settings
        if needed > asked:
            refusal = BudgetTooSmall.about(asked, needed, 0, settings.batch_size)
            self._crew.fault = self._crew.fault or refusal

    def _follow(self) -> None:
        """The budget follows what the machine has left."""
        seat = self._ledger.seat
        there = self.workers_bytes + self._grown_bytes + self._arena.read_resident_bytes()
        # What this left out would be taken for somebody else's, and the budget would yield to it.
        seat.measured_bytes = max(0, there)
        if not seat.is_alone:  # what it can always come by: one worker, and the next batch
            least = min(self.account.least_bytes, ZYGOTE_BYTES + WORKER_BYTES)
            seat.reserved_bytes = least + self._admission.estimate_batch()
        self._budget.follow(headroom(self._probe))

    def _note(self, now_s: float, reading: FootprintReading, workers_bytes: int) -> None:
        private_of = dict(reading.by_pid)
        private = {
            worker.number: private_of[worker.known_pid]
            for worker in self._crew.workers
            if worker.known_pid in private_of
        }
        promised = self._ledger.promised_by_holder
        is_warm = self._admission.landings >= WARM_FETCHES * len(self._crew.workers)
        self.account.note_reading(now_s, workers_bytes, private, promised, is_warm=is_warm)
        self.workers_bytes, self._grown_bytes = workers_bytes, 0
        self._book()
        footprint = workers_bytes + self._arena.read_resident_bytes()
        self.peak_bytes = max(self.peak_bytes, footprint)
        if is_warm:
            self.warm_peak_bytes = max(self.warm_peak_bytes, footprint)

    def _book(self) -> None:
        """Idle workers, and what the tickets that they have will add.

        A worker that was told to end counts until it has: that takes the kernel a moment.
        """
        for worker in [worker for worker in self._leaving if worker.has_ended]:
            del self._leaving[worker]
            self.account.remove(worker.number)
        coming = self.account.estimate_coming(self._scheduler.roster.count_flights_by_worker())
        if self._scheduler.roster.moves.is_busy or self.count_grown_bytes() > 2 * GROWN_LEAST_BYTES:
            coming += PARKED_BYTES  # replacing one of them takes a moment with both
        self._ledger.workers_bytes = self.account.idle_bytes + coming
        self._ledger.workers_least_bytes = self.account.least_bytes
        self._ledger.sync()

    def _read_group(self, own: tuple[int, ...]) -> tuple[int, int, int] | None:
        """The sum of our memory group if nobody else is in it, main's part, and the arena's."""
        if len(self._find_zygotes()) != 1:
            return None
        group = self._probe.read_own_group((self._main_pid, *own))
        statm = self._probe.read_statm(self._main_pid)
        if group is None or statm is None:
            return None
        return group, statm.anonymous_bytes, self._arena.read_resident_bytes()

    def _sum_up(self) -> None:
        """What workers have grown by since the last full reading: exact where the group tells."""
        self._grown_bytes = self.account.fresh_bytes
        if self._group is None:
            return
        now = self._read_group(self._probe.read_tree([self._crew.zygote_pid]))
        if now is None:
            return
        group, main, arena = (new - old for new, old in zip(now, self._group, strict=True))
        self._grown_bytes = group - main - arena
        if not self._has_moved:  # else it is not the growth of those who spoke since
            self.account.note_growth(self._grown_bytes)
        total_bytes = self.workers_bytes + self._grown_bytes
        self.account.note_sum(total_bytes, self._ledger.promised_bytes)
        self._book()

    def _trim_threads(self) -> None:
        """Have the allocator give back what this process' threads have freed, now and then.

        glibc keeps a heap for each thread, and in each what was freed last: 48 worker threads that
        made a sample of 8 MiB each keep hundreds. What cannot be told apart from the training
        code's memory can be given back all the same.
        """
        statm = self._probe.read_statm(self._main_pid)
        if statm is None:
            return
        if self._untrimmed_bytes is None:
            self._untrimmed_bytes = statm.anonymous_bytes
        kept_bytes = self._scheduler.settings.keep_bytes * len(self._crew.workers)
        if statm.anonymous_bytes - self._untrimmed_bytes > kept_bytes:
            trim_heap()
            after = self._probe.read_statm(self._main_pid)
            self._untrimmed_bytes = (after or statm).anonymous_bytes
        self._untrimmed_bytes = min(self._untrimmed_bytes, statm.anonymous_bytes)

    def _note_cpu(self, now_s: float) -> None:
        """Whether workers at work wait for a processor, now and then."""
        if now_s - self._cpu_s < _CPU_S:
            return
        self._cpu_s = now_s
        pids = [worker.known_pid for worker in self._crew.workers if worker.known_pid]
        now = {pid: use for pid, use in self._probe.read_cpu(pids).items() if use is not None}
        since = [cpu_since(self._cpu[pid], use) for pid, use in now.items() if pid in self._cpu]
        self._cpu = now
        waited = sum(use.wait_s or 0.0 for use in since)
        worked = sum(use.run_s for use in since) + waited
        self._cpu_wait_frac = waited / worked if worked > _CPU_LEAST_FRAC * _CPU_S else 0.0

    def _count_wanted(self) -> int:
        if not self._scheduler.is_short:
            return 0
        return max(1, self._admission.estimate_batch() - self._ledger.free_bytes)

    # -- between readings ------------------------------------------------------------------

    def note_report(self, worker: WorkerProcess, done: Done, *, is_blurred: bool) -> None:
        """A worker has said how large it is: what it grew by counts at once."""
        self._asking_since_s = None
        excused = done.touched_bytes if is_blurred else 0
        if self.account.note_report(worker.number, done.made, done.faults, excused):
            self._book()

    def estimate_step(self, worker: WorkerProcess) -> int:
        """What one more fetch will make a worker grow by."""
        return self.account.step_of(worker.number)

    def note_dispatch(self) -> None:
        """What a ticket will add counts before it is begun."""
        if self.account.has_steps:
            self._book()

    def note_move(self, move: Move) -> None:
        """Another process has other memory."""
        self._has_moved = True  # the group's sum since the last reading tells no growth then
        if move.is_last:
            self._leaving[move.source] = time.monotonic()
        if not self.account.has(move.target.number):
            self.account.add(move.target.number, move.source.number)
        self._book()

    def note_replacement(self, dead: WorkerProcess, fresh: WorkerProcess | None) -> None:
        """The memory of one is gone, and the other will come to need as much."""
        self._has_moved = True
        self._leaving.pop(dead, None)
        if fresh is not None:
            self.account.add(fresh.number, dead.number)
        self.account.remove(dead.number)
        self._book()

    def read_held_bytes(self, worker: WorkerProcess) -> int:
        """What a worker had of its own between two fetches, when it was read last."""
        return self.account.held_of(worker.number)

    def count_grown_bytes(self) -> int:
        """What replacing grown workers would free, sooner or later."""
        return self.account.grown_bytes if self._scheduler.settings.may_move else 0

    def try_relieve(self) -> bool:
        """Replace the worker that has grown most, among those that have nothing to do.

        Whoever is at a batch, or waits for room, could not be replaced before it has it.
        """
        self._book()
        if self._scheduler.roster.moves.is_under_way or self._leaving:
            return True
        if self._may_wait_for_others():
            return True
        grown = self._find_free_grown()
        if grown is not None and self.account.is_estimated(grown.number):
            self.read(time.monotonic())  # nothing is done on an estimate alone
            grown = self._find_free_grown() if self._ledger.free_bytes < 0 else None
        if grown is None:
            return False
        size = format_bytes(grown.grown_bytes)
        because = f"the next batch lacks memory, and a worker has grown by {size}"
        self._tell(time.monotonic(), Decision(self.stance, (Recycle(grown.number),), because))
        self._recycle(grown.number)
        return True

    def _may_wait_for_others(self) -> bool:
        """Whether other loaders of the budget have what is lacking, and will give it back."""
        seat, now_s = self._ledger.seat, time.monotonic()
        if not seat.lent_bytes:
            self._asking_since_s = None
            return False
        if self._asking_since_s is None:
            self._asking_since_s = now_s
        seat.wanted_bytes = max(1, self._admission.estimate_batch() - self._ledger.free_bytes)
        return now_s - self._asking_since_s < _ASKING_S

    def _find_free_grown(self) -> WorkerFact | None:
        facts = self._find_facts(settled=True, is_asked=True)
        return find_grown(facts, self._decide_worth())

    def _decide_worth(self) -> int:
        """Growth that is worth a new worker: more than a fetch and a kept heap may look like."""
        kept = self._scheduler.settings.keep_bytes
        return GROWN_LEAST_BYTES + kept + self._admission.makings.promise_bytes

    # -- reconcile and decide -----------------------------------------------------------------

    def _decide(self, now_s: float, *, is_waiting: bool) -> Decision:
        position = self._take_position(now_s, is_waiting=is_waiting)
        before = self._policy.stance
        decision = self._policy.decide(position)
        if decision.stance != before or decision.acts:
            self._tell(now_s, decision)
        return decision

    def _take_position(self, now_s: float, *, is_waiting: bool) -> Position:
        seat, roster, admission = self._ledger.seat, self._scheduler.roster, self._admission
        workers_bytes = self.workers_bytes + self._grown_bytes
        balance = self._ledger.reconcile(workers_bytes, self._arena.read_resident_bytes())
        settled = not roster.moves.is_busy
        ready = self._scheduler.count_evictable_bytes()
        return Position(
            t_s=now_s,
            budget_bytes=seat.whole_bytes,
            promised_bytes=seat.allowance_bytes,
            accounted_bytes=balance.accounted_bytes,
            unaccounted_bytes=balance.unaccounted_bytes,
            growth_bytes_per_s=self.account.growth_bytes_per_s,
            horizon_s=self._pace.interval_s,
            batch_bytes=admission.estimate_batch(),
            free_pages_bytes=self._arena.free_warm_bytes,
            ready_bytes=ready,
            asked_bytes=seat.asked_bytes or (ready if seat.must_give_way else 0),
            pressure_frac=self._read_pressure(now_s),
            cpu_wait_frac=self._cpu_wait_frac,
            cpus=self._cpus,
            is_waiting=is_waiting,
            is_short=self._scheduler.is_short,
            is_idle=seat.is_idle,
            tokens=min(roster.tokens, len(self._crew.workers)),
            least_tokens=roster.least_tokens,
            most_tokens=self._most_tokens,
            width=self._scheduler.window.width,
            workers=tuple(self._find_facts(settled=settled)),
            worth_bytes=self._decide_worth(),
            can_merge=settled and self._scheduler.settings.may_merge and self._has_two(),
            can_split=settled and self._can_split(),
            cause=self._budget.source,
        )

    def _find_facts(self, *, settled: bool, is_asked: bool = False) -> list[WorkerFact]:
        """What is known of each worker.

        Args:
            settled: Whether nobody is on the move.
            is_asked: Whether the head lacks memory now: then estimates count, and only those
                who have nothing to do can be replaced at once.
        """
        roster = self._scheduler.roster
        facts = []
        for worker in self._crew.workers:
            may_move = settled and self._scheduler.settings.may_move and roster.moves.may_be_made
            may_move = may_move and not (is_asked and roster.count_flights(worker))
            # Nothing is done on an estimate alone: the next reading tells.
            is_told = is_asked or not self.account.is_estimated(worker.number)
            grown = self.account.grown_of(worker.number) if is_told else 0
            facts.append(WorkerFact(worker.number, grown, may_move))
        return facts

    def _has_two(self) -> bool:
        return self._scheduler.roster.find_merge() is not None

    def _can_split(self) -> bool:
        workers = self._crew.workers
        if len(workers) >= self._most_workers:
            return False
        one = self.account.idle_bytes // max(1, len(workers))
        fits = self.account.idle_bytes + one <= self._ledger.budget_bytes // 2
        return fits and self._scheduler.roster.find_split() is not None

    def _read_pressure(self, now_s: float) -> float:
        if now_s - self._pressure_s >= _PRESSURE_S:
            self._pressure_s = now_s
            pressure = self._probe.read_pressure()
            # The host's pressure is not ours while a group's limit binds below the host's.
            is_ours = pressure is not None and (
                pressure.source != "host" or self._budget.is_bound_by_host
            )
            self._pressure_frac = pressure.some_avg10_frac if pressure and is_ours else 0.0
        return self._pressure_frac

    def _tell(self, now_s: float, decision: Decision) -> None:
        event = Decided(
            t_s=now_s - self._began_s,
            stance=decision.stance,
            acts=tuple(type(act).__name__ for act in decision.acts),
            because=decision.because,
            measured_bytes=self._ledger.seat.measured_bytes,
            budget_bytes=self._ledger.seat.whole_bytes,
        )
        self.events.append(event)
        _log.info("%s %s: %s", event.stance, ", ".join(event.acts), event.because)

    # -- apply ----------------------------------------------------------------------------------

    def _apply(self, decision: Decision) -> None:
        scheduler = self._scheduler
        self._keep_heaps(is_short=decision.stance in {"shrink", "pause"})
        scheduler.window.may_widen = decision.stance == "grow"
        scheduler.is_paused = decision.stance == "pause"
        for act in decision.acts:
            self._act(act)
        if any(isinstance(act, GiveBack | Evict) for act in decision.acts):
            self._ledger.sync()

    def _act(self, act: Act) -> None:
        scheduler, roster = self._scheduler, self._scheduler.roster
        if isinstance(act, GiveBack):
            self._admission.give_back(act.size_bytes)
        elif isinstance(act, Evict):
            scheduler.evict(act.size_bytes)
        elif isinstance(act, Trim):
            self._has_trimmed = True
            self._tell_keep(_TRIMMED_BYTES)
        elif isinstance(act, Narrow):
            scheduler.window.narrow()
        elif isinstance(act, TakeToken):
            roster.take_token()
        elif isinstance(act, AddToken):
            roster.add_token()
        elif isinstance(act, Recycle):
            self._recycle(act.worker)
        elif isinstance(act, Merge):
            pair = roster.find_merge()
            if pair is not None:
                roster.moves.merge(*pair)
        else:
            assert isinstance(act, Split)
            fullest = roster.find_split()
            if fullest is not None:
                roster.moves.split(fullest)

    def _keep_heaps(self, *, is_short: bool) -> None:
        if self._has_trimmed and not is_short:
            self._has_trimmed = False
            self._tell_keep(self._scheduler.settings.keep_bytes)

    def _tell_keep(self, size_bytes: int) -> None:
        for worker in self._crew.workers:
            self._crew.tell(worker, Keep(size_bytes))

    def _recycle(self, number: int) -> None:
        for worker in self._crew.workers:
            if worker.number == number and not worker.has_ended:
                self._scheduler.roster.moves.recycle(worker)
