"""Two places under one limit: the job in one, a neighbour that takes memory in the other.

Covers: groups inside a group of ours, and the neighbour's process. Does not cover: when it
comes (run.py).

The idea: what the neighbour holds presses on the same limit but is never read as the job's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from forebay.bench.cgroup import MemoryGroup

_NEIGHBOUR = """
import sys, time
size, ramp_s, hold_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
try:  # spare the neighbour; without CAP_SYS_RESOURCE the largest is killed, as the row says
    open("/proc/self/oom_score_adj", "w").write("-900")
except OSError:
    pass
held = []
for _ in range(50):
    held.append(bytearray(b"x") * (size // 50))
    time.sleep(ramp_s / 50)
time.sleep(hold_s)
"""

RAMP_S = 1.0
"""A loader is promised to follow within a second; what comes at one blow nobody could follow."""


@dataclass(frozen=True, slots=True)
class Nest:
    """`around` carries the limit; `job` and `beside` lie in it and hold the processes."""

    around: MemoryGroup
    job: MemoryGroup
    beside: MemoryGroup


@contextlib.contextmanager
def open_nest() -> Iterator[Nest]:
    """All three groups; what is left inside is killed at the end, and the groups removed.

    Raises:
        GroupUnavailable: None can be made here.
    """
    with MemoryGroup() as around:
        if around.version == 1:
            # `MemoryGroup` looks for the hierarchy under this name below its root.
            (around.path / "memory").mkdir()
        else:
            (around.path / "cgroup.subtree_control").write_text("+memory")
        with MemoryGroup(root=around.path) as job, MemoryGroup(root=around.path) as beside:
            yield Nest(around, job, beside)


def start_neighbour(nest: Nest, size_bytes: int, hold_s: float) -> subprocess.Popen[bytes]:
    """A process that takes `size_bytes` within a second, holds them, and is gone."""
    command = [sys.executable, "-c", _NEIGHBOUR, str(size_bytes), str(RAMP_S), str(hold_s)]
    return subprocess.Popen(
        nest.beside.enter_command(command), stderr=subprocess.DEVNULL, env={**os.environ}
    )
