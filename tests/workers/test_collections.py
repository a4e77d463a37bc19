"""The garbage collection that is pending runs before a fork, and not in its first minute."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import TensorDataset

import forebay


@pytest.fixture
def full_collections() -> Iterator[list[int]]:
    """One entry for each full collection that ran."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(gc.get_count()[2])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def leave_pending() -> None:
    """Collections of the middle generation, as many as importing a library leaves."""
    for _ in range(5):
        gc.collect(1)


def run_epoch() -> None:
    with forebay.DataLoader(TensorDataset(torch.arange(8)), 2, num_workers=1) as loader:
        assert len(list(loader)) == 4


@pytest.mark.usefixtures("full_collections")
def test_what_is_pending_is_collected_before_the_fork(full_collections: list[int]) -> None:
    leave_pending()
    full_collections.clear()
    run_epoch()
    assert full_collections[0] >= 5


def test_where_little_is_pending_nothing_is_collected(full_collections: list[int]) -> None:
    gc.collect()
    full_collections.clear()
    run_epoch()
    assert not full_collections


def test_who_has_switched_the_collector_off_keeps_it_off(full_collections: list[int]) -> None:
    leave_pending()
    full_collections.clear()
    gc.disable()
    try:
        run_epoch()
    finally:
        gc.enable()
    assert not full_collections
