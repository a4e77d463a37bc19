"""The datasets of the parity jobs: small, and importable by name in a spawned process.

Each shows something that a loader may get wrong: where the randomness of a sample comes from,
state that the dataset keeps in its worker, how an iterable is split, what is asked when.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

IMAGE_SHAPE = (12, 10, 3)


def tensor_pairs(length: int = 22) -> TensorDataset:
    """Rows of floats with their labels: the tutorial's dataset."""
    rows = torch.arange(length * 5, dtype=torch.float32).reshape(length, 5) / 7
    return TensorDataset(rows, torch.arange(length))


class Squares(Dataset[Any]):
    """Ints, the smallest samples there are."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index * index


class Made(Dataset[Any]):
    """Whatever `make(index)` returns. `make` is a function of a module, so that it pickles."""

    def __init__(self, make: Callable[[int], Any], length: int = 6) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class CompressedPictures(Dataset[Any]):
    """Decoding and augmentation as image pipelines do it: flip, crop and noise at random.

    Draws from all three global generators for each sample.
    """

    def __init__(self, length: int = 20) -> None:
        pixels = int(np.prod(IMAGE_SHAPE))
        plain = [((np.arange(pixels) * (n + 3)) % 251).astype(np.uint8) for n in range(length)]
        self.files = [zlib.compress(picture.tobytes()) for picture in plain]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        flat = np.frombuffer(zlib.decompress(self.files[index]), np.uint8)
        picture = flat.reshape(IMAGE_SHAPE)
        if random.random() < 0.5:
            picture = picture[:, ::-1]
        top, left = np.random.randint(0, 4, size=2)
        cut = torch.from_numpy(picture[top : top + 8, left : left + 6].copy()).permute(2, 0, 1)
        return cut.float() / 255 + torch.randn(3, 1, 1) / 8, random.gauss(0, 1)


class Draws(Dataset[Any]):
    """Nothing but randomness: one draw from each global generator, and who made the sample."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        info = get_worker_info()
        worker = -1 if info is None else info.id
        return index, worker, random.random(), float(np.random.standard_normal()), torch.randn(2)


class UnevenDraws(Draws):
    """Draws a number of times that depends on what was drawn: any slip of the state shows."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        for _ in range(random.randint(0, 3)):
            np.random.rand()
        for _ in range(int(np.random.randint(0, 3))):
            torch.rand(1)
        for _ in range(int(torch.randint(0, 3, (1,)))):
            random.gauss(0, 1)
        return index, random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))


class OwnGenerators(Dataset[Any]):
    """Keeps its own generators, a counter and a cache in itself, as many datasets do.

    torch's loader cannot send a `torch.Generator` to a spawned worker: `torch_too=False` for that.
    """

    def __init__(self, length: int = 18, *, torch_too: bool = True) -> None:
        self.length = length
        self.python = random.Random(5)
        self.numpy = np.random.default_rng(6)
        self.torch = torch.Generator().manual_seed(7) if torch_too else None
        self.asked = 0
        self.cache: dict[int, float] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, float, float, torch.Tensor]:
        self.asked += 1
        cached = self.cache.setdefault(index, self.python.random())
        return index, self.asked, cached, self.numpy.random(), torch.rand(2, generator=self.torch)


class Fetched(Dataset[Any]):
    """Offers `__getitems__`; the samples tell how many were asked for in one call."""

    def __init__(self, length: int = 21) -> None:
        self.length = length
        self.calls = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, -1, -1

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, int, int]]:
        self.calls += 1
        return [(index, len(indices), self.calls) for index in indices]


class Tagged(Dataset[Any]):
    """Each sample carries an attribute of the dataset, which the training code may change."""

    def __init__(self, length: int = 12) -> None:
        self.length = length
        self.tag = 0
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, self.tag, self.epoch


class ByKey(Dataset[Any]):
    """A mapping: asked with whatever the sampler yields, and it gives back what it was asked."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: Any) -> Any:
        return key


class WhoAmI(Dataset[Any]):
    """What `get_worker_info` and the thread count say where the sample is made."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int, int, int, bool, int]:
        info = get_worker_info()
        if info is None:
            return index, -1, -1, -1, True, torch.initial_seed()
        own = info.dataset.__class__ is WhoAmI
        return index, info.id, info.num_workers, info.seed, own, torch.initial_seed()


class Sharded(IterableDataset[Any]):
    """An iterable that each worker reads a stride of, with a draw for each sample.

    `sizes` says how many samples each worker has; a worker without a size has none.
    """

    def __init__(self, sizes: Sequence[int] = (9, 9, 9, 9), *, stated: int | None = None) -> None:
        self.sizes = tuple(sizes)
        self.stated = stated
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[int, int, int, float]]:
        self.passes += 1
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        size = sum(self.sizes) if info is None else (*self.sizes, *[0] * workers)[worker]
        for n in range(size):
            yield worker + n * workers, worker, self.passes, random.random()


class SizedSharded(Sharded):
    """The same with a length, which may be stated wrongly."""

    def __len__(self) -> int:
        return sum(self.sizes) if self.stated is None else self.stated


class Countdown(IterableDataset[Any]):
    """Its own iterator, which ends by raising `StopIteration` itself, and stays at its end."""

    def __init__(self, start: int = 7) -> None:
        self.left = start

    def __iter__(self) -> Countdown:
        return self

    def __next__(self) -> int:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return self.left


class Windows(IterableDataset[Any]):
    """Yields ready-made batches of changing length, for `batch_size=None`."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for n in range(5):
            yield {"window": torch.full((n, 3), n / 3), "drawn": torch.randn(n)}


class Failing(Dataset[Any]):
    """Raises `make(index)` for the indices in `bad`; the others are fine."""

    def __init__(
        self, make: Callable[[int], Exception], bad: Sequence[int], length: int = 12
    ) -> None:
        self.make = make
        self.bad = frozenset(bad)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise self.make(index)
        return index


class FailingIterable(IterableDataset[Any]):
    """An iterable that raises at its start, or after some samples."""

    def __init__(self, after: int | None) -> None:
        self.after = after

    def __iter__(self) -> Iterator[int]:
        if self.after is None:
            raise LookupError("no shard was found for this worker")
        return self._samples(self.after)

    def _samples(self, after: int) -> Iterator[int]:
        yield from range(after)
        raise OSError("the shard ends in the middle of a record")


class Counted(Dataset[Any]):
    """Counts its samples in shared memory, under its lock."""

    def __init__(self, value: Any, length: int = 14) -> None:
        self.value = value
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        with self.value.get_lock():
            self.value.value += 1
        return index


class Meeting(Dataset[Any]):
    """Each worker waits at a barrier for all others before its first sample, as torch allows."""

    def __init__(self, barrier: Any, length: int) -> None:
        self.barrier = barrier
        self.length = length
        self.met = False

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not self.met:
            self.barrier.wait(timeout=60)
            self.met = True
        return index


class Registered(Dataset[Any]):
    """Notes each index in a dict, list and lock that a manager process holds."""

    def __init__(self, seen: Any, order: Any, lock: Any, length: int = 10) -> None:
        self.seen = seen
        self.order = order
        self.lock = lock
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        with self.lock:
            self.seen[index] = self.seen.get(index, 0) + 1
            self.order.append(index)
        return index, self.seen[index]


class Blocked(Dataset[Any]):
    """One sample comes only when `gate`, a raw shared value, is no longer 0; the others at once.

    A raw value and not an event: an event cannot be set while a dead process waits for it.
    """

    def __init__(self, gate: Any, blocked: int, length: int = 4) -> None:
        self.gate = gate
        self.blocked = blocked
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        while index == self.blocked and self.gate.value == 0:
            time.sleep(0.01)
        return index
