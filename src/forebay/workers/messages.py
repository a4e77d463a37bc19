"""What main, zygote and workers say to each other.

Covers: the closed sets of messages, one class each. Does not cover: how they travel
(channel.py).

They are NamedTuples, not dataclasses: as immutable, and a third of the cost to pickle,
which a batch of 4 KB feels.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from forebay.transport.lease import Span
from forebay.workers import snapshot

DISCARD = -1
"""A task's capacity when its result is not wanted: only its effects on the stream are."""

# -- main -> worker ---------------------------------------------------------------------------


class Task(NamedTuple):
    """Make one batch.

    Attributes:
        serial: The ticket's number, never reused within an iterator.
        stream: Whose random state and dataset copy makes it.
        indices: As the sampler gave them; None for iterable datasets without batching.
        seed: Set under `seeding="batch"`: seeds the generators before the fetch.
        offset, capacity_bytes: Where the result may go; capacity 0 means ask first.
        is_metered: Whether the peak of this fetch is to be measured.
        is_recorded: Whether to say afterwards where the stream stands.
    """

    serial: int
    stream: int
    indices: Any
    seed: int | None
    offset: int
    capacity_bytes: int
    is_metered: bool
    is_recorded: bool = False


class Room(NamedTuple):
    """The answer to `Need`. Capacity 0: there is none, drop the batch."""

    serial: int
    offset: int
    capacity_bytes: int


class Resume(NamedTuple):
    """Epoch `epoch` of persistent workers: fetchers are made anew.

    Attributes:
        epoch: Of the iterator, from 0.
        streams: Which streams begin it; none for all.
    """

    epoch: int
    streams: tuple[int, ...] = ()


class Refresh(NamedTuple):
    """From the next epoch on, draw from this dataset: its pickle, or for threads itself."""

    dataset: Any


class Report(NamedTuple):
    """Say in `Stands` where each stream stands; asked when nothing is in flight."""


class Keep(NamedTuple):
    """Heap that a worker may keep between fetches before it trims, in bytes."""

    heap_bytes: int


class HandOver(NamedTuple):
    """Say in `Handed` where these streams stand, and carry them no more."""

    streams: tuple[int, ...]


class Adopt(NamedTuple):
    """Carry these streams from here on; what another worker handed over."""

    streams: tuple[StreamState, ...]


class Begin(NamedTuple):
    """Carry these streams from here on; the worker that had them is gone.

    Attributes:
        starts: Stream, and where it stood at some batch.
    """

    starts: tuple[tuple[int, snapshot.Start], ...]


class Retire(NamedTuple):
    """Orderly end: run the exit function and leave with exit code 0."""


# -- worker -> main ---------------------------------------------------------------------------


class Made(NamedTuple):
    """What a metered fetch cost.

    Attributes:
        peak_bytes: Growth while it ran, at its peak.
        private_bytes: Anonymous memory of the worker after it.
        blocks: Memory blocks of its interpreter then; -1 where they were not counted.
    """

    peak_bytes: int
    private_bytes: int
    blocks: int


class Done(NamedTuple):
    """A finished batch.

    Attributes:
        serial: The ticket's number.
        head: Structure; empty when it was too long for a message and is the last span.
        spans: Where its buffers lie in the arena; empty for an inline batch.
        inline: The buffers themselves, when they are small.
        used_bytes: Prefix of the block that the batch needs.
        touched_bytes: Prefix of the block that was ever written.
        made: What the fetch cost, when it was metered.
        faults: Minor page faults of the worker since it began, but for those that mapped a block.
        snapshot: Where the stream stands after it, pickled; empty when it was not taken.
    """

    serial: int
    head: bytes
    spans: tuple[Span, ...]
    inline: tuple[bytearray, ...]
    used_bytes: int
    touched_bytes: int
    made: Made | None
    faults: int = 0
    snapshot: bytes = b""


class Need(NamedTuple):
    """The result is larger than the draft. The worker waits for `Room`.

    Attributes:
        serial: The ticket's number.
        size_bytes: What it needs in all.
        poured_bytes: Of it, what the worker has on its heap and gives up while it is copied.
    """

    serial: int
    size_bytes: int
    poured_bytes: int = 0


class Failed(NamedTuple):
    """User code raised; `error` is torch's picklable wrapper of it."""

    serial: int
    error: Any


class StreamState(NamedTuple):
    """Where a stream stands between two batches: all of it that a process can pass on.

    Attributes:
        number: The stream.
        generators: States of the global generators.
        fault: What starting it raised, if nobody was told yet.
        own: State of `forebay.rng()`'s.
    """

    number: int
    generators: Any
    fault: Any
    own: Any = None


class Handed(NamedTuple):
    """The answer to `HandOver`."""

    streams: tuple[StreamState, ...]


class StreamEnd(NamedTuple):
    """An iterable dataset's copy in this stream has ended.

    Attributes:
        serial: The ticket that met the end, or came after it.
        stream: Which.
        snapshot: Where the stream stands, pickled; of the first such ticket.
    """

    serial: int
    stream: int
    snapshot: bytes = b""


class Stands(NamedTuple):
    """Where a stream stands at the begin of an epoch, or when asked.

    Attributes:
        stream: Which.
        epoch: Of the iterator, from 0.
        snapshot: Pickled.
    """

    stream: int
    epoch: int
    snapshot: bytes


WorkerMessage: TypeAlias = Done | Need | Failed | StreamEnd | Handed | Stands

# -- main -> zygote ---------------------------------------------------------------------------


class Start(NamedTuple):
    """Fork a worker; its end of the channel comes along as a descriptor."""

    worker: int
    streams: tuple[int, ...]


class Kill(NamedTuple):
    """End a worker at once."""

    worker: int


class Quit(NamedTuple):
    """All is over: end what still runs, and yourself."""


# -- zygote -> main ---------------------------------------------------------------------------


class Hatched(NamedTuple):
    """The zygote can fork workers now.

    Attributes:
        pid: Of the process that forks them.
        shares_dataset: Whether they are forked with the dataset, or each unpickles it.
        found: What unpickling the dataset started or opened, when it may not be shared.
    """

    pid: int
    shares_dataset: bool
    found: tuple[str, ...]


class Started(NamedTuple):
    """A worker runs; a descriptor of its process comes along."""

    worker: int
    pid: int


class Unable(NamedTuple):
    """A worker could not be started (no memory, no descriptors); `why` is the system's word."""

    worker: int
    why: str


class Exited(NamedTuple):
    """A worker has ended and was reaped."""

    worker: int
    pid: int
    exit_code: int


class Spoiled(NamedTuple):
    """The dataset could not be unpickled; `error` is torch's wrapper of why."""

    error: Any


ZygoteMessage: TypeAlias = Hatched | Started | Unable | Exited | Spoiled
