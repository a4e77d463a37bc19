"""A memory cgroup of our own counts, limits, kills and disappears."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.bench.cgroup import (
    V1,
    V2,
    GroupUnavailable,
    MemoryGroup,
    parents_to_try,
    value_after,
)
from forebay.units import MIB

needs_group = pytest.mark.cgroup


@pytest.fixture
def can_make_groups() -> None:
    try:
        with MemoryGroup():
            pass
    except GroupUnavailable as unavailable:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to test the group. {unavailable}")
        pytest.skip(str(unavailable))


@pytest.fixture
def group(can_make_groups: None) -> Iterator[MemoryGroup]:
    with MemoryGroup() as group:
        yield group


def hold(group: MemoryGroup, statement: str) -> subprocess.Popen[bytes]:
    """A Python in the group that runs `statement`, says so, and waits for its input to close."""
    code = f"import sys, mmap\n{statement}\nprint(flush=True)\nsys.stdin.read()"
    child = subprocess.Popen(
        group.enter_command([sys.executable, "-c", code]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"\n"
    return child


def finish(child: subprocess.Popen[bytes]) -> int:
    child.communicate(timeout=30)
    return child.returncode


@needs_group
def test_anonymous_memory_of_a_child_is_counted(group: MemoryGroup) -> None:
    child = hold(group, f"x = bytearray({64 * MIB})")
    assert 64 * MIB <= group.read().anon_bytes < 96 * MIB
    finish(child)


@needs_group
def test_shared_memory_is_told_from_anonymous(group: MemoryGroup) -> None:
    child = hold(group, f"x = mmap.mmap(-1, {64 * MIB}); x.write(b'x' * {64 * MIB})")
    assert 64 * MIB <= group.read().shmem_bytes < 80 * MIB
    finish(child)


@needs_group
def test_the_command_keeps_its_exit_status(group: MemoryGroup) -> None:
    assert subprocess.run(group.enter_command(["sh", "-c", "exit 7"]), check=False).returncode == 7


@needs_group
def test_the_command_keeps_its_pid(group: MemoryGroup) -> None:
    child = hold(group, "")
    assert group.pids() == (child.pid,)
    finish(child)


@needs_group
def test_a_process_above_the_limit_is_killed_and_counted(can_make_groups: None) -> None:
    with MemoryGroup(64 * MIB) as group:
        command = [sys.executable, "-c", f"bytearray({160 * MIB})"]
        status = subprocess.run(group.enter_command(command), check=False).returncode
        assert (status, group.read().oom_kills) == (-signal.SIGKILL, 1)


@needs_group
def test_what_is_left_inside_is_killed_at_the_end(can_make_groups: None) -> None:
    with MemoryGroup() as group:
        child = hold(group, "")
    assert finish(child) == -signal.SIGKILL


@needs_group
def test_the_group_is_gone_at_the_end(can_make_groups: None) -> None:
    with MemoryGroup() as group:
        path = group.path
    assert not path.exists()


@needs_group
def test_groups_made_inside_are_removed_too(can_make_groups: None) -> None:
    with MemoryGroup() as group:
        path = group.path
        (path / "inner").mkdir()
    assert not path.exists()


def test_a_closed_group_has_no_path() -> None:
    with pytest.raises(RuntimeError, match="not open"):
        _ = MemoryGroup().path


def test_no_controller_is_a_sentence_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(GroupUnavailable, match="No memory cgroup can be made here: ") as caught:
        MemoryGroup(root=tmp_path).__enter__()
    assert "Run as root" in caught.value.remedy


def test_version_1_is_tried_at_the_top() -> None:
    tried = parents_to_try(Path("/cg"), "4:memory:/some/job\n0::/\n")
    assert tried[0] == (V1, Path("/cg/memory"))


def test_version_2_is_tried_from_the_nearest_group_up() -> None:
    tried = parents_to_try(Path("/cg"), "0::/a/b\n")
    assert tried == ((V2, Path("/cg/a/b")), (V2, Path("/cg/a")), (V2, Path("/cg")))


def test_nothing_outside_the_mount_is_tried() -> None:
    assert parents_to_try(Path("/cg"), "0::/\n") == ((V2, Path("/cg")),)


@pytest.mark.parametrize(
    ("key", "value"), [(b"anon ", 1), (b"file ", 22), (b"shmem ", 333), (b"swap ", 0)]
)
def test_a_value_is_found_by_its_whole_key(key: bytes, value: int) -> None:
    assert value_after(key, b"anon 1\ninactive_anon 9\nfile 22\nshmem 333") == value
