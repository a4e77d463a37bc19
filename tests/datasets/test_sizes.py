"""What a sample takes: what would come free if it went."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from forebay.datasets.sizes import estimate_bytes

KIB = 1024
NEAR = 512


@dataclass
class Held:
    pixels: Any


class Slotted:
    __slots__ = ("pixels",)

    def __init__(self, pixels: Any) -> None:
        self.pixels = pixels


TENSOR = torch.zeros(64 * KIB, dtype=torch.uint8)
ARRAY = np.zeros(64 * KIB, np.uint8)


@pytest.mark.parametrize(
    "sample",
    [
        TENSOR,
        TENSOR[:10],  # a view keeps all of it
        (TENSOR, TENSOR[5:], TENSOR.view(2, -1)),
        ARRAY,
        ARRAY[:10],
        [ARRAY, ARRAY[5:], ARRAY.reshape(2, -1)],
        TENSOR.numpy(),
        (TENSOR, TENSOR.numpy()),
        {"x": TENSOR},
        Held(ARRAY),
        Slotted(ARRAY),
        np.frombuffer(bytes(64 * KIB), np.uint8),
        bytes(64 * KIB),
        bytearray(64 * KIB),
        "x" * 64 * KIB,
        [bytes(32 * KIB), {"a": (bytes(32 * KIB),)}],
        np.array([bytes(64 * KIB), None], object),
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_64_kib_are_64_kib_however_they_are_held(sample: Any) -> None:
    assert 0 <= estimate_bytes(sample) - 64 * KIB < 2 * NEAR


def test_python_objects_are_walked() -> None:
    rows = [{"k": f"row {row}", "v": row / 3} for row in range(1000)]
    one = sys.getsizeof(rows[5]) + sys.getsizeof(rows[5]["k"]) + sys.getsizeof(rows[5]["v"])
    assert estimate_bytes(rows) == pytest.approx(1000 * one, rel=0.1)


def test_an_object_that_holds_itself_ends() -> None:
    sample: list[Any] = [bytes(KIB)]
    sample.append(sample)
    assert estimate_bytes(sample) < 2 * KIB


def test_sparse_tensors_count_what_they_store() -> None:
    dense = torch.zeros(1000, 1000)
    dense[0, :100] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about compressed layouts
        compressed = dense.to_sparse_csr()
    for sparse in (dense.to_sparse(), compressed):
        assert 400 < estimate_bytes(sparse) < 12_000


def test_an_image_counts_its_pixels() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (100, 50))
    assert 15_000 <= estimate_bytes(image) < 18_000


def test_pages_of_a_mapped_file_are_not_ours(tmp_path: Any) -> None:
    np.save(tmp_path / "a.npy", ARRAY)
    assert estimate_bytes(np.load(tmp_path / "a.npy", mmap_mode="r")) < NEAR
