"""Shared memory that a pickle leads to."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from typing import Any

import pytest

from forebay.datasets import shared_file
from forebay.datasets.shared_file import Address, SharedFile


def address_of(file: SharedFile) -> Address:
    return file._descriptor.locate()


def attach_as_elsewhere(address: Address, length: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Attach as a process does that does not have the file yet."""
    monkeypatch.setattr(shared_file, "_attached", {})
    return shared_file._attach(address, length)


def test_a_pickle_leads_to_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    file = SharedFile.create(10)
    file.view[3] = 7
    other = attach_as_elsewhere(address_of(file), 10, monkeypatch)
    other.view[4] = 8
    assert bytes(file.view) == bytes(other.view) == bytes([0, 0, 0, 7, 8, 0, 0, 0, 0, 0])


def test_one_process_has_a_file_once() -> None:
    file = SharedFile.create(10)
    assert pickle.loads(pickle.dumps(file)) is file


def test_reaching_it_leaves_no_descriptor_until_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = SharedFile.create(10)
    before = os.listdir("/proc/self/fd")
    other = attach_as_elsewhere(address_of(file), 10, monkeypatch)
    assert os.listdir("/proc/self/fd") == before
    assert os.path.sameopenfile(other.find_fd(), file.find_fd())
    assert other.find_fd() == other.find_fd() != file.find_fd()


@pytest.mark.parametrize("part", ["pid", "fd", "device", "inode", "owner", "token"])
def test_another_file_is_not_taken_for_it(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SharedFile.create(10)
    address = address_of(file)
    wrong: Any = {part: os.urandom(16) if part == "token" else getattr(address, part) + 100_003}
    assert attach_as_elsewhere(replace(address, **wrong), 10, monkeypatch) is None
    assert attach_as_elsewhere(address, 10, monkeypatch) is not None
