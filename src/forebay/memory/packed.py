"""Records packed once, so that touching them copies no page after a fork.

Covers: a sequence of any Python values in a few flat buffers. Does not cover: how a record
lies in a row (columns.py), how buffers grow while they are filled (growing.py).

The one idea: Python keeps a reference count in every object, so that in a forked worker
*reading* a list of records writes to each of its pages, and the kernel copies them, once a
worker. Here there are no objects until one is asked for. Records of one shape share a table of
rows; a record that does not fit any opens a wider table, and those before it stay where they are.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, final, overload

import numpy as np

from forebay.memory.columns import (
    PICKLED_WHOLE,
    Form,
    Misfit,
    Text,
    find_shape,
    leaves_of,
    make_builder,
    merge_forms,
    plan_form,
)
from forebay.memory.growing import GrowingBuffer

T = TypeVar("T")
_Buffer: TypeAlias = "memoryview | mmap.mmap"

_MOST_TABLES = 64
"""Beyond it records of new shapes are pickled whole: optional keys come in 2^n combinations."""

_ROW_BITS = 48
"""An entry of the index: the table's number above, the row's below."""

_INDEX_STEP = 1 << 16


@final
class PackedList(Sequence[T], Generic[T]):
    """A read-only list of records that worker processes share without copying it.

    Each access makes the record anew, equal to the one that was given, its types included:
    changing it changes nothing here. Objects that were shared between or within records
    come back as copies. Give it a generator, and the records never exist all at once: the
    peak while packing stays below 1.5 times the packed size (on systems without `mremap`
    twice).

    A slice is a view of the same buffers. Pickling keeps buffers out of band where the
    pickler allows; a slice is packed anew, so that it does not carry the whole. As with any
    pickle, load only what you trust.

    Any number of threads and forked processes may read it.

    Args:
        records: Any values that can be pickled. Dicts with text keys, tuples, named tuples,
            lists and plain dataclasses of numbers, text, bytes and small arrays are stored in
            typed columns; anything else is pickled, record by record or field by field.
    """

    __slots__ = ("_load", "_range", "_store")

    def __init__(self, records: Iterable[T] = ()) -> None:
        packer = _Packer()
        for record in records:
            packer.append(record)
        self._hold(packer.finish())

    @classmethod
    def from_iter(cls, records: Iterable[T]) -> PackedList[T]:
        """As the constructor: for a stream whose length nobody knows."""
        return cls(records)

    def _hold(self, store: _Store, part: range | None = None) -> None:
        self._store = store
        self._range = range(store.length) if part is None else part
        self._load = store.choose_load()

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> PackedList[T]: ...
    def __getitem__(self, index: int | slice) -> T | PackedList[T]:
        at = self._range[index]
        if type(at) is range:
            view: PackedList[T] = PackedList.__new__(PackedList)
            view._hold(self._store, at)
            return view
        record: T = self._load(at)
        return record

    def __getitems__(self, indices: Iterable[int]) -> list[T]:
        load, places = self._load, self._range
        return [load(places[index]) for index in indices]

    def __len__(self) -> int:
        return len(self._range)

    def __iter__(self) -> Iterator[T]:
        return map(self._load, self._range)

    def __reversed__(self) -> Iterator[T]:
        return map(self._load, reversed(self._range))

    def __repr__(self) -> str:
        return f"<PackedList of {len(self):,} records in {self._store.packed_bytes:,} bytes>"

    @property
    def packed_bytes(self) -> int:
        """What the buffers take; a slice's are those of the whole."""
        return self._store.packed_bytes

    def __copy__(self) -> PackedList[T]:
        return self

    def __deepcopy__(self, memo: object) -> PackedList[T]:
        return self  # nothing in it can change

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        if self._range != range(self._store.length):
            return PackedList(self).__reduce__()
        return _restore, (self._store.take_apart(),)


def _restore(parts: tuple[Any, ...]) -> PackedList[Any]:
    packed: PackedList[Any] = PackedList.__new__(PackedList)
    packed._hold(_Store.put_together(*parts))  # noqa: SLF001 - our own
    return packed


@final
class _Table:
    """The rows of one form."""

    __slots__ = ("_build", "_fixed", "_heap", "_rows", "_unpack", "_varied", "form", "row_bytes")

    def __init__(self, form: Form, rows: _Buffer, heap: _Buffer) -> None:
        row = _row_of(form)
        self.form = form
        self.row_bytes = row.size
        self._rows, self._heap = rows, heap
        self._unpack = row.unpack_from
        self._build = make_builder(form)
        leaves = list(enumerate(leaves_of(form)))
        # Text is so common that it is read without a call of a function of ours: None.
        self._varied = [
            (slot, None if isinstance(leaf, Text) else leaf.load)
            for slot, leaf in leaves
            if leaf.is_varied
        ]
        self._fixed = [
            (slot, leaf.load) for slot, leaf in leaves if not (leaf.is_varied or leaf.is_plain)
        ]

    def load(self, row: int) -> Any:
        """Record number `row`."""
        values: Any = self._unpack(self._rows, row * self.row_bytes)
        if self._varied:
            values = list(values)
            heap, start = self._heap, values.pop()
            for slot, load in self._varied:
                end = start + values[slot]
                data = heap[start:end]
                values[slot] = str(data, "utf-8") if load is None else load(data)
                start = end
        elif self._fixed:
            values = list(values)
        for slot, load_fixed in self._fixed:
            values[slot] = load_fixed(values[slot])
        return self._build(values)


def _row_of(form: Form) -> struct.Struct:
    """Slots of the leaves, and where the heap begins for this row, if it has a part there."""
    leaves = list(leaves_of(form))
    end = "Q" if any(leaf.is_varied for leaf in leaves) else ""
    return struct.Struct("<" + "".join(leaf.code for leaf in leaves) + end)


@final
class _Store:
    """Tables, heap, and, if there is more than one table, where each record is."""

    __slots__ = ("_buffers", "_forms", "_index", "_lengths", "_tables", "length")

    def __init__(
        self, length: int, forms: list[Form], buffers: list[_Buffer], lengths: list[int]
    ) -> None:
        self.length = length
        self._forms, self._buffers, self._lengths = forms, buffers, lengths
        heap, *rest = buffers
        self._tables = [_Table(form, rows, heap) for form, rows in zip(forms, rest, strict=False)]
        indexed = len(rest) > len(forms)
        self._index = memoryview(rest[-1])[: 8 * length].cast("Q") if indexed else None

    @property
    def packed_bytes(self) -> int:
        return sum(self._lengths)

    def choose_load(self) -> Callable[[int], Any]:
        """The quickest function from a place to its record."""
        if self._index is None and self._tables:
            return self._tables[0].load
        return self._load

    def _load(self, at: int) -> Any:
        assert self._index is not None, "an empty list has no place to ask for"
        entry = self._index[at]
        return self._tables[entry >> _ROW_BITS].load(entry & ((1 << _ROW_BITS) - 1))

    def take_apart(self) -> tuple[int, list[Form], list[np.ndarray[Any, Any]]]:
        """What to pickle: NumPy hands the arrays over out of band where that is possible."""
        arrays = [
            np.frombuffer(buffer, np.uint8, length) if length else np.empty(0, np.uint8)
            for buffer, length in zip(self._buffers, self._lengths, strict=True)
        ]
        return self.length, self._forms, arrays

    @classmethod
    def put_together(
        cls, length: int, forms: list[Form], arrays: list[np.ndarray[Any, Any]]
    ) -> _Store:
        buffers: list[_Buffer] = [memoryview(array) for array in arrays]  # type: ignore[arg-type]
        return cls(length, forms, buffers, [array.nbytes for array in arrays])


@final
class _Rows:
    """A table while it is filled."""

    __slots__ = ("_heap", "_pack", "count", "form", "has_heap", "number", "rows")

    def __init__(self, number: int, form: Form, heap: GrowingBuffer) -> None:
        self.number, self.form = number, form
        self.rows = GrowingBuffer()
        self.count = 0
        self.has_heap = any(leaf.is_varied for leaf in leaves_of(form))
        self._heap = heap
        self._pack = _row_of(form).pack

    def try_append(self, record: Any) -> bool:
        """Append `record`, if it is of this form."""
        row: list[Any] = []
        heap = self._heap
        mark, start = len(heap.fresh), len(heap)
        try:
            self.form.put(record, row, heap.fresh)
        except Misfit:
            del heap.fresh[mark:]
            return False
        except BaseException:
            del heap.fresh[mark:]
            raise
        if self.has_heap:
            row.append(start)
        self.rows.fresh += self._pack(*row)
        self.rows.settle()
        heap.settle()
        self.count += 1
        return True


@final
class _Packer:
    """Takes records one by one."""

    def __init__(self) -> None:
        self._heap = GrowingBuffer()
        self._tables: list[_Rows] = []
        self._newest: dict[object, _Rows] = {}
        self._whole: _Rows | None = None
        self._index: GrowingBuffer | None = None
        self._length = 0

    def append(self, record: Any) -> None:
        shape = find_shape(record)
        rows = self._newest.get(shape)
        if rows is None or not rows.try_append(record):
            rows = self._append_elsewhere(record, shape, rows)
        if self._index is not None:
            entry = rows.number << _ROW_BITS | (rows.count - 1)
            self._index.fresh += entry.to_bytes(8, sys.byteorder)
            self._index.settle()
        self._length += 1

    def _append_elsewhere(self, record: Any, shape: object, rows: _Rows | None) -> _Rows:
        form = plan_form(record)
        if rows is not None:
            form = merge_forms(rows.form, form)
        is_new = rows is None or form != rows.form
        if is_new and len(self._tables) < _MOST_TABLES:
            wider = self._open(form)
            if wider.try_append(record):
                self._newest[shape] = wider
                return wider
        if self._whole is None:
            self._whole = self._open(PICKLED_WHOLE)
        if not self._whole.try_append(record):
            raise AssertionError("a pickle fits where anything fits")
        return self._whole

    def _open(self, form: Form) -> _Rows:
        rows = _Rows(len(self._tables), form, self._heap)
        self._tables.append(rows)
        if len(self._tables) > 1 and self._index is None:
            self._index = GrowingBuffer()
            for first in range(0, self._length, _INDEX_STEP):
                end = min(first + _INDEX_STEP, self._length)
                self._index.fresh += np.arange(first, end, dtype=np.uint64).tobytes()
                self._index.settle()
        return rows

    def finish(self) -> _Store:
        grown = [self._heap, *[rows.rows for rows in self._tables]]
        if self._index is not None:
            grown.append(self._index)
        lengths = [len(buffer) for buffer in grown]
        buffers = [buffer.finish() for buffer in grown]
        return _Store(self._length, [rows.form for rows in self._tables], buffers, lengths)
