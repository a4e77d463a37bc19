"""Datasets that tie their workers together, or bring things along that forks would share."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay

from .datasets import Numbered, count_lines, note

pytestmark = pytest.mark.timeout(90)
FORK = multiprocessing.get_context("fork")


def make_loader(dataset: Any, **options: Any) -> Any:
    chosen = {"batch_size": 2, "num_workers": 3, "timeout": 40, **options}
    return forebay.DataLoader(dataset, **chosen)


def values(loader: Any) -> list[int]:
    return [int(value) for batch in loader for value in batch.flatten()]


# -- workers that wait for each other --------------------------------------------------------------


class Meeting(Numbered):
    """Every sample waits until each of the workers is at one."""

    def __init__(self, barrier: Any, length: int) -> None:
        super().__init__(length)
        self.barrier = barrier

    def __getitem__(self, index: int) -> torch.Tensor:
        self.barrier.wait(30)
        return torch.tensor([index])


@pytest.mark.parametrize(
    ("budget", "most"),
    [(None, None), ("60MiB", None), (None, 1)],
    ids=["ample", "so tight that the first fetch is alone", "one fetch at once"],
)
def test_a_barrier_over_all_workers_is_passed_when_the_budget_is(
    budget: str | None, most: int | None
) -> None:
    loader = make_loader(Meeting(FORK.Barrier(3), 12), memory_budget=budget)
    loader._max_tokens = most
    assert values(loader) == list(range(12))


def test_a_barrier_is_passed_under_a_fork_server() -> None:
    context = multiprocessing.get_context("forkserver")
    loader = make_loader(
        Meeting(context.Barrier(2), 8), num_workers=2, multiprocessing_context=context
    )
    assert values(loader) == list(range(8))


class Reporting(Numbered):
    """Tells a manager's dict of every sample."""

    def __init__(self, seen: Any) -> None:
        super().__init__(12)
        self.seen = seen

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen[index] = self.seen.get(index, 0) + 1
        return torch.tensor([index])


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_managers_proxies_work_in_every_worker(method: str) -> None:
    with FORK.Manager() as manager:
        dataset = Reporting(manager.dict())
        loader = make_loader(dataset, num_workers=2, multiprocessing_context=method)
        assert values(loader) == list(range(12))
        assert dict(dataset.seen) == dict.fromkeys(range(12), 1)


# -- what unpickling brings along ------------------------------------------------------------------


class Records(Numbered):
    """Each record is read from a file whose position all of its users share."""

    def __init__(self, path: Path) -> None:
        super().__init__(48)
        self.path = path
        path.write_text("".join(f"{k:07d}\n" for k in range(48)))
        self.file: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"file": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        note(self.path.parent / "unpickled", os.getpid())
        self.file = self.path.open("rb", buffering=0)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file.seek(8 * index)
        return torch.tensor([int(self.file.read(4) + self.file.read(4))])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_file_that_is_opened_by_unpickling_is_not_shared(tmp_path: Path, method: str) -> None:
    dataset = Records(tmp_path / "records")
    loader = make_loader(dataset, num_workers=2, multiprocessing_context=method)
    assert values(loader) == list(range(48))
    assert "descriptor of" in loader.explain()
    assert str(dataset.path) in loader.explain()
    assert count_lines(tmp_path / "unpickled") == 3, "once to look, and once for each worker"


class Threaded(Numbered):
    """Unpickling starts a thread, without which there are no samples."""

    def __init__(self) -> None:
        super().__init__(12)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.asked, self.answered = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self.answer, name="reader-of-records", daemon=True).start()

    def answer(self) -> None:
        while self.asked.acquire():
            self.answered.release()

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.release()
        assert self.answered.acquire(timeout=20)
        return torch.tensor([index])


def test_a_thread_that_is_started_by_unpickling_runs_in_every_worker() -> None:
    loader = make_loader(Threaded(), num_workers=2, multiprocessing_context="forkserver")
    assert values(loader) == list(range(12))
    assert "thread(s): reader-of-records" in loader.explain()


class Plain(Numbered):
    """Large, and nothing but values."""

    def __init__(self, place: Path) -> None:
        super().__init__(200_000)
        self.place = place
        self.records = [{"number": k, "name": f"record {k}"} for k in range(self.length)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        note(self.place / "unpickled", os.getpid())

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.records[index]["number"]])


def test_a_large_dataset_is_unpickled_once_for_all_workers(tmp_path: Path) -> None:
    loader = make_loader(
        Plain(tmp_path), num_workers=4, multiprocessing_context="spawn", batch_size=20_000
    )
    assert values(loader) == list(range(200_000))
    assert count_lines(tmp_path / "unpickled") == 1
    assert "unpickled the dataset for itself" not in loader.explain()


def test_what_a_forked_dataset_has_opened_is_shared_as_in_torch(tmp_path: Path) -> None:
    """Nothing is looked for under fork: what is shared there is shared in torch too."""
    dataset = Logging(tmp_path / "log")
    loader = make_loader(dataset)
    assert values(loader) == list(range(12))
    assert sorted(map(int, dataset.path.read_text().split())) == list(range(12))
    assert "for itself" not in loader.explain()
    dataset.file.close()


class Logging(Numbered):
    """Writes to a file that main has opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(12)
        self.path = path
        self.file = path.open("ab", buffering=0)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file.write(f"{index}\n".encode())
        return torch.tensor([index])
