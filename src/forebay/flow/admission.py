"""Memory for batches: who gets a block, and where it comes from when there is none.

Covers: letters C and D of the way of a batch (grant, place), eviction, giving pages back,
and whether a delivered batch may stay in the arena. Does not cover: which ticket is asked
for (scheduler.py), or the arithmetic (memory/ledger.py).

Runs under the engine's lock, like the scheduler, which is its only caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, final

from forebay.errors import BatchExceedsBudget, BudgetTooSmall, WorkersUnavailable
from forebay.memory.ledger import Ledger, Refusal
from forebay.memory.planner import Lessons
from forebay.transport.arena import Arena
from forebay.transport.lease import Draft, Lender, Ready
from forebay.transport.spill import Spilled, SpillFile
from forebay.units import MIB, round_up_to_page
from forebay.workers.messages import Done

LARGE_BYTES = 4 * MIB
"""A block from here on is worth waiting a thread switch (0.1 ms) for."""


_MOST_SPREAD = 2.0
"""Of recent sizes, the largest to the smallest, up to which a block is placed ahead."""

_TRUSTED_RETURNS = 3
"""Calls in a row before which the consumer let go of a batch, until that is its habit."""


@final
class _Drawing:
    """Whether what was drawn of a promise stays off it."""

    is_kept = False


@final
class Admission:
    """What one iterator's batches may take of its budget.

    Attributes:
        sizes: What results took of their blocks.
        makings: What making them took beside, at its peak. Promised is the largest of this
            epoch and the last, with a margin: which batch is a giant is known only once it is
            made, and two may be made at once.
        totals: Buffers of a batch, wherever they travelled.
        landings: Batches that were made, by this iterator.
        objects_bytes: Of the latest batch, what its Python objects took on their way.
        in_flight_bytes: Blocks being written or waiting to be delivered.
        evictions: Ready batches that went to disk.
    """

    def __init__(
        self, arena: Arena, lender: Lender, ledger: Ledger, lessons: Lessons | None = None
    ) -> None:
        self.arena, self.lender, self.ledger = arena, lender, ledger
        lessons = lessons or Lessons()
        self.sizes = lessons.sizes
        self.makings = lessons.makings
        self.totals = lessons.totals
        self.landings = 0
        self.objects_bytes = 0
        self.in_flight_bytes = 0
        self.evictions = 0
        self._spill = SpillFile()
        self._held_across_bytes = 0
        self._times_returned = 0
        self._is_lent_on_trust = False
        self._returns_in_row = _TRUSTED_RETURNS  # a loop is what a loader is usually in

    # -- C and D: grant, place --------------------------------------------------------------

    def try_admit(
        self, worker: int, *, is_busy: bool, size_bytes: int, step_bytes: int = 0
    ) -> bool:
        """A grant for what making takes, if it and the block's growth fit the budget.

        Args:
            worker: Who would make it.
            is_busy: Whether it has a grant already, for the batch that it is at.
            size_bytes: Of the block; 0 for none.
            step_bytes: What the worker itself is about to grow by.
        """
        growth = self._estimate_growth(size_bytes) + step_bytes
        self.ledger.arena_bytes = self.arena.touched_bytes
        if is_busy:
            return not self.must_ask_alone and self.ledger.try_grow(growth)
        making = self.makings.promise_bytes
        if not isinstance(self.ledger.grant(worker, making, growth), Refusal):
            return True
        if not self._try_fit(size_bytes, making + step_bytes):
            return False
        growth = self._estimate_growth(size_bytes) + step_bytes
        return not isinstance(self.ledger.grant(worker, making, growth), Refusal)

    def force(self, worker: int) -> None:
        """For the head when nothing else runs: it is made first and asks for a block then."""
        self.give_back(self.makings.promise_bytes - self._read_free())
        self.ledger.force(worker, self.makings.promise_bytes)

    @property
    def is_tight(self) -> bool:
        """Whether more than half of the budget is spoken for: then every fetch is metered."""
        return self.ledger.free_bytes < self.ledger.budget_bytes // 2

    @property
    def must_ask_alone(self) -> bool:
        """Whether a worker gets its next ticket only when it has nothing to do.

        While memory is tight and any batch may be a giant: what it was promised for one it
        gives up for the block of that one, and the next must be promised its own.
        """
        return self.is_tight and self.sizes.seen > 0 and not self.estimate_block()

    def settle(self, poured: tuple[int, int], *, is_idle: bool) -> None:
        """A worker is done with a batch.

        Args:
            poured: Which, and how much of its promise it gave up.
            is_idle: Whether it has nothing to do now; else the next needs a whole promise.
        """
        worker, poured_bytes = poured
        if is_idle:
            self.ledger.settle(worker)
        elif poured_bytes:
            self.ledger.amend(worker, self.makings.promise_bytes)

    def try_place(self, size_bytes: int, poured: tuple[int, int] = (-1, 0)) -> Draft | None:
        """A block for a worker that asked for one, if it fits the budget.

        Args:
            size_bytes: Of the block.
            poured: Which worker, and how much it will give up of what it was promised while it
                fills the block.
        """
        with self._drawing(poured, size_bytes) as drawing:
            drawing.is_kept = self._try_fit(size_bytes)
        return self.place(size_bytes) if drawing.is_kept else None

    @contextlib.contextmanager
    def _drawing(self, poured: tuple[int, int], size_bytes: int) -> Iterator[_Drawing]:
        """Meanwhile a promise is smaller by what will lie in new pages of the block instead."""
        worker, poured_bytes = poured
        promised = self.ledger.promised_by_holder.get(worker, 0)
        drawn = min(promised, poured_bytes, self._estimate_growth(size_bytes))
        drawing = _Drawing()
        if drawn:
            self.ledger.amend(worker, promised - drawn)
        yield drawing
        if drawn and not drawing.is_kept:
            self.ledger.amend(worker, promised)

    def place(self, size_bytes: int) -> Draft | None:
        """A block; None when addresses have run out."""
        block = self.arena.place(size_bytes)
        if block is None:
            return None
        self.ledger.arena_bytes = self.arena.touched_bytes
        self.ledger.sync()
        self.in_flight_bytes += block.capacity_bytes
        return Draft(block)

    def drop(self, draft: Draft) -> None:
        """Nothing came of a block."""
        self.in_flight_bytes -= draft.block.capacity_bytes
        draft.drop(self.arena)

    def seal(self, draft: Draft, done: Done) -> Ready:
        """H: the promise is corrected to what came."""
        before = draft.block.capacity_bytes
        ready = draft.seal(self.arena, done.head, done.spans, done.used_bytes, done.touched_bytes)
        self.in_flight_bytes += ready.block.capacity_bytes - before
        return ready

    def note_costs(self, done: Done, given_back: int) -> bool:
        """Learn from a finished batch.

        Args:
            done: What its worker said.
            given_back: The arena's count when the fetch was handed out. If pages went back
                meanwhile, they left the worker's resident memory while others came, and the
                kernel's high-water mark, which counts all kinds, says nothing of making.

        Returns:
            Whether pages went back meanwhile.
        """
        is_blurred = given_back != self.arena.times_given_back
        if done.made is not None and not is_blurred:
            self.makings.add(done.made.peak_bytes)
        self.landings += 1
        self.objects_bytes = len(done.head) or (done.spans[-1][1] if done.spans else 0)
        self.sizes.add(done.used_bytes)
        self.totals.add(done.used_bytes or sum(map(len, done.inline)))
        return is_blurred

    # -- making room --------------------------------------------------------------------------

    def fits(self, size_bytes: int) -> bool:
        """Whether a block of this size may be placed now."""
        return self._estimate_growth(size_bytes) <= self._read_free()

    def fits_at_best(self, size_bytes: int, stranded_bytes: int) -> bool:
        """The same with the workers at the least they were ever seen to take.

        Args:
            size_bytes: Of the block.
            stranded_bytes: What will come free: blocks of workers that wait for larger ones,
            and what grown workers have beyond what they need.

        What decides whether a batch is refused for good: neither a reading taken while workers
        were busy, nor a consumer that for once keeps what it always let go, must end a
        training run. The block that is one too many then is seen as an overshoot.
        """
        spare = max(0, self.ledger.workers_bytes - self.ledger.workers_least_bytes)
        spare += stranded_bytes + self.ledger.promised_bytes
        # What is kept for such moments; and what may be back in the next.
        spare += self.ledger.seat.unpromised_bytes + self.ledger.seat.withheld_bytes
        growth = self._estimate_growth(size_bytes)
        if self._is_lent_on_trust:
            growth -= min(self._block_bytes(), self.lender.lent_bytes)
        return growth <= max(0, self._read_free() + spare)

    def make_room(
        self,
        landed: MutableMapping[int, Any],
        head: int,
        size_bytes: int,
        poured: tuple[int, int] = (-1, 0),
    ) -> None:
        """Evict ready batches, the one that is needed last first, until `size_bytes` fit."""
        with self._drawing(poured, size_bytes):
            self._make_room(landed, head, size_bytes)

    def _make_room(self, landed: MutableMapping[int, Any], head: int, size_bytes: int) -> None:
        for serial in sorted(landed, reverse=True):
            if self._try_fit(size_bytes):
                return
            if serial != head and isinstance(landed[serial], Ready):
                landed[serial] = self._evict(landed[serial])
        if not self._try_fit(size_bytes):  # the head may be let in all the same
            self.give_back(self._estimate_growth(size_bytes) - self._read_free(), size_bytes)

    def bring_back(self, landed: MutableMapping[int, Any], spilled: Spilled) -> Ready:
        """An evicted batch, in a block again.

        Raises:
            WorkersUnavailable: No address is left for it.
        """
        self.make_room(landed, -1, spilled.size_bytes)
        draft = self.place(spilled.size_bytes)
        if draft is None:
            raise WorkersUnavailable.about("has no address space left for an evicted batch")
        return self._spill.read(spilled, draft.block, self.arena)

    def give_back_beyond(self, width: int) -> None:
        """A narrower window leaves pages warm that no batch will come for."""
        used = self.in_flight_bytes + self.lender.lent_bytes
        # One block more than the window: the consumer's last one comes back while it waits.
        wanted = (width + 1) * round_up_to_page(self.sizes.estimate_next())
        surplus = self.arena.touched_bytes - max(used, wanted)
        if surplus > 0:
            self.give_back(surplus)

    def give_back(self, size_bytes: int, spared_bytes: int = 0) -> None:
        """Free pages go back to the kernel, as many as there are up to `size_bytes`.

        Args:
            size_bytes: How many.
            spared_bytes: A block about to be placed; the pages that it will have are left.
        """
        if size_bytes > 0:
            self.lender.scavenge()
            self.arena.give_back(size_bytes, spared_bytes)
        self.ledger.arena_bytes = self.arena.touched_bytes
        self.ledger.sync()

    def evict(self, landed: MutableMapping[int, Any], head: int, size_bytes: int) -> None:
        """Ready batches go to disk, the one that is needed last first; their pages go back."""
        gone = 0
        for serial in sorted(landed, reverse=True):
            if gone >= size_bytes:
                break
            ready = landed[serial]
            if serial != head and isinstance(ready, Ready):
                landed[serial] = self._evict(ready)
                if landed[serial] is not ready:
                    gone += ready.block.capacity_bytes
        self.give_back(gone)

    def count_evictable(self, landed: MutableMapping[int, Any], head: int) -> int:
        """Bytes of ready batches that may wait on disk: all but the one that comes next."""
        return sum(
            ready.block.capacity_bytes
            for serial, ready in landed.items()
            if serial != head and isinstance(ready, Ready)
        )

    def estimate_block(self) -> int:
        """What to place for a batch before it is made; 0 where its worker had better ask.

        Where sizes vary much, the largest that was seen is too much for nearly all. To ask
        costs 0.2 ms, which is little for a large batch.
        """
        size = self.sizes.estimate_next()
        return 0 if size >= LARGE_BYTES and self.sizes.spread > _MOST_SPREAD else size

    def estimate_batch(self) -> int:
        """What one more batch takes: its block, and what making it takes beside."""
        return self._block_bytes() + self.makings.promise_bytes

    def drop_landed(self, landed: Any) -> None:
        """A batch of a broken epoch is not wanted."""
        if isinstance(landed, Ready):
            self.in_flight_bytes -= landed.block.capacity_bytes
            self.arena.drop(landed.block)
        elif isinstance(landed, Spilled):
            self._spill.forget(landed)

    # -- the consumer -------------------------------------------------------------------------

    def note_arrival(self) -> None:
        """The consumer asks for a batch: what it still holds, it holds across `next()`."""
        self.lender.settle()
        self._held_across_bytes = self.lender.lent_bytes
        if self.lender.times_returned != self._times_returned:
            self._returns_in_row += 1
        elif self._held_across_bytes > self._block_bytes():
            self._returns_in_row = 0
        self._times_returned = self.lender.times_returned

    def has_block_beside_consumer(self, width: int) -> bool:
        """Whether one more large block stays within the window and what the consumer keeps.

        Right after a delivery a loop holds two batches, until its variable is bound anew:
        without waiting that instant, there would always be one block more than needed.
        """
        size = self._block_bytes()
        if size < LARGE_BYTES:
            return True
        kept = max(size, self._held_across_bytes)
        return self.in_flight_bytes + self.lender.lent_bytes + size <= width * size + kept

    def should_copy_out(self, ready: Ready) -> bool:
        """Whether lending this block would leave less than one free block for the head."""
        if self.lender.copies_only:
            return True
        block = ready.block.capacity_bytes
        ledger = self.ledger
        room = ledger.budget_bytes - ledger.workers_bytes - ledger.heap_bytes
        room -= self.makings.promise_bytes
        needed = self.lender.lent_bytes + block + max(self._block_bytes(), block)
        if needed <= room:
            return False
        # One block goes when the loop's variable is bound anew, unless the consumer kept more
        # than one lately and let go of none. Where it holds no more than that, a copy would
        # not make the sum smaller, and while it is made there are both.
        is_trusted = self._returns_in_row >= _TRUSTED_RETURNS
        leaving = min(self._block_bytes(), self._held_across_bytes)
        is_loop = needed - leaving <= room or self.lender.lent_bytes <= self._block_bytes()
        self._is_lent_on_trust = is_trusted and is_loop
        return not self._is_lent_on_trust

    def hand_over(self, ready: Ready) -> None:
        """The batch is the consumer's from here on."""
        self.in_flight_bytes -= ready.block.capacity_bytes

    def compose_refusal(
        self, number: int, size_bytes: int, batch_size: int | None, *, is_first: bool
    ) -> BaseException:
        """The error for a batch that does not fit beside what the consumer holds."""
        ledger, seat = self.ledger, self.ledger.seat
        asked = seat.whole_bytes + seat.withheld_bytes
        workers = min(ledger.workers_bytes, ledger.workers_least_bytes)
        beside = workers + self.lender.lent_bytes
        needed = size_bytes + beside + seat.unpromised_bytes
        if is_first and not self.sizes.seen:
            return BudgetTooSmall.about(asked, needed - size_bytes, size_bytes, batch_size)
        available = asked - (needed - size_bytes)
        return BatchExceedsBudget.about(number, size_bytes, asked, available, batch_size)

    def close(self, landed: Iterable[Any], drafts: Iterable[Draft]) -> None:
        """Nothing is delivered any more: let go of what is ready, and of what was in the making."""
        for each in landed:
            self.drop_landed(each)
        for draft in drafts:
            self.drop(draft)
        self._spill.close()

    # -- arithmetic -----------------------------------------------------------------------------

    def _block_bytes(self) -> int:
        return round_up_to_page(self.sizes.estimate_next())

    def _read_free(self) -> int:
        self.ledger.arena_bytes = self.arena.touched_bytes
        return self.ledger.free_bytes

    def _estimate_growth(self, size_bytes: int) -> int:
        return self.arena.estimate_growth(size_bytes) if size_bytes else 0

    def _try_fit(self, size_bytes: int, beside_bytes: int = 0) -> bool:
        """Give free pages back until a block, and so much beside it, fit.

        Nothing goes back where all would not be enough: pages that are taken again cost a
        fault each.
        """
        growth = self._estimate_growth(size_bytes)
        short = growth + beside_bytes - self._read_free()
        if short <= 0:
            return True
        others = self.arena.free_warm_bytes + self.lender.idle_part_bytes
        others -= round_up_to_page(size_bytes) - growth
        if others < short:
            return False
        self.lender.scavenge()
        short = self._estimate_growth(size_bytes) + beside_bytes - self._read_free()
        if short > 0:
            self.arena.give_back(short, size_bytes)
        return self._estimate_growth(size_bytes) + beside_bytes <= self._read_free()

    def _evict(self, ready: Ready) -> Ready | Spilled:
        try:
            spilled = self._spill.write(ready, self.arena)
        except OSError:
            return ready  # no disk: it stays, and the head may be refused with numbers
        self.in_flight_bytes -= ready.block.capacity_bytes
        self.evictions += 1
        return spilled
