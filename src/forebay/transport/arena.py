"""One anonymous mapping, made once and recycled for ever.

Covers: placing and dropping blocks in it, and giving pages back to the kernel. Does not
cover: what the mapping is (pages.py), who may have how many bytes (memory/ledger.py) or
when a block comes free (lease.py).

The one idea: what makes moving batches slow is not copying but page faults, so a page
that was touched once is kept *warm* and handed out again. Address space is reserved
generously and costs nothing; what counts are touched pages.

Only the main process places and drops; workers are told offsets. Nothing here locks:
the scheduler calls it under its own lock.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from forebay.transport.pages import open_pages
from forebay.units import PAGE_BYTES, round_up_to_page


@dataclass(frozen=True, slots=True)
class Block:
    """A page-aligned range of the arena, valid for one generation.

    Attributes:
        offset: First byte, a multiple of the page size.
        capacity_bytes: Length, a multiple of the page size, at least one page.
        generation: Number of this handing-out; a handle with an old one is stale.
        warm_bytes: Prefix that had its pages when it was placed; the rest was untouched.
    """

    offset: int
    capacity_bytes: int
    generation: int
    warm_bytes: int


class StaleBlockError(RuntimeError):
    """A block was used after it had been dropped; a fault of forebay's, never of the user's."""


@final
class _Ranges:
    """Free ranges sorted by offset, neighbours merged. First fit."""

    __slots__ = ("_lengths", "_offsets", "total_bytes")

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._lengths: list[int] = []
        self.total_bytes = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._offsets, self._lengths, strict=True)))

    def add(self, offset: int, length: int) -> None:
        at = bisect.bisect_left(self._offsets, offset)
        self.total_bytes += length
        if at < len(self._offsets) and offset + length == self._offsets[at]:
            length += self._lengths[at]
            del self._offsets[at], self._lengths[at]
        if at and self._offsets[at - 1] + self._lengths[at - 1] == offset:
            self._lengths[at - 1] += length
            return
        self._offsets.insert(at, offset)
        self._lengths.insert(at, length)

    def take(self, length: int) -> int | None:
        for at, have in enumerate(self._lengths):
            if have >= length:
                return self._cut(at, length)
        return None

    def take_largest(self) -> tuple[int, int] | None:
        if not self._lengths:
            return None
        at = max(range(len(self._lengths)), key=self._lengths.__getitem__)
        length = self._lengths[at]
        return self._cut(at, length), length

    def holds(self, length: int) -> bool:
        return any(have >= length for have in self._lengths)

    def length_at(self, offset: int) -> int:
        """Length of the range that begins exactly there; 0 if none does."""
        at = bisect.bisect_left(self._offsets, offset)
        begins = at < len(self._offsets) and self._offsets[at] == offset
        return self._lengths[at] if begins else 0

    def take_at(self, offset: int, length: int) -> None:
        """The front of the range that begins exactly there."""
        at = bisect.bisect_left(self._offsets, offset)
        assert self._offsets[at] == offset
        self._cut(at, length)

    def _cut(self, at: int, length: int) -> int:
        offset = self._offsets[at]
        self.total_bytes -= length
        if self._lengths[at] == length:
            del self._offsets[at], self._lengths[at]
        else:
            self._offsets[at] += length
            self._lengths[at] -= length
        return offset


@final
class Arena:
    """Blocks of memory that every worker of one loader sees at the same offsets.

    Free ranges are of two kinds: *warm* ones have their pages, *cold* ones do not.
    Invariant: live blocks + warm + cold = reserve, and no two overlap.

    Args:
        reserve_bytes: Address space to reserve. It costs no memory until it is touched.
        is_private: Whether all workers are threads of this process.
    """

    def __init__(self, reserve_bytes: int, *, is_private: bool = False) -> None:
        self.reserve_bytes = round_up_to_page(max(reserve_bytes, PAGE_BYTES))
        self._pages = open_pages(self.reserve_bytes, is_private=is_private)
        self.mapping = self._pages.mapping
        self._reach_bytes = 0  # nothing beyond was ever placed
        self._cold = _Ranges()
        self._cold.add(0, self.reserve_bytes)
        self._warm = _Ranges()
        # Blocks dropped lately, by capacity, last in first out: a loop over equal batches
        # takes the hottest one back without any search.
        self._hot: dict[int, list[int]] = {}
        self._hot_bytes = 0
        # Generation -> offset. Not the other way round: a block of which the front was split
        # off lives on while a newer one begins at the same offset.
        self._live: dict[int, int] = {}
        self._generation = 0
        self.touched_bytes = 0
        """Upper bound of the arena's resident bytes: live blocks and warm ranges."""
        self.times_given_back = 0
        """How often pages went back: they vanish from workers' resident memory too."""

    @property
    def fd(self) -> int:
        """The descriptor that leads to it; -1 when it is private, or closed."""
        return self._pages.fd

    @property
    def free_warm_bytes(self) -> int:
        """Touched bytes that no block holds."""
        return self._warm.total_bytes + self._hot_bytes

    def read_resident_bytes(self) -> int:
        """Exact resident bytes, as the kernel counts them."""
        return self._pages.read_resident_bytes(self._reach_bytes, self.touched_bytes)

    def estimate_growth(self, length_bytes: int) -> int:
        """Bytes that placing `length_bytes` would newly touch: 0 when a warm range fits."""
        capacity = round_up_to_page(max(length_bytes, 1))
        if self._hot.get(capacity):
            return 0
        self._cool_down()
        if self._warm.holds(capacity):
            return 0
        return capacity - self._find_stretch(capacity)[1]

    def place(self, length_bytes: int) -> Block | None:
        """A block for `length_bytes`, warm if one fits; None when no address range is left."""
        capacity = round_up_to_page(max(length_bytes, 1))
        hot = self._hot.get(capacity)
        if hot:
            self._hot_bytes -= capacity
            return self._lend(hot.pop(), capacity, capacity)
        self._cool_down()
        offset = self._warm.take(capacity)
        if offset is not None:
            return self._lend(offset, capacity, capacity)
        offset, warm = self._find_stretch(capacity)
        if warm:
            self._warm.take_at(offset, warm)
            self._cold.take_at(offset + warm, capacity - warm)
        else:
            found = self._cold.take(capacity)
            if found is None:
                return None
            offset = found
        self.touched_bytes += capacity - warm
        self._reach_bytes = max(self._reach_bytes, offset + capacity)
        self._pages.expect(offset + warm, capacity - warm)
        return self._lend(offset, capacity, warm)

    def shrink(self, block: Block, used_bytes: int, touched_bytes: int) -> Block:
        """`block` cut down to `used_bytes`; its tail is free again.

        Args:
            block: A live block.
            used_bytes: What its contents need; at least one page stays.
            touched_bytes: How far it was ever written. Pages beyond it that were cold
                were never touched and are not counted.
        """
        self._check(block)
        keep = min(round_up_to_page(max(used_bytes, 1)), block.capacity_bytes)
        written = max(keep, round_up_to_page(touched_bytes), block.warm_bytes)
        written = min(written, block.capacity_bytes)
        if written > keep:
            self._warm.add(block.offset + keep, written - keep)
        if written < block.capacity_bytes:
            self._cold.add(block.offset + written, block.capacity_bytes - written)
            self.touched_bytes -= block.capacity_bytes - written
        return Block(block.offset, keep, block.generation, keep)

    def drop(self, block: Block) -> None:
        """Free a whole block; the next one of its size gets its pages while they are hot."""
        self._check(block)
        del self._live[block.generation]
        self._hot.setdefault(block.capacity_bytes, []).append(block.offset)
        self._hot_bytes += block.capacity_bytes

    def drop_unused(self, block: Block) -> None:
        """Free a block that nobody wrote to: what was cold is cold again."""
        is_warm = block.warm_bytes == block.capacity_bytes
        self.drop(block if is_warm else self.shrink(block, 0, 0))

    def split_off(self, block: Block, offset: int, length: int) -> None:
        """Free a page-aligned part of a block whose other parts stay in use."""
        self._check(block)
        self._warm.add(offset, length)

    def forget(self, block: Block) -> None:
        """End a block all of whose parts were given back by `split_off`."""
        self._check(block)
        del self._live[block.generation]

    def give_back(self, length_bytes: int, spared_bytes: int = 0) -> int:
        """Return at least `length_bytes` of free pages to the kernel, if there are so many.

        Args:
            length_bytes: How many.
            spared_bytes: Length of a block about to be placed: the warm range that it would
                be placed in is left alone. 0 for none.

        Returns:
            The bytes given back. Live blocks are never touched.
        """
        if not self._pages.can_give_back:
            return 0
        self._cool_down()
        spared = self._set_aside(round_up_to_page(spared_bytes)) if spared_bytes else None
        try:
            return self._give_back_largest(length_bytes)
        finally:
            if spared is not None:
                self._warm.add(*spared)

    def _set_aside(self, capacity: int) -> tuple[int, int] | None:
        """Take out of the warm ranges what `place` would take, to be put back."""
        offset = self._warm.take(capacity)
        if offset is not None:
            return offset, capacity
        offset, warm = self._find_stretch(capacity)
        if not warm:
            return None
        self._warm.take_at(offset, warm)
        return offset, warm

    def _give_back_largest(self, length_bytes: int) -> int:
        given = 0
        while given < length_bytes:
            found = self._warm.take_largest()
            if found is None:
                break
            offset, length = found
            grain = self._pages.grain_bytes
            # Where pages are huge, rather a little more: a part of one would not come free.
            over = (offset + length - (length_bytes - given)) // grain * grain - offset
            if over > 0:
                self._warm.add(offset, over)
                offset, length = offset + over, length - over
            self._pages.give_back(offset, length)
            self.times_given_back += 1
            self._cold.add(offset, length)
            self.touched_bytes -= length
            given += length
        return given

    def close(self) -> None:
        """Let go of the mapping. Views that consumers hold keep it alive until they die.

        Free pages go back at once: a view keeps the whole mapping, and whoever was forked
        meanwhile, as the workers of another loader, maps them too for as long as it lives.
        """
        self.give_back(self.touched_bytes)
        self._pages.close()

    def give_back_part(self, offset: int, length: int) -> None:
        """Return a part's pages to the kernel after `close`, when its last view has died."""
        if self._pages.can_give_back:
            self._pages.give_back(offset, length)

    def _find_stretch(self, capacity: int) -> tuple[int, int]:
        """The warm range that needs the fewest cold bytes behind it to hold `capacity`.

        Batches of uneven size leave holes that the next one does not fit into by a little, and
        a page that went back would cost a whole hole its use.

        Returns:
            Its offset and its length; length 0 when none will do.
        """
        best = (0, 0)
        for offset, warm in self._warm:
            if best[1] < warm < capacity <= warm + self._cold.length_at(offset + warm):
                best = (offset, warm)
        return best

    def _lend(self, offset: int, capacity: int, warm_bytes: int) -> Block:
        self._generation += 1
        self._live[self._generation] = offset
        return Block(offset, capacity, self._generation, warm_bytes)

    def _check(self, block: Block) -> None:
        if self._live.get(block.generation) != block.offset:
            message = f"block at {block.offset} of generation {block.generation} is not live"
            raise StaleBlockError(message)

    def _cool_down(self) -> None:
        """Merge hot blocks into ranges, where blocks of other sizes can use them."""
        if self._hot_bytes:
            for capacity, offsets in self._hot.items():
                for offset in offsets:
                    self._warm.add(offset, capacity)
            self._hot.clear()
            self._hot_bytes = 0
