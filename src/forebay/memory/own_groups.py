"""What the memory groups of this process have met, and what the deepest one holds.

Covers: events over the chain of groups; the bytes of the own group when the loader is
alone in it, which are then the cheapest exact footprint.
Does not cover: finding groups, and their limits (cgroup.py); what follows from it.

The one idea: a group's figures are about everybody in it, so they are ours only as far
as nobody else is there. So who is there is asked each time, not once: a shell that
someone opens in the container ends the certainty, and its end brings it back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from forebay.memory.cgroup import find_chain, read_membership
from forebay.memory.kernel_files import KernelFiles
from forebay.memory.readings import MemoryEvents, Roots

_V1_HELD = ("total_rss", "total_shmem", "total_swap", "total_swapcached")
_V2_HELD = ("anon", "shmem", "swapcached")
"""Lines of memory.stat, of the group and all below it; swap of version 2 has its own file."""

_V2_EVENTS = ("oom_kill", "high", "max")

_NO_SUBFOLDERS = 2
"""Links to a folder of the kernel's that has no folder in it: its name, and its own dot.
File systems that do not count so say 1, and are then searched."""


def read_events(files: KernelFiles, roots: Roots) -> MemoryEvents:
    """Events of this process' groups and of those below its own; see `Probe.read_events`."""
    chain = find_chain(roots, read_membership(files, roots, "self"), "memory")
    if chain is None:
        return _read_host_kills(files, roots)
    told: list[tuple[str, tuple[int, int, int]]] = []
    for path, folder in chain.groups:
        if chain.version == 1:
            counts = _read_events_v1(files, folder)
        else:
            counts = _read_events_v2(files, folder, is_own=not told)
        if counts is not None:
            told.append((path, counts))
    if not told:
        return _read_host_kills(files, roots)
    kills, high, limit_met = (sum(column) for column in zip(*(c for _, c in told), strict=True))
    return MemoryEvents(kills, high, limit_met, f"cgroup {', '.join(path for path, _ in told)}")


def read_sole_bytes(
    files: KernelFiles, roots: Roots, pids: Collection[int], is_alive: Callable[[int], bool]
) -> int | None:
    """Bytes that the deepest group holds, None unless `pids` are alone in it.

    Args:
        files: Reads.
        roots: Where.
        pids: Who must be in it or below it, and nobody else.
        is_alive: Asked for those of `pids` that are not there: an ended one holds nothing.
    """
    chain = find_chain(roots, read_membership(files, roots, "self"), "memory")
    for _, folder in chain.groups if chain else ():
        held = _read_held(files, folder, 1 if chain and chain.version == 1 else 2)
        if held is not None:
            missing = _find_missing(files, folder, frozenset(pids))
            return None if missing is None or any(map(is_alive, missing)) else held
    return None


# ---------------------------------------------------------------- events


def _read_events_v1(files: KernelFiles, folder: str) -> tuple[int, int, int] | None:
    # Each group counts only its own here: the kernel stops at the first one.
    kills = files.read_fields(f"{folder}/memory.oom_control", "oom_kill").get("oom_kill")
    limit_met = files.read_count(f"{folder}/memory.failcnt")
    return None if kills is None and limit_met is None else (kills or 0, 0, limit_met or 0)


def _read_events_v2(
    files: KernelFiles, folder: str, *, is_own: bool
) -> tuple[int, int, int] | None:
    # memory.events counts all groups below as well: right for the own group, in which a
    # worker may have a group of its own, and double for those above. Before Linux 5.3
    # there is no other file, and it counted only the group itself.
    fields: dict[str, int] = {}
    if not is_own:
        fields = files.read_fields(f"{folder}/memory.events.local", *_V2_EVENTS)
    fields = fields or files.read_fields(f"{folder}/memory.events", *_V2_EVENTS)
    kills, high, limit_met = (fields.get(name, 0) for name in _V2_EVENTS)
    return (kills, high, limit_met) if fields else None


def _read_host_kills(files: KernelFiles, roots: Roots) -> MemoryEvents:
    """Without groups the kernel tells the kills of the whole machine."""
    fields = files.read_fields(roots.proc / "vmstat", "oom_kill")
    return MemoryEvents(fields.get("oom_kill", 0), 0, 0, "host" if fields else "not told")


# ---------------------------------------------------------------- what is held


def _read_held(files: KernelFiles, folder: str, version: int) -> int | None:
    """Anonymous, shared and swapped bytes; None where the group has no such file."""
    names = _V1_HELD if version == 1 else _V2_HELD
    stat = files.read_fields(f"{folder}/memory.stat", *names)
    resident = [stat[name] for name in names[:2] if name in stat]
    if len(resident) < 2:  # noqa: PLR2004 - without both the sum would be wrong
        return None
    if version == 1:
        swapped = stat.get("total_swap", 0) - stat.get("total_swapcached", 0)
    else:
        swapped = files.read_count(f"{folder}/memory.swap.current") or 0
        swapped -= stat.get("swapcached", 0)
    # What was swapped in and still has its place in swap would count twice.
    return sum(resident) + max(0, swapped)


def _find_missing(files: KernelFiles, folder: str, pids: frozenset[int]) -> frozenset[int] | None:
    """Those of `pids` that are not in `folder` or below; None when others are there."""
    missing = pids
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        members = _read_members(files, place)
        if members is None or not members <= pids:
            return None
        missing -= members
        below = _list_folders(place)
        if below is None:
            return None
        waiting += below
    return missing


def _read_members(files: KernelFiles, folder: str) -> set[int] | None:
    """The processes in one group; 0 stands for one that cannot be seen from here."""
    for name in ("cgroup.procs", "tasks"):
        text = files.read(f"{folder}/{name}")
        if text is not None:
            words = text.split()
            return {int(word) for word in words} if all(map(_is_pid, words)) else None
    return None


def _is_pid(word: str) -> bool:
    return word.isdecimal() and len(word) < 11  # noqa: PLR2004 - the kernel's are 32 bits


def _list_folders(folder: str) -> list[str] | None:
    """The groups right below; None when that cannot be told. 2 us where there are none."""
    try:
        if os.stat(folder).st_nlink == _NO_SUBFOLDERS:
            return []
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return None
