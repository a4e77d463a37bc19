"""What the job says about its own batches."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import torch

from tests.budget.job import digest, object_bytes, private_bytes
from tests.budget.workloads import START, WORKLOADS, Starts


def test_one_changed_element_changes_the_digest() -> None:
    image = torch.zeros(4, 4)
    batch = {"image": image, "names": ["a", "b"]}
    before = digest(batch)
    image[3, 3] = 1
    assert digest(batch) != before


def test_another_dtype_changes_the_digest() -> None:
    assert digest([torch.zeros(2)]) != digest([torch.zeros(2, dtype=torch.int32)])


def test_another_string_changes_the_digest() -> None:
    assert digest({"key": "a"}) != digest({"key": "b"})


def test_equal_batches_have_equal_digests() -> None:
    def make() -> dict[str, object]:
        return {"image": torch.arange(9.0), "boxes": [np.ones(3)], "key": "x"}

    assert digest(make()) == digest(make())


def test_a_tensor_on_the_heap_is_the_consumers_own() -> None:
    assert private_bytes([torch.zeros(2**20)]) == 4 * 2**20


def test_a_tensor_in_shared_memory_is_not_the_consumers_own() -> None:
    assert private_bytes([torch.zeros(2**20).share_memory_()]) == 0


def test_two_views_of_one_storage_count_once() -> None:
    whole = torch.zeros(2**20)
    assert private_bytes([whole[:10], whole[10:]]) == 4 * 2**20


def test_an_object_that_is_held_twice_counts_once() -> None:
    name = "x" * 1000
    assert object_bytes([name, name]) < 2 * object_bytes(name)


def test_notes_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    starts = Starts(str(tmp_path / "starts"))
    context = multiprocessing.get_context("fork")

    def note(first: int) -> None:
        for serial in range(first, first + 500):
            starts.note(serial)

    children = [context.Process(target=note, args=(n * 500,)) for n in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    noted = START.iter_unpack((tmp_path / "starts").read_bytes())
    assert sorted(serial for serial, _ in noted) == list(range(1500))


def test_every_workload_has_three_rising_budgets() -> None:
    for workload in WORKLOADS.values():
        assert sorted(set(workload.budgets_mib)) == list(workload.budgets_mib)
