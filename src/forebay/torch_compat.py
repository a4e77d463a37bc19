"""The only file that touches torch's private names.

Covers: every name of torch's that has a leading underscore or lives in a private module,
given a public name of ours, and a self-test that runs at import: a torch that moved one
of them is met here, with its version in the message, not in the middle of an epoch.
Does not cover: behaviour of ours.

Compared by reading over torch 2.4, 2.6, 2.8, 2.10 and 2.13; run with 2.13.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import linecache
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.multiprocessing
import torch.utils.data
import torch.utils.data.distributed
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _SingleProcessDataLoaderIter,
)

try:
    from torch.utils.data import IterDataPipe, MapDataPipe
except ImportError:  # a torch that has dropped DataPipes
    IterDataPipe = MapDataPipe = ()  # type: ignore[misc,assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    TakeBytes: TypeAlias = Callable[[int], torch.Tensor | None]

__all__ = [
    "STORAGE_TYPES",
    "BaseLoaderIterator",
    "SingleProcessIterator",
    "WorkerException",
    "accepts_keyword",
    "collate_privately",
    "count_owners",
    "draws_nothing_shared",
    "generate_numpy_state",
    "has_collate_extensions",
    "identify_storage",
    "is_datapipe",
    "is_iterable_kind",
    "is_plain",
    "is_profiling",
    "is_python_exiting",
    "make_fetcher",
    "nested_parts",
    "pin_memory",
    "rebuild_nested",
    "rebuild_quantized",
    "rebuild_typed_storage",
    "reduce_device_tensor",
    "seed_torch",
    "set_thread_info",
    "set_worker_info",
    "set_worker_signals",
    "set_worker_thread_name",
    "stack_privately_here",
    "tell_threads_apart",
    "untype_storage",
    "use_one_thread_here",
]

BaseLoaderIterator = _BaseDataLoaderIter
SingleProcessIterator = _SingleProcessDataLoaderIter
WorkerException = ExceptionWrapper
STORAGE_TYPES: tuple[type, ...] = (torch.UntypedStorage, torch.TypedStorage)
_worker: ModuleType = _utils.worker


# -- the loader ---------------------------------------------------------------------------


_INIT_PARAMETERS = inspect.signature(torch.utils.data.DataLoader.__init__).parameters


def accepts_keyword(name: str) -> bool:
    """Whether this torch's DataLoader has the keyword (`in_order` came with 2.6)."""
    return name in _INIT_PARAMETERS


def draws_nothing_shared(sampler: object) -> bool:
    """Whether a sampler, once begun, draws from no random generator that others use.

    Only torch's own classes are known; a subclass may do anything.
    """
    kind = type(sampler)
    if kind is torch.utils.data.BatchSampler:
        return draws_nothing_shared(sampler.sampler)  # type: ignore[attr-defined]
    if kind is torch.utils.data.RandomSampler:
        return sampler.generator is None  # type: ignore[attr-defined]
    return kind in _QUIET_SAMPLERS


_QUIET_SAMPLERS = {
    torch.utils.data.SequentialSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
    torch.utils.data.distributed.DistributedSampler,
}


def is_datapipe(dataset: object) -> bool:
    """Whether torch's own engine must serve `dataset` (shared seeds, sharding, graph)."""
    return isinstance(dataset, (IterDataPipe, MapDataPipe))


def is_iterable_kind(kind: int) -> bool:
    """Whether `loader._dataset_kind` is that of an IterableDataset."""
    return bool(kind == _DatasetKind.Iterable)


def is_profiling() -> bool:
    """Whether autograd's profiler records: only then is `record_function` worth 15 us."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def is_python_exiting() -> bool:
    """Whether the interpreter is shutting down, by torch's own flag (None: past it)."""
    return getattr(_utils, "python_exit_status", False) is not False


def pin_memory(data: Any) -> Any:
    """`data` with every tensor in pinned memory, by torch's rules."""
    return _utils.pin_memory.pin_memory(data)


# -- in a worker -----------------------------------------------------------------------------


def set_worker_info(worker_id: int, num_workers: int, seed: int, dataset: object) -> None:
    """Make `torch.utils.data.get_worker_info()` answer as in torch's own worker."""
    info = _worker.WorkerInfo(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)
    _worker._worker_info = info  # type: ignore[attr-defined]


def tell_threads_apart() -> None:
    """Let `get_worker_info()` answer for the thread that asks, however it was imported.

    torch keeps the info in a variable of a module. People import the function by name, so it
    is this one function object whose code must look elsewhere first. It goes on to torch's
    variable in every thread that is no worker of ours, so it need not be undone.
    """
    if not hasattr(_worker, "_forebay_threads"):
        _worker._forebay_threads = _thread_infos  # type: ignore[attr-defined]
        _worker._forebay_collate = _TORCHS_TENSOR_COLLATE.__code__  # type: ignore[attr-defined]
        _worker._forebay_stack = _stack.__code__  # type: ignore[attr-defined]
        _worker._forebay_frame = sys._getframe  # type: ignore[attr-defined]
        _worker.get_worker_info.__code__ = _find_info.__code__


def _find_info() -> Any:
    # Runs with the globals of torch's module. torch's tensor collate asks in order to stack into
    # shared memory, for another process: what a thread stacks needs none. Our own collate leaves
    # to it what it refuses, and a thread is to hear the refusals of a worker.
    info = getattr(_forebay_threads, "info", None)  # type: ignore[name-defined]  # noqa: F821
    if info is None:
        return _worker_info  # type: ignore[name-defined]  # noqa: F821
    caller = _forebay_frame(1)  # type: ignore[name-defined]  # noqa: F821
    if caller.f_code is not _forebay_collate:  # type: ignore[name-defined]  # noqa: F821
        return info
    return info if caller.f_back.f_code is _forebay_stack else None  # type: ignore[name-defined]  # noqa: F821


_thread_infos = threading.local()


def set_thread_info(worker_id: int, num_workers: int, seed: int, dataset: object) -> None:
    """The same as `set_worker_info` for this thread alone, after `tell_threads_apart`."""
    more = {"worker_method": "thread"} if _KNOWS_THREADS else {}
    _thread_infos.info = _worker.WorkerInfo(
        id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset, **more
    )


_KNOWS_THREADS = "worker_method" in inspect.signature(_worker.WorkerInfo).parameters


def use_one_thread_here() -> None:
    """Have torch's operators in this thread, and in no other, use one thread.

    `torch.set_num_threads` would change it for all threads that come later. OpenMP keeps the
    number for each thread; torch sets it at a thread's first look, so that comes first.
    """
    torch.get_num_threads()
    with contextlib.suppress(OSError, AttributeError):  # a torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)


def set_worker_signals() -> None:
    """torch's C handlers: SIGBUS, SIGSEGV and SIGFPE say what happened before they kill."""
    _utils.signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]


def set_worker_thread_name() -> None:
    """The name that tools look for in `top`; absent before torch 2.6."""
    set_name = getattr(torch.multiprocessing, "_set_thread_name", None)
    if set_name is not None:
        set_name("pt_data_worker")


def seed_torch(seed: int) -> None:
    """`torch.manual_seed` in a worker, at a tenth of its memory where no device was built in.

    torch's own also queues a call for each kind of accelerator, with a formatted stack: that
    reads the source of every frame, 6 MiB of private memory a worker (measured).
    """
    if any(is_built() for is_built in _DEVICE_BACKENDS):
        torch.manual_seed(seed)
        linecache.clearcache()
    else:
        torch.default_generator.manual_seed(seed)


_DEVICE_BACKENDS: tuple[Callable[[], bool], ...] = (
    torch.backends.cuda.is_built,
    torch.backends.mps.is_built,
    lambda: bool(torch.xpu._is_compiled()) if hasattr(torch, "xpu") else False,
    lambda: torch._C._get_privateuse1_backend_name() != "privateuseone",
)


def generate_numpy_state(base_seed: int, worker_id: int) -> list[int]:
    """Four 32-bit words: torch's seed of NumPy's global generator in a worker."""
    return list(_worker._generate_state(base_seed, worker_id))


def make_fetcher(
    kind: int,
    dataset: Any,
    auto_collation: bool,
    collate_fn: Callable[[Any], Any],
    drop_last: bool,
) -> Any:
    """torch's fetcher: `fetch(indices)` gives a collated batch."""
    return _DatasetKind.create_fetcher(kind, dataset, auto_collation, collate_fn, drop_last)


# -- collate -----------------------------------------------------------------------------------

_TORCHS_TENSOR_COLLATE = _utils.collate.collate_tensor_fn
_TORCHS_REGISTRY = dict(_utils.collate.default_collate_fn_map)


def has_collate_extensions() -> bool:
    """Whether the user registered anything in `default_collate_fn_map`."""
    return _utils.collate.default_collate_fn_map != _TORCHS_REGISTRY


def collate_privately(batch: Sequence[Any], take: TakeBytes | None = None) -> Any:
    """torch's `default_collate` without the fresh shared storage that it makes in a worker.

    Args:
        batch: The samples.
        take: Gives so many bytes of memory to stack into, or None when it has none left;
            without it, stacks go to private memory.
    """
    registry = dict(_utils.collate.default_collate_fn_map)
    if registry.get(torch.Tensor) in (_TORCHS_TENSOR_COLLATE, _stack_here):
        registry[torch.Tensor] = functools.partial(_stack, take)
    return _utils.collate.collate(batch, collate_fn_map=registry)


def stack_privately_here() -> None:
    """In a worker: have collate functions that call `default_collate` stack to private memory.

    torch's stacks into a fresh shared object, of which we would make a copy, and which a full
    /dev/shm (64 MiB in many containers) refuses.
    """
    registry = _utils.collate.default_collate_fn_map
    if registry.get(torch.Tensor) is _TORCHS_TENSOR_COLLATE:
        registry[torch.Tensor] = _TORCHS_REGISTRY[torch.Tensor] = _stack_here


def _stack_here(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    return _stack(None, batch, collate_fn_map=collate_fn_map)


def _stack(
    take: TakeBytes | None, batch: list[torch.Tensor], *, collate_fn_map: Any = None
) -> torch.Tensor:
    elem = batch[0]
    # torch asks every element for its size first: an element that has none fails there.
    elements = sum(x.numel() for x in batch)
    if not is_plain(elem) or elements != elem.numel() * len(batch):
        result: torch.Tensor = _TORCHS_TENSOR_COLLATE(batch, collate_fn_map=collate_fn_map)
        return result  # or its own error
    # torch stacks into an `out` of the first element's kind: other dtypes are cast to it.
    return torch.stack(batch, 0, out=_make_out(take, elem, len(batch)))


def is_plain(tensor: Any) -> bool:
    """Whether `tensor` is a torch.Tensor proper, strided, on the CPU, with nothing special."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _make_out(take: TakeBytes | None, elem: torch.Tensor, length: int) -> torch.Tensor:
    size_bytes = elem.numel() * elem.element_size() * length
    flat = take(size_bytes) if take is not None and size_bytes else None
    if flat is None:
        return elem.new_empty((length, *elem.shape))
    return flat.view(elem.dtype).view(length, *elem.shape)


# -- tensors of every kind -------------------------------------------------------------------


def nested_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Buffer, sizes, strides and offsets of a strided nested tensor."""
    return (
        tensor.values(),
        tensor._nested_tensor_size(),
        tensor._nested_tensor_strides(),
        tensor._nested_tensor_storage_offsets(),
    )


def rebuild_nested(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The strided nested tensor that `nested_parts` took apart."""
    return torch._nested_view_from_buffer_copy(*parts)


def rebuild_quantized(ints: torch.Tensor, how: tuple[Any, ...]) -> torch.Tensor:
    """A quantised tensor from its integers and its scale(s) and zero point(s)."""
    if len(how) == 2:  # noqa: PLR2004 - (scale, zero point) or (scales, zero points, axis)
        return torch._make_per_tensor_quantized_tensor(ints, *how)
    return torch._make_per_channel_quantized_tensor(ints, *how)


def identify_storage(storage: torch.UntypedStorage) -> int:
    """What is equal for two Python objects of one storage: the address of torch's own."""
    return int(storage._cdata)


def is_counted(storage: torch.UntypedStorage) -> bool:
    """Whether torch allocated this memory itself, and nobody has looked at it from outside.

    What came from elsewhere (`from_numpy`, a mapped file, shared memory), or was handed to
    NumPy, has owners that torch does not count. It cannot be resized.
    """
    return storage.resizable()


def is_sole_owner(flat: torch.Tensor) -> bool:
    """Whether `flat`, and one NumPy array over it, are all that refers to its storage.

    Only of memory that torch counts all owners of: see `is_counted`.
    """
    storage = flat.untyped_storage()
    # A Python object of the storage that somebody else holds is this very object.
    return (sys.getrefcount(storage), _count_uses(storage)) == _ALONE


def _count_uses(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def _measure_alone() -> tuple[int, int]:
    flat = torch.empty(8, dtype=torch.uint8)
    array = flat.numpy()
    storage = flat.untyped_storage()
    found = sys.getrefcount(storage), _count_uses(storage)
    del array  # not before: it is one of the two
    return found


_ALONE = _measure_alone()


def count_owners(tensor: torch.Tensor) -> int:
    """How many others refer to the memory of `tensor`, beside a usual number.

    A view holds the tensor that it was taken from. That one does not count if nobody but its
    views holds it: a transposed image is as much alone as the image was.
    """
    uses = _count_uses(tensor.untyped_storage())
    if tensor._is_view():
        uses += sys.getrefcount(tensor._base) - _REFERENCES_OF_LONE_BASE - 1
    return uses


def _count_references_of_lone_base() -> int:
    view = torch.zeros(2)[1:]
    return sys.getrefcount(view._base)


_REFERENCES_OF_LONE_BASE = _count_references_of_lone_base()


def untype_storage(storage: Any) -> torch.UntypedStorage:
    """The untyped storage within, without the deprecation warning."""
    if isinstance(storage, torch.UntypedStorage):
        return storage
    untyped: torch.UntypedStorage = storage._untyped_storage
    return untyped


def rebuild_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """A TypedStorage over an untyped one, without the deprecation warning."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def reduce_device_tensor(tensor: torch.Tensor) -> Any:
    """torch's reduction of a tensor on an accelerator: an inter-process handle."""
    from torch.multiprocessing import reductions

    return reductions.reduce_tensor(tensor)


def _iterate_names() -> Iterator[tuple[object, str]]:
    yield _BaseDataLoaderIter, "_next_index"
    yield _BaseDataLoaderIter, "_reset"
    yield _DatasetKind, "create_fetcher"
    yield _worker, "WorkerInfo"
    yield _worker, "_worker_info"
    yield _worker, "get_worker_info"
    yield _worker, "_generate_state"
    yield _utils.pin_memory, "pin_memory"
    yield _utils.collate, "default_collate_fn_map"
    yield _utils.signal_handling, "_set_worker_signal_handlers"
    yield torch.autograd, "_profiler_enabled"
    yield torch._C, "_storage_Use_Count"
    yield torch, "_nested_view_from_buffer_copy"
    yield torch, "_make_per_tensor_quantized_tensor"
    yield torch, "_make_per_channel_quantized_tensor"


def _check_names() -> None:
    missing = [f"{home!r}.{name}" for home, name in _iterate_names() if not hasattr(home, name)]
    if missing:
        message = (
            f"torch {torch.__version__} has no {', '.join(missing)}, which forebay stands on. "
            "Nothing was started. Use a torch between 2.4 and 2.13, or a newer forebay."
        )
        raise ImportError(message)


_check_names()
