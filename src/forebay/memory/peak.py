"""What one fetch needs beyond its result, measured inside the worker.

Covers: the high-water mark around one fetch, counts of page faults and of the interpreter's
blocks, and giving freed heap back.
Does not cover: what is learned from it (planner.py), or other processes (probe.py).

The one idea: the kernel keeps one high-water mark of all resident pages per
process and lets the process reset it. What the mark rose by, less the growth of
shared and file pages, is the anonymous memory that the fetch had at its peak:
the arena's own pages, and libraries loaded on first use, are not making cost.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from forebay.memory.kernel_files import parse_fields
from forebay.memory.readings import Making, Roots

_STATUS_BYTES = 8192
_RESET_PEAK = b"5"
_STATUS_CLOSED = "status cannot be read: peaks are not measured"
_CLEAR_REFS_CLOSED = "clear_refs is closed: peaks miss what a fetch freed again"


@dataclass(frozen=True, slots=True)
class _Descriptor:
    """An open descriptor and what it was opened on.

    After a fork, code of others may have closed the inherited number and the number
    may be theirs now; so it is only closed while it still shows the same file.
    """

    fd: int
    file_id: tuple[int, int]

    @classmethod
    def try_open(cls, path: Path, flags: int) -> _Descriptor | None:
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except OSError:
            return None
        return cls(fd, _identify(fd))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if _identify(self.fd) == self.file_id:
                os.close(self.fd)


def _identify(fd: int) -> tuple[int, int]:
    seen = os.fstat(fd)
    return seen.st_dev, seen.st_ino


_LINES = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")


@dataclass(frozen=True, slots=True)
class _Resident:
    """The lines of /proc/self/status that matter here, in the order of `_LINES`."""

    hwm_bytes: int
    rss_bytes: int
    anon_bytes: int
    file_bytes: int
    shmem_bytes: int


@final
class PeakMeter:
    """Measures the anonymous memory of what runs between `start` and `stop`.

    For use in the process that is measured, by one thread at a time. Survives a
    fork: descriptors belong to the process they were opened in (they go on showing
    the parent), so they are opened anew when the pid has changed.

    Where the mark cannot be reset (`clear_refs` closed, as under some sandboxes),
    the peak is the growth of RssAnon that is left at the end, which misses what was
    freed before; without /proc nothing is seen. `degraded` says so.

    The kernel keeps its counters per CPU and folds them in batches (64 pages a CPU on
    small machines, twice the number of CPUs on large ones), so a peak may be off by a
    MiB or so; this is no instrument for small objects.

    Cost: 37 us a fetch for `start` and `stop` together (2-core virtual machine), of
    which 2 x 7 us are the kernel printing `status` and 1 us is the reset; the kept
    descriptors save two opens, some 10 us each.
    """

    __slots__ = ("_clear", "_degraded", "_pid", "_roots", "_start", "_status")

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._pid = -1
        self._status: _Descriptor | None = None
        self._clear: _Descriptor | None = None
        self._degraded: str | None = None
        self._start: _Resident | None = None

    @property
    def degraded(self) -> str | None:
        """Why peaks are coarser than they should be; None when they are not."""
        return self._degraded

    def start(self) -> None:
        """Begin a measurement; one that was begun before is forgotten."""
        self._ensure_open()
        self._try_reset()
        self._start = self._read()

    def stop(self, poured_bytes: int = 0) -> Making:
        """What was needed since `start`.

        Args:
            poured_bytes: What was anonymous first and was moved to shared pages, piece by
                piece: those came when the peak was over, and are not taken off it.

        Raises:
            RuntimeError: `start` was not called in this process.
        """
        start, self._start = self._start, None
        if start is None or self._pid != os.getpid():
            msg = "PeakMeter.stop() without start() in this process; call start() before the fetch"
            raise RuntimeError(msg)
        now = self._read()
        grown_shmem = now.shmem_bytes - start.shmem_bytes
        before_peak = max(0, grown_shmem - poured_bytes)
        grown_file = now.file_bytes - start.file_bytes
        kept = now.anon_bytes - start.anon_bytes
        risen = now.hwm_bytes - start.rss_bytes if self._clear else 0
        # Pages that went (the arena gave some back meanwhile) must not count as making:
        # a phantom giant would stop the loader, while a blur is only a blur.
        risen -= before_peak + max(0, grown_file)
        blur = abs(grown_shmem) + abs(grown_file) if self._clear else 0
        return Making(max(0, risen, kept), now.anon_bytes, blur)

    def read_private_bytes(self) -> int:
        """Anonymous resident bytes now, as in `Making.private_bytes`."""
        self._ensure_open()
        return self._read().anon_bytes

    def close(self) -> None:
        """Close the descriptors; a later `start` opens them again."""
        for descriptor in (self._status, self._clear):
            if descriptor is not None:
                descriptor.close()
        self._pid, self._status, self._clear = -1, None, None

    def _ensure_open(self) -> None:
        if self._pid == os.getpid():
            return
        self.close()
        self._pid = os.getpid()
        self._status = _Descriptor.try_open(self._roots.proc / "self/status", os.O_RDONLY)
        self._clear = _Descriptor.try_open(self._roots.proc / "self/clear_refs", os.O_WRONLY)
        if self._status is None:
            self._degraded = _STATUS_CLOSED
        elif self._clear is None:
            self._degraded = _CLEAR_REFS_CLOSED

    def _try_reset(self) -> None:
        if self._clear is None:
            return
        try:
            os.write(self._clear.fd, _RESET_PEAK)
        except OSError:
            self._clear.close()
            self._clear = None
            self._degraded = _CLEAR_REFS_CLOSED

    def _read(self) -> _Resident:
        try:
            text = os.pread(self._status.fd, _STATUS_BYTES, 0) if self._status else b""
        except OSError:
            text = b""
        if not text:
            self._degraded = _STATUS_CLOSED
        fields = parse_fields(text.decode("ascii", errors="replace"), _LINES)
        return _Resident(*(fields.get(name, 0) for name in _LINES))


_SHARED_LEAST_BYTES = 256 * 1024
"""Smaller blocks are not worth two reads of `statm` (3 us each): 64 faults at most."""

_STATM_BYTES = 256


@final
class FaultMeter:
    """Counts the page faults of this process that brought anonymous memory.

    A worker that writes to a block for the first time, or again after its pages went back,
    has a fault for each page of it, and grows by none: the pages are the arena's. What its
    resident shared memory rises by during a fetch is taken off.

    For use in the process that is measured, by one thread at a time. Survives a fork.
    """

    __slots__ = ("_others", "_pid", "_roots", "_seen", "_shared", "_statm")

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._pid = -1
        self._statm: _Descriptor | None = None
        self._shared: int | None = None
        self._others = 0
        self._seen = 0

    def start(self, block_bytes: int) -> None:
        """A fetch begins that will write about so much; 0 when that is not known."""
        is_small = 0 < block_bytes < _SHARED_LEAST_BYTES
        self._shared = None if is_small else self._read_shared_pages()

    def stop(self) -> int:
        """Such faults since the process began; 0 where faults are not told."""
        faults = read_faults()
        if self._shared is not None:
            risen = self._read_shared_pages() - self._shared
            self._others += min(max(0, risen), faults - self._seen)
            self._shared = None
        self._seen = faults
        return faults - self._others

    def close(self) -> None:
        """Close the descriptor; a later `start` opens it again."""
        if self._statm is not None:
            self._statm.close()
        self._pid, self._statm = -1, None

    def _read_shared_pages(self) -> int:
        if self._pid != os.getpid():
            self.close()
            self._pid = os.getpid()
            self._statm = _Descriptor.try_open(self._roots.proc / "self/statm", os.O_RDONLY)
        if self._statm is None:
            return 0
        try:
            return int(os.pread(self._statm.fd, _STATM_BYTES, 0).split()[2])
        except (OSError, IndexError, ValueError):
            return 0


_COUNT_SHARE = 200
"""Between two counts of blocks lies two hundred times what one takes: 0.5 % of a core. Counting
walks the arenas of the allocator: 35 us for what importing torch makes, 300 us for 3 million."""


_FIRST_SHARE = 10
"""The same after the first count, which walks memory that is in no cache, and is no measure."""

_EAGER_COUNTS = 40
_EAGER_MOST_S = 0.003
"""So many first counts are made whenever asked for, unless one takes longer than that: growth is
to be told of quick batches, too."""


@final
class BlockCounter:
    """Counts the interpreter's memory blocks that are in use, as often as that is cheap.

    Garbage is collected first, where the collector is on: free lists and cycles count as in use
    and come and go by hundreds. In a worker that writes to young objects alone, since all that
    were there at the fork are frozen.
    """

    def __init__(self) -> None:
        self._due_s = 0.0
        self._cost_s: float | None = None
        self._eager = _EAGER_COUNTS
        self._count = getattr(sys, "getallocatedblocks", None)  # CPython has it

    def count(self) -> int:
        """Blocks that are in use; -1 where it is not time, or nobody counts."""
        began_s = time.monotonic()
        if self._count is None or began_s < self._due_s:
            return -1
        if gc.isenabled():
            gc.collect()
        blocks: int = self._count()
        now_s = time.monotonic()
        took_s = now_s - began_s
        if self._cost_s is None:
            self._due_s = now_s + _FIRST_SHARE * took_s
        else:
            took_s = min(self._cost_s, took_s)
            self._eager -= 1
            if self._eager < 0 or took_s > _EAGER_MOST_S:
                self._due_s = now_s + _COUNT_SHARE * took_s
        self._cost_s = took_s
        return blocks


def read_faults() -> int:
    """Minor page faults of this process so far; 0 where that is not told. Costs 1 us."""
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def trim_heap() -> None:
    """Give memory that the C allocator keeps for later back to the system.

    glibc only; elsewhere nothing happens. Any thread may call; other threads wait
    for the allocator meanwhile. Costs from some microseconds to some milliseconds,
    by how much there is to give back.
    """
    trim = _find_malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _find_malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    # musl has no such function, and a static interpreter may have no loader.
    with contextlib.suppress(OSError, AttributeError):
        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
        return trim
    return None
