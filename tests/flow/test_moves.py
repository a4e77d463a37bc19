"""Streams that change their process go on exactly where they stood."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import forebay
from forebay.flow.roster import Roster

LENGTH = 60


class Noise(Dataset[Any]):
    """Draws from all three global generators, and tells which process it was."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return index, random.random(), np.random.rand(), torch.rand(()).item(), os.getpid()


Batches = list[list[list[float]]]


def collate(samples: list[tuple[float, ...]]) -> list[list[float]]:
    return [list(sample) for sample in samples]


def wanted(num_workers: int, init_fn: Any = None, epochs: int = 1) -> Batches:
    """torch's own batches, without the process ids."""
    torch.manual_seed(5)
    loader = torch.utils.data.DataLoader(
        Noise(),
        batch_size=3,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=collate,
        worker_init_fn=init_fn,
        persistent_workers=epochs > 1,
    )
    return [[row[:4] for row in batch] for _ in range(epochs) for batch in loader]


class Ride:
    """One forebay loader that is iterated while its streams are moved about."""

    def __init__(self, num_workers: int, init_fn: Any = None, epochs: int = 1, **more: Any) -> None:
        self.epochs = epochs
        self.pids: list[set[int]] = []
        torch.manual_seed(5)
        self.loader = forebay.DataLoader(
            Noise(),
            batch_size=3,
            shuffle=True,
            num_workers=num_workers,
            collate_fn=collate,
            worker_init_fn=init_fn,
            persistent_workers=epochs > 1,
            prefetch_factor=2,  # else such small batches are all made at once
            **more,
        )

    def run(self, disturb: Callable[[Roster], None], every: int = 4) -> Batches:
        batches: Batches = []
        with self.loader as loader:
            for _ in range(self.epochs):
                iterator = iter(loader)
                for number, batch in enumerate(iterator):
                    batches.append([row[:4] for row in batch])
                    self.pids.append({int(row[4]) for row in batch})
                    if number % every == every - 1:
                        self._disturb(iterator, disturb)
        return batches

    def _disturb(
        self, iterator: Any, disturb: Callable[[Roster], None], *, to_the_end: bool = True
    ) -> None:
        engine = iterator._engine
        with engine._lock:
            moves = engine.scheduler.roster.moves
            if not moves.is_busy:
                disturb(engine.scheduler.roster)
            while to_the_end and moves.is_busy:
                engine.scheduler.listen(0.02)
                engine.scheduler.dispatch()


def recycle_first(roster: Roster) -> None:
    roster.moves.recycle(roster.crew.workers[0])


def merge_once(roster: Roster) -> None:
    pair = roster.find_merge()
    if pair is not None:
        roster.moves.merge(*pair)


def merge_and_split(roster: Roster) -> None:
    fullest = roster.find_split()
    if fullest is not None:
        roster.moves.split(fullest)
    else:
        merge_once(roster)


def add_noise(_: int) -> None:
    """A set-up function that uses up random numbers."""
    random.random()
    torch.rand(3)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_replaced_worker_goes_on_with_its_streams_random_numbers(method: str) -> None:
    ride = Ride(2, multiprocessing_context=method)
    assert ride.run(recycle_first) == wanted(2)
    assert len(set.union(*ride.pids)) > 2
    assert "in another process" in ride.loader.explain()


@pytest.mark.parametrize("disturb", [merge_once, merge_and_split])
def test_streams_that_come_together_and_part_again_keep_theirs(
    disturb: Callable[[Roster], None],
) -> None:
    assert Ride(4).run(disturb, every=2) == wanted(4)


def test_a_set_up_function_runs_in_the_new_process_and_does_no_harm() -> None:
    assert Ride(2, add_noise).run(recycle_first) == wanted(2, add_noise)


def test_persistent_workers_move_in_mid_epoch_and_across_epochs() -> None:
    assert Ride(3, epochs=3).run(recycle_first, every=3) == wanted(3, epochs=3)


def test_a_move_under_way_when_an_epoch_is_broken_does_no_harm() -> None:
    ride = Ride(2, epochs=2)
    with ride.loader as loader:
        iterator = iter(loader)
        next(iterator)
        ride._disturb(iterator, recycle_first, to_the_end=False)
        torch.manual_seed(5)
        again = [[row[:4] for row in batch] for batch in loader]
    assert len(again) == LENGTH // 3


def test_where_spares_cannot_be_had_no_further_move_is_tried() -> None:
    def kill_spare(roster: Roster) -> None:
        if roster.moves.may_be_made:
            recycle_first(roster)
            assert roster.moves._move is not None
            roster.moves._move.target.kill()
            roster.moves._move.target.join()

    ride = Ride(2)
    assert ride.run(kill_spare, every=2) == wanted(2)
    assert "in another process" not in ride.loader.explain()


def test_a_worker_that_does_not_end_when_told_is_killed_and_nobody_waits_for_ever() -> None:
    ride = Ride(2, worker_exit_fn=hang)
    assert ride.run(recycle_first, every=8) == wanted(2)


def hang(_: int) -> None:
    time.sleep(3600)


def test_what_is_no_stream_of_a_map_is_never_moved() -> None:
    class Counting(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(20))

    with forebay.DataLoader(Counting(), num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        assert not iterator._engine.scheduler.settings.may_move  # type: ignore[attr-defined]


def test_a_spare_worker_that_dies_leaves_everything_as_it_was() -> None:
    def kill_spare(roster: Roster) -> None:
        recycle_first(roster)
        assert roster.moves._move is not None
        roster.moves._move.target.kill()
        roster.moves._move.target.join()

    assert Ride(2).run(kill_spare) == wanted(2)
