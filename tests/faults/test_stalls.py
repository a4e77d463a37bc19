"""A loop that waits and waits is told what for."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.errors import Finding
from forebay.workers.stacks import read_stack

from .datasets import Gated, Numbered

pytestmark = pytest.mark.timeout(90)


def wait_for_report(dataset: Any, **options: Any) -> forebay.Stalled:
    """Batch 2 never comes; the report on that. The gate is opened then."""
    given: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "stall_report_s": 1}
    with forebay.DataLoader(dataset, **(given | options)) as loader:
        iterator = iter(loader)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", forebay.Stalled)  # workers may take that to start
            assert [int(next(iterator)[0, 0]) for _ in range(2)] == [0, 2]
        with warnings.catch_warnings():
            warnings.simplefilter("error", forebay.Stalled)
            with pytest.raises(forebay.Stalled) as told:
                next(iterator)
        dataset.open_gate()
        assert [int(batch[0, 0]) for batch in iterator] == [4, 6, 8, 10]
    return told.value


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_report_names_batch_worker_and_line(tmp_path: Path, method: str) -> None:
    stalled = wait_for_report(Gated(tmp_path, at=4, length=12), multiprocessing_context=method)
    assert (stalled.number, stalled.indices) == (2, [4, 5])
    assert stalled.pid is not None
    assert "datasets.py" in stalled.stack
    assert "in wait_until" in stalled.stack
    assert "in __getitem__" in stalled.stack
    assert "MiB of its own" in str(stalled)


def test_threads_tell_too(tmp_path: Path) -> None:
    stalled = wait_for_report(Gated(tmp_path, at=4, length=12), worker_backend="thread")
    assert stalled.number == 2
    assert "in wait_until" in stalled.stack
    assert "a thread of this process" in str(stalled)


class Native(Gated):
    """Stuck in C code that lets nobody else run in this interpreter."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.at and not (self.place / "open").exists():
            libc = ctypes.PyDLL(None)
            while not (self.place / "open").exists():
                libc.usleep(900_000)
        return super().__getitem__(index)


def test_a_worker_that_is_stuck_in_native_code_tells(tmp_path: Path) -> None:
    stalled = wait_for_report(Native(tmp_path, at=4, length=12))
    assert "test_stalls.py" in stalled.stack


def test_a_stopped_worker_is_said_to_be_stopped(tmp_path: Path) -> None:
    with forebay.DataLoader(Numbered(400), 1, num_workers=1, stall_report_s=1) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        os.kill(iterator._workers[0].pid, signal.SIGSTOP)
        timer = threading.Timer(2.5, os.kill, (iterator._workers[0].pid, signal.SIGCONT))
        timer.start()
        with pytest.warns(forebay.Stalled, match="which somebody has stopped"):
            rest = list(iterator)
        timer.join()
        assert len(rest) == 399


def test_there_is_one_report_for_each_wait(tmp_path: Path) -> None:
    dataset = Gated(tmp_path, at=4, length=12)
    opener = threading.Timer(2.5, dataset.open_gate)
    with (
        warnings.catch_warnings(record=True) as told,
        forebay.DataLoader(dataset, 2, num_workers=2, stall_report_s=0.5) as loader,
    ):
        warnings.simplefilter("always")
        opener.start()
        assert len(list(loader)) == 6
    opener.join()
    assert [each.category for each in told].count(forebay.Stalled) == 1


@pytest.mark.parametrize("period_s", [None, 60.0])
def test_nothing_is_said_without_cause(tmp_path: Path, period_s: float | None) -> None:
    dataset = Gated(tmp_path, at=4, length=12)
    opener = threading.Timer(1.5, dataset.open_gate)
    with (
        warnings.catch_warnings(),
        forebay.DataLoader(dataset, 2, num_workers=2, stall_report_s=period_s) as loader,
    ):
        warnings.simplefilter("error", forebay.Stalled)
        opener.start()
        assert len(list(loader)) == 6
    opener.join()


@pytest.mark.parametrize("value", [0, -1, "60", True, [1], float("nan")])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(forebay.InvalidOption, match="stall_report_s"):
        forebay.DataLoader(Numbered(4), stall_report_s=value)


# -- forks while others hold locks ----------------------------------------------------------------

LOCK = threading.Lock()


class Locking(Gated):
    """Needs a lock of this module."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.at and not (self.place / "open").exists():
            while not LOCK.acquire(timeout=0.1):
                if (self.place / "open").exists():
                    break
        return super().__getitem__(index)


@contextmanager
def held_by(name: str) -> Iterator[None]:
    """Another thread holds the lock."""
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            is_held.set()
            may_end.wait()

    thread = threading.Thread(target=hold, name=name)
    thread.start()
    is_held.wait()
    try:
        yield
    finally:
        may_end.set()
        thread.join()


def test_a_fork_made_while_another_thread_held_a_lock_is_named_as_such(tmp_path: Path) -> None:
    with held_by("logging-of-the-user"):
        stalled = wait_for_report(
            Locking(tmp_path, at=4, length=12), multiprocessing_context="fork"
        )
    assert "forked while other threads ran in this process (" in str(stalled)
    assert "logging-of-the-user" in str(stalled)
    assert "'forkserver' has no such locks" in str(stalled)
    assert "in __getitem__" in stalled.stack


# -- its parts -------------------------------------------------------------------------------------


def test_a_worker_that_does_not_catch_the_signal_is_left_alone() -> None:
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        assert read_stack(child) == ""
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_nobody_there_has_no_stack() -> None:
    assert read_stack(2**22 - 1) == ""


FOUND = Finding(61.2, 7, [1], 42, "sleeping", 0, "", (), lacks_memory=False)


def test_a_batch_that_is_with_nobody_is_said_to_lack_memory_or_a_worker() -> None:
    nowhere = Finding(61.2, None, None, None, "", 0, "", (), lacks_memory=True)
    assert "memory holds it back" in str(forebay.Stalled.about(nowhere))
    assert "computes nothing" in str(forebay.Stalled.about(FOUND))
    assert "stack" not in str(forebay.Stalled.about(FOUND))
