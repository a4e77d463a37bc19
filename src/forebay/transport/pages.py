"""What an arena's addresses are backed by: memory shared with processes, or this one's own.

Covers: making the mapping, giving pages back to the kernel, counting those that are there.
Does not cover: who uses which part (arena.py).

Worker processes need shared memory. Worker threads do not, and private memory is better
where it serves: the kernel backs it with huge pages (one fault for 2 MiB instead of 512),
which most systems refuse to shared memory (`shmem_enabled` is `never`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from typing import Any, final

from forebay.units import MIB, PAGE_BYTES

HUGE_BYTES = 2 * MIB
"""A huge page of x86-64, and of arm64 with pages of 4 KiB."""

_KNOWN_MACHINES = {"x86_64", "aarch64", "riscv64"}
_MAP_NORESERVE: int = getattr(
    mmap,
    "MAP_NORESERVE",  # Python 3.13; the kernel's number, which some machines have their own of
    0x4000 if sys.platform == "linux" and platform.machine() in _KNOWN_MACHINES else 0,
)
"""Without it the kernel refuses private addresses in bulk, although nobody touches them."""


@final
class SharedPages:
    """Anonymous shared memory: a memfd, or what the platform has instead.

    Args:
        reserve_bytes: Its length, a multiple of the page size.
    """

    grain_bytes = PAGE_BYTES
    """What is given back begins and ends at multiples of this, as far as possible."""

    can_give_back = hasattr(mmap, "MADV_REMOVE")

    def __init__(self, reserve_bytes: int) -> None:
        self.fd = _open_anonymous_file(reserve_bytes)
        self.mapping = mmap.mmap(self.fd, reserve_bytes)

    def read_resident_bytes(self, _reach_bytes: int, _touched_bytes: int) -> int:
        """Exact, from the file's own count of its pages."""
        return os.fstat(self.fd).st_blocks * 512

    def expect(self, offset: int, length: int) -> None:
        """A part that was never touched is about to be written."""

    def give_back(self, offset: int, length: int) -> None:
        """Return a part's pages to the kernel; it reads as zeros then."""
        self.mapping.madvise(mmap.MADV_REMOVE, offset, length)

    def close(self) -> None:
        """Let go of it. Views that consumers hold keep the mapping alive until they die."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):  # views are alive: it goes when the last one does
            self.mapping.close()


@final
class PrivatePages:
    """Anonymous memory of this process, huge pages where a part is large enough.

    A huge page is asked for only within a part that is written at once, so that what is
    resident is what was placed: asked for everywhere, the first byte would bring 2 MiB.

    Args:
        reserve_bytes: Its length, a multiple of the page size.
    """

    grain_bytes = HUGE_BYTES
    can_give_back = hasattr(mmap, "MADV_DONTNEED")
    fd = -1

    def __init__(self, reserve_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.mapping = mmap.mmap(-1, reserve_bytes, flags=flags)
        anchor = ctypes.c_char.from_buffer(self.mapping)
        self._address = ctypes.addressof(anchor)

    def read_resident_bytes(self, reach_bytes: int, touched_bytes: int) -> int:
        """Pages that are there, by the kernel's word.

        Args:
            reach_bytes: Nothing beyond was ever touched.
            touched_bytes: The answer where the kernel does not tell.
        """
        count = _count_resident(self._address, reach_bytes)
        return touched_bytes if count is None else count * mmap.PAGESIZE

    def expect(self, offset: int, length: int) -> None:
        """A part that was never touched is about to be written: ask for huge pages there."""
        if length < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        start = -(-(self._address + offset) // HUGE_BYTES) * HUGE_BYTES - self._address
        end = (self._address + offset + length) // HUGE_BYTES * HUGE_BYTES - self._address
        if end > start:
            with contextlib.suppress(OSError):  # a kernel built without them
                self.mapping.madvise(mmap.MADV_HUGEPAGE, start, end - start)

    def give_back(self, offset: int, length: int) -> None:
        """Return a part's pages to the kernel; it reads as zeros then."""
        self.mapping.madvise(mmap.MADV_DONTNEED, offset, length)
        if length >= HUGE_BYTES and hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # until a large part is placed here again
                self.mapping.madvise(mmap.MADV_NOHUGEPAGE, offset, length)

    def close(self) -> None:
        """Let go of it. Views that consumers hold keep the mapping alive until they die."""
        with contextlib.suppress(BufferError):
            self.mapping.close()


def open_pages(reserve_bytes: int, *, is_private: bool) -> SharedPages | PrivatePages:
    """What the workers of one loader can all write to."""
    if is_private:
        # A system that promises no memory it does not have refuses private addresses in bulk.
        with contextlib.suppress(OSError):
            return PrivatePages(reserve_bytes)
    return SharedPages(reserve_bytes)


def _open_anonymous_file(length: int) -> int:
    """A descriptor of `length` bytes of shared memory that no name leads to."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("forebay", os.MFD_CLOEXEC)
    else:
        # No memfd (macOS): an unlinked private file serves behind the same interface.
        with tempfile.NamedTemporaryFile(prefix="forebay-") as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, length)
    except OSError:
        os.close(fd)
        raise
    return fd


def _count_resident(address: int, length_bytes: int) -> int | None:
    """Pages of a range that are in memory; None where the kernel does not say."""
    mincore = _find_mincore()
    if mincore is None or not length_bytes:
        return None if mincore is None else 0
    pages = -(-length_bytes // mmap.PAGESIZE)
    seen = bytearray(pages)
    vector = (ctypes.c_char * pages).from_buffer(seen)
    if mincore(address, length_bytes, vector):
        return None
    return seen.count(1)


@functools.cache
def _find_mincore() -> Callable[[int, int, Any], int] | None:
    with contextlib.suppress(OSError, AttributeError):
        mincore = ctypes.CDLL(None).mincore
        mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
        mincore.restype = ctypes.c_int
        return mincore
    return None
