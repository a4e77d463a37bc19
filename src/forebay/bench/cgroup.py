"""A memory cgroup of our own: run a command in it, read it, kill it, remove it.

Covers: making one group (v1 as root, v2 where the memory controller is handed
down to us), an optional limit that counts swap too, and a way in that a child
takes *before* exec, so that its first page is already counted.
Does not cover: sampling over time (sampler.py), limits of the group that this
process itself lives in (memory/limits.py).

The one idea: nobody but the kernel counts, and nobody else's group is touched.

    with MemoryGroup(limit_bytes=512 * MIB) as group:
        child = subprocess.Popen(group.enter_command([sys.executable, "job.py"]))
        child.wait()
        print(group.read())     # GroupReading(anon_bytes=..., shmem_bytes=..., ...)

Every process that is still inside at the end of the `with` block is killed.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, final

from forebay.errors import ForebayError

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")

_ENTER: Final = 'echo $$ > "$0" || exit 125; exec "$@"'
"""`exec` after joining: the command keeps the pid of the shell, and whatever the
shell itself had allocated is gone. A preexec function would do the same, but is
unsafe in a process that has threads, and a sampler is one."""

_REMOVAL_TRIES: Final = 100
_REMOVAL_PAUSE_S: Final = 0.05
"""A killed process leaves its group only once it is reaped and its pages are
freed: up to a second for a few GiB. Five seconds are given."""


class GroupUnavailable(ForebayError):  # noqa: N818 - a state of the machine, not a mistake
    """No memory cgroup can be made here; `reason` says why, `remedy` what to do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason} {remedy}")
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class GroupReading:
    """What a group held at one moment, in bytes, and how often the kernel killed in it."""

    anon_bytes: int
    shmem_bytes: int
    file_bytes: int
    swap_bytes: int
    oom_kills: int

    @property
    def held_bytes(self) -> int:
        """What cannot simply be dropped: anonymous, shared and swapped memory."""
        return self.anon_bytes + self.shmem_bytes + self.swap_bytes


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names that one version of cgroup gives to the same things.

    In both, the bytes under `file_key` hold those under `shmem_key` too.
    """

    version: int
    limit_file: str
    swap_limit_file: str
    anon_key: bytes
    shmem_key: bytes
    file_key: bytes
    kills_file: str


V1: Final = Dialect(
    version=1,
    limit_file="memory.limit_in_bytes",
    swap_limit_file="memory.memsw.limit_in_bytes",
    # `total_`: with the sub-groups that a job may make for itself.
    anon_key=b"total_rss ",
    shmem_key=b"total_shmem ",
    file_key=b"total_cache ",
    kills_file="memory.oom_control",
)
V2: Final = Dialect(
    version=2,
    limit_file="memory.max",
    swap_limit_file="memory.swap.max",
    anon_key=b"anon ",
    shmem_key=b"shmem ",
    file_key=b"file ",
    kills_file="memory.events",
)


def value_after(key: bytes, text: bytes) -> int:
    """The number on the line of `text` that starts with `key`; 0 where there is none."""
    start = 0 if text.startswith(key) else text.find(b"\n" + key) + 1
    if start == 0 and not text.startswith(key):
        return 0
    end = text.find(b"\n", start)
    return int(text[start + len(key) : end if end >= 0 else len(text)])


def parents_to_try(root: Path, own_groups: str) -> tuple[tuple[Dialect, Path], ...]:
    """Where a group may be made, best first: pure, from the text of /proc/self/cgroup.

    v1: the top of the memory hierarchy. v2: the nearest group above this process
    that hands the memory controller down, so that a limit which already binds
    goes on binding; the group of this process itself holds processes and may
    not (the kernel's "no internal processes" rule).
    """
    found: list[tuple[Dialect, Path]] = []
    for line in own_groups.splitlines():
        _, controllers, place = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append((V1, root / "memory"))
        elif controllers == "":
            own = root / place.lstrip("/")
            above = [own, *own.parents]
            found.extend((V2, path) for path in above if path == root or root in path.parents)
    return tuple(sorted(found, key=lambda each: each[0].version))


@final
class MemoryGroup:
    """A context manager around one memory cgroup that belongs to us.

    Invariant: between `__enter__` and `__exit__` the directory `path` exists,
    was made by this object, and is removed by it together with every process
    inside. Raises `GroupUnavailable` on entry where none can be made.

    Args:
        limit_bytes: the most anonymous, shared and file memory inside, swap
            included; the kernel reclaims file pages first and then kills.
            None measures without limiting.
        root: where the cgroup file systems are mounted; a test passes its own.
    """

    def __init__(self, limit_bytes: int | None = None, *, root: Path = CGROUP_ROOT) -> None:
        self.limit_bytes = limit_bytes
        self._root = root
        self._name = f"forebay-{os.getpid()}-{secrets.token_hex(4)}"
        self._path: Path | None = None
        self._dialect = V1
        self._descriptors: dict[str, int] = {}

    @property
    def path(self) -> Path:
        """The directory of the group; only while it is open."""
        if self._path is None:
            msg = "MemoryGroup is not open. Use it in a `with` block."
            raise RuntimeError(msg)
        return self._path

    @property
    def version(self) -> int:
        """1 or 2: the version of cgroup that counts."""
        return self._dialect.version

    def __enter__(self) -> MemoryGroup:
        refusals: list[str] = []
        for dialect, parent in parents_to_try(self._root, OWN_GROUPS.read_text()):
            refusal = self._try_make(dialect, parent)
            if refusal is None:
                return self
            refusals.append(refusal)
        tried = "; ".join(dict.fromkeys(refusals)) or "no cgroup file system holds memory"
        raise GroupUnavailable(
            f"No memory cgroup can be made here: {tried}.",
            "Run as root, in a container with a writable cgroup tree (docker run --privileged), "
            "or under `systemd-run --user --scope -p Delegate=yes`.",
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        path, self._path = self.path, None
        if not _kill_and_remove(path):
            warnings.warn(
                f"The memory cgroup {path} could not be removed: it still holds "
                f"processes {_pids_in(path)}. End them, then remove it with rmdir.",
                ResourceWarning,
                stacklevel=2,
            )

    def enter_command(self, command: Sequence[str]) -> list[str]:
        """`command`, wrapped so that it joins the group before it starts.

        It keeps its pid and its exit status; 125 means that joining failed.
        """
        return ["/bin/sh", "-c", _ENTER, str(self.path / "cgroup.procs"), *command]

    def set_limit(self, limit_bytes: int) -> None:
        """Limit what is inside from now on; what is above is reclaimed, or killed for.

        Raises:
            OSError: The kernel refuses it: so much is in use that cannot be reclaimed.
        """
        assert self._dialect is not None
        _set_limit(self._dialect, self.path, limit_bytes)
        self.limit_bytes = limit_bytes

    def read(self) -> GroupReading:
        """One reading, in about 0.1 ms; from any thread or process that holds the object."""
        stat = self._read_file("memory.stat")
        words = self._dialect
        shmem = value_after(words.shmem_key, stat)
        return GroupReading(
            anon_bytes=value_after(words.anon_key, stat),
            shmem_bytes=shmem,
            file_bytes=max(0, value_after(words.file_key, stat) - shmem),
            swap_bytes=self._read_swap_bytes(stat),
            oom_kills=value_after(b"oom_kill ", self._read_file(words.kills_file)),
        )

    def pids(self) -> tuple[int, ...]:
        """The processes inside now."""
        return _pids_in(self.path)

    def kill(self) -> None:
        """Send SIGKILL to every process inside now."""
        _kill_all(self.path)

    def _try_make(self, dialect: Dialect, parent: Path) -> str | None:
        """Make the group under `parent`; why not, in words, if it cannot be."""
        path = parent / self._name
        try:
            path.mkdir()
        except OSError as error:
            return f"{parent}: {error.strerror}"
        try:
            refusal = self._set_up(dialect, path)
        except OSError as error:
            refusal = f"{error.filename or path}: {error.strerror}"
        if refusal is not None:
            with suppress(OSError):
                path.rmdir()
            return refusal
        self._path, self._dialect = path, dialect
        return None

    def _set_up(self, dialect: Dialect, path: Path) -> str | None:
        if not (path / dialect.limit_file).exists():
            return f"{path.parent} does not hand the memory controller down"
        if self.limit_bytes is not None:
            _set_limit(dialect, path, self.limit_bytes)
        # Joining needs rights on the group we would leave too: try it with a
        # child that does nothing, instead of failing after the job was planned.
        argv = ["/bin/sh", "-c", _ENTER, str(path / "cgroup.procs"), "true"]
        trial = subprocess.run(argv, check=False, capture_output=True, timeout=10)
        return None if trial.returncode == 0 else f"{path.parent}: a process may not join"

    def _read_file(self, name: str) -> bytes:
        """The text of a file of the group; its descriptor is kept and read from offset 0."""
        descriptor = self._descriptors.get(name)
        if descriptor is None:
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors[name] = descriptor
        return os.pread(descriptor, 16384, 0)

    def _read_swap_bytes(self, stat: bytes) -> int:
        if self._dialect.version == 1:
            return value_after(b"total_swap ", stat)
        try:
            return int(self._read_file("memory.swap.current"))
        except OSError:  # a kernel without swap accounting
            return 0


def _set_limit(dialect: Dialect, path: Path, limit_bytes: int) -> None:
    (path / dialect.limit_file).write_text(str(limit_bytes))
    swap = path / dialect.swap_limit_file
    if swap.exists():
        # v1 limits memory and swap together, v2 swap alone.
        swap.write_text(str(limit_bytes) if dialect.version == 1 else "0")


def _pids_in(path: Path) -> tuple[int, ...]:
    try:
        return tuple(int(line) for line in (path / "cgroup.procs").read_text().split())
    except OSError:
        return ()


def _kill_all(path: Path) -> None:
    with suppress(OSError):
        # One write that no fork can outrun (v2, Linux 5.14 on).
        (path / "cgroup.kill").write_text("1")
        return
    for pid in _pids_in(path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill_and_remove(path: Path) -> bool:
    """Whether the group is gone; kills again at each try, since a fork may have been under way."""
    for _ in _tries():
        _kill_all(path)
        try:
            for inner in sorted(_groups_below(path), reverse=True):
                _kill_all(inner)
                inner.rmdir()
            path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            continue
        return True
    return False


def _groups_below(path: Path) -> list[Path]:
    """Groups that the job made inside ours: they hold it open."""
    return [Path(where) for where, _, _ in os.walk(path) if Path(where) != path]


def _tries() -> Iterator[int]:
    for attempt in range(_REMOVAL_TRIES):
        yield attempt
        time.sleep(_REMOVAL_PAUSE_S)
