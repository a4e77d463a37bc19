"""Row by row or from a list: the batch is the one that torch's default collate makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from forebay import torch_compat
from forebay.workers.rows import Rows, plan_rows
from tests.parity.batches import COLLATED, Make, Pair, counting
from tests.parity.compare import assert_same
from tests.parity.freeze import freeze

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.uint8)
KINDS = ("f4", "i8", "u1", "?", "c8")


def opened(first: Any, length: int) -> Rows:
    rows = plan_rows(first, length)
    assert rows is not None
    rows.open_alone()
    return rows


def by_rows(samples: list[Any], gather: int, length: int | None = None) -> Any:
    """The batch, gathered as a worker does; the samples in a list where they are odd."""
    rows = plan_rows(samples[0], length or len(samples))
    if rows is None:
        return torch_compat.collate_privately(samples)
    rows.open_alone()
    for start in range(0, len(samples), gather):
        group = samples[start : start + gather]
        if not rows.put(group):
            return torch_compat.collate_privately([*rows.unwrite(), *samples[start:]])
    return rows.finish()


@pytest.mark.parametrize("make", COLLATED.values(), ids=COLLATED)
def test_every_kind_of_sample_is_collated_as_by_torch(make: Make) -> None:
    samples = [make(index) for index in range(5)]
    expected = freeze(default_collate(samples))
    actual = freeze(by_rows([make(index) for index in range(5)], gather=2))
    # In a worker torch stacks into fresh shared memory, in the usual order of strides.
    assert_same(expected, actual, ignoring=("stride",))


def leaves() -> st.SearchStrategy[Any]:
    """Functions of the index, so that the samples of a batch are alike."""
    shapes = st.lists(st.integers(0, 3), max_size=3)

    def tensor(shape: list[int], dtype: torch.dtype) -> Make:
        count = int(np.prod(shape))
        return lambda index: (torch.arange(count) + index).reshape(shape).to(dtype)

    def array(shape: list[int], kind: str) -> Make:
        count = int(np.prod(shape))
        return lambda index: (np.arange(count) + index).reshape(shape).astype(kind)

    return (
        st.builds(tensor, shapes, st.sampled_from(DTYPES))
        | st.builds(array, shapes, st.sampled_from(KINDS))
        | st.sampled_from([int, float, str, lambda index: index % 2 == 0])
    )


def samples_of() -> st.SearchStrategy[Make]:
    def dict_of(parts: dict[str, Make]) -> Make:
        return lambda index: {key: part(index) for key, part in parts.items()}

    def list_of(parts: list[Make]) -> Make:
        return lambda index: [part(index) for part in parts]

    def tuple_of(parts: list[Make]) -> Make:
        return lambda index: tuple(part(index) for part in parts)

    def pair_of(left: Make, right: Make) -> Make:
        return lambda index: Pair(left(index), right(index))

    return st.recursive(
        leaves(),
        lambda parts: (
            st.dictionaries(st.text(max_size=2), parts, min_size=1, max_size=3).map(dict_of)
            | st.lists(parts, min_size=1, max_size=3).map(list_of)
            | st.lists(parts, min_size=1, max_size=3).map(tuple_of)
            | st.builds(pair_of, parts, parts)
        ),
        max_leaves=5,
    )


def told(collate: Any) -> object:
    """What a collate gives, or the error that it raises."""
    try:
        return freeze(collate())
    except Exception as error:
        return type(error), str(error)


@given(samples_of(), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_any_alike_samples_are_collated_as_by_torch(
    make: Make, count: int, gather: int, missing: int
) -> None:
    """With `missing`, the stream ended before the batch was full."""
    samples = [make(index) for index in range(count)]
    expected = told(lambda: default_collate(samples))
    actual = told(lambda: by_rows(samples, gather, count + missing))
    assert_same([expected], [actual])


# torch says this once a process: whoever collates first hears it.
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy")
@given(samples_of(), samples_of(), st.integers(1, 5), st.data())
@settings(max_examples=150, deadline=None)
def test_an_odd_sample_anywhere_gets_torchs_result_or_torchs_error(
    make: Make, make_odd: Make, count: int, data: st.DataObject
) -> None:
    samples = [make(index) for index in range(count)]
    samples.insert(data.draw(st.integers(0, count)), make_odd(count))
    gather = data.draw(st.integers(1, 4))
    # As in a worker, where mixed dtypes become that of the first sample.
    expected = told(lambda: torch_compat.collate_privately(samples))
    assert_same([expected], [told(lambda: by_rows(samples, gather))])


@pytest.mark.parametrize(
    "sample",
    [
        {"a": torch.ones(2, requires_grad=True)},
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
        np.array(["a"]),
        np.array(3.0),
        {"a": {1, 2}},
        [torch.ones(2), None],
        (3, "text"),
    ],
    ids=lambda sample: f"{type(sample).__name__}",
)
def test_unusual_samples_are_left_to_torch(sample: Any) -> None:
    assert plan_rows(sample, 4) is None


def test_a_taught_collate_decides_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(registry, Pair, lambda batch, *, collate_fn_map=None: "mine")
    assert plan_rows(torch.ones(3), 4) is None


def test_the_size_is_known_from_the_first_sample() -> None:
    rows = plan_rows({"image": torch.zeros(3, 100, 100), "mask": np.zeros(100, bool)}, 10)
    assert rows is not None
    assert rows.sample_bytes == 120_000 + 100
    assert 10 * rows.sample_bytes <= rows.size_bytes < 10 * rows.sample_bytes + 8192


def test_samples_are_gathered_up_to_half_a_mib_and_one_at_least() -> None:
    small, large = opened(torch.zeros(1024), 4), opened(torch.zeros(1024, 1024), 4)
    assert (small.gather_count, large.gather_count) == (128, 1)


def test_samples_written_to_rows_may_be_written_to_again() -> None:
    """A dataset that fills one buffer again and again is collated by what was in it."""
    buffer, rows = torch.zeros(4), opened(torch.zeros(4), 3)
    for index in range(3):
        buffer.fill_(index)
        assert rows.put([buffer])
    assert rows.finish()[:, 0].tolist() == [0, 1, 2]


def test_given_back_samples_are_what_was_put_in() -> None:
    def sample(index: int) -> Any:
        return {"x": counting(index, 3), "y": [np.arange(2) + index, index], "name": str(index)}

    rows = opened(sample(0), 4)
    assert rows.put([sample(0), sample(1)])
    assert not rows.put([sample(2), {"x": counting(0, 5), "y": [np.arange(2), 0], "name": ""}])
    assert_same(freeze([sample(0), sample(1)]), freeze(rows.unwrite()))


def test_equal_outlines_mean_equal_structure() -> None:
    def outline(sample: Any, count: int) -> Any:
        rows = opened(sample, 3)
        rows.put([sample] * count)
        return rows.outline

    sample = {"a": torch.zeros(2), "b": (torch.zeros(3),)}
    assert outline(sample, 3) == outline(sample, 3)
    others = [
        {"a": torch.zeros(2), "b": [torch.zeros(3)]},
        {"a": torch.zeros(2), "b": (torch.zeros(3, dtype=torch.int32),)},
        {"a": torch.zeros(2), "c": (torch.zeros(3),)},
        {"a": torch.zeros(1, 2), "b": (torch.zeros(3),)},
    ]
    assert all(outline(other, 3) != outline(sample, 3) for other in others)
    assert outline(sample, 2) != outline(sample, 3)
    assert outline([torch.zeros(2), 1], 3) is None


def test_rows_serve_the_next_batch_that_begins_alike_and_keep_nothing_of_the_last() -> None:
    rows = opened(counting(0, 5), 2)
    assert rows.put([counting(0, 5), counting(1, 5)])
    first = rows.finish()
    rows.clear()
    assert rows.try_begin(counting(2, 5), 2)
    rows.open_alone()
    assert rows.put([counting(2, 5), counting(3, 5)])
    assert_same(freeze(default_collate([counting(2, 5), counting(3, 5)])), freeze(rows.finish()))
    assert_same(freeze(default_collate([counting(0, 5), counting(1, 5)])), freeze(first))


BEGUN: dict[str, Any] = {"x": torch.zeros(3), "y": [np.zeros(2, np.float32), 1]}
UNLIKE: dict[str, Any] = {
    "another shape": {**BEGUN, "x": torch.zeros(4)},
    "another type of elements": {**BEGUN, "x": torch.zeros(3, dtype=torch.int32)},
    "an array for a tensor": {**BEGUN, "x": np.zeros(3, np.float32)},
    "a tensor for an array": {**BEGUN, "y": [torch.zeros(2), 1]},
    "a tensor that wants gradients": {**BEGUN, "x": torch.zeros(3, requires_grad=True)},
    "a class of tensors": {**BEGUN, "x": torch.nn.Parameter(torch.zeros(3))},
    "another order of keys": {"y": BEGUN["y"], "x": BEGUN["x"]},
    "a key more": {**BEGUN, "z": 1},
    "another key": {"x": BEGUN["x"], "z": BEGUN["y"]},
    "a tuple for a list": {**BEGUN, "y": tuple(BEGUN["y"])},
    "a longer list": {**BEGUN, "y": [*BEGUN["y"], 1]},
    "an object for a number": {**BEGUN, "y": [BEGUN["y"][0], object()]},
    "another container": [BEGUN],
    "a tensor alone": torch.zeros(3),
}


@pytest.mark.parametrize("sample", UNLIKE.values(), ids=UNLIKE.keys())
def test_a_batch_that_begins_otherwise_is_laid_out_anew(sample: Any) -> None:
    assert not opened(BEGUN, 2).try_begin(sample, 2)


def test_a_batch_of_another_length_is_laid_out_anew() -> None:
    assert not opened(BEGUN, 2).try_begin(BEGUN, 3)


def test_a_short_batch_takes_the_front_of_its_rows() -> None:
    rows = opened(counting(0, 5), 4)
    assert rows.put([counting(0, 5), counting(1, 5)])
    (taken,) = rows.take_alone()
    assert bytes(taken) == default_collate([counting(0, 5), counting(1, 5)]).numpy().tobytes()
