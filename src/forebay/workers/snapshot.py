"""Where a stream stands, as plain data: for a checkpoint, and to begin from.

Covers: random generators written as numbers and text that any format can hold (JSON too),
what is kept of a dataset that has a state of its own, and passing over batches that were
delivered before. Does not cover: when a snapshot is taken (worker.py), which one belongs to
which batch (flow/resume.py).

A checkpoint is data, never code: nothing of it is unpickled, so one from a stranger can make
a loader draw other numbers, and no more.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.workers.randomness import OwnState

Plain = dict[str, Any]
"""Values that JSON can hold, but for what the user's own `state_dict` gave."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a stream begins when its loader resumes.

    Attributes:
        snapshot: Where it stood; None as it was seeded.
        made: Batches that it had made in the epoch when the snapshot was taken.
        skipped: Batches after that, which were delivered too: an iterable passes over them.
        indices: What the sampler gives for each of them.
        epoch: As `seeding="batch"` counts.
        has_ended: Whether it has nothing more to give in this epoch.
    """

    snapshot: Plain | None
    made: int
    skipped: int
    indices: Any
    epoch: int
    has_ended: bool


# -- generators -----------------------------------------------------------------------------


def pack_generators(state: Any) -> Plain:
    """What `unpack_generators` takes: of an object with `python`, `numpy` and `torch`.

    The global generators of a process or a stream's own; None stays None.
    """
    return {
        "python": _pack_python(state.python),
        "numpy": _pack_numpy(state.numpy),
        "torch": pack_torch(state.torch),
    }


def unpack_generators(packed: Plain) -> tuple[Any, Any, Any]:
    """The states of Python's, NumPy's and torch's generator.

    Raises:
        Exception: `packed` is no such record.
    """
    return (
        _unpack_python(packed["python"]),
        _unpack_numpy(packed["numpy"]),
        unpack_torch(packed["torch"]),
    )


def pack_own(state: OwnState) -> Plain:
    """A stream's own generators (`forebay.rng()`)."""
    return pack_generators(state) | {"base_seed": state.base_seed, "number": state.number}


def unpack_own(packed: Plain) -> OwnState:
    """What `pack_own` was given."""
    return OwnState(packed["base_seed"], packed["number"], *unpack_generators(packed))


def pack_torch(state: torch.Tensor | None) -> str | None:
    """The state of one torch generator."""
    return None if state is None else _to_text(state.numpy().tobytes())


def unpack_torch(packed: str | None) -> torch.Tensor | None:
    """What `pack_torch` was given."""
    return None if packed is None else torch.frombuffer(_to_bytes(packed), dtype=torch.uint8)


def _pack_python(state: Any) -> Plain | None:
    if state is None:
        return None
    version, words, gauss = state
    return {
        "version": version,
        "words": _to_text(np.asarray(words, "<u4").tobytes()),
        "gauss": gauss,
    }


def _unpack_python(packed: Plain | None) -> Any:
    if packed is None:
        return None
    words = np.frombuffer(_to_bytes(packed["words"]), "<u4")
    return packed["version"], tuple(words.tolist()), packed["gauss"]


def _pack_numpy(state: Any) -> Plain | None:
    """Of a `RandomState`, a tuple; of a `Generator`'s PCG64, numbers already."""
    if state is None or isinstance(state, dict):
        return state
    name, words, position, has_gauss, gauss = state
    return {
        "name": name,
        "words": _to_text(np.asarray(words, "<u4").tobytes()),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _unpack_numpy(packed: Plain | None) -> Any:
    if packed is None or "words" not in packed:
        return packed
    words = np.frombuffer(_to_bytes(packed["words"]), "<u4").astype(np.uint32)
    return packed["name"], words, packed["position"], packed["has_gauss"], packed["gauss"]


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _to_bytes(text: str) -> bytearray:
    return bytearray(base64.b64decode(text))


# -- datasets with a state --------------------------------------------------------------------


def has_state(thing: object) -> bool:
    """Whether an object keeps a state that can be taken and put back."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def pack_dataset(dataset: Any, fetcher: Any) -> Plain:
    """The states of a dataset and of its iterator: those that there are, each once."""
    iterator = getattr(fetcher, "dataset_iter", None)
    is_own_iterator = iterator is dataset and has_state(iterator)
    packed: Plain = {
        "dataset_state": dataset.state_dict()
        if has_state(dataset) and not is_own_iterator
        else None,
        "fetcher_state": None,
    }
    if iterator is not None:
        packed["fetcher_state"] = {
            "dataset_iter_state": iterator.state_dict() if has_state(iterator) else None,
            "fetcher_ended": fetcher.ended,
        }
    return packed


def is_stateful(dataset: Any, fetcher: Any) -> bool:
    """Whether passing over batches is for the dataset to do, not for us."""
    return has_state(dataset) or has_state(getattr(fetcher, "dataset_iter", None))


def put_dataset(dataset: Any, packed: Plain) -> None:
    """Give a dataset its state back, before it is asked for an iterator."""
    if packed.get("dataset_state") is not None:
        dataset.load_state_dict(packed["dataset_state"])


def put_iterator(fetcher: Any, packed: Plain) -> None:
    """Give the iterator of an iterable dataset its state back."""
    state = packed.get("fetcher_state")
    if state is None or not hasattr(fetcher, "dataset_iter"):
        return
    if state["dataset_iter_state"] is not None:
        fetcher.dataset_iter.load_state_dict(state["dataset_iter_state"])
    fetcher.ended = state["fetcher_ended"]


def pass_over(fetcher: Any, indices: Any, *, collates: bool) -> None:
    """Have an iterable dataset make one batch again that nobody wants.

    Args:
        fetcher: torch's.
        indices: What the sampler gives for it.
        collates: Whether collating is more than copying: a function of the user's may draw
            random numbers.
    """
    if fetcher.ended:
        return
    with contextlib.suppress(Exception):  # the consumer met it in its time
        if collates or indices is None:
            fetcher.fetch(indices)
        elif len(list(itertools.islice(fetcher.dataset_iter, len(indices)))) < len(indices):
            fetcher.ended = True
