"""Tickets: which batch is made from what, by which stream, in which order.

Covers: numbering batches, tying them to streams by torch's rules, and when to draw from
the sampler. Does not cover: when a ticket is dispatched (scheduler.py). Pure.

torch draws from the sampler in the main process, `prefetch_factor x num_workers` batches
ahead of the consumer. A sampler that shares a random generator with the training code
feels when that happens, so it is drawn from at exactly torch's moments, unless it is known
to draw from nothing shared; then small batches may be ordered further ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final


@dataclass(frozen=True, slots=True)
class Ticket:
    """One batch to be made.

    Attributes:
        serial: Its number, counted over all epochs of the iterator.
        stream: The logical worker that makes it; -1 when any may (`seeding="batch"`).
        indices: What the sampler gave for it.
        seed: Seeds the generators before the fetch, under `seeding="batch"`.
    """

    serial: int
    stream: int
    indices: Any
    seed: int | None


@final
class Order:
    """The tickets of one epoch after the other.

    Args:
        num_streams: torch's `num_workers`.
        is_bound: Whether batch i belongs to stream i mod W (torch's rule).
        seed_of: The seed of (epoch, number within the epoch), or None.
        epoch: The first one's number.
    """

    def __init__(
        self,
        num_streams: int,
        *,
        is_bound: bool,
        seed_of: Callable[[int, int], int] | None,
        epoch: int = 0,
    ) -> None:
        self._num_streams = num_streams
        self._is_bound = is_bound
        self._seed_of = seed_of
        self._sampler: Iterator[Any] = iter(())
        self._live = list(range(num_streams))
        self._turn = 0
        self._epoch = epoch - 1
        self._skipped = 0
        self._again: deque[Ticket] = deque()
        self._drawn_of = [0] * num_streams
        self.first_serial = 0
        """The first ticket of this epoch: batches of earlier ones are dropped."""
        self.next_serial = 0
        self.is_exhausted = True

    @property
    def drawn(self) -> int:
        """Batches of this epoch drawn from the sampler so far."""
        return self.next_serial - self.first_serial

    def start_epoch(self, sampler: Iterator[Any]) -> None:
        """Begin again, with every stream alive."""
        self._sampler = sampler
        self._live = list(range(self._num_streams))
        self._turn = 0
        self._epoch += 1
        self._skipped = 0
        self._drawn_of = [0] * self._num_streams
        self._again.clear()
        self.first_serial = self.next_serial
        self.is_exhausted = False

    # -- an epoch that was begun before -----------------------------------------------------

    def skip(self, count: int, drawn: int, again: set[int]) -> Iterator[tuple[int, Ticket]]:
        """Pass over the first `count` tickets: the consumer got them before the loader resumed.

        Args:
            count: How many.
            drawn: So many of them the sampler is past already.
            again: Numbers of those that it did not get: they come first from here on.

        Yields:
            Number within the epoch, and ticket, of those that it got.
        """
        missed = []
        for number in range(count):
            if number < drawn:
                self._next_stream()
                self.next_serial += 1
                continue
            ticket = self.draw()
            if ticket is None:
                break
            if number in again:
                missed.append(ticket)
            else:
                yield number, ticket
        self._skip_serials(count)
        for ticket in missed:
            self._again.append(replace(ticket, serial=self.next_serial))
            self.next_serial += 1

    def leave_out(self, ended: set[int], last_stream: int, delivered: list[int]) -> None:
        """The same for iterable datasets: go on after the stream that gave the last batch.

        Args:
            ended: Streams that are exhausted.
            last_stream: Who gave the last batch.
            delivered: Batches that the consumer got of each stream.
        """
        self._live = [stream for stream in self._live if stream not in ended]
        self._turn = sum(stream <= last_stream for stream in self._live)
        self._drawn_of = list(delivered)
        self.is_exhausted = not self._live
        self._skip_serials(sum(delivered))

    def _skip_serials(self, count: int) -> None:
        self._skipped = count
        self.first_serial = self.next_serial

    def number_of(self, serial: int) -> int:
        """Which batch of the epoch a ticket is, from 0."""
        return serial - self.first_serial + self._skipped

    # -- tickets ----------------------------------------------------------------------------

    def end_stream(self, stream: int) -> None:
        """The iterable dataset of `stream` is exhausted: its turn is skipped from now on."""
        if stream in self._live:
            at = self._live.index(stream)
            self._live.remove(stream)
            if at < self._turn:
                self._turn -= 1
        if not self._live:
            self.is_exhausted = True

    def draw(self) -> Ticket | None:
        """The next ticket; None when the epoch has no more.

        Raises:
            Exception: whatever the sampler raises.
        """
        if self._again:
            return self._again.popleft()
        if self.is_exhausted:
            return None
        try:
            indices = next(self._sampler)
        except StopIteration:
            self.is_exhausted = True
            return None
        serial = self.next_serial
        self.next_serial += 1
        stream, seed = self._next_stream(), None
        if self._seed_of is not None:
            seed = self._seed_of(self._epoch, self._number(serial, stream))
        return Ticket(serial, stream, indices, seed)

    def _number(self, serial: int, stream: int) -> int:
        """What a batch is seeded by.

        Of an iterable dataset its place in its own stream counts: how many tickets go to streams
        that have ended depends on when that is heard.
        """
        if stream < 0:
            return self.number_of(serial)
        made = self._drawn_of[stream]
        self._drawn_of[stream] += 1
        return made * self._num_streams + stream

    def _next_stream(self) -> int:
        if not self._is_bound:
            return -1
        self._turn %= len(self._live)
        stream = self._live[self._turn]
        self._turn += 1
        return stream
