"""The entries of a shared cache: one anonymous file that all processes fill and read.

Covers: where entries lie, how they are published, when one is refused. Does not cover: what
an entry means (cache.py).

The one idea: an entry is never changed, moved or freed. So a reader needs no lock: room is
given out, the bytes are written, and last of all the entry's place goes into the index; who
finds a place there finds a whole entry. A writer that is killed before leaves its room to the
next one that makes the same sample.

    | tail | least | ...  | tallies | index: a word a sample | entries ...             |
    |<----------------- mapped, the front ------------------>|<- read and written ---->|

Entries are read and written by system calls, not through a mapping. Writing so takes a third
of the time, since no page is faulted in and none is zeroed first. Reading so takes longer once
a mapping is warm (35 us, not 12, for 150 KB), and in return the store is no part of any worker's
resident memory, which people and schedulers add up; threads read at the same time; and what a
loader learns from its workers' page faults stays right.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from forebay.datasets.shared_file import TOKEN_BYTES, SharedFile
from forebay.datasets.tallies import SEATS, TALLY_WORDS, Tallies
from forebay.transport.codec import Encoded
from forebay.units import KIB, PAGE_BYTES, format_bytes, round_up_to_page

_log = logging.getLogger("forebay")

_WORD_BYTES = 8
_TAIL, _LEAST, _IS_FULL = range(3)
"""Words of the front: where free room begins, or 0 for the start; the least room given out;
whether it was logged that there is none left."""

_TALLY_START = 8
_INDEX_START = _TALLY_START + TALLY_WORDS

_PUBLISHED = 1
"""The lowest bit of an index word; without it, the place is room that waits to be written."""

_HITS, _MISSES = range(2)

_INDEX_STEP = 1 << 16

_ROOM = struct.Struct("<QQ")
"""Room begins with its length and the number of the sample that it was given to."""

_LEAD = struct.Struct("<QQ")
"""Then come the length of the head and how many buffers there are; a word with the length of
each; the head; the buffers."""

_FIRST_READ_BYTES = 4096
"""All but the buffers of the usual sample, and all of a small one, in one call."""

_SMALL_BYTES = 64 * KIB
"""Buffers up to here become a bytearray, which the codec builds small tensors from quickest;
a larger one would be zeroed first."""

_MOST_PARTS = 1024
"""The kernel's bound for one call (IOV_MAX)."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a `SharedCache` did and holds, over all processes.

    Attributes:
        hits: Samples read from the cache.
        misses: Samples that the dataset made.
        entries: Samples in the cache.
        store_bytes: What the cache takes in memory, its index included.
    """

    hits: int
    misses: int
    entries: int
    store_bytes: int


@final
class Store:
    """Entries by number, within a bound of bytes that counts everything, the index too.

    Any thread of any process may call anything. Where the file cannot be reached any more,
    nothing is found, stored or counted.

    Args:
        file: The front.
        samples: How many numbers there are, from 0.
        memory_bytes: The bound.
    """

    def __init__(self, file: SharedFile, samples: int, memory_bytes: int) -> None:
        self._file = file
        self._samples = samples
        self._memory_bytes = memory_bytes
        self._start = find_least_bytes(samples) - PAGE_BYTES
        self._end = memory_bytes // PAGE_BYTES * PAGE_BYTES
        self._words = file.view.cast("Q")
        self._index = self._words[_INDEX_START:]
        self._tallies = Tallies(self._words[_TALLY_START:_INDEX_START], file.locks)

    @classmethod
    def create(cls, samples: int, memory_bytes: int) -> Store:
        """An empty one, of `find_least_bytes(samples)` at least. Takes memory as it is filled."""
        return cls(SharedFile.create(_count_front_bytes(samples)), samples, memory_bytes)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return _attach, (self._file, self._samples, self._memory_bytes)

    def count_hit(self) -> None:
        """A sample was found."""
        if self._file.find_fd() >= 0:
            self._tallies.add(_HITS)

    def count_miss(self) -> None:
        """A sample was made."""
        if self._file.find_fd() >= 0:
            self._tallies.add(_MISSES)

    def read_stats(self) -> CacheStats:
        """Costs a look at every word of the index: 1 ms for a million samples."""
        fd = self._file.find_fd()
        return CacheStats(
            self._tallies.read(_HITS),
            self._tallies.read(_MISSES),
            self._count_entries(),
            os.fstat(fd).st_blocks * 512 if fd >= 0 else self._find_tail(),
        )

    def _count_entries(self) -> int:
        index = np.asarray(self._index)
        steps = range(0, len(index), _INDEX_STEP)
        return sum(int(np.count_nonzero(index[at : at + _INDEX_STEP] & 1)) for at in steps)

    # -- reading ------------------------------------------------------------------------------

    def try_read(self, number: int) -> tuple[bytes, list[Any]] | None:
        """A head and its buffers, which are the caller's own; None if there is no such entry."""
        word = self._index[number]
        fd = self._file.find_fd()
        if not word & _PUBLISHED or fd < 0:
            return None
        place = word - _PUBLISHED + _ROOM.size
        first: bytes | bytearray = os.pread(fd, _FIRST_READ_BYTES, place)
        head_bytes, count = _LEAD.unpack_from(first)
        head_start = _LEAD.size + count * _WORD_BYTES
        start = head_start + head_bytes
        if start > len(first):
            first = bytearray(start)
            _transfer(os.preadv, fd, [first], place)
        lengths = struct.unpack_from(f"<{count}Q", first, _LEAD.size)
        head = bytes(first[head_start:start])
        if start + sum(lengths) <= len(first):
            return head, _cut(first, start, lengths)
        buffers = [_make_buffer(length) for length in lengths]
        _transfer(os.preadv, fd, buffers, place + start)
        return head, buffers

    # -- writing ------------------------------------------------------------------------------

    def may_write(self, number: int) -> bool:
        """False if `try_write` would surely store nothing. Takes no lock."""
        word, least_bytes = self._index[number], self._words[_LEAST]
        if word & _PUBLISHED or self._file.find_fd() < 0:
            return False
        if word or self._find_tail() + least_bytes <= self._end:
            return True
        self._log_once_full(least_bytes)
        return False

    def try_write(self, number: int, encoded: Encoded) -> bool:
        """Store an entry, where `may_write`; False if there is one, or one begun, or no room.

        Raises:
            OSError: the kernel has no memory for it.
        """
        lengths = [buffer.nbytes for buffer in encoded.buffers]
        lead = _LEAD.pack(len(encoded.head), len(lengths))
        lead += struct.pack(f"<{len(lengths)}Q", *lengths)
        parts = [lead, encoded.head, *encoded.buffers]
        used_bytes = _ROOM.size + len(lead) + len(encoded.head) + sum(lengths)
        room_bytes = -(-used_bytes // _WORD_BYTES) * _WORD_BYTES
        locks = self._file.locks
        with locks.alone():
            place = self._try_reserve(number, room_bytes)
        if place is None:
            self._log_once_full(room_bytes)
            return False
        try:
            _transfer(os.pwritev, self._file.find_fd(), parts, place + _ROOM.size)
            with locks.alone():  # its system calls keep the next store behind all those before
                self._index[number] = place | _PUBLISHED
            return True
        finally:
            locks.release(SEATS + number)

    def _try_reserve(self, number: int, room_bytes: int) -> int | None:
        """The place of room for an entry, and the lock on its number; None without either."""
        word = self._index[number]
        if word & _PUBLISHED or not self._file.locks.try_hold(SEATS + number):
            return None
        with contextlib.ExitStack() as undo:
            undo.callback(self._file.locks.release, SEATS + number)
            place = self._recall(number, word, room_bytes) or self._give_out(number, room_bytes)
            if place is not None:
                undo.pop_all()
            return place

    def _recall(self, number: int, word: int, room_bytes: int) -> int | None:
        """Room that was given out for the same sample to a writer that never came to publish."""
        if not word:
            return None
        given_bytes, owner = _ROOM.unpack(os.pread(self._file.find_fd(), _ROOM.size, word))
        is_ours = owner == number and word + given_bytes <= self._find_tail()
        return word if is_ours and room_bytes <= given_bytes else None

    def _give_out(self, number: int, room_bytes: int) -> int | None:
        place = self._find_tail()
        if place + room_bytes > self._end:
            return None
        os.pwrite(self._file.find_fd(), _ROOM.pack(room_bytes, number), place)
        # In this order: killed before the tail has moved, we leave room that is still free, and
        # an index word that `_recall` will not believe.
        self._words[_LEAST] = min(self._words[_LEAST] or room_bytes, room_bytes)
        self._index[number] = place
        self._words[_TAIL] = place + room_bytes
        return place

    def _find_tail(self) -> int:
        return self._words[_TAIL] or self._start

    def _log_once_full(self, room_bytes: int) -> None:
        if self._words[_IS_FULL] or self._find_tail() + room_bytes <= self._end:
            return
        self._words[_IS_FULL] = 1
        text = "the shared cache of %s has no room for a sample of %s; %d of %d samples are in it"
        sizes = (format_bytes(self._memory_bytes), format_bytes(room_bytes))
        _log.info(text, *sizes, self._count_entries(), self._samples)


def find_least_bytes(samples: int) -> int:
    """The smallest bound for so many samples: the front, and a page for entries."""
    return round_up_to_page(_count_front_bytes(samples) + TOKEN_BYTES) + PAGE_BYTES


def _count_front_bytes(samples: int) -> int:
    return (_INDEX_START + samples) * _WORD_BYTES


def _attach(file: SharedFile | None, samples: int, memory_bytes: int) -> Store | None:
    """The store again, after pickling; None where its file cannot be reached."""
    if file is None:
        text = "process %d cannot reach the store of a shared cache: the dataset makes every sample"
        _log.warning(text, os.getpid())
        return None
    return Store(file, samples, memory_bytes)


# -- bytes ------------------------------------------------------------------------------------


def _make_buffer(length: int) -> Any:
    return bytearray(length) if length <= _SMALL_BYTES else np.empty(length, np.uint8)


def _cut(data: bytes | bytearray, start: int, lengths: Sequence[int]) -> list[Any]:
    """Buffers of `lengths`, one behind the other from `start` on."""
    starts = itertools.accumulate(lengths, initial=start)  # and the end, which zip leaves out
    return [bytearray(data[at : at + n]) for n, at in zip(lengths, starts, strict=False)]


def _transfer(call: Callable[..., int], fd: int, parts: Sequence[Any], place: int) -> None:
    """`os.preadv` or `os.pwritev`, however many calls it takes.

    Raises:
        OSError: the kernel refuses, or nothing is left to read.
    """
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        moved = call(fd, left[:_MOST_PARTS], place)
        if not moved:
            raise OSError(errno.EIO, "the shared file ends too early")
        place += moved
        done = 0
        while done < len(left) and moved >= len(left[done]):
            moved -= len(left[done])
            done += 1
        left = left[done:]
        if moved:
            left[0] = left[0][moved:]
