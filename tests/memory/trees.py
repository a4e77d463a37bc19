"""Made-up /proc and cgroup trees, as the kernel would print them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from forebay.memory.probe import Probe, Roots
from forebay.units import GIB, MIB

UNLIMITED_V1 = 9223372036854771712


@dataclass(frozen=True)
class Tree:
    """A folder that stands for the machine."""

    root: Path

    @property
    def probe(self) -> Probe:
        return Probe(Roots(self.root / "proc", self.root / "cgroup", self.root / "shm"))

    def write(self, path: str, text: object) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")
        return target

    def close(self, path: str) -> None:
        """Make `path` a file that is there and cannot be read, for root as well."""
        target = self.root / path
        target.unlink(missing_ok=True)
        target.mkdir(parents=True)

    def host(self, total_bytes: int = 64 * GIB, available_bytes: int = 48 * GIB) -> None:
        total_kib, available_kib = total_bytes // 1024, available_bytes // 1024
        self.write(
            "proc/meminfo",
            f"MemTotal:       {total_kib} kB\nMemFree:        1 kB\n"
            f"MemAvailable:   {available_kib} kB\nActive(anon):   7 kB",
        )

    def member(self, *lines: str, pid: str = "self") -> None:
        self.write(f"proc/{pid}/cgroup", "\n".join(lines))

    def v1(  # one keyword for each line that a test may care about
        self,
        path: str,
        *,
        limit: object = UNLIMITED_V1,
        usage: object = 0,
        anon: int = 0,
        shmem: int = 0,
        inactive: int = 0,
        active: int = 0,
        hierarchical: int = UNLIMITED_V1,
        swap: int = 0,
        procs: tuple[int, ...] = (),
        kills: int = 0,
        fails: int = 0,
    ) -> None:
        folder = f"cgroup/memory{path}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", usage)
        self.write(
            f"{folder}/memory.stat",
            f"cache 1\nrss 1\ninactive_file 5\nactive_file 5\n"
            f"hierarchical_memory_limit {hierarchical}\ntotal_rss {anon}\n"
            f"total_rss_huge 3\ntotal_shmem {shmem}\n"
            f"total_inactive_file {inactive}\ntotal_active_file {active}\ntotal_swap {swap}",
        )
        self.write(f"{folder}/cgroup.procs", "\n".join(map(str, procs)))
        self.write(
            f"{folder}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}"
        )
        self.write(f"{folder}/memory.failcnt", fails)

    def v2(
        self,
        path: str,
        *,
        mount: str = "cgroup",
        limit: object = "max",
        high: object = "max",
        usage: object = 0,
        anon: int = 0,
        shmem: int = 0,
        inactive: int = 0,
        active: int = 0,
        slab: int = 0,
        swap: int = 0,
        procs: tuple[int, ...] = (),
        events: tuple[int, int, int] = (0, 0, 0),
        local_events: tuple[int, int, int] | None = None,
    ) -> None:
        folder = f"{mount}{path}"
        self.write(f"{mount}/cgroup.controllers", "cpuset cpu io memory pids")
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.high", high)
        self.write(f"{folder}/memory.current", usage)
        self.write(
            f"{folder}/memory.stat",
            f"anon {anon}\nfile 9\nshmem {shmem}\ninactive_file {inactive}\n"
            f"active_file {active}\nslab_reclaimable {slab}",
        )
        self.write(f"{folder}/memory.swap.current", swap)
        self.write(f"{folder}/cgroup.procs", "\n".join(map(str, procs)))
        self.write(f"{folder}/memory.events", _print_events(events))
        if local_events is not None:
            self.write(f"{folder}/memory.events.local", _print_events(local_events))

    def process(
        self,
        pid: int,
        *,
        parent: int = 1,
        children: tuple[int, ...] | None = (),
        state: str = "S",
        **fields_mib: int,
    ) -> None:
        """A process with the lines of smaps_rollup given in MiB; the others are 0."""
        names = ("Rss", "Pss", "Pss_Dirty", "Pss_Anon", "Private_Clean", "Private_Dirty")
        lines = [
            f"{name + ':':20}{fields_mib.get(name, 0) * MIB // 1024:8} kB"
            for name in (*names, "Anonymous", "Swap", "SwapPss")
        ]
        self.write(f"proc/{pid}/smaps_rollup", "\n".join(["1000-2000 ---p [rollup]", *lines]))
        self.write(f"proc/{pid}/stat", f"{pid} (a) b) {state} {parent} 0 0")
        task = f"proc/{pid}/task/{pid}"
        (self.root / task).mkdir(parents=True)
        if children is not None:
            self.write(f"{task}/children", " ".join(str(child) for child in children))

    def cpu(self, pid: int, *threads: tuple[int, int, int]) -> None:
        """The scheduler's counts (nanoseconds run and waited, turns) of each thread."""
        for number, counts in enumerate(threads):
            self.write(f"proc/{pid}/task/{pid + number}/schedstat", " ".join(map(str, counts)))

    def remove(self, path: str) -> None:
        """A group that has vanished, or a process that has ended."""
        shutil.rmtree(self.root / path)


def _print_events(counts: tuple[int, int, int]) -> str:
    kills, high, limit_met = counts
    return f"low 9\nhigh {high}\nmax {limit_met}\noom 9\noom_kill {kills}\noom_group_kill 9"
