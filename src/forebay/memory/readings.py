"""What the probe can say: one frozen record for each kind of reading.

Covers: the records, and sums that follow from one record alone.
Does not cover: taking the readings (probe.py, cgroup.py, peak.py) or judging
them (limits.py, policy.py).

The one idea: a reading is a fact with a unit and no reference to the machine,
so that it crosses threads and files, and a test writes it down by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel shows itself; a test puts a made-up tree here.

    A child process or another namespace may see other roots than `/`, which is
    why they are values and not constants.
    """

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")  # noqa: S108 - the mount itself is read, no file is made there


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process, from one read of its smaps_rollup.

    Attributes:
        pid: Whose.
        rss_bytes: Resident, shared pages counted in full.
        pss_bytes: Resident, each page divided by the number of its users.
        pss_anon_bytes: The anonymous part of `pss_bytes`.
        anonymous_bytes: Anonymous and resident, shared pages counted in full.
        private_bytes: Pages of any kind that only this process maps (USS). An
            arena page touched by one process alone is among them.
        swap_pss_bytes: Swapped out, each page divided by the number of its users.
    """

    pid: int
    rss_bytes: int
    pss_bytes: int
    pss_anon_bytes: int
    anonymous_bytes: int
    private_bytes: int
    swap_pss_bytes: int

    def estimate_private_anon(self, sharers: int) -> int:
        """Anonymous bytes of this process alone.

        The kernel does not print this number. With k processes on each shared page it
        follows from two that it does: Anonymous = own + shared, Pss_Anon = own +
        shared / k. Forks of one process share most pages all together, so `sharers` is
        taken for k; pages that fewer share make it too high by their share of a share.
        It is never above Pss_Anon, nor above the private bytes of any kind, among which
        are arena pages that this process alone has touched.

        Args:
            sharers: How many processes were forked from one another, this one included.
        """
        own = self.pss_anon_bytes
        if sharers > 1:
            own = (sharers * self.pss_anon_bytes - self.anonymous_bytes) // (sharers - 1)
        return max(0, min(own, self.pss_anon_bytes, self.private_bytes))


@dataclass(frozen=True, slots=True)
class FootprintReading:
    """Anonymous memory that exists because of the loader (DESIGN.md section 3).

    Attributes:
        workers_bytes: Sum of (Pss_Anon + SwapPss) over main and all processes of
            the loader, less what main has on its own account; never below 0.
        main_anonymous_bytes: Anonymous of main, the part that was taken off.
        by_pid: (pid, private anonymous bytes) of each process but main, by pid.
        complete: False when a process that is there could not be read, so that
            `workers_bytes` is too low.
    """

    workers_bytes: int
    main_anonymous_bytes: int
    by_pid: tuple[tuple[int, int], ...]
    complete: bool

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the loader that were read, main excluded."""
        return tuple(pid for pid, _ in self.by_pid)

    def count_part(self, pids: Iterable[int]) -> int:
        """The part of `workers_bytes` that is there because of the processes `pids`.

        What no process has for itself is shared out by heads: which loader's fork keeps an
        old page of main alive cannot be told.
        """
        wanted = set(pids)
        own = [private for pid, private in self.by_pid if pid in wanted]
        if len(own) == len(self.by_pid):
            return self.workers_bytes
        return sum(own) + self.shared_bytes * len(own) // len(self.by_pid)

    @property
    def shared_bytes(self) -> int:
        """The part that no single process owns: kept by fork, or shared by the crew."""
        return max(0, self.workers_bytes - sum(private for _, private in self.by_pid))


@dataclass(frozen=True, slots=True)
class StatmReading:
    """The cheap look at one process; `shared_bytes` is file and shmem pages together."""

    vm_bytes: int
    rss_bytes: int
    shared_bytes: int

    @property
    def anonymous_bytes(self) -> int:
        """Resident anonymous bytes, pages shared by fork counted in full."""
        return max(0, self.rss_bytes - self.shared_bytes)


@dataclass(frozen=True, slots=True)
class HostReading:
    """The whole machine, as the kernel estimates it (MemAvailable)."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """PSI: the part of the last 10 s in which at least one task waited for memory."""

    some_avg10_frac: float
    source: str


@dataclass(frozen=True, slots=True)
class RlimitReading:
    """Soft limits of this process; None means unlimited."""

    address_space_bytes: int | None
    data_bytes: int | None
    open_files: int | None


@dataclass(frozen=True, slots=True)
class ShmReading:
    """The mount at /dev/shm."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class CgroupReading:
    """One memory group; a process is in a chain of them, each with its own limit.

    Attributes:
        path: The group's path below the mount, "/" for the mount itself.
        version: 1 or 2.
        limit_bytes: Where the kernel kills; None means unlimited.
        high_bytes: Where it throttles (memory.high, version 2); None means nowhere.
        limit_source: The words for where `limit_bytes` comes from.
        usage_bytes: Everything charged, file cache included; None when unreadable.
        anon_bytes: Anonymous, of the group and all below it.
        shmem_bytes: Shared memory and tmpfs, likewise.
        inactive_file_bytes: File cache, not used lately.
        active_file_bytes: File cache, used lately.
        slab_reclaimable_bytes: Cached directory entries and inodes (version 2).
    """

    path: str
    version: int
    limit_bytes: int | None
    high_bytes: int | None
    limit_source: str
    usage_bytes: int | None
    anon_bytes: int
    shmem_bytes: int
    inactive_file_bytes: int
    active_file_bytes: int
    slab_reclaimable_bytes: int = 0

    @property
    def binding_bytes(self) -> int | None:
        """The lower of kill and throttle: beyond either no work gets done."""
        return min((b for b in (self.limit_bytes, self.high_bytes) if b is not None), default=None)

    @property
    def source(self) -> str:
        """The words for where `binding_bytes` comes from."""
        if self.high_bytes is not None and self.binding_bytes != self.limit_bytes:
            return f"cgroup {self.path} memory.high"
        return self.limit_source

    @property
    def held_bytes(self) -> int | None:
        """Usage that reclaim cannot take back; None when usage is unknown."""
        if self.usage_bytes is None:
            return None
        reclaimable = self.inactive_file_bytes + self.active_file_bytes
        return max(0, self.usage_bytes - reclaimable - self.slab_reclaimable_bytes)


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """What has happened to this process' groups since each was made.

    Attributes:
        oom_kills: Processes that the kernel killed for memory.
        high: Times that work was throttled at memory.high (version 2).
        max: Times that a limit was met, and file cache had to go or a kill was near.
        source: Which groups were summed, in words; other words, other counters.
    """

    oom_kills: int
    high: int
    max: int
    source: str


def events_since(before: MemoryEvents, now: MemoryEvents) -> MemoryEvents:
    """What has happened between two readings; never below 0.

    Counters of a group that was made anew begin at 0, so they may go backwards. Those
    of other groups (the process was moved, a file was closed) say nothing about what
    happened since, so their difference counts as nothing.
    """
    if before.source != now.source:
        return MemoryEvents(0, 0, 0, now.source)
    return MemoryEvents(
        max(0, now.oom_kills - before.oom_kills),
        max(0, now.high - before.high),
        max(0, now.max - before.max),
        now.source,
    )


@dataclass(frozen=True, slots=True)
class CpuUse:
    """What the threads of one process that are alive have had of the CPUs so far.

    A thread that ends takes its times with it, so the sums may go backwards.

    Attributes:
        run_s: On a CPU.
        wait_s: Ready to run, in the queue for one; None where the system does not tell.
    """

    run_s: float
    wait_s: float | None


def cpu_since(before: CpuUse, now: CpuUse) -> CpuUse:
    """What a process had between two readings; never below 0."""
    wait_s = None
    if before.wait_s is not None and now.wait_s is not None:
        wait_s = max(0.0, now.wait_s - before.wait_s)
    return CpuUse(max(0.0, now.run_s - before.run_s), wait_s)


@dataclass(frozen=True, slots=True)
class CpuReading:
    """One group's say on CPUs; `quota_cpus` and `set_cpus` are None when it has none."""

    path: str
    quota_cpus: float | None
    set_cpus: int | None


@dataclass(frozen=True, slots=True)
class Making:
    """What one fetch needed, measured in the worker.

    Attributes:
        peak_bytes: The most anonymous memory the fetch added at any moment.
        private_bytes: Resident anonymous memory of the worker now.
        blur_bytes: `peak_bytes` may be too low by at most this much: shared and
            file pages that came or went during the fetch, before or after its
            peak. 0 once the worker has touched its block before.
    """

    peak_bytes: int
    private_bytes: int
    blur_bytes: int = 0
