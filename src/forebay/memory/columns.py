"""How one kind of record lies in a row of fixed width and a heap beside it.

Covers: finding a form for a record, widening a form when a later record does not fit, and
moving a record into it and out of it. Does not cover: where rows and heap lie (packed.py).

The one idea: a form is a tree. Its inner nodes (dicts, tuples, lists, named tuples, plain
dataclasses) are known beforehand and cost nothing a record; its leaves are slots of one
`struct`, so that a whole row is read by one call. A leaf holds a number, a scalar or a small
array of NumPy, or the length of what lies in the heap: text, bytes, lists of numbers, arrays
of many shapes, and, for everything else, a pickle. Types are compared exactly: what comes out
is what went in.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import math
import pickle
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from typing_extensions import override

_DEEPEST = 4
"""Containers within containers beyond this are pickled: rebuilding each in Python is dearer."""

_MOST_KEYS = 64
_LONGEST_SPREAD = 8
"""A longer list or tuple gets no slot for each item."""

_FIXED_ARRAY_BYTES = 4096
"""Larger arrays lie in the heap: a page of its own serves them as well as a row does."""

_KINDS = "biufcmM"
"""NumPy's letters for what is bytes and a dtype, and no more: no objects, text or records."""

_LENGTH_END = 1 << 32
_INT_END = 1 << 63


class Misfit(Exception):  # noqa: N818 - a signal between two parts of this package
    """A record is not of this form."""


class Leaf(ABC):
    """One slot of the row.

    Attributes:
        code: What `struct` calls the slot.
        is_plain: What `struct` reads is the value already.
        is_varied: The slot holds a length, the value lies in the heap.
    """

    code: str
    is_plain: ClassVar[bool] = False
    is_varied: ClassVar[bool] = False

    @abstractmethod
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        """Append `value` to the row, and to the heap what is not in the row.

        Raises:
            Misfit: it is of another kind. The heap may have grown.
        """

    @abstractmethod
    def load(self, data: Any) -> Any:
        """The value, from the bytes of its slot or of its part of the heap."""


_PLAIN_CODES: dict[Any, str] = {int: "q", float: "d", bool: "?"}


@dataclass(frozen=True, slots=True)
class Plain(Leaf):
    """An int of 64 bits, a float, or a bool."""

    kind: Any
    code: str
    is_plain: ClassVar[bool] = True

    @override
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        if type(value) is not self.kind or (self.kind is int and not _is_short(value)):
            raise Misfit
        row.append(value)

    @override
    def load(self, data: Any) -> Any:
        return data


_NUMBER = struct.Struct("<c8s")
_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Number(Leaf):
    """An int, a float, a bool or None: which one is said in each row."""

    code: str = "9s"

    @override
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        kind = type(value)
        if kind is float:
            row.append(_NUMBER.pack(b"d", _FLOAT.pack(value)))
        elif kind is int and _is_short(value):
            row.append(_NUMBER.pack(b"q", _INT.pack(value)))
        elif value is None or kind is bool:
            row.append(_NUMBER.pack(b"n" if value is None else b"?", _INT.pack(bool(value))))
        else:
            raise Misfit

    @override
    def load(self, data: Any) -> Any:
        tag = data[0]
        if tag == ord("d"):
            return _FLOAT.unpack_from(data, 1)[0]
        if tag == ord("n"):
            return None
        value = _INT.unpack_from(data, 1)[0]
        return bool(value) if tag == ord("?") else value


@dataclass(frozen=True, slots=True)
class Nothing(Leaf):
    """None in every row; it takes no byte."""

    code: str = "0s"

    @override
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        if value is not None:
            raise Misfit
        row.append(b"")

    @override
    def load(self, data: Any) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Scalar(Leaf):
    """A scalar of NumPy."""

    dtype: np.dtype[Any]
    code: str

    @override
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        if type(value) is not self.dtype.type or value.dtype != self.dtype:
            raise Misfit
        row.append(value.tobytes())

    @override
    def load(self, data: Any) -> Any:
        return np.frombuffer(data, self.dtype)[0]


@dataclass(frozen=True, slots=True)
class FixedArray(Leaf):
    """A small array whose shape is the same in every row."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    code: str

    @override
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        if not _is_flat_array(value) or (value.dtype, value.shape) != (self.dtype, self.shape):
            raise Misfit
        row.append(value.tobytes())

    @override
    def load(self, data: Any) -> Any:
        return np.frombuffer(data, self.dtype).reshape(self.shape).copy()


@dataclass(frozen=True, slots=True)
class RaggedArray(Leaf):
    """An array whose shape, but not its number of axes, differs from row to row."""

    dtype: np.dtype[Any]
    axes: int
    code: str = "I"
    is_varied: ClassVar[bool] = True

    @override
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        if not _is_flat_array(value) or (value.dtype, value.ndim) != (self.dtype, self.axes):
            raise Misfit
        head = struct.pack(f"<{self.axes}q", *value.shape)
        _put_long(head + value.tobytes(), row, heap)

    @override
    def load(self, data: Any) -> Any:
        shape = struct.unpack_from(f"<{self.axes}q", data)
        flat = np.frombuffer(data, self.dtype, offset=8 * self.axes, count=math.prod(shape))
        return flat.reshape(shape).copy()


@dataclass(frozen=True, slots=True)
class Text(Leaf):
    """A str, as UTF-8."""

    code: str = "I"
    is_varied: ClassVar[bool] = True

    @override
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        if type(value) is not str:
            raise Misfit
        try:
            data = value.encode()
        except UnicodeEncodeError:  # a lone surrogate, as in odd file names
            raise Misfit from None
        _put_long(data, row, heap)

    @override
    def load(self, data: Any) -> str:
        return str(data, "utf-8")


@dataclass(frozen=True, slots=True)
class Bytes(Leaf):
    """Bytes."""

    code: str = "I"
    is_varied: ClassVar[bool] = True

    @override
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        if type(value) is not bytes:
            raise Misfit
        _put_long(value, row, heap)

    @override
    def load(self, data: Any) -> bytes:
        return bytes(data)


@dataclass(frozen=True, slots=True)
class Numbers(Leaf):
    """A list or tuple of any length whose items are all ints, or all floats."""

    container: Any
    item: Any
    code: str = "I"
    is_varied: ClassVar[bool] = True

    @override
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        if type(value) is not self.container or not _is_all(self.item, value):
            raise Misfit
        _put_long(array(_PLAIN_CODES[self.item], value).tobytes(), row, heap)

    @override
    def load(self, data: Any) -> Any:
        items = array(_PLAIN_CODES[self.item])
        items.frombytes(data)
        return items.tolist() if self.container is list else tuple(items)


@dataclass(frozen=True, slots=True)
class Pickled(Leaf):
    """Anything else."""

    code: str = "I"
    is_varied: ClassVar[bool] = True

    @override
    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        _put_long(pickle.dumps(value, 5), row, heap, _LENGTH_END if self.code == "I" else _INT_END)

    @override
    def load(self, data: Any) -> Any:
        return pickle.loads(data)


PICKLED_WHOLE = Pickled("Q")
"""What holds any record, also one of more than 4 GiB."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A container whose items have forms of their own.

    Attributes:
        kind: dict, list, tuple, a named tuple's class or a dataclass.
        keys: Names of the items; empty for lists and tuples.
        items: Their forms.
    """

    kind: type
    keys: tuple[str, ...]
    items: tuple[Form, ...]

    def put(self, value: Any, row: list[Any], heap: bytearray) -> None:
        """As `Leaf.put`, for each leaf below."""
        if type(value) is not self.kind:
            raise Misfit
        parts = _take_apart(value)
        if parts is None or parts[0] != self.keys or len(parts[1]) != len(self.items):
            raise Misfit
        for item, part in zip(self.items, parts[1], strict=True):
            item.put(part, row, heap)


Form: TypeAlias = Leaf | Branch


def find_shape(record: Any) -> object:
    """What records must have in common to be of one form: hashable, equal when they have."""
    kind = type(record)
    parts = _take_apart(record)
    return kind if parts is None else (kind, parts[0], len(parts[1]))


def plan_form(value: Any, depth: int = 0) -> Form:
    """The narrowest form that `value` fits."""
    parts = _take_apart(value) if depth < _DEEPEST else None
    if parts is None:
        return _plan_leaf(value)
    keys, values = parts
    return Branch(type(value), keys, tuple(plan_form(item, depth + 1) for item in values))


def merge_forms(one: Form, other: Form) -> Form:
    """The narrowest form that fits what either fits."""
    if one == other:
        return one
    if isinstance(one, Branch) and isinstance(other, Branch) and _is_alike(one, other):
        pairs = zip(one.items, other.items, strict=True)
        return Branch(one.kind, one.keys, tuple(merge_forms(*pair) for pair in pairs))
    if isinstance(one, _NUMBER_LEAVES) and isinstance(other, _NUMBER_LEAVES):
        return Number()
    if isinstance(one, _ARRAYS) and isinstance(other, _ARRAYS):
        kinds = {(form.dtype, _count_axes(form)) for form in (one, other)}
        return RaggedArray(*kinds.pop()) if len(kinds) == 1 else Pickled()
    seen, seen_too = _see_numbers(one), _see_numbers(other)
    if seen and seen_too and seen[0] is seen_too[0]:
        items = {seen[1], seen_too[1]} - {None}
        if len(items) == 1:
            return Numbers(seen[0], items.pop())
    return Pickled()


_NUMBER_LEAVES = (Plain, Number, Nothing)
_ARRAYS = (FixedArray, RaggedArray)


def _is_alike(one: Branch, other: Branch) -> bool:
    return (one.kind, one.keys, len(one.items)) == (other.kind, other.keys, len(other.items))


def _count_axes(form: FixedArray | RaggedArray) -> int:
    return len(form.shape) if isinstance(form, FixedArray) else form.axes


def _see_numbers(form: Form) -> tuple[type, type | None] | None:
    """Container and type of item, where `form` is a list of equal numbers; None as type: empty."""
    if isinstance(form, Numbers):
        return form.container, form.item
    if not isinstance(form, Branch) or form.kind not in {list, tuple}:
        return None
    kinds = {item.kind if isinstance(item, Plain) else None for item in form.items}
    if not kinds:
        return form.kind, None
    kind = kinds.pop()
    return (form.kind, kind) if not kinds and kind in {int, float} else None


def _plan_leaf(value: Any) -> Leaf:
    kind = type(value)
    if value is None:
        return Nothing()
    if kind in _PLAIN_CODES:
        is_plain = kind is not int or _is_short(value)
        return Plain(kind, _PLAIN_CODES[kind]) if is_plain else Pickled()
    if kind is str or kind is bytes:
        return _first_that_fits((Text(), Bytes()), value)
    if kind is list or kind is tuple:
        return _first_that_fits((Numbers(kind, int), Numbers(kind, float)), value)
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
        return Scalar(value.dtype, f"{value.dtype.itemsize}s")
    if _is_flat_array(value):
        if value.nbytes > _FIXED_ARRAY_BYTES:
            return RaggedArray(value.dtype, value.ndim)
        return FixedArray(value.dtype, value.shape, f"{value.nbytes}s")
    return Pickled()


def _first_that_fits(leaves: tuple[Leaf, ...], value: Any) -> Leaf:
    for leaf in leaves:
        try:
            leaf.put(value, [], bytearray())
        except Misfit:
            continue
        return leaf
    return Pickled()


def _is_short(value: int) -> bool:
    return -_INT_END <= value < _INT_END


def _is_all(kind: Any, values: Sequence[Any]) -> bool:
    if not all(type(value) is kind for value in values):
        return False
    return kind is not int or not values or (_is_short(min(values)) and _is_short(max(values)))


def _is_flat_array(value: Any) -> bool:
    """Whether its bytes in C order are all there is to say of an array beside dtype and shape."""
    return (
        type(value) is np.ndarray
        and value.dtype.kind in _KINDS
        and value.flags.c_contiguous
        and value.size > 0
    )


def _put_long(data: bytes, row: list[Any], heap: bytearray, end: int = _LENGTH_END) -> None:
    if len(data) >= end:
        raise Misfit
    row.append(len(data))
    heap += data


# -- containers ---------------------------------------------------------------------------


def _take_apart(value: Any) -> tuple[tuple[str, ...], Sequence[Any]] | None:
    """Keys and items of a container that can be put together again from them; else None."""
    kind = type(value)
    if kind is dict:
        if len(value) > _MOST_KEYS or not all(type(key) is str for key in value):
            return None
        return tuple(value), list(value.values())
    if kind is list or kind is tuple:
        return ((), value) if len(value) <= _LONGEST_SPREAD else None
    if isinstance(value, tuple):
        return (kind._fields, value) if _is_named(kind, value) else None
    if not dataclasses.is_dataclass(kind) or not _is_restored_by_its_dict(kind):
        return None
    content = value.__dict__
    return (tuple(content), list(content.values())) if len(content) <= _MOST_KEYS else None


def _is_named(kind: Any, value: Any) -> bool:
    """Whether a named tuple holds nothing beside its items (a subclass may)."""
    return hasattr(kind, "_fields") and not getattr(value, "__dict__", None)


_OF_PICKLE = ("__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_PLAIN_STATE = {
    name: getattr(object, name, None)
    for name in ("__new__", "__reduce__", "__reduce_ex__", *_OF_PICKLE)
}


@functools.cache
def _is_restored_by_its_dict(kind: Any) -> bool:
    """Whether pickle too would do no more than fill the `__dict__` of a new object."""
    return (
        bool(kind.__dictoffset__)
        and kind not in copyreg.dispatch_table
        and not any(vars(part).get("__slots__") for part in kind.__mro__)
        and all(getattr(kind, name, None) is plain for name, plain in _PLAIN_STATE.items())
    )


def make_builder(form: Form) -> Callable[[Sequence[Any]], Any]:
    """A function from the values of all leaves, in order, to the record."""
    if isinstance(form, Branch) and form.kind is dict and _is_flat(form):
        keys = form.keys
        return lambda values: dict(zip(keys, values))  # noqa: B905 - a third of the time
    return _builder(form, 0)[0]


def _is_flat(form: Branch) -> bool:
    return all(isinstance(item, Leaf) for item in form.items)


def leaves_of(form: Form) -> Iterator[Leaf]:
    """The leaves in the order of their slots."""
    if isinstance(form, Leaf):
        yield form
        return
    for item in form.items:
        yield from leaves_of(item)


def _builder(form: Form, start: int) -> tuple[Callable[[Sequence[Any]], Any], int]:
    """The function for a part whose first leaf is number `start`, and the end of its leaves."""
    if isinstance(form, Leaf):
        return (lambda values: values[start]), start + 1
    if _is_flat(form):
        end = start + len(form.items)
        return _join(form, lambda values: values[start:end]), end
    parts, end = [], start
    for item in form.items:
        part, end = _builder(item, end)
        parts.append(part)
    return _join(form, lambda values: [part(values) for part in parts]), end


def _join(
    form: Branch, gather: Callable[[Sequence[Any]], Sequence[Any]]
) -> Callable[[Sequence[Any]], Any]:
    kind, keys = form.kind, form.keys
    if kind is dict:
        return lambda values: dict(zip(keys, gather(values), strict=True))
    if kind is list or kind is tuple:
        return lambda values: kind(gather(values))
    if issubclass(kind, tuple):
        return lambda values: tuple.__new__(kind, gather(values))

    def restore(values: Sequence[Any]) -> Any:
        record = object.__new__(kind)
        record.__dict__.update(zip(keys, gather(values), strict=True))
        return record

    return restore
