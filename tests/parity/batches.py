"""The things that a batch may be made of: `make(index)` functions, by theme.

`COLLATED` go through the default collate; `LISTED` are delivered as a list of samples by a
collate function of the user. Each is a function of a module, so that it pickles. Sizes lie on
both sides of what a loader may treat apart: a few bytes, and more than 64 KiB.
"""

from __future__ import annotations

import array
import collections
import datetime as dt
import decimal
import enum
import fractions
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

MANY = 40_000  # float32s: 160 KB
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.complex128),
)
Make = Callable[[int], Any]


def counting(index: int, count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`count` numbers that differ for each index."""
    return (torch.arange(count) + index).to(dtype)


class Pair(NamedTuple):
    left: Any
    right: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Sample:
    pixels: torch.Tensor
    label: int
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: np.float32


class Slotted:
    __slots__ = ("name", "rows")

    def __init__(self, name: str, rows: torch.Tensor) -> None:
        self.name = name
        self.rows = rows


class Reduced:
    """Says itself how it is pickled."""

    def __init__(self, rows: torch.Tensor, remade: bool = False) -> None:
        self.rows = rows
        self.remade = remade

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, (self.rows, True)


class Stateful:
    """Says itself what its state is."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.lazy = "not sent"

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lazy="made anew")


class Row(Mapping[str, Any]):
    """A read-only mapping of the user's own."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items_held = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_held)

    def __len__(self) -> int:
        return len(self.items_held)


class Column(MutableSequence[Any]):
    """A list of the user's own."""

    def __init__(self, items: Any = ()) -> None:
        self.held = list(items)

    def __getitem__(self, place: Any) -> Any:
        return self.held[place]

    def __setitem__(self, place: Any, item: Any) -> None:
        self.held[place] = item

    def __delitem__(self, place: Any) -> None:
        del self.held[place]

    def __len__(self) -> int:
        return len(self.held)

    def insert(self, place: int, item: Any) -> None:
        self.held.insert(place, item)


class Labelled(torch.Tensor):
    """A subclass of Tensor, with an attribute of its own."""


class Measured(np.ndarray[Any, Any]):
    """A subclass of ndarray."""


def numbers_of_every_dtype(index: int) -> dict[str, torch.Tensor]:
    return {str(dtype): counting(index, 5, dtype) for dtype in DTYPES}


def large_tensors_of_every_dtype(index: int) -> dict[str, torch.Tensor]:
    return {str(dtype): counting(index, MANY, dtype) for dtype in DTYPES}


def nan_payloads(index: int) -> dict[str, Any]:
    bits = torch.tensor([0x7FC00000 + index, -0x400000 + index, 0x7F800000], dtype=torch.int32)
    zeros = torch.tensor([-0.0, 0.0, float("inf"), 1e-45])
    return {"nan": bits.view(torch.float32), "zeros": zeros, "python": float("nan"), "minus": -0.0}


def python_scalars(index: int) -> tuple[Any, ...]:
    return index, index / 3, index % 2 == 0, f"text {index}", bytes([index] * 3)


def nested_dicts(index: int) -> dict[str, Any]:
    deep = {"mask": counting(index, 4, torch.bool), "names": [f"a{index}", f"b{index}"]}
    return {
        "image": counting(index, 12).reshape(3, 4),
        "target": {"box": (index, 2.5), "deep": deep},
    }


def named_tuples(index: int) -> Pair:
    return Pair(left=Pair(counting(index), index), right=str(index))


def lists_and_tuples(index: int) -> list[Any]:
    return [counting(index), (counting(index, 2), [index, (index + 1,)])]


def ordered_and_default_dicts(index: int) -> Any:
    inner: dict[str, Any] = collections.defaultdict(list, {"a": counting(index)})
    return collections.OrderedDict([("z", inner), ("a", collections.UserDict({"k": index}))])


def containers_of_the_user(index: int) -> Row:
    return Row({"column": Column([counting(index), index]), "many": counting(index, MANY)})


def zero_dimensional(index: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray[Any, Any]]:
    return torch.tensor(index), torch.tensor(index / 2), np.array(index, np.int16)


def empty_tensors(index: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray[Any, Any]]:
    return torch.empty(0), torch.empty(0, 3, dtype=torch.int32), np.empty((2, 0))


def numpy_arrays(index: int) -> dict[str, Any]:
    kinds = ("f8", "f4", "f2", "i8", "i2", "u1", "u4", "?", "c8")
    return {kind: (np.arange(6).reshape(2, 3) + index).astype(kind) for kind in kinds}


def numpy_scalars(index: int) -> tuple[Any, ...]:
    kinds = (np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_, np.complex64)
    return tuple(kind(index) for kind in kinds)


def large_numpy_arrays(index: int) -> np.ndarray[Any, Any]:
    return np.arange(MANY, dtype=np.float32).reshape(100, 400).T + index


def strided_samples(index: int) -> tuple[torch.Tensor, ...]:
    grid = counting(index, 24).reshape(4, 6)
    return grid.t(), grid[:, ::2], grid[1:3], torch.tensor([index]).expand(5), grid.flip(0)


def large_strided_samples(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    grid = counting(index, MANY).reshape(200, 200)
    return grid.t(), grid[::2, 1:]


def channels_last_samples(index: int) -> torch.Tensor:
    return counting(index, 240).reshape(1, 3, 8, 10).to(memory_format=torch.channels_last)


def sixteen_fields(index: int) -> dict[str, torch.Tensor]:
    return {f"field {n}": counting(index + n, 48) for n in range(16)}


def large_images(index: int) -> tuple[torch.Tensor, int]:
    return counting(index, 3 * 128 * 128, torch.uint8).reshape(3, 128, 128), index


def parameters_without_gradient(index: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(counting(index), requires_grad=False)


def tensors_of_a_subclass(index: int) -> Labelled:
    tensor = counting(index).as_subclass(Labelled)
    tensor.label = f"label {index}"  # type: ignore[attr-defined]
    return tensor


def large_tensors_of_a_subclass(index: int) -> Labelled:
    return counting(index, MANY).as_subclass(Labelled)


COLLATED: dict[str, Make] = {
    make.__name__.replace("_", " "): make
    for make in (
        *(numbers_of_every_dtype, large_tensors_of_every_dtype, nan_payloads, python_scalars),
        *(nested_dicts, named_tuples, lists_and_tuples, ordered_and_default_dicts),
        *(containers_of_the_user, zero_dimensional, empty_tensors, numpy_arrays, numpy_scalars),
        *(large_numpy_arrays, strided_samples, large_strided_samples, channels_last_samples),
        *(sixteen_fields, large_images, parameters_without_gradient, tensors_of_a_subclass),
        *(large_tensors_of_a_subclass,),
    )
}


def sparse_coo(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    dense = counting(index, 30).reshape(5, 6) % 4
    twice = torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]),
        torch.tensor([1.0, float(index)]),
        (2, 3),
        check_invariants=True,
    )
    return dense.to_sparse(), twice


def large_sparse_coo(index: int) -> torch.Tensor:
    return (counting(index, 2 * MANY) % 3).to_sparse()


def sparse_compressed(index: int) -> list[torch.Tensor]:
    dense = counting(index, 24).reshape(4, 6) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a beta notice
        blocks = [dense.to_sparse_bsr((2, 2)), dense.to_sparse_bsc((2, 3))]
        large = (counting(index, MANY).reshape(200, 200) % 3).to_sparse_csr()
        return [dense.to_sparse_csr(), dense.to_sparse_csc(), *blocks, large]


def nested_strided(index: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype notice
        return torch.nested.nested_tensor([counting(index, 3), counting(index, 5)])


def nested_jagged(index: int) -> torch.Tensor:
    rows = [counting(index, 3), counting(index, 5 + index), counting(index, MANY)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def quantized(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a deprecation notice
        whole = torch.quantize_per_tensor(counting(index), 0.25, index, torch.qint8)
        scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([index, 1])
        rows = counting(index, 2 * MANY).reshape(2, MANY) % 50
        return whole, torch.quantize_per_channel(rows, scales, zeros, 0, torch.quint8)


def requiring_gradients(index: int) -> list[torch.Tensor]:
    few, many = counting(index).requires_grad_(), counting(index, MANY).requires_grad_()
    return [few, many, torch.nn.Parameter(counting(index)), parameters_without_gradient(index)]


def views_of_one_storage(index: int) -> dict[str, torch.Tensor]:
    base = counting(index, 2 * MANY)
    return {
        "whole": base,
        "head": base[: MANY + 10],
        "tail": base[MANY:],
        "grid": base.reshape(400, 200).t(),
        "bits": base.view(torch.int32),
    }


def small_views_of_one_storage(index: int) -> tuple[torch.Tensor, ...]:
    base = counting(index, 24)
    return base[:10], base[5:], base.reshape(4, 6)[:, 1::2], base.view(torch.uint8)


def expanded_and_strided(index: int) -> tuple[torch.Tensor, ...]:
    grid = counting(index, MANY).reshape(200, 200)
    wide = torch.tensor([[float(index)]]).expand(300, 400)
    return grid.t(), grid[::2, 3:], wide, counting(index, 9).reshape(3, 3).t()


def small_views_of_large_storages(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each of a storage of its own, so that a loader may send the views alone."""
    return counting(index, MANY)[7:19], counting(index, MANY)[100:200:9]


def overlapping_small_views_of_a_large_storage(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is written into one must still be read from the other."""
    base = counting(index, MANY)
    return base[7:19], base[10:25:3]


def channels_last(index: int) -> torch.Tensor:
    return (
        counting(index, 2 * 3 * 90 * 80).reshape(2, 3, 90, 80).to(memory_format=torch.channels_last)
    )


def labelled_tensors(index: int) -> list[Labelled]:
    return [tensors_of_a_subclass(index), large_tensors_of_a_subclass(index)]


def tensors_on_meta(index: int) -> torch.Tensor:
    return torch.empty(index + 1, 3, device="meta", dtype=torch.float16)


def structured_arrays(index: int) -> list[Any]:
    kind = np.dtype([("id", "i4"), ("place", "f8", (2,)), ("name", "U4")])
    rows = np.zeros(3, kind)
    rows["id"] = index
    rows["name"] = "né"
    return [rows, rows[1], rows.view(np.recarray), np.zeros(9000, kind)]


def object_arrays(index: int) -> np.ndarray[Any, Any]:
    held = np.empty((2, 2), object)
    held[:] = [[index, "text"], [counting(index), None]]
    return held


def other_arrays(index: int) -> dict[str, Any]:
    grid = np.arange(12.0).reshape(3, 4) + index
    locked = grid.copy()
    locked.flags.writeable = False
    return {
        "Fortran order": np.asfortranarray(grid),
        "cut": grid[::2, 1:],
        "reversed": grid[::-1],
        "read only": locked,
        "big endian": grid.astype(">f4"),
        "text": np.array(["a", "bcd"]),
        "bytes": np.array([b"a", b"bcd"]),
        "days": np.array(["2020-02-29", "NaT"], "M8[D]"),
        "spans": np.array([index, 5], "m8[s]"),
        "no dimension": np.array(index),
        "empty": np.empty((0, 4), np.int16),
        "masked": np.ma.masked_greater(np.arange(4) + index, 4),
        "subclass": grid.view(Measured),
        "large": np.arange(MANY, dtype=np.float64) + index,
        "large, Fortran order": np.asfortranarray(np.arange(MANY).reshape(200, 200)),
        "large, cut": np.arange(MANY).reshape(200, 200)[::2, ::2],
        "scalars": [np.float16(index), np.datetime64("2021-01-01"), np.str_("s"), np.longdouble(1)],
    }


def user_classes(index: int) -> list[Any]:
    sample = Sample(counting(index), index, {"more": counting(index, MANY)})
    slotted = Slotted(f"s{index}", counting(index))
    return [sample, Point(index / 3, np.float32(1)), slotted, Colour.BLUE]


def classes_that_pickle_themselves(index: int) -> list[Any]:
    return [Reduced(counting(index, MANY)), Stateful(counting(index)), ValueError("kept", index)]


def python_values(index: int) -> list[Any]:
    return [
        *(None, ..., index, 10**40 + index, index / 3, complex(index, -0.0), True),
        *("text", "", "né \N{SNOWMAN}", b"", bytes(3), bytearray(b"ab")),
        *((), [], {}, set(), {1, "a"}, frozenset({index}), range(index)),
        *(fractions.Fraction(index, 7), decimal.Decimal("1.10"), pathlib.PurePosixPath("a/b")),
        *(dt.datetime(2020, 2, 29, tzinfo=dt.timezone.utc), array.array("d", [1, 2])),
        *(collections.deque([1, index], maxlen=4), collections.Counter("aab")),
        *(torch.Size([1, index]), torch.float16, torch.device("cpu"), counting, Sample),
    ]


def large_python_values(index: int) -> dict[str, Any]:
    return {
        "bytes": bytes([index]) * 300_000,
        "bytearray": bytearray(200_000 + index),
        "text": f"{index} ü " * 50_000,
        "ints": list(range(index, 20_000)),
        "words": {f"key {n}": [n, str(n)] for n in range(3000)},
    }


def things_seen_twice(index: int) -> list[Any]:
    rows, many, names = counting(index), counting(index, MANY), [f"n{index}"]
    ring: list[Any] = [names]
    ring.append(ring)
    return [rows, many, names, {"rows": rows, "many": many, "names": names}, ring]


def packed_sequences(index: int) -> Any:
    rows = [counting(index, 4 + index), counting(index, 2)]
    return torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)


def modules(index: int) -> torch.nn.Module:
    layer = torch.nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.fill_(index)
        layer.bias.fill_(1)
    return layer


LISTED: dict[str, Make] = {
    make.__name__.replace("_", " "): make
    for make in (
        *(numbers_of_every_dtype, large_tensors_of_every_dtype, empty_tensors, zero_dimensional),
        *(sparse_coo, large_sparse_coo, sparse_compressed, nested_strided, nested_jagged),
        *(requiring_gradients, views_of_one_storage, small_views_of_one_storage),
        *(expanded_and_strided, small_views_of_large_storages, channels_last, labelled_tensors),
        *(overlapping_small_views_of_a_large_storage,),
        *(tensors_on_meta, structured_arrays, object_arrays, other_arrays, user_classes),
        *(classes_that_pickle_themselves, python_values, large_python_values),
        *(things_seen_twice, packed_sequences, modules, containers_of_the_user),
    )
}
