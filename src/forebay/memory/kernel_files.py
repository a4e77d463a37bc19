"""Reading the small text files of /proc and /sys, where each may be missing.

Covers: one read of one file; telling "not there" from "closed to us"; keeping
the short reasons why something could not be read.
Does not cover: what the files mean (probe.py, cgroup.py, peak.py).

The one idea: nothing here raises for the state of the machine. A file that is
absent is None; a file that is closed or makes no sense is None as well and its
reason joins `degraded`, once, so that the loader can go on and say so.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import final

_CHUNK_BYTES = 64 * 1024
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ENODEV})
_MOST_DIGITS = 20
"""2 to the 64th has 20; Python refuses to read some thousands, which garbage may hold."""


@final
class KernelFiles:
    """Reads small files and remembers, in a few words each, what was closed.

    `degraded` only grows, and is bounded: its reasons name files, never processes.
    Any thread may call; a set of strings is all the state there is.
    """

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    @property
    def degraded(self) -> frozenset[str]:
        """The reasons so far why readings are missing or coarser than they should be."""
        return frozenset(self._reasons)

    def note(self, reason: str) -> None:
        """Keep `reason`; a second time is no news."""
        self._reasons.add(reason)

    def read(self, path: Path | str) -> str | None:
        """The text of `path`; None when it is absent, or closed (then noted)."""
        try:
            return self._read(path)
        except OSError as error:
            if error.errno not in _ABSENT:
                name = os.path.basename(path)  # noqa: PTH119 - mostly strings, read often
                self.note(f"{name} cannot be read: {os.strerror(error.errno or 0)}")
            return None

    def read_int(self, path: Path | str) -> int | None:
        """The one number in `path`; None when absent, closed or not a number (noted)."""
        text = self.read(path)
        if text is None:
            return None
        number = parse_int(text)
        if number is None:
            self.note(f"{os.path.basename(path)} is not a number")  # noqa: PTH119
        return number

    def read_count(self, path: Path | str) -> int | None:
        """As `read_int`, of what cannot be below 0."""
        number = self.read_int(path)
        if number is not None and number < 0:
            self.note(f"{os.path.basename(path)} is below 0")  # noqa: PTH119
            return None
        return number

    def read_fields(self, path: Path | str, *names: str) -> dict[str, int]:
        """The numbers behind `names` in `path` (kB becomes bytes); empty when absent."""
        return parse_fields(self.read(path) or "", names)

    @staticmethod
    def _read(path: Path | str) -> str:
        # os.open and not Path.read_text: the controller does this 20 times a second,
        # and the decoder and buffer of a text file cost more than the kernel's part.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            chunks = []
            while chunk := os.read(fd, _CHUNK_BYTES):
                chunks.append(chunk)
        finally:
            os.close(fd)
        # Numbers are ASCII, but the name of a group may be anything, and is a path again.
        return b"".join(chunks).decode(errors="surrogateescape")


def parse_int(text: str) -> int | None:
    """The one whole number in `text`, None when it is something else.

    Everything printed by the kernel is shorter than `_MOST_DIGITS`.
    """
    digits = text.strip()
    if digits.removeprefix("-").isdecimal() and len(digits) <= _MOST_DIGITS:
        return int(digits)
    return None


def parse_fields(text: str, names: Iterable[str]) -> dict[str, int]:
    """The numbers behind `names` in `name: value [kB]` lines; kB becomes bytes.

    A name that is not there, or has something else than a number, is left out. Looks
    for the names wanted instead of taking all lines apart: memory.stat has 40 lines
    of which 5 matter (measured: 20 us for all lines, 5 us so).
    """
    found = {}
    text = f"\n{text}"
    for name in names:
        start = max(text.find(f"\n{name}:"), text.find(f"\n{name} "))
        if start < 0:
            continue
        begin = start + len(name) + 2
        words = text[begin : _end_of_line(text, begin)].split()
        if words and words[0].isdecimal():
            found[name] = int(words[0][:_MOST_DIGITS]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _end_of_line(text: str, begin: int) -> int:
    end = text.find("\n", begin)
    return len(text) if end < 0 else end
