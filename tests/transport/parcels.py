"""Batches on their way in one process: taken apart, laid out, put together again.

Neighbours: `test_codec.py` and `test_recipe.py` look at what arrives, `test_lease.py` at what
becomes of the memory. The kinds of values are those of `tests/parity/batches.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.transport import codec
from forebay.transport.arena import Arena
from forebay.transport.codec import Encoded, decode, encode
from forebay.transport.lease import Draft, Lender, Ready
from forebay.workers.space import Mapping, Space, estimate_size


def lay_out(encoded: Encoded) -> list[object]:
    """The buffers in memory of their own, as `decode` is given them in the main process.

    Other memory is taken and written first: bytes that nobody keeps alive would be gone.
    """
    squatters = [np.full(buffer.nbytes, 0xA5, np.uint8) for buffer in encoded.buffers]
    buffers: list[object] = [bytearray(buffer.data) for buffer in encoded.buffers]
    del squatters
    return buffers


def carry(batch: object) -> Any:
    """`batch` as it arrives."""
    encoded = encode(batch)
    return decode(encoded.head, lay_out(encoded))


def carry_unknown(batch: object) -> Any:
    """The same by unpickling, whatever is known of its structure."""
    codec._recipes.clear()
    return carry(batch)


def shipped_bytes(batch: object) -> int:
    """What of `batch` travels as buffers."""
    return sum(buffer.nbytes for buffer in encode(batch).buffers)


def bring(space: Space, buffer: np.ndarray[Any, Any], *, pours: bool = False) -> Any:
    """Where `buffer` lies once it was copied in; None when it does not fit."""
    span = space.reserve(buffer)
    if span is not None:
        space.fill(span, buffer, pours=pours)
    return span


def seal(arena: Arena, batch: object) -> Ready:
    """`batch` as it waits in the arena, laid out as a worker does."""
    encoded = encode(batch)
    block = arena.place(estimate_size([buffer.nbytes for buffer in encoded.buffers]))
    assert block is not None
    space = Space(Mapping(arena.mapping), block.offset, block.capacity_bytes)
    spans = [bring(space, buffer) for buffer in encoded.buffers]
    used = space.used_bytes
    return Draft(block).seal(arena, encoded.head, [s for s in spans if s], used, used)


def deliver(arena: Arena, lender: Lender, batch: object) -> Any:
    """`batch` as the consumer gets it: large parts lent."""
    ready = seal(arena, batch)
    return decode(ready.head, lender.lend(ready))
