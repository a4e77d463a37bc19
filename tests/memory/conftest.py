"""A made-up machine, and a memory group of one's own on the real one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, final

import pytest

from tests.memory.trees import Tree

CGROUP = Path("/sys/fs/cgroup")
_serial = itertools.count()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An empty machine with a /proc."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return Tree(tmp_path)


@final
class Groups:
    """Real groups of one's own; they go when the test ends."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def memory(self, limit_bytes: int, above: Path | None = None) -> Path:
        """One with a memory limit, below the group `above` or the root."""
        version_1 = (CGROUP / "memory" / "memory.limit_in_bytes").exists()
        name = "memory.limit_in_bytes" if version_1 else "memory.max"
        return self._make("memory", version_1, above, {name: str(limit_bytes)})

    def cpu(self, cpus: float) -> Path:
        """One with a CPU quota."""
        version_1 = (CGROUP / "cpu" / "cpu.cfs_quota_us").exists() or (CGROUP / "cpu").is_dir()
        quota_us = int(cpus * 100_000)
        settings = {"cpu.max": f"{quota_us} 100000"}
        if version_1:
            settings = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(quota_us)}
        return self._make("cpu", version_1, None, settings)

    def _make(
        self, controller: str, version_1: bool, above: Path | None, settings: dict[str, str]
    ) -> Path:
        mount = CGROUP / controller if version_1 else CGROUP
        group = (above or mount) / f"forebay-test-{os.getpid()}-{next(_serial)}"
        try:
            if not version_1:  # a group has what the one above it hands down
                (group.parent / "cgroup.subtree_control").write_text(f"+{controller}")
            group.mkdir()
            self._made.append(group)
            for name, text in settings.items():
                (group / name).write_text(text)
        except OSError as error:
            give_up(f"cannot make a {controller} group at {group}: {error.strerror}; run as root")
        return group

    def remove(self) -> None:
        for group in reversed(self._made):
            group.rmdir()


@pytest.fixture
def groups() -> Iterator[Groups]:
    """Makes real groups; a child enters one by its cgroup.procs."""
    groups = Groups()
    yield groups
    groups.remove()


@pytest.fixture
def memory_group(groups: Groups) -> Callable[[int], Path]:
    """Makes a real memory group with a limit."""
    return groups.memory


def run_inside(code: str, *places: Path, prefix: str = "") -> bytes:
    """The output of a fresh interpreter that was in the groups `places` before it began.

    Args:
        code: What it runs; without single quotes.
        places: Folders of groups.
        prefix: A command that starts the interpreter, such as `taskset -c 0`.
    """
    enter = "".join(f"echo $$ > {place}/cgroup.procs && " for place in places)
    command = f"{enter}exec {prefix} {sys.executable} -c '{code}'"
    answer = subprocess.run(["sh", "-c", command], capture_output=True, timeout=100, check=False)
    assert not answer.returncode, answer.stderr.decode()
    return answer.stdout


def give_up(reason: str) -> NoReturn:
    """Skip, but not in CI: there the claim must be proven."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"may not skip under CI=true: {reason}")
    pytest.skip(reason)
