"""Too few descriptors, addresses, processes, shared memory or disk: it goes on or says so."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from typing import Any

import pytest

import forebay
from forebay.units import MIB

from .conftest import Play
from .datasets import Numbered

pytestmark = pytest.mark.timeout(120)

IN_A_SMALL_WORLD = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size={} tmpfs {} && exec "$@"',
)


def small(place: str, size: str) -> tuple[str, ...]:
    """Words before a command for which `place` is a file system of that size."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("only root may mount")
    before = (*IN_A_SMALL_WORLD[:-1], IN_A_SMALL_WORLD[-1].format(size, place), "sh")
    if subprocess.run([*before, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    return before


# -- descriptors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_bytes", [1000, 100_000], ids=["small", "large"])
def test_a_consumer_may_keep_more_batches_than_it_may_open_files(
    play: Play, sample_bytes: int
) -> None:
    scene = play(
        "limited", limit="NOFILE", above_now=24, length=400, sample_bytes=sample_bytes, keeps=True
    )
    code, out, errors = scene.finish()
    assert (code, out, errors) == (0, "200 batches\n", "")
    scene.check_nothing_is_left()


def test_too_few_descriptors_for_the_workers_are_told_and_nothing_is_left(play: Play) -> None:
    scene = play(
        "limited", limit="NOFILE", above_now=9, length=24, sample_bytes=100_000, num_workers=16
    )
    code, out, errors = scene.finish()
    assert (code, errors) == (0, "")
    assert "Too many open files" in out
    scene.check_nothing_is_left()


@pytest.mark.xfail(strict=True, reason="the crew is not made smaller when workers cannot start")
def test_a_loader_goes_on_with_the_workers_that_descriptors_allow(play: Play) -> None:
    scene = play(
        "limited", limit="NOFILE", above_now=18, length=24, sample_bytes=100_000, num_workers=16
    )
    assert scene.finish()[1] == "12 batches\n"


# -- addresses and processes -----------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["200MiB", None], ids=["a size", "auto"])
def test_an_epoch_fits_into_a_limited_address_space(play: Play, budget: str | None) -> None:
    scene = play(
        "limited",
        limit="AS",
        above_now=600 * MIB,
        length=40,
        sample_bytes=8 * MIB,
        memory_budget=budget,
    )
    code, out, errors = scene.finish()
    assert (code, out, errors) == (0, "20 batches\n", "")
    scene.check_nothing_is_left()


def refuse_forks(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Processes below this one may fork so often; then the kernel has no memory for more."""
    fork, main, done = os.fork, os.getpid(), []

    def refusing() -> int:
        if os.getpid() != main:
            done.append(0)
            if len(done) > after:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return fork()

    monkeypatch.setattr(os, "fork", refusing)


def make_loader(**options: Any) -> Any:
    return forebay.DataLoader(
        Numbered(24, 100_000), batch_size=2, num_workers=3, timeout=3, **options
    )


@pytest.mark.parametrize(
    "after",
    [
        0,
        2,
    ],
)
def test_a_fork_without_memory_is_told(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    refuse_forks(monkeypatch, after=after)
    with make_loader() as loader, pytest.raises(forebay.WorkersUnavailable) as told:
        list(loader)
    assert f"worker {after}" in str(told.value)
    assert "Cannot allocate memory" in str(told.value)
    monkeypatch.undo()
    assert len(list(loader)) == 12
    loader.close()


@pytest.mark.xfail(strict=True, reason="the crew is not made smaller when workers cannot start")
def test_a_loader_goes_on_with_the_workers_that_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_forks(monkeypatch, after=2)
    with make_loader() as loader:
        assert len(list(loader)) == 12


# -- shared memory and disk ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "collates",
    [
        ["default", "as_they_are"],
        ["within_default"],
    ],
    ids=", ".join,
)
def test_large_batches_do_not_need_the_systems_shared_memory(
    play: Play, collates: list[str]
) -> None:
    scene = play("small_shared_memory", before=small("/dev/shm", "64m"), collates=collates)
    code, out, errors = scene.finish()
    told = ["64 MiB free", *[f"3 batches by {name}" for name in collates]]
    assert (code, errors, out.splitlines()) == (0, "", told)
    scene.check_nothing_is_left()


EVERY_BATCH = " ".join(map(str, range(12)))


def test_batches_that_make_room_come_back_from_the_disk(play: Play) -> None:
    scene = play("evicting")
    code, out, errors = scene.finish(patience_s=8)
    assert (code, out, errors) == (0, f"{EVERY_BATCH}; evicted\n", "")
    scene.check_nothing_is_left()


def test_no_batch_is_lost_where_the_disk_is_full(play: Play, tmp_path: Any) -> None:
    (tmp_path / "tmp").mkdir()
    scene = play("evicting", before=small(str(tmp_path / "tmp"), "64k"))
    code, out, errors = scene.finish(patience_s=8)
    assert (code, out) == (0, f"{EVERY_BATCH}; none evicted\n"), errors
    scene.check_nothing_is_left()
