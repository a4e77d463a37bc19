"""Default collate, row by row: a sample is written to its row of the batch and dropped.

Covers: laying a batch out from its first sample, writing samples to their rows, and
giving back what torch's `default_collate` would have made of the list. Does not cover:
custom collate functions, or samples of unusual types; those take torch's own way.

torch keeps the list of all samples until the last is made, then copies them into fresh
shared memory: twice the batch at its peak. Here no list exists. Small fields are gathered
up to a few hundred KiB and stacked together, since a call per row would cost more than
the copying.

`copy_` would broadcast a sample of another shape and cast one of another dtype without a
word, where torch raises or does the same by other rules: anything odd gives the samples
back as a list (`unwrite`), for torch's collate and torch's errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch

from forebay import torch_compat
from forebay.units import KIB
from forebay.workers.space import next_start

GATHER_BYTES = 256 * KIB
"""Rows of one field are stacked in groups of up to so many bytes. A stack call costs about
10 us, that is the copying of about 100 KiB; measured best from 128 KiB to 512 KiB."""

_OBJECT_OR_TEXT = re.compile(r"[SaUO]")  # torch's pattern for arrays that it refuses

OpenRows: TypeAlias = Callable[[int], torch.Tensor]
"""Gives so many bytes of the batch's block as a flat uint8 tensor."""


@final
@dataclass(slots=True)
class _Field:
    """One tensor of the sample: where its rows go, and those not written yet."""

    shape: torch.Size
    dtype: torch.dtype
    is_array: bool
    row_bytes: int
    offset: int
    rows: torch.Tensor | None = None
    waiting: list[torch.Tensor] | None = None
    written: int = 0


@final
class Rows:
    """The rows of one batch, as laid out by its first sample.

    Args:
        skeleton: The first sample's containers, its tensors replaced by field numbers.
        fields: One for each tensor.
        scalars: How many other values a sample has.
        length: How many samples the batch may have.
    """

    def __init__(self, skeleton: Any, fields: list[_Field], scalars: int, length: int) -> None:
        self._skeleton = skeleton
        self._fields = fields
        self._scalars: list[list[Any]] = [[] for _ in range(scalars)]
        self._length = length
        self._count = 0
        last = fields[-1] if fields else None
        self.size_bytes = 0 if last is None else last.offset + last.row_bytes * length
        # Where each leaf of a sample goes: its field, or its column of scalars.
        self._targets: list[_Field | list[Any]] = []
        _list_targets(skeleton, iter(fields), iter(self._scalars), self._targets)

    def open(self, open_rows: OpenRows) -> None:
        """Take the memory that the rows go to."""
        flat = open_rows(self.size_bytes)
        for field in self._fields:
            size = field.row_bytes * self._length
            part = flat[field.offset : field.offset + size]
            field.rows = part.view(field.dtype).view(self._length, *field.shape)
            field.waiting = []

    def put(self, sample: Any) -> bool:
        """Write one more sample; False, and nothing written, if it is unlike the first."""
        leaves: list[Any] = []
        if not _flatten_like(self._skeleton, sample, leaves):
            return False
        targets = self._targets
        for target, leaf in zip(targets, leaves, strict=True):
            if type(target) is _Field and not _fits(target, leaf):
                return False
        for target, leaf in zip(targets, leaves, strict=True):
            if type(target) is _Field:
                _put_row(target, leaf)
            else:
                target.append(leaf)  # type: ignore[union-attr]
        self._count += 1
        return True

    def finish(self) -> Any:
        """The batch, as torch's `default_collate` gives it."""
        for field in self._fields:
            _write_waiting(field)
        columns = [torch_compat.collate_privately(column) for column in self._scalars]
        tensors = [_first_rows(field, self._count) for field in self._fields]
        return _rebuild(self._skeleton, iter(tensors), iter(columns), batch=True)

    def unwrite(self) -> list[Any]:
        """The samples again, from their rows: for whatever torch's collate says of them."""
        for field in self._fields:
            _write_waiting(field)
        return [self._sample(k) for k in range(self._count)]

    def _sample(self, k: int) -> Any:
        tensors = []
        for field in self._fields:
            assert field.rows is not None
            row = field.rows[k].clone()
            tensors.append(row.numpy() if field.is_array else row)
        values = [column[k] for column in self._scalars]
        return _rebuild(self._skeleton, iter(tensors), iter(values), batch=False)


def plan_rows(sample: Any, length: int) -> Rows | None:
    """The rows for a batch of `length` samples like `sample`; None if it is unusual.

    Usual are dicts, lists, tuples and namedtuples (of exactly these types) of plain
    strided CPU tensors, numeric arrays, numbers and text.
    """
    if torch_compat.collate_registry():
        return None  # the user taught torch's collate something: it decides
    leaves: list[Any] = []
    skeleton = _flatten(sample, leaves)
    if skeleton is _UNUSUAL or not all(_is_usual(leaf) for leaf in leaves):
        return None
    tensors, values = _sort_leaves(leaves)
    fields = []
    used = 0
    for tensor in tensors:
        field = _plan_field(tensor, used, length)
        fields.append(field)
        used = field.offset + field.row_bytes * length
    return Rows(skeleton, fields, len(values), length) if fields else None


# -- leaves -----------------------------------------------------------------------------------


def _is_usual(leaf: Any) -> bool:
    kind = type(leaf)
    if kind is torch.Tensor:
        return (
            leaf.layout is torch.strided
            and leaf.device.type == "cpu"
            and not (leaf.requires_grad or leaf.is_quantized or leaf.is_nested)
            and not (leaf.is_conj() or leaf.is_neg())
        )
    if kind is np.ndarray:
        return (
            bool(leaf.ndim)
            and not _OBJECT_OR_TEXT.search(leaf.dtype.str)
            and (leaf.dtype.names is None and _torch_dtype(leaf.dtype) is not None)
        )
    return kind in _Plain


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    found = _DTYPES.get(dtype)
    if found is None:
        try:
            found = torch.as_tensor(np.zeros(1, dtype)).dtype
        except TypeError:
            return None
        _DTYPES[dtype] = found
    return found


_DTYPES: dict[np.dtype[Any], torch.dtype] = {}


def _sort_leaves(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    tensors: list[Any] = []
    values: list[Any] = []
    for leaf in leaves:
        (tensors if isinstance(leaf, (torch.Tensor, np.ndarray)) else values).append(leaf)
    return tensors, values


def _plan_field(tensor: Any, used: int, length: int) -> _Field:
    is_array = isinstance(tensor, np.ndarray)
    dtype = _torch_dtype(tensor.dtype) if is_array else tensor.dtype
    assert dtype is not None
    shape = torch.Size(tensor.shape)
    row_bytes = shape.numel() * dtype.itemsize
    return _Field(shape, dtype, is_array, row_bytes, next_start(used, row_bytes * length))


def _fits(field: _Field, tensor: Any) -> bool:
    if field.is_array:
        return (
            type(tensor) is np.ndarray
            and tensor.shape == field.shape
            and _torch_dtype(tensor.dtype) is field.dtype
        )
    return (
        type(tensor) is torch.Tensor
        and tensor.shape == field.shape
        and tensor.dtype is field.dtype
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.device.type == "cpu"
    )


def _put_row(field: _Field, tensor: Any) -> None:
    row = torch.as_tensor(tensor) if field.is_array else tensor
    waiting = field.waiting
    assert waiting is not None
    if field.row_bytes * 2 > GATHER_BYTES:
        assert field.rows is not None
        field.rows[field.written].copy_(row)
        field.written += 1
        return
    waiting.append(row)
    if len(waiting) * field.row_bytes >= GATHER_BYTES:
        _write_waiting(field)


def _write_waiting(field: _Field) -> None:
    waiting, rows = field.waiting, field.rows
    if waiting and rows is not None:
        end = field.written + len(waiting)
        torch.stack(waiting, 0, out=rows[field.written : end])
        field.written = end
        waiting.clear()


def _first_rows(field: _Field, count: int) -> torch.Tensor:
    assert field.rows is not None
    return field.rows if count == field.rows.shape[0] else field.rows[:count]


# -- containers -------------------------------------------------------------------------------


class _Mark:
    """Stands for something in a skeleton that is not a container."""


_UNUSUAL = _Mark()
"""A container that only torch's collate may judge; the whole sample is unusual then."""
_FIELD, _SCALAR = _Mark(), _Mark()
"""The place of a tensor or array; of another value."""
_Plain = {int, float, bool, str, bytes}


@dataclass(frozen=True, slots=True)
class _Named:
    """A namedtuple in a skeleton."""

    kind: Any
    items: tuple[Any, ...]


def _flatten(value: Any, leaves: list[Any]) -> Any:
    """The skeleton of `value`; its leaves are appended in order."""
    kind = type(value)
    if kind is dict:
        parts = {key: _flatten(item, leaves) for key, item in value.items()}
        return _UNUSUAL if any(part is _UNUSUAL for part in parts.values()) else parts
    if kind is list or kind is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = tuple(_flatten(item, leaves) for item in value)
        if any(item is _UNUSUAL for item in items):
            return _UNUSUAL
        return _Named(kind, items) if kind not in {list, tuple} else kind(items)
    leaves.append(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _FIELD
    return _SCALAR if kind in _Plain else _UNUSUAL


def _flatten_like(skeleton: Any, value: Any, leaves: list[Any]) -> bool:
    """Append the leaves of `value` if its containers are those of `skeleton`."""
    if skeleton is _FIELD or skeleton is _SCALAR:
        leaves.append(value)
        return isinstance(value, (torch.Tensor, np.ndarray)) is (skeleton is _FIELD)
    if type(skeleton) is _Named:
        return type(value) is skeleton.kind and all(
            _flatten_like(part, item, leaves)
            for part, item in zip(skeleton.items, value, strict=True)
        )
    if type(value) is not type(skeleton) or len(value) != len(skeleton):
        return False
    if type(value) is dict:
        return all(
            key in value and _flatten_like(part, value[key], leaves)
            for key, part in skeleton.items()
        )
    return all(
        _flatten_like(part, item, leaves) for part, item in zip(skeleton, value, strict=True)
    )


def _list_targets(
    skeleton: Any,
    fields: Iterator[_Field],
    columns: Iterator[list[Any]],
    targets: list[_Field | list[Any]],
) -> None:
    """Fields and columns in the order in which `_flatten_like` gives a sample's leaves."""
    if skeleton is _FIELD:
        targets.append(next(fields))
    elif skeleton is _SCALAR:
        targets.append(next(columns))
    else:
        items = skeleton.items if type(skeleton) is _Named else skeleton
        for part in items.values() if type(skeleton) is dict else items:
            _list_targets(part, fields, columns, targets)


def _rebuild(skeleton: Any, fields: Iterator[Any], scalars: Iterator[Any], *, batch: bool) -> Any:
    """The containers again, around batched leaves (`batch`) or around one sample's."""
    if skeleton is _FIELD:
        return next(fields)
    if skeleton is _SCALAR:
        return next(scalars)
    if type(skeleton) is _Named:
        items = [_rebuild(part, fields, scalars, batch=batch) for part in skeleton.items]
        return skeleton.kind(*items)
    if type(skeleton) is dict:
        return {key: _rebuild(part, fields, scalars, batch=batch) for key, part in skeleton.items()}
    items = [_rebuild(part, fields, scalars, batch=batch) for part in skeleton]
    # torch gives a list for a tuple, "for backwards compatibility".
    return tuple(items) if type(skeleton) is tuple and not batch else items
