"""Worker threads: a crew's interface, their ends, and what of the process they leave alone."""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import forebay
from forebay.workers.crew import Crew, WorkerProcess
from forebay.workers.randomness import Generators
from forebay.workers.threads import ThreadChannel, ThreadCrew, WorkerThread

ROOT = Path(__file__).parents[2]
MOVES = {"start_spare", "install", "dismiss"}
DEATHS = {"has_lost_template", "is_stillborn", "revive"}
"""Streams of threads never move, so nothing is started in another's place."""


class Filled(Dataset[torch.Tensor]):
    """Large enough for the arena."""

    def __init__(self, length: int = 24, floats: int = 20_000) -> None:
        self.length, self.floats = length, floats

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.floats,), float(index))


class Calling(Filled):
    """Calls `call(index)` before each sample."""

    def __init__(self, call: Any, length: int = 24) -> None:
        super().__init__(length)
        self.call = call

    def __getitem__(self, index: int) -> torch.Tensor:
        self.call(index)
        return super().__getitem__(index)


def make(dataset: Any = None, **options: Any) -> Any:
    chosen = {"batch_size": 2, "num_workers": 2, "worker_backend": "thread", **options}
    return forebay.DataLoader(Filled() if dataset is None else dataset, **chosen)


def firsts(batches: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in batches]


ALL = list(range(0, 24, 2))


# -- the interface ------------------------------------------------------------------------------


def verbs(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_a_crew_of_threads_has_the_interface_of_one_of_processes() -> None:
    assert verbs(ThreadCrew) >= verbs(Crew) - MOVES - DEATHS
    for name in verbs(Crew) - MOVES - DEATHS:
        ours, theirs = getattr(ThreadCrew, name), getattr(Crew, name)
        if inspect.isfunction(theirs):
            assert list(inspect.signature(ours).parameters) == list(
                inspect.signature(theirs).parameters
            )


def test_a_worker_thread_has_the_verbs_that_frameworks_use() -> None:
    inner = {"started", "ended", "await_end", "close"}  # of what the template says
    assert verbs(WorkerThread) >= verbs(WorkerProcess) - inner
    assert {"send", "receive", "has_waiting"} <= verbs(ThreadChannel)


def test_workers_look_like_processes_that_ended_well() -> None:
    loader = make()
    iterator = iter(loader)
    next(iterator)
    workers = iterator._workers
    assert [worker.is_alive() for worker in workers] == [True, True]
    assert {worker.pid for worker in workers} == {os.getpid()}
    firsts(iterator)
    for worker in workers:
        worker.join(timeout=5)
    assert [(worker.is_alive(), worker.exitcode) for worker in workers] == [(False, 0)] * 2


# -- who asks -----------------------------------------------------------------------------------


def test_each_thread_is_told_its_own_stream_however_it_asks() -> None:
    from torch.utils.data.dataloader import get_worker_info as third

    asks = (get_worker_info, torch.utils.data.get_worker_info, third)
    seen: set[tuple[Any, ...]] = set()

    def ask(index: int) -> None:
        infos = [each() for each in asks] + [torch.utils.data._utils.worker.get_worker_info()]
        assert all(info is infos[0] for info in infos)
        assert infos[0] is not None
        seen.add((infos[0].id, infos[0].num_workers))

    batches = iter(make(Calling(ask), num_workers=3))
    next(batches)
    assert [each() for each in asks] == [None] * 3
    assert firsts(batches) == ALL[1:]
    assert seen == {(0, 3), (1, 3), (2, 3)}


def test_worker_processes_are_told_their_stream_after_threads_were_used() -> None:
    firsts(make())
    infos = list(make(WhoAsks(), worker_backend="process", batch_size=None))
    assert infos == [0, 1, 0, 1]
    assert list(torch.utils.data.DataLoader(WhoAsks(), batch_size=None, num_workers=2)) == infos


class WhoAsks(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        return info.id


# -- what belongs to the process ------------------------------------------------------------------


def test_nothing_is_set_for_the_whole_process() -> None:
    settings = [
        torch.get_num_threads,
        lambda: signal.getsignal(signal.SIGINT),
        lambda: torch.utils.data._utils.collate.default_collate_fn_map[torch.Tensor],
        lambda: torch.utils.data._utils.worker._worker_info,
        torch.get_rng_state().tolist,
    ]
    before = [read() for read in settings]
    threads: list[int] = []
    loader = make(Calling(lambda _: threads.append(torch.get_num_threads())))
    assert firsts(loader) == ALL
    assert [read() for read in settings] == before
    assert set(threads) == {1}


def test_a_collate_function_that_calls_torchs_needs_no_shared_memory() -> None:
    loader = make(collate_fn=lambda samples: torch.utils.data.default_collate(samples).share())
    with pytest.raises(AttributeError, match="share"):
        firsts(loader)
    loader = make(collate_fn=_collate_and_look)
    assert all(not is_shared for is_shared, _ in loader)


def _collate_and_look(samples: list[torch.Tensor]) -> tuple[bool, torch.Tensor]:
    batch = torch.utils.data.default_collate(samples)
    return batch.is_shared(), batch


# -- ends ---------------------------------------------------------------------------------------


def test_an_exit_function_runs_in_each_worker() -> None:
    exits: list[int] = []
    assert firsts(make(worker_exit_fn=exits.append)) == ALL
    assert sorted(exits) == [0, 1]


def test_threads_end_with_an_iterator_that_is_dropped() -> None:
    before = threading.active_count()
    iterator = iter(make())
    next(iterator)
    del iterator
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_batches_stay_what_they_are_after_the_loader() -> None:
    loader = make()
    kept = list(loader)
    loader.close()
    del loader
    assert firsts(kept) == ALL


@pytest.mark.parametrize("code", [3, 0])
def test_a_thread_that_user_code_ends_is_a_worker_that_died(code: int) -> None:
    def end(index: int) -> None:
        if index == 4:
            sys.exit(code)

    with pytest.raises(forebay.WorkerDied, match=f"exit code {code}"):
        firsts(make(Calling(end)))


def test_closing_does_not_wait_for_ever_for_a_thread_in_user_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.workers.threads.RETIRE_S", 0.2)
    gate, is_there = threading.Event(), threading.Event()

    def wait(index: int) -> None:
        if index == 6:
            is_there.set()
            gate.wait(30)

    loader = make(Calling(wait))
    batches = iter(loader)
    next(batches)
    assert is_there.wait(30)
    loader.close()
    gate.set()  # it writes its batch to memory that nobody else uses, and ends
    with pytest.raises(forebay.IteratorClosed):
        next(batches)


def run_program(source: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


PROGRAM = """
import os, time
from tests.workers.test_threads import Calling, make
def sleep(index):
    if index >= 4:
        time.sleep(600)
batches = iter(make(Calling(sleep)))
next(batches)
"""


def test_the_interpreter_exits_with_a_thread_inside_a_long_sample() -> None:
    ended = run_program(PROGRAM + "print('over')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")


def test_a_child_that_user_code_forks_while_threads_run_is_sound() -> None:
    ended = run_program(
        """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import forebay
from tests.workers.test_threads import firsts, make
loader = make()
batches = iter(loader)
first = next(batches)
pid = os.fork()
if not pid:
    assert firsts([first]) == [0]
    try:
        next(batches)
    except forebay.ForeignProcess:
        loader.close()
        del batches
        assert firsts(make()) == list(range(0, 24, 2))
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert firsts(batches) == list(range(2, 24, 2))
print("over")
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")


# -- memory -------------------------------------------------------------------------------------


def test_a_budget_that_carries_no_process_carries_threads() -> None:
    with pytest.raises(forebay.BudgetTooSmall):
        firsts(make(worker_backend="process", memory_budget="6MiB"))
    loader = make(worker_backend="auto", memory_budget="6MiB")
    with pytest.warns(forebay.BudgetWarning, match="threads of this process make the batches"):
        assert firsts(loader) == ALL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert firsts(loader) == ALL  # said once
    assert "thread(s) of this process" in loader.explain()


def test_where_processes_fit_automatic_means_processes() -> None:
    batches = iter(make(worker_backend="auto", memory_budget="1GiB"))
    next(batches)
    assert os.getpid() not in {worker.pid for worker in batches._workers}
    firsts(batches)


def test_the_footprint_stays_below_a_tight_budget() -> None:
    dataset = Filled(64, 100_000)  # 0.8 MB a batch
    loader = make(dataset, memory_budget="4MiB", num_workers=3)
    peaks = []
    for batch in loader:
        peaks.append(loader.stats().footprint_bytes)
        del batch
    assert max(peaks) <= 4 * 1024**2
    assert loader.stats().peak_footprint_bytes <= 4 * 1024**2


def test_a_list_of_samples_is_promised_for_and_rows_are_not() -> None:
    rows, listed = make(Filled(24, 20_000)), make(Filled(24, 20_000), collate_fn=torch.stack)
    assert firsts(rows) == firsts(listed) == ALL
    assert "takes 0 B beside its result" in rows.explain()
    assert "takes 312 KiB beside its result" in listed.explain()  # two of 2 x 80,000 bytes


# -- the dataset and its copies -----------------------------------------------------------------


class Numbers(IterableDataset[int]):
    """Its own iterator: two that share it would share the numbers."""

    def __init__(self, held: Any = None) -> None:
        self.left, self.held = 3, held

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


@pytest.mark.parametrize("held", [None, threading.Lock()], ids=["copied whole", "on its surface"])
def test_each_stream_reads_an_iterable_of_its_own(held: Any) -> None:
    dataset = Numbers(held)
    assert list(make(dataset, batch_size=None)) == [2, 2, 1, 1, 0, 0]
    assert dataset.left == 3


def test_a_map_style_dataset_is_one_object_for_all() -> None:
    calls: list[int] = []
    dataset = Calling(calls.append)
    firsts(make(dataset))
    assert sorted(calls) == list(range(24))


# -- own generators -------------------------------------------------------------------------------


def draw(own: Generators) -> tuple[Any, ...]:
    return own.python.random(), own.numpy.random(), torch.rand(2, generator=own.torch).tolist()


def test_own_generators_go_on_where_they_stood_in_another_process() -> None:
    own = Generators(5, 2)
    draw(own)
    moved = Generators(0, 0)
    moved.put_state(pickle.loads(pickle.dumps(own.take_state())))
    assert draw(moved) == draw(own)


def test_generators_that_nobody_asked_for_are_moved_as_their_seed() -> None:
    state = Generators(5, 2).take_state()
    assert (state.python, state.numpy, state.torch) == (None, None, None)
    moved = Generators(0, 0)
    moved.put_state(state)
    assert draw(moved) == draw(Generators(5, 2))


def test_reseeding_reaches_those_that_somebody_holds() -> None:
    own = Generators(1, 1)
    python, numpy, torchs = own.python, own.numpy, own.torch
    draw(own)
    own.reseed(5, 2)
    held = python.random(), numpy.random(), torch.rand(2, generator=torchs).tolist()
    assert held == draw(Generators(5, 2))


def test_outside_of_a_loader_they_follow_torchs_seed() -> None:
    torch.manual_seed(10)
    draw(forebay.rng())  # another test may have drawn under the next one
    torch.manual_seed(11)
    first = draw(forebay.rng())
    assert forebay.rng() is forebay.rng()
    torch.manual_seed(12)
    assert draw(forebay.rng()) != first
    torch.manual_seed(11)
    assert draw(forebay.rng()) == first


def test_without_workers_they_are_those_of_the_first_stream() -> None:
    def drawn(**options: Any) -> list[Any]:
        torch.manual_seed(4)
        return [batch.tolist() for batch in make(Drawing(), **options)]

    assert drawn(num_workers=0) == drawn(num_workers=1)


class Drawing(Dataset[float]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return forebay.rng().python.random()
