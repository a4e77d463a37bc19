"""Counts that many processes raise.

Covers: raising them, and their sums. Does not cover: what is counted.

The one idea: nothing that Python has adds to a shared number in one step, so each process has
a seat of its own to count in. A seat whose process has ended is taken over with its counts, so
that the sums stay what they were, and fresh workers each epoch need no more seats.
"""

from __future__ import annotations

import os
import threading
from typing import final

import numpy as np

from forebay.datasets.locks import FileLocks

SEATS = 256
"""Processes that count at one time. Any beyond share the last seat, and may lose counts."""

_SEAT_WORDS = 8
"""A line of the processor's cache: no two processes write to one."""

TALLY_WORDS = SEATS * _SEAT_WORDS


@final
class Tallies:
    """Up to eight sums.

    Args:
        words: `TALLY_WORDS` shared numbers of 64 bits, zeros at first.
        locks: The numbers from 0 to `SEATS` - 1 are held by those who add.
    """

    def __init__(self, words: memoryview[int], locks: FileLocks) -> None:
        self._words = words
        self._locks = locks
        self._seats: dict[int, _Seat] = {}

    def add(self, column: int) -> None:
        """Raise the sum of `column` by one."""
        seat = self._seats.get(os.getpid()) or self._take_seat()
        with seat.guard:
            self._words[seat.start + column] += 1

    def read(self, column: int) -> int:
        """The sum over all processes, also those that have ended."""
        return int(np.asarray(self._words)[column::_SEAT_WORDS].sum())

    def _take_seat(self) -> _Seat:
        free = (number for number in range(SEATS - 1) if self._locks.try_hold(number))
        seat = _Seat(next(free, SEATS - 1) * _SEAT_WORDS)
        return self._seats.setdefault(os.getpid(), seat)


@final
class _Seat:
    """Where this process counts; `guard` is for its words, among the threads."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.guard = threading.Lock()
