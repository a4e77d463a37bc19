"""A budget: how large it is now, and who has a part of it.

Covers: `forebay.Budget`, which several loaders may share; following the limits of the
machine. Does not cover: the arithmetic of seats (seats.py) and of sizes (policy.py).

Every loader has one: its own, made from `memory_budget`, or one that it shares. The size is
read when somebody asks for the first time, and again every now and then by whoever's clock
comes by: "auto" and shares follow the limit, and a fixed size yields when the machine no
longer has that much.
"""

from __future__ import annotations

import os
import threading
from typing import Any, final

from forebay.errors import InvalidBudget
from forebay.memory import policy
from forebay.memory.limits import HOST, Headroom, headroom, memory_limit
from forebay.memory.seats import Seat, Table
from forebay.options import (
    AutoBudget,
    BudgetSpec,
    FixedBudget,
    ShareBudget,
    SharedBudget,
    parse_budget,
)
from forebay.units import format_bytes


@final
class Budget(SharedBudget):
    """One budget for several loaders.

        budget = forebay.Budget("6GiB")
        train = forebay.DataLoader(..., memory_budget=budget)
        val = forebay.DataLoader(..., memory_budget=budget)

    What all of them hold stays below it at every moment. Each has reserved what one worker
    and one batch take; the rest is lent to those whose consumer waits, and an idle loader
    gives it back.

    Args:
        size: As `memory_budget`: bytes, "6GiB", "50%", or "auto".

    Raises:
        InvalidBudget: `size` is text or a number that names no budget, or "off".
        InvalidBudgetType: `size` is of another type.

    Threads of one process may use loaders of one budget at the same time. Pickled, it
    carries its size and not its book; in a forked child it begins a fresh one.
    """

    def __init__(self, size: int | str | FixedBudget | ShareBudget | AutoBudget) -> None:
        is_parsed = isinstance(size, FixedBudget | ShareBudget | AutoBudget)
        spec = size if is_parsed else parse_budget(size)
        if not isinstance(spec, FixedBudget | ShareBudget | AutoBudget):
            raise InvalidBudget.about(size, "a Budget needs a size of its own")
        self._raw = size
        self.spec = spec
        self._begin_book()

    @classmethod
    def of(cls, spec: BudgetSpec) -> Budget:
        """The budget that an option means: a shared one itself, else one of its own."""
        if isinstance(spec, FixedBudget | ShareBudget | AutoBudget):
            return cls(spec)
        assert isinstance(spec, Budget), "torch's own engine has no budget"
        return spec

    def _begin_book(self) -> None:
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._table = Table(0, 0, self._lock)
        self._source = ""
        self._is_read = False
        self._is_bound_by_host = False

    def __repr__(self) -> str:
        return f"Budget({self._raw!r})"

    def __str__(self) -> str:
        return str(self.spec)

    def __reduce__(self) -> tuple[type[Budget], tuple[Any]]:
        return Budget, (self._raw,)

    @property
    def size_bytes(self) -> int:
        """How large it is now, in bytes."""
        self._ensure_read()
        return self._table.whole_bytes

    @property
    def held_bytes(self) -> int:
        """What its loaders hold or have promised, all together."""
        return sum(seat.held_bytes for seat in self._own_table().seats)

    @property
    def is_fixed(self) -> bool:
        """Whether it was given in bytes; else it follows a limit."""
        return isinstance(self.spec, FixedBudget)

    @property
    def is_bound_by_host(self) -> bool:
        """Whether the machine's own memory is the limit that leaves the least."""
        return self._is_bound_by_host

    @property
    def source(self) -> str:
        """Which limit its size was taken from; empty for a fixed size that the machine has."""
        return self._source

    def sit(self, reserved_bytes: int) -> Seat:
        """A seat for one more loader, which can always come by `reserved_bytes`."""
        self._ensure_read()
        return self._table.sit(reserved_bytes)

    def follow(self, room: Headroom | None) -> None:
        """Take in what is free now; for the clock of any loader that has a seat.

        Args:
            room: As just read; None when nothing could be read.
        """
        table = self._own_table()
        reach = None if room is None else min(room.limit, room.bytes + table.measured_bytes)
        now = table.whole_bytes if self._is_read else None
        size = policy.decide_size(self._read_asked(), reach, now)
        self._is_read = True
        if size != now:
            table.resize(policy.decide_promised(size), size, self._read_asked() or 0)
        self._source = self._say_source(room, size)
        self._is_bound_by_host = room is not None and room.source == HOST

    def _ensure_read(self) -> None:
        self._own_table()
        if not self._is_read:
            self.follow(headroom())

    def _own_table(self) -> Table:
        if os.getpid() != self._owner_pid:  # a child that was forked: the book is the parent's
            self._begin_book()
        return self._table

    def _read_asked(self) -> int | None:
        if isinstance(self.spec, FixedBudget):
            return self.spec.size_bytes
        if isinstance(self.spec, ShareBudget):
            return int(memory_limit().bytes * self.spec.share.frac)
        return None

    def _say_source(self, room: Headroom | None, size_bytes: int) -> str:
        if room is None:
            return ""
        if isinstance(self.spec, AutoBudget):
            return f"auto: {policy.AUTO_FRAC:.0%} of what is free beside the loader, {room.source}"
        if isinstance(self.spec, ShareBudget):
            return f"{self.spec}, {room.source}"
        if size_bytes < self.spec.size_bytes:
            return f"of {format_bytes(self.spec.size_bytes)} asked for: {room.source} has no more"
        return ""
