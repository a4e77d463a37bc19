"""Which limit binds, how much is free below it, and how many CPUs may be used.

Covers: groups (nested, versions 1 and 2), the host, RLIMIT_AS; affinity, CPU sets
and CPU quotas.
Does not cover: reading them (probe.py); what a budget makes of the answer
(policy.py, planner.py).

The one idea: many limits hold at once and the tightest one decides, which need
not be the smallest: a large group that is nearly full leaves less than a small
empty one. So `memory_limit` names the smallest, `headroom` the one with the
least left, and both say which it was. The decisions are pure; only the three
public functions read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forebay.memory.probe import Probe
from forebay.memory.readings import (
    CgroupReading,
    CpuReading,
    HostReading,
    RlimitReading,
    StatmReading,
)

HOST = "host memory"
_ADDRESS_SPACE = "RLIMIT_AS"


@dataclass(frozen=True, slots=True)
class Limit:
    """The most bytes this process may ever have, and the words for who says so."""

    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes that are still free below the tightest limit.

    Attributes:
        bytes: Free now; 0 when the limit is reached or passed.
        limit: The limit that leaves the least.
        source: The words for it.
    """

    bytes: int
    limit: int
    source: str


def memory_limit(probe: Probe | None = None) -> Limit:
    """The smallest memory limit that holds for this process.

    Counts every memory group from the process' own up to the root (memory.max,
    memory.high or memory.limit_in_bytes), the machine's memory and RLIMIT_AS.
    RLIMIT_DATA is left out: it does not bind shared memory, where batches lie.

    Args:
        probe: Where to read; a fresh one when not given.

    Returns:
        The limit in bytes and its source, such as
        `"cgroup /docker/abc memory.limit_in_bytes"`, `"host memory"`, `"RLIMIT_AS"`.

    Any thread may call. Costs some 0.3 ms.
    """
    probe = probe or Probe()
    return decide_limit(probe.read_cgroups(), probe.read_host(), probe.read_rlimits())


def headroom(probe: Probe | None = None) -> Headroom:
    """Bytes still free below the tightest limit that binds this process.

    For a group: its limit less its usage, where file cache does not count as used
    (the kernel takes it back before it kills). For the machine: MemAvailable. For
    RLIMIT_AS: what is not mapped yet.

    Args:
        probe: Where to read; a fresh one when not given.

    Any thread may call, several times a second: nothing is remembered, so moves and
    limits that change are seen at once, and only what can bind is read. Costs some 0.1 ms.
    """
    probe = probe or Probe()
    rlimits = probe.read_rlimits()
    own = probe.read_statm() if rlimits.address_space_bytes is not None else None
    return decide_headroom(probe.read_limited_groups(), probe.read_host(), rlimits, own)


def usable_cpus(probe: Probe | None = None) -> int:
    """How many CPUs this process can keep busy, at least 1.

    The least of affinity, CPU set and CPU quota of every group; a quota of 1.5
    CPUs counts as 2, since two processes are needed to use it up.

    Args:
        probe: Where to read; a fresh one when not given.
    """
    probe = probe or Probe()
    return decide_cpus(probe.read_affinity(), probe.read_cpu_groups())


def decide_limit(
    groups: Iterable[CgroupReading], host: HostReading, rlimits: RlimitReading
) -> Limit:
    """The smallest of all limits; the first named of equals, groups before the host."""
    limits = [Limit(b, g.source) for g in groups if (b := g.binding_bytes) is not None]
    limits.append(Limit(host.total_bytes, HOST))
    if rlimits.address_space_bytes is not None:
        limits.append(Limit(rlimits.address_space_bytes, _ADDRESS_SPACE))
    return min(limits, key=lambda limit: limit.bytes)


def decide_headroom(
    groups: Sequence[CgroupReading],
    host: HostReading,
    rlimits: RlimitReading,
    own: StatmReading | None,
) -> Headroom:
    """The limit that leaves the least, and what it leaves; never below 0."""
    rooms = [
        Headroom(max(0, limit - held), limit, group.source)
        for group in groups
        if (limit := group.binding_bytes) is not None and (held := group.held_bytes) is not None
    ]
    rooms.append(Headroom(host.available_bytes, host.total_bytes, HOST))
    if rlimits.address_space_bytes is not None:
        mapped = own.vm_bytes if own else 0
        limit = rlimits.address_space_bytes
        rooms.append(Headroom(max(0, limit - mapped), limit, _ADDRESS_SPACE))
    return min(rooms, key=lambda room: room.bytes)


def decide_cpus(affinity: int, groups: Iterable[CpuReading]) -> int:
    """The least of `affinity`, each set and each quota (rounded up), at least 1."""
    said = [affinity]
    for group in groups:
        said += [] if group.set_cpus is None else [group.set_cpus]
        said += [] if group.quota_cpus is None else [math.ceil(group.quota_cpus)]
    return max(1, min(said))
