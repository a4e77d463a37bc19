"""A made-up machine, and a memory group of one's own on the real one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.memory.trees import Tree

CGROUP = Path("/sys/fs/cgroup")
_serial = itertools.count()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An empty machine with a /proc."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return Tree(tmp_path)


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], Path]]:
    """Makes a real memory group with a limit; a child enters it by its cgroup.procs."""
    made: list[Path] = []

    def make(limit_bytes: int) -> Path:
        version_1 = (CGROUP / "memory" / "memory.limit_in_bytes").exists()
        mount = CGROUP / "memory" if version_1 else CGROUP
        group = mount / f"forebay-test-{os.getpid()}-{next(_serial)}"
        try:
            group.mkdir()
            made.append(group)
            name = "memory.limit_in_bytes" if version_1 else "memory.max"
            (group / name).write_text(str(limit_bytes))
        except OSError as error:
            give_up(f"cannot make a memory group at {group}: {error.strerror}; run as root")
        return group

    yield make
    for group in made:
        group.rmdir()


def give_up(reason: str) -> None:
    """Skip, but not in CI: there the claim must be proven."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"may not skip under CI=true: {reason}")
    pytest.skip(reason)
