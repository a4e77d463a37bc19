"""Every orderly end of an iterator leaves nothing, and tells each worker once.

That nothing is left is checked around every test by tests/conftest.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import forebay
from forebay.units import KIB

from .datasets import Gated, Numbered, note, wait_until

pytestmark = pytest.mark.timeout(60)

LARGE_BYTES = 100_000
"""Samples whose batches lie in the arena, not in a message."""


def make_loader(place: Path, dataset: Any = None, **options: Any) -> Any:
    exit_fn = functools.partial(note_exit, place)
    chosen = {"batch_size": 2, "num_workers": 2, "worker_exit_fn": exit_fn, **options}
    return forebay.DataLoader(dataset or Numbered(24, LARGE_BYTES), **chosen)


def note_exit(place: Path, worker: int) -> None:
    note(place / "exits", worker)


def exits(place: Path) -> list[int]:
    """The workers whose exit function ran."""
    path = place / "exits"
    return sorted(map(int, path.read_text().split())) if path.exists() else []


def firsts(batches: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in batches]


ALL = list(range(0, 24, 2))


def exhausted(loader: Any) -> None:
    assert firsts(loader) == ALL


def left_early(loader: Any) -> None:
    for batch in loader:
        if batch[0, 0] == 4:
            break


def never_begun(loader: Any) -> None:
    iter(loader)


def dropped(loader: Any) -> None:
    iterator = iter(loader)
    next(iterator)


def closed(loader: Any) -> None:
    iterator = iter(loader)
    next(iterator)
    loader.close()


def closed_twice_by_with(loader: Any) -> None:
    with loader:
        iterator = iter(loader)
        next(iterator)
        loader.close()


def failing(loader: Any) -> None:
    for _ in loader:
        raise ZeroDivisionError


def inside_a_generator(loader: Any) -> None:
    def batches() -> Generator[Any, None, None]:
        yield from loader

    generator = batches()
    next(generator)
    generator.close()


def left_in_another_thread(loader: Any) -> None:
    thread = threading.Thread(target=left_early, args=(loader,))
    thread.start()
    thread.join()


WAYS_TO_END = (
    *(exhausted, left_early, never_begun, dropped, closed, closed_twice_by_with, failing),
    *(inside_a_generator, left_in_another_thread),
)


@pytest.mark.parametrize("end", WAYS_TO_END, ids=lambda end: end.__name__.replace("_", " "))
def test_the_exit_function_runs_once_for_each_worker_of_an_iterator_that_is(
    tmp_path: Path, end: Any
) -> None:
    loader = make_loader(tmp_path)
    with contextlib.suppress(ZeroDivisionError):
        end(loader)
    assert exits(tmp_path) == [0, 1]


def test_the_exit_function_runs_under_a_fork_server_too(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, multiprocessing_context="forkserver")
    left_early(loader)
    assert exits(tmp_path) == [0, 1]


def test_the_exit_function_runs_once_for_each_stream_of_a_shared_process(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, num_workers=3)
    loader._max_workers = 1
    exhausted(loader)
    assert exits(tmp_path) == [0, 1, 2]


def test_persistent_workers_leave_once_after_all_epochs(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, persistent_workers=True)
    exhausted(loader)
    left_early(loader)
    exhausted(loader)
    assert exits(tmp_path) == []
    del loader
    assert exits(tmp_path) == [0, 1]


def test_an_iterator_in_a_reference_cycle_ends_with_the_collection(tmp_path: Path) -> None:
    loader = make_loader(tmp_path)
    cycle: list[Any] = [iter(loader)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert exits(tmp_path) == [0, 1]


def test_an_iterator_dropped_while_its_lock_is_held_ends_when_it_is_released(
    tmp_path: Path,
) -> None:
    """As when the clock is in the middle of a tick: the finaliser may not wait for it."""
    iterator: Any = iter(make_loader(tmp_path))
    engine = iterator._engine
    engine._lock.acquire()
    del iterator
    assert not engine._is_closed
    engine._release()
    assert engine._is_closed


def test_an_iterator_may_be_collected_by_its_own_clock(tmp_path: Path) -> None:
    """The collector runs in any thread at any allocation, also while the clock holds the lock."""
    loader = make_loader(tmp_path)
    cycle: list[Any] = [iter(loader)]
    engine = cycle[0]._engine
    cycle.append(cycle)
    done = threading.Event()

    def collecting_tick() -> None:
        with engine._lock:  # as in Engine.try_tick
            gc.collect()
        done.set()

    del cycle
    thread = threading.Thread(target=collecting_tick, daemon=True)
    thread.start()
    try:
        assert done.wait(3), "the thread waits for the lock that it holds itself"
    finally:
        if not done.is_set():
            engine._lock.release()
        thread.join()
        engine.close()


def test_an_abandoned_iterator_does_not_wait_for_what_its_workers_do(tmp_path: Path) -> None:
    """A worker that is in the middle of a sample is given five seconds, and then killed."""
    dataset = Gated(tmp_path, at=4)
    loader = make_loader(tmp_path, dataset)
    iterator = iter(loader)
    assert firsts([next(iterator), next(iterator)]) == [0, 2]
    wait_until(lambda: dataset.count_waiting() >= 2, "both workers wait")
    workers = iterator._workers
    del iterator
    assert not any(worker.is_alive() for worker in workers)


def test_two_iterators_of_one_loader_give_every_batch_each(tmp_path: Path) -> None:
    loader = make_loader(tmp_path)
    pairs = [(int(one[0, 0]), int(other[0, 0])) for one, other in zip(loader, loader)]
    assert pairs == [(first, first) for first in ALL]
    assert exits(tmp_path) == [0, 0, 1, 1]


def test_the_iterators_of_one_loader_are_apart(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, shuffle=True)
    one, other = iter(loader), iter(loader)
    kept = [next(one), next(other), next(one)]
    del one
    assert len(list(other)) == 11
    assert all(bool(batch.eq(batch[:, :1]).all()) for batch in kept)


def test_batches_outlive_iterator_loader_and_workers(tmp_path: Path) -> None:
    loader = make_loader(tmp_path)
    kept = list(loader)
    loader.close()
    del loader
    gc.collect()
    assert firsts(kept) == ALL
    assert all(bool(batch.eq(batch[:, :1]).all()) for batch in kept)


def test_a_loader_works_on_after_an_error_in_the_loop_body(tmp_path: Path) -> None:
    loader = make_loader(tmp_path)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing(loader)
    exhausted(loader)
    assert exits(tmp_path) == [0, 0, 0, 1, 1, 1]


def test_an_iterator_of_a_closed_loader_says_so(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, timeout=5)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises((StopIteration, RuntimeError)) as told:
        list(iterator)
    assert "timed out" not in str(told.value)


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_loader_may_be_closed_while_another_thread_waits_for_a_batch(backend: str) -> None:
    gate = threading.Event()

    def wait_at_gate(samples: Any) -> Any:
        gate.wait(60)
        return samples

    loader = forebay.DataLoader(
        Numbered(8),
        num_workers=1,
        worker_backend=backend,
        collate_fn=wait_at_gate if backend == "thread" else wait_long,
    )
    told: list[BaseException] = []

    def consume() -> None:
        try:
            list(loader)
        except forebay.IteratorClosed as error:
            told.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    opener = threading.Timer(1.0, gate.set)
    opener.start()
    loader.close()
    thread.join(5)
    opener.join()
    assert not thread.is_alive()
    assert [type(error) for error in told] == [forebay.IteratorClosed]
    assert time.monotonic() - began < 10, "the worker was asleep for a minute"
    told.clear()


def wait_long(samples: Any) -> Any:
    time.sleep(60)
    return samples


def test_workers_can_be_asked_and_joined_from_any_thread(tmp_path: Path) -> None:
    """As frameworks do, while the clock reads the same words of the zygote."""
    loader = make_loader(tmp_path, persistent_workers=True)
    exhausted(loader)
    workers = list(loader._iterator._workers)  # others take their places
    assert all(worker.is_alive() and worker.pid for worker in workers)
    joined = [threading.Thread(target=worker.join) for worker in workers for _ in range(4)]
    for thread in joined:
        thread.start()
    for worker in workers:
        worker.terminate()
    for thread in joined:
        thread.join(20)
        assert not thread.is_alive()
    assert [worker.exitcode for worker in workers] == [-15, -15]
    loader.close()


class Endless(IterableDataset[Any]):
    """Never ends."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


def test_an_endless_dataset_ends_when_the_loop_does(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, Endless())
    for number, _ in enumerate(loader):
        if number == 50:
            break
    assert exits(tmp_path) == [0, 1]


def test_an_error_of_the_exit_function_ends_the_worker_all_the_same(tmp_path: Path) -> None:
    def broken(worker: int) -> None:
        raise ValueError(worker)

    loader = make_loader(tmp_path, worker_exit_fn=broken)
    exhausted(loader)


def test_the_pages_of_a_closed_loader_are_not_kept_by_another_ones_workers(tmp_path: Path) -> None:
    # Batches that an earlier test's error still holds are not this test's.
    strange = {file.st_ino for file in find_arenas(os.getpid())}
    first, second = make_loader(tmp_path), make_loader(tmp_path)
    exhausted(first)
    one = iter(first)
    next(one)
    other: Any = iter(second)
    kept = [next(other)]
    first.close()
    pids = [other._engine.crew.zygote_pid, *[worker.pid for worker in other._workers]]

    def hold_the_seconds_alone() -> bool:
        held = max(count_arena_bytes(pid, strange) for pid in pids)
        return held <= second.stats().arena_bytes + 64 * KIB

    wait_until(hold_the_seconds_alone, "its window is full")
    second.close()
    assert len(kept) == 1


def find_arenas(pid: int) -> list[os.stat_result]:
    """All arenas that a process maps."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    ranges = re.findall(r"^(\S+) .*/memfd:forebay", maps, re.MULTILINE)
    return [os.stat(f"/proc/{pid}/map_files/{each}") for each in ranges]


def count_arena_bytes(pid: int, strange: set[int]) -> int:
    """Resident bytes of the arenas that a process maps, but for these."""
    arenas = {file.st_ino: file.st_blocks * 512 for file in find_arenas(pid)}
    assert arenas.keys() - strange
    return sum(size for number, size in arenas.items() if number not in strange)


def test_many_short_iterators_leave_nothing(tmp_path: Path) -> None:
    loader = make_loader(tmp_path)
    for _ in range(15):
        dropped(loader)
    assert len(exits(tmp_path)) == 30


def test_an_unreachable_iterator_of_a_lost_thread_is_retired(tmp_path: Path) -> None:
    def consume() -> None:
        threading.current_thread().iterator = iter(make_loader(tmp_path))  # type: ignore[attr-defined]

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    del thread, consume
    gc.collect()
    assert exits(tmp_path) == [0, 1]
