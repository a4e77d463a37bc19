"""Growth of workers: whether it goes on, and what it is made of.

Covers: judging what workers say of their memory after batches. Does not cover: what growth costs
the budget (crew_account.py), or replacing who has grown (policy.py). Pure.

Three things look alike from outside and want three remedies:

- pages that were shared at the fork are copied when an object on them is touched, since that
  writes its reference count: what a worker maps stays, more of it is its own. It ends;
- Python objects pile up (a list, a cache without a bound): the interpreter's own count of
  memory blocks rises with every batch;
- memory below Python grows (a decoder, a library's cache): that count stands still.

Growth that slows is a cache that fills or a heap that finds its size. So it is called steady only
if the last quarter of what was seen brought nearly as much as those before it.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from forebay.units import MIB

Kind: TypeAlias = Literal["native", "python", "unknown"]

WARM_BATCHES = 3
"""First batches of a worker that do not count: it allocates what it always needs."""

_LEAST_BATCHES = 24
"""Fewer say nothing: four quarters of six."""

_LEAST_BYTES = MIB
"""Less may be the heap's own coming and going."""

_MOST_MARKS = 32
"""Then every second is dropped: the trail covers all batches with 16 to 32 marks."""

_STEADY_FRAC = 0.7
"""Of the earlier quarters' growth, what the last must have brought. A line gives 1; growth that
settles with a time constant as long as what was seen gives 0.68."""

_BLOCKS_A_BATCH = 0.5
"""From here on Python's blocks grow: whatever is kept of every batch is one block at least."""

_EARLY_BLOCKS_A_BATCH = 1.5
_SETTLED_BATCHES = 200
"""Until then the interpreter's own free lists and caches fill, by up to one block a batch."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth that has not slowed.

    Attributes:
        kind: What it is made of: Python's objects, memory below Python, or unknown where the
            interpreter does not count its blocks, or has too much garbage for that to tell.
        bytes_a_batch: How much, of one worker.
        batches: Over how many of its batches that was seen.
    """

    kind: Kind
    bytes_a_batch: int
    batches: int


@dataclass(frozen=True, slots=True)
class _Mark:
    batches: int
    value: int


@final
class _Series:
    """A figure over batches: 16 to 32 marks, about evenly spread however many batches there are."""

    def __init__(self) -> None:
        self.marks: list[_Mark] = []
        self._spacing = 1
        self._lift: int | None = None

    def go_on(self) -> None:
        """What comes now is another worker's, and begins where the last one's ended."""
        self._lift = None

    def note(self, batches: int, value: int) -> None:
        """The figure after so many batches."""
        if self._lift is None:
            self._lift = self.marks[-1].value - value if self.marks else 0
        if self.marks and batches < self.marks[-1].batches + self._spacing:
            return
        self.marks.append(_Mark(batches, value + self._lift))
        if len(self.marks) > _MOST_MARKS:
            self.marks = self.marks[::2]
            self._spacing *= 2


@final
class GrowthTrail:
    """What one worker, and those that took its place one after the other, had after batches."""

    def __init__(self) -> None:
        self._private = _Series()
        self._blocks = _Series()
        self._batches = 0
        self._own_batches = 0

    def go_on(self) -> None:
        """A fresh worker is in its place: a dataset that leaks goes on leaking."""
        self._own_batches = 0
        self._private.go_on()
        self._blocks.go_on()

    def note_batch(self, made: tuple[int, int, int] | None) -> None:
        """It made a batch.

        Args:
            made: Peak and anonymous memory of the worker in bytes, and its blocks, -1 where they
                were not counted; None when the batch was not metered.
        """
        self._own_batches += 1
        if self._own_batches <= WARM_BATCHES:
            return
        self._batches += 1
        if made is not None:
            _, private_bytes, blocks = made
            self._private.note(self._batches, private_bytes)
            if blocks >= 0:
                self._blocks.note(self._batches, blocks)

    def judge(self) -> Growth | None:
        """What it is if it has not slowed; None when there is nothing to say."""
        # The least of each quarter: what a fetch leaves on the heap for a while is not in all.
        lows = [min(quarter, key=_value_of) for quarter in _quarter(self._private.marks)]
        if not lows:
            return None
        steps = [b.value - a.value for a, b in itertools.pairwise(lows)]
        spans = [b.batches - a.batches for a, b in itertools.pairwise(lows)]
        if min(steps) <= 0 or sum(steps) < _LEAST_BYTES or min(spans) <= 0:
            return None
        rates = [step / span for step, span in zip(steps, spans, strict=True)]
        if rates[-1] < _STEADY_FRAC * (rates[0] + rates[1]) / 2:
            return None
        seen = self._private.marks[-1].batches - self._private.marks[0].batches
        return Growth(self._tell_kind(), sum(steps) // sum(spans), seen)

    def _tell_kind(self) -> Kind:
        quarters = _quarter(self._blocks.marks)
        if not quarters:
            return "unknown"
        lows = [min(quarter, key=_value_of) for quarter in quarters]
        risen = lows[-1].value - lows[0].value
        batches = lows[-1].batches - lows[0].batches
        is_settled = batches >= _SETTLED_BATCHES
        if risen < batches * (_BLOCKS_A_BATCH if is_settled else _EARLY_BLOCKS_A_BATCH):
            return "native"
        # Garbage in cycles waits for its collection: blocks that come and go by more than they
        # have risen say nothing.
        spreads = [
            max(quarter, key=_value_of).value - low.value
            for quarter, low in zip(quarters, lows, strict=True)
        ]
        return "python" if risen > statistics.mean(spreads) - risen / 3 else "unknown"


def _value_of(mark: _Mark) -> int:
    return mark.value


def _quarter(marks: list[_Mark]) -> list[list[_Mark]]:
    """The marks of each quarter of the batches; empty when there is too little to tell."""
    if not marks or marks[-1].batches - marks[0].batches < _LEAST_BATCHES:
        return []
    first, span = marks[0].batches, marks[-1].batches - marks[0].batches
    quarters: list[list[_Mark]] = [[], [], [], []]
    for mark in marks[:-1]:
        quarters[4 * (mark.batches - first) // span].append(mark)
    return quarters if all(quarters) else []


@final
class SharedTrail:
    """How much of what a worker shared at first has become its own."""

    def __init__(self) -> None:
        self._shared: deque[int] = deque(maxlen=2)  # fetches pass for copies, not in each reading
        self._most_bytes: int | None = None

    def note_reading(self, anonymous_bytes: int, private_bytes: int) -> None:
        """What it maps of anonymous memory, and what of it is its own."""
        shared = max(0, anonymous_bytes - private_bytes)
        self._shared.append(shared)
        self._most_bytes = max(self._most_bytes or 0, shared)

    @property
    def copied_bytes(self) -> int:
        """Pages that were copied, in bytes."""
        if self._most_bytes is None:
            return 0
        return self._most_bytes - max(self._shared)
