"""Anonymous shared memory that a dataset object can carry into any worker.

Covers: inheriting it by fork, and finding it again after pickling. Does not cover: what is in it.

The one idea: a pickle carries where the descriptor is (`/proc/<pid>/fd/<n>`) and what file it
must lead to, and no descriptor. So it works with any pickler at any time, and opening it leaves
nothing open: forebay's template would otherwise take a dataset that opens files for one that
must not be shared. It holds as long as the process that pickled it lives, which is the one that
waits for the batches.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from forebay.transport.pages import SharedPages


@dataclass(frozen=True, slots=True)
class Address:
    """Where a file can be found, and which it is."""

    pid: int
    fd: int
    device: int
    inode: int

    def find(self) -> str:
        """A path that leads to it.

        Raises:
            OSError: its process has ended, the system has no /proc, or it is another file.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        found = os.stat(path)
        if (found.st_dev, found.st_ino) != (self.device, self.inode):
            raise FileNotFoundError(f"process {self.pid} no longer has the shared file open")
        return path


@final
class SharedFile:
    """One mapping in as many processes as wish.

    Attributes:
        view: All its bytes, writable.
    """

    def __init__(self, view: memoryview, address: Address, fd: int) -> None:
        self.view = view
        self._address = address
        self._fd = fd
        self._guards: dict[int, threading.Lock] = {}
        if fd >= 0:
            weakref.finalize(self, os.close, fd).atexit = False
        _attached[address.device, address.inode] = self

    @classmethod
    def create(cls, length: int) -> SharedFile:
        """A new one of `length` zero bytes, none of which takes memory yet."""
        pages = SharedPages(length)
        status = os.fstat(pages.fd)
        address = Address(os.getpid(), pages.fd, status.st_dev, status.st_ino)
        return cls(memoryview(pages.mapping), address, pages.fd)

    def find_fd(self) -> int:
        """The descriptor in this process; -1 where it cannot be had any more."""
        if self._fd < 0:
            with contextlib.suppress(OSError):
                self._fd = os.open(self._address.find(), os.O_RDWR | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._fd).atexit = False
        return self._fd

    def guard(self) -> threading.Lock:
        """A lock among this process' threads. A fork does not inherit it: it may be held."""
        return self._guards.setdefault(os.getpid(), threading.Lock())

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        here = self._address
        if self._fd >= 0:
            here = Address(os.getpid(), self._fd, here.device, here.inode)
        return _attach, (here, len(self.view))


# A process never opens one file twice: the kernel drops a process' locks on a file when *any*
# descriptor of it is closed there.
_attached: weakref.WeakValueDictionary[tuple[int, int], SharedFile] = weakref.WeakValueDictionary()


def _attach(address: Address, length: int) -> SharedFile | None:
    """The file at `address`; None where it cannot be reached."""
    known = _attached.get((address.device, address.inode))
    if known is not None:
        return known
    try:
        path = address.find()
        # Not Python's mmap: it keeps a descriptor of its own for as long as it lives.
        flat = torch.from_file(path, shared=True, size=length, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
    return SharedFile(memoryview(flat.numpy()), address, -1)  # type: ignore[arg-type]
