"""How the usual batch is put together from its buffers, without unpickling.

Covers: batches of dicts, lists, tuples and namedtuples around whole, contiguous tensors
with a buffer each, and constants. Does not cover: everything else; the codec's pickle does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch


@final
class _Mark:
    """Stands for a tensor in a skeleton."""


_TENSOR = _Mark()


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Any


@dataclass(frozen=True, slots=True)
class _Named:
    kind: Any
    items: tuple[Any, ...]


_CONSTANTS = (str, bytes, int, float, bool, type(None))


@final
class Recipe:
    """A batch's containers, and dtype and size of each tensor in the order of the buffers."""

    __slots__ = ("_kinds", "_skeleton")

    def __init__(self, skeleton: Any, kinds: list[tuple[torch.dtype, torch.Size]]) -> None:
        self._skeleton = skeleton
        self._kinds = kinds

    def rebuild(self, buffers: Sequence[object]) -> Any:
        """The batch of these buffers; fresh containers each time."""
        tensors = [
            rebuild_small(buffer, dtype, size)
            if type(buffer) is bytearray
            else torch.frombuffer(buffer, dtype=dtype).view(size)
            for buffer, (dtype, size) in zip(buffers, self._kinds, strict=True)
        ]
        return tensors[0] if self._skeleton is _TENSOR else _fill(self._skeleton, iter(tensors))


def rebuild_small(buffer: bytearray, dtype: torch.dtype, size: torch.Size) -> torch.Tensor:
    """A tensor over a buffer of its own, at a third of the cost of the usual way.

    Of torch's operators even `view` lets go of the interpreter lock, and where other threads
    want it, coming by it again costs more than all else. NumPy's constructor keeps it. (Not
    for memory that is lent: there nothing but its exporter may stand for the buffer.)
    """
    array_type = _ARRAY_TYPES.get(dtype)
    if not buffer:
        return torch.empty(size, dtype=dtype)
    if array_type is None:
        return torch.frombuffer(buffer, dtype=dtype).view(size)
    return torch.from_numpy(np.ndarray(size, array_type, buffer))


_ARRAY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16),
        *(torch.uint8, torch.int8, torch.bool, torch.complex64, torch.complex128),
    )
}


def derive_recipe(batch: Any, buffers: Sequence[object]) -> Recipe | None:
    """The recipe of `batch`, which was unpickled from `buffers`; None if it is unusual."""
    tensors: list[torch.Tensor] = []
    skeleton = _outline(batch, tensors, set())
    if skeleton is None or not tensors or len(tensors) != len(buffers):
        return None
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if not _is_whole(tensor, buffer):
            return None
    return Recipe(skeleton, [(tensor.dtype, tensor.size()) for tensor in tensors])


def _is_whole(tensor: torch.Tensor, buffer: Any) -> bool:
    """Whether `tensor` is nothing but a plain look at all of `buffer`."""
    return (
        tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        # A length of 1 may have any stride, and keeps it in the pickle.
        and tensor.stride() == torch.empty(tensor.size(), device="meta").stride()
        and tensor.numel() * tensor.element_size() == len(buffer)
        and len(buffer) > 0
        and tensor.data_ptr() == torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    )


def _outline(value: Any, tensors: list[torch.Tensor], seen: set[int]) -> Any:
    """The skeleton of `value`, its tensors appended in order; None if anything is unusual.

    Args:
        value: A part of the batch.
        tensors: Those found so far.
        seen: Mutable containers found so far, by identity. One that is met twice must stay
            one object, or may hold itself: only the pickle can say so.
    """
    kind = type(value)
    if kind is dict or kind is list:
        if id(value) in seen:
            return None
        seen.add(id(value))
    if kind is torch.Tensor:
        tensors.append(value)
        return _TENSOR
    if kind is dict:
        parts = {key: _outline(item, tensors, seen) for key, item in value.items()}
        return None if any(part is None for part in parts.values()) else parts
    if kind is list or kind is tuple or _is_named(value):
        items = tuple(_outline(item, tensors, seen) for item in value)
        if any(item is None for item in items):
            return None
        return kind(items) if kind in {list, tuple} else _Named(kind, items)
    return _Constant(value) if kind in _CONSTANTS else None


def _is_named(value: Any) -> bool:
    """Whether `value` is a namedtuple and nothing beside its items (a subclass may be)."""
    return (
        isinstance(value, tuple)
        and hasattr(value, "_fields")
        and not getattr(value, "__dict__", None)
    )


def _fill(skeleton: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if skeleton is _TENSOR:
        return next(tensors)
    kind = type(skeleton)
    if kind is dict:
        return {key: _fill(part, tensors) for key, part in skeleton.items()}
    if kind is _Constant:
        return skeleton.value
    if kind is _Named:
        return skeleton.kind(*[_fill(part, tensors) for part in skeleton.items])
    return kind([_fill(part, tensors) for part in skeleton])
