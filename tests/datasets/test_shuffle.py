"""ShuffleBuffer: every sample once, in another order, below a bound of bytes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader

import forebay
from forebay import DuplicateSamplesWarning, InvalidMemory, ShuffleBuffer
from forebay.datasets.sizes import estimate_bytes
from tests.datasets.streams import Arrays, Drawing, Numbers, Sized, Undivided

KIB, MIB = 1024, 1024**2
ROOT = Path(__file__).parents[2]
SCENE = Path(__file__).with_name("shuffle_scene.py")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.integers(1, 50), st.integers(100, 5000), st.integers(0, 9))
def test_every_sample_comes_once(count: int, most: int, memory: int, seed: int) -> None:
    stream = ShuffleBuffer(range(count), memory, most_samples=most, seed=seed)
    assert sorted(stream) == list(range(count))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=60), st.integers(1000, 10_000))
def test_what_is_held_stays_below_the_bound(sizes: list[int], memory: int) -> None:
    held: dict[int, int] = {}

    def source() -> Any:
        for number, size in enumerate(sizes):
            sample = bytes(size)
            held[number] = sys.getsizeof((number, sample)) + estimate_bytes(number)
            held[number] += estimate_bytes(sample)
            yield number, sample

    for number, _ in ShuffleBuffer(source(), memory, seed=0):
        del held[number]
        newest = max(held.values(), default=0)  # the sample in hand is beside the buffer
        assert sum(held.values()) <= memory + newest


def test_the_order_is_mixed_over_the_whole_buffer() -> None:
    order = list(ShuffleBuffer(range(1000), most_samples=100, seed=0))
    assert order != sorted(order)
    moved = [abs(place - number) for place, number in enumerate(order)]
    assert np.mean(moved) > 50


def test_a_sample_larger_than_the_bound_passes_through() -> None:
    stream = ShuffleBuffer(Sized([10, 5 * MIB, 20, 30]), "1MiB", seed=0)
    sizes = [len(sample) for sample in stream]
    assert sizes[0] == 5 * MIB
    assert sorted(sizes) == [10, 20, 30, 5 * MIB]


def test_the_same_seed_gives_the_same_order_until_the_epoch_is_set() -> None:
    stream = ShuffleBuffer(range(100), most_samples=20, seed=1)
    first = list(stream)
    assert list(stream) == first
    stream.set_epoch(1)
    assert list(stream) != first
    stream.set_epoch(0)
    assert list(stream) == first


def test_the_epoch_is_passed_on() -> None:
    class Source(Numbers):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    source = Source(3)
    ShuffleBuffer(source).set_epoch(4)
    assert source.epoch == 4


def test_a_generator_decides_the_order() -> None:
    def order(start: int) -> list[int]:
        generator = torch.Generator().manual_seed(start)
        return list(ShuffleBuffer(range(100), most_samples=20, generator=generator))

    assert order(1) == order(1) != order(2)


def test_torchs_seed_decides_the_order_of_each_epoch() -> None:
    def epochs() -> list[list[int]]:
        torch.manual_seed(3)
        stream = ShuffleBuffer(Numbers(60), most_samples=10)
        loader = forebay.DataLoader(stream, batch_size=6, num_workers=2)
        with loader:
            return [torch.cat(list(loader)).tolist() for _ in range(2)]

    once, again = epochs(), epochs()
    assert once == again
    assert once[0] != once[1]
    assert sorted(once[0]) == sorted(once[1]) == list(range(60))


def test_torchs_loader_gives_the_same_samples() -> None:
    def samples(kind: Any) -> list[int]:
        torch.manual_seed(3)
        loader = kind(ShuffleBuffer(Numbers(60), most_samples=10), batch_size=6, num_workers=2)
        return torch.cat(list(loader)).tolist()

    assert samples(TorchLoader) == samples(forebay.DataLoader)


def test_what_the_dataset_draws_does_not_depend_on_the_buffer() -> None:
    def draws(most: int) -> dict[int, float]:
        torch.manual_seed(0)
        return dict(ShuffleBuffer(Drawing(), most_samples=most))

    assert draws(3) == draws(20)


def test_the_bound_is_divided_among_the_workers() -> None:
    stream = ShuffleBuffer(Arrays(200), "12MiB", seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DuplicateSamplesWarning)
        loader = forebay.DataLoader(stream, batch_size=None, num_workers=3)
        with loader:
            first = [int(array[0]) for array, _ in zip(loader, range(3))]
    # 4 MiB each: seven arrays of half a MiB with their heads, and the eighth pushes one out.
    assert all(number <= 7 for number in first)


def test_the_whole_is_forecast_from_the_first_twentieth(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forebay")
    stream = ShuffleBuffer(Arrays(60), "10MiB", most_samples=400, seed=0)
    samples = iter(stream)
    before = stream.forecast_bytes
    next(samples)
    assert (before, stream.forecast_bytes) == (None, 10 * MIB)
    assert "will hold about 10 MiB" in caplog.text
    assert "400 samples would take 200 MiB" in caplog.text


def test_a_buffer_of_few_small_samples_is_forecast_below_the_bound() -> None:
    stream = ShuffleBuffer(Sized([100_000] * 300), "64MiB", most_samples=100, seed=0)
    next(iter(stream))
    assert stream.forecast_bytes == pytest.approx(10_000_000, rel=0.05)


def test_workers_that_yield_the_same_samples_are_reported() -> None:
    # Forked workers inherit that warnings are errors here.
    with (
        forebay.DataLoader(ShuffleBuffer(Undivided(40), seed=0), 8, num_workers=2) as loader,
        pytest.raises(DuplicateSamplesWarning, match="begin with the same 4 samples"),
    ):
        list(loader)


def test_spawned_workers_are_compared_too(capfd: pytest.CaptureFixture[str]) -> None:
    stream = ShuffleBuffer(Undivided(40), seed=0)
    with forebay.DataLoader(stream, 8, num_workers=2, multiprocessing_context="spawn") as loader:
        assert sum(len(batch) for batch in loader) == 80
    assert "begin with the same 4 samples" in capfd.readouterr().err


def test_workers_that_divide_the_stream_are_not_reported() -> None:
    stream = ShuffleBuffer(Numbers(40), seed=0)
    with forebay.DataLoader(stream, 8, num_workers=2, persistent_workers=True) as loader:
        for _ in range(3):
            assert sum(len(batch) for batch in loader) == 40


def test_its_length_is_the_datasets() -> None:
    assert len(ShuffleBuffer(Numbers(7))) == 7
    with pytest.raises(TypeError):
        len(ShuffleBuffer(Undivided(7)))


@pytest.mark.parametrize("memory", ["4Gb", 0, -1, True, None, 1.5, "auto", "150%"])
def test_what_names_no_bytes_is_refused(memory: Any) -> None:
    with pytest.raises(InvalidMemory, match="memory="):
        ShuffleBuffer(range(3), memory)


def test_options_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="either decides"):
        ShuffleBuffer(range(3), seed=1, generator=torch.Generator())
    with pytest.raises(ValueError, match="most_samples=0"):
        ShuffleBuffer(range(3), most_samples=0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads private memory from /proc")
def test_41_three_workers_with_a_buffer_of_400_samples_stay_below_one_bound() -> None:
    def run(memory: str) -> dict[str, int]:
        done = subprocess.run(
            [sys.executable, str(SCENE), memory],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        figures: dict[str, int] = json.loads(done.stdout)
        return figures

    bounded, bare = run("60MiB"), run("1MiB")
    assert bounded["samples"] == bare["samples"] == 3 * 600
    held = bounded["private_bytes"] - bare["private_bytes"]
    in_hand = 3 * MIB // 2  # the sample each worker makes
    assert 45 * MIB < held <= 60 * MIB + in_hand
