"""Streams that share a process draw the random numbers that they would draw alone."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate, get_worker_info

from forebay import torch_compat
from forebay.workers.job import Job
from forebay.workers.randomness import Generators, enter_stream, rng
from forebay.workers.streams import RandomState, Streams, mix_seed, seed_generators

MAP_KIND = torch.utils.data.dataloader._DatasetKind.Map
BASE_SEED = 12345


@pytest.fixture(autouse=True)
def this_process_is_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", None)
    state = RandomState.take()
    yield
    state.put()
    enter_stream(None)


def job(
    num_streams: int = 3,
    dataset: Any = None,
    init_fn: Callable[[int], None] | None = None,
    exit_fn: Callable[[int], None] | None = None,
) -> Job:
    return Job(
        dataset=list(range(10)) if dataset is None else dataset,
        kind=MAP_KIND,
        auto_collation=True,
        collate_fn=default_collate,
        has_default_collate=True,
        drop_last=False,
        num_streams=num_streams,
        base_seed=BASE_SEED,
        init_fn=init_fn,
        exit_fn=exit_fn,
        seeding="torch",
    )


def draw() -> tuple[Any, ...]:
    numbers = np.random.rand(2).tolist()
    return random.random(), torch.rand(2).tolist(), numbers, torch.randn(1).item()


def alone(number: int, count: int) -> list[Any]:
    """What stream `number` draws in a process of its own."""
    seed_generators(BASE_SEED, number)
    return [draw() for _ in range(count)]


def test_a_stream_is_seeded_as_torchs_worker() -> None:
    Streams(job(), (2,)).enter(2)
    assert torch.initial_seed() == BASE_SEED + 2
    assert random.random() == random.Random(BASE_SEED + 2).random()
    state = torch.utils.data._utils.worker._generate_state(BASE_SEED, 2)
    expected = np.random.RandomState(state).rand()
    assert np.random.rand() == expected


@given(st.lists(st.integers(0, 2), max_size=12))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streams_of_one_process_draw_as_if_alone_in_any_order(turns: list[int]) -> None:
    streams = Streams(job(), (0, 1, 2))
    streams.start_all()
    drawn: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for number in turns:
        streams.enter(number)
        drawn[number].append(draw())
    for number, numbers in drawn.items():
        assert numbers == alone(number, len(numbers))


def test_the_worker_info_is_that_of_the_current_stream() -> None:
    dataset: Any = list(range(10))
    streams = Streams(job(dataset=dataset), (0, 2))
    streams.start_all()
    for number in (0, 2, 0):
        streams.enter(number)
        info = get_worker_info()
        assert info is not None
        assert (info.id, info.num_workers, info.seed) == (number, 3, BASE_SEED + number)
        assert info.dataset is dataset


def test_the_init_function_runs_once_a_stream_and_its_draws_count() -> None:
    seen: list[tuple[int, int]] = []

    def init(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        seen.append((number, info.id))
        random.random()

    streams = Streams(job(init_fn=init), (0, 1))
    streams.start_all()
    assert seen == [(0, 0), (1, 1)]
    streams.enter(0)
    random.seed(BASE_SEED)
    random.random()
    expected = random.random()
    streams.enter(1)
    assert streams.enter(0).number == 0
    random.seed(BASE_SEED)
    random.random()
    assert random.random() == expected
    assert len(seen) == 2


def test_a_failing_init_function_is_the_fault_of_its_stream_alone() -> None:
    def init(number: int) -> None:
        if number == 1:
            raise LookupError("stream 1")

    streams = Streams(job(init_fn=init), (0, 1))
    streams.start_all()
    assert streams.enter(0).fault is None
    fault = streams.enter(1).fault
    with pytest.raises(LookupError, match="Caught LookupError in DataLoader worker process 1"):
        fault.reraise()


def test_a_stream_has_torchs_fetcher() -> None:
    stream = Streams(job(), (0,)).enter(0)
    assert stream.fetcher.fetch([3, 4]).tolist() == [3, 4]


def test_a_new_epoch_makes_fetchers_anew_and_lets_generators_run_on() -> None:
    streams = Streams(job(), (0,))
    stream = streams.enter(0)
    first, before = stream.fetcher, draw()
    stream.has_ended = True
    streams.resume(1)
    assert stream.fetcher is not first
    assert not stream.has_ended
    assert [before, draw()] == alone(0, 2)


def test_the_exit_function_runs_once_for_each_stream_in_its_place() -> None:
    seen: list[tuple[int, Any]] = []

    def leave(number: int) -> None:
        info = get_worker_info()
        seen.append((number, info and info.id))

    streams = Streams(job(exit_fn=leave), (0, 2))
    streams.start_all()
    streams.run_exit_fn()
    assert seen == [(0, 0), (2, 2)]


# -- seeds of batches --------------------------------------------------------------------------


def test_streams_take_their_own_generators_along_to_another_process() -> None:
    here, there = Streams(job(), (0, 1)), Streams(job(), ())
    here.enter(1).own.python.random()
    expected = Generators(BASE_SEED, 1)
    expected.python.random()
    there.adopt(pickle.loads(pickle.dumps(here.hand_over((1,)))))
    assert rng() is there.enter(1).own
    assert rng().python.random() == expected.python.random()
    assert rng().numpy.random() == expected.numpy.random()


def test_seeds_of_batches_are_the_same_on_every_platform_and_for_ever() -> None:
    seeds = [mix_seed(0, 0, 0), mix_seed(1, 0, 0), mix_seed(2**62, 3, 10**6)]
    assert seeds == [2812178212566171247, 6791897765849424158, 3457959988319270471]


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(0, 10**9))
def test_seeds_are_63_bits_and_fit_every_generator(base: int, epoch: int, serial: int) -> None:
    seed = mix_seed(base, epoch, serial)
    assert 0 <= seed < 2**63
    random.seed(seed)


def test_seeds_of_neighbours_share_nothing() -> None:
    seeds = [mix_seed(b, e, s) for b in range(8) for e in range(8) for s in range(64)]
    assert len(set(seeds)) == len(seeds)
    pairs = itertools.pairwise(seeds)
    unlike = sum((one ^ other).bit_count() for one, other in pairs) / len(seeds)
    assert 30 < unlike < 33  # of 63 bits: half


def test_every_global_generator_is_seeded_from_a_batchs_seed() -> None:
    seed_generators(mix_seed(1, 2, 3), 0)
    first = draw()
    draw()
    seed_generators(mix_seed(1, 2, 3), 0)
    assert draw() == first
    assert torch_compat.generate_numpy_state(5, 0) != torch_compat.generate_numpy_state(6, 0)
