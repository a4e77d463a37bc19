"""What a job holds over time, read from outside.

Covers: a thread that reads the job's memory cgroup and its main process every
10 ms, a second one that asks every process for its share every 200 ms, and the
record of both. Where no cgroup can be made the process tree is read every 50 ms
instead, and the record says so.
Does not cover: making the group (cgroup.py), what the loader says about itself
(`loader.stats()`), drawing (observe/).

The one idea: the job is not asked. Only its own marks in time (`baseline`, ends
of epochs) come from inside; they are `time.monotonic()` seconds, which is one
clock for all processes of a machine.

    with MemoryGroup() as group:
        child = subprocess.Popen(group.enter_command(command))
        with Sampler(child.pid, group) as sampler:
            child.wait()
        trace = sampler.trace()
    trace.footprint_bytes(since_s=baseline_s)    # peak after the mark, less the level at it
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, final

import psutil

from forebay.bench.cgroup import MemoryGroup

GROUP_PERIOD_S: Final = 0.01
TREE_PERIOD_S: Final = 0.05
PARTS_PERIOD_S: Final = 0.2
"""A reading of the group costs about 0.1 ms. One of a process tree walks page
tables (about 16 ms for a resident GiB), so it is made less often: at 200 ms a
job of half a GiB pays about 4 % of one core, at 10 ms it would pay all of it."""

FROM_GROUP: Final = "memory cgroup"
FROM_TREE: Final = "process tree"


@dataclass(frozen=True, slots=True)
class Sample:
    """What the whole job held at `t_s` (`time.monotonic()` seconds).

    `main_anon_bytes` is the part of `anon_bytes` that the main process uses,
    also where a forked child still shares it.
    """

    t_s: float
    anon_bytes: int
    shmem_bytes: int
    main_anon_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Anonymous and shared memory together: what cannot simply be dropped."""
        return self.anon_bytes + self.shmem_bytes

    @property
    def children_anon_bytes(self) -> int:
        """Anonymous memory that would not exist without the children."""
        return max(0, self.anon_bytes - self.main_anon_bytes)

    @property
    def fed_bytes(self) -> int:
        """What feeds the main process: its children's own memory, and all that is shared."""
        return self.children_anon_bytes + self.shmem_bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """The same, split: the process that trains, all that descend from it, shared memory.

    `main_anon_bytes` is all anonymous memory that the main process uses, also
    where a forked child still shares it. `children_anon_bytes` is the rest:
    what would not exist without the children (the sum of `Pss_Anon` over all,
    less `Anonymous` of main). So a fork costs nothing until a page is written.
    Shared memory belongs to nobody: it is one number.
    """

    t_s: float
    main_anon_bytes: int
    children_anon_bytes: int
    shmem_bytes: int
    children: int

    @property
    def held_bytes(self) -> int:
        """The sum of the parts."""
        return self.main_anon_bytes + self.children_anon_bytes + self.shmem_bytes


@dataclass(frozen=True, slots=True)
class Trace:
    """All readings of one job, in the order of time.

    `source` is `FROM_GROUP` or `FROM_TREE`. Peaks are peaks of the readings: a
    spike that lives shorter than the period between two may be missed.
    """

    source: str
    samples: tuple[Sample, ...]
    parts: tuple[Parts, ...]

    def between(self, since_s: float, until_s: float = math.inf) -> tuple[Sample, ...]:
        """The readings from `since_s` to `until_s`."""
        return tuple(each for each in self.samples if since_s <= each.t_s <= until_s)

    def peak_bytes(self, since_s: float = 0.0, until_s: float = math.inf) -> int:
        """The most held from `since_s` to `until_s`; 0 when there is no reading."""
        return max((each.held_bytes for each in self.between(since_s, until_s)), default=0)

    def level_bytes(self, at_s: float) -> int:
        """What was held at `at_s`: the last reading not after it, else the first."""
        before = [each for each in self.samples if each.t_s <= at_s]
        chosen = before[-1:] or self.samples[:1]
        return chosen[0].held_bytes if chosen else 0

    def footprint_bytes(self, since_s: float) -> int:
        """How far the job rose above its own level at `since_s`, at most; never negative.

        With `since_s` at the moment just before iterating, after warming up the
        model, this is what feeding it cost. It also holds whatever the training
        code itself allocates more than it had kept from warming up: a job that
        trains should subtract its own peak instead (see demo_job.py).
        """
        return max(0, self.peak_bytes(since_s) - self.level_bytes(since_s))

    def peak_parts(self, since_s: float = 0.0) -> Parts | None:
        """The split at the moment when its sum was largest; None without a reading."""
        later = [each for each in self.parts if each.t_s >= since_s]
        return max(later, key=lambda each: each.held_bytes, default=None)


@final
class Sampler:
    """Reads a running job from threads of its own, while the `with` block lasts.

    Args:
        pid: the process that trains; its descendants are the children.
        group: the group that it was started in, or None to read the process tree.
        period_s: seconds between two readings of the whole.
        parts_period_s: seconds between two readings by process; None leaves them out.

    `trace()` may be called at any time and from any thread. A job that has ended
    leaves the readings made so far. Two threads, one for each kind of reading:
    the slow one would punch holes of 10 ms and more into the fast one.
    """

    def __init__(
        self,
        pid: int,
        group: MemoryGroup | None,
        *,
        period_s: float | None = None,
        parts_period_s: float | None = PARTS_PERIOD_S,
    ) -> None:
        default_s = TREE_PERIOD_S if group is None else GROUP_PERIOD_S
        self._pid = pid
        self._group = group
        self._period_s = default_s if period_s is None else period_s
        # Appended to by one thread each; list.append is atomic, trace() copies.
        self._samples: list[Sample] = []
        self._parts: list[Parts] = []
        self._end = threading.Event()
        self._threads = [self._thread("whole", self._read_sample, self._period_s)]
        if parts_period_s is not None:
            self._threads.append(self._thread("parts", self._read_parts, parts_period_s))

    def _thread(self, what: str, read: Callable[[], None], period_s: float) -> threading.Thread:
        name = f"forebay-sampler-{what}"
        return threading.Thread(target=self._run, args=(read, period_s), name=name, daemon=True)

    def __enter__(self) -> Sampler:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def trace(self) -> Trace:
        """All readings made so far."""
        source = FROM_TREE if self._group is None else FROM_GROUP
        return Trace(source, tuple(self._samples), tuple(self._parts))

    def latest(self) -> Sample | None:
        """The reading made last; None before the first."""
        return self._samples[-1] if self._samples else None

    def _run(self, read: Callable[[], None], period_s: float) -> None:
        """Call `read` at multiples of the period: a late reading does not shift the next."""
        due_s = time.monotonic()
        while not self._end.is_set():
            read()
            due_s = max(due_s + period_s, time.monotonic())
            self._end.wait(max(0.0, due_s - time.monotonic()))

    def _read_sample(self) -> None:
        """One reading of the whole; none once the main process is gone.

        Its last pages leave the group only after it stopped answering, and
        would be taken for its children's.
        """
        now_s = time.monotonic()
        if self._group is not None:
            reading = self._group.read()
            main_bytes = _read_main_anon_bytes(self._pid)
            if main_bytes is not None:
                anon_bytes = reading.anon_bytes + reading.swap_bytes
                self._samples.append(Sample(now_s, anon_bytes, reading.shmem_bytes, main_bytes))
        elif (parts := read_parts(self._pid, descendants(self._pid))) is not None:
            anon_bytes = parts.main_anon_bytes + parts.children_anon_bytes
            sample = Sample(now_s, anon_bytes, parts.shmem_bytes, parts.main_anon_bytes)
            self._samples.append(sample)

    def _read_parts(self) -> None:
        inside = descendants(self._pid) if self._group is None else self._group.pids()
        parts = read_parts(self._pid, (pid for pid in inside if pid != self._pid))
        if parts is not None:
            self._parts.append(parts)


def descendants(pid: int) -> tuple[int, ...]:
    """The processes below `pid`, at any depth; none when it is gone."""
    try:
        return tuple(each.pid for each in psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return ()


def read_parts(main_pid: int, child_pids: Iterable[int]) -> Parts | None:
    """The split now; None when the main process is gone or may not be read."""
    now_s = time.monotonic()
    main = _read_rollup(main_pid)
    if main is None:
        return None
    pids = tuple(child_pids)
    children = [each for pid in pids if (each := _read_rollup(pid)) is not None]
    everyone = [main, *children]
    pss_anon_bytes = sum(each.pss_anon_bytes for each in everyone)
    return Parts(
        t_s=now_s,
        main_anon_bytes=main.anonymous_bytes,
        children_anon_bytes=max(0, pss_anon_bytes - main.anonymous_bytes),
        shmem_bytes=max(
            sum(each.pss_shmem_bytes for each in everyone),
            _shared_file_bytes((main_pid, *pids)),
        ),
        children=len(children),
    )


@dataclass(frozen=True, slots=True)
class _Rollup:
    """The lines of one smaps_rollup that matter; swapped pages count as anonymous."""

    anonymous_bytes: int
    pss_anon_bytes: int
    pss_shmem_bytes: int


def _read_main_anon_bytes(pid: int) -> int | None:
    """`RssAnon` and swap of one process: a few counters, no walk. None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return None
    if b"\nRssAnon:" not in text:  # a zombie
        return None
    return _line_bytes(b"\nRssAnon:", text) + _line_bytes(b"\nVmSwap:", text)


def _read_rollup(pid: int) -> _Rollup | None:
    """One process; None when it is gone. `Pss_Anon` is there since Linux 5.4."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
    except OSError:
        return None
    if not text:  # a zombie
        return None
    return _Rollup(
        anonymous_bytes=_line_bytes(b"\nAnonymous:", text) + _line_bytes(b"\nSwap:", text),
        pss_anon_bytes=_line_bytes(b"\nPss_Anon:", text) + _line_bytes(b"\nSwapPss:", text),
        pss_shmem_bytes=_line_bytes(b"\nPss_Shmem:", text),
    )


def _line_bytes(key: bytes, text: bytes) -> int:
    start = text.find(key)
    return int(text[start + len(key) :].split(None, 1)[0]) * 1024 if start >= 0 else 0


def _shared_file_bytes(pids: Iterable[int]) -> int:
    """Resident bytes of the shared-memory files that these processes have open, each once.

    A batch on its way through torch's queue is mapped by nobody: only the
    descriptor that is being passed keeps it. PSS cannot see it, this can.
    """
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        for entry in _open_files(pid):
            with suppress(OSError):
                if os.readlink(entry).startswith(("/dev/shm/", "/memfd:")):  # noqa: S108
                    facts = os.stat(entry)
                    found[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(found.values())


def _open_files(pid: int) -> tuple[str, ...]:
    folder = f"/proc/{pid}/fd"
    try:
        return tuple(f"{folder}/{name}" for name in os.listdir(folder))
    except OSError:
        return ()
