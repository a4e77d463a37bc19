"""What the workers take when they are idle: from readings, and between them from themselves.

Covers: the account of the template and of each worker, and what each has grown by. Does not
cover: reading (probe.py), promises to fetches (ledger.py), or what is done about growth
(policy.py). Pure.

    booked = rest + sum over workers (idle + what their tickets will add)
    rest   = the template, pages kept alive by fork, processes of the user's

A full reading is exact, but it holds whatever fetches hold at that moment, too, and it is
rare where processes are large. So

- what a worker takes idle is the least of its latest readings, unless it has said that it
  grew: then it is what it was plus that, as far as the latest reading bears it out; or unless
  two readings in two of its fetches agree that there is more than fetches were promised;
- all together take no less than the least of the latest sums, since heaps that allocators
  keep come and go, and not all at once. Where a cheap exact sum can be had (the loader alone in
  its memory group), the latest of those count;
- between two readings a worker says, with each batch, how many page faults it had, and with
  those that are metered how much anonymous memory it has. The second shows what it allocated
  and kept. It does not show a page that was copied because an object on it was touched: that
  page was resident before, too. The first shows every such copy, and every page of heap that
  was given back and taken again. What a fetch had at its peak is
  taken off. Which part of the rest is growth is learned from the readings; it is a habit of
  the dataset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import final

from forebay.memory.growth import Growth, GrowthTrail, SharedTrail
from forebay.memory.planner import WORKER_BYTES
from forebay.units import MIB

WARM_FETCHES = 3
"""Fetches of each worker after which it has touched what it usually touches."""

_READINGS = 4
"""Latest readings of a worker that count: what fetches hold is not in all of them."""

_LOOKS = 4
"""The same for exact sums between readings, which come every 20 ms while workers grow."""

_MOST_RATIO = 2.0
"""Growth for each fault that was counted, at most. Above 1 where faults were taken for
others': for what fetches give back again, or for blocks that were mapped anew."""

_PAGE_BYTES = 4096
"""What one minor fault brings at least. (Huge pages make it an underestimate; the next full
reading puts that right.)"""

_FIRST_RATIO = 1.0
"""Part of the faults taken for growth before anything is known. Too much for a dataset that
merely uses its heap: then the first reading, made early because of it, puts that right."""

_CHURN_RATIO = 0.1
"""Below this it is the heap that comes and goes: then half of what was assumed is dropped with
each reading. Above, a tenth: a reading may fall into a moment when all was copied already."""

_TELLING_BYTES = MIB
"""Faults of less say nothing about the ratio."""

_STEP_BYTES = 64 * 1024
"""Growth a fetch that is worth counting before it happens: 16 pages."""

_STEP_DECAY = 0.75
"""How fast a large step is forgotten: what was copied once is not copied again."""

_SLOPE_READINGS = 3
"""Readings whose least is compared with the least of as many before: a trend, not a peak."""


@final
class WorkerAccount:
    """One worker's.

    Attributes:
        idle_bytes: Private memory when it is idle, by the latest readings.
        kept_bytes: Of its growth since the last reading, what it says that it allocated.
        copied_bytes: The same for all other page faults, at most.
        step_bytes: What one more fetch will add.
        largest_step_bytes: The most that one ever added, to it or the one it replaced.
        trail: What it had after each batch.
        shared: What it had in common with others.
    """

    def __init__(self, like: WorkerAccount | None = None) -> None:
        self.idle_bytes = WORKER_BYTES if like is None else like.newborn_bytes
        self.kept_bytes = 0
        self.copied_bytes = 0
        # A new one copies most at first: its steps begin with the largest that were seen.
        self.largest_step_bytes: int = 0 if like is None else like.largest_step_bytes
        self.step_bytes = self.largest_step_bytes
        self.trail: GrowthTrail = GrowthTrail() if like is None else like.trail
        self.trail.go_on()
        self.shared = SharedTrail()
        self._private: deque[int] = deque(maxlen=_READINGS)
        self._base_bytes: int | None = None
        self._anon_bytes: int | None = None  # as it said last, and when it was read last
        self._read_anon_bytes = 0
        self._faults: int | None = None
        self._read_faults = 0
        self._fresh_bytes = 0
        self._peak_bytes = 0  # of the latest metered fetch, less what it kept
        self._passing_bytes = 0  # what fetches since the last reading had and gave back
        self._reports = 0
        self._floors: deque[tuple[int, int]] = deque(maxlen=2)  # fetch, and what it had at least

    def note_report(
        self, made: tuple[int, int, int] | None, faults: int, excused_bytes: int, ratio: float
    ) -> None:
        """What it said after a fetch; see `CrewAccount.note_report`."""
        self._reports += 1
        if made is not None:
            peak_bytes, anon_bytes, _ = made
            kept = max(0, anon_bytes - (self._anon_bytes or 0))
            self._peak_bytes = max(0, peak_bytes - kept)
            if self._anon_bytes is None:
                # What it allocates at its first fetch is what it needs, and not growth.
                self._read_anon_bytes = anon_bytes
            self._anon_bytes = anon_bytes
        if self._faults is None:
            self._read_faults = faults
        elif faults > self._faults:
            self._passing_bytes += min(self._peak_bytes, (faults - self._faults) * _PAGE_BYTES)
            self._read_faults += min(excused_bytes // _PAGE_BYTES, faults - self._faults)
        self._faults = faults
        self._split()
        fresh = self.estimate_fresh(ratio)
        step, self._fresh_bytes = fresh - self._fresh_bytes, fresh
        self.step_bytes = max(step, int(_STEP_DECAY * self.step_bytes))
        self.largest_step_bytes = max(step, self.largest_step_bytes)

    def scale_steps(self, factor: float) -> None:
        """What was learned of steps counted too many, or too few, of the faults."""
        self.step_bytes = int(self.step_bytes * factor)
        self.largest_step_bytes = int(self.largest_step_bytes * factor)

    @property
    def newborn_bytes(self) -> int:
        """What one like it takes after its first fetch."""
        return max(WORKER_BYTES + self.largest_step_bytes, self._base_bytes or 0)

    @property
    def is_unread(self) -> bool:
        """Whether it has made a batch and no reading has seen it."""
        return self._faults is not None and not self._private

    def is_quiet(self, faults: int) -> bool:
        """Whether it has had no fault since it spoke last, and was not growing then."""
        return faults == self._faults and self.step_bytes < _STEP_BYTES

    @property
    def has_reported(self) -> bool:
        """Whether it has made a batch."""
        return self._faults is not None

    @property
    def is_read(self) -> bool:
        """Whether a full reading has seen it."""
        return bool(self._private)

    def note_reading(self, private_bytes: int, promised_bytes: int, ratio: float) -> int:
        """What a full reading found to be its own alone. Returns what it has grown since."""
        if self._faults is None:
            # It has made no batch yet: what it has now is not what it will have.
            self.idle_bytes = max(self.idle_bytes, private_bytes)
            return 0
        before = self._private[-1] if self._private else private_bytes
        if self._base_bytes is None:
            self._base_bytes = max(0, private_bytes - self.estimate_fresh(ratio))
        self._base_bytes = min(self._base_bytes, private_bytes)
        self._private.append(private_bytes)
        floor = private_bytes - promised_bytes
        believed = min(floor, self.idle_bytes + self.estimate_fresh(ratio))
        self.idle_bytes = max(min(self._private), believed, self._agree_on(floor))
        if self._anon_bytes is not None:
            self._read_anon_bytes = self._anon_bytes
            self.shared.note_reading(self._anon_bytes, private_bytes)
        self._read_faults = self._faults or 0
        self.kept_bytes = self.copied_bytes = self._fresh_bytes = self._passing_bytes = 0
        return private_bytes - before

    def _agree_on(self, floor_bytes: int) -> int:
        """What it had beside the promises in each of its two latest fetches that were read."""
        if self._floors and self._floors[-1][0] == self._reports:
            floor_bytes = min(floor_bytes, self._floors.pop()[1])
        self._floors.append((self._reports, floor_bytes))
        is_told_twice = len(self._floors) == self._floors.maxlen
        return min(size for _, size in self._floors) if is_told_twice else 0

    def estimate_fresh(self, ratio: float) -> int:
        """Growth since the last reading."""
        return self.kept_bytes + int(ratio * self.copied_bytes)

    @property
    def gross_bytes(self) -> int:
        """All page faults since the last reading, whatever they were for."""
        return max(0, (self._faults or 0) - self._read_faults) * _PAGE_BYTES

    def estimate_grown(self, ratio: float) -> int:
        """Growth since it was new: what replacing it would free."""
        base = self.idle_bytes if self._base_bytes is None else self._base_bytes
        return max(0, self.idle_bytes - base) + self.estimate_fresh(ratio)

    def _split(self) -> None:
        self.kept_bytes = max(0, (self._anon_bytes or 0) - self._read_anon_bytes)
        self.copied_bytes = max(0, self.gross_bytes - self.kept_bytes - self._passing_bytes)


@final
class CrewAccount:
    """All workers of one iterator, and their template.

    Args:
        rest_bytes: First guess of what is there beside the workers.
        numbers: The workers.

    Attributes:
        least_bytes: The least that all were ever seen to take, less what they had grown by.
        ratio: Growth for each byte of page faults that was counted.
        growth_bytes_per_s: How fast the whole grows by readings; 0 while it does not.
        has_steps: Whether tickets make workers grow, so that each counts.
    """

    def __init__(self, rest_bytes: int, numbers: tuple[int, ...]) -> None:
        self.ratio = _FIRST_RATIO
        self._gross_ratio = _FIRST_RATIO
        self.growth_bytes_per_s = 0.0
        self.has_steps = False
        self._rest_bytes = rest_bytes
        self._rests: deque[int] = deque(maxlen=2)
        self._workers = {number: WorkerAccount() for number in numbers}
        self._totals: deque[int] = deque(maxlen=_READINGS)
        self._looks: deque[int] = deque(maxlen=_LOOKS)
        self._guess_bytes = rest_bytes + WORKER_BYTES * len(numbers)
        self.least_bytes = self._guess_bytes
        self._leasts: deque[int] = deque(maxlen=_READINGS)
        self._is_least_read = False
        self._trend: deque[tuple[float, int]] = deque(maxlen=2 * _SLOPE_READINGS)

    # -- who there is ---------------------------------------------------------------------

    def add(self, number: int, instead_of: int | None = None) -> None:
        """A new worker; it will grow as the one did that it replaces."""
        before = self._workers.get(instead_of) if instead_of is not None else None
        self._workers[number] = WorkerAccount(before)

    def has(self, number: int) -> bool:
        """Whether a worker is in the book."""
        return number in self._workers

    def held_of(self, number: int) -> int:
        """What a worker has of its own between two fetches, by the latest readings."""
        worker = self._workers.get(number)
        return worker.idle_bytes if worker is not None and worker.is_read else 0

    def remove(self, number: int) -> None:
        """A worker is gone, with all it had."""
        self._workers.pop(number, None)
        self._trend.clear()
        self._totals.clear()
        self._looks.clear()

    # -- what there is ----------------------------------------------------------------------

    @property
    def idle_bytes(self) -> int:
        """What all take when no fetch runs, by readings and by what they say since."""
        least_looked = min(self._looks) if len(self._looks) == _LOOKS else 0
        least_read = min(self._totals, default=0)
        return max(self._sum_up(), least_read, least_looked, self._guess_bytes)

    @property
    def rest_bytes(self) -> int:
        """What is there beside the workers, as it was read last."""
        return self._rests[-1] if self._rests else self._rest_bytes

    def _sum_up(self) -> int:
        return self._rest_bytes + sum(
            worker.idle_bytes + worker.estimate_fresh(self.ratio)
            for worker in self._workers.values()
        )

    @property
    def grown_bytes(self) -> int:
        """What replacing all workers would free."""
        return sum(self.grown_of(number) for number in self._workers)

    @property
    def fresh_bytes(self) -> int:
        """Growth since the last full reading, estimated."""
        return sum(worker.estimate_fresh(self.ratio) for worker in self._workers.values())

    @property
    def suspected_bytes(self) -> int:
        """The most that workers may have grown by since: worth a look, and nothing else."""
        gross = sum(worker.gross_bytes for worker in self._workers.values())
        return max(self.fresh_bytes, int(self._gross_ratio * gross))

    def grown_of(self, number: int) -> int:
        """What replacing one worker would free; nothing for a thread, which is in no book."""
        worker = self._workers.get(number)
        return 0 if worker is None else worker.estimate_grown(self.ratio)

    def step_of(self, number: int) -> int:
        """What one more fetch will make a worker grow by."""
        worker = self._workers.get(number)
        return 0 if worker is None else worker.step_bytes

    def is_estimated(self, number: int) -> bool:
        """Whether a good part of that was neither read nor said."""
        worker = self._workers.get(number)
        if worker is None:
            return False
        return self.ratio * worker.copied_bytes > max(worker.kept_bytes, _TELLING_BYTES)

    def estimate_coming(self, flights: Mapping[int, int]) -> int:
        """What the tickets that workers have will add; `flights` counts them by worker."""
        return sum(
            worker.step_bytes * flights.get(number, 0) for number, worker in self._workers.items()
        )

    @property
    def is_begun(self) -> bool:
        """Whether every worker has made a batch: before, there is little to read."""
        return all(worker.has_reported for worker in self._workers.values())

    @property
    def has_unread(self) -> bool:
        """Whether a worker has made a batch and no reading has seen it."""
        return any(worker.is_unread for worker in self._workers.values())

    def judge_growth(self) -> Growth | None:
        """How workers grow if it has not slowed; of all, the one that grows most."""
        judged = [worker.trail.judge() for worker in self._workers.values()]
        found = [growth for growth in judged if growth is not None]
        return max(found, key=lambda g: (g.kind != "unknown", g.bytes_a_batch), default=None)

    @property
    def unshared_bytes(self) -> int:
        """What workers shared at first, and each has a copy of now."""
        return sum(worker.shared.copied_bytes for worker in self._workers.values())

    # -- what is learned --------------------------------------------------------------------

    def note_report(
        self, number: int, made: tuple[int, int, int] | None, faults: int, excused_bytes: int = 0
    ) -> bool:
        """What a worker said after a fetch. Returns whether the book is another one now.

        Args:
            number: The worker.
            made: The peak of the fetch and the worker's anonymous memory after it, in bytes, and
                its interpreter's blocks; None when it was not metered.
            faults: Its minor page faults since it began, but for those that mapped a block.
            excused_bytes: What it wrote to a block whose pages may have gone meanwhile: then
                nobody can tell the faults that mapped it from others.
        """
        worker = self._workers.get(number)
        if worker is None:
            return False
        worker.trail.note_batch(made)
        if made is None and worker.is_quiet(faults):
            return False
        worker.note_report(made, faults, excused_bytes, self.ratio)
        self.has_steps = any(each.step_bytes >= _STEP_BYTES for each in self._workers.values())
        return True

    def note_reading(
        self,
        t_s: float,
        total_bytes: int,
        private: Mapping[int, int],
        promised: Mapping[int, int],
        *,
        is_warm: bool,
    ) -> None:
        """Take in one full reading.

        Args:
            t_s: When.
            total_bytes: Of all processes.
            private: What each worker that could be read has for itself, by number.
            promised: Promises to fetches that run, by number of their worker.
            is_warm: Whether every worker has made its first batches; until then the first
                guess counts at least.
        """
        found = {number: size for number, size in private.items() if number in self._workers}
        known = [self._workers[number] for number in found if self._workers[number].is_read]
        kept = sum(worker.kept_bytes for worker in known)
        copied = sum(worker.copied_bytes for worker in known)
        gross = sum(worker.gross_bytes for worker in known)
        grown = 0
        for number, size in found.items():
            worker = self._workers[number]
            grown += worker.note_reading(size, promised.get(number, 0), self.ratio)
        self._learn(grown, kept, copied, gross)
        self._rests.append(max(0, total_bytes - sum(found.values())))
        self._rest_bytes = min(self._rests)
        self._totals.append(total_bytes)
        if is_warm:
            self._guess_bytes = 0
            self._note_least(max(0, total_bytes - self.grown_bytes - sum(promised.values())))
        self._note_trend(t_s)

    def _note_least(self, size_bytes: int) -> None:
        """One reading may fall into the middle of a fetch: some are needed to know better."""
        self._leasts.append(size_bytes)
        if len(self._leasts) == _READINGS:
            least = min(self._leasts)
            self.least_bytes = least if not self._is_least_read else min(self.least_bytes, least)
            self._is_least_read = True

    def note_sum(self, total_bytes: int, promised_bytes: int) -> None:
        """What all take at this moment, and what was promised to fetches that run."""
        self._looks.append(max(0, total_bytes - promised_bytes))

    def note_growth(self, grown_bytes: int) -> None:
        """What all have grown by since the last full reading, known from elsewhere."""
        workers = self._workers.values()
        kept = sum(worker.kept_bytes for worker in workers)
        copied = sum(worker.copied_bytes for worker in workers)
        self._learn(grown_bytes, kept, copied, sum(worker.gross_bytes for worker in workers))

    def _learn(self, grown: int, kept: int, copied: int, gross: int) -> None:
        if gross >= _TELLING_BYTES:
            self._gross_ratio = max(self._gross_ratio / 2, min(1.0, grown / gross))
        if copied < _TELLING_BYTES:
            return
        ratio = (grown - kept) / copied
        decay = 0.5 if ratio < _CHURN_RATIO else 0.9
        before, self.ratio = self.ratio, min(_MOST_RATIO, max(decay * self.ratio, ratio))
        if before and self.ratio < before:
            for worker in self._workers.values():
                worker.scale_steps(self.ratio / before)

    def _note_trend(self, t_s: float) -> None:
        self._trend.append((t_s, self.idle_bytes))
        self.growth_bytes_per_s = 0.0
        if len(self._trend) < 2 * _SLOPE_READINGS:
            return
        readings = list(self._trend)
        old, new = readings[:_SLOPE_READINGS], readings[_SLOPE_READINGS:]
        grown = min(size for _, size in new) - min(size for _, size in old)
        span_s = new[-1][0] - old[-1][0]
        if grown > _TELLING_BYTES and span_s > 0:
            self.growth_bytes_per_s = grown / span_s
