"""Samples that the default collate refuses, or that need care: unequal, reused, or strange."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .batches import MANY, Make, Pair, counting


def pictures(index: int) -> Any:
    from PIL import Image

    pixels = (np.arange(300) * (index + 1) % 256).astype(np.uint8)
    return Image.fromarray(pixels.reshape(10, 10, 3))


def growing_rows(index: int) -> torch.Tensor:
    return counting(index, index + 1, torch.int64)


def large_growing_rows(index: int) -> torch.Tensor:
    return counting(index, MANY + index)


def rows_that_would_broadcast(index: int) -> torch.Tensor:
    return counting(index, 3).reshape(1, 3) if index % 2 else counting(index, 3)


def rows_with_one_element_now_and_then(index: int) -> torch.Tensor:
    return counting(index, 1 if index % 3 == 1 else 4)


def floats_then_ints(index: int) -> torch.Tensor:
    return counting(index, dtype=torch.int64 if index % 2 else torch.float32)


def ints_then_floats(index: int) -> torch.Tensor:
    return counting(index, dtype=torch.float32 if index % 2 else torch.int64)


def single_then_double(index: int) -> torch.Tensor:
    return counting(index, dtype=torch.float64 if index % 2 else torch.float32)


def arrays_of_mixed_dtype(index: int) -> np.ndarray[Any, Any]:
    return np.arange(4, dtype=np.float64 if index % 2 else np.int32) + index


def arrays_of_mixed_shape(index: int) -> np.ndarray[Any, Any]:
    return np.arange(4 + index % 2)


def reversed_arrays(index: int) -> np.ndarray[Any, Any]:
    return np.arange(6)[::-1]


def big_endian_arrays(index: int) -> np.ndarray[Any, Any]:
    return np.arange(4, dtype=">f4") + index


def arrays_of_text(index: int) -> np.ndarray[Any, Any]:
    return np.array(["a", str(index)])


def arrays_of_objects(index: int) -> np.ndarray[Any, Any]:
    return np.array([index, None], object)


def structured(index: int) -> np.ndarray[Any, Any]:
    return np.zeros(2, [("id", "i4"), ("x", "f4")])


def tensors_then_arrays(index: int) -> Any:
    return counting(index).numpy() if index % 2 else counting(index)


def arrays_then_tensors(index: int) -> Any:
    return counting(index) if index % 2 else counting(index).numpy()


def tensors_then_floats(index: int) -> Any:
    return float(index) if index % 2 else torch.tensor(float(index))


def floats_then_tensors(index: int) -> Any:
    return torch.tensor(float(index)) if index % 2 else float(index)


def bools_then_ints(index: int) -> Any:
    return index if index % 2 else True


def ints_then_bools(index: int) -> Any:
    return True if index % 2 else index


def ints_then_fractions(index: int) -> Any:
    return index / 2 if index % 2 else index


def ints_too_large(index: int) -> int:
    return 2**64 + index


def large_unsigned(index: int) -> int:
    return 2**63 + index


def text_then_numbers(index: int) -> Any:
    return index if index % 2 else "text"


def text_then_bytes(index: int) -> Any:
    return b"bytes" if index % 2 else "text"


def none(index: int) -> None:
    return None


def none_in_a_dict(index: int) -> dict[str, Any]:
    return {"rows": counting(index), "note": None}


def user_objects(index: int) -> Any:
    return Dataset()


def complex_numbers(index: int) -> complex:
    return complex(index, 1)


def missing_keys(index: int) -> dict[str, Any]:
    return {"a": index} if index % 2 else {"a": index, "b": counting(index)}


def further_keys(index: int) -> dict[str, Any]:
    return {"a": index, "b": counting(index)} if index % 2 else {"a": index}


def keys_in_another_order(index: int) -> dict[str, Any]:
    items = [("a", index), ("b", counting(index)), ("c", str(index))]
    return dict(items[:: -1 if index % 2 else 1])


def keys_that_are_no_text(index: int) -> dict[Any, Any]:
    return {index // 100: 1, (1, 2): counting(index), None: 3.5}


def dicts_then_other_mappings(index: int) -> Any:
    items = {"a": counting(index), "b": index}
    return collections.OrderedDict(items) if index % 2 else items


def lists_of_unequal_length(index: int) -> list[int]:
    return [index] * (1 + index % 2)


def lists_of_ints(index: int) -> list[int]:
    return [index, index + 1]


def lists_then_tuples(index: int) -> Any:
    return (index, counting(index)) if index % 2 else [index, counting(index)]


def named_tuples_then_tuples(index: int) -> Any:
    return (index, 1) if index % 2 else Pair(index, 2)


def sets(index: int) -> set[int]:
    return {index}


def empty_containers(index: int) -> tuple[Any, ...]:
    return {}, [], ()


def sparse(index: int) -> torch.Tensor:
    return (counting(index, 8) % 2).to_sparse()


def jagged(index: int) -> torch.Tensor:
    return torch.nested.nested_tensor([counting(index, 2)], layout=torch.jagged)


def requiring_gradients(index: int) -> torch.Tensor:
    return counting(index).requires_grad_()


def large_requiring_gradients(index: int) -> torch.Tensor:
    return counting(index, MANY).requires_grad_()


def results_of_a_layer(index: int) -> torch.Tensor:
    """With a history: no leaf, so no process may send it, but its batch may be made."""
    return counting(index).requires_grad_() * 2


def parameters(index: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(counting(index))


def conjugated(index: int) -> torch.Tensor:
    return counting(index, dtype=torch.complex64).mul(1 + 2j).conj()


def negated(index: int) -> torch.Tensor:
    return counting(index, dtype=torch.complex64).mul(1 + 2j).conj().imag


def shapes_that_agree_by_batch(index: int) -> torch.Tensor:
    """Equal within a batch of two, unequal from one batch to the next."""
    return counting(index, 5 + index // 2)


def dtypes_that_agree_by_batch(index: int) -> torch.Tensor:
    return counting(index, 5, (torch.float32, torch.int16, torch.float64)[index // 2 % 3])


def growing_images(index: int) -> torch.Tensor:
    """Each batch is larger than the one before it."""
    side = 60 * (1 + index // 2)
    return counting(index, 3 * side * side).reshape(3, side, side)


def shrinking_images(index: int) -> torch.Tensor:
    return growing_images(7 - index)


def images_with_one_giant(index: int) -> torch.Tensor:
    side = 500 if index in {4, 5} else 40
    return counting(index, 3 * side * side).reshape(3, side, side)


class ReusingItsBuffer(Dataset[Any]):
    """Fills one buffer again and again and returns it: all rows of a batch are the last one."""

    def __init__(self, count: int) -> None:
        self.buffer = torch.zeros(count)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.buffer.fill_(index)


class ReusingItsArray(ReusingItsBuffer):
    """The same with a NumPy array, as decoders with an output buffer do."""

    def __getitem__(self, index: int) -> Any:
        return self.buffer.fill_(index).numpy()


class SlidingWindow(ReusingItsBuffer):
    """Shifts its buffer, and returns a view of it with a copy: the views see later shifts."""

    def __getitem__(self, index: int) -> Any:
        self.buffer[:-1] = self.buffer[1:].clone()
        self.buffer[-1] = index
        return self.buffer[1:], self.buffer.clone()


class OneTensor(Dataset[Any]):
    """Returns the same tensors, rows of one large tensor, for every index."""

    def __init__(self) -> None:
        self.rows = counting(0, 4 * MANY).reshape(4, MANY)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[index % 4], self.rows[0]


COLLATED_WITH_CARE: dict[str, Make] = {
    make.__name__.replace("_", " "): make
    for make in (
        *(growing_rows, large_growing_rows, rows_that_would_broadcast),
        *(floats_then_ints, ints_then_floats),
        *(single_then_double, arrays_of_mixed_dtype, arrays_of_mixed_shape, reversed_arrays),
        *(big_endian_arrays, arrays_of_text, arrays_of_objects, structured),
        *(arrays_then_tensors, floats_then_tensors, bools_then_ints),
        *(ints_then_bools, ints_then_fractions, ints_too_large, large_unsigned),
        *(text_then_numbers, text_then_bytes, none, none_in_a_dict, user_objects),
        *(complex_numbers, missing_keys, further_keys, keys_in_another_order),
        *(keys_that_are_no_text, dicts_then_other_mappings, lists_of_unequal_length),
        *(lists_of_ints, lists_then_tuples, named_tuples_then_tuples, sets, empty_containers),
        *(sparse, jagged, requiring_gradients, large_requiring_gradients, results_of_a_layer),
        *(parameters,),
        *(shapes_that_agree_by_batch, dtypes_that_agree_by_batch, growing_images),
        *(shrinking_images, images_with_one_giant),
    )
}

# A worker of torch's counts elements and makes shared memory before it stacks, and fails there in
# ways of its own; without workers torch stacks these, or raises its plain error.
COLLATED_IN_THE_MAIN_PROCESS: dict[str, Make] = {
    make.__name__.replace("_", " "): make
    for make in (
        *(conjugated, negated, rows_with_one_element_now_and_then),
        *(tensors_then_arrays, tensors_then_floats),
    )
}
