"""Default collate, row by row: samples are written to their rows of the batch and dropped.

Covers: laying a batch out from its first sample, writing samples to their rows, and giving
back what torch's `default_collate` would have made of the list. Does not cover: custom
collate functions, or samples of unusual types; those take torch's own way.

torch keeps the list of all samples until the last is made, then copies them into fresh
shared memory: twice the batch at its peak. Here a few are gathered (half a MiB), stacked
into their rows field by field, and dropped.

`torch.stack(..., out=rows)` refuses what it refuses in torch's collate, by the same rules.
Whatever is odd (another shape, other containers, something that is no tensor) gives the
samples back as a list (`unwrite`), for torch's collate and torch's errors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from forebay import torch_compat
from forebay.transport.recipe import rebuild_small
from forebay.units import KIB
from forebay.workers.space import Space, next_start

GATHER_BYTES = 512 * KIB
"""Samples are gathered up to so many bytes before they are written: a call to stack costs
10 us, the copying of 100 KiB; and this is the list of samples that then exists."""

_OBJECT_OR_TEXT = re.compile(r"[SaUO]")  # torch's pattern for arrays that it refuses

_MOST_OPENED = 64
"""Blocks of which the rows are kept: a window's, usually."""


@final
class _Mark:
    """Stands for something in a skeleton that is not a container."""


_UNUSUAL = _Mark()
"""A container that only torch's collate may judge; the whole sample is unusual then."""
_FIELD, _SCALAR = _Mark(), _Mark()
"""The place of a tensor or array; of another value."""
_PLAIN = {int, float, bool, str, bytes}


@dataclass(frozen=True, slots=True)
class _Named:
    """A namedtuple in a skeleton."""

    kind: Any
    items: tuple[Any, ...]


@final
class Field:
    """One tensor of the sample: its rows within the batch.

    Attributes:
        offset: Of its rows within the batch's bytes.
        row_bytes: Of one row.
        rows: The rows, once opened; shape (length of the batch, *shape of the sample).
        kept: Set when the dataset holds the memory of its samples, and may yet write to it:
            then they are kept, which costs nothing, and stacked last, as torch does.
        buffer: The memory of its rows, when it is of their own.
    """

    __slots__ = ("buffer", "dtype", "is_array", "kept", "offset", "row_bytes", "rows", "shape")

    def __init__(self, first: Any, used: int, length: int) -> None:
        self.is_array = isinstance(first, np.ndarray)
        dtype = _torch_dtype(first.dtype) if self.is_array else first.dtype
        assert dtype is not None
        self.dtype: torch.dtype = dtype
        self.shape = torch.Size(first.shape)
        self.row_bytes = self.shape.numel() * dtype.itemsize
        self.offset = next_start(used, self.row_bytes * length)
        self.rows: torch.Tensor | None = None
        self.kept: list[Any] | None = None
        self.buffer: bytearray | None = None

    def accepts(self, first: Any) -> bool:
        """Whether another batch's first sample has the same here."""
        if self.is_array:
            is_same = type(first) is np.ndarray and _torch_dtype(first.dtype) is self.dtype
        else:
            is_same = type(first) is torch.Tensor and first.dtype is self.dtype
        return is_same and first.shape == self.shape and _is_usual(first)

    def put(self, start: int, column: list[Any]) -> bool:
        """Take rows from `start` on; False if they are of another shape or kind."""
        if self.kept is None:
            return self.write(start, column)
        self.kept.extend(column)
        return True

    def write(self, start: int, column: list[Any]) -> bool:
        """Write rows from `start` on; False if they are of another shape or kind."""
        assert self.rows is not None
        rows = [torch.as_tensor(row) for row in column] if self.is_array else column
        # The first one of all has shown its shape and kind already.
        if start and (rows[0].shape != self.shape or not torch_compat.is_plain(rows[0])):
            return False  # stack would resize its `out` with a warning
        out = self.rows if len(rows) == len(self.rows) else self.rows[start : start + len(rows)]
        return torch.stack(rows, 0, out=out) is out

    def take_buffer(self, count: int, length: int) -> bytearray:
        """The bytes of the first `count` of `length` rows."""
        assert self.buffer is not None
        if count == length:
            return self.buffer
        with memoryview(self.buffer) as view:
            return bytearray(view[: count * self.row_bytes])

    def first(self, count: int) -> torch.Tensor:
        """The first `count` rows."""
        assert self.rows is not None
        return self.rows if count == self.rows.shape[0] else self.rows[:count]


@final
class Rows:
    """The rows of one batch, as laid out by its first sample.

    Attributes:
        size_bytes: What the rows take in all.
        sample_bytes: One row of every field.
        fields: One for each tensor of a sample.
    """

    def __init__(self, skeleton: Any, leaves: list[Any], length: int) -> None:
        self._skeleton = skeleton
        self._length = length
        self._count = 0
        self.fields: list[Field] = []
        self._scalars: list[list[Any]] = []
        # torch transposes sequences with zip: text within one arrives as a tuple.
        self._in_sequence: list[bool] = list(_iterate_scalars(skeleton, in_sequence=False))
        # Where each leaf of a sample goes: its field, or its column of scalars.
        self._targets: list[Field | list[Any]] = []
        used = 0
        for leaf in leaves:
            if isinstance(leaf, (torch.Tensor, np.ndarray)):
                field = Field(leaf, used, length)
                used = field.offset + field.row_bytes * length
                self.fields.append(field)
                self._targets.append(field)
            else:
                column: list[Any] = []
                self._scalars.append(column)
                self._targets.append(column)
        # Numbers become small tensors behind the fields; room for them is asked for at once.
        for _ in self._scalars:
            used = next_start(used, 8 * length) + 8 * length
        self.size_bytes = used
        self.sample_bytes = sum(field.row_bytes for field in self.fields)
        self.usual: tuple[int, ...] | None = None
        self._outlines: dict[int, Any] = {}
        self._opened: dict[int, list[torch.Tensor]] = {}

    def try_begin(self, first: Any, length: int) -> bool:
        """Begin another batch, if `first` is laid out like the first sample of the last one."""
        if length != self._length or torch_compat.has_collate_extensions():
            return False
        leaves: list[Any] = []
        if not _is_like(self._skeleton, first, leaves):
            return False
        return all(
            target.accepts(leaf) if type(target) is Field else type(leaf) in _PLAIN
            for target, leaf in zip(self._targets, leaves, strict=True)
        )

    def clear(self) -> None:
        """Hold nothing of the last batch any more."""
        self._count = 0
        for field in self.fields:
            field.rows = field.kept = field.buffer = None
        for column in self._scalars:
            column.clear()

    def keep_held(self, first: Any, usual: tuple[int, ...]) -> None:
        """Keep the samples of fields whose memory somebody else holds.

        Args:
            first: The first sample.
            usual: What `count_holders` says of a sample that nobody else holds.
        """
        held = count_holders(self._skeleton, first)
        for field, now, alone in zip(self.fields, held, usual, strict=True):
            if now > alone:
                field.kept = []

    def make_fresh(self) -> Any:
        """A sample like the first that nobody holds: what `count_holders` is compared with."""
        fields = [_make_empty(field) for field in self.fields]
        scalars = [0] * len(self._scalars)
        return _rebuild(self._skeleton, iter(fields), iter(scalars), batch=False)

    def count_usual(self, fresh: Any) -> tuple[int, ...]:
        """The holders of a fresh sample, which came the way that samples come."""
        return count_holders(self._skeleton, fresh)

    @property
    def kind(self) -> Any:
        """Equal for batches of samples of equal containers and fields."""
        return _freeze(self._skeleton), tuple((f.dtype, f.shape, f.is_array) for f in self.fields)

    @property
    def gather_count(self) -> int:
        """How many samples to gather before they are written."""
        return max(1, GATHER_BYTES // max(1, self.sample_bytes))

    @property
    def outline(self) -> tuple[Any, ...] | None:
        """Equal for batches that differ in nothing but their bytes; None with scalars."""
        if self._scalars:
            return None
        outline: tuple[Any, ...] | None = self._outlines.get(self._count)
        if outline is None:
            kinds = tuple((field.dtype, field.shape) for field in self.fields)
            outline = self._outlines[self._count] = (
                *(_freeze(self._skeleton), kinds, self._count),
            )
        return outline

    def open_alone(self) -> None:
        """Take memory for the rows, for each field a piece of its own."""
        for field in self.fields:
            field.buffer = bytearray(field.row_bytes * self._length)
            size = torch.Size((self._length, *field.shape))
            field.rows = rebuild_small(field.buffer, field.dtype, size)

    def open_in(self, space: Space) -> None:
        """The same in a block. Few blocks go round and round, so what looks at them is kept."""
        place = space.locate(0)
        known = self._opened.get(place)
        if known is None:
            if len(self._opened) >= _MOST_OPENED:
                self._opened.clear()
            known = self._opened[place] = [
                space.look_at(field.offset, self._length * field.shape.numel(), field.dtype).view(
                    self._length, *field.shape
                )
                for field in self.fields
            ]
        for field, rows in zip(self.fields, known, strict=True):
            field.rows = rows
        last = self.fields[-1]
        space.note_used(last.offset + last.row_bytes * self._length)

    def take_alone(self) -> tuple[bytearray, ...]:
        """After `open_alone`, the bytes of each field's rows."""
        return tuple(field.take_buffer(self._count, self._length) for field in self.fields)

    def locate(self) -> list[tuple[int, int]]:
        """After `open_in`, where each field's rows are: offset within the block, and length."""
        return [(field.offset, field.row_bytes * self._count) for field in self.fields]

    def put(self, samples: list[Any]) -> bool:
        """Write more samples; False if any is unlike the first, and then none counts."""
        columns: list[list[Any]] = []
        if not _transpose(self._skeleton, samples, columns):
            return False
        try:
            written = all(
                target.put(self._count, column)
                for target, column in zip(self._targets, columns, strict=True)
                if type(target) is Field
            )
        except Exception:  # torch's collate will raise it again, in its own words
            return False
        if not written:
            return False
        for target, column in zip(self._targets, columns, strict=True):
            if type(target) is list:
                target.extend(column)
        self._count += len(samples)
        return True

    def write_kept(self) -> bool:
        """Stack what was kept; False if any is unlike the first."""
        try:
            return all(
                field.write(0, field.kept) for field in self.fields if field.kept is not None
            )
        except Exception:  # as in `put`
            return False

    def finish(self) -> Any:
        """The batch, as torch's `default_collate` gives it."""
        columns = [
            torch_compat.collate_privately(tuple(column) if in_sequence else column)
            for column, in_sequence in zip(self._scalars, self._in_sequence, strict=True)
        ]
        tensors = [field.first(self._count) for field in self.fields]
        return _rebuild(self._skeleton, iter(tensors), iter(columns), batch=True)

    def buffers(self) -> Iterator[np.ndarray[Any, Any]]:
        """The bytes of each field's rows, in the order in which the batch is pickled."""
        for field in self.fields:
            yield field.first(self._count).view(-1).view(torch.uint8).numpy()

    def unwrite(self) -> list[Any]:
        """The samples again, from their rows: for whatever torch's collate says of them."""
        return [self._sample(k) for k in range(self._count)]

    def _sample(self, k: int) -> Any:
        tensors = []
        for field in self.fields:
            if field.kept is not None:
                tensors.append(field.kept[k])
                continue
            row = field.first(self._count)[k].clone()
            tensors.append(row.numpy() if field.is_array else row)
        values = [column[k] for column in self._scalars]
        return _rebuild(self._skeleton, iter(tensors), iter(values), batch=False)


def plan_rows(sample: Any, length: int) -> Rows | None:
    """The rows for a batch of `length` samples like `sample`; None if it is unusual.

    Usual are dicts, lists, tuples and namedtuples (of exactly these types) of plain
    strided CPU tensors, numeric arrays, numbers and text, with one tensor at least.
    """
    if torch_compat.has_collate_extensions():
        return None  # the user taught torch's collate something: it decides
    leaves: list[Any] = []
    skeleton = _flatten(sample, leaves)
    if skeleton is _UNUSUAL or not all(_is_usual(leaf) for leaf in leaves):
        return None
    rows = Rows(skeleton, leaves, length)
    return rows if rows.sample_bytes else None


def count_holders(skeleton: Any, sample: Any) -> tuple[int, ...]:
    """For each field, how many references lead to its memory.

    References to the tensor or array, to its storage, and to the containers around it. Only
    differences mean anything: those of a fresh sample that came the same way are the usual.
    """
    counts: list[int] = []
    _count_holders(skeleton, sample, 0, counts)
    return tuple(counts)


def _count_holders(skeleton: Any, value: Any, above: int, counts: list[int]) -> None:
    if skeleton is _SCALAR:
        return
    here = above + sys.getrefcount(value)
    if skeleton is _FIELD:
        is_array = isinstance(value, np.ndarray)
        owners = _count_array_owners(value) if is_array else torch_compat.count_owners(value)
        counts.append(here + owners)
        return
    if type(skeleton) is dict:
        for key, part in skeleton.items():
            _count_holders(part, value[key], here, counts)
        return
    for k, part in enumerate(skeleton.items if type(skeleton) is _Named else skeleton):
        _count_holders(part, value[k], here, counts)


def _count_array_owners(array: np.ndarray[Any, Any]) -> int:
    base: object = array.base
    if base is None or isinstance(base, bytes):
        return 0  # its own memory, or one that nobody can write to
    return sys.getrefcount(base) - _REFERENCES_OF_LONE_BASE


def _count_references_of_lone_base() -> int:
    view = np.zeros(2)[1:]
    base: object = view.base
    return sys.getrefcount(base)


_REFERENCES_OF_LONE_BASE = _count_references_of_lone_base()


def _make_empty(field: Field) -> Any:
    tensor = torch.empty(field.shape, dtype=field.dtype)
    return np.empty(tuple(field.shape), tensor.numpy().dtype) if field.is_array else tensor


# -- leaves -----------------------------------------------------------------------------------


def _is_usual(leaf: Any) -> bool:
    kind = type(leaf)
    if kind is torch.Tensor:
        return torch_compat.is_plain(leaf) and not leaf.requires_grad
    if kind is np.ndarray:
        return (
            leaf.ndim > 0
            and not _OBJECT_OR_TEXT.search(leaf.dtype.str)
            and leaf.dtype.names is None
            and _torch_dtype(leaf.dtype) is not None
        )
    return kind in _PLAIN


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    found = _DTYPES.get(dtype)
    if found is None:
        try:
            found = torch.as_tensor(np.zeros(1, dtype)).dtype
        except (TypeError, ValueError):
            return None
        _DTYPES[dtype] = found
    return found


_DTYPES: dict[np.dtype[Any], torch.dtype] = {}


# -- containers -------------------------------------------------------------------------------


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
        return kind(items) if kind in {list, tuple} else _Named(kind, items)
    leaves.append(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _FIELD
    return _SCALAR if kind in _PLAIN else _UNUSUAL


def _is_like(skeleton: Any, value: Any, leaves: list[Any]) -> bool:
    """Whether `value` has the containers of `skeleton`; its leaves are appended in order."""
    kind = type(skeleton)
    if skeleton is _FIELD or skeleton is _SCALAR:
        leaves.append(value)
        return skeleton is _SCALAR or isinstance(value, (torch.Tensor, np.ndarray))
    if kind is dict:
        return (
            type(value) is dict
            and len(value) == len(skeleton)
            and all(
                type(key) is type(other) and key == other and _is_like(part, item, leaves)
                for (key, part), (other, item) in zip(skeleton.items(), value.items(), strict=True)
            )
        )
    if kind is _Named:
        kind, skeleton = skeleton.kind, skeleton.items
    return (
        type(value) is kind
        and len(value) == len(skeleton)
        and all(_is_like(part, item, leaves) for part, item in zip(skeleton, value, strict=True))
    )


def _iterate_scalars(skeleton: Any, *, in_sequence: bool) -> Iterator[bool]:
    """For each scalar in order: whether it stands in a list, a tuple or a namedtuple."""
    if skeleton is _SCALAR:
        yield in_sequence
    elif type(skeleton) is dict:
        for part in skeleton.values():
            yield from _iterate_scalars(part, in_sequence=False)
    elif skeleton is not _FIELD:
        for part in skeleton.items if type(skeleton) is _Named else skeleton:
            yield from _iterate_scalars(part, in_sequence=True)


def _transpose(skeleton: Any, samples: list[Any], columns: list[list[Any]]) -> bool:
    """One column a leaf, if every sample has the containers of `skeleton`."""
    if skeleton is _FIELD or skeleton is _SCALAR:
        columns.append(samples)
        return True
    if type(skeleton) is dict:
        size = len(skeleton)
        if not all(type(sample) is dict and len(sample) == size for sample in samples):
            return False
        try:
            return all(
                _transpose(part, [sample[key] for sample in samples], columns)
                for key, part in skeleton.items()
            )
        except KeyError:
            return False
    kind, parts = type(skeleton), skeleton
    if kind is _Named:
        kind, parts = skeleton.kind, skeleton.items
    size = len(parts)
    if not all(type(sample) is kind and len(sample) == size for sample in samples):
        return False
    return all(
        _transpose(part, [sample[k] for sample in samples], columns) for k, part in enumerate(parts)
    )


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


def _freeze(skeleton: Any) -> Any:
    """A skeleton as something hashable."""
    if type(skeleton) is dict:
        # With the keys' types: 1, 1.0 and True are equal, and yet not the same batch.
        return dict, tuple((type(k), k, _freeze(part)) for k, part in skeleton.items())
    if type(skeleton) is _Named:
        return skeleton.kind, tuple(_freeze(part) for part in skeleton.items)
    if type(skeleton) in {list, tuple}:
        return type(skeleton), tuple(_freeze(part) for part in skeleton)
    return skeleton
