"""batch <-> (header, buffers): structure through the pipe, bulk through the arena.

Covers: turning any picklable batch into a short pickle and a list of buffers, and back
again, in another process, also after the first one died. Does not cover: where buffers
lie (arena.py) or how long (lease.py).

The one idea: a plain pickle-5 pickler whose reducers say what every tensor *is* (buffer,
dtype, size, strides, offset) and hand its storage over out of band. torch's own
multiprocessing reductions are not used for CPU tensors: they tie a batch to descriptors
that its worker must still be alive to hand over.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import zlib
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from forebay import torch_compat
from forebay.errors import DamagedBatch
from forebay.transport.recipe import Recipe, derive_recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMPACT_RATIO = 2
"""A view is copied alone when its storage is at least this much larger (CASES 37: a thin
slice of a decoded video ships the whole video)."""

COMPACT_MIN_BYTES = 4096
"""Below a page of excess, compacting saves nothing that is counted."""

_CUT_ALIGN_BYTES = 16
"""Cuts begin at a multiple of the largest element (complex128): views of several dtypes may
share a storage, and each counts its offset in elements of its own."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One batch, taken apart.

    Attributes:
        head: Pickle of the structure, without the buffers.
        buffers: The buffers in the order in which `decode` wants them, flat uint8 arrays.
        wholes: For each buffer that is all of a storage of torch's own the bytes as a tensor.
    """

    head: bytes
    buffers: tuple[np.ndarray[Any, Any], ...]
    wholes: tuple[torch.Tensor | None, ...] = ()

    def is_forsaken(self, number: int) -> bool:
        """Whether nobody but this object has the memory of a buffer any more.

        Tells of tensors whose memory torch allocated, and says no of everything else.
        """
        whole = self.wholes[number] if number < len(self.wholes) else None
        return whole is not None and torch_compat.is_sole_owner(whole)


def encode(batch: object) -> Encoded:
    """Take `batch` apart without copying its buffers.

    Raises:
        Exception: whatever pickling a value of the batch raises, unchanged.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(batch)
    cuts, buffers, wholes = pickler.compact()
    return Encoded(_seal(_pack_cuts(cuts) + file.getvalue()), tuple(buffers), tuple(wholes))


def decode(head: bytes, buffers: Sequence[object]) -> Any:
    """The batch that `encode` took apart.

    Args:
        head: As made by `encode`.
        buffers: One writable object with the buffer protocol for each of `encode`'s,
            which the batch's tensors and arrays keep alive.

    Raises:
        DamagedBatch: `head` is not what `encode` made. Nothing of it was unpickled.
        Exception: What unpickling a value of the batch raises, unchanged.
    """
    recipe = _recipes.get(head)
    if recipe is not None:
        return recipe.rebuild(buffers)
    batch = _decode_anything(head, buffers)
    if head not in _recipes and len(head) <= _RECIPE_HEAD_BYTES:
        if len(_recipes) >= _MOST_RECIPES:
            _recipes.clear()
        _recipes[head] = derive_recipe(batch, buffers)
    return batch


def _decode_anything(head: bytes, buffers: Sequence[object]) -> Any:
    cuts, start = _unpack_cuts(_unseal(head))
    given: Sequence[object] = buffers
    if cuts:
        given = list(buffers)
        for number, cut_bytes in cuts:
            given[number] = _Cut(given[number], cut_bytes)
    body = memoryview(head)[_SUM.size + start :]
    return pickle.loads(body, buffers=given)


# A batch is a function of its head and its buffers. Equal heads come batch after batch, so
# for the usual batch (containers of whole tensors) the function is kept, not computed anew:
# a third of the cost of unpickling.
_recipes: dict[bytes, Recipe | None] = {}
_MOST_RECIPES = 256
_RECIPE_HEAD_BYTES = 8192


_SUM = struct.Struct("<I")
"""CRC-32 of the rest. A damaged pickle may do anything, so it is not even begun. The cost, a
microsecond for 3 KiB, is that of heads which are not known yet."""


def _seal(body: bytes) -> bytes:
    return _SUM.pack(zlib.crc32(body)) + body


def _unseal(head: bytes) -> memoryview:
    body = memoryview(head)[_SUM.size :]
    if len(body) < _COUNT.size or _SUM.unpack_from(head)[0] != zlib.crc32(body):
        raise DamagedBatch.about(len(head))
    return body


_COUNT = struct.Struct("<I")
_CUT = struct.Struct("<IQ")


def _pack_cuts(cuts: list[tuple[int, int]]) -> bytes:
    return _COUNT.pack(len(cuts)) + b"".join(_CUT.pack(*cut) for cut in cuts)


def _unpack_cuts(head: memoryview) -> tuple[list[tuple[int, int]], int]:
    (count,) = _COUNT.unpack_from(head)
    end = _COUNT.size + count * _CUT.size
    return list(_CUT.iter_unpack(head[_COUNT.size : end])), end


@final
class _Cut:
    """A buffer that lacks the first `cut_bytes` of its storage."""

    __slots__ = ("buffer", "cut_bytes")

    def __init__(self, buffer: object, cut_bytes: int) -> None:
        self.buffer = buffer
        self.cut_bytes = cut_bytes


@final
class _Storage:
    """Stands for one storage in the pickle, so that its views stay views of one storage.

    `start` and `end` are the bytes that any view of it in this batch reaches; `number` is
    that of its buffer. Addresses cannot tell buffers apart: an array and a tensor, or two
    tensors, may each have a storage of their own over the same memory (`from_numpy`).
    """

    __slots__ = ("_buffers", "end", "flat", "is_counted", "number", "start", "storage", "whole")

    def __init__(self, storage: torch.UntypedStorage, buffers: list[Any]) -> None:
        self.storage = storage  # held: no address is used twice while we work
        self.is_counted = torch_compat.is_counted(storage)  # asked before NumPy looks at it
        self.whole = _flat_bytes(storage)
        self.flat = self.whole.numpy()
        self.start, self.end = self.flat.nbytes, 0
        self._buffers = buffers
        self.number = -1

    def reach(self, start: int, end: int) -> None:
        self.start, self.end = min(self.start, start), max(self.end, end)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        self.number = len(self._buffers)  # the pickler takes this buffer next
        return _rebuild_storage, (_make_buffer(self.flat),)


@final
class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        buffers: list[np.ndarray[Any, Any]] = []

        # Not a method: a pickler that refers to itself, and with it the whole batch, would
        # live until the garbage collector comes by.
        def take(buffer: pickle.PickleBuffer) -> bool:
            buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))
            return False  # out of band

        super().__init__(file, protocol=5, buffer_callback=take)
        self._buffers = buffers
        self._storages: dict[int, _Storage] = {}
        self.dispatch_table = _DISPATCH

    def compact(
        self,
    ) -> tuple[list[tuple[int, int]], list[np.ndarray[Any, Any]], list[torch.Tensor | None]]:
        """The buffers, each cut to what is seen of it where that is much less than it is.

        Returns:
            (number of the buffer, bytes cut off its front) for each that was cut; all buffers;
            and for each that is all of a storage its bytes as a tensor.
        """
        cuts = []
        wholes: list[torch.Tensor | None] = [None] * len(self._buffers)
        for storage in self._storages.values():
            start = storage.start // _CUT_ALIGN_BYTES * _CUT_ALIGN_BYTES
            size, seen = storage.flat.nbytes, max(0, storage.end - start)
            if size < COMPACT_RATIO * seen or size - seen <= COMPACT_MIN_BYTES:
                wholes[storage.number] = storage.whole if storage.is_counted else None
                continue
            self._buffers[storage.number] = storage.flat[start : storage.end]
            cuts.append((storage.number, start))
        return cuts, self._buffers, wholes

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._reduce_tensor(obj)
        if kind is np.ndarray:
            return _reduce_array(obj)
        if isinstance(obj, torch_compat.STORAGE_TYPES):
            return self._reduce_storage(obj)
        return NotImplemented

    # -- tensors ------------------------------------------------------------------------

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type not in {"cpu", "meta"}:
            # Only the device's own inter-process handles can share such memory.
            return torch_compat.reduce_device_tensor(tensor)
        if tensor.requires_grad and not tensor.is_leaf:
            message = (
                "Cowardly refusing to serialize non-leaf tensor which requires_grad, since "
                "autograd does not support crossing process boundaries.  If you just want to "
                "transfer the data, call detach() on the tensor before serializing (e.g., "
                "putting it on the queue)."
            )
            raise RuntimeError(message)
        extras = (type(tensor) is torch.nn.Parameter, tensor.requires_grad)
        if tensor.is_nested or tensor.layout is not torch.strided:
            return _rebuild_odd, (*_take_odd_apart(tensor), *extras)
        if tensor.device.type == "meta":
            size, stride = tuple(tensor.size()), tensor.stride()
            return _rebuild_meta, (tensor.dtype, size, stride, *extras)
        if tensor.is_quantized:
            return _rebuild_quantized, (*_take_quantized_apart(tensor), *extras)
        plain = tensor.detach()
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        return _rebuild_tensor, (*self._strided(plain), *extras)

    def _strided(self, tensor: torch.Tensor) -> tuple[object, ...]:
        size, stride = tuple(tensor.size()), tensor.stride()
        storage = self._find_storage(tensor.untyped_storage())
        item_bytes = tensor.element_size()
        start = tensor.storage_offset() * item_bytes
        storage.reach(int(start), int(start + _span_bytes(size, stride, item_bytes)))
        return storage, tensor.dtype, size, stride, tensor.storage_offset()

    def _find_storage(self, storage: torch.UntypedStorage) -> _Storage:
        key = torch_compat.identify_storage(storage)
        known = self._storages.get(key)
        if known is None:
            known = self._storages[key] = _Storage(storage, self._buffers)
        return known

    def _reduce_storage(self, storage: Any) -> Any:
        untyped = torch_compat.untype_storage(storage)
        known = self._find_storage(untyped)
        known.reach(0, untyped.nbytes())
        if untyped is storage:
            return _return_storage, (known,)
        return torch_compat.rebuild_typed_storage, (known, storage.dtype)


def _make_buffer(array: np.ndarray[Any, Any]) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(array)  # type: ignore[arg-type] # NumPy's types lack the protocol


def _span_bytes(size: Sequence[int], stride: Sequence[int], item_bytes: int) -> int:
    """Bytes from a view's first element to the end of its last."""
    if 0 in size:
        return 0
    return (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1) * item_bytes


def _flat_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


# -- the other way: rebuilt in main, found by name from the pickle ------------------------


def _rebuild_storage(buffer: Any) -> Any:
    if type(buffer) is _Cut:
        return _Cut(_rebuild_storage(buffer.buffer), buffer.cut_bytes)
    if not memoryview(buffer).nbytes:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _return_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


def _dress(tensor: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    if requires_grad:
        tensor.requires_grad_()
    return tensor


def _rebuild_tensor(
    storage: Any,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    if type(storage) is _Cut:
        offset -= storage.cut_bytes // dtype.itemsize
        storage = storage.buffer
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    if is_parameter or requires_grad:
        return _dress(tensor, is_parameter, requires_grad)
    return tensor


def _rebuild_meta(
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    return _dress(tensor, is_parameter, requires_grad)


def _take_odd_apart(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a sparse or nested tensor is made of, as plain tensors."""
    tensor = tensor.detach()
    if tensor.is_nested:  # strided; the jagged kind is a subclass and reduces itself
        return "nested", torch_compat.nested_parts(tensor), None, None
    size = tuple(tensor.size())
    if tensor.layout is torch.sparse_coo:
        indices = (tensor._indices(), tensor._values())  # noqa: SLF001 - uncoalesced too
        return "coo", indices, size, tensor.is_coalesced()
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        message = (
            f"tensors of layout {tensor.layout} cannot cross a process border; call to_dense()"
        )
        raise NotImplementedError(message)
    return "compressed", parts, size, tensor.layout


def _rebuild_odd(
    kind: str,
    parts: tuple[Any, ...],
    shape: Any,
    detail: Any,
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    if kind == "nested":
        tensor = torch_compat.rebuild_nested(parts)
    elif kind == "coo":
        # Taken from a valid tensor: nothing to check, and nothing to warn of the checks about.
        indices, values = parts
        tensor = torch.sparse_coo_tensor(
            indices, values, size=shape, is_coalesced=detail, check_invariants=False
        )
    else:
        outer, inner, values = parts
        tensor = torch.sparse_compressed_tensor(
            outer, inner, values, size=shape, layout=detail, check_invariants=False
        )
    return _dress(tensor, is_parameter, requires_grad)


def _take_quantized_apart(tensor: torch.Tensor) -> tuple[object, ...]:
    per_channel = tensor.qscheme() in {
        torch.per_channel_affine,
        torch.per_channel_affine_float_qparams,
    }
    how: tuple[object, ...]
    if per_channel:
        how = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
        how = (*how, tensor.q_per_channel_axis())
    else:
        how = (tensor.q_scale(), tensor.q_zero_point())
    return tensor.int_repr(), how


def _rebuild_quantized(
    ints: torch.Tensor,
    how: tuple[Any, ...],
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    return _dress(torch_compat.rebuild_quantized(ints, how), is_parameter, requires_grad)


# -- arrays ------------------------------------------------------------------------------


def _reduce_array(value: np.ndarray[Any, Any]) -> Any:
    if value.dtype.hasobject:
        return NotImplemented
    if not value.dtype.isnative and value.dtype.names is None:
        # A pickled array always arrives in native order; so does ours.
        value = value.astype(value.dtype.newbyteorder("="))
    if not (value.flags.c_contiguous or value.flags.f_contiguous):
        value = np.ascontiguousarray(value)
    order = "C" if value.flags.c_contiguous else "F"
    return _rebuild_array, (_Flat(value), value.dtype, value.shape, order)


@final
class _Flat:
    """The bytes of an array, as a buffer that is writable on the other side.

    A read-only array (PIL's are) would arrive read-only; torch's transport copies it into
    one that is not. Here its memory is looked at anew, and nothing is copied.
    """

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _return_buffer, (_make_buffer(np.asarray(self)),)

    @property
    def __array_interface__(self) -> dict[str, object]:
        """NumPy's protocol: it keeps us, and so a temporary copy, alive under the bytes."""
        array = self._array
        place = (array.ctypes.data, False)  # the address; not read-only
        return {"version": 3, "shape": (array.nbytes,), "typestr": "|u1", "data": place}


def _return_buffer(buffer: object) -> object:
    return buffer


def _rebuild_array(
    buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
) -> np.ndarray[Any, Any]:
    if 0 in shape or not dtype.itemsize:
        return np.empty(shape, dtype, order)
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


# What multiprocessing itself knows how to send (sockets, connections, partial methods),
# without torch's entries, which would tie tensors to descriptors of a living worker.
_DISPATCH = dict(copyreg.dispatch_table) | {
    kind: reducer
    for kind, reducer in ForkingPickler._extra_reducers.items()  # type: ignore[attr-defined] # noqa: SLF001
    if not getattr(reducer, "__module__", "").startswith("torch")
}
