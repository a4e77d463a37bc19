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

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from forebay.memory.kernel_files import KernelFiles
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
class _Hierarchy:
    """One mounted tree and the place of the process in it."""

    mount: Path
    version: int
    own: PurePosixPath

    def chain(self) -> Iterator[tuple[str, Path]]:
        """(path, directory) of each group, the process' own first, the mount last."""
        for group in (self.own, *self.own.parents):
            yield str(group), self.mount / group.relative_to("/")


def read_memory_groups(
    files: KernelFiles, roots: Roots, pid: int | str
) -> tuple[CgroupReading, ...]:
    """The memory groups of `pid`, its own first; empty where there are none."""
    tree = _find_hierarchy(files, roots, pid, "memory")
    if tree is None:
        return ()
    read_group = _read_v1 if tree.version == 1 else _read_v2
    found = (read_group(files, path, folder) for path, folder in tree.chain())
    groups = [group for group in found if group is not None]
    if groups and tree.version == 1:
        groups[-1] = _with_hidden_ancestors(files, tree.mount, groups[-1])
    return tuple(groups)


def read_cpu_groups(files: KernelFiles, roots: Roots, pid: int | str) -> tuple[CpuReading, ...]:
    """Quotas and CPU sets of all groups of `pid`; groups without either are left out."""
    readings = []
    for controller in ("cpu", "cpuset"):
        tree = _find_hierarchy(files, roots, pid, controller)
        for path, folder in tree.chain() if tree else ():
            reading = CpuReading(path, _read_quota(files, folder), _read_cpuset(files, folder))
            if reading.quota_cpus is not None or reading.set_cpus is not None:
                readings.append(reading)
    return tuple(dict.fromkeys(readings))


def find_pressure_files(
    files: KernelFiles, roots: Roots, pid: int | str
) -> Iterator[tuple[str, Path]]:
    """(words, file) of memory.pressure of each version-2 group, its own first."""
    tree = _find_unified(roots, _read_membership(files, roots, pid))
    for path, folder in tree.chain() if tree else ():
        yield f"cgroup {path}", folder / "memory.pressure"


# ---------------------------------------------------------------- where the process is


def _read_membership(files: KernelFiles, roots: Roots, pid: int | str) -> Mapping[str, str]:
    """Controllers (as printed, "" for version 2) -> path, from /proc/PID/cgroup."""
    text = files.read(roots.proc / str(pid) / "cgroup")
    if text is None:
        # Whatever our own group is, it lies below the mount.
        return dict.fromkeys(("memory", "cpu", "cpuset", ""), "/") if pid == "self" else {}
    entries = (line.split(":", 2) for line in text.splitlines())
    return {entry[1]: entry[2] for entry in entries if len(entry) == 3}  # noqa: PLR2004


def _find_hierarchy(
    files: KernelFiles, roots: Roots, pid: int | str, controller: str
) -> _Hierarchy | None:
    """The tree that holds `controller`: version 1 where it is listed there, else version 2.

    A controller can only be in one of them at a time, and one listed by name is in
    version 1; so a hybrid machine (v1 memory beside a v2 tree) needs no special case.
    """
    membership = _read_membership(files, roots, pid)
    for controllers, path in membership.items():
        if controller in controllers.split(","):
            # Usually "cpu,cpuacct" with a link "cpu" beside it; containers may lack the link.
            for name in (controllers, controller):
                if (roots.cgroup / name).is_dir():
                    mount = roots.cgroup / name
                    return _Hierarchy(mount, 1, _find_visible(mount, path))
    return _find_unified(roots, membership)


def _find_unified(roots: Roots, membership: Mapping[str, str]) -> _Hierarchy | None:
    for mount in (roots.cgroup, roots.cgroup / "unified"):
        if "" in membership and (mount / "cgroup.controllers").exists():
            return _Hierarchy(mount, 2, _find_visible(mount, membership[""]))
    return None


def _find_visible(mount: Path, path: str) -> PurePosixPath:
    """The part of `path` that exists below `mount`.

    Inside a container without its own cgroup namespace the kernel prints the path
    as the host sees it ("/docker/abc/init.scope") while the mount begins at
    "/docker/abc"; with a namespace, a process outside of it gets "/../..". The
    longest tail that exists is right in the first case, the mount in the second.
    """
    parts = PurePosixPath("/" + path.strip("/")).parts[1:]
    if ".." in parts:
        return PurePosixPath("/")
    for start in range(len(parts)):
        tail = PurePosixPath("/", *parts[start:])
        if (mount / tail.relative_to("/")).is_dir():
            return tail
    return PurePosixPath("/")


# ---------------------------------------------------------------- what a group says


def _read_v1(files: KernelFiles, path: str, folder: Path) -> CgroupReading | None:
    limit = files.read_int(folder / "memory.limit_in_bytes")
    usage = files.read_int(folder / "memory.usage_in_bytes")
    if limit is None and usage is None:
        return None
    stat = files.read_fields(folder / "memory.stat", *_V1_STAT)
    return CgroupReading(
        path=path,
        version=1,
        limit_bytes=_finite(limit),
        high_bytes=None,
        limit_source=f"cgroup {path} memory.limit_in_bytes",
        usage_bytes=usage,
        **{field: stat.get(name, 0) for name, field in _V1_STAT.items()},
    )


def _with_hidden_ancestors(files: KernelFiles, mount: Path, top: CgroupReading) -> CgroupReading:
    """`top` under the tightest limit of the groups above the mount, if that is tighter.

    The usage of those groups cannot be seen, so the headroom that follows is what
    they would leave if this group were alone in them: an upper bound, and far
    better than not to know them at all.
    """
    stat = files.read_fields(mount / "memory.stat", _V1_HIDDEN)
    hidden = _finite(stat.get(_V1_HIDDEN))
    if top.path != "/" or hidden is None:
        return top
    if top.limit_bytes is not None and top.limit_bytes <= hidden:
        return top
    source = f"cgroup {top.path} hierarchical_memory_limit"
    return dataclasses.replace(top, limit_bytes=hidden, limit_source=source)


def _read_v2(files: KernelFiles, path: str, folder: Path) -> CgroupReading | None:
    """One version-2 group; None at the real root and where memory is not delegated."""
    usage = files.read_int(folder / "memory.current")
    limit = _read_max(files, folder / "memory.max")
    if usage is None and limit is None:
        return None
    stat = files.read_fields(folder / "memory.stat", *_V2_STAT)
    return CgroupReading(
        path=path,
        version=2,
        limit_bytes=limit,
        high_bytes=_read_max(files, folder / "memory.high"),
        limit_source=f"cgroup {path} memory.max",
        usage_bytes=usage,
        **{field: stat.get(name, 0) for name, field in _V2_STAT.items()},
    )


def _read_max(files: KernelFiles, path: Path) -> int | None:
    """The number in a version-2 limit file; None for "max", absent or garbage (noted)."""
    text = (files.read(path) or "max").strip()
    if text == "max":
        return None
    if text.isdecimal():
        return int(text)
    files.note(f"{path.name} is not a number")
    return None


def _finite(limit_bytes: int | None) -> int | None:
    if limit_bytes is None or not 0 <= limit_bytes < _V1_UNLIMITED_BYTES:
        return None
    return limit_bytes


# ---------------------------------------------------------------- CPUs


def _read_quota(files: KernelFiles, folder: Path) -> float | None:
    """CPUs that the group may use on average, from cpu.max (v2) or cpu.cfs_* (v1)."""
    text = files.read(folder / "cpu.max")
    if text is not None:
        quota_text, _, period_text = text.strip().partition(" ")
        if quota_text == "max":
            return None
        if not (quota_text.isdecimal() and period_text.isdecimal()):
            files.note("cpu.max is not two numbers")
            return None
        quota, period = int(quota_text), int(period_text)
    else:
        quota = files.read_int(folder / "cpu.cfs_quota_us") or 0
        period = files.read_int(folder / "cpu.cfs_period_us") or 0
    # Version 1 prints -1 for "no quota".
    return quota / period if quota > 0 and period > 0 else None


def _read_cpuset(files: KernelFiles, folder: Path) -> int | None:
    """The number of CPUs the group may run on; None where it does not say."""
    for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
        text = files.read(folder / name)
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
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return None
        total += int(last or first) - int(first) + 1
    return total if total > 0 else None
