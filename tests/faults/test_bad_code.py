"""User code that fails, or cannot travel: its own error, torch's text, and it goes on."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import forebay

from .datasets import Gated, Numbered, note

pytestmark = pytest.mark.timeout(60)


class SampleError(Exception):
    """Of the user's own kind."""


def make_loader(dataset: Any = None, **options: Any) -> Any:
    chosen = {"batch_size": 2, "num_workers": 2, "timeout": 30, **options}
    return forebay.DataLoader(dataset or Numbered(12), **chosen)


def attempts(loader: Any) -> list[Any]:
    """What each `next` gave: the first value of a batch, or the error."""
    iterator = iter(loader)
    given: list[Any] = []
    while True:
        try:
            given.append(int(next(iterator).flatten()[0]))
        except StopIteration:
            return given
        except Exception as error:
            given.append(error)


# -- errors ------------------------------------------------------------------------------------


class FailingAt(Numbered):
    """Fails at samples 3 and 8."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in {3, 8}:
            message = f"sample {index} is broken"
            raise SampleError(message)
        return super().__getitem__(index)


def fail_on_batch_two(samples: list[Any]) -> Any:
    if int(samples[0][0]) == 4:
        message = "cannot be stacked"
        raise SampleError(message)
    return torch.stack(samples)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_error_of_a_sample_is_raised_in_its_place_and_iteration_goes_on(method: str) -> None:
    given = attempts(make_loader(FailingAt(12), multiprocessing_context=method))
    assert [type(it) for it in given] == [int, SampleError, int, int, SampleError, int]
    text = str(given[1])
    assert text.startswith("Caught SampleError in DataLoader worker process 1.\n")
    assert "Original Traceback" in text
    assert "raise SampleError(message)" in text
    assert text.rstrip().endswith("SampleError: sample 3 is broken")


def test_an_error_of_collate_is_raised_in_its_place_and_iteration_goes_on() -> None:
    given = attempts(make_loader(collate_fn=fail_on_batch_two))
    assert [type(it) for it in given] == [int, int, SampleError, int, int, int]
    assert "in fail_on_batch_two" in str(given[2])


def test_an_error_of_the_set_up_function_is_raised_first() -> None:
    def fail(worker: int) -> None:
        raise SampleError(worker)

    with pytest.raises(SampleError, match="Caught SampleError in DataLoader worker process 0"):
        next(iter(make_loader(worker_init_fn=fail)))


class FailingStart(IterableDataset[Any]):
    """Cannot be started."""

    def __iter__(self) -> Iterator[Any]:
        message = "no such shard"
        raise SampleError(message)


def test_an_error_of_iter_is_raised_first() -> None:
    with pytest.raises(SampleError, match="no such shard"):
        next(iter(make_loader(FailingStart())))


def test_errors_leave_no_block_behind() -> None:
    check_no_block_is_left(make_loader(FailingAt(12, 100_000)))


def check_no_block_is_left(loader: Any) -> None:
    iterator = iter(loader)
    for _ in range(6):
        with contextlib.suppress(SampleError):
            next(iterator)
    gc.collect()  # an error and the frames in its traceback are a cycle
    stats = loader.stats()
    assert (stats.in_flight_bytes, stats.held_by_consumer_bytes) == (0, 0)


class Interrupting(Numbered):
    """Sample 4 ends its process by Python's own means."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            raise SystemExit(5)
        return super().__getitem__(index)


@pytest.mark.parametrize("on_worker_death", ["raise", "replay"])
def test_sys_exit_in_a_sample_is_the_death_of_its_worker(on_worker_death: str) -> None:
    iterator = iter(make_loader(Interrupting(12), on_worker_death=on_worker_death))
    assert [int(next(iterator)[0, 0]) for _ in range(2)] == [0, 2]
    with pytest.raises(forebay.WorkerDied, match="exited unexpectedly with exit code 5"):
        next(iterator)


# -- what cannot travel ---------------------------------------------------------------------------


@pytest.mark.leaves_traces("that it does is the next claim")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_lambda_where_nothing_is_forked_is_refused_with_torchs_hint(method: str) -> None:
    loader = make_loader(collate_fn=lambda samples: samples, multiprocessing_context=method)
    with (
        pytest.warns(UserWarning, match="Got pickle error when attempting to start a worker"),
        pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"),
    ):
        iter(loader)


class Holding(Numbered):
    """Holds something in the depth of it that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(8)
        self.steps = {"first": [len, Steps(lambda: None)]}


class Steps:
    def __init__(self, function: Any) -> None:
        self.functions = (str, function)


def test_22_what_cannot_be_pickled_is_named() -> None:
    loader = forebay.DataLoader(Holding(), num_workers=1, multiprocessing_context="spawn")
    named = re.escape("is dataset.steps['first'][1].functions[1] (builtins.function).")
    with (
        pytest.warns(UserWarning, match=named),
        pytest.raises((AttributeError, pickle.PicklingError)),
    ):
        iter(loader)


def test_what_cannot_be_pickled_to_be_refreshed_is_named() -> None:
    dataset = Numbered(8)
    with forebay.DataLoader(
        dataset, num_workers=1, persistent_workers=True, refresh_dataset=True
    ) as loader:
        list(loader)
        dataset.given = threading.Lock()  # type: ignore[attr-defined]
        with (
            pytest.warns(UserWarning, match="cannot be pickled is dataset.given"),
            pytest.raises(TypeError, match="lock"),
        ):
            list(loader)
        del dataset.given  # type: ignore[attr-defined]
        assert len(list(loader)) == 8


def test_a_loader_that_cannot_start_leaves_no_descriptor() -> None:
    loader = make_loader(collate_fn=lambda samples: samples, multiprocessing_context="spawn")
    resource_tracker.ensure_running()  # a descriptor for the life of this process
    before = count_descriptors()
    with (
        pytest.warns(UserWarning, match="pickle"),
        pytest.raises((AttributeError, pickle.PicklingError)),
    ):
        iter(loader)
    gc.collect()
    assert count_descriptors() == before


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def as_generator(samples: list[Any]) -> Any:
    return (sample for sample in samples) if int(samples[0][0]) == 4 else torch.stack(samples)


def test_a_batch_that_cannot_be_pickled_is_an_error_of_its_own() -> None:
    given = attempts(make_loader(collate_fn=as_generator))
    assert [isinstance(it, Exception) for it in given] == [False, False, True, False, False, False]
    assert "cannot pickle 'generator' object" in str(given[2])


class OneWay:
    """Pickles, and does not come back."""

    def __init__(self, samples: list[Any]) -> None:
        self.held = torch.stack(samples).repeat(1, 100_000)

    def __setstate__(self, state: dict[str, Any]) -> None:
        message = "does not come back"
        raise SampleError(message)


def one_way(samples: list[Any]) -> Any:
    return OneWay(samples) if int(samples[0][0]) == 4 else torch.stack(samples)


def test_a_batch_that_cannot_be_unpickled_is_an_error_of_its_own() -> None:
    given = attempts(make_loader(collate_fn=one_way))
    assert [type(it) for it in given] == [int, int, SampleError, int, int, int]
    assert "does not come back" in str(given[2])


def test_a_batch_that_cannot_be_unpickled_leaves_no_block_behind() -> None:
    check_no_block_is_left(make_loader(collate_fn=one_way))


class NeverUnpickled(Numbered):
    """Cannot be opened in another process."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        message = "the archive is not there"
        raise SampleError(message)


def test_a_dataset_that_cannot_be_unpickled_is_raised_in_main() -> None:
    with make_loader(NeverUnpickled(12), multiprocessing_context="forkserver") as loader:
        iterator = iter(loader)
        for _ in range(2):
            with pytest.raises(SampleError, match="the archive is not there"):
                next(iterator)


class UnwrappableError(Exception):
    """Cannot be made from its text, nor pickled."""

    def __init__(self, one: int, other: Any) -> None:
        super().__init__(one, other)


class FailingOddly(Numbered):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise UnwrappableError(1, threading.Lock())


def test_an_error_that_cannot_travel_arrives_as_its_text() -> None:
    given = attempts(make_loader(FailingOddly(4)))
    assert [type(it) for it in given] == [RuntimeError, RuntimeError]
    assert "Caught UnwrappableError in DataLoader worker process 0" in str(given[0])


# -- where a loader may not be ---------------------------------------------------------------------


class Nesting(Numbered):
    """Iterates a loader of its own."""

    def __init__(self, workers: int) -> None:
        super().__init__(2)
        self.workers = workers

    def __getitem__(self, index: int) -> torch.Tensor:
        inner = forebay.DataLoader(Numbered(4), num_workers=self.workers)
        return torch.tensor([int(batch[0, 0]) for batch in inner])


def test_a_loader_with_workers_inside_a_worker_is_refused_with_the_way_out() -> None:
    (given,) = attempts(make_loader(Nesting(1)))
    assert isinstance(given, RuntimeError)
    for word in ("num_workers=1", "daemonic", "Nothing was started", "num_workers=0"):
        assert word in str(given)


def test_a_loader_without_workers_inside_a_worker_works() -> None:
    loader = make_loader(Nesting(0))
    assert [batch.tolist() for batch in loader] == [[[0, 1, 2, 3], [0, 1, 2, 3]]]


def test_a_loader_in_a_process_of_the_users_works() -> None:
    def consume() -> None:
        values = [int(batch[0, 0]) for batch in make_loader(Numbered(12, 100_000))]
        os._exit(0 if values == [0, 2, 4, 6, 8, 10] else 1)

    process = multiprocessing.get_context("fork").Process(target=consume)
    process.start()
    process.join(30)
    assert process.exitcode == 0


def test_an_iterator_in_a_forked_child_says_whose_it_is(tmp_path: Path) -> None:
    loader = make_loader(Numbered(12, 100_000))
    iterator = iter(loader)
    seen = [int(next(iterator)[0, 0])]

    def consume() -> None:
        try:
            next(iterator)
        except forebay.ForeignProcess as error:
            note(tmp_path / "told", error)
        note(tmp_path / "own", [int(batch[0, 0]) for batch in loader])

    process = multiprocessing.get_context("fork").Process(target=consume)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    told = (tmp_path / "told").read_text()
    assert f"belongs to process {os.getpid()}" in told
    assert "iter(loader)" in told
    assert (tmp_path / "own").read_text() == "[0, 2, 4, 6, 8, 10]\n"
    assert seen + [int(batch[0, 0]) for batch in iterator] == [0, 2, 4, 6, 8, 10]


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_bytes", [8, 100_000], ids=["small", "large"])
def test_threads_that_share_an_iterator_get_every_batch_once(sample_bytes: int) -> None:
    loader = make_loader(Numbered(200, sample_bytes), num_workers=3)
    iterator = iter(loader)
    seen: list[int] = []

    def consume() -> None:
        for batch in iterator:
            assert bool(batch.eq(batch[:, :1]).all())
            seen.append(int(batch[0, 0]))

    run_all([consume] * 4)
    assert sorted(seen) == list(range(0, 200, 2))


def run_all(bodies: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


def test_threads_may_ask_for_facts_while_another_one_iterates() -> None:
    loader = make_loader(Numbered(400, 100_000))
    over = threading.Event()

    def consume() -> None:
        assert [int(b[0, 0]) for b in loader] == [i % 256 for i in range(0, 400, 2)]
        over.set()

    def ask() -> None:
        while not over.is_set():
            assert loader.stats().batches <= 200
            assert loader.explain()

    run_all([consume, ask, ask])


# -- workers that do not come back -----------------------------------------------------------------


def test_a_worker_that_is_stuck_raises_torchs_text_after_the_timeout(tmp_path: Path) -> None:
    dataset = Gated(tmp_path, at=4, length=12)
    iterator = iter(make_loader(dataset, timeout=1))
    assert [int(next(iterator)[0, 0]) for _ in range(2)] == [0, 2]
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 1 seconds$"):
        next(iterator)
    dataset.open_gate()
    iterator._timeout = 30
    assert [int(batch[0, 0]) for batch in iterator] == [4, 6, 8, 10]


@pytest.mark.parametrize("stop", [True, False], ids=["and stays", "and goes on"])
def test_a_worker_that_is_stopped_raises_torchs_text_after_the_timeout(stop: bool) -> None:
    loader = make_loader(
        Numbered(2000), timeout=1, batch_size=1, prefetch_factor=1, on_worker_death="raise"
    )
    iterator = iter(loader)
    next(iterator)
    pid = iterator._workers[1].pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 1 seconds$"):
        exhaust(iterator)
    if stop:
        return  # the end of the iterator kills it: nothing is left behind
    os.kill(pid, signal.SIGCONT)
    iterator._timeout = 30
    assert sum(1 for _ in iterator) > 1900


def exhaust(iterator: Any) -> None:
    for _ in iterator:
        pass
