"""What a state tells, what it costs, and which loader may go on from it."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from forebay import DataLoader, InvalidState, StateMismatch, StateUnavailable
from tests.resume.datasets import Augmented, CountingSampler, Forgetful, Stream
from tests.resume.scene import BUDGET, Scene, seed, take


def make(dataset: Any = None, **keywords: Any) -> DataLoader[Any]:
    usual: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "memory_budget": BUDGET}
    return DataLoader(dataset or Augmented(30), **(usual | keywords))


# -- telling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_nobody_iterated_tells_what_it_will_begin_with(num_workers: int) -> None:
    seed(1)
    with make(num_workers=num_workers, shuffle=True) as loader:
        state = loader.state_dict()
        expected = take(iter(loader))
    seed(2)
    with make(num_workers=num_workers, shuffle=True) as loader:
        loader.load_state_dict(state)
        assert take(iter(loader)) == expected


def test_asking_an_unstarted_loader_starts_nothing() -> None:
    loader = make()
    loader.state_dict()
    assert loader.stats().workers == 0
    assert loader._iterator is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_asking_changes_nothing(num_workers: int) -> None:
    runs = []
    for is_asked in (False, True):
        seed(1)
        with make(num_workers=num_workers, shuffle=True) as loader:
            if is_asked:
                loader.state_dict()
            iterator = iter(loader)
            batches = []
            for _ in range(8):
                batches += take(iterator, 1)
                if is_asked:
                    loader.state_dict()
            del iterator
        runs.append((batches, torch.get_rng_state().tolist()))
    assert runs[0] == runs[1]


def test_a_state_stays_as_it_was_taken() -> None:
    with make() as loader:
        iterator = iter(loader)
        take(iterator, 2)
        state = loader.state_dict()
        before = copy.deepcopy(state)
        take(iterator, 2)
        assert state == before
        assert loader.state_dict() != before
        del iterator


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_has_the_keys_that_frameworks_read(num_workers: int) -> None:
    with make(num_workers=num_workers) as loader:
        iterator = iter(loader)
        take(iterator, 3)
        state = loader.state_dict()
        assert state["_num_yielded"] == state["_sampler_iter_yielded"] == 3
        assert state["_index_sampler_state"]["samples_yielded"] == 12
        assert not state["_iterator_finished"]
        take(iterator)
        assert loader.state_dict()["_iterator_finished"]
        del iterator


def test_a_framework_may_take_batches_back() -> None:
    # Accelerate fetches ahead, and says so by counting less.
    with make() as loader:
        expected = [batch[0].tolist() for batch in loader]
        iterator = iter(loader)
        take(iterator, 3)
        state = loader.state_dict()
        del iterator
    state["_num_yielded"] -= 1
    state["_sampler_iter_yielded"] -= 1
    with make() as loader:
        loader.load_state_dict(state)
        assert [batch[0].tolist() for batch in loader] == expected[2:]


def test_a_loaded_state_is_what_the_loader_tells_until_it_is_iterated() -> None:
    scene = Scene()
    with scene.make() as loader:
        iterator = iter(loader)
        take(iterator, 2)
        state = loader.state_dict()
        del iterator
    other = scene.make()
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert pickle.loads(pickle.dumps(other)).state_dict() == state


def test_inside_the_last_batch_nothing_is_left_and_after_the_loop_everything() -> None:
    with make() as loader:
        states = [loader.state_dict() for _ in loader]
        states.append(loader.state_dict())
    lengths = []
    for state in states[-2:]:
        with make() as loader:
            loader.load_state_dict(state)
            lengths.append(len(take(iter(loader))))
    assert lengths == [0, len(states) - 1]


def test_an_empty_state_begins_anew() -> None:
    with make() as loader:
        whole = [batch[0].tolist() for batch in loader]
        iterator = iter(loader)
        take(iterator, 3)
        loader.load_state_dict(loader.state_dict())
        loader.load_state_dict({})
        assert [batch[0].tolist() for batch in loader] == whole
        del iterator


def test_a_loop_that_was_left_tells_how_far_it_came() -> None:
    with make() as loader:
        whole = [batch[0].tolist() for batch in loader]
        for number, _ in enumerate(loader):
            if number == 2:
                break
        loader.load_state_dict(loader.state_dict())
        assert [batch[0].tolist() for batch in loader] == whole[3:]


def test_torchs_own_engine_tells_nothing() -> None:
    loader = make(num_workers=0, memory_budget="off")
    assert loader.state_dict() == {}


# -- samplers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_sampler_that_tells_its_place_is_set_to_it(
    num_workers: int, batch_size: int | None
) -> None:
    keywords: dict[str, Any] = {"num_workers": num_workers, "batch_size": batch_size}
    with make(sampler=CountingSampler(30), **keywords) as loader:
        iterator = iter(loader)
        take(iterator, 5)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = len(take(iterator))
        del iterator
    sampler = CountingSampler(30)
    with make(sampler=sampler, **keywords) as loader:
        loader.load_state_dict(state)
        assert len(take(iter(loader))) == rest
    assert sampler.drawn == 30 - 5 * (batch_size or 1)


def test_the_epoch_of_a_distributed_sampler_is_given_again() -> None:
    def make_distributed() -> DataLoader[Any]:
        data = Augmented(40)
        return make(data, sampler=DistributedSampler(data, num_replicas=2, rank=1))

    with make_distributed() as loader:
        loader.sampler.set_epoch(7)  # type: ignore[attr-defined]
        iterator = iter(loader)
        take(iterator, 2)
        state = loader.state_dict()
        rest = take(iterator)
        del iterator
    with make_distributed() as loader:
        loader.load_state_dict(state)
        assert take(iter(loader)) == rest


def test_the_generator_of_a_sampler_counts_too() -> None:
    def make_sampled() -> DataLoader[Any]:
        data = Augmented(40)
        order = torch.Generator().manual_seed(torch.initial_seed())
        return make(data, sampler=RandomSampler(data, generator=order))

    seed(1)
    with make_sampled() as loader:
        iterator = iter(loader)
        take(iterator, 2)
        state = loader.state_dict()
        rest = take(iterator)
        del iterator
    seed(2)
    with make_sampled() as loader:
        loader.load_state_dict(state)
        assert take(iter(loader)) == rest


def test_without_order_each_batch_comes_once() -> None:
    with make(in_order=False, batch_size=None) as loader:
        iterator = iter(loader)
        head = [next(iterator)[0] for _ in range(7)]
        state = loader.state_dict()
        del iterator
    with make(in_order=False, batch_size=None) as loader:
        loader.load_state_dict(state)
        assert sorted([*head, *(sample[0] for sample in loader)]) == list(range(30))


# -- whose random numbers -----------------------------------------------------------------------


def test_the_training_codes_generators_are_left_alone_by_workers() -> None:
    seed(1)
    with make(shuffle=True) as loader:
        iterator = iter(loader)
        take(iterator, 2)
        state = loader.state_dict()
        del iterator
    seed(2)
    before = torch.get_rng_state()
    with make(shuffle=True) as loader:
        loader.load_state_dict(state)
        take(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ({"num_workers": 2}, {"num_workers": 3}),
        ({"num_workers": 0}, {"num_workers": 2}),
        ({"num_workers": 2}, {"num_workers": 0}),
        ({"batch_size": 4}, {"batch_size": 5}),
        ({"seeding": "torch"}, {"seeding": "batch"}),
        ({}, {"dataset": Stream(8)}),
        ({}, {"generator": torch.Generator()}),
    ],
)
def test_a_loader_made_otherwise_cannot_go_on(saved: dict[str, Any], given: dict[str, Any]) -> None:
    with make(**saved) as loader:
        iterator = iter(loader)
        take(iterator, 1)
        state = loader.state_dict()
        del iterator
    with make(**given) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateMismatch, match="the state was taken with") as caught:
            iter(loader)
        assert isinstance(caught.value, AssertionError)
        loader.load_state_dict({})
        assert take(iter(loader))


@pytest.mark.parametrize("state", [{"x": 1}, {"forebay": {}}, [1], "state"])
def test_what_is_no_state_is_refused_at_once(state: Any) -> None:
    loader = make()
    with pytest.raises(InvalidState, match="cannot be read"):
        loader.load_state_dict(state)
    assert take(iter(make(num_workers=0)), 1)


def test_a_dataset_whose_state_fails_disturbs_only_who_asks() -> None:
    with make(Forgetful(8)) as loader:
        iterator = iter(loader)
        take(iterator, 1)
        with pytest.raises(StateUnavailable, match="no place is known"):
            loader.state_dict()
        assert take(iterator)
        del iterator
