"""Persistent workers see what the training code does to the dataset between epochs, if asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay import DataLoader
from tests.resume.datasets import Augmented
from tests.resume.scene import BUDGET


def make(**keywords: Any) -> DataLoader[Any]:
    usual: dict[str, Any] = {"batch_size": None, "num_workers": 2, "persistent_workers": True}
    return DataLoader(Augmented(6), memory_budget=BUDGET, **(usual | keywords))


def epochs_seen(loader: DataLoader[Any]) -> list[set[int]]:
    seen = []
    for epoch in range(3):
        loader.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        seen.append({sample[1] for sample in loader})
    return seen


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_each_epoch_sees_the_dataset_as_it_is_then(backend: str) -> None:
    with make(refresh_dataset=True, worker_backend=backend) as loader:
        assert epochs_seen(loader) == [{0}, {1}, {2}]


def test_without_asking_workers_keep_the_dataset_as_in_torch() -> None:
    with make() as loader:
        assert epochs_seen(loader) == [{0}, {0}, {0}]


def test_workers_live_on_and_so_does_their_random_state() -> None:
    runs = []
    for refresh in (False, True):
        torch.manual_seed(3)
        with make(refresh_dataset=refresh) as loader:
            samples = [[sample[2] for sample in loader] for _ in range(3)]
            pids = {worker.pid for worker in loader._iterator._workers}  # type: ignore[union-attr]
            list(loader)
            assert {worker.pid for worker in loader._iterator._workers} == pids  # type: ignore[union-attr]
        runs.append(samples)
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
