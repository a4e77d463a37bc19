"""What of an epoch the consumer has got, and where that leaves samplers and streams.

Covers: keeping, for every stream, a snapshot that is not newer than its last delivered
batch, and composing a checkpoint from it at any moment. Does not cover: the layout of a
checkpoint, or going on from it in main (checkpoint.py); taking snapshots (workers/).

Batches are made ahead of the consumer, so a worker's state is not that of the batch just
delivered. Snapshots therefore travel with batches and count when their batch is delivered.
That of random generators is 14 KiB of text and 0.1 ms, so it is asked for twice a second and
not for each batch: what was delivered since is made once more when the loader resumes. A
dataset that has a `state_dict` tells it with every batch, or as `snapshot_every_n_steps` says.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, final

import torch.utils.data

from forebay import torch_compat
from forebay.errors import StateUnavailable
from forebay.flow.checkpoint import Checkpoint, MainState, SamplerPlace, StreamPlace
from forebay.flow.flight import count_samples
from forebay.workers.messages import Failed
from forebay.workers.randomness import Generators
from forebay.workers.snapshot import (
    Plain,
    has_state,
    is_stateful,
    pack_dataset,
    pack_own,
    pass_over,
    put_dataset,
    put_iterator,
    unpack_own,
)

if TYPE_CHECKING:
    from forebay.flow.order import Order, Ticket
    from forebay.workers.messages import Done, Stands, StreamEnd

RECORD_EVERY_S = 0.5
"""At most so much of each stream's work is done again on resuming; recording it costs less
than a thousandth of that time."""


@final
class Draws:
    """A sampler's iterator, with where the sampler stood after each of the latest draws.

    Args:
        loader: Whose samplers.
        iterator: The outermost one's.
        drawn: Batches that were drawn before.
    """

    def __init__(self, loader: Any, iterator: Iterator[Any], drawn: int) -> None:
        # Weak: a persistent loader holds its iterator, and must go when its last reference does.
        self._loader = weakref.ref(loader)
        self._iterator = iterator
        self._drawn = drawn
        self._every = max(1, loader.snapshot_every_n_steps)
        first = self._take()
        self.is_tracked = first.is_known
        self._places = deque([first])

    def _take(self) -> SamplerPlace:
        try:
            place = SamplerPlace.take(self._loader(), self._iterator, self._drawn)
            return copy.deepcopy(place)
        except Exception:  # one that cannot tell is drawn from again; nobody may ever ask
            return SamplerPlace(self._drawn)

    def open(self) -> Iterator[Any]:
        """What to draw from: the iterator itself, when no sampler tells where it stands."""
        return self._track() if self.is_tracked else self._iterator

    def _track(self) -> Iterator[Any]:
        for drawn in self._iterator:
            self._drawn += 1
            if self._drawn % self._every == 0:
                self._places.append(self._take())
            yield drawn

    def find_place(self, drawn: int) -> SamplerPlace:
        """Where the samplers stood after so many draws, or a little before."""
        while len(self._places) > 1 and self._places[1].drawn <= drawn:
            self._places.popleft()
        return self._places[0]


@final
class _Mark:
    """What is known of one stream.

    Fields as `StreamPlace`, the snapshot still pickled, or plain when it was loaded.
    """

    __slots__ = ("delivered", "has_ended", "recorded_s", "since", "snapshot")

    def __init__(self) -> None:
        self.snapshot: bytes | Plain | None = None
        self.since = 0
        self.delivered = 0
        self.has_ended = False
        self.recorded_s = float("-inf")

    def place(self) -> StreamPlace:
        snapshot = self.snapshot
        if isinstance(snapshot, bytes):
            snapshot = _open(snapshot)
        return StreamPlace(copy.deepcopy(snapshot), self.since, self.delivered, self.has_ended)


def _open(pickled: bytes) -> Plain:
    snapshot: Plain = pickle.loads(pickled)
    if "fault" in snapshot:
        raise StateUnavailable.about(snapshot["fault"])
    return snapshot


@final
class Progress:
    """One iterator's progress over worker streams.

    All but `compose` and `note_start` is called under the engine's lock. What `compose` reads
    changes in the consumer's thread alone.

    Args:
        loader: Whose.
        checkpoint: What its first epoch goes on from.
    """

    def __init__(self, loader: Any, checkpoint: Checkpoint | None) -> None:
        self._is_ordered = loader.in_order
        self.is_iterable = _is_iterable(loader)
        self._records = loader.seeding == "torch" and not self.is_iterable
        self.has_stateful_dataset = has_state(loader.dataset)
        self.num_streams = loader.num_workers
        self.persists = loader.persistent_workers
        self.base_seed = 0
        self._checkpoint = checkpoint
        self._is_resumed = False
        self.epoch_here = -1
        """Epochs of this iterator begun before this one."""
        self.first_epoch = 0
        if checkpoint is not None and checkpoint.keeps_seed(loader):
            self.first_epoch = checkpoint.epoch
        self.delivered = 0
        self.is_over = False
        self._start: MainState | None = None
        self._draws: Draws | None = None
        self._marks = self._make_marks()
        self._ends: dict[int, bytes] = {}
        self._early_stands: list[Stands] = []
        self._last_stream = -1
        self._sent: dict[int, tuple[int, int]] = {}  # serial -> its stream, and samples
        self.last_samples = 0
        """Of the batch delivered last."""
        self._snapshots: dict[int, bytes] = {}
        self._first_serial = 0
        self._early: set[int] = set()  # delivered before one that comes earlier in the order
        self._owed: dict[int, int] = {}  # serial -> number in the order, if that is lower

    def _make_marks(self) -> list[_Mark]:
        return [_Mark() for _ in range(self.num_streams)]

    @property
    def epoch(self) -> int:
        """Of the base seed: what `seeding="batch"` counts."""
        return self.first_epoch + self.epoch_here

    # -- an epoch begins --------------------------------------------------------------------

    def note_start(self, start: MainState, draws: Draws) -> None:
        """The main process's generators as the samplers are about to be drawn from."""
        self._start, self._draws = start, draws

    def start_epoch(self, order: Order) -> Iterator[Ticket]:
        """Begin to count; the tickets that streams must make once more, for nobody."""
        self.epoch_here += 1
        self.delivered, self.is_over, self._last_stream = 0, False, -1
        self._marks = self._make_marks()
        self._ends.clear()
        self._sent.clear()
        self._snapshots.clear()
        self._early.clear()
        self._owed.clear()
        checkpoint, self._checkpoint = self._checkpoint, None
        self._is_resumed = checkpoint is not None and checkpoint.is_running
        self._first_serial = order.first_serial
        if checkpoint is not None and checkpoint.is_running:
            yield from self._catch_up(order, checkpoint)
            self._first_serial = order.first_serial - checkpoint.delivered
            missing = enumerate(checkpoint.missing, order.first_serial)
            self._owed.update(missing)
        early, self._early_stands = self._early_stands, []
        for stands in early:
            self.note_stands(stands)

    def restart(self) -> None:
        """The workers are others, and begin from the base seed."""
        self.epoch_here, self.first_epoch = -1, 0
        self._early_stands.clear()

    def _catch_up(self, order: Order, checkpoint: Checkpoint) -> Iterator[Ticket]:
        self.delivered, self._last_stream = checkpoint.delivered, checkpoint.last_stream
        places = checkpoint.streams if self.num_streams == checkpoint.num_workers else ()
        for mark, place in zip(self._marks, places, strict=False):
            mark.snapshot, mark.since = place.snapshot, place.since
            mark.delivered, mark.has_ended = place.delivered, place.has_ended
        if self.is_iterable:
            delivered = [mark.delivered for mark in self._marks]
            order.leave_out(self.ended_streams, checkpoint.last_stream, delivered)
            return
        again = set(checkpoint.missing)
        count = checkpoint.delivered + len(again)
        for number, ticket in order.skip(count, checkpoint.drawn, again):
            stream = number % self.num_streams
            behind = (count - 1 - number) // self.num_streams
            if ticket.stream >= 0 and places and behind < places[stream].since:
                yield ticket

    @property
    def ended_streams(self) -> set[int]:
        """Streams whose iterable dataset is exhausted."""
        return {number for number, mark in enumerate(self._marks) if mark.has_ended}

    # -- a batch on its way -------------------------------------------------------------------

    def note_dispatch(self, ticket: Ticket, stream: int, now_s: float) -> bool:
        """A stream gets a ticket. Returns whether it is to say where it stands afterwards."""
        self._sent[ticket.serial] = (stream, count_samples(ticket.indices))
        mark = self._marks[stream]
        if not self._records:
            return False
        is_tracked = self._draws is not None and self._draws.is_tracked
        if not is_tracked and now_s - mark.recorded_s < RECORD_EVERY_S:
            return False
        mark.recorded_s = now_s
        return True

    def note_answer(self, answer: Done | StreamEnd | Failed) -> None:
        """A ticket was done: where the stream stands since, if it says so."""
        if isinstance(answer, Failed) or answer.serial not in self._sent:
            return
        if answer.snapshot:
            self._snapshots[answer.serial] = answer.snapshot

    def note_delivery(self, serial: int) -> None:
        """The consumer gets a batch, or the error in its place."""
        self.delivered += 1
        self._last_stream, self.last_samples = self._sent.pop(serial)
        if not self._is_ordered and not self.is_iterable:
            self._note_unordered(serial)
        if self._draws is not None and self._draws.is_tracked:
            self._draws.find_place(self._least_missing())  # what is older is let go
        mark = self._marks[self._last_stream]
        mark.delivered += 1
        snapshot = self._snapshots.pop(serial, None)
        if snapshot is None:
            mark.since += 1
        else:
            mark.snapshot, mark.since = snapshot, 0

    def _note_unordered(self, serial: int) -> None:
        self._owed.pop(serial, None)
        self._early.add(serial)
        while (first := self._first_undelivered) in self._early:
            self._early.remove(first)

    @property
    def _first_undelivered(self) -> int:
        return self._first_serial + self.delivered - len(self._early)

    def _least_missing(self) -> int:
        return min(self._find_missing(), default=self.delivered)

    def note_end(self, serial: int) -> None:
        """A stream's iterable dataset is exhausted, and the consumer has come to that."""
        mark = self._marks[self._sent.pop(serial)[0]]
        mark.has_ended = True
        if serial in self._snapshots:
            mark.snapshot, mark.since = self._snapshots.pop(serial), 0

    def note_stands(self, stands: Stands) -> None:
        """Where a stream stands as an epoch begins, or after one has ended."""
        if stands.epoch > self.epoch_here:  # the clock hears new workers before main begins
            self._early_stands.append(stands)
        if stands.epoch != self.epoch_here:
            return
        mark = self._marks[stands.stream]
        if self.is_over:
            self._ends[stands.stream] = stands.snapshot
        elif mark.snapshot is None and not self._is_resumed:
            mark.snapshot = stands.snapshot

    # -- telling --------------------------------------------------------------------------------

    @property
    def lacks_begin(self) -> bool:
        """Whether a stream is yet to say where it began."""
        tells = self.has_stateful_dataset or self.epoch_here > 0
        is_told = self._is_resumed or all(mark.snapshot is not None for mark in self._marks)
        return self.epoch_here >= 0 and tells and not self.is_over and not is_told

    @property
    def lacks_end(self) -> bool:
        """Whether the streams go on into another epoch and are yet to say where they stand."""
        return self.is_over and self.persists and len(self._ends) < self.num_streams

    def compose(self, loader: Any) -> Checkpoint | None:
        """Where the loader stands; None when the next epoch owes nothing to this iterator."""
        if self.is_over:
            return self._compose_end(loader)
        if self._start is None or self._draws is None:
            return None
        return _compose(
            loader,
            is_running=True,
            delivered=self.delivered,
            epoch=self.epoch,
            base_seed=self.base_seed,
            is_seeded=True,
            start=self._start,
            now=MainState.take(loader, shared=False),
            sampler=copy.deepcopy(self._draws.find_place(self._least_missing())),
            streams=tuple(mark.place() for mark in self._marks),
            last_stream=self._last_stream,
            missing=self._find_missing(),
        )

    def _find_missing(self) -> tuple[int, ...]:
        serials = range(self._first_undelivered, max(self._early, default=0))
        later = {s for s in serials if s not in self._early and s not in self._owed}
        return tuple(sorted({*self._owed.values(), *(s - self._first_serial for s in later)}))

    def _compose_end(self, loader: Any) -> Checkpoint:
        has_streams = self.persists and len(self._ends) == self.num_streams
        now = MainState.take(loader)
        return _compose(
            loader,
            is_finished=True,
            delivered=self.delivered,
            epoch=self.epoch + 1 if has_streams else 0,
            base_seed=self.base_seed if has_streams else None,
            is_seeded=has_streams,
            start=now,
            now=now,
            sampler=copy.deepcopy(SamplerPlace.take(loader)),
            streams=tuple(
                StreamPlace(_open(self._ends[number]), 0, 0, has_ended=False)
                if has_streams
                else StreamPlace(None, 0, 0, has_ended=False)
                for number in range(self.num_streams)
            ),
        )


def _is_iterable(loader: Any) -> bool:
    return torch_compat.is_iterable_kind(loader._dataset_kind)  # noqa: SLF001 - torch's own name


def _compose(loader: Any, **facts: Any) -> Checkpoint:
    fallback = {"is_running": False, "is_finished": False, "delivered": 0, "epoch": 0}
    return Checkpoint(
        num_workers=loader.num_workers,
        batch_size=loader.batch_size,
        seeding=loader.seeding,
        is_iterable=_is_iterable(loader),
        **(fallback | facts),
    )


def compose_unstarted(loader: Any) -> Checkpoint:
    """Where a loader stands that nobody has iterated yet."""
    now = MainState.take(loader)
    return _compose(
        loader,
        base_seed=None,
        is_seeded=False,
        start=now,
        now=now,
        sampler=copy.deepcopy(SamplerPlace.take(loader)),
        streams=(StreamPlace(None, 0, 0, has_ended=False),) * loader.num_workers,
    )


@final
class LocalProgress:
    """One iterator's progress with `num_workers=0`.

    It holds the dataset's iterator only if that tells a state: others end with the loop.

    Args:
        start: The main process's generators before the iterator was made.
        draws: What it draws from.
        base_seed: Its seed.
        epoch: Counted by iterators that went before with the same one.
        own: What `forebay.rng()` gives.
        delivered: Batches of the epoch that the consumer has got.
    """

    def __init__(
        self,
        start: MainState,
        draws: Draws,
        base_seed: int,
        epoch: int,
        own: Generators,
        delivered: int,
    ) -> None:
        self._start = start
        self._draws = draws
        self._base_seed = base_seed
        self._epoch = epoch
        self._own = own
        self._fetcher: Any = None
        self.delivered = delivered
        self.is_over = False

    def hold(self, dataset: Any, fetcher: Any) -> None:
        """Ask this fetcher where it stands, if it has an answer."""
        self._fetcher = fetcher if is_stateful(dataset, fetcher) else None

    def note_delivery(self) -> None:
        """The consumer gets a batch."""
        self.delivered += 1
        if self._draws.is_tracked:
            self._draws.find_place(self.delivered)  # what is older is let go

    def note_end(self) -> None:
        """The epoch is over."""
        self.is_over, self._fetcher = True, None

    def compose(self, loader: Any) -> Checkpoint:
        """Where the loader stands."""
        now = MainState.take(loader)
        local = pack_dataset(loader.dataset, self._fetcher)
        if self.is_over:
            return _compose(
                loader,
                is_finished=True,
                delivered=self.delivered,
                base_seed=None,
                is_seeded=False,
                start=now,
                now=now,
                sampler=copy.deepcopy(SamplerPlace.take(loader)),
                local=copy.deepcopy(local) | {"own": None},
            )
        return _compose(
            loader,
            is_running=True,
            delivered=self.delivered,
            epoch=self._epoch,
            base_seed=self._base_seed,
            is_seeded=False,
            start=self._start,
            now=now,
            sampler=copy.deepcopy(self._draws.find_place(self.delivered)),
            local=copy.deepcopy(local) | {"own": pack_own(self._own.take_state())},
        )


def begin_dataset(loader: Any, checkpoint: Checkpoint) -> None:
    """With `num_workers=0`: give the dataset its state back, before it is iterated."""
    if checkpoint.local is not None:
        put_dataset(loader.dataset, checkpoint.local)


def catch_up(
    loader: Any,
    checkpoint: Checkpoint,
    sampler: Iterator[Any],
    fetcher: Any,
    own: Generators,
    begin: Callable[[int], object],
) -> None:
    """With `num_workers=0`: bring a new iterator's parts to where those of the old stood."""
    local = checkpoint.local or {}
    if not checkpoint.is_iterable:
        for _ in range(checkpoint.delivered - checkpoint.drawn):
            next(sampler, None)
    elif is_stateful(loader.dataset, fetcher):
        put_iterator(fetcher, local)
    else:
        collates, indices = not _collates_quietly(loader), next(sampler)
        for number in range(checkpoint.delivered):
            begin(number)
            pass_over(fetcher, indices, collates=collates)
    if local.get("own") is not None:
        own.put_state(unpack_own(local["own"]))


def _collates_quietly(loader: Any) -> bool:
    """Whether collating draws no random numbers, so that it may be left out."""
    is_torchs = loader.collate_fn is torch.utils.data.default_collate
    return is_torchs and bool(loader._auto_collation)  # noqa: SLF001 - torch's own name
