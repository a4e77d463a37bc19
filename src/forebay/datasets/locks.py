"""Locks among the threads and processes that share a file.

Covers: being alone for a moment, and holding one of many numbers for longer. Does not cover:
what they protect.

The one idea: record locks of the kernel's (`fcntl`). A process that is killed, whenever that
is, loses its own at once, so nobody ever waits for the dead. They belong to processes; among
the threads of one, ordinary locks decide first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from typing import final

_ALONE = 0
"""The byte that stands for it. Record locks need no bytes of the file to be there."""


@final
class FileLocks:
    """The locks of one file.

    Args:
        find_fd: Gives its descriptor in this process; nothing may be called where there is none.
    """

    def __init__(self, find_fd: Callable[[], int]) -> None:
        self._find_fd = find_fd
        self._processes: dict[int, _Process] = {}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Alone among all threads and processes. For a few instructions; not reentrant."""
        with self._here().turn:
            fd = self._find_fd()
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX, 1, _ALONE)
                yield
            finally:  # also after an interrupt right behind the call; freeing none is no error
                fcntl.lockf(fd, fcntl.LOCK_UN, 1, _ALONE)

    def try_hold(self, number: int) -> bool:
        """Hold `number`, from 0, until `release` or the process' end; False if it is held."""
        here = self._here()
        with here.guard:
            if number in here.held:
                return False
            try:
                fcntl.lockf(self._find_fd(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte_of(number))
            except (BlockingIOError, PermissionError):  # systems differ in which it is
                return False
            here.held.add(number)
            return True

    def release(self, number: int) -> None:
        """Undo `try_hold`."""
        here = self._here()
        with here.guard:
            here.held.discard(number)
            fcntl.lockf(self._find_fd(), fcntl.LOCK_UN, 1, _byte_of(number))

    def _here(self) -> _Process:
        # A fork inherits no record lock, but it does inherit Python's, perhaps held.
        pid = os.getpid()
        return self._processes.get(pid) or self._processes.setdefault(pid, _Process())


@final
class _Process:
    """What the threads of one process agree on.

    `turn` is for `alone`, and is taken with nothing else held; `guard` is for `held`.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.guard = threading.Lock()
        self.held: set[int] = set()


def _byte_of(number: int) -> int:
    return _ALONE + 1 + number
