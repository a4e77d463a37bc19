"""A worker that dies is replaced: each batch comes once, in order, as if nobody had died."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset

import forebay

from .datasets import (
    LARGE_BYTES,
    WAYS_TO_DIE,
    Deadly,
    Numbered,
    die,
    note,
    try_claim,
    wait_until,
)

pytestmark = pytest.mark.timeout(120)

METHODS = ["fork", "forkserver", "spawn"]


class Noisy(Dataset[Any]):
    """Draws from all generators that a worker has."""

    length = 120

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return (
            index,
            torch.rand(40),
            np.random.rand(3),
            random.random(),
            forebay.rng().python.random(),
        )


class Stream(IterableDataset[Any]):
    """Its part of the numbers, with noise; without a state."""

    length = 120

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for number in range(info.id, self.length, info.num_workers):
            time.sleep(0.001)
            yield number, torch.rand(40), random.random()


class Told(Stream):
    """The same with a state: what lies before its place is not drawn again."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        self.numbers = range(info.id, self.length, info.num_workers)
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.numbers):
            self.at = 0
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1], torch.rand(40), random.random()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


Hurt = Callable[[Any, int], None]


def leave_alone(iterator: Any, number: int) -> None:
    """Nobody dies."""


def kill_one(iterator: Any, number: int) -> None:
    if number % 7 == 3:
        workers = iterator._workers
        os.kill(workers[number % len(workers)].pid, signal.SIGKILL)


def kill_all(iterator: Any, number: int) -> None:
    if number == 9:
        for worker in list(iterator._workers):
            os.kill(worker.pid, signal.SIGKILL)


def kill_template(iterator: Any, number: int) -> None:
    if number in (2, 12):
        os.kill(iterator._engine.crew.zygote_pid, signal.SIGKILL)


def interrupt_all(iterator: Any, number: int) -> None:
    """As Ctrl-C does that main catches: it reaches all that the terminal has."""
    if number != 9:
        return
    for pid in [iterator._engine.crew.zygote_pid, *(each.pid for each in iterator._workers)]:
        os.kill(pid, signal.SIGINT)


def run(dataset: Any, hurt: Hurt, *, epochs: int = 2, **given: Any) -> tuple[list[Any], Any]:
    """All batches of some epochs, and what the loader says of itself then."""
    # Workers that are far ahead could have made all there is before anybody hurts them.
    most = {"prefetch_factor": 2, "num_workers": 3}
    options: dict[str, Any] = {"timeout": 60, "memory_budget": "1GiB"} | most | given
    if not isinstance(dataset, IterableDataset):
        options |= {"shuffle": True}
    batches = []
    generator = torch.Generator().manual_seed(3)
    with (
        warnings.catch_warnings(),
        forebay.DataLoader(dataset, 4, generator=generator, **options) as loader,
    ):
        warnings.simplefilter("ignore", forebay.ReplayWarning)
        for _ in range(epochs):
            iterator = iter(loader)
            for number, batch in enumerate(iterator):
                batches.append(batch)
                hurt(iterator, number)
        return batches, loader.stats()


def check_equal(ours: list[Any], theirs: list[Any]) -> None:
    """Bit for bit."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def check_replayed(dataset: Any, hurt: Hurt, **options: Any) -> None:
    whole, _ = run(dataset, leave_alone, **options)
    ours, stats = run(dataset, hurt, **options)
    check_equal(ours, whole)
    assert stats.worker_restarts > 0
    assert stats.restart_reasons


# -- whatever dies, whenever ----------------------------------------------------------------------


@pytest.mark.parametrize("hurt", [kill_one, kill_all, kill_template])
@pytest.mark.parametrize("method", METHODS)
def test_random_numbers_go_on_as_if_nobody_had_died(method: str, hurt: Hurt) -> None:
    check_replayed(Noisy(), hurt, multiprocessing_context=method)


@pytest.mark.parametrize("hurt", [kill_one, kill_all, kill_template])
@pytest.mark.parametrize(
    "options",
    [
        {"persistent_workers": True},
        {"seeding": "batch"},
        {"seeding": "batch", "persistent_workers": True},
        {"prefetch_factor": 1},
        {"num_workers": 1, "persistent_workers": True},
    ],
    ids=str,
)
def test_it_holds_for_every_kind_of_loader(options: dict[str, Any], hurt: Hurt) -> None:
    check_replayed(Noisy(), hurt, **options)


@pytest.mark.parametrize("hurt", [kill_one, kill_all, kill_template])
@pytest.mark.parametrize("kind", [Stream, Told])
@pytest.mark.parametrize("persistent", [False, True])
def test_streams_go_on_at_their_place(kind: type, persistent: bool, hurt: Hurt) -> None:
    check_replayed(kind(), hurt, persistent_workers=persistent)


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_that_main_survives_costs_no_batch(method: str) -> None:
    whole, _ = run(Noisy(), leave_alone, multiprocessing_context=method)
    ours, _ = run(Noisy(), interrupt_all, multiprocessing_context=method)
    check_equal(ours, whole)


def test_streams_that_share_a_process_are_all_brought_back() -> None:
    def run_merged(hurt: Hurt) -> list[Any]:
        with forebay.DataLoader(Noisy(), 4, num_workers=4, memory_budget="200MiB") as loader:
            loader._max_workers = 2
            torch.manual_seed(8)
            batches, iterator = [], iter(loader)
            for number, batch in enumerate(iterator):
                batches.append(batch)
                hurt(iterator, number)
            return batches

    check_equal(run_merged(kill_one), run_merged(leave_alone))


@pytest.mark.parametrize("at", [0, 13, 23], ids=["first", "in the middle", "last"])
@pytest.mark.parametrize("way", WAYS_TO_DIE)
def test_the_ticket_that_was_being_made_is_made_again(tmp_path: Path, way: str, at: int) -> None:
    with forebay.DataLoader(Deadly(tmp_path, way, at=at), 2, num_workers=2) as loader:
        assert [int(v) for batch in loader for v in batch[:, 0]] == list(range(24))
        assert loader.stats().worker_restarts == 1


def test_a_large_batch_of_which_half_was_written_is_written_whole(tmp_path: Path) -> None:
    dataset = Deadly(tmp_path, "SIGKILL", at=3 * 32 + 20, length=160, sample_bytes=LARGE_BYTES)
    with forebay.DataLoader(dataset, 32, num_workers=2, memory_budget="400MiB") as loader:
        for number, batch in enumerate(loader):
            whole = torch.arange(32 * number, 32 * number + 32, dtype=torch.uint8)
            assert batch.eq(whole[:, None]).all()
        assert number == 4
        stats = loader.stats()
        assert stats.peak_footprint_bytes <= stats.budget_bytes


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_a_death_between_epochs_is_no_matter(wait_s: float) -> None:
    whole, _ = run(Noisy(), leave_alone, epochs=3, persistent_workers=True)
    generator = torch.Generator().manual_seed(3)
    batches: list[Any] = []
    with forebay.DataLoader(
        Noisy(), 4, shuffle=True, num_workers=3, persistent_workers=True, generator=generator
    ) as loader:
        for _ in range(3):
            batches += loader
            iterator: Any = loader._iterator
            os.kill(iterator._workers[1].pid, signal.SIGKILL)
            time.sleep(wait_s)
    check_equal(batches, whole)


def test_a_worker_that_stands_still_is_replaced_after_the_timeout() -> None:
    with forebay.DataLoader(
        Numbered(600), 1, num_workers=2, timeout=1, prefetch_factor=1
    ) as loader:
        values = []
        iterator: Any = iter(loader)
        for number, batch in enumerate(iterator):
            values.append(int(batch[0, 0]))
            if number == 100:
                os.kill(iterator._workers[1].pid, signal.SIGSTOP)
        assert values == [number % 256 for number in range(600)]
        assert loader.stats().worker_restarts == 1


def test_unordered_batches_come_once_each(tmp_path: Path) -> None:
    with forebay.DataLoader(
        Deadly(tmp_path, "SIGKILL", at=7), 2, num_workers=2, in_order=False
    ) as loader:
        assert sorted(int(v) for batch in loader for v in batch[:, 0]) == list(range(24))


def test_kept_batches_of_the_dead_stay_what_they_are() -> None:
    with forebay.DataLoader(Numbered(24, 100_000), 2, num_workers=2) as loader:
        iterator: Any = iter(loader)
        kept = list(itertools.islice(iterator, 4))
        kill_all(iterator, 9)
        kept += iterator
    for number, batch in enumerate(kept):
        assert batch[0].eq(2 * number).all()
        assert batch[1].eq(2 * number + 1).all()


def test_a_refreshed_dataset_is_that_of_replaced_workers_too() -> None:
    dataset = Scaled()
    with forebay.DataLoader(
        dataset, 4, num_workers=2, persistent_workers=True, refresh_dataset=True
    ) as loader:
        for epoch in range(3):
            dataset.factor = epoch + 1
            values = []
            iterator: Any = iter(loader)
            for number, batch in enumerate(iterator):
                values += batch.tolist()
                kill_one(iterator, number)
            assert values == [index * (epoch + 1) for index in range(len(dataset))]


class Scaled(Dataset[int]):
    factor = 1

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        return index * self.factor


# -- resuming with deaths -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Noisy, Stream, Told])
def test_a_state_taken_after_deaths_is_that_of_an_undisturbed_run(kind: type) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(3)
        return forebay.DataLoader(kind(), 4, num_workers=2, generator=generator)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", forebay.ReplayWarning)
        with make() as loader:
            iterator = iter(loader)
            for number in range(10):
                next(iterator)
                kill_one(iterator, number)
            state = loader.state_dict()
            rest = list(iterator)
        with make() as loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            tail = []
            for number, batch in enumerate(iterator):
                tail.append(batch)
                kill_one(iterator, number)
    check_equal(tail, rest)


# -- what cannot be replayed, and what is said -----------------------------------------------------


class Poison(Numbered):
    """One sample kills whoever makes it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            die("SIGSEGV")
        return super().__getitem__(index)


def test_a_batch_that_kills_three_workers_is_given_up_and_the_next_ones_come() -> None:
    with forebay.DataLoader(Poison(12), 2, num_workers=2) as loader:
        iterator = iter(loader)
        assert [int(next(iterator)[0, 0]) for _ in range(2)] == [0, 2]
        with pytest.raises(
            forebay.PoisonSample, match=r"DataLoader worker \(pid \d+\) is kil"
        ) as e:
            next(iterator)
        assert e.value.indices == [4, 5]
        assert e.value.deaths == 3
        assert e.value.exit_code == -signal.SIGSEGV
        assert [int(batch[0, 0]) for batch in iterator] == [6, 8, 10]
        assert loader.stats().worker_restarts == 3


def test_workers_that_cannot_begin_end_the_epoch() -> None:
    def end(_: int) -> None:
        os._exit(3)

    with (
        forebay.DataLoader(Numbered(12), 2, num_workers=1, worker_init_fn=end) as loader,
        pytest.raises(forebay.WorkerDied, match="exited unexpectedly with exit code 3"),
    ):
        list(loader)


class Fragile(Told):
    """A state that cannot be told."""

    def state_dict(self) -> dict[str, int]:
        raise KeyError("nothing to tell")


def test_a_stream_whose_state_cannot_be_told_is_lost_and_the_error_says_why() -> None:
    with forebay.DataLoader(Fragile(), 4, num_workers=1) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        with pytest.raises(forebay.WorkerDied) as told:
            list(iterator)
        assert isinstance(told.value.__cause__, forebay.StateUnavailable)


def test_a_stream_without_a_state_is_run_again_with_one_warning() -> None:
    def hurt_all() -> int:
        with forebay.DataLoader(Stream(), 4, num_workers=2) as loader:
            iterator = iter(loader)
            for number, _ in enumerate(iterator):
                kill_one(iterator, number)
            return loader.stats().worker_restarts

    with pytest.warns(forebay.ReplayWarning, match="run again from its start") as told:
        assert hurt_all() > 1
    assert len([each for each in told if each.category is forebay.ReplayWarning]) == 1


def test_each_death_is_logged_counted_and_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "forebay"),
        forebay.DataLoader(Deadly(tmp_path, "SIGKILL", at=13), 2, num_workers=2) as loader,
    ):
        list(loader)
        (reason,) = loader.stats().restart_reasons
        assert "was killed by SIGKILL, at batch 6" in reason
        assert reason in caplog.text
        assert reason in loader.explain()


class Counting(Numbered):
    """Notes how often each sample is made."""

    def __init__(self, place: Path, length: int) -> None:
        super().__init__(length)
        self.place = place

    def __getitem__(self, index: int) -> torch.Tensor:
        note(self.place / "made", index)
        if index == 40 and try_claim(self.place, "died"):
            die("SIGKILL")
        return super().__getitem__(index)


def test_batches_that_are_seeded_one_by_one_are_made_once_but_for_those_in_hand(
    tmp_path: Path,
) -> None:
    with forebay.DataLoader(
        Counting(tmp_path, 48), 4, num_workers=1, seeding="batch", prefetch_factor=2
    ) as loader:
        assert len(list(loader)) == 12
    made = (tmp_path / "made").read_text().split()
    assert len(made) == 48 + 1


def test_nobody_waits_for_the_dead(tmp_path: Path) -> None:
    """While one is replaced the consumer gets what the others have made."""
    with forebay.DataLoader(Numbered(400), 1, num_workers=2) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        began = time.monotonic()
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        assert sum(1 for _ in iterator) == 399
        assert time.monotonic() - began < 20
        wait_until(lambda: loader.stats().worker_restarts == 1, "it was replaced")


def test_a_loader_that_met_poison_ends_with_its_last_reference() -> None:
    """The error must not keep alive what raised it: workers would live until a collection."""
    with forebay.DataLoader(Poison(12), 2, num_workers=2) as loader:
        iterator: Any = iter(loader)
        workers = list(iterator._workers)
        with pytest.raises(forebay.PoisonSample):
            list(iterator)
        workers += iterator._workers
        gc.disable()
        try:
            del iterator
            assert not any(worker.is_alive() for worker in workers)
        finally:
            gc.enable()
