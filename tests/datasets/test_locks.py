"""Locks among the threads and processes that share a file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from forebay.datasets.locks import FileLocks
from forebay.datasets.shared_file import SharedFile

FORK = multiprocessing.get_context("fork")


def make_locks() -> FileLocks:
    """No fixture: pytest would keep its descriptor beyond the test."""
    return SharedFile.create(8).locks


def start(target: Callable[..., Any], *arguments: Any) -> Any:
    child = FORK.Process(target=target, args=arguments)
    child.start()
    return child


def end(child: Any) -> int:
    child.join()
    code: int = child.exitcode
    child.close()
    return code


def answer(locks: FileLocks, number: int) -> None:
    os._exit(int(locks.try_hold(number)))


def is_free(locks: FileLocks, number: int) -> bool:
    """What another process finds."""
    return bool(end(start(answer, locks, number)))


def wait_with(locks: FileLocks, number: int, is_alone: bool, told: int) -> None:
    """For a child: hold, tell, and stay until killed."""
    assert locks.try_hold(number)
    if is_alone:
        with locks.alone():
            os.write(told, b".")
            signal.pause()
    os.write(told, b".")
    signal.pause()


def test_a_number_is_held_by_one_thread_of_one_process() -> None:
    locks = make_locks()
    assert locks.try_hold(3)
    assert not locks.try_hold(3)
    assert not is_free(locks, 3)
    assert is_free(locks, 2)
    assert is_free(locks, 4)
    locks.release(3)
    assert is_free(locks, 3)
    assert locks.try_hold(3)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_killed_holder_holds_nothing(is_alone: bool) -> None:
    locks = make_locks()
    heard, told = os.pipe()
    child = start(wait_with, locks, 0, is_alone, told)
    os.read(heard, 1)
    assert not locks.try_hold(0)
    child.kill()
    assert end(child) == -signal.SIGKILL
    with locks.alone():
        assert locks.try_hold(0)
    os.close(heard)
    os.close(told)


def raise_many_times(file: SharedFile, times: int) -> None:
    words = file.view.cast("Q")
    for _ in range(times):
        with file.locks.alone():
            words[0] += 1


def test_processes_and_threads_are_alone_in_turn() -> None:
    file = SharedFile.create(8)
    children = [start(raise_many_times, file, 500) for _ in range(2)]
    threads = [threading.Thread(target=raise_many_times, args=(file, 500)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [end(child) for child in children] == [0, 0]
    assert file.view.cast("Q")[0] == 5 * 500


def test_an_error_while_alone_ends_it() -> None:
    locks = make_locks()
    with pytest.raises(ValueError, match="mine"), locks.alone():
        raise ValueError("mine")
    with locks.alone():
        assert is_free(locks, 0)


def test_a_child_forked_while_a_thread_holds_has_nothing_and_waits_for_nobody_dead() -> None:
    locks = make_locks()
    assert locks.try_hold(1)

    def look() -> None:
        with locks.alone():
            os._exit(2 * locks.try_hold(0) + locks.try_hold(1))

    assert end(start(look)) == 2
