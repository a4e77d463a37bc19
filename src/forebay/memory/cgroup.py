"""Control groups: which memory and CPU groups a process is in, and what they say.

Covers: version 1, version 2 and hybrid mounts, nested groups, and the view from
inside a container, where the path in /proc/self/cgroup may not exist.
Does not cover: which of the limits binds (limits.py).

The one idea: a process is under *every* group from its own up to the root, so
the answer is always a chain, its own group first, and nobody asks for "the"
limit. Groups above a container's mount cannot be seen; version 1 still tells
their tightest limit (`hierarchical_memory_limit`), version 2 does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forebay.memory.kernel_files import KernelFiles, parse_int
from forebay.memory.readings import CgroupReading, CpuReading, Roots

_V1_UNLIMITED_BYTES = 1 << 62
"""Version 1 prints "no limit" as LONG_MAX rounded down to a page, which depends on
the page size (9223372036854771712 with 4 KiB); no machine has 4 EiB, so all
numbers from here on mean the same."""

_V1_HIDDEN = "hierarchical_memory_limit"

_V1_STAT = {
    # The total_ lines count the groups below as well, as the limit does.
    "total_rss": "anon_bytes",
    "total_shmem": "shmem_bytes",
    "total_inactive_file": "inactive_file_bytes",
    "total_active_file": "active_file_bytes",
}
_V2_STAT = {
    "anon": "anon_bytes",
    "shmem": "shmem_bytes",
    "inactive_file": "inactive_file_bytes",
    "active_file": "active_file_bytes",
    "slab_reclaimable": "slab_reclaimable_bytes",
}
"""Lines of memory.stat and the field of CgroupReading that each becomes."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The groups of one process in the tree that holds one controller.

    Attributes:
        version: Of the tree, 1 or 2.
        groups: (path, folder) of each group, the process' own first, the mount last.
    """

    version: int
    groups: tuple[tuple[str, str], ...]

    @classmethod
    def below(cls, mount: str, version: int, path: str) -> Chain:
        """The chain of the group at `path`, as far as it can be seen below `mount`."""
        groups = []
        own = _find_visible(mount, path)
        while own:
            groups.append((own, mount + own))
            own = own.rpartition("/")[0]
        return cls(version, (*groups, ("/", mount)))


def read_memory_groups(
    files: KernelFiles, roots: Roots, pid: int | str
) -> tuple[CgroupReading, ...]:
    """The memory groups of `pid`, its own first; empty where there are none."""
    chain = find_chain(roots, read_membership(files, roots, pid), "memory")
    return read_groups(files, chain) if chain else ()


def read_groups(
    files: KernelFiles, chain: Chain, *, limited_only: bool = False
) -> tuple[CgroupReading, ...]:
    """What each group of `chain` says; with `limited_only` of those that have a limit.

    A group without a limit binds nothing, and most have none: for them only the file
    with the limit is read.
    """
    read_group = _read_v1 if chain.version == 1 else _read_v2
    found = (read_group(files, path, folder, limited_only) for path, folder in chain.groups)
    return tuple(group for group in found if group is not None)


def read_cpu_groups(files: KernelFiles, roots: Roots, pid: int | str) -> tuple[CpuReading, ...]:
    """Quotas and CPU sets of all groups of `pid`; groups without either are left out."""
    readings = []
    membership = read_membership(files, roots, pid)
    for controller in ("cpu", "cpuset"):
        chain = find_chain(roots, membership, controller)
        for path, folder in chain.groups if chain else ():
            reading = CpuReading(path, _read_quota(files, folder), _read_cpuset(files, folder))
            if reading.quota_cpus is not None or reading.set_cpus is not None:
                readings.append(reading)
    return tuple(dict.fromkeys(readings))


def find_pressure_files(
    files: KernelFiles, roots: Roots, pid: int | str
) -> Iterator[tuple[str, str]]:
    """(words, file) of memory.pressure of each version-2 group, its own first."""
    chain = _find_unified(roots, read_membership(files, roots, pid))
    for path, folder in chain.groups if chain else ():
        yield f"cgroup {path}", f"{folder}/memory.pressure"


# ---------------------------------------------------------------- where the process is


def read_membership(files: KernelFiles, roots: Roots, pid: int | str) -> Mapping[str, str]:
    """Controllers (as printed, "" for version 2) -> path, from /proc/PID/cgroup."""
    return parse_membership(files.read(f"{roots.proc}/{pid}/cgroup"), pid)


def parse_membership(text: str | None, pid: int | str) -> Mapping[str, str]:
    """The same from what /proc/PID/cgroup says; None where it cannot be read."""
    if text is None:
        # Whatever our own group is, it lies below the mount.
        return dict.fromkeys(("memory", "cpu", "cpuset", ""), "/") if pid == "self" else {}
    entries = (line.split(":", 2) for line in text.split("\n"))
    return {entry[1]: entry[2] for entry in entries if len(entry) == 3}  # noqa: PLR2004


def find_chain(roots: Roots, membership: Mapping[str, str], controller: str) -> Chain | None:
    """The chain in the tree of `controller`: version 1 where it is listed there, else 2.

    A controller can only be in one of them at a time, and one listed by name is in
    version 1; so a hybrid machine (v1 memory beside a v2 tree) needs no special case.
    """
    for controllers, path in membership.items():
        if controller in controllers.split(","):
            # Usually "cpu,cpuacct" with a link "cpu" beside it; containers may lack the link.
            for name in (controllers, controller):
                mount = f"{roots.cgroup}/{name}"
                if os.path.isdir(mount):  # noqa: PTH112 - never raises, whatever is closed
                    return Chain.below(mount, 1, path)
    return _find_unified(roots, membership)


def _find_unified(roots: Roots, membership: Mapping[str, str]) -> Chain | None:
    for mount in (f"{roots.cgroup}", f"{roots.cgroup}/unified"):
        if "" in membership and os.path.exists(f"{mount}/cgroup.controllers"):  # noqa: PTH110
            return Chain.below(mount, 2, membership[""])
    return None


def _find_visible(mount: str, path: str) -> str:
    """The part of `path` that exists below `mount`; empty for the mount itself.

    Inside a container without its own cgroup namespace the kernel prints the path
    as the host sees it ("/docker/abc/init.scope") while the mount begins at
    "/docker/abc"; with a namespace, a process outside of it gets "/../..". The
    longest tail that exists is right in the first case, the mount in the second.
    """
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if ".." in parts:
        return ""
    for start in range(len(parts)):
        tail = "/" + "/".join(parts[start:])
        if os.path.isdir(mount + tail):  # noqa: PTH112
            return tail
    return ""


# ---------------------------------------------------------------- what a group says


def _read_v1(
    files: KernelFiles, path: str, folder: str, limited_only: bool
) -> CgroupReading | None:
    printed = files.read_int(f"{folder}/memory.limit_in_bytes")
    limit, source = _finite(printed), f"cgroup {path} memory.limit_in_bytes"
    is_top = path == "/"
    if limited_only and not is_top and limit is None:
        return None
    stat = files.read_fields(f"{folder}/memory.stat", *_V1_STAT, *([_V1_HIDDEN] if is_top else []))
    hidden = _finite(stat.get(_V1_HIDDEN))
    if hidden is not None and (limit is None or hidden < limit):
        # The usage of the groups above the mount cannot be seen, so the headroom that follows
        # is what they would leave if this group were alone in them: an upper bound, and far
        # better than not to know them at all.
        limit, source = hidden, f"cgroup {path} {_V1_HIDDEN}"
    if limited_only and limit is None:
        return None
    usage = files.read_count(f"{folder}/memory.usage_in_bytes")
    if printed is None and usage is None:
        return None
    return CgroupReading(
        path=path,
        version=1,
        limit_bytes=limit,
        high_bytes=None,
        limit_source=source,
        usage_bytes=usage,
        **{field: stat.get(name, 0) for name, field in _V1_STAT.items()},
    )


def _read_v2(
    files: KernelFiles, path: str, folder: str, limited_only: bool
) -> CgroupReading | None:
    """One version-2 group; None at the real root and where memory is not delegated."""
    limit = _read_max(files, f"{folder}/memory.max")
    high = _read_max(files, f"{folder}/memory.high")
    if limited_only and limit is None and high is None:
        return None
    usage = files.read_count(f"{folder}/memory.current")
    if usage is None and limit is None:
        return None
    stat = files.read_fields(f"{folder}/memory.stat", *_V2_STAT)
    return CgroupReading(
        path=path,
        version=2,
        limit_bytes=limit,
        high_bytes=high,
        limit_source=f"cgroup {path} memory.max",
        usage_bytes=usage,
        **{field: stat.get(name, 0) for name, field in _V2_STAT.items()},
    )


def _read_max(files: KernelFiles, path: str) -> int | None:
    """The number in a version-2 limit file; None for "max", absent or garbage (noted)."""
    text = (files.read(path) or "max").strip()
    if text == "max":
        return None
    limit = parse_int(text)
    if limit is None or limit < 0:
        files.note(f"{path.rpartition('/')[2]} is not a number")
        return None
    return limit


def _finite(limit_bytes: int | None) -> int | None:
    if limit_bytes is None or not 0 <= limit_bytes < _V1_UNLIMITED_BYTES:
        return None
    return limit_bytes


# ---------------------------------------------------------------- CPUs


def _read_quota(files: KernelFiles, folder: str) -> float | None:
    """CPUs that the group may use on average, from cpu.max (v2) or cpu.cfs_* (v1)."""
    text = files.read(f"{folder}/cpu.max")
    if text is not None:
        words = text.split()
        if words[:1] == ["max"]:
            return None
        quota, period = (*map(parse_int, words), None, None)[:2]
        if quota is None or period is None:
            files.note("cpu.max is not two numbers")
            return None
    else:
        quota = files.read_int(f"{folder}/cpu.cfs_quota_us") or 0
        period = files.read_int(f"{folder}/cpu.cfs_period_us") or 0
    # Version 1 prints -1 for "no quota".
    return quota / period if quota > 0 and period > 0 else None


def _read_cpuset(files: KernelFiles, folder: str) -> int | None:
    """The number of CPUs the group may run on; None where it does not say."""
    for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
        text = files.read(f"{folder}/{name}")
        if text is not None and text.strip():
            count = count_cpus(text)
            if count is None:
                files.note(f"{name} is not a list of CPUs")
            return count
    return None


def count_cpus(text: str) -> int | None:
    """How many CPUs a kernel list such as "0-3,7" names; None when it is not one."""
    total = 0
    for part in text.strip().split(","):
        ends = [parse_int(end) for end in part.split("-")]
        first, last = ends[0], ends[-1]
        if first is None or last is None or len(ends) > 2:  # noqa: PLR2004 - "a" or "a-b"
            return None
        total += last - first + 1
    return total if total > 0 else None
