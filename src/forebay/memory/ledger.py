"""The book of promises: who was granted how much, and what is left.

Covers: accounts (what is measured) and grants (what was promised), and saying no. Does not
cover: reading anything (probe.py), who else has a part of the budget (seats.py), or what to
do about a no (flow/scheduler.py). Pure.

    accounted = workers + arena + heap + promised        free = budget - accounted
    measured  = accounted + unaccounted                  (by construction: see `reconcile`)

A worker is promised the memory that making a batch takes *beside* the block its result
goes to, before it starts to fetch, and keeps the promise until it has nothing to do. The
block itself is in the arena's account from the moment it is placed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

from forebay.memory.seats import Seat, Table


@dataclass(frozen=True, slots=True)
class Grant:
    """A promise of `making_bytes` to the worker `holder`."""

    holder: int
    making_bytes: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """No grant now: `short_bytes` are missing."""

    holder: int
    short_bytes: int


Answer: TypeAlias = Grant | Refusal


@dataclass(frozen=True, slots=True)
class Balance:
    """A reading against the book.

    Attributes:
        accounted_bytes: Booked: measured before, or promised.
        unaccounted_bytes: What was read beyond that; negative while promises are not used up.
    """

    accounted_bytes: int
    unaccounted_bytes: int

    @property
    def measured_bytes(self) -> int:
        """What was read."""
        return self.accounted_bytes + self.unaccounted_bytes


@final
class Ledger:
    """One loader's book.

    Args:
        seat: Its place at a budget; or the size of a budget of its own, in bytes.

    Attributes:
        seat: See above. Its allowance may fall below what is accounted: nothing is revoked,
            nothing new is granted.
        workers_bytes: Account of the zygote and the workers, idle.
        workers_least_bytes: The least that they were ever seen to take.
        arena_bytes: Account of the arena's touched pages.
        heap_bytes: Account of batches that the loader holds on main's heap.

    Invariant: `promised_bytes == sum(grant.making_bytes for grant in open grants)`.
    """

    def __init__(self, seat: Seat | int) -> None:
        self.seat = seat if isinstance(seat, Seat) else Table(seat).sit()
        self.workers_bytes = 0
        self.workers_least_bytes = 0
        self.arena_bytes = 0
        self.heap_bytes = 0
        self.promised_bytes = 0
        self._grants: dict[int, Grant] = {}

    @property
    def budget_bytes(self) -> int:
        """What may be held or promised now."""
        return self.seat.allowance_bytes

    @property
    def accounted_bytes(self) -> int:
        """All that is measured or promised."""
        return self.workers_bytes + self.arena_bytes + self.heap_bytes + self.promised_bytes

    @property
    def free_bytes(self) -> int:
        """What may still be promised; negative when the budget was lowered or outgrown."""
        return self.budget_bytes - self.accounted_bytes

    @property
    def promised_by_holder(self) -> dict[int, int]:
        """The promises that are still kept, by worker."""
        return {holder: grant.making_bytes for holder, grant in self._grants.items()}

    @property
    def open_grants(self) -> tuple[Grant, ...]:
        """The promises that are still kept."""
        return tuple(self._grants.values())

    def grant(self, holder: int, making_bytes: int, growth_bytes: int) -> Answer:
        """Promise `making_bytes` if they and the arena's growth fit below the budget.

        Args:
            holder: The worker, which has no grant yet.
            making_bytes: Memory of the fetch beside its result.
            growth_bytes: Pages that placing its block will newly touch.
        """
        self._check_vacant(holder)
        short = self.seat.try_hold(self.accounted_bytes, making_bytes + growth_bytes)
        if short > 0:
            return Refusal(holder, short)
        return self._open(holder, making_bytes)

    def force(self, holder: int, making_bytes: int) -> Grant:
        """Promise without asking: for the batch that must come next, when nothing else runs."""
        self._check_vacant(holder)
        grant = self._open(holder, making_bytes)
        self.sync()
        return grant

    def _open(self, holder: int, making_bytes: int) -> Grant:
        grant = Grant(holder, making_bytes)
        self._grants[holder] = grant
        self.promised_bytes += making_bytes
        return grant

    def _check_vacant(self, holder: int) -> None:
        if holder in self._grants:
            message = f"worker {holder} has a grant already"
            raise ValueError(message)

    def settle(self, holder: int) -> None:
        """The worker is idle; what it left behind is in the accounts."""
        grant = self._grants.pop(holder, None)
        if grant is not None:
            self.promised_bytes -= grant.making_bytes
            self.sync()

    def try_grow(self, growth_bytes: int) -> bool:
        """Whether the arena may newly touch `growth_bytes`; then they count at once."""
        return self.seat.try_hold(self.accounted_bytes, growth_bytes) <= 0

    def sync(self) -> None:
        """Let those who share the budget know what is held now."""
        self.seat.note(self.accounted_bytes)

    def reconcile(self, workers_bytes: int, resident_bytes: int) -> Balance:
        """A reading of the workers and of the arena's pages, beside what is in the book."""
        measured = workers_bytes + resident_bytes + self.heap_bytes
        self.seat.measured_bytes = measured
        return Balance(self.accounted_bytes, measured - self.accounted_bytes)

    def amend(self, holder: int, making_bytes: int) -> None:
        """Correct a promise to what the fetch turned out to take."""
        if holder in self._grants:
            self.settle(holder)
            self.force(holder, making_bytes)
