"""Streams: torch's logical workers, kept apart when they share a process.

Covers: the three global generators of a stream, its seed, its fetcher, and switching
between the streams that one process or thread carries. Does not cover: which of them
carries which stream (crew.py, threads.py).

torch ties batch i to worker i mod W, whose random state runs on from batch to batch. So
there are always W streams, whatever the number of processes; a process with several
switches the generators when the stream changes (0.2 ms), one with a single stream never.
A thread never does: the global generators are the training code's as well.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import numpy.random  # NumPy imports it on first use: 5 MiB in each worker instead of once
import torch

from forebay import torch_compat
from forebay.workers.job import Job
from forebay.workers.messages import Stands, StreamState
from forebay.workers.randomness import Generators, enter_stream, enter_stream_in_thread
from forebay.workers.snapshot import (
    Start,
    is_stateful,
    pack_dataset,
    pack_generators,
    pack_own,
    pass_over,
    put_dataset,
    put_iterator,
    unpack_generators,
    unpack_own,
)


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of Python's, NumPy's and torch's global generators."""

    python: tuple[Any, ...]
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def take(cls) -> RandomState:
        """The states now."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def put(self) -> None:
        """Make the generators go on from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


def seed_generators(base_seed: int, number: int) -> None:
    """Seed the global generators as torch does in worker `number`."""
    random.seed(base_seed + number)
    torch_compat.seed_torch(base_seed + number)
    np.random.seed(torch_compat.generate_numpy_state(base_seed, number))


_MASK = (1 << 63) - 1


def mix_seed(base_seed: int, epoch: int, serial: int) -> int:
    """One 63-bit seed a batch, for `seeding="batch"`.

    splitmix64's finaliser (Steele, Lea and Flood 2014) over the three numbers: equal
    neighbours give unrelated seeds, and every platform the same ones.
    """
    value = base_seed & _MASK
    for number in (epoch, serial):
        value = (value + 0x9E3779B97F4A7C15 * (number + 1)) & ((1 << 64) - 1)
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
        value ^= value >> 31
    return value & _MASK


@final
@dataclass(slots=True)
class Stream:
    """One logical worker.

    Attributes:
        number: torch's worker id.
        state: Its generators while another stream of the process runs; else None.
        fetcher: torch's fetcher; None until the stream starts, or when starting it raised.
        fault: What starting it raised; the answer to its first task, as in torch.
        has_ended: Its iterable dataset is exhausted.
        own: What `forebay.rng()` gives while it is current.
        dataset: What it draws from.
        made: Batches that it has made in this epoch.
        is_stateful: Whether its dataset, or the iterator, keeps a state of its own.
    """

    number: int
    own: Generators
    dataset: Any
    state: RandomState | None = None
    fetcher: Any = None
    fault: Any = None
    has_ended: bool = False
    is_started: bool = field(default=False)
    made: int = 0
    is_stateful: bool = False


@final
class Streams:
    """The streams that this process, or thread, carries; at most one of them is current.

    Args:
        job: What they make.
        numbers: Which.
        in_thread: Whether this is a thread of the training process.
    """

    def __init__(self, job: Job, numbers: tuple[int, ...], *, in_thread: bool = False) -> None:
        self._job = job
        self._in_thread = in_thread
        self._streams = {number: self._make_stream(number) for number in numbers}
        self._current: Stream | None = None
        self._epoch = 0
        self._starts = dict(enumerate(job.starts))
        self.news: list[Stands] = []
        """Where streams stand at the begin of an epoch, when batches alone will not tell."""

    def _make_stream(self, number: int) -> Stream:
        return Stream(number, Generators(self._job.base_seed, number), self._copy_dataset())

    def _copy_dataset(self) -> Any:
        return copy_for_stream(self._job) if self._in_thread else self._job.dataset

    def start_all(self) -> None:
        """Seed and initialise every stream, in order, as torch's workers do at their start."""
        for number in self._streams:
            self.enter(number)

    def enter(self, number: int) -> Stream:
        """Make stream `number` current: its generators, its worker info."""
        stream = self._streams[number]
        if stream is self._current:
            return stream
        if self._current is not None and not self._in_thread:
            self._current.state = RandomState.take()
        self._current = stream
        (enter_stream_in_thread if self._in_thread else enter_stream)(stream.own)
        if stream.is_started:
            if stream.state is not None:
                stream.state.put()
                stream.state = None
            self._show_info(stream)
        else:
            self._start(stream)
        return stream

    def seed_batch(self, stream: Stream, seed: int) -> None:
        """`seeding="batch"`: what is drawn depends on the batch alone."""
        stream.own.reseed(seed, 0)
        if not self._in_thread:
            seed_generators(seed, 0)

    def resume(self, epoch: int, numbers: tuple[int, ...] = ()) -> None:
        """A new epoch of persistent workers: new fetchers, same generators and datasets.

        Args:
            epoch: Its number.
            numbers: Streams that begin it; none for all.
        """
        self._epoch = epoch
        for number in numbers or self._streams:
            stream = self.enter(number)
            stream.has_ended, stream.made = False, 0
            before = self.take_snapshot(stream, is_new_epoch=True)
            self._make_fetcher(stream)
            if not self._announce(stream):
                self.news.append(Stands(number, epoch, before))

    def refresh(self, dataset: Any) -> None:
        """Draw from another dataset, from the next epoch on."""
        self._job = replace(self._job, dataset=dataset)
        for number in self._streams:
            stream = self.enter(number)
            stream.dataset = self._copy_dataset()
            self._show_info(stream)
            if self._in_thread:
                self._run_init_fn(stream)
            elif self._job.init_fn is not None:
                before = RandomState.take()  # it may seed: the generators go on all the same
                self._run_init_fn(stream)
                before.put()

    # -- where they stand ---------------------------------------------------------------

    def report(self) -> list[Stands]:
        """Where each stream stands between two epochs."""
        return [
            Stands(number, self._epoch, self.take_snapshot(self.enter(number), is_new_epoch=True))
            for number in self._streams
        ]

    def note_batch(self, stream: Stream, *, is_recorded: bool) -> bytes:
        """A batch was made: where the stream stands now, if that is due; else nothing."""
        stream.made += 1
        if stream.is_stateful:
            is_recorded = stream.made % self._job.snapshot_every == 0
        return self.take_snapshot(stream) if is_recorded else b""

    def _announce(self, stream: Stream) -> bool:
        """Say where a stream with a state of its own begins; whether it has one."""
        if stream.is_stateful:
            self.news.append(Stands(stream.number, self._epoch, self.take_snapshot(stream)))
        return stream.is_stateful

    def take_snapshot(self, stream: Stream, *, is_new_epoch: bool = False) -> bytes:
        """Where the current stream stands, pickled: what it refers to may change."""
        is_new_epoch = is_new_epoch or stream.has_ended
        snapshot: dict[str, Any] = {"generators": None, "own": None, "is_new_epoch": is_new_epoch}
        if self._job.seeding == "torch":
            snapshot["own"] = pack_own(stream.own.take_state())
            if not self._in_thread:
                snapshot["generators"] = pack_generators(RandomState.take())
        try:
            # Between epochs the iterator is done with: its place is nobody's.
            fetcher = None if is_new_epoch else stream.fetcher
            return pickle.dumps(snapshot | pack_dataset(stream.dataset, fetcher))
        except Exception as error:  # the user's; told to whoever asks for the state, if anybody
            return pickle.dumps({"fault": f"{type(error).__name__}: {error}"})

    def _restore(self, stream: Stream, start: Start) -> None:
        """Begin where a stream of another process stood."""
        job, snapshot = self._job, start.snapshot or {}
        put_dataset(stream.dataset, snapshot)
        if snapshot.get("is_new_epoch"):
            self._put_generators(stream, snapshot)
        if start.has_ended:
            stream.has_ended = True
            return
        self._make_fetcher(stream)
        if stream.fault is not None:
            return
        if snapshot and not snapshot["is_new_epoch"]:
            put_iterator(stream.fetcher, snapshot)
            self._put_generators(stream, snapshot)
        stream.made = start.made
        collates = not (job.has_default_collate and job.auto_collation)
        for _ in range(start.skipped):
            if job.seeding == "batch":
                number = stream.made * job.num_streams + stream.number
                self.seed_batch(stream, mix_seed(job.base_seed, start.epoch, number))
            pass_over(stream.fetcher, start.indices, collates=collates)
            stream.made += 1

    def _put_generators(self, stream: Stream, snapshot: dict[str, Any]) -> None:
        if snapshot["generators"] is not None and not self._in_thread:
            RandomState(*unpack_generators(snapshot["generators"])).put()
        if snapshot["own"] is not None:
            stream.own.put_state(unpack_own(snapshot["own"]))

    def hand_over(self, numbers: tuple[int, ...]) -> tuple[StreamState, ...]:
        """Where these streams stand; they are not carried here any more."""
        states = []
        for number in numbers:
            stream = self.enter(number)
            state = None if self._in_thread else RandomState.take()
            states.append(StreamState(number, state, stream.fault, stream.own.take_state()))
            del self._streams[number]
            self._current = None
        return tuple(states)

    def adopt(self, states: tuple[StreamState, ...]) -> None:
        """Go on with streams that another process carried.

        The dataset is this process's: what the other had written to its own stays there. The
        user's `worker_init_fn` runs before the generators are set, so that it may seed them
        without doing harm.
        """
        for state in states:
            self._streams[state.number] = self._make_stream(state.number)
            stream = self.enter(state.number)
            stream.fault = state.fault or stream.fault
            if state.generators is not None:
                state.generators.put()
            if state.own is not None:
                stream.own.put_state(state.own)
        self.news.clear()  # in the middle of an epoch

    def begin(self, starts: tuple[tuple[int, Start], ...]) -> None:
        """Go on with streams of a worker that is gone, from where they stood at some batch."""
        for number, start in starts:
            self._starts[number] = start
            self._streams[number] = self._make_stream(number)
            said = len(self.news)
            self.enter(number)
            if start.snapshot is not None or start.skipped:
                del self.news[said:]  # in the middle of an epoch

    def run_exit_fn(self) -> None:
        """The user's exit function, once for each stream."""
        if self._job.exit_fn is not None:
            for number in self._streams:
                self.enter(number)
                self._job.exit_fn(number)

    def _start(self, stream: Stream) -> None:
        job = self._job
        stream.is_started = True
        if not self._in_thread:
            seed_generators(job.base_seed, stream.number)
        self._show_info(stream)
        self._run_init_fn(stream)
        if stream.fault is not None:
            return
        start = self._starts.pop(stream.number, None)
        if start is not None:
            try:
                self._restore(stream, start)
            except Exception:
                stream.fault = torch_compat.WorkerException(where=_where(stream.number))
        else:
            self._make_fetcher(stream)
        self._announce(stream)

    def _run_init_fn(self, stream: Stream) -> None:
        try:
            if self._job.init_fn is not None:
                self._job.init_fn(stream.number)
        except Exception:
            stream.fault = torch_compat.WorkerException(where=_where(stream.number))

    def _make_fetcher(self, stream: Stream) -> None:
        job = self._job
        try:
            stream.fetcher = torch_compat.make_fetcher(
                job.kind, stream.dataset, job.auto_collation, job.collate_fn, job.drop_last
            )
            stream.is_stateful = is_stateful(stream.dataset, stream.fetcher)
        except Exception:
            stream.fault = torch_compat.WorkerException(where=_where(stream.number))

    def _show_info(self, stream: Stream) -> None:
        job = self._job
        show = torch_compat.set_thread_info if self._in_thread else torch_compat.set_worker_info
        show(stream.number, job.num_streams, job.base_seed + stream.number, stream.dataset)


def _where(number: int) -> str:
    """torch's words for the place of an error; tests and tools match them."""
    return f"in DataLoader worker process {number}"


def copy_for_stream(job: Job) -> Any:
    """The dataset as a thread's stream gets it: the one object, or a copy.

    In torch each worker has a copy. A map-style dataset is read, so one serves all; an iterable
    holds its place, and `worker_init_fn` is there to make copies differ. One that cannot be
    copied whole (an open file, a lock) is copied on its surface; else it is shared.
    """
    if not torch_compat.is_iterable_kind(job.kind) and job.init_fn is None:
        return job.dataset
    for copier in (copy.deepcopy, copy.copy):
        with contextlib.suppress(Exception):
            return copier(job.dataset)
    return job.dataset
