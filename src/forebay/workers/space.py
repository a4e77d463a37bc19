"""A worker's side of one draft: writing into a block that main placed.

Covers: handing out parts of the block, and bringing a finished batch's buffers into it.
Does not cover: getting a larger block when it is too small (worker.py asks main).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch

from forebay.transport.lease import SMALL_BYTES, Span
from forebay.units import MIB, PAGE_BYTES, round_up_to_page

_ALIGN_BYTES = 64
"""A cache line, to which torch's own allocator aligns too."""

POUR_LEAST_BYTES = 16 * MIB
"""Buffers from here on are worth giving up while they are copied. Below, the allocator would
hand the same pages out for the next batch, without a fault for each; from 32 MiB on (glibc's
highest threshold) it never does."""

_PIECE_BYTES = 4 * MIB
"""What a poured buffer takes twice at most."""

_DONTNEED = 4  # MADV_DONTNEED


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

    def reserve(self, buffer: np.ndarray[Any, Any]) -> Span | None:
        """The span that `buffer` will have: where it lies, if that is in this block already.

        None when it does not fit.
        """
        at = buffer.ctypes.data - self._mapping.address - self._offset
        if at >= 0 and at + buffer.nbytes <= self.used_bytes:
            return self._offset + at, buffer.nbytes
        start = next_start(self.used_bytes, buffer.nbytes)
        if start + buffer.nbytes > self.capacity_bytes:
            return None
        self.used_bytes = start + buffer.nbytes
        return self._offset + start, buffer.nbytes

    def fill(self, span: Span, buffer: np.ndarray[Any, Any], *, pours: bool) -> None:
        """Copy `buffer` to its span, unless it lies there already.

        Args:
            span: As `reserve` gave it.
            buffer: What to copy.
            pours: Whether it is given up piece by piece, so that it never takes its memory
                twice. Only for memory that nobody will look at again.
        """
        source, target = buffer.ctypes.data, self._mapping.address + span[0]
        if source == target or not buffer.nbytes:
            return
        if pours:
            _pour(target, source, buffer.nbytes)
        else:
            ctypes.memmove(target, source, buffer.nbytes)


def _pour(target: int, source: int, length: int) -> None:
    """Copy a private buffer, and give its pages back to the kernel on the way."""
    madvise = _find_madvise()
    given = round_up_to_page(source)
    for start in range(0, length, _PIECE_BYTES):
        end = min(length, start + _PIECE_BYTES)
        ctypes.memmove(target + start, source + start, end - start)
        # Whole pages only: the allocator's own words lie before and behind the buffer.
        done = (source + end) // PAGE_BYTES * PAGE_BYTES
        if madvise is not None and done > given:
            madvise(given, done - given, _DONTNEED)
            given = done


@functools.cache
def _find_madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None  # elsewhere the advice leaves pages, or their contents, as they are
    with contextlib.suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise.restype = ctypes.c_int
        return madvise
    return None


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
