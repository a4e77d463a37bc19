"""Memory that grows by appending, without ever being copied.

Covers: a buffer whose length nobody knows beforehand. Does not cover: what is in it
(packed.py).

The one idea: a private mapping that the kernel moves in its page tables (`mremap`) when it
must grow. Doubling by a copy would hold old and new at once, and it is at such a moment that
tables of annotations meet their limit. Nothing of it lies on the heap, so that no Python
object shares a page with it: after a fork, reading it copies nothing.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import final

from forebay.units import KIB

_FIRST_BYTES = 64 * KIB
_SETTLE_BYTES = 64 * KIB
"""Small pieces are gathered on the heap up to here: a write to the mapping costs a call."""

_GROWTH = 1.25
"""Addresses only: pages beyond the end are never touched."""


@final
class GrowingBuffer:
    """Bytes appended to a mapping.

    Attributes:
        fresh: The newest bytes. Append to it, or cut off what was appended since the last
            `settle`; nothing else.
    """

    __slots__ = ("_map", "_settled_bytes", "fresh")

    def __init__(self) -> None:
        self.fresh = bytearray()
        self._map = _open_private(_FIRST_BYTES)
        self._settled_bytes = 0

    def __len__(self) -> int:
        return self._settled_bytes + len(self.fresh)

    def settle(self) -> None:
        """Move what is fresh to its place, if it is much. Between two records only."""
        if len(self.fresh) >= _SETTLE_BYTES:
            self._move()

    def finish(self) -> memoryview | mmap.mmap:
        """All bytes; at least as many as were appended, the rest of the last page is zero."""
        self._move()
        if not self._settled_bytes:
            self._map.close()
            return memoryview(b"")
        pages = -(-self._settled_bytes // mmap.PAGESIZE)
        if pages * mmap.PAGESIZE < len(self._map):
            with contextlib.suppress(OSError, SystemError, ValueError):  # addresses, no memory
                self._map.resize(pages * mmap.PAGESIZE)
        return self._map

    def _move(self) -> None:
        end = self._settled_bytes + len(self.fresh)
        if end > len(self._map):
            pages = -(-max(end, int(len(self._map) * _GROWTH)) // mmap.PAGESIZE)
            self._grow(pages * mmap.PAGESIZE)
        self._map[self._settled_bytes : end] = self.fresh
        self._settled_bytes = end
        self.fresh.clear()

    def _grow(self, length: int) -> None:
        try:
            self._map.resize(length)
        except (OSError, SystemError, ValueError):
            # No mremap on this system (macOS): here old and new do coexist for a moment.
            larger = _open_private(length)
            larger[: self._settled_bytes] = memoryview(self._map)[: self._settled_bytes]
            self._map = larger


def _open_private(length: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, length)
