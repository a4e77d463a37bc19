"""Anonymous shared memory that a dataset object can carry into any worker.

Covers: inheriting it by fork, finding it again after pickling, its descriptor and its locks.
Does not cover: what is in it.

The one idea: a pickle carries where the descriptor is (`/proc/<pid>/fd/<n>`) and what file it
must lead to, and no descriptor. So it works with any pickler at any time, and opening it leaves
nothing open: forebay's template would otherwise take a dataset that opens files for one that
must not be shared. It holds as long as the process that pickled it lives, which is the one that
waits for the batches. Numbers of processes, descriptors and files come again, after a restart of
the machine even in the same order, and a pickle may be loaded then: so the file also ends in a
token that no other file has, and must belong to the user who made it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from forebay.datasets.locks import FileLocks
from forebay.transport.pages import SharedPages

TOKEN_BYTES = 16
"""What a file takes beside its length."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a file can be found, and which it is."""

    pid: int
    fd: int
    device: int
    inode: int
    owner: int
    token: bytes

    def find(self) -> str:
        """A path that leads to it, as far as can be told without opening it.

        Raises:
            OSError: its process has ended, the system has no /proc, or it is another file.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        found = os.stat(path)
        if (found.st_dev, found.st_ino, found.st_uid) != (self.device, self.inode, self.owner):
            raise FileNotFoundError(f"process {self.pid} no longer has the shared file open")
        return path


@final
class _Descriptor:
    """The one descriptor of a file in this process, and in those forked from it.

    A process never opens one file twice: the kernel drops a process' locks on a file when
    *any* descriptor of it is closed there.
    """

    def __init__(self, address: Address, fd: int) -> None:
        self._address = address
        self._fd = fd
        if fd >= 0:
            self._close_with_this()

    def find(self) -> int:
        """Its number, opened if need be; -1 where it cannot be had any more."""
        if self._fd < 0:
            # Two threads may both come here: then there are two until both are closed, at once.
            with contextlib.suppress(OSError):
                self._fd = os.open(self._address.find(), os.O_RDWR | os.O_CLOEXEC)
                self._close_with_this()
        return self._fd

    def locate(self) -> Address:
        """Where others find the file as long as this process lives, if it has it open."""
        if self._fd < 0:
            return self._address
        return replace(self._address, pid=os.getpid(), fd=self._fd)

    def _close_with_this(self) -> None:
        weakref.finalize(self, os.close, self._fd).atexit = False


@final
class SharedFile:
    """One mapping in as many processes as wish.

    Attributes:
        view: All its bytes, writable.
        locks: Locks among all who have it. They need the descriptor (`find_fd`).
    """

    def __init__(self, everything: memoryview, address: Address, fd: int) -> None:
        self.view = everything[:-TOKEN_BYTES]
        self._descriptor = _Descriptor(address, fd)
        self.locks = FileLocks(self._descriptor.find)
        _attached[address.token] = self

    @classmethod
    def create(cls, length: int) -> SharedFile:
        """A new one of `length` zero bytes, hardly any of which take memory yet."""
        pages = SharedPages(length + TOKEN_BYTES)
        everything = memoryview(pages.mapping)
        token = os.urandom(TOKEN_BYTES)
        everything[length:] = token
        status = os.fstat(pages.fd)
        place = (status.st_dev, status.st_ino, status.st_uid)
        return cls(everything, Address(os.getpid(), pages.fd, *place, token), pages.fd)

    def find_fd(self) -> int:
        """The descriptor in this process; -1 where it cannot be had any more."""
        return self._descriptor.find()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return _attach, (self._descriptor.locate(), len(self.view))


_attached: weakref.WeakValueDictionary[bytes, SharedFile] = weakref.WeakValueDictionary()


def _attach(address: Address, length: int) -> SharedFile | None:
    """The file at `address`; None where it cannot be reached."""
    known = _attached.get(address.token)
    if known is not None:
        return known
    size = length + TOKEN_BYTES
    try:
        path = address.find()
        # Not Python's mmap: it keeps a descriptor of its own for as long as it lives.
        flat = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
    everything = memoryview(flat.numpy())  # type: ignore[arg-type]
    return SharedFile(everything, address, -1) if everything[length:] == address.token else None
