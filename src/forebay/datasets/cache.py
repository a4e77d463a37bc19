"""Samples kept in memory once, for all workers of a loader together.

Covers: what is cached and in which form, and what is handed out. Does not cover: where it
lies (store.py).

The one idea: a cache in `__getitem__` belongs to the worker, so it exists as often as there
are workers, and with workers that are not persistent it is lost each epoch. Here what one
worker made is read by all.

What is in stays in, and when there is no room for more, nothing more comes in. An epoch asks
for each sample once, so of what it asks for, no more can be there than was there when it began:
the share of the samples that fits is the best that any policy can reach, and this one reaches
it, in any order. One that replaces the oldest by the newest throws out samples before their
turn comes: with room for half of them, the least recently used policy finds 15 % in random
order (c + (1 - c) ln(1 - c) for room for c of the samples), and nothing in a fixed one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, final

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from forebay.datasets.bounds import parse_memory
from forebay.datasets.store import CacheStats, Store, find_least_bytes
from forebay.errors import DamagedBatch, InvalidMemory
from forebay.transport.codec import decode, encode

T_co = TypeVar("T_co", covariant=True)


class _MapStyle(Protocol[T_co]):
    """What torch calls a map-style dataset."""

    def __getitem__(self, index: Any, /) -> T_co: ...
    def __len__(self) -> int: ...


@final
class _Missing:
    """Stands for a sample that is not in the cache: `None` may be one."""


_MISSING = _Missing()

_HANDLE = re.compile(rb"\x8c.(torch\.)?multiprocessing\.", re.DOTALL)
"""A pickle that names such a module holds something that a living process must hand over, and
can only once: a tensor on an accelerator, a connection. (0x8c: a short text begins, as the name
of a module does.)"""


@final
class SharedCache(Dataset[T_co], Generic[T_co]):
    """The samples of `dataset`, each made once, as long as there is room.

    One store for all workers of all loaders that use this object, under every start method
    and worker backend, and for the process that made it. It lives as long as the object, so
    fresh workers find what those of earlier epochs have made. When it is full, what is in
    stays, and all else is made each time.

    What the dataset does at random it does once for a sample that is kept: put random
    transforms behind the cache. A sample that comes from the cache is a new object each time, as
    if it came from a worker process. Kept are samples with an index that is an `int` or a NumPy
    integer from 0 to `len(dataset)` - 1, if they can be pickled and lie in main memory; any other
    index goes to the dataset as it is. Samples are asked for in lists (`__getitems__`) if the
    dataset has the method.

    A worker that is killed, at any time, leaves neither a broken sample nor a lock behind. What a
    copy that was unpickled when the first process had ended is asked for, the dataset makes.

    Args:
        dataset: Map-style, with a length.
        memory: Bytes, a size like `"512MiB"`, or a share like `"25%"` of the memory limit. The
            store never takes more, its index included (8 bytes a sample), whatever the number
            of workers. Ranks of distributed training have a store each. It is no part of a
            loader's `memory_budget`.

    Attributes:
        dataset: As given.
        memory_bytes: What `memory` names.

    Raises:
        InvalidMemory: `memory` names no bytes, or no more than the index takes.
        TypeError: `dataset` is a stream, or has no length.
    """

    def __init__(self, dataset: _MapStyle[T_co], memory: int | str) -> None:
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                f"{type(dataset).__name__} is a stream, and nothing tells its samples apart. "
                "Give a map-style dataset."
            )
        self.dataset = dataset
        self.memory_bytes = parse_memory(memory)
        self._length = len(dataset)
        needed_bytes = find_least_bytes(self._length)
        if self.memory_bytes < needed_bytes:
            raise InvalidMemory.below(memory, self.memory_bytes, needed_bytes, self._length)
        self._store: Store | None = Store.create(self._length, self.memory_bytes)

    def stats(self) -> CacheStats:
        """What the cache did and holds, over all processes, since it was made."""
        return CacheStats(0, 0, 0, 0) if self._store is None else self._store.read_stats()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> T_co:
        found = self._find(index)
        if isinstance(found, _Missing):
            found = self._keep(index, self.dataset[index])
        sample: T_co = found
        return sample

    @property
    def __getitems__(self) -> Callable[[Sequence[Any]], list[T_co]]:
        """Absent where the dataset's is, as loaders ask for it: a list of samples costs memory."""
        if getattr(self.dataset, "__getitems__", None) is None:
            message = f"{type(self.dataset).__name__} has no __getitems__"
            raise AttributeError(message)
        return self._get_many

    def _get_many(self, indices: Sequence[Any]) -> list[T_co]:
        ask: Callable[[Sequence[Any]], Any] = self.dataset.__getitems__  # type: ignore[attr-defined]
        found = [self._find(index) for index in indices]
        missing = [at for at, sample in enumerate(found) if isinstance(sample, _Missing)]
        if not missing:
            return found
        made = ask([indices[at] for at in missing])
        if not isinstance(made, list) or len(made) != len(missing):
            # Not one sample for each index, against torch's rule: nothing here can be kept.
            as_it_is: list[T_co] = made if len(missing) == len(found) else ask(indices)
            return as_it_is
        for at, sample in zip(missing, made, strict=True):
            found[at] = self._keep(indices[at], sample)
        return found

    def _find(self, index: Any) -> Any:
        number = self._locate(index)
        if self._store is None or number is None:
            return _MISSING
        entry = self._store.try_read(number)
        if entry is None:
            return _MISSING
        try:
            sample = decode(*entry)
        except DamagedBatch:  # made anew, as if it were not there
            return _MISSING
        self._store.count_hit()
        return sample

    def _keep(self, index: Any, sample: Any) -> Any:
        """`sample`, which the dataset just made, and which is in the store now if it may be."""
        if self._store is None:
            return sample
        self._store.count_miss()
        number = self._locate(index)
        if number is None or not self._store.may_write(number):
            return sample
        try:
            encoded = encode(sample)
        except Exception:  # whatever a type of the user's raises: it cannot be kept
            return sample
        if not _HANDLE.search(encoded.head):
            with contextlib.suppress(OSError):  # the machine has no memory for it
                self._store.try_write(number, encoded)
        return sample

    def _locate(self, index: Any) -> int | None:
        """The number of an index in the store. A tensor may stand for an index or for a list."""
        if isinstance(index, (int, np.integer)) and 0 <= index < self._length:
            return int(index)
        return None
