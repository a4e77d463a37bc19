"""Where a worker is in its code, told without its help.

Covers: a worker's offer to write its Python stacks, and taking it up from main. Does not
cover: when that is wanted (flow/stall.py).

The one idea: `faulthandler` writes the stacks from a signal handler, so a worker that is stuck
in C code, or waits for a lock that nobody will release, still answers. It writes to a file
without a name, which main finds among the worker's descriptors: no message has to be read.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

_NAME = "forebay-stack"

_OFFSET = 7
"""From the first real-time signal: libraries that use one take the first few."""

_ANSWER_S = 1.0
"""Longest wait for an answer; it takes a millisecond."""

_STEP_S = 0.01

_MOST_CHARS = 4000
"""Of a stack: some 40 frames."""


def offer_stack() -> None:
    """For a worker: write all stacks when main asks for it. Takes no memory until then."""
    number = _find_signal()
    if number is None or signal.getsignal(number) is not signal.SIG_DFL:
        return  # the user's code has it
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        faulthandler.register(number, file=fd, all_threads=True, chain=False)


def read_stack(pid: int) -> str:
    """The Python stacks of worker `pid`, innermost frame first; empty if it does not answer."""
    number, fd = _find_signal(), -1
    try:
        if number is None or not _catches(pid, number):
            return ""  # it would end it
        path = _find_file(pid)
        if path is None:
            return ""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        begin = os.fstat(fd).st_size
        os.kill(pid, number)
        return _read_settled(fd, begin)
    except OSError:  # it has just ended
        return ""
    finally:
        if fd >= 0:
            os.close(fd)


def read_thread_stack(name: str) -> str:
    """The Python stack of a thread of this process, innermost frame first."""
    for thread in threading.enumerate():
        frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - there is no other way
        if thread.name == name and frame is not None:
            lines = reversed(traceback.format_stack(frame))
            return "".join(lines)[:_MOST_CHARS].rstrip()
    return ""


def _find_signal() -> int | None:
    if not hasattr(signal, "SIGRTMIN") or not hasattr(os, "memfd_create"):
        return None
    return int(signal.SIGRTMIN) + _OFFSET


def _catches(pid: int, number: int) -> bool:
    for line in (
        Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").split("\n")
    ):
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _find_file(pid: int) -> str | None:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME}"):
                return f"{folder}/{name}"
    return None


def _read_settled(fd: int, begin: int) -> str:
    """What was written from `begin` on, once no more comes."""
    until, size = time.monotonic() + _ANSWER_S, begin
    while time.monotonic() < until:
        time.sleep(_STEP_S)
        before, size = size, os.fstat(fd).st_size
        if begin < size == before:
            break
    text = os.pread(fd, _MOST_CHARS, begin).decode(errors="replace")
    return text.rpartition("\n")[0] if size > begin + _MOST_CHARS else text.rstrip()
