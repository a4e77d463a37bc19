"""Who of several loaders may have how much of one budget.

Covers: the arithmetic of a shared budget: seats, what each holds, what each is left. Does
not cover: how large the budget is (budget.py), or what a loader does about it. Pure.

    what a seat may hold = size - what the others hold (or have reserved, if that is more)

So the sum over all seats stays below the size by construction, and each can always come by
what it has reserved: one worker and the batch that its consumer gets next. What is lent
beyond that comes back when somebody who waits asks for it.
"""

from __future__ import annotations

import contextlib
from typing import Any, final

_SLACK_FRAC = 0.4
"""Of what is kept for the unforeseen, once more for each further loader: each has readings
that are off, and heaps that come and go, of its own (measured: two loaders overshot by 1 %
where one never did)."""

_SLACK_SEATS = 4
"""They do not all err at once."""


@final
class Table:
    """One budget's seats.

    Attributes:
        promised_bytes: What may be promised over all seats. May be lowered below what is
            held: nothing is revoked, nobody enters.
        whole_bytes: All that may exist; the part above `promised_bytes` is for what nobody
            can promise.
        asked_bytes: What the user asked for, when the machine leaves less for the moment.

    Args:
        promised_bytes: See above.
        whole_bytes: See above; the same when not given.
        lock: Held for arithmetic only, when seats belong to different threads.
    """

    def __init__(
        self, promised_bytes: int, whole_bytes: int | None = None, lock: Any = None
    ) -> None:
        self.promised_bytes = promised_bytes
        self.whole_bytes = promised_bytes if whole_bytes is None else whole_bytes
        self.asked_bytes = self.whole_bytes
        self._lock = contextlib.nullcontext() if lock is None else lock
        self._seats: tuple[Seat, ...] = ()  # replaced whole, so that it is read without the lock

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Those that are taken."""
        return self._seats

    @property
    def reserved_bytes(self) -> int:
        """The sum of what the seats can always come by."""
        return sum(seat.reserved_bytes for seat in self._seats)

    @property
    def measured_bytes(self) -> int:
        """What all seats together were last seen to hold."""
        return sum(seat.measured_bytes for seat in self._seats)

    def resize(self, promised_bytes: int, whole_bytes: int, asked_bytes: int = 0) -> None:
        """Another size, from now on."""
        with self._lock:
            self.promised_bytes, self.whole_bytes = promised_bytes, whole_bytes
            self.asked_bytes = max(asked_bytes, whole_bytes)

    def sit(self, reserved_bytes: int = 0) -> Seat:
        """A seat that can always come by `reserved_bytes`."""
        seat = Seat(self, reserved_bytes)
        with self._lock:
            self._seats = (*self._seats, seat)
        return seat


@final
class Seat:
    """One loader's place at a table.

    Attributes:
        reserved_bytes: What it can always come by.
        held_bytes: What it holds or has promised.
        measured_bytes: What it was last seen to hold, by a reading.
        wanted_bytes: What it lacks while its consumer waits; 0 when it lacks nothing.
        is_idle: Whether its consumer has been away for long.
    """

    __slots__ = (
        "_table",
        "held_bytes",
        "is_idle",
        "measured_bytes",
        "reserved_bytes",
        "wanted_bytes",
    )

    def __init__(self, table: Table, reserved_bytes: int) -> None:
        self._table = table
        self.reserved_bytes = reserved_bytes
        self.held_bytes = 0
        self.measured_bytes = 0
        self.wanted_bytes = 0
        self.is_idle = False

    @property
    def must_give_way(self) -> bool:
        """Whether it is idle while others are at work."""
        return self.is_idle and any(not seat.is_idle for seat in self._table.seats)

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has a seat."""
        return len(self._table.seats) <= 1

    @property
    def allowance_bytes(self) -> int:
        """The most that it may hold or promise now."""
        slack = min(len(self._table.seats) - 1, _SLACK_SEATS) * _SLACK_FRAC * self.unpromised_bytes
        return self._table.promised_bytes - self._count_others() - int(slack)

    @property
    def whole_bytes(self) -> int:
        """The most that may exist because of it now."""
        return self._table.whole_bytes - self._count_others()

    @property
    def others_bytes(self) -> int:
        """What the other loaders of the budget hold, or are to have in any case."""
        return self._count_others()

    @property
    def withheld_bytes(self) -> int:
        """What the machine does not leave of it for the moment."""
        return self._table.asked_bytes - self._table.whole_bytes

    @property
    def unpromised_bytes(self) -> int:
        """The part of the budget that is kept for what nobody can promise."""
        return self._table.whole_bytes - self._table.promised_bytes

    @property
    def fair_bytes(self) -> int:
        """What each would have if all had as much."""
        return self._table.promised_bytes // max(1, len(self._table.seats))

    @property
    def asked_bytes(self) -> int:
        """What others lack, while their consumers wait."""
        return sum(seat.wanted_bytes for seat in self._table.seats if seat is not self)

    @property
    def lent_bytes(self) -> int:
        """What the others hold beyond what they have reserved: it comes back when asked for."""
        return sum(
            max(0, seat.held_bytes - seat.reserved_bytes)
            for seat in self._table.seats
            if seat is not self
        )

    def try_hold(self, held_bytes: int, more_bytes: int) -> int:
        """Hold `held_bytes + more_bytes` if that is allowed.

        Returns:
            How many bytes are missing; 0 or less when they are held now.
        """
        with self._table._lock:  # noqa: SLF001 - one module, two halves of one thing
            short = held_bytes + more_bytes - self.allowance_bytes
            if short <= 0:
                self.held_bytes = held_bytes + more_bytes
            return short

    def note(self, held_bytes: int) -> None:
        """It holds or has promised so much, allowed or not."""
        with self._table._lock:  # noqa: SLF001
            self.held_bytes = held_bytes

    def leave(self) -> None:
        """Its loader has ended; its bytes are the others'."""
        with self._table._lock:  # noqa: SLF001
            self._table._seats = tuple(  # noqa: SLF001
                seat for seat in self._table.seats if seat is not self
            )

    def _count_others(self) -> int:
        seats = self._table.seats
        if len(seats) <= 1:
            return 0
        return sum(max(s.held_bytes, s.reserved_bytes) for s in seats if s is not self)
