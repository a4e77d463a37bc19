"""Where nobody is replaced, a worker that dies hangs nothing and loses nothing silently."""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay

from .datasets import (
    LARGE_BYTES,
    WAYS_TO_DIE,
    Deadly,
    Gated,
    Numbered,
    SlowFirst,
    wait_until,
)

pytestmark = pytest.mark.timeout(90)

TORCHS_TEXT = {
    "SIGKILL": r"DataLoader worker \(pid \d+\) is killed by signal: Killed\. ",
    "SIGSEGV": r"DataLoader worker \(pid \d+\) is killed by signal: Segmentation fault\. ",
    "SIGTERM": r"DataLoader worker \(pid \d+\) is killed by signal: Terminated\. ",
    "exit 3": r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code 3\. ",
}
DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? \d+\) ")


def raising(*arguments: Any, **options: Any) -> Any:
    """A loader whose epoch ends with a worker, as torch's does."""
    return forebay.DataLoader(*arguments, on_worker_death="raise", **options)


def take_until_death(iterator: Iterator[Any]) -> tuple[list[int], forebay.WorkerDied]:
    """The first value of each batch that came, and the error that ended it."""
    firsts: list[int] = []
    while True:
        try:
            batch = next(iterator)
        except forebay.WorkerDied as error:
            return firsts, error
        firsts.append(int(batch[0, 0]))
        whole = torch.arange(firsts[-1], firsts[-1] + len(batch), dtype=torch.uint8)
        assert batch.eq(whole[:, None]).all(), "a batch arrived half written"


def check_whole_epoch(loader: Any, length: int) -> None:
    """Every sample arrives, in order."""
    assert [int(value) for batch in loader for value in batch[:, 0]] == list(range(length))


@pytest.mark.parametrize("at", [0, 13], ids=["in the first batch", "in the middle"])
@pytest.mark.parametrize("way", WAYS_TO_DIE)
def test_the_death_of_a_forked_worker_raises_torchs_text(tmp_path: Path, way: str, at: int) -> None:
    loader = raising(
        Deadly(tmp_path, way, at=at), batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    iterator = iter(loader)
    firsts, error = take_until_death(iterator)
    assert firsts == list(range(0, at - at % 2, 2)), "batches made before come first, in order"
    assert re.match(TORCHS_TEXT[way], str(error))
    assert isinstance(error, RuntimeError)
    assert error.indices == [at - at % 2, at - at % 2 + 1]
    with pytest.raises(forebay.WorkerDied, match=TORCHS_TEXT[way]):
        next(iterator)
    del iterator
    check_whole_epoch(loader, 24)
    loader.close()


def test_deaths_under_a_fork_server_raise_torchs_text(tmp_path: Path) -> None:
    for way in WAYS_TO_DIE:
        place = tmp_path / way
        place.mkdir()
        loader = raising(
            Deadly(place, way, at=5),
            batch_size=2,
            num_workers=2,
            multiprocessing_context="forkserver",
        )
        firsts, error = take_until_death(iter(loader))
        assert firsts == [0, 2]
        assert re.match(TORCHS_TEXT[way], str(error))
        loader.close()


def test_a_loader_works_again_after_a_death_under_spawn(tmp_path: Path) -> None:
    loader = raising(
        Deadly(tmp_path, "SIGKILL", at=0, length=6),
        batch_size=2,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    firsts, error = take_until_death(iter(loader))
    assert firsts == []
    assert re.match(TORCHS_TEXT["SIGKILL"], str(error))
    check_whole_epoch(loader, 6)
    loader.close()


def test_a_death_while_a_large_batch_is_written_delivers_nothing_of_it(tmp_path: Path) -> None:
    dataset = Deadly(tmp_path, "SIGKILL", at=3 * 32 + 20, length=160, sample_bytes=LARGE_BYTES)
    loader = raising(dataset, batch_size=32, num_workers=2, memory_budget="400MiB")
    firsts, _ = take_until_death(iter(loader))
    assert firsts == [0, 32, 64]
    check_whole_epoch(loader, 160)
    loader.close()


def test_a_worker_that_asks_for_room_is_served_after_another_one_died(tmp_path: Path) -> None:
    """Batch 0 is slower than the death in batch 1, and only then asks main for a block."""
    dataset = SlowFirst(tmp_path, "SIGKILL", at=2, length=8, sample_bytes=100_000)
    loader = raising(dataset, batch_size=2, num_workers=2, timeout=3)
    with loader:
        firsts, _ = take_until_death(iter(loader))
        assert firsts == [0]


def test_what_was_made_before_the_workers_were_killed_is_delivered(tmp_path: Path) -> None:
    """Main learns of an end by the zygote, maybe before it read all that the worker said."""
    dataset = Numbered(24)
    loader = raising(dataset, batch_size=1, num_workers=4)
    iterator: Any = iter(loader)
    engine = iterator._engine
    with engine._lock:  # nobody listens while four batches are made
        wait_until(lambda: has_said(iterator._workers) == 4, "every worker has said something")
        for worker in iterator._workers:
            os.kill(worker.known_pid or worker.pid, signal.SIGKILL)
        wait_until(lambda: not any(w.is_alive() for w in iterator._workers), "all are dead")
    firsts, _ = take_until_death(iterator)
    assert firsts[:4] == [0, 1, 2, 3]
    loader.close()


def test_the_last_words_of_the_dead_are_heard_when_their_end_is_known() -> None:
    """The end of worker 1 comes first; from it main learns of the ends of the others too."""
    loader = raising(Numbered(24), batch_size=1, num_workers=4)
    iterator: Any = iter(loader)
    engine, crew = iterator._engine, iterator._engine.crew
    with engine._lock:
        wait_until(lambda: has_said(crew.workers) == 4, "every worker has said something")
        for worker in crew.workers:
            os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: not any(w.is_alive() for w in crew.workers), "all are dead")
        for worker in crew.workers:
            crew.post(worker, "never taken")
        heard = crew.hear({crew.workers[1].channel.fileno()})
        assert {said.worker.number for said in heard} == {0, 1, 2, 3}
        assert not any(worker.channel.fileno() >= 0 for worker in crew.workers)
    loader.close()


def has_said(workers: list[Any]) -> int:
    """How many workers' words wait to be read."""
    return len(select.select([worker.channel for worker in workers], [], [], 0)[0])


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_death_of_the_zygote_ends_the_workers_and_raises(tmp_path: Path, method: str) -> None:
    dataset = Gated(tmp_path, at=8)
    loader = raising(dataset, batch_size=2, num_workers=2, multiprocessing_context=method)
    iterator: Any = iter(loader)
    firsts = [int(next(iterator).flatten()[0])]
    wait_until(lambda: dataset.count_waiting() >= 2, "both workers wait")
    os.kill(iterator._engine.crew.zygote_pid, signal.SIGKILL)
    more, error = take_until_death(iterator)
    assert firsts + more == [0, 2, 4, 6]
    assert DIED.match(str(error))
    with pytest.raises(forebay.WorkerDied):
        next(iterator)
    del iterator
    dataset.open_gate()
    check_whole_epoch(loader, 24)
    loader.close()


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_a_death_between_epochs_costs_nothing(wait_s: float) -> None:
    loader = raising(
        Numbered(24), batch_size=2, num_workers=1, prefetch_factor=1, persistent_workers=True
    )
    iterator: Any = iter(loader)
    assert len(list(iterator)) == 12
    os.kill(iterator._workers[0].pid, signal.SIGTERM)
    wait_until(lambda: not iterator._workers[0].is_alive(), "it is dead")
    time.sleep(wait_s)  # whether or not the clock came by meanwhile
    assert len(list(loader)) == 12
    loader.close()


def test_persistent_workers_are_made_anew_after_a_death(tmp_path: Path) -> None:
    loader = raising(
        Deadly(tmp_path, "SIGKILL", at=5), batch_size=2, num_workers=2, persistent_workers=True
    )
    with loader:
        firsts, _ = take_until_death(iter(loader))
        assert firsts == [0, 2]
        check_whole_epoch(loader, 24)


def test_an_iterator_that_met_a_death_ends_with_its_last_reference(tmp_path: Path) -> None:
    """The error must not keep alive what raised it: workers would live until a collection."""
    with raising(Deadly(tmp_path, "exit 3", at=0), batch_size=2, num_workers=3) as loader:
        iterator: Any = iter(loader)
        workers = iterator._workers
        take_until_death(iterator)
        gc.disable()
        try:
            del iterator
            assert not any(worker.is_alive() for worker in workers)
        finally:
            gc.enable()


def test_unordered_delivery_gives_what_the_living_have_made(tmp_path: Path) -> None:
    loader = raising(Deadly(tmp_path, "SIGKILL", at=3), batch_size=2, num_workers=2, in_order=False)
    firsts, _ = take_until_death(iter(loader))
    assert set(firsts) <= set(range(0, 24, 2)) - {2}
    assert len(firsts) == len(set(firsts))
    loader.close()
