"""What frameworks do with a torch loader they can do with this one: rebuild, copy, subclass it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, TensorDataset

from forebay import DataLoader
from forebay.errors import ForebayError
from forebay.options import ENVIRONMENT_VARIABLE
from forebay.torch_compat import BaseLoaderIterator

Torchs = torch.utils.data.DataLoader
OWN: dict[str, Any] = {
    "memory_budget": "1GiB",
    "worker_backend": "thread",
    "seeding": "batch",
    "on_worker_death": "raise",
    "worker_exit_fn": print,
    "refresh_dataset": True,
    "stall_report_s": 5.0,
    "snapshot_every_n_steps": 3,
}


def dataset() -> Any:
    return TensorDataset(torch.arange(20))


def make(**keywords: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), **(OWN | {"batch_size": 3} | keywords))


def public(loader: object) -> dict[str, Any]:
    return {name: value for name, value in vars(loader).items() if not name.startswith("_")}


def own_of(loader: object) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in OWN}


def batches(loader: Any) -> list[list[int]]:
    return [cast("list[int]", batch[0].tolist()) for batch in loader]


# -- keywords and attributes ------------------------------------------------------------------


def parameters(kind: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(kind.__init__).parameters)


def test_torchs_parameters_have_their_names_places_and_defaults() -> None:
    ours = parameters(DataLoader)
    for name, theirs in parameters(Torchs).items():
        assert name in ours
        assert ours[name].default == theirs.default, name
        assert ours[name].kind == theirs.kind, name
    by_position = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position == [
        n for n, p in parameters(Torchs).items() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]


def test_our_parameters_are_keywords_only() -> None:
    ours = set(parameters(DataLoader)) - set(parameters(Torchs)) - {"kwargs"}
    assert ours == set(OWN)
    assert all(parameters(DataLoader)[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ours)


def test_each_own_keyword_is_an_attribute_that_holds_the_raw_argument() -> None:
    for name, value in OWN.items():
        assert vars(make())[name] is value
    unset = DataLoader(dataset())
    assert vars(unset)["memory_budget"] is None
    assert vars(unset)["seeding"] == "torch"
    assert vars(unset)["stall_report_s"] == 60.0
    assert vars(unset)["on_worker_death"] == "replay"
    assert vars(unset)["worker_backend"] == "process"
    assert vars(unset)["worker_exit_fn"] is None


def test_nothing_is_parsed_into_the_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "2GiB")
    assert DataLoader(dataset()).memory_budget is None
    assert DataLoader(dataset(), memory_budget=123456789).memory_budget == 123456789


def test_there_is_no_other_public_attribute() -> None:
    assert set(public(make())) == set(public(Torchs(dataset()))) | set(OWN)


def test_no_attribute_appears_with_use() -> None:
    loader = make()
    before = set(public(loader))
    batches(loader)
    loader.stats()
    loader.explain()
    loader.close()
    assert set(public(loader)) == before


def test_num_workers_and_prefetch_factor_stay_as_given() -> None:
    loader = make(num_workers=50, prefetch_factor=7, memory_budget="40MiB")
    assert (loader.num_workers, loader.prefetch_factor) == (50, 7)


# -- torch's own rules --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keywords",
    [
        dict(num_workers=-1),
        dict(timeout=-1),
        dict(prefetch_factor=2),
        dict(persistent_workers=True),
        dict(shuffle=True, sampler=SequentialSampler(range(5))),
        dict(batch_size=2, batch_sampler=BatchSampler(range(5), 2, False)),
        dict(batch_size=None, drop_last=True),
        dict(num_workers=1, multiprocessing_context="no such method"),
    ],
    ids=", ".join,
)
def test_what_torch_refuses_is_refused_in_torchs_words(keywords: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as theirs:
        Torchs(dataset(), **keywords)
    with pytest.raises(ValueError) as ours:
        DataLoader(dataset(), **keywords)
    assert str(ours.value) == str(theirs.value)


def test_a_keyword_that_nobody_has_is_refused() -> None:
    with pytest.raises(TypeError, match="no_such_keyword"):
        DataLoader(dataset(), no_such_keyword=1)


@pytest.mark.parametrize(
    "name",
    ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"],
)
def test_torchs_guard_on_attributes_still_rules(name: str) -> None:
    loader = make()
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after"):
        setattr(loader, name, getattr(loader, name))


def test_other_attributes_may_be_set_at_any_time() -> None:
    loader = make()
    loader.memory_budget = "2GiB"
    loader.mine = "kept"
    assert public(loader)["mine"] == "kept"


@pytest.mark.parametrize("name", ["__setattr__", "__iter__", "__len__"])
def test_what_frameworks_hook_into_is_torchs_own(name: str) -> None:
    assert name not in vars(DataLoader)


def test_it_is_generic_like_torchs() -> None:
    kind = DataLoader[list[torch.Tensor]]
    assert batches(kind(dataset(), batch_size=10)) == [list(range(10)), list(range(10, 20))]

    class Typed(DataLoader[torch.Tensor]):
        pass

    assert isinstance(Typed(dataset()), Torchs)


def test_the_length_is_torchs() -> None:
    assert len(make()) == len(Torchs(dataset(), batch_size=3)) == 7


def test_the_iterator_is_a_torch_iterator_that_cannot_be_pickled() -> None:
    iterator = iter(make())
    assert isinstance(iterator, BaseLoaderIterator)
    assert len(iterator) == 7
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iterator)


# -- how frameworks rebuild ----------------------------------------------------------------------


class PassingOn(DataLoader[Any]):
    """A subclass as users write it."""

    def __init__(self, *args: Any, flavour: str = "none", **keywords: Any) -> None:
        self.flavour = flavour
        super().__init__(*args, **keywords)


def rebuilt_as_lightning_does(loader: Any, sampler: Any) -> Any:
    """Lightning: attributes that differ from the defaults, by name, with another sampler."""
    known = dict(inspect.signature(loader.__init__).parameters)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        known |= inspect.signature(DataLoader.__init__).parameters
        known |= inspect.signature(Torchs.__init__).parameters
    attributes = public(loader) | {"multiprocessing_context": loader.multiprocessing_context}
    given = {
        name: value
        for name, value in attributes.items()
        if name in known and value is not known[name].default
    }
    given |= {"sampler": sampler, "shuffle": False, "batch_sampler": None}
    return type(loader)(given.pop("dataset"), **given)


@pytest.mark.parametrize("kind", [DataLoader, PassingOn])
def test_lightning_rebuilds_it_with_its_own_keywords(kind: Any) -> None:
    more = {"flavour": "mint"} if kind is PassingOn else {}
    loader = kind(dataset(), batch_size=5, num_workers=2, drop_last=True, **OWN, **more)
    copied = rebuilt_as_lightning_does(loader, SequentialSampler(range(7)))
    assert type(copied) is kind
    assert own_of(copied) == OWN
    assert (copied.batch_size, copied.num_workers, copied.drop_last) == (5, 2, True)
    assert len(copied.sampler) == 7
    assert getattr(copied, "flavour", None) == more.get("flavour")


def test_ignite_rebuilds_it_from_every_public_attribute() -> None:
    loader = make(shuffle=True)
    given = public(loader)
    for name in ("batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind"):
        given.pop(name, None)
    batch_sampler = BatchSampler(SequentialSampler(range(20)), 4, False)
    copied = type(loader)(**given, batch_sampler=batch_sampler)
    assert own_of(copied) == OWN
    assert batches(copied) == [list(range(k, k + 4)) for k in range(0, 20, 4)]


def test_accelerate_keeps_it_where_its_two_lines_are_given() -> None:
    names = [*("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"), *OWN]
    loader = make()
    given: dict[str, Any] = {name: getattr(loader, name, None) for name in names}
    copied = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **given)
    assert copied.batch_sampler is loader.batch_sampler
    assert own_of(copied) == OWN


class Endless:
    """timm's and others' sampler without an end."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader[Any]):
    """timm's trick: one iterator for all epochs, over an endless sampler put in afterwards."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._DataLoader__initialized = False
        self.batch_sampler = Endless(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(cast("Any", self.batch_sampler).sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_timms_endless_loader_works(num_workers: int) -> None:
    loader = MultiEpochs(dataset(), batch_size=5, num_workers=num_workers)
    for _ in range(3):
        assert batches(loader) == [list(range(k, k + 5)) for k in range(0, 20, 5)]
    loader.close()


# -- copies ---------------------------------------------------------------------------------------


def pickled(loader: DataLoader[Any]) -> Any:
    return pickle.loads(pickle.dumps(loader))


@pytest.mark.parametrize(
    ("copied_by", "used"),
    [
        pytest.param(by, used, id=f"{'used' if used else 'fresh'}, by {by.__name__}", marks=marks)
        for by, used, marks in [
            (pickled, False, ()),
            (copy.copy, False, ()),
            (copy.deepcopy, False, ()),
            (pickled, True, ()),
            (copy.copy, True, ()),
            (copy.deepcopy, True, ()),
        ]
    ],
)
def test_copies_are_loaders_with_the_same_keywords_and_no_past(copied_by: Any, used: bool) -> None:
    loader = make(persistent_workers=True, num_workers=1) if used else make()
    first = batches(loader)[:1] if used else []
    copied = copied_by(loader)
    assert own_of(copied) == OWN
    assert copied.stats().batches == 0
    assert set(vars(copied)) == set(vars(loader))
    if used:
        assert batches(copied)[:1] == first
        assert batches(loader)[:1] == first
        copied.close()
        loader.close()


def test_closing_a_copy_leaves_the_original_alone() -> None:
    loader = make(num_workers=1)
    iterator: Any = iter(loader)
    next(iterator)
    copy.copy(loader).close()
    assert iterator._workers[0].is_alive()
    loader.close()


# -- the end --------------------------------------------------------------------------------------


def test_with_closes_it_and_batches_stay() -> None:
    with make(num_workers=1, seeding="torch") as loader:
        iterator = iter(loader)
        kept = next(iterator)
    assert kept[0].tolist() == [0, 1, 2]
    assert loader.stats().batches == 1


def test_closing_an_unused_loader_is_harmless_and_it_can_be_used_after() -> None:
    loader = make()
    loader.close()
    loader.close()
    assert len(batches(loader)) == 7


def test_an_iterator_of_a_closed_loader_says_that_it_is_closed() -> None:
    loader = make(num_workers=1)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises((StopIteration, ForebayError)):
        next(iterator)


def test_a_random_sampler_given_is_the_very_object() -> None:
    sampler = RandomSampler(range(20))
    loader = make(sampler=sampler)
    assert loader.sampler is sampler
    assert cast("Any", loader.batch_sampler).sampler is sampler
