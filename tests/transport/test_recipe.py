"""A batch made by recipe is the batch that unpickling makes, in containers of its own."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.transport.codec import encode
from forebay.transport.recipe import Recipe, derive_recipe
from tests.parity.batches import Pair, counting, views_of_one_storage
from tests.parity.compare import assert_same
from tests.parity.freeze import freeze
from tests.transport.parcels import carry, carry_unknown, lay_out


class Marked(Pair):
    """A namedtuple that may have attributes beside its items."""


class Tagged(NamedTuple):
    tag: str
    rows: torch.Tensor


def recipe_of(batch: object) -> Recipe | None:
    """What is derived from `batch` as it arrives, and from the buffers that it arrives in."""
    encoded = encode(batch)
    buffers = lay_out(encoded)
    head = memoryview(encoded.head)
    arrived = pickle.loads(head[8:], buffers=buffers)
    return derive_recipe(arrived, buffers)


def usual_batches() -> st.SearchStrategy[Any]:
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.uint16, torch.int64])
    shapes = st.lists(st.integers(1, 4), max_size=3)
    leaves = st.builds(
        lambda shape, dtype: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype),
        shapes,
        dtypes,
    )
    constants = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats()
    return st.recursive(
        leaves | constants,
        lambda parts: (
            st.lists(parts, max_size=3)
            | st.dictionaries(st.text(max_size=3), parts, max_size=3)
            | st.lists(parts, max_size=3).map(tuple)
            | st.builds(Pair, parts, parts)
        ),
        max_leaves=6,
    )


@given(usual_batches())
@settings(max_examples=150, deadline=None)
def test_a_recipe_makes_what_unpickling_makes(batch: Any) -> None:
    encoded = encode(batch)
    recipe = recipe_of(batch)
    if recipe is None:  # only where there is no tensor to lay out
        assert not encoded.buffers
        return
    assert_same(freeze(carry_unknown(batch)), freeze(recipe.rebuild(lay_out(encoded))))


def test_each_batch_has_containers_of_its_own() -> None:
    made = {"x": [counting(0)], "deep": {"y": (counting(1), [1, 2])}}
    carry_unknown(made)
    first, second = carry(made), carry(made)
    first["x"].append("mine")
    first["deep"]["y"][1].clear()
    first["deep"]["z"] = 0
    assert_same(freeze(made), freeze(second))


def test_each_batch_has_the_bytes_of_its_own_buffers() -> None:
    arrived = [carry([counting(k, 100), counting(2 * k, 7)]) for k in range(4)]
    for k, (one, other) in enumerate(arrived):
        assert one.tolist() == counting(k, 100).tolist()
        assert other.tolist() == counting(2 * k, 7).tolist()


def test_the_usual_batch_has_a_recipe() -> None:
    batch = {"image": counting(0, 12).reshape(3, 4), "label": [torch.tensor(3)], "name": "a"}
    assert recipe_of(batch) is not None
    assert recipe_of(Tagged("a", counting(0))) is not None


shared = counting(0, 10)
TWICE: list[int] = []


def ring() -> list[Any]:
    made: list[Any] = [counting(0)]
    made.append(made)
    return made


def marked() -> Marked:
    made = Marked(counting(0), 1)
    made.source = "elsewhere"  # type: ignore[attr-defined]
    return made


UNUSUAL = {
    "the same tensor twice": lambda: [shared, shared],
    "views of one storage": lambda: views_of_one_storage(1),
    "a part of a storage": lambda: shared[2:],
    "a turned tensor": lambda: counting(0, 6).reshape(2, 3).t(),
    "a length of 1 with a stride of its own": lambda: torch.arange(5).reshape(1, 5).t(),
    "one that needs a gradient": lambda: torch.ones(3, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "an empty tensor": lambda: torch.empty(0),
    "an array": lambda: [counting(0), np.arange(3)],
    "no tensor at all": lambda: [1, 2],
    "a set": lambda: [counting(0), {1}],
    "a list met twice": lambda: [counting(0), TWICE, TWICE],
    "a list that holds itself": ring,
    "a namedtuple with an attribute": marked,
    "a dict of a class of its own": lambda: OrderedDict(a=counting(0)),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_what_a_recipe_cannot_say_is_left_to_the_pickle(make: Any) -> None:
    assert recipe_of(make()) is None
    for _ in range(2):
        assert_same(freeze(make()), freeze(carry(make())))
