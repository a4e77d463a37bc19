"""Where a loader stands, as a value: written to plain data, read from it, gone on from.

Covers: the layout of `state_dict()`, checking that a loader can go on from one, and setting
the main process's random generators meanwhile. Does not cover: knowing where a loader stands
(progress.py).

The keys that begin with an underscore are torchdata's, since frameworks read some of them and
Accelerate changes some. What forebay needs beyond those is under `forebay`.

*Whose generators.* Those given to the loader or its samplers are set to where they stood. The
process's own belong to the training code: a resumed epoch draws from them as they stood, and
then they are put back, unless they stood just there, as in a run that begins by the same seed.
With `num_workers=0` the dataset draws from them too, so there they are set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
import torch

from forebay import torch_compat
from forebay.errors import InvalidState, StateMismatch
from forebay.workers.snapshot import (
    Plain,
    Start,
    has_state,
    pack_generators,
    pack_torch,
    unpack_generators,
    unpack_torch,
)
from forebay.workers.streams import RandomState

_VERSION = 1
_LOCAL_STATES = ("dataset_state", "fetcher_state")


def _walk_samplers(loader: Any) -> Iterator[Any]:
    """The sampler of batches, and those within it."""
    seen: list[Any] = []
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None and not any(sampler is other for other in seen):
        yield sampler
        seen.append(sampler)
        sampler = getattr(sampler, "sampler", None)


def _find_generators(loader: Any) -> list[torch.Generator]:
    """Those that were given to the loader and its samplers, each once."""
    found: list[torch.Generator] = []
    for owner in (loader, *_walk_samplers(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
            found.append(generator)
    return found


@final
@dataclass(frozen=True, slots=True)
class MainState:
    """Random generators of the main process at one moment.

    Attributes:
        shared: The global ones; None when they do not matter.
        given: Those of the loader and its samplers.
    """

    shared: RandomState | None
    given: tuple[torch.Tensor, ...]

    @classmethod
    def take(cls, loader: Any, *, shared: bool = True) -> MainState:
        """As they stand now."""
        given = tuple(generator.get_state() for generator in _find_generators(loader))
        return cls(RandomState.take() if shared else None, given)

    def put(self, loader: Any) -> None:
        """Have them go on from here."""
        if self.shared is not None:
            self.shared.put()
        for generator, state in zip(_find_generators(loader), self.given, strict=True):
            generator.set_state(state)

    def write(self) -> Plain:
        """As plain data."""
        return {
            "shared": None if self.shared is None else pack_generators(self.shared),
            "given": [pack_torch(state) for state in self.given],
        }

    @classmethod
    def read(cls, plain: Plain) -> MainState:
        """What `write` gave."""
        shared = plain["shared"]
        given = tuple(state for text in plain["given"] if (state := unpack_torch(text)) is not None)
        return cls(None if shared is None else RandomState(*unpack_generators(shared)), given)


@dataclass(frozen=True, slots=True)
class SamplerPlace:
    """Where the samplers stand.

    Attributes:
        drawn: Batches drawn when these states were taken.
        states: Of each sampler, the outermost first; None for one without.
        iterator: Of the outermost one's iterator; None if it has none.
        epoch: What `set_epoch` was given last; None if nobody has such a thing.
    """

    drawn: int = 0
    states: tuple[Any, ...] = ()
    iterator: Any = None
    epoch: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether a sampler tells where it stands; else it is drawn from again."""
        return self.iterator is not None or any(state is not None for state in self.states)

    @classmethod
    def take(cls, loader: Any, iterator: object = None, drawn: int = 0) -> SamplerPlace:
        """Where they stand now."""
        samplers = list(_walk_samplers(loader))
        epochs = [s.epoch for s in samplers if hasattr(s, "set_epoch") and hasattr(s, "epoch")]
        return cls(
            drawn,
            tuple(s.state_dict() if has_state(s) else None for s in samplers),
            iterator.state_dict() if has_state(iterator) else None,  # type: ignore[attr-defined]
            epochs[0] if epochs and isinstance(epochs[0], int) else None,
        )

    def put(self, loader: Any, *, is_running: bool) -> None:
        """Give the samplers their states back, before they are asked for an iterator."""
        for sampler, state in zip(_walk_samplers(loader), self.states, strict=False):
            if state is not None and has_state(sampler):
                sampler.load_state_dict(state)
            elif is_running and self.epoch is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)

    def put_iterator(self, iterator: Any) -> None:
        """Give the outermost sampler's iterator its state back."""
        if self.iterator is not None and has_state(iterator):
            iterator.load_state_dict(self.iterator)


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """Where a stream stands.

    Attributes:
        snapshot: Its generators and its dataset's state at some batch; None as it was seeded.
        since: Batches delivered after that one.
        delivered: Batches delivered in this epoch.
        has_ended: Its iterable dataset is exhausted.
    """

    snapshot: Plain | None
    since: int
    delivered: int
    has_ended: bool


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a loader stands.

    Attributes:
        num_workers, batch_size, seeding, is_iterable: Of the loader.
        is_running: In the middle of an epoch; else the next thing is a new one.
        is_finished: An epoch was run to its end, and no other begun.
        delivered: Batches of the epoch that the consumer got.
        epoch: Epochs that the iterator had begun before this one, or the next.
        base_seed: The iterator's; None when the next iterator draws its own.
        is_seeded: Whether `start` is from after the base seed was drawn.
        start: The main process's generators when the epoch began.
        now: The same at this moment.
        sampler: Where the samplers stand.
        streams: Where the streams stand; none with `num_workers=0`.
        last_stream: Whose batch was delivered last; -1 before the first.
        missing: Numbers of batches before the latest that were not delivered yet.
        local: With `num_workers=0`: the dataset's state and `forebay.rng()`'s.
    """

    num_workers: int
    batch_size: int | None
    seeding: str
    is_iterable: bool
    is_running: bool
    is_finished: bool
    delivered: int
    epoch: int
    base_seed: int | None
    is_seeded: bool
    start: MainState
    now: MainState
    sampler: SamplerPlace
    streams: tuple[StreamPlace, ...] = ()
    last_stream: int = -1
    missing: tuple[int, ...] = ()
    local: Plain | None = None

    # -- plain data -----------------------------------------------------------------------

    def write(self) -> Plain:
        """The state dict: JSON can hold it if it can hold what the user's objects tell."""
        plain: Plain = {
            "_num_yielded": self.delivered,
            "_sampler_iter_yielded": self.delivered,
            "_sampler_iter_state": self.sampler.iterator,
            "_index_sampler_state": self._write_index_sampler(),
            "_iterator_finished": self.is_finished,
            "_IterableDataset_len_called": None,
            "_shared_seed": None,
            "forebay": {
                "version": _VERSION,
                "num_workers": self.num_workers,
                "batch_size": self.batch_size,
                "seeding": self.seeding,
                "is_iterable": self.is_iterable,
                "is_running": self.is_running,
                "epoch": self.epoch,
                "base_seed": self.base_seed,
                "is_seeded": self.is_seeded,
                "start": self.start.write(),
                "now": self.now.write(),
                "sampler": asdict(self.sampler) | {"states": list(self.sampler.states)},
                "own": (self.local or {}).get("own"),
                "missing": list(self.missing),
            },
        }
        if self.num_workers == 0:
            local = self.local or {}
            return plain | {name: local.get(name) for name in _LOCAL_STATES}
        return plain | {"_steps_since_snapshot": 0, "_snapshot": self._write_streams()}

    def _write_index_sampler(self) -> Any:
        """torchdata's record of the sampler of batches; Accelerate counts in it."""
        states = self.sampler.states
        if states and states[0] is not None:
            return states[0]
        if self.is_iterable or self.batch_size is None:
            return None
        return {"samples_yielded": self.delivered * self.batch_size}

    def _write_streams(self) -> Plain:
        return {
            "_snapshot_step": self.delivered,
            "_last_yielded_worker_id": self.last_stream,
            "_main_snapshot": {
                "_num_workers": self.num_workers,
                "_base_seed": self.base_seed,
                "_sampler_iter_yielded": self.delivered,
            },
            "_worker_snapshots": {
                f"worker_{number}": self._write_stream(number, place)
                for number, place in enumerate(self.streams)
            },
        }

    def _write_stream(self, number: int, place: StreamPlace) -> Plain:
        snapshot = place.snapshot or {"dataset_state": None, "fetcher_state": None}
        fetcher_state = snapshot["fetcher_state"]
        if self.is_iterable:
            fetcher_state = fetcher_state or {"dataset_iter_state": None, "fetcher_ended": False}
            if place.has_ended:
                fetcher_state = fetcher_state | {"fetcher_ended": True}
        return {
            "worker_id": number,
            "dataset_state": snapshot["dataset_state"],
            "fetcher_state": fetcher_state,
            "forebay": {
                "is_known": place.snapshot is not None,
                "generators": snapshot.get("generators"),
                "own": snapshot.get("own"),
                "is_new_epoch": snapshot.get("is_new_epoch", False),
                "since": place.since,
                "delivered": place.delivered,
                "has_ended": place.has_ended,
            },
        }

    @classmethod
    def read(cls, plain: Plain) -> Checkpoint:
        """What `write` gave.

        Raises:
            InvalidState: `plain` is nothing of the kind.
        """
        try:
            ours = plain["forebay"]
            is_finished = bool(plain["_iterator_finished"])
            return cls(
                num_workers=ours["num_workers"],
                batch_size=ours["batch_size"],
                seeding=ours["seeding"],
                is_iterable=ours["is_iterable"],
                is_running=ours["is_running"] and not is_finished,  # Accelerate may set it
                is_finished=is_finished,
                delivered=plain["_num_yielded"],
                epoch=ours["epoch"],
                base_seed=ours["base_seed"],
                is_seeded=ours["is_seeded"],
                start=MainState.read(ours["start"]),
                now=MainState.read(ours["now"]),
                sampler=SamplerPlace(**ours["sampler"]),
                streams=_read_streams(plain),
                last_stream=plain.get("_snapshot", {}).get("_last_yielded_worker_id", -1),
                missing=tuple(ours["missing"]),
                local={name: plain[name] for name in _LOCAL_STATES} | {"own": ours["own"]}
                if ours["num_workers"] == 0
                else None,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidState.about(plain, f"{type(error).__name__}: {error}") from error

    # -- going on ---------------------------------------------------------------------------

    def check(self, loader: Any) -> None:
        """That `loader` can go on from here.

        Raises:
            StateMismatch: It cannot; also an AssertionError, as torchdata's.
        """
        is_iterable = torch_compat.is_iterable_kind(loader._dataset_kind)  # noqa: SLF001
        is_free = self.seeding == "batch" and not self.is_iterable
        facts = [
            ("an iterable dataset", self.is_iterable, is_iterable, True),
            ("seeding", self.seeding, loader.seeding, True),
            ("num_workers", self.num_workers, loader.num_workers, not is_free),
            ("batch_size", self.batch_size, loader.batch_size, self.is_running),
            ("generators", len(self.start.given), len(_find_generators(loader)), True),
        ]
        for name, saved, given, matters in facts:
            if matters and saved != given:
                raise StateMismatch.about(name, saved, given)

    def keeps_streams(self, loader: Any) -> bool:
        """Whether the streams go on from here, rather than begin anew."""
        is_same = self.num_workers == loader.num_workers
        return is_same and (self.is_running or self.keeps_seed(loader))

    def keeps_seed(self, loader: Any) -> bool:
        """Whether the iterator has this base seed, rather than one of its own."""
        if self.base_seed is None:
            return False
        return self.is_running or bool(loader.persistent_workers)

    @contextlib.contextmanager
    def entered(self, loader: Any) -> Iterator[None]:
        """Have the epoch begin as it began then; afterwards the generators stand as now."""
        before = RandomState.take()
        self.put_start(loader)
        self.sampler.put(loader, is_running=self.is_running)
        try:
            yield
        except BaseException:
            before.put()
            raise
        # How far a sampler is ahead of the consumer depends on the number of workers: with another
        # one its generator stands where drawing has left it now.
        if self.is_running and self.num_workers == loader.num_workers:
            MainState(None, self.now.given).put(loader)
        if loader.num_workers > 0 or (self.is_running and self.now.shared is None):
            if self.begin.shared is None or not _are_equal(before, self.begin.shared):
                before.put()
        elif self.is_running and self.now.shared is not None:
            self.now.shared.put()

    @property
    def begin(self) -> MainState:
        """The main process's generators as the epoch begins."""
        return self.start if self.is_running else self.now

    def reopen_sampler(self, loader: Any) -> Iterator[Any]:
        """The samplers' iterator as the epoch began with it, or further on if it can tell."""
        if self.is_seeded:
            self.put_start(loader)
        self.sampler.put(loader, is_running=self.is_running)  # torch has asked for one before
        iterator: Iterator[Any] = iter(loader._index_sampler)  # noqa: SLF001 - torch's own name for it
        if self.is_running:
            self.sampler.put_iterator(iterator)
        return iterator

    @property
    def drawn(self) -> int:
        """Batches that need not be drawn again."""
        return self.sampler.drawn if self.is_running and self.sampler.is_known else 0

    def put_start(self, loader: Any) -> None:
        """Set the generators to where they stood when the epoch began."""
        self.begin.put(loader)

    def make_starts(self, loader: Any, sampler: Iterator[Any]) -> tuple[Start, ...]:
        """Where each stream begins.

        Args:
            loader: The one that goes on.
            sampler: Of an iterable dataset: gives the same for every batch, without end.
        """
        if not self.keeps_streams(loader):
            return ()
        indices = next(sampler) if self.is_iterable else None
        return tuple(
            Start(
                place.snapshot,
                place.delivered - place.since,
                place.since if self.is_iterable else 0,
                indices,
                self.epoch,
                place.has_ended,
            )
            for place in self.streams
        )


def _read_streams(plain: Plain) -> tuple[StreamPlace, ...]:
    snapshots = plain.get("_snapshot", {}).get("_worker_snapshots", {})
    places = []
    for number in range(len(snapshots)):
        saved = snapshots[f"worker_{number}"]
        ours = saved["forebay"]
        snapshot = {
            "dataset_state": saved["dataset_state"],
            "fetcher_state": saved["fetcher_state"],
            "generators": ours["generators"],
            "own": ours["own"],
            "is_new_epoch": ours["is_new_epoch"],
        }
        places.append(
            StreamPlace(
                snapshot if ours["is_known"] else None,
                ours["since"],
                ours["delivered"],
                ours["has_ended"],
            )
        )
    return tuple(places)


def _are_equal(one: RandomState, other: RandomState) -> bool:
    return (
        one.python == other.python
        and torch.equal(one.torch, other.torch)
        and one.numpy[2:] == other.numpy[2:]
        and bool(np.array_equal(one.numpy[1], other.numpy[1]))
    )
