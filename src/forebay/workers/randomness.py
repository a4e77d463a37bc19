"""`forebay.rng()`: random generators that belong to a stream, whoever carries it.

Covers: the three generators of a stream, made when they are first asked for, and finding
those of whoever asks. Does not cover: the global generators (streams.py), which torch ties
to a process: threads of one process share them, so what a dataset draws from those depends
on which thread came first.

The one idea: a stream's generators follow from (base seed, number of the stream) alone, as
torch seeds its workers. torch's own worker knows both, so the draws are the same under
worker processes, worker threads and torch's loader.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import numpy.random
import torch
import torch.utils.data

from forebay import torch_compat


class OwnState(NamedTuple):
    """Where a stream's own generators stand; None for those that nobody has asked for.

    Attributes:
        base_seed, number: What those that nobody has asked for will be seeded from.
    """

    base_seed: int
    number: int
    python: Any
    numpy: Any
    torch: Any


@final
class Generators:
    """Three random generators that nobody else draws from.

    Each is made when it is first asked for. Drawing from several threads at once is safe, and
    then nothing is said about who gets which number.

    Args:
        base_seed: Drawn by torch's iterator, once for all streams.
        number: The stream.
    """

    __slots__ = ("_base_seed", "_made", "_number")

    def __init__(self, base_seed: int, number: int) -> None:
        self._base_seed = base_seed
        self._number = number
        self._made: dict[str, Any] = {}

    @property
    def python(self) -> random.Random:
        """A `random.Random`."""
        made: random.Random | None = self._made.get("python")
        if made is None:
            made = self._keep("python", random.Random(self._seed))
        return made

    @property
    def numpy(self) -> np.random.Generator:
        """A `numpy.random.Generator`."""
        made: np.random.Generator | None = self._made.get("numpy")
        if made is None:
            made = self._keep("numpy", np.random.Generator(self._make_bits()))
        return made

    @property
    def torch(self) -> torch.Generator:
        """A `torch.Generator` on the CPU: give it as `generator=`."""
        made: torch.Generator | None = self._made.get("torch")
        if made is None:
            made = self._keep("torch", torch.Generator().manual_seed(self._seed))
        return made

    def reseed(self, base_seed: int, number: int) -> None:
        """Begin anew from another seed; those that somebody holds already begin anew as well."""
        self._base_seed, self._number = base_seed, number
        made = self._made
        if "python" in made:
            made["python"].seed(self._seed)
        if "numpy" in made:
            made["numpy"].bit_generator.state = self._make_bits().state
        if "torch" in made:
            made["torch"].manual_seed(self._seed)

    def take_state(self) -> OwnState:
        """Where they stand now."""
        made = self._made
        return OwnState(
            self._base_seed,
            self._number,
            made["python"].getstate() if "python" in made else None,
            made["numpy"].bit_generator.state if "numpy" in made else None,
            made["torch"].get_state() if "torch" in made else None,
        )

    def put_state(self, state: OwnState) -> None:
        """Go on from `state`, which another process may have taken."""
        self.reseed(state.base_seed, state.number)
        if state.python is not None:
            self.python.setstate(state.python)
        if state.numpy is not None:
            self.numpy.bit_generator.state = state.numpy
        if state.torch is not None:
            self.torch.set_state(state.torch)

    @property
    def _seed(self) -> int:
        return self._base_seed + self._number

    def _make_bits(self) -> np.random.PCG64:
        return np.random.PCG64(torch_compat.generate_numpy_state(self._base_seed, self._number))

    def _keep(self, name: str, made: Any) -> Any:
        return self._made.setdefault(name, made)  # of two threads that ask, one is first


@final
class _Here:
    """Whose generators this process uses outside of worker threads."""

    def __init__(self) -> None:
        self.stream: Generators | None = None  # of the stream that runs in this process
        self.torchs: tuple[Any, Generators] | None = None  # torch's worker, and its generators
        self.main: dict[int, Generators] = {}  # one: torch's initial seed, and those of it


_here = _Here()
_thread = threading.local()


def rng() -> Generators:
    """The random generators of the stream that makes the current sample.

        def __getitem__(self, index):
            angle = forebay.rng().python.uniform(-10, 10)
            noise = torch.randn(3, generator=forebay.rng().torch)

    Each stream (torch's logical worker) has its own, seeded from the loader's base seed and the
    number of the worker. What is drawn from them is the same for worker processes, worker
    threads and torch's own loader, in each run that begins with the same seed. With
    `seeding="batch"` they begin anew with each batch, and do not depend on `num_workers`.

    Outside of a stream they are the process's, seeded from `torch.initial_seed()` and made anew
    when that changes. Any thread may ask; a thread that a dataset starts itself is not one of
    the loader's, and under `worker_backend="thread"` gets the process's.

    Returns:
        An object with `python` (a `random.Random`), `numpy` (a `numpy.random.Generator`) and
        `torch` (a `torch.Generator` on the CPU). Ask for it where it is used: a stream may move
        to another process. 0.1 us.
    """
    own: Generators | None = getattr(_thread, "own", None) or _here.stream
    if own is not None:
        return own
    info = torch.utils.data.get_worker_info()
    return _find_of_process() if info is None else _find_of_torchs_worker(info)


def enter_stream(own: Generators | None) -> None:
    """From here on this process runs the stream that has `own`; None: none any more."""
    _here.stream = own


def enter_stream_in_thread(own: Generators | None) -> None:
    """The same for this thread alone."""
    _thread.own = own


@contextlib.contextmanager
def entered_here(own: Generators) -> Iterator[None]:
    """Have this thread run the stream that has `own`, for as long as one batch takes."""
    before: Generators | None = getattr(_thread, "own", None)
    _thread.own = own
    try:
        yield
    finally:
        _thread.own = before


def _find_of_process() -> Generators:
    seed = torch.initial_seed()
    found = _here.main.get(seed)
    if found is None:
        found = _here.main.setdefault(seed, Generators(seed, 0))  # one thread's, for all
        for old in [other for other in list(_here.main) if other != seed]:
            _here.main.pop(old, None)
    return found


def _find_of_torchs_worker(info: Any) -> Generators:
    known = _here.torchs
    if known is None or known[0] is not info:
        known = _here.torchs = (info, Generators(info.seed - info.id, info.id))
    return known[1]
