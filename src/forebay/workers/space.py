"""A worker's side of one draft: writing into a block that main placed.

Covers: handing out parts of the block, and bringing a finished batch's buffers into it.
Does not cover: getting a larger block when it is too small (worker.py asks main).
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, final

import numpy as np
import torch

from forebay.transport.lease import SMALL_BYTES, Span
from forebay.units import round_up_to_page

_ALIGN_BYTES = 64
"""A cache line, to which torch's own allocator aligns too."""


@final
class Mapping:
    """The arena as a worker sees it: its address and its bytes."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        # Kept: while it lives nobody can unmap what a worker thread may still write to.
        self._anchor = torch.frombuffer(mapping, dtype=torch.uint8, count=1)
        self.address = self._anchor.data_ptr()

    def tensor(self, offset: int, length: int) -> torch.Tensor:
        """`length` bytes at `offset`, flat, as a storage of their own."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=length, offset=offset)

    def elements(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements at `offset`, flat."""
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset)


@final
class Space:
    """One draft: `capacity_bytes` at `offset`, filled from the front.

    Attributes:
        used_bytes: How far parts were handed out, and so how far it may be written.
    """

    def __init__(self, mapping: Mapping, offset: int, capacity_bytes: int) -> None:
        self._mapping = mapping
        self._offset = offset
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0

    def take(self, length: int) -> torch.Tensor | None:
        """The next `length` bytes, flat uint8; None when they do not fit."""
        start = next_start(self.used_bytes, length)
        if start + length > self.capacity_bytes:
            return None
        self.used_bytes = start + length
        return self._mapping.tensor(self._offset + start, length)

    def look_at(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements at `offset` of the block, flat."""
        return self._mapping.elements(self._offset + offset, count, dtype)

    def note_used(self, end: int) -> None:
        """Everything up to `end` is taken; main has made room for it.

        Raises:
            ValueError: It has not.
        """
        if end > self.capacity_bytes:
            message = f"{end} bytes do not fit into a block of {self.capacity_bytes}"
            raise ValueError(message)
        self.used_bytes = end

    def locate(self, offset: int) -> int:
        """Where in the arena a part at `offset` of the block is."""
        return self._offset + offset

    def bring(self, buffer: np.ndarray[Any, Any]) -> Span | None:
        """The span of `buffer` within the arena: copied there unless it lies there already."""
        address = buffer.ctypes.data
        at = address - self._mapping.address - self._offset
        if at >= 0 and at + buffer.nbytes <= self.used_bytes:
            return self._offset + at, buffer.nbytes
        start = next_start(self.used_bytes, buffer.nbytes)
        if start + buffer.nbytes > self.capacity_bytes:
            return None
        self.used_bytes = start + buffer.nbytes
        if buffer.nbytes:
            ctypes.memmove(self._mapping.address + self._offset + start, address, buffer.nbytes)
        return self._offset + start, buffer.nbytes


def next_start(used: int, length: int) -> int:
    """Where a part begins: leased ones on a page, small ones on a cache line."""
    if length > SMALL_BYTES:
        return round_up_to_page(used)
    return -(-used // _ALIGN_BYTES) * _ALIGN_BYTES


def estimate_size(lengths: list[int]) -> int:
    """Bytes that parts of these lengths take, one after the other."""
    used = 0
    for length in lengths:
        used = next_start(used, length) + length
    return used
