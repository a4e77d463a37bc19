"""Ready batches moved to disk, so that the next one to be delivered always has room.

Covers: writing a block's bytes to a private file and reading them back. Does not cover:
which batch goes (flow/scheduler.py).

The file is made on first use, in the system's temporary folder, and has no name: nobody
else can open it, and it goes with the process however that ends.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from forebay.transport.lease import Ready, Span

if TYPE_CHECKING:
    from forebay.transport.arena import Arena, Block


@final
@dataclass(frozen=True, slots=True)
class Spilled:
    """A batch that lies in the file.

    Attributes:
        head: As in `Ready`.
        spans: As in `Ready`, but counted from the start of the block.
        size_bytes: Of the block that it lay in.
        position: Where in the file it begins.
    """

    head: bytes
    spans: tuple[Span, ...]
    size_bytes: int
    position: int


@final
class SpillFile:
    """Where evicted batches lie. Called by the scheduler under its lock."""

    def __init__(self) -> None:
        self._fd = -1
        self._free: dict[int, list[int]] = {}  # size -> positions, as blocks come and go
        self._end = 0
        self.spilled_bytes = 0

    def write(self, ready: Ready, arena: Arena) -> Spilled:
        """Move a batch out of its block, which is free then.

        Raises:
            OSError: The disk is full or not writable; the batch stays where it is.
        """
        if self._fd < 0:
            self._fd = _open_unnamed()
        block = ready.block
        positions = self._free.get(block.capacity_bytes)
        position = positions.pop() if positions else self._end
        with memoryview(arena.mapping) as view:
            part = view[block.offset : block.offset + block.capacity_bytes]
            with part:
                _write_all(self._fd, part, position)
        self._end = max(self._end, position + block.capacity_bytes)
        spans = tuple((offset - block.offset, length) for offset, length in ready.spans)
        arena.drop(block)
        self.spilled_bytes += block.capacity_bytes
        return Spilled(ready.head, spans, block.capacity_bytes, position)

    def read(self, spilled: Spilled, block: Block, arena: Arena) -> Ready:
        """The batch again, in `block`."""
        with memoryview(arena.mapping) as view:
            part = view[block.offset : block.offset + spilled.size_bytes]
            with part:
                _read_all(self._fd, part, spilled.position)
        self.forget(spilled)
        spans = tuple((block.offset + offset, length) for offset, length in spilled.spans)
        return Ready(spilled.head, spans, block)

    def forget(self, spilled: Spilled) -> None:
        """Its place in the file may be used again."""
        self._free.setdefault(spilled.size_bytes, []).append(spilled.position)
        self.spilled_bytes -= spilled.size_bytes

    def close(self) -> None:
        """The file is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_unnamed() -> int:
    with tempfile.TemporaryFile(prefix="forebay-") as file:
        return os.dup(file.fileno())


def _write_all(fd: int, part: memoryview, position: int) -> None:
    done = 0
    while done < len(part):
        done += os.pwrite(fd, part[done:], position + done)


def _read_all(fd: int, part: memoryview, position: int) -> None:
    done = 0
    while done < len(part):
        got = os.preadv(fd, [part[done:]], position + done)
        if not got:
            message = f"the spill file ends {len(part) - done} bytes early"
            raise OSError(message)
        done += got
