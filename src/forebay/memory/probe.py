"""The one seam that reads the memory of processes and of the machine.

Covers: processes, the footprint (DESIGN.md section 3), the arena's descriptor,
host, groups, pressure, resource limits; with Linux's /proc in full, elsewhere
what psutil can tell.
Does not cover: which limit binds (limits.py), what to do (policy.py).
Neighbours: `kernel_files` reads, `cgroup` finds groups, `peak` measures inside a
worker, `readings` are the answers; all are reached through here.

The one idea: every number about memory in forebay has passed through this class,
so a test puts a made-up tree under `Roots` and owns the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import final

import psutil

from forebay.memory import cgroup, own_groups
from forebay.memory.cpu_use import read_cpu_use
from forebay.memory.kernel_files import KernelFiles, parse_fields, parse_int
from forebay.memory.peak import PeakMeter, trim_heap
from forebay.memory.readings import (
    CgroupReading,
    CpuReading,
    CpuUse,
    FootprintReading,
    HostReading,
    Making,
    MemoryEvents,
    Pressure,
    ProcessReading,
    RlimitReading,
    Roots,
    ShmReading,
    StatmReading,
)

__all__ = [
    "CgroupReading",
    "CpuReading",
    "CpuUse",
    "FootprintReading",
    "HostReading",
    "Making",
    "MemoryEvents",
    "PeakMeter",
    "Pressure",
    "Probe",
    "ProcessReading",
    "RlimitReading",
    "Roots",
    "ShmReading",
    "StatmReading",
    "trim_heap",
]

_ROLLUP = (
    "Rss", "Pss", "Pss_Anon", "Anonymous", "Private_Clean", "Private_Dirty", "SwapPss",
)  # fmt: skip

_SOLE_FRAC = 0.95
"""A process that shares less than this of its anonymous pages shares them with nobody."""

_BLOCK_BYTES = 512
"""st_blocks counts in these whatever the file system's block is (stat(2))."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
"""The machine's page, in which statm counts (units.PAGE_BYTES is the arena's)."""


@final
class Probe:
    """Reads memory; raises for no state of the machine, `degraded` says what was missing.

    Any thread and any process may use it; it keeps no descriptor and no cache.

    Args:
        roots: Where /proc, the cgroup mounts and /dev/shm are.
    """

    __slots__ = ("_files", "_roots")

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._files = KernelFiles()

    @property
    def degraded(self) -> frozenset[str]:
        """Short reasons why readings were missing or coarse; only grows, each once."""
        return self._files.degraded

    # ------------------------------------------------------------ processes

    def read_process(self, pid: int) -> ProcessReading | None:
        """The memory of `pid`; None when it has vanished, or cannot be read.

        The second case adds a reason to `degraded`. Costs about 16 ms a resident GiB
        (the kernel walks the page tables), under 0.2 ms for a small process.
        """
        rollup = f"{self._roots.proc}/{pid}/smaps_rollup"
        text = self._files.read(rollup)
        if text is not None:
            return self._parse_rollup(pid, parse_fields(text, _ROLLUP)) if text else None
        is_shown = not self._is_linux() or not _is_absent(f"{self._roots.proc}/{pid}")
        if not _is_absent(rollup) or not is_shown or not self._is_alive(pid):
            return None
        self._files.note("no smaps_rollup here: unique bytes of psutil stand in for shares")
        return _read_unique(pid)

    def read_footprint(self, main_pid: int, roots_pids: Sequence[int]) -> FootprintReading:
        """What exists in anonymous memory because of the loader.

        Args:
            main_pid: The training process.
            roots_pids: Zygotes, and workers that are no longer below one; everything
                below them is found here.

        Swap of main is taken off as well: main's share of it is in the sum, and
        would be charged to the loader as soon as the kernel swaps main out.
        """
        pids = [pid for pid in self.read_tree(roots_pids) if pid != main_pid]
        main = self.read_process(main_pid)
        found = [reading for pid in pids if (reading := self.read_process(pid)) is not None]
        # Asked after reading: a process that could not be read and is still there is a gap.
        missed = set(pids) - {reading.pid for reading in found}
        # Main is one of the family when it shares its own pages: under fork it does.
        is_family = main is not None and main.pss_anon_bytes < _SOLE_FRAC * main.anonymous_bytes
        sharers = len(found) + is_family
        workers_bytes = sum(r.pss_anon_bytes + r.swap_pss_bytes for r in found)
        if main is not None:
            workers_bytes += main.pss_anon_bytes - main.anonymous_bytes
            workers_bytes += main.swap_pss_bytes - self._read_swap(main)
        return FootprintReading(
            workers_bytes=max(0, workers_bytes),
            main_anonymous_bytes=main.anonymous_bytes if main else 0,
            by_pid=tuple((each.pid, each.estimate_private_anon(sharers)) for each in found),
            complete=main is not None and not any(map(self._has_memory, missed)),
        )

    def read_tree(self, roots_pids: Iterable[int]) -> tuple[int, ...]:
        """`roots_pids` and all processes below them, sorted; vanished ones may be among them."""
        seen: set[int] = set()
        waiting = list(roots_pids)
        parents: dict[int, list[int]] | None = None
        while waiting:
            pid = waiting.pop()
            if pid in seen:
                continue
            seen.add(pid)
            children = self._read_children(pid)
            if children is None:
                parents = self._scan_parents() if parents is None else parents
                children = parents.get(pid, [])
            waiting.extend(children)
        return tuple(sorted(seen))

    def read_statm(self, pid: int | str = "self") -> StatmReading | None:
        """The cheap reading of `pid` (some 10 us); None when it is not there."""
        text = self._files.read(self._roots.proc / str(pid) / "statm") or ""
        pages = [number for word in text.split()[:3] if (number := parse_int(word)) is not None]
        if len(pages) == 3:  # noqa: PLR2004 - all, resident, shared
            return StatmReading(*(max(0, number) * _PAGE_BYTES for number in pages))
        if self._is_linux():
            return None
        try:
            info = psutil.Process(None if pid == "self" else int(pid)).memory_info()
        except (psutil.Error, OSError):
            return None
        return StatmReading(info.vms, info.rss, 0)

    def read_cpu(self, pids: Iterable[int]) -> dict[int, CpuUse | None]:
        """Time on a CPU and time in the queue for one, over the threads of each of `pids`.

        None for one that has vanished. Two readings of a worker, `cpu_since` apart, tell
        what it waits for: a CPU (`wait_s`), or data (neither). Where the kernel does not
        count (`degraded` says so) `wait_s` is None and `run_s` is psutil's.

        Costs some 20 us a process with one thread, 10 us for each thread more.
        """
        return {pid: read_cpu_use(self._files, self._roots, pid) for pid in pids}

    def read_arena_bytes(self, fd: int) -> int:
        """Resident bytes of the shared mapping behind `fd`: exact, and some 1 us."""
        return os.fstat(fd).st_blocks * _BLOCK_BYTES

    # ------------------------------------------------------------ the machine

    def read_host(self) -> HostReading:
        """Total and available memory of the machine."""
        fields = self._files.read_fields(self._roots.proc / "meminfo", "MemTotal", "MemAvailable")
        if len(fields) == 2:  # noqa: PLR2004 - both were found
            return HostReading(fields["MemTotal"], fields["MemAvailable"])
        try:
            seen = psutil.virtual_memory()
        except (psutil.Error, OSError, ValueError):  # on Linux it reads /proc as well
            self._files.note("meminfo cannot be read: file cache counts as used memory")
            return _read_free_pages()
        return HostReading(seen.total, seen.available)

    def read_pressure(self) -> Pressure | None:
        """Pressure on the nearest group that tells it, else on the host; None without PSI."""
        files = [*cgroup.find_pressure_files(self._files, self._roots, "self")]
        for source, path in (*files, ("host", f"{self._roots.proc}/pressure/memory")):
            frac = _parse_pressure(self._files.read(path) or "")
            if frac is not None:
                return Pressure(frac, source)
        return None

    def read_cgroups(self, pid: int | str = "self") -> tuple[CgroupReading, ...]:
        """The memory groups of `pid`, from its own up to the root; empty without any."""
        return cgroup.read_memory_groups(self._files, self._roots, pid)

    def read_limited_groups(self) -> tuple[CgroupReading, ...]:
        """Those of this process' memory groups that have a limit; others cannot bind.

        Costs some 70 us for three groups, of which one has a limit.
        """
        membership = cgroup.read_membership(self._files, self._roots, "self")
        chain = cgroup.find_chain(self._roots, membership, "memory")
        return cgroup.read_groups(self._files, chain, limited_only=True) if chain else ()

    def read_events(self) -> MemoryEvents:
        """Kills and met limits, over this process' group, those below and those above it.

        Of groups above only what happened in themselves: a kill in a neighbour's is not
        ours. Version 1 counts nothing of groups below. Compare two with `events_since`.

        Costs some 80 us for three groups. Without groups: the kills of the machine.
        """
        return own_groups.read_events(self._files, self._roots)

    def read_own_group(self, pids: Collection[int]) -> int | None:
        """What the deepest group of this process holds, when `pids` are alone in it.

        Anonymous, shared and swapped bytes, exact to what the kernel batches (64 pages a
        CPU). A page is charged where it was first touched: what a process brought along
        from another group is not in it, so use differences between two readings.

        Args:
            pids: All processes that may be in the group or below it, this one included;
                those of them that have ended do not matter.

        Returns:
            None when another process is there as well, when one of `pids` is elsewhere,
            when it cannot be told, and without groups.

        Costs some 60 us; each group below the own one 40 us more.
        """
        return own_groups.read_sole_bytes(self._files, self._roots, pids, self._has_memory)

    def read_cpu_groups(self, pid: int | str = "self") -> tuple[CpuReading, ...]:
        """CPU quotas and sets of all groups of `pid`."""
        return cgroup.read_cpu_groups(self._files, self._roots, pid)

    def read_affinity(self) -> int:
        """The number of CPUs this process may be scheduled on.

        From Python 3.13 on not more than the user has told Python (PYTHON_CPU_COUNT).
        """
        told = [getattr(os, "process_cpu_count", os.cpu_count)() or 1]
        if hasattr(os, "sched_getaffinity"):
            told.append(len(os.sched_getaffinity(0)))
        return min(told)

    def read_rlimits(self) -> RlimitReading:
        """Soft limits of this process; all None where the system has no such thing."""
        try:
            import resource  # not on Windows
        except ImportError:
            return RlimitReading(None, None, None)

        def read(name: int) -> int | None:
            soft = resource.getrlimit(name)[0]
            return None if soft == resource.RLIM_INFINITY else soft

        return RlimitReading(
            read(resource.RLIMIT_AS), read(resource.RLIMIT_DATA), read(resource.RLIMIT_NOFILE)
        )

    def count_descriptors(self) -> int:
        """Files that this process has open; 0 where that cannot be told."""
        try:
            return len(os.listdir(self._roots.proc / "self/fd"))
        except OSError:
            return 0

    def read_max_map_count(self) -> int | None:
        """How many mappings a process may have (65,530 by default); None off Linux."""
        return self._files.read_count(self._roots.proc / "sys/vm/max_map_count")

    def read_shm(self) -> ShmReading | None:
        """The size of /dev/shm (64 MiB in Docker); None where there is none."""
        try:
            seen = os.statvfs(self._roots.shm)
        except (OSError, AttributeError):
            return None
        return ShmReading(seen.f_blocks * seen.f_frsize, seen.f_bavail * seen.f_frsize)

    # ------------------------------------------------------------ inside

    def _parse_rollup(self, pid: int, fields: dict[str, int]) -> ProcessReading | None:
        if "Pss" not in fields or "Anonymous" not in fields:
            self._files.note("smaps_rollup has no Pss or Anonymous line")
            return None
        pss, anonymous = fields["Pss"], fields["Anonymous"]
        if "Pss_Anon" not in fields:
            self._files.note("smaps_rollup has no Pss_Anon (Linux before 5.4): footprint too high")
        return ProcessReading(
            pid=pid,
            rss_bytes=fields.get("Rss", 0),
            pss_bytes=pss,
            pss_anon_bytes=fields.get("Pss_Anon", min(pss, anonymous)),
            anonymous_bytes=anonymous,
            private_bytes=fields.get("Private_Clean", 0) + fields.get("Private_Dirty", 0),
            swap_pss_bytes=fields.get("SwapPss", 0),
        )

    def _read_swap(self, main: ProcessReading) -> int:
        """Anonymous memory of main in swap: VmSwap, for "Swap" in smaps counts shmem too."""
        if not main.swap_pss_bytes:
            return 0
        status = self._files.read_fields(self._roots.proc / str(main.pid) / "status", "VmSwap")
        return status.get("VmSwap", main.swap_pss_bytes)

    def _read_children(self, pid: int) -> list[int] | None:
        """Children by task; None when the kernel does not list them (CONFIG_PROC_CHILDREN)."""
        children: list[int] = []
        try:
            tasks = [*(self._roots.proc / str(pid) / "task").iterdir()]
        except OSError as error:
            gone = error.errno in {errno.ENOENT, errno.ESRCH} and not self._is_alive(pid)
            return [] if gone else None
        for task in tasks:
            text = self._files.read(task / "children")
            if text is None and not _is_absent(str(task)):
                return None
            found = map(parse_int, (text or "").split())
            children += [child for child in found if child is not None and child > 0]
        return children

    def _scan_parents(self) -> dict[int, list[int]]:
        """Parent -> children over all of /proc, from the fourth field of each stat."""
        children: dict[int, list[int]] = {}
        try:
            names = [folder.name for folder in self._roots.proc.iterdir()]
        except OSError:
            return _scan_parents_elsewhere()
        for name in filter(str.isdecimal, names):
            text = self._files.read(self._roots.proc / name / "stat") or ""
            # The second field is the command's name in parentheses, which may hold any
            # character, spaces and parentheses included; so split after the last one.
            fields = text.rpartition(")")[2].split()
            parent = parse_int(fields[1]) if len(fields) > 1 else None
            if parent is not None:
                children.setdefault(parent, []).append(int(name))
        return children

    def _is_linux(self) -> bool:
        return os.path.exists(f"{self._roots.proc}/self")  # noqa: PTH110 - never raises

    def _has_memory(self, pid: int) -> bool:
        """Whether `pid` is there and has not yet given its memory back."""
        # One that is about to end is no zombie yet, but the kernel shows no memory any more.
        return not _is_empty(f"{self._roots.proc}/{pid}/smaps_rollup") and self._is_alive(pid)

    def _is_alive(self, pid: int) -> bool:
        """Whether `pid` is there and no zombie."""
        if not self._is_linux():
            return _answers(pid)
        text = self._files.read(f"{self._roots.proc}/{pid}/stat")
        if text is not None:
            return text.rpartition(")")[2].split()[:1] not in (["Z"], ["X"])
        if not _is_absent(f"{self._roots.proc}/{pid}"):
            return True
        # Where /proc is mounted with hidepid, a process of another user is not to be seen.
        # The numbers of a made-up tree, or of another namespace, are nobody's here.
        is_hidden = self._roots.proc == Roots().proc and _answers(pid)
        if is_hidden:
            self._files.note("processes of other users are hidden: the footprint is too low")
        return is_hidden


def _is_absent(path: str) -> bool:
    """Whether `path` is not there; one that may not be looked at is."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ESRCH}
    return False


def _is_empty(path: str) -> bool:
    """Whether `path` is there, of a process without memory; closed or absent it is not."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error.errno == errno.ESRCH
    try:
        return not os.read(fd, 1)
    except OSError as error:
        return error.errno == errno.ESRCH
    finally:
        os.close(fd)


def _answers(pid: int) -> bool:
    """Whether there is a process `pid`, which may be a zombie; needs no /proc."""
    if os.name == "nt":  # where os.kill would end it
        return psutil.pid_exists(pid)
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _parse_pressure(text: str) -> float | None:
    """The `some avg10=` percentage of a pressure file as a fraction."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["some"]:
            values = dict(word.partition("=")[::2] for word in words[1:])
            try:
                percent = float(values["avg10"])
            except (KeyError, ValueError):
                return None
            return percent / 100 if 0 <= percent <= 100 else None  # noqa: PLR2004 - nor NaN
    return None


def _read_free_pages() -> HostReading:
    """The machine by the C library, which asks the kernel and not /proc."""
    pages = []
    for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"):
        try:
            pages.append(os.sysconf(name))
        except (AttributeError, OSError, ValueError):
            pages.append(-1)
    if min(pages) < 0:  # nobody tells: then the host binds nothing, and the groups still do
        return HostReading(sys.maxsize, sys.maxsize)
    return HostReading(pages[0] * _PAGE_BYTES, pages[1] * _PAGE_BYTES)


def _read_unique(pid: int) -> ProcessReading | None:
    """`pid` without smaps_rollup: its unique bytes, which miss all that is shared."""
    try:
        process = psutil.Process(pid)
        seen = process.memory_full_info()
    except (psutil.Error, OSError):
        return None
    unique = int(getattr(seen, "uss", seen.rss))
    return ProcessReading(pid, seen.rss, unique, unique, unique, unique, 0)


def _scan_parents_elsewhere() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process.pid)
    return children
