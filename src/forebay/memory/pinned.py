"""What pinning takes: torch's own allocator of pinned memory, in arithmetic.

Covers: the rounding of one allocation; the batch size that avoids it; the size that the
pool of blocks comes to, since it gives none back.
Does not cover: pinning, which torch does; the window and the budget (policy.py).

The one idea: `pin_memory=True` copies each tensor of a batch into a block whose size is
the next power of two (PowerOf2Ceil in ATen's CachingHostAllocator, so that blocks can be
used again), and a free block serves only requests of its own size. So a batch a little
above a power of two pins nearly twice its bytes, and batches of many sizes fill a pool
for each size. Both follow from the sizes alone, before anything is pinned. torch can be
told to round less (`pinned_max_round_threshold_mb` in its allocator's settings); what is
said here is its default.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import final


def round_pinned(size_bytes: int) -> int:
    """What torch pins for one tensor of `size_bytes`: the next power of two; 0 for 0."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def pinned_bytes(sizes: Iterable[int]) -> int:
    """What torch pins for one batch whose tensors have `sizes` in bytes; each is rounded."""
    return sum(round_pinned(size_bytes) for size_bytes in sizes)


def advise_batch_size(sample_bytes: int | Sequence[int], batch_size: int) -> int | None:
    """A slightly or much smaller batch size that pins at most half as much.

    Args:
        sample_bytes: Of one sample; with several fields, of each, since each is a tensor
            of its own and rounded by itself.
        batch_size: As it is now.

    Returns:
        The largest batch size whose pinned bytes are at most half of those now. None
        when that would not pin less for each sample: then it is not the rounding that
        costs, and a smaller batch would gain nothing.
    """
    fields = [sample_bytes] if isinstance(sample_bytes, int) else sample_bytes

    def count_pinned(samples: int) -> int:
        return pinned_bytes(field * samples for field in fields)

    now_bytes = count_pinned(batch_size)
    # The pinned bytes never fall as the batch grows, so halving the range finds the border.
    fits, too_large = 0, batch_size
    while too_large - fits > 1:
        tried = (fits + too_large) // 2
        fits, too_large = (
            (tried, too_large) if 2 * count_pinned(tried) <= now_bytes else (fits, tried)
        )
    is_gain = fits > 0 and count_pinned(fits) * batch_size < now_bytes * fits
    return fits if is_gain else None


@final
class PinnedPool:
    """torch's pool of pinned blocks, without the memory.

    A freed block waits for a request of its own size for ever: `pool_bytes` never falls.

    Attributes:
        pool_bytes: All blocks, in use or free; what the process has pinned.
    """

    __slots__ = ("_free", "pool_bytes")

    def __init__(self) -> None:
        self._free: Counter[int] = Counter()
        self.pool_bytes = 0

    def take(self, size_bytes: int) -> int:
        """A block for a tensor; returns its size, to be given back with `put`."""
        block_bytes = round_pinned(size_bytes)
        if self._free[block_bytes] > 0:
            self._free[block_bytes] -= 1
        else:
            self.pool_bytes += block_bytes
        return block_bytes

    def put(self, block_bytes: int) -> None:
        """Give back what `take` has returned."""
        self._free[block_bytes] += 1


def estimate_pool_bytes(batches: Iterable[Sequence[int]], in_flight: int) -> int:
    """What the pool comes to when `batches` pass through it.

    Args:
        batches: For each batch the bytes of its tensors, in the order of delivery.
        in_flight: How many pinned batches are alive at once, the consumer's included.
    """
    pool = PinnedPool()
    alive: deque[list[int]] = deque()
    for sizes in batches:
        if len(alive) == max(1, in_flight):
            for block_bytes in alive.popleft():
                pool.put(block_bytes)
        alive.append([pool.take(size_bytes) for size_bytes in sizes])
    return pool.pool_bytes


def bound_pool_bytes(least_bytes: int, most_bytes: int, in_flight: int) -> int:
    """The plateau of the pool for tensors of any sizes from `least_bytes` to `most_bytes`.

    Sooner or later `in_flight` of them in a row have the same block size, for each of the
    block sizes in the range; from then on nothing new is pinned.
    """
    total, block_bytes = 0, round_pinned(max(1, least_bytes))
    while block_bytes <= round_pinned(most_bytes):
        total += block_bytes * in_flight
        block_bytes *= 2
    return total
