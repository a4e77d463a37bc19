"""The harness itself: what it must see, and what it must not mind."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from .batches import COLLATED, LISTED, Labelled, Make, Pair, counting
from .compare import NotTheSame, assert_same
from .consumers import every_attempt, every_batch
from .datasets import Draws, Failing, Squares
from .freeze import freeze, plain_text
from .harness import Job, Loader, compare, run

HALF_NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
BASE = counting(0, 12)

UNLIKE: dict[str, tuple[Any, Any]] = {
    "values": (torch.ones(3), torch.tensor([1, 1, 1.5])),
    "one bit of NaN": (HALF_NAN[:1], HALF_NAN[1:]),
    "signs of zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "signs of Python's zero": (0.0, -0.0),
    "dtypes": (torch.ones(3), torch.ones(3, dtype=torch.float64)),
    "shapes": (torch.ones(3), torch.ones(3, 1)),
    "strides": (BASE.view(3, 4).t(), BASE.view(3, 4).t().contiguous()),
    "requires_grad": (torch.ones(3), torch.ones(3, requires_grad=True)),
    "classes of tensors": (torch.ones(3), torch.ones(3).as_subclass(Labelled)),
    "parameters": (torch.ones(3), torch.nn.Parameter(torch.ones(3), requires_grad=False)),
    "shared storages": ([BASE[:3], BASE[3:]], [BASE[:3].clone(), BASE[3:].clone()]),
    "places in a storage": ([BASE, BASE[3:6]], [BASE, counting(3, 12)[:3]]),
    "identities": ([BASE, BASE], [BASE, BASE.view(12)]),
    "lists and tuples": ([1], (1,)),
    "named tuples": (Pair(1, 2), (1, 2)),
    "ints and bools": (1, True),
    "ints and floats": (1, 1.0),
    "text and bytes": ("a", b"a"),
    "NumPy's scalars": (np.float32(1), np.float64(1)),
    "arrays and tensors": (np.ones(2), torch.ones(2)),
    "orders of memory": (np.ones((2, 3)), np.ones((2, 3), order="F")),
    "locked arrays": (np.ones(1), np.broadcast_to(np.ones(1), (1,))),
    "orders of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "missing keys": ({"a": 1}, {"a": 1, "b": 2}),
    "lengths": ([1, 2], [1, 2, 3]),
    "attributes": (_labelled := torch.ones(2).as_subclass(Labelled), _labelled.clone()),
    "types of errors": (ValueError("x"), KeyError("x")),
    "texts of errors": (ValueError("x"), ValueError("y")),
}
_labelled.label = "here"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("one", "other"), UNLIKE.values(), ids=UNLIKE)
def test_a_difference_is_seen_in(one: Any, other: Any) -> None:
    with pytest.raises(NotTheSame, match="expected"):
        assert_same(freeze({"batch": one}), freeze({"batch": other}))


@pytest.mark.parametrize("make", (COLLATED | LISTED).values(), ids=COLLATED | LISTED)
def test_equal_values_are_the_same(make: Make) -> None:
    assert_same(freeze(make(3)), freeze(make(3)))


def test_the_message_leads_to_the_place() -> None:
    with pytest.raises(NotTheSame, match=r"\['rows'\]\[1\], dtype: expected torch.float32"):
        assert_same(
            freeze({"rows": [1, torch.ones(2)]}), freeze({"rows": [1, torch.ones(2).double()]})
        )


def test_a_fact_can_be_left_out() -> None:
    one, other = BASE.view(3, 4).t(), BASE.view(3, 4).t().contiguous()
    assert_same(freeze(one), freeze(other), ignoring=["stride"])


def test_a_frozen_batch_does_not_change_with_the_batch() -> None:
    tensor, array = torch.ones(3), np.ones(3)
    frozen = freeze([tensor, array])
    tensor.zero_()
    array[:] = 0
    assert_same(freeze([torch.ones(3), np.ones(3)]), frozen)


def test_a_random_number_drawn_too_many_is_seen() -> None:
    def drawing_once_more(loader: Loader, epoch: int) -> Any:
        yield from every_batch(loader, epoch)
        random.random()

    job = Job(lambda: dict(dataset=Squares(4), num_workers=1))
    expected = run(job, torch.utils.data.DataLoader)
    with pytest.raises(NotTheSame, match="random state after epoch 0, python"):
        compare(
            expected,
            run(replace(job, consumer=drawing_once_more), torch.utils.data.DataLoader),
            job,
        )


def test_another_number_of_workers_is_seen() -> None:
    job = Job(lambda: dict(dataset=Draws(8), batch_size=2))
    one, other = (run(job.given(num_workers=n), torch.utils.data.DataLoader) for n in (1, 2))
    with pytest.raises(NotTheSame):
        compare(one, other, job)


def test_a_missing_batch_is_seen() -> None:
    job = Job(lambda: dict(dataset=Squares(8)))
    one, other = (
        run(job.given(drop_last=drop, batch_size=3), torch.utils.data.DataLoader)
        for drop in (False, True)
    )
    with pytest.raises(NotTheSame, match="expected 3 of them, got 2"):
        compare(one, other, job)


def test_an_error_is_a_note_and_the_run_goes_on() -> None:
    job = Job(
        lambda: dict(dataset=Failing(ValueError, [1], length=3), num_workers=1),
        consumer=every_attempt,
    )
    (epoch,) = run(job, torch.utils.data.DataLoader).epochs
    assert [note.kind for note in epoch.notes] == ["torch.Tensor", "error", "torch.Tensor"]


def test_frames_of_the_loaders_and_process_ids_are_no_part_of_a_text() -> None:
    text = (
        "Caught it.\nOriginal Traceback (most recent call last):\n"
        '  File "/somewhere/torch/worker.py", line 9, in loop\n    fetch()\n    ^^^^^\n'
        f'  File "{__file__}", line 3, in item\n    raise it\n'
        "ValueError: (pid 12) and (pid(s) 3, 4)\n"
    )
    assert plain_text(text) == (
        "Caught it.\nOriginal Traceback (most recent call last):\n"
        f'  File "{__file__}", line 3, in item\n    raise it\n'
        "ValueError: (pid N) and (pid N)\n"
    )
