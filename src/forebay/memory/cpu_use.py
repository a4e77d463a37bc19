"""How long a process ran, and how long it was ready to and waited for a CPU.

Covers: the sum over the threads of one process, from the kernel's scheduler.
Does not cover: how many CPUs there are (limits.py), what follows (policy.py).

The one idea: more workers help while those there are wait for something else than a CPU.
The kernel counts the nanoseconds that each thread stood in the queue for one, so the
knee need not be found by trying.
"""

from __future__ import annotations

import os

import psutil

from forebay.memory.kernel_files import KernelFiles, parse_int
from forebay.memory.readings import CpuUse, Roots

_NANO_S = 1e-9
_FIELDS = 3
"""Run, wait, turns; all are 0 where the kernel was built without the count."""


def read_cpu_use(files: KernelFiles, roots: Roots, pid: int) -> CpuUse | None:
    """The use of `pid`; None when it is not there. `wait_s` is None where that is not told."""
    folder = f"{roots.proc}/{pid}"
    # Not /proc/PID/schedstat: that is the first thread alone.
    places = [f"{folder}/task/{task}/schedstat" for task in _list_names(f"{folder}/task")]
    threads = [counts for place in places if (counts := _read_counts(files, place)) is not None]
    run_ns, wait_ns, turns = (sum(column) for column in zip((0, 0, 0), *threads, strict=True))
    # One that has just been forked has had no turn; but who reads this has.
    if turns or (threads and any(_read_counts(files, f"{roots.proc}/self/schedstat") or ())):
        return CpuUse(run_ns * _NANO_S, wait_ns * _NANO_S)
    is_linux = os.path.exists(f"{roots.proc}/self")  # noqa: PTH110
    if is_linux and not os.path.exists(folder):  # noqa: PTH110
        return None
    return _read_times(files, pid)


def _read_counts(files: KernelFiles, path: str) -> tuple[int, int, int] | None:
    """Run, wait (nanoseconds) and turns of one thread; None when it has ended."""
    words = (files.read(path) or "").split()
    counts = [number for word in words if (number := parse_int(word)) is not None and number >= 0]
    return (counts[0], counts[1], counts[2]) if len(counts) == len(words) == _FIELDS else None


def _read_times(files: KernelFiles, pid: int) -> CpuUse | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.Error, OSError, ValueError, OverflowError):
        return None
    files.note("no schedstat here: waiting for a CPU cannot be told from waiting for data")
    return CpuUse(times.user + times.system, None)


def _list_names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
