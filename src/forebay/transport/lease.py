"""Draft -> Ready -> Lease: the three states of a block, each with only its own verbs.

Covers: a block while a worker writes it (`Draft`), while its batch waits to be delivered
(`Ready`), and while views of it live with the consumer (`Lease`); how it comes back.
Does not cover: how many bytes anyone may have (memory/ledger.py).

The one idea: a delivered tensor is a view whose exporter is a ctypes array over the
mapping; when the last view dies, in whatever thread, a weak reference appends the lease to
a queue, and the next `settle` recycles it. NumPy arrays, memoryviews or torch's own
frombuffer over the mapping cannot be that exporter: NumPy collapses chains of views, and
blocks came free while views of them were alive (tried).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, final

from forebay.units import KIB, round_up_to_page

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forebay.transport.arena import Arena, Block

SMALL_BYTES = 64 * KIB
"""Up to here a buffer is copied to the heap at delivery: one kept label tensor must not keep
the images of its batch, and below this size a copy (5 us) costs less than a lease."""

INLINE_BYTES = 32 * KIB
"""A batch whose buffers sum up to this travels in its message: no block, no lease."""

Span = tuple[int, int]
"""(offset within the arena, length), both in bytes; as workers report buffers."""


@final
@dataclass(frozen=True, slots=True)
class Draft:
    """A block that one worker may write to for one ticket."""

    block: Block

    def seal(
        self, arena: Arena, head: bytes, spans: Sequence[Span], used_bytes: int, touched_bytes: int
    ) -> Ready:
        """The finished batch; what it does not use is free again."""
        block = arena.shrink(self.block, used_bytes, touched_bytes)
        return Ready(head, tuple(spans), block)

    def drop(self, arena: Arena) -> None:
        """Nothing came of it."""
        arena.drop(self.block)


@final
@dataclass(frozen=True, slots=True)
class Ready:
    """A batch that lies in a block and waits to be delivered, or evicted."""

    head: bytes
    spans: tuple[Span, ...]
    block: Block

    @property
    def head_in_block(self) -> bool:
        """Whether the structure was too long for a message: then it is the last span."""
        return not self.head


@final
class _Parts:
    """The parts of one delivered block: which are lent, which came back."""

    __slots__ = ("block", "broken", "free", "open")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.open = 0
        self.free: list[Span] = []
        # Once true, parts that come back are freed one by one instead of waiting for all.
        self.broken = False


@final
class Lease(weakref.ref):  # type: ignore[type-arg]
    """The right to one buffer until the last tensor that views it dies."""

    __slots__ = ("epoch", "length", "offset", "parts", "queue")

    parts: _Parts
    offset: int
    length: int
    epoch: int
    queue: _Returns


@final
class _Held(weakref.ref):  # type: ignore[type-arg]
    """Tells of the end of a large heap copy that the consumer keeps."""

    __slots__ = ("length", "queue")

    length: int
    queue: _Returns


@final
class _Returns(deque[Any]):
    """Ended leases, and how to wake whoever waits for one.

    `wanted` is set by the scheduler when it is short of memory; a finaliser then writes to
    `bell`, a descriptor that the clock polls: a write needs no lock.

    `closed_arena` is set once nobody settles any more: then finalisers give pages back.
    """

    __slots__ = ("bell", "closed_arena", "owner_pid", "wanted")

    def __init__(self) -> None:
        super().__init__()
        self.bell = -1
        self.wanted = False
        self.closed_arena: Arena | None = None
        self.owner_pid = os.getpid()


def _end(lease: Any) -> None:
    """Runs in any thread, also inside the garbage collector: may append, may not lock."""
    returns = lease.queue
    if returns.closed_arena is not None:
        _end_late(lease, returns.closed_arena)
        return
    returns.append(lease)
    if returns.wanted and returns.bell >= 0:
        returns.wanted = False
        with contextlib.suppress(OSError):
            os.write(returns.bell, _RING)


_RING = (1).to_bytes(8, "little")  # what an eventfd wants to be written


def _end_late(lease: Any, arena: Arena) -> None:
    """The last view of a batch died after its loader had closed.

    The mapping may go on without us: the workers of another loader were forked while it was
    there. A child's own copy of the view says nothing about its parent's.
    """
    if _orphans.pop(id(lease), None) is not None and os.getpid() == lease.queue.owner_pid:
        with contextlib.suppress(OSError, ValueError):
            arena.give_back_part(lease.offset, lease.length)


_orphans: dict[int, Lease] = {}
"""Leases of closed loaders, by identity: a weak reference that died tells of nothing."""


_lenders: weakref.WeakSet[Lender] = weakref.WeakSet()
_own_fork = threading.local()


@contextmanager
def own_fork() -> Iterator[None]:
    """Marks forks that we make ourselves: their child takes no part in any lease."""
    _own_fork.active = True
    try:
        yield
    finally:
        _own_fork.active = False


def _before_fork() -> None:
    if not getattr(_own_fork, "active", False):
        _orphans.clear()  # the child's views must stay what they were
        for lender in list(_lenders):
            lender.note_foreign_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


@lru_cache(maxsize=512)
def _exporter_type(length: int) -> type[ctypes.Array[ctypes.c_char]]:
    """ctypes makes a class a length; making one costs 20 us, so they are kept."""
    return ctypes.c_char * length


@final
class Lender:
    """Delivers what lies in blocks and takes it back when the consumer is done.

    Called by the scheduler under its lock, except for `_end`.

    Invariant: `lent_bytes` is the sum over the open leases, rounded up to pages.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # By identity: a weak reference hashes as what it refers to, and ctypes arrays do not.
        self._open: dict[int, Lease] = {}
        self._partial: set[_Parts] = set()
        self._ended = _Returns()
        self._copies: dict[int, _Held] = {}
        self._fork_epoch = 0
        self.lent_bytes = 0
        self.times_returned = 0
        """How many buffers, lent or copied, the consumer has let go of."""
        self.copied_bytes = 0
        """Large heap copies that still live: the consumer's memory, not the loader's."""
        self.lost_bytes = 0
        """Bytes never recycled because a child that user code forked may still read them."""
        self.copies_only = False
        """Set once forks repeat: from then on everything is delivered as heap copies."""
        _lenders.add(self)

    def note_foreign_fork(self) -> None:
        """User code is about to fork: leases open now are never recycled."""
        if self._open:
            self.copies_only = self._fork_epoch > 0
            self._fork_epoch += 1

    def lend(self, ready: Ready) -> list[object]:
        """One writable buffer a span: leases for the large, heap copies for the small."""
        parts = _Parts(ready.block)
        with memoryview(self._arena.mapping) as view:
            buffers = [
                bytearray(view[offset : offset + length])
                if length <= SMALL_BYTES
                else self._lend_one(parts, offset, length)
                for offset, length in ready.spans
            ]
        if parts.open:
            self._partial.add(parts)
            _note_gaps(parts, ready.spans)
        else:
            self._arena.drop(ready.block)
        return buffers

    def copy_out(self, ready: Ready) -> list[object]:
        """One heap copy a span; the block is free at once."""
        buffers = [self._copy_watched(offset, length) for offset, length in ready.spans]
        self._arena.drop(ready.block)
        return buffers

    def _copy_watched(self, offset: int, length: int) -> object:
        """A heap copy of which it is known whether it still lives."""
        if length <= SMALL_BYTES:
            return self._copy(offset, length)
        exporter = _exporter_type(length).from_buffer(self._copy(offset, length))
        self.copied_bytes += length
        held = _Held(exporter, _end)
        held.length, held.queue = length, self._ended
        self._copies[id(held)] = held
        return exporter

    def settle(self) -> int:
        """Take back what ended since the last call. Returns the bytes that came free."""
        freed = 0
        while self._ended:
            ended = self._ended.popleft()
            self.times_returned += 1
            if isinstance(ended, _Held):
                del self._copies[id(ended)]
                self.copied_bytes -= ended.length
            else:
                freed += self._take_back(ended)
        return freed

    def scavenge(self) -> None:
        """Free the returned parts of blocks of which other parts are still lent."""
        for parts in self._partial:
            parts.broken = True
            for offset, length in parts.free:
                self._arena.split_off(parts.block, offset, length)
            parts.free.clear()

    def close(self) -> None:
        """Nobody will settle any more: what ends from now on gives its pages back by itself."""
        self._ended.closed_arena = self._arena
        self.settle()
        self.scavenge()
        for lease in self._open.values():
            if lease.epoch == self._fork_epoch:
                _orphans[id(lease)] = lease
                if lease() is None:  # it ended meanwhile, in another thread
                    _end_late(lease, self._arena)

    def attach_bell(self, fd: int) -> None:
        """Where a finaliser writes when somebody waits for a lease; -1 for nowhere."""
        self._ended.bell = fd

    def want_return(self) -> None:
        """Ring the bell at the next lease that ends."""
        self._ended.wanted = True

    @property
    def idle_part_bytes(self) -> int:
        """Bytes that `scavenge` would free."""
        return sum(length for parts in self._partial for _, length in parts.free)

    def _lend_one(self, parts: _Parts, offset: int, length: int) -> object:
        exporter = _exporter_type(length).from_buffer(self._arena.mapping, offset)
        lease = Lease(exporter, _end)
        lease.parts, lease.offset, lease.length = parts, offset, round_up_to_page(length)
        lease.epoch, lease.queue = self._fork_epoch, self._ended
        parts.open += 1
        self._open[id(lease)] = lease
        self.lent_bytes += lease.length
        return exporter

    def _copy(self, offset: int, length: int) -> bytearray:
        with memoryview(self._arena.mapping) as view:
            return bytearray(view[offset : offset + length])

    def _take_back(self, lease: Lease) -> int:
        del self._open[id(lease)]
        self.lent_bytes -= lease.length
        parts = lease.parts
        if lease.epoch != self._fork_epoch:
            # A fork happened while it was lent: the child's view must stay what it was.
            self.lost_bytes += lease.length
            parts.broken = True
            self._finish(parts)
            return 0
        if parts.broken:
            self._arena.split_off(parts.block, lease.offset, lease.length)
        else:
            parts.free.append((lease.offset, lease.length))
        self._finish(parts)
        return lease.length

    def _finish(self, parts: _Parts) -> None:
        parts.open -= 1
        if parts.open:
            return
        self._partial.discard(parts)
        if not parts.broken:
            self._arena.drop(parts.block)
            return
        for offset, length in parts.free:
            self._arena.split_off(parts.block, offset, length)
        self._arena.forget(parts.block)


def _note_gaps(parts: _Parts, spans: Sequence[Span]) -> None:
    """What no lease covers (small buffers, padding) is free already."""
    at = parts.block.offset
    for offset, length in sorted(spans):
        if length > SMALL_BYTES:
            if offset > at:
                parts.free.append((at, offset - at))
            at = offset + round_up_to_page(length)
    end = parts.block.offset + parts.block.capacity_bytes
    if end > at:
        parts.free.append((at, end - at))
