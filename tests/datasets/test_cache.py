"""SharedCache: what the dataset yields, made once for all workers, below a bound of bytes."""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing.util
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader

import forebay
from forebay import InvalidMemory, SharedCache
from forebay.datasets import store
from forebay.datasets.store import CacheStats
from forebay.units import PAGE_BYTES
from forebay.workers.rows import plan_rows
from tests.datasets.items import Blocks, Collated, Given, InLists, Told, check_whole, read_all
from tests.datasets.streams import Numbers

KIB, MIB = 1024, 1024**2
ROOT = Path(__file__).parents[2]
SCENE = Path(__file__).with_name("cache_scene.py")
LOADERS = [TorchLoader, forebay.DataLoader]


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Labelled:
    pixels: Any
    label: str


class Handle:
    """Pickles as something that multiprocessing hands over."""

    def __reduce__(self) -> Any:
        return multiprocessing.util.get_temp_dir, ()


BASE = torch.arange(3000.0)
SAMPLES = [
    torch.arange(12).view(3, 4),
    torch.arange(100_000.0),
    torch.arange(12).view(3, 4).t(),
    BASE[5:25],
    torch.zeros(0, 3),
    torch.tensor(5),
    torch.eye(4).to_sparse(),
    torch.nn.Parameter(torch.ones(3)),
    np.arange(20, dtype=np.uint8),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.array([{"a": 1}, None], object),
    {"image": torch.ones(3, 50, 50), "label": 3, "name": "a"},
    (np.ones(50_000), [1, "b", b"c" * 10_000]),
    Point(torch.ones(2), 2.5),
    Labelled(np.ones(3), "cat"),
    ["word " * 20_000, {"k": (1, 2)}],
    [torch.full((k % 7,), k) for k in range(2000)],
    3,
    "text",
    None,
]


def are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same = (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
        return same and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, np.ndarray):
        same = (one.dtype, one.shape, one.flags.f_contiguous) == (
            *(other.dtype, other.shape, other.flags.f_contiguous),
        )
        return same and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(are_equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, Labelled):
        return are_equal(vars(one), vars(other))
    return bool(one == other)


# -- what is handed out -----------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_sample_from_the_cache_is_what_the_dataset_made(sample: Any) -> None:
    dataset = Given(sample)
    cache = SharedCache(dataset, "16MiB")
    assert cache[0] is sample
    assert are_equal(cache[0], sample)
    assert dataset.asked == [0]
    assert cache.stats() == CacheStats(1, 1, 1, cache.stats().store_bytes)


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    cache = SharedCache(Given((BASE[:2000], BASE[1000:])), "1MiB")
    assert cache[0] is cache.dataset.samples[0]  # type: ignore[attr-defined]
    front, back = cache[0]
    front[1500] = -1
    assert back[500] == -1


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_a_sample_may_be_changed_in_place(size: int) -> None:
    cache = SharedCache(Given({"x": torch.ones(size), "y": np.ones(size)}), "8MiB")
    for _ in range(3):
        sample = cache[0]
        assert sample["x"].sum() == sample["y"].sum() == size
        if sample is not cache.dataset[0]:
            sample["x"].zero_()
            sample["y"][:] = 0
            sample["z"] = 1


def test_samples_from_the_cache_are_collated_row_by_row_like_fresh_ones() -> None:
    # A loader keeps samples until the batch is whole when somebody else seems to hold them.
    for fresh in ({"x": torch.ones(30_000)}, torch.ones(10), (np.ones(10), np.ones(30_000))):
        cache = SharedCache(Given(fresh), "1MiB")
        held = [cache[0]]
        held[0] = cache[0]
        rows = plan_rows(held[0], 4)
        assert rows is not None
        new = [rows.make_fresh()]
        rows.keep_held(held[0], rows.count_usual(new[0]))
        assert [field.kept for field in rows.fields] == [None] * len(rows.fields)


def test_what_the_dataset_raises_is_raised_each_time() -> None:
    dataset = Given(ValueError("bad sample"), 1)
    cache = SharedCache(dataset, "1MiB")
    for _ in range(2):
        with pytest.raises(ValueError, match="bad sample"):
            cache[0]
    assert dataset.asked == [0, 0]
    assert (cache.stats().misses, cache.stats().entries) == (0, 0)


@pytest.mark.parametrize("sample", [lambda: 1, Handle(), torch.ones(1, requires_grad=True) * 2])
def test_what_cannot_be_kept_is_made_each_time(sample: Any) -> None:
    dataset = Given(sample)
    cache = SharedCache(dataset, "1MiB")
    assert cache[0] is cache[0] is sample
    assert (cache.stats().misses, cache.stats().entries) == (2, 0)


def test_text_about_handles_is_kept() -> None:
    cache = SharedCache(Given("import multiprocessing.pool"), "1MiB")
    assert cache[0] == cache[0]
    assert cache.stats().entries == 1


# -- indices ----------------------------------------------------------------------------------


def test_indices_that_are_no_plain_numbers_go_to_the_dataset() -> None:
    dataset = Given("a", "b", "c")
    cache = SharedCache(dataset, "1MiB")
    for index in (-1, slice(2), np.array(1), torch.tensor(1)):
        for _ in range(2):
            assert cache[index] == dataset.samples[index]
    assert len(dataset.asked) == cache.stats().misses == 8
    assert cache.stats().entries == 0
    with pytest.raises(IndexError):
        cache[3]


def test_a_dataset_with_names_for_indices_works_uncached() -> None:
    class Named(Given):
        def __getitem__(self, index: str) -> str:
            return index * 2

    assert SharedCache(Named(1, 2), "1MiB")["ab"] == "abab"


def test_numpy_integers_are_the_same_indices() -> None:
    dataset = Given("a", "b")
    cache = SharedCache(dataset, "1MiB")
    assert (cache[1], cache[np.int64(1)], cache[np.uint8(1)]) == ("b", "b", "b")
    assert dataset.asked == [1]


# -- lists ------------------------------------------------------------------------------------


def test_only_missing_samples_of_a_list_are_asked_for() -> None:
    dataset = InLists(*"abcde")
    cache = SharedCache(dataset, "1MiB")
    assert cache.__getitems__([1, 3]) == ["b", "d"]
    assert cache[4] == "e"
    assert cache.__getitems__([0, 1, 2, 3, 4]) == list("abcde")
    assert cache.__getitems__([4, 0]) == ["e", "a"]
    assert dataset.asked == [[1, 3], 4, [0, 2]]
    assert (cache.stats().hits, cache.stats().misses) == (5, 5)


def test_a_dataset_without_lists_is_wrapped_without_them() -> None:
    assert not hasattr(SharedCache(Given(1), "1MiB"), "__getitems__")


def test_what_is_no_list_of_samples_is_handed_on() -> None:
    cache = SharedCache(Collated(*"abc"), "1MiB")
    ask: Any = cache.__getitems__
    assert ask([0, 1]) == ("a", "b")
    assert cache[0] == "a"
    assert ask([0, 1]) == ("a", "b")


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_ask_for_lists(kind: Any) -> None:
    cache = SharedCache(InLists(*range(20)), "1MiB")
    loader = kind(cache, batch_size=4, num_workers=2)
    for epoch in range(2):
        assert torch.cat(list(loader)).tolist() == list(range(20))
        assert cache.stats().hits == 20 * epoch


# -- workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method", "persistent"),
    [
        (TorchLoader, "fork", True),
        (TorchLoader, "fork", False),
        (TorchLoader, "spawn", False),
        (forebay.DataLoader, "fork", True),
        (forebay.DataLoader, "fork", False),
        (forebay.DataLoader, "spawn", True),
        (forebay.DataLoader, "forkserver", False),
    ],
)
def test_from_the_second_epoch_on_every_sample_is_a_hit(
    kind: Any, method: str, persistent: bool
) -> None:
    cache = SharedCache(Blocks(40, 20 * KIB), "2MiB")
    loader = kind(
        *(cache, 5, True),
        num_workers=2,
        persistent_workers=persistent,
        multiprocessing_context=method,
    )
    for epoch in range(3):
        seen = []
        for arrays, numbers in loader:
            assert (arrays == numbers[:, None]).all()
            seen += numbers.tolist()
        assert sorted(seen) == list(range(40))
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.entries) == (40 * epoch, 40, 40)
    read_all(cache)
    assert cache.stats().misses == 40


def test_worker_threads_share_it() -> None:
    cache = SharedCache(Blocks(60, 20 * KIB), "2MiB")
    with forebay.DataLoader(cache, 4, True, num_workers=4, worker_backend="thread") as loader:
        for epoch in range(3):
            assert all((arrays == numbers[:, None]).all() for arrays, numbers in loader)
            assert cache.stats().hits == 60 * epoch
    assert cache.stats().entries == 60


def test_two_loaders_share_it() -> None:
    cache = SharedCache(Blocks(40, 20 * KIB), "2MiB")
    first = forebay.DataLoader(cache, 4, True, num_workers=2)
    second = TorchLoader(cache, 4, True, num_workers=2)
    with first:
        for batches in zip(first, second):
            assert all((arrays == numbers[:, None]).all() for arrays, numbers in batches)
    stats = cache.stats()
    assert stats.hits + stats.misses == 80
    assert stats.entries == 40
    read_all(cache)
    assert cache.stats().misses == stats.misses


def test_it_is_no_reason_to_unpickle_the_dataset_once_a_worker() -> None:
    cache = SharedCache(Blocks(20, 20 * KIB), "2MiB")
    read_all(cache)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn"}
    with forebay.DataLoader(cache, 4, **options) as loader:
        list(loader)
        assert "for itself" not in loader.explain()
    assert cache.stats().hits == 20


def test_a_copy_is_the_same_cache() -> None:
    cache = SharedCache(Blocks(5, KIB), "1MiB")
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        read_all(other)
    assert cache.stats() == CacheStats(5, 5, 5, cache.stats().store_bytes)


def test_a_copy_that_outlives_its_process_makes_its_samples(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = (
        "import pickle, sys; from forebay import SharedCache; from tests.datasets.items import *;"
        "cache = SharedCache(Blocks(5, 1024), '1MiB'); read_all(cache);"
        "sys.stdout.buffer.write(pickle.dumps(cache))"
    )
    orphan = pickle.loads(run_python("-c", script))
    for _ in range(2):
        read_all(orphan)
    assert orphan.stats() == CacheStats(0, 0, 0, 0)
    assert "cannot reach the store" in caplog.text


# -- the bound --------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60_000), max_size=60), st.integers(40_000, 600_000))
def test_it_never_takes_more_than_its_bound(sizes: list[int], memory: int) -> None:
    samples = [np.full(size, number % 256, np.uint8) for number, size in enumerate(sizes)]
    cache = SharedCache(Given(*samples), memory)
    for _ in range(2):
        for number, sample in enumerate(samples):
            assert are_equal(cache[number], sample)
            assert cache.stats().store_bytes <= memory
    assert cache.stats().hits >= cache.stats().entries


def test_what_is_in_stays_in_and_each_epoch_finds_all_of_it() -> None:
    cache = SharedCache(Blocks(100, 40 * KIB), "2MiB")
    with forebay.DataLoader(cache, 5, True, num_workers=2, persistent_workers=True) as loader:
        list(loader)
        entries = cache.stats().entries
        assert 45 <= entries <= 51  # of 40 KiB each, in 2 MiB
        for epoch in range(1, 4):
            list(loader)
            assert cache.stats().hits == epoch * entries
    assert cache.stats().entries == entries
    assert cache.stats().store_bytes <= 2 * MIB


def test_a_sample_that_finds_no_room_does_not_keep_smaller_ones_out() -> None:
    sizes = [100 * KIB, 5 * MIB, 200 * KIB, 900 * KIB, 300 * KIB]
    dataset = Given(*[bytes(size) for size in sizes])
    cache = SharedCache(dataset, "1MiB")
    for _ in range(2):
        assert [len(cache[number]) for number in range(5)] == sizes
    assert dataset.asked == [0, 1, 2, 3, 4, 1, 3]


def test_that_it_is_full_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forebay")
    cache = SharedCache(Blocks(10, 300 * KIB), "1MiB")
    for _ in range(2):
        read_all(cache)
    (record,) = caplog.records
    assert "1 MiB has no room for a sample of 300 KiB; 3 of 10 samples" in record.getMessage()


@pytest.mark.parametrize("memory", ["4Gb", 0, -1, True, None, 1.5, "auto", "150%"])
def test_what_names_no_bytes_is_refused(memory: Any) -> None:
    with pytest.raises(InvalidMemory, match="memory="):
        SharedCache(Given(1), memory)


def test_a_bound_below_the_index_is_refused_with_what_it_takes() -> None:
    with pytest.raises(InvalidMemory, match=r"1,000,000 samples takes 7\.7 MiB") as caught:
        SharedCache(Blocks(1_000_000, 8), "4MiB")
    needed = caught.value.needed_bytes  # type: ignore[attr-defined]
    cache = SharedCache(Blocks(1_000_000, 8), needed)
    for _ in range(2):
        check_whole(cache[999_999], 999_999, 8)
    assert cache.stats().hits == 1
    with pytest.raises(InvalidMemory):
        SharedCache(Blocks(1_000_000, 8), needed - 1)


def test_streams_are_refused() -> None:
    with pytest.raises(TypeError, match="Numbers is a stream"):
        SharedCache(Numbers(3), "1MiB")


def test_its_length_is_the_datasets() -> None:
    assert len(SharedCache(Given(1, 2, 3), "1MiB")) == 3


# -- death ------------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")
STEPS = ("room", "least", "claim", "tail", "bytes", "publish")


class Watched:
    """Shared words; tells which are about to be written."""

    def __init__(self, words: Any, tell: Callable[[str], None], name: Callable[[int, int], str]):
        self.words = words
        self.tell = tell
        self.name = name

    def __getitem__(self, at: int) -> Any:
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.tell(self.name(at, value))
        self.words[at] = value


def die_in_writing(cache: SharedCache[Any], index: int, last_step: str) -> None:
    """For a child: ask for a sample, and be killed at a step of storing it."""
    inner: Any = cache._store

    def tell(step: str) -> None:
        if step == last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    write_one, write_all = os.pwrite, os.pwritev

    def pwrite(fd: int, data: bytes, place: int) -> int:
        tell("room")
        return write_one(fd, data, place)

    def pwritev(fd: int, parts: list[Any], place: int) -> int:
        write_all(fd, [memoryview(parts[-1])[:1000]], place)  # some of it, where it does not belong
        tell("bytes")
        return write_all(fd, parts, place)

    os.pwrite, os.pwritev = pwrite, pwritev  # type: ignore[assignment]
    names = {store._LEAST: "least", store._TAIL: "tail"}
    inner._words = Watched(inner._words, tell, lambda at, _: names[at])
    inner._index = Watched(inner._index, tell, lambda _, word: "publish" if word & 1 else "claim")
    cache[index]


def run_child(target: Any, *arguments: Any) -> int | None:
    child = FORK.Process(target=target, args=arguments)
    child.start()
    child.join()
    code = child.exitcode
    child.close()
    return code


def make_exact_cache(count: int, size_bytes: int) -> SharedCache[Any]:
    """One with room for these samples and for nothing else."""
    trial = SharedCache(Blocks(count, size_bytes), 2 * count * size_bytes + MIB)
    read_all(trial)
    inner: Any = trial._store
    return SharedCache(Blocks(count, size_bytes), inner._find_tail() + PAGE_BYTES - 1)


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_killed_at_any_step_costs_no_room_and_no_lock(step: str) -> None:
    cache = make_exact_cache(8, 20 * KIB)
    for victim in (0, 3, 7):
        assert run_child(die_in_writing, cache, victim, step) == -signal.SIGKILL
        check_whole(cache[victim // 2 + 1], victim // 2 + 1, 20 * KIB)
    read_all(cache)
    assert cache.stats().entries == 8


@pytest.mark.parametrize("step", ["bytes", "publish"])
def test_the_room_of_a_killed_writer_is_filled_by_the_next_one(step: str) -> None:
    cache = make_exact_cache(1, 20 * KIB)
    for _ in range(3):
        assert run_child(die_in_writing, cache, 0, step) == -signal.SIGKILL
    for _ in range(2):
        read_all(cache)
    assert (cache.stats().entries, cache.stats().hits) == (1, 1)


def fill_in_mixed_order(cache: SharedCache[Any], seed: int) -> None:
    order = list(range(len(cache)))
    random.Random(seed).shuffle(order)
    for index in order:
        check_whole(cache[index], index, cache.dataset.size_bytes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", [1, 2])
def test_writers_killed_again_and_again_break_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cache = make_exact_cache(60, 100 * KIB)
    cache.dataset = Told(60, 100 * KIB)
    for round_number in range(15):
        heard, told = os.pipe()
        cache.dataset.pipe = told
        children = [
            FORK.Process(target=fill_in_mixed_order, args=(cache, round_number * 2 + k))
            for k in range(2)
        ]
        for child in children:
            child.start()
        os.close(told)
        for _ in range(rng.randrange(1, 6)):
            os.read(heard, 1)  # in the midst of making and storing, or nothing is left to make
        for child in children:
            child.kill()
            child.join()
            assert child.exitcode in {-9, 0}
            child.close()
        os.close(heard)
    cache.dataset = Blocks(60, 100 * KIB)
    read_all(cache)
    assert cache.stats().entries == 60
    assert cache.stats().store_bytes <= cache.memory_bytes


def test_the_sums_hold_over_many_processes() -> None:
    cache = SharedCache(Blocks(10, KIB), "1MiB")
    for _ in range(3):
        children = [FORK.Process(target=read_all, args=(cache,)) for _ in range(4)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
            child.close()
    stats = cache.stats()
    assert stats.hits + stats.misses == 3 * 4 * 10
    assert stats.misses >= stats.entries == 10


# -- case 29 ----------------------------------------------------------------------------------


def run_python(*arguments: str) -> bytes:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def run_scene(memory: str, persistent: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(run_python(str(SCENE), memory, persistent))
    return figures


EVERYTHING = 200 * 2 * MIB

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads private memory from /proc")


@needs_proc
def test_29_two_workers_hold_one_copy_and_never_more_than_the_bound() -> None:
    fits, too_small = run_scene("512MiB", "persistent"), run_scene("100MiB", "persistent")
    assert fits["hits"] == [0, 200, 200, 200]
    assert fits["store_bytes"] <= 1.01 * EVERYTHING
    assert too_small["hits"] == [0, *[too_small["entries"]] * 3]
    assert 47 <= too_small["entries"] <= 49
    assert too_small["store_bytes"] <= 100 * MIB
    # What the workers hold does not depend on what is cached, and none has it in its own sum.
    assert fits["private_bytes"] <= too_small["private_bytes"] + 16 * MIB
    assert fits["resident_bytes"] < EVERYTHING


@needs_proc
def test_29_workers_that_are_fresh_each_epoch_find_everything() -> None:
    figures = run_scene("512MiB", "fresh")
    assert figures["hits"] == [0, 200, 200, 200]
    assert figures["store_bytes"] <= 1.01 * EVERYTHING
    assert figures["private_bytes"] < 200 * MIB
