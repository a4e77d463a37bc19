"""position -> decision: what live memory asks of the loader.

Covers: how large a budget is now, the stance with its enter and leave marks, and the next
act. Does not cover: reading (probe.py), acting (flow/controller.py), or how wide the window
should be for the consumer's sake (window.py). Pure: facts in, instructions out.

Promises keep a loader below its budget as long as all that grows was promised. This module
is about the rest: Python objects that workers copy by touching them, heaps that do not
shrink, limits that fall because somebody else takes memory, other loaders that wait for
their part. What nobody promised is met in the order of what it costs:

    give free pages back -> trim heaps -> put ready batches on disk (only above the budget)
    -> replace a grown worker -> take a token -> let streams share a process

One step a reading, so that each has shown its effect before the next is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

from forebay.events import Stance
from forebay.units import MIB, format_bytes

SHRINK_FRAC = 0.90
"""Of the budget, from where growth that nobody promised is met (docs/design.md)."""

PAUSE_FRAC = 0.95
"""Above it only the batch that is delivered next is made. Promises end here."""

HOLD_FRAC = 0.80
"""From here on memory may grow for what is promised, and the window does not widen unless
one batch more stays below `SHRINK_FRAC`."""

UNFORESEEN_FRAC = 0.01
"""Part of the budget from which a reading beyond the book is more than the book's rounding."""

LEAVE_FRAC = 0.05
"""A stance is left so far below the mark where it is entered: noise within changes nothing."""

AUTO_FRAC = 0.80
"""Part of what would be free without the loader that "auto" takes: the rest is for what
the training code, and everybody else, allocates before the next reading."""

SAFE_FRAC = 0.95
"""The same for a budget that was given: it is the user's word, but no leave to be killed."""

RISE_FRAC = 1 / 16
"""A budget follows headroom down at once, and up only by so much at a time: each step up
costs nothing to wait for, each step down does."""

PRESSURE_FRAC = 0.20
"""PSI `some avg10` from which memory is short although no limit says so: a fifth of the time
something waited for memory. systemd-oomd acts from 0.6 (its manual), long after it hurts."""

GROWN_LEAST_BYTES = 8 * MIB
"""Growth of a worker that is worth a new one, at least: while one takes the other's place
both are there, and a new one has 6 MiB of its own (planner.PARKED_BYTES)."""

_STEP_S = 0.5
"""Between two acts whose effect shows only with the next batches."""

CPU_WAIT_FRAC = 0.4
"""Of their time at work that workers wait for a processor, from where one fetch less at once
is as fast: each of four workers on two processors waits for half of it."""

CPU_CALM_FRAC = 0.1
"""Below it another fetch finds a processor free, or it waits for something else anyway."""

_KNEE_S = 30.0
"""After a token was taken for want of a processor, until one more is tried again."""

_CALM_S = 2.0
"""Calm before something that was taken is given back."""

PROMISED_FRAC = 0.95
"""The `pause` mark. What lies above it is for what no grant foresees: pages that are copied
between two readings, a decoder's odd peak, the kernel's own rounding."""

_MOST_UNPROMISED_BYTES = 256 * MIB
"""Such things do not grow with the budget for ever."""


def decide_promised(whole_bytes: int) -> int:
    """The part of a budget that is promised; the rest is for what nobody can promise."""
    return max(int(whole_bytes * PROMISED_FRAC), whole_bytes - _MOST_UNPROMISED_BYTES)


def decide_size(
    asked_bytes: int | None, reach_bytes: int | None, now_bytes: int | None = None
) -> int:
    """How large a budget is, given what would be free if its loaders held nothing.

    Args:
        asked_bytes: The fixed size or share; None for "auto".
        reach_bytes: Headroom and the loaders' own footprint together; None when it could
            not be read.
        now_bytes: What it is now; None at the start.
    """
    if reach_bytes is None:
        return now_bytes if now_bytes is not None else asked_bytes or 0
    if asked_bytes is None:
        target = int(reach_bytes * AUTO_FRAC)
    else:
        target = min(asked_bytes, int(reach_bytes * SAFE_FRAC))
    if now_bytes is None or target <= now_bytes:
        return target
    if asked_bytes is not None and target >= asked_bytes:
        return asked_bytes
    return target if target >= now_bytes * (1 + RISE_FRAC) else now_bytes


# -- acts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Return free pages of the arena to the kernel."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Have workers give back what their allocators keep."""


@dataclass(frozen=True, slots=True)
class Evict:
    """Put ready batches on disk, the one that is needed last first."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Narrow:
    """One batch less ahead."""


@dataclass(frozen=True, slots=True)
class Recycle:
    """Replace one worker by a fresh one, at a batch boundary."""

    worker: int


@dataclass(frozen=True, slots=True)
class TakeToken:
    """One fetch less at once."""


@dataclass(frozen=True, slots=True)
class AddToken:
    """One fetch more at once."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Let the streams of one worker move in with another's."""


@dataclass(frozen=True, slots=True)
class Split:
    """Give streams that share a process one of their own again."""


Act: TypeAlias = GiveBack | Trim | Evict | Narrow | Recycle | TakeToken | AddToken | Merge | Split


# -- facts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerFact:
    """What is known of one worker.

    Attributes:
        number: Which.
        grown_bytes: Private memory beyond what it had once it was warm.
        may_move: Whether its streams can go on in another process.
    """

    number: int
    grown_bytes: int
    may_move: bool


@dataclass(frozen=True, slots=True)
class Position:
    """Where a loader stands; bytes unless the name says otherwise.

    Attributes:
        t_s: When, on a clock that never goes back.
        budget_bytes: All that may exist because of it now.
        promised_bytes: The part of it that may be promised.
        accounted_bytes, unaccounted_bytes: As `ledger.Balance`.
        growth_bytes_per_s: How fast workers grow beyond promises; 0 when they do not.
        horizon_s: Until the next reading, about.
        batch_bytes: A usual batch with what making it takes.
        free_pages_bytes: Pages of the arena that no block holds.
        ready_bytes: Batches that wait to be delivered, less the next one.
        asked_bytes: What other loaders of the budget wait for.
        pressure_frac: PSI of the limit that binds; 0 when unknown.
        cpu_wait_frac: Part of their time at work that workers waited for a processor; 0 when
            unknown.
        cpus: Processors that may be used.
        is_waiting: Whether the consumer waits.
        is_short: Whether memory holds the next fetch back.
        is_idle: Whether the consumer has been away for long.
        tokens, least_tokens, most_tokens: Fetches at once: now, and the bounds.
        width: Of the window.
        workers: One fact each.
        worth_bytes: Growth of a worker that is worth a new one.
        can_merge, can_split: Whether streams may share, and whether some do that need not.
        cause: Words for why the budget is what it is; empty for a fixed one.
    """

    t_s: float
    budget_bytes: int
    promised_bytes: int
    accounted_bytes: int
    unaccounted_bytes: int
    growth_bytes_per_s: float = 0.0
    horizon_s: float = 0.0
    batch_bytes: int = 0
    free_pages_bytes: int = 0
    ready_bytes: int = 0
    asked_bytes: int = 0
    pressure_frac: float = 0.0
    cpu_wait_frac: float = 0.0
    cpus: int = 1
    is_waiting: bool = False
    is_short: bool = False
    is_idle: bool = False
    tokens: int = 1
    least_tokens: int = 1
    most_tokens: int = 1
    width: int = 1
    workers: tuple[WorkerFact, ...] = ()
    worth_bytes: int = GROWN_LEAST_BYTES
    can_merge: bool = False
    can_split: bool = False
    cause: str = ""

    @property
    def measured_bytes(self) -> int:
        """What was read."""
        return self.accounted_bytes + self.unaccounted_bytes

    @property
    def expected_bytes(self) -> int:
        """What will have been there before the next reading can change anything."""
        return self.measured_bytes + int(max(0.0, self.growth_bytes_per_s) * self.horizon_s)

    @property
    def over_bytes(self) -> int:
        """What is held beyond what may be promised; above 0 only when the limit fell."""
        return self.measured_bytes - self.promised_bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why in words."""

    stance: Stance
    acts: tuple[Act, ...]
    because: str


# -- the decision ---------------------------------------------------------------------------


@final
class Policy:
    """Decides reading by reading; remembers its stance and when it last acted."""

    def __init__(self) -> None:
        self.stance: Stance = "grow"
        self._acted_s = float("-inf")
        self._calm_since_s: float | None = None
        self._has_trimmed = False
        self._knee_s = float("-inf")

    def decide(self, now: Position) -> Decision:
        """The stance and the next act for this position."""
        before = self.stance
        self.stance, because = self._choose_stance(now)
        if self.stance in {"shrink", "pause"}:
            self._calm_since_s = None
            acts = self._shrink(now)
        else:
            self._has_trimmed = False
            if before in {"shrink", "pause"} or self._calm_since_s is None:
                self._calm_since_s = now.t_s
            acts = self._relax(now)
        return Decision(self.stance, acts, because)

    def _choose_stance(self, now: Position) -> tuple[Stance, str]:
        used = now.expected_bytes / max(1, now.budget_bytes)
        slack = LEAVE_FRAC if self.stance in {"shrink", "pause"} else 0.0
        holds = f"{format_bytes(now.measured_bytes)} of {format_bytes(now.budget_bytes)}"
        if used >= PAUSE_FRAC - (LEAVE_FRAC / 2 if self.stance == "pause" else 0.0):
            return "pause", f"{holds} exist, and more was not promised{_say_growth(now)}"
        if now.over_bytes > 0 and not now.is_waiting:
            return "shrink", f"{holds} exist: the limit fell{_say_cause(now)}"
        if now.asked_bytes:
            wanted = format_bytes(now.asked_bytes)
            return "shrink", f"other loaders of this budget are at work: {wanted} are theirs"
        if now.pressure_frac >= PRESSURE_FRAC * (0.5 if slack else 1):
            return "shrink", f"memory was waited for {now.pressure_frac:.0%} of the last 10 s"
        is_unforeseen = (
            now.growth_bytes_per_s > 0 or now.unaccounted_bytes > UNFORESEEN_FRAC * now.budget_bytes
        )
        if used >= SHRINK_FRAC - slack and is_unforeseen:
            return "shrink", f"{holds} exist{_say_growth(now)}"
        more = (now.expected_bytes + now.batch_bytes) / max(1, now.budget_bytes)
        mark = HOLD_FRAC if is_unforeseen else SHRINK_FRAC
        if max(used, more if used >= HOLD_FRAC else 0.0) >= mark:
            return "hold", f"{holds} exist: one batch more is not worth the risk"
        return "grow", f"{holds} exist"

    def _shrink(self, now: Position) -> tuple[Act, ...]:
        acts: list[Act] = []
        # Warm pages are worth keeping: as many go as bring it back to where calm begins.
        surplus = now.expected_bytes - int((SHRINK_FRAC - LEAVE_FRAC) * now.budget_bytes)
        given = min(now.free_pages_bytes, max(surplus, now.over_bytes, now.asked_bytes))
        if given > 0:
            acts.append(GiveBack(given))
        if not self._has_trimmed:
            self._has_trimmed = True
            acts.append(Trim())
        over = max(now.over_bytes - now.free_pages_bytes, min(now.asked_bytes, now.ready_bytes))
        if over > 0 and now.ready_bytes:
            acts.append(Evict(over))
        if now.t_s - self._acted_s >= _STEP_S:
            step = self._choose_step(now)
            if step is not None:
                self._acted_s = now.t_s
                acts.append(step)
        return tuple(acts)

    def _choose_step(self, now: Position) -> Act | None:
        grown = find_grown(now.workers, now.worth_bytes)
        if grown is not None:
            return Recycle(grown.number)
        if now.asked_bytes and not now.is_idle:
            return None  # it is at work itself: what it holds ready goes, its workers stay
        is_pressing = self.stance == "pause" or now.over_bytes > 0 or now.asked_bytes
        if not is_pressing and now.pressure_frac < PRESSURE_FRAC:
            return None  # near the mark, as a budget that is used well is
        if now.tokens > now.least_tokens:
            return TakeToken()
        if now.can_merge:
            return Merge()
        return Narrow() if now.width > 1 else None

    def _relax(self, now: Position) -> tuple[Act, ...]:
        """Nothing presses: replace who has outgrown its share, give back what was taken."""
        if now.t_s - self._acted_s < _STEP_S:
            return ()
        step = self._choose_relief(now)
        if step is None:
            return ()
        self._acted_s = now.t_s
        return (step,)

    def _choose_relief(self, now: Position) -> Act | None:
        share = now.promised_bytes // (2 * max(1, len(now.workers)))
        # Where grown workers are what keeps the next fetch from its memory, a batch is enough.
        if now.is_short:
            share = min(share, now.batch_bytes)
        grown = find_grown(now.workers, max(share, now.worth_bytes))
        if grown is not None:
            return Recycle(grown.number)
        if now.cpu_wait_frac >= CPU_WAIT_FRAC and now.tokens > max(now.least_tokens, now.cpus):
            self._knee_s = now.t_s
            return TakeToken()
        is_calm = self._calm_since_s is not None and now.t_s - self._calm_since_s >= _CALM_S
        if self.stance != "grow" or not is_calm or not now.is_waiting:
            return None
        is_below_knee = now.t_s - self._knee_s >= _KNEE_S and now.cpu_wait_frac < CPU_CALM_FRAC
        if now.tokens < now.most_tokens and is_below_knee and not now.is_short:
            return AddToken()
        return Split() if now.can_split else None


def find_grown(workers: Iterable[WorkerFact], least_bytes: int) -> WorkerFact | None:
    """The worker that has grown most, if it may move and that is worth it."""
    movable = [worker for worker in workers if worker.may_move]
    grown = max(movable, key=lambda worker: worker.grown_bytes, default=None)
    return grown if grown is not None and grown.grown_bytes >= least_bytes else None


def _say_growth(now: Position) -> str:
    if now.growth_bytes_per_s <= 0:
        return ""
    return f", and workers grow by {format_bytes(int(now.growth_bytes_per_s))} a second"


def _say_cause(now: Position) -> str:
    return f" ({now.cause})" if now.cause else ""
