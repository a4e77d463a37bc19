"""The worker: tasks in, batches out.

Covers: the life of one worker from its start to its end, and making one batch. Does not
cover: who starts it (zygote.py, threads.py), which task it gets when (flow/scheduler.py).

Letters F and G of the way of a batch: fetch samples, collate into the block, say `Done`,
or `Need` when the block is too small and wait for a larger one. A worker allocates nothing
shared and takes no lock: it is told an offset and a capacity.
"""

from __future__ import annotations

import itertools
import pickle
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch

from forebay import torch_compat
from forebay.memory.allowance import set_budget
from forebay.memory.peak import BlockCounter, FaultMeter, PeakMeter, trim_heap
from forebay.transport.codec import Encoded, encode
from forebay.transport.lease import INLINE_BYTES
from forebay.units import MIB
from forebay.workers.channel import Channel, ChannelClosed
from forebay.workers.job import Job
from forebay.workers.messages import (
    DISCARD,
    Adopt,
    Begin,
    Done,
    Failed,
    Handed,
    HandOver,
    Keep,
    Made,
    Need,
    Refresh,
    Report,
    Resume,
    Retire,
    Room,
    StreamEnd,
    Task,
)
from forebay.workers.rows import Rows, plan_rows
from forebay.workers.space import POUR_LEAST_BYTES, Mapping, Space, estimate_size
from forebay.workers.stacks import offer_stack
from forebay.workers.streams import Stream, Streams

if TYPE_CHECKING:
    from forebay.workers.threads import ThreadChannel

HEAD_BYTES = 64 * 1024
"""A structure longer than this travels in the block, where it is counted."""


_MOST_HEADS = 64
"""Structures whose pickle is kept: one or two in a usual job."""


Gather: TypeAlias = Callable[[int | None], list[Any]]
"""Gives the next so many samples, or all that are left."""


class _StoppedInDataset(Exception):  # noqa: N818 - carries a StopIteration through a generator
    """A map-style dataset raised StopIteration: an error of its own, not the end of a loop."""


class _NoRoom(Exception):  # noqa: N818 - main's answer, not a mistake
    """Main has no room for this batch; it has told the consumer."""


class _Dismissed(Exception):  # noqa: N818 - as above
    """Main wants no more batches, also not this one."""


def run_worker(sock: socket.socket, job: Job, streams: tuple[int, ...], mapping: Mapping) -> None:
    """Serve tasks until told to retire, or until main is gone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch_compat.set_worker_signals()
    torch_compat.set_worker_thread_name()
    offer_stack()
    torch.set_num_threads(1)
    torch_compat.stack_privately_here()
    channel = Channel(sock, is_blocking=True)
    try:
        Worker(channel, job, streams, mapping).serve()
    except KeyboardInterrupt:
        pass  # the main process raises it where the user sees it
    except ChannelClosed:
        pass  # main is gone, or has let go of us
    finally:
        channel.close()


@final
class Worker:
    """One worker, in a process of its own or in a thread of the training process.

    Args:
        channel: Its connection to main.
        job: What it makes.
        streams: Which it carries.
        mapping: Where it puts results.
        in_thread: Then it touches nothing that belongs to the whole process.
    """

    def __init__(
        self,
        channel: Channel | ThreadChannel,
        job: Job,
        streams: tuple[int, ...],
        mapping: Mapping,
        *,
        in_thread: bool = False,
    ) -> None:
        self.channel = channel
        self._job = job
        self._mapping = mapping
        self._in_thread = in_thread
        self._listed_bytes = 0  # what the batch at hand lay in on the heap
        self._poured_bytes = 0  # of it, what was given up while it was copied
        self._streams = Streams(job, streams, in_thread=in_thread)
        self._is_iterable = torch_compat.is_iterable_kind(job.kind)
        # Messages read while waiting for room; served before the channel is read again.
        self._inbox: deque[Any] = deque()
        self._meter = PeakMeter()
        self._faults = FaultMeter()
        self._blocks = BlockCounter()
        self._keep_bytes = 16 * MIB
        self._floor_bytes: int | None = None
        self._usual_holders: dict[Any, tuple[int, ...]] = {}  # kind of rows -> `count_holders`
        self._heads: dict[Any, bytes] = {}  # outline of a batch -> its pickled structure
        self._rows: Rows | None = None  # as the last batch was laid out

    def serve(self) -> None:
        """Serve tasks until told to retire.

        Raises:
            ChannelClosed: Nobody is there any more, or it was told to leave at once.
        """
        set_budget(self._job.budget_bytes)
        self._streams.start_all()
        self._tell_news()
        while True:
            message = self._next_message()
            if isinstance(message, Task):
                self._run(message)
            elif isinstance(message, Resume):
                self._streams.resume(message.epoch, message.streams)
                self._tell_news()
            elif isinstance(message, Begin):
                self._streams.begin(message.starts)
                self._tell_news()
            elif isinstance(message, Refresh):
                self._streams.refresh(
                    message.dataset if self._in_thread else pickle.loads(message.dataset)
                )
            elif isinstance(message, Report):
                for stands in self._streams.report():
                    self.channel.send(stands)
            elif isinstance(message, Keep):
                self._keep_bytes = message.heap_bytes
                trim_heap()
            elif isinstance(message, HandOver):
                self.channel.send(Handed(self._streams.hand_over(message.streams)))
            elif isinstance(message, Adopt):
                self._streams.adopt(message.streams)
            elif isinstance(message, Retire):
                self._streams.run_exit_fn()
                return

    def _tell_news(self) -> None:
        """Where streams stand as an epoch begins."""
        news = self._streams.news
        while news:
            self.channel.send(news.pop(0))

    def _next_message(self) -> Any:
        if not self._inbox or self.channel.has_waiting():
            for message in self.channel.receive():
                self._put_aside(message)
        return self._inbox.popleft()

    def _put_aside(self, message: Any) -> None:
        if isinstance(message, Retire):
            self._inbox.clear()  # as torch's workers, which look at an event before each task
        self._inbox.append(message)

    # -- one task -------------------------------------------------------------------------

    def _run(self, task: Task) -> None:
        if not self._in_thread:
            self._faults.start(task.capacity_bytes)
            if task.is_metered:
                self._meter.start()
        self._listed_bytes = self._poured_bytes = 0
        stopped: StopIteration | None = None
        answer: Done | Failed | StreamEnd
        try:
            answer = self._make(task)
        except (_NoRoom, _Dismissed):
            return
        except _StoppedInDataset as stop:
            stopped = stop.args[0]
        except Exception:
            answer = Failed(task.serial, _wrap_error(task.stream))
        if stopped is not None:
            answer = Failed(task.serial, _wrap_stopped(stopped, task.stream))
        if isinstance(answer, Done):
            stream = self._streams.enter(task.stream)
            snapshot = self._streams.note_batch(stream, is_recorded=task.is_recorded)
            self._report(task, answer._replace(snapshot=snapshot) if snapshot else answer)
        else:
            self.channel.send(answer)

    def _report(self, task: Task, done: Done) -> None:
        """Say `Done`, and what making it took."""
        if self._in_thread:
            # Meters read a whole process, which is the training code's: this is arithmetic.
            self.channel.send(done._replace(made=Made(self._listed_bytes, 0, -1)))
        elif task.is_metered:
            making = self._meter.stop(self._poured_bytes)
            made = Made(making.peak_bytes, making.private_bytes, self._blocks.count())
            self.channel.send(done._replace(made=made, faults=self._faults.stop()))
            self._trim_if_above_share(making.private_bytes)
        else:
            self.channel.send(done._replace(faults=self._faults.stop()))

    def _trim_if_above_share(self, private_bytes: int) -> None:
        """Give back what the C allocator keeps, when it keeps more than its share."""
        if self._floor_bytes is not None and private_bytes - self._floor_bytes <= self._keep_bytes:
            return
        trim_heap()
        after_bytes = self._meter.read_private_bytes()
        self._floor_bytes = min(self._floor_bytes or after_bytes, after_bytes)

    def _make(self, task: Task) -> Done | Failed | StreamEnd:
        stream = self._streams.enter(task.stream)
        if stream.fault is not None:
            fault, stream.fault = stream.fault, None
            return Failed(task.serial, fault)
        if stream.has_ended:
            return StreamEnd(task.serial, task.stream)
        if task.seed is not None:
            self._streams.seed_batch(stream, task.seed)
        space = Space(self._mapping, task.offset, task.capacity_bytes)
        try:
            if task.capacity_bytes == DISCARD:
                stream.fetcher.fetch(task.indices)  # only its effects on the stream are wanted
                return Done(task.serial, b"", (), (), 0, 0, None)
            return self._fetch(task, stream, space)
        except StopIteration:
            if not self._is_iterable:
                raise
            stream.has_ended = True
            return StreamEnd(task.serial, task.stream, self._streams.take_snapshot(stream))

    def _fetch(self, task: Task, stream: Stream, space: Space) -> Done:
        if not (self._job.has_default_collate and self._job.auto_collation):
            # While it is collated there are the samples and the batch.
            copies = 2 if self._job.auto_collation else 1
            return self._pack(task, stream.fetcher.fetch(task.indices), space, copies)
        if not self._is_iterable and getattr(stream.dataset, "__getitems__", None):
            samples = stream.dataset.__getitems__(task.indices)
            return self._pack(task, _collate_list(samples, space), space)
        return self._fetch_by_rows(task, stream, space)

    def _fetch_by_rows(self, task: Task, stream: Stream, space: Space) -> Done:
        gather = self._choose_gather(task, stream)
        gathered = gather(1)
        if not gathered:
            if self._is_iterable:
                raise StopIteration
            return self._pack(task, torch_compat.collate_privately([]), space)
        rows = self._lay_out(gathered[0], len(task.indices))
        if rows is None:
            gathered += gather(None)
            self._refuse_short(task, len(gathered))
            return self._pack(task, _collate_list(gathered, space), space)
        try:
            if not self._is_iterable:
                # An iterable's own loop variable holds its sample too: there nothing can be told.
                rows.keep_held(gathered[0], self._count_usual_holders(rows))
            space = self._open_rows(task, rows, gather, space)
            return self._fill_rows(task, rows, gathered, gather, space)
        finally:
            rows.clear()

    def _lay_out(self, first: Any, length: int) -> Rows | None:
        """The rows for a batch that begins with `first`; those of the last one, if they fit."""
        if self._rows is not None and self._rows.try_begin(first, length):
            return self._rows
        self._rows = plan_rows(first, length)
        return self._rows

    def _open_rows(self, task: Task, rows: Rows, gather: Gather, space: Space) -> Space:
        if rows.size_bytes <= INLINE_BYTES:
            rows.open_alone()
            return space
        if rows.size_bytes > space.capacity_bytes:
            try:
                space = self._ask_for_room(task, rows.size_bytes)
            except _NoRoom:
                while gather(1):  # the stream's random state must move on as in torch
                    pass
                raise
        rows.open_in(space)
        return space

    def _fill_rows(
        self, task: Task, rows: Rows, gathered: list[Any], gather: Gather, space: Space
    ) -> Done:
        count, most = 0, rows.gather_count
        gathered += gather(most - 1) if most > 1 else []
        while gathered:
            count += len(gathered)
            if not rows.put(gathered):
                listed = [*rows.unwrite(), *gathered, *gather(None)]
                self._refuse_short(task, len(listed))
                return self._pack(task, torch_compat.collate_privately(listed), space)
            gathered.clear()  # before the next is made, not after
            gathered += gather(most)
        self._refuse_short(task, count)
        if not rows.write_kept():
            return self._pack(task, torch_compat.collate_privately(rows.unwrite()), space)
        return self._ship_rows(task, rows, space)

    def _count_usual_holders(self, rows: Rows) -> tuple[int, ...]:
        if rows.usual is None:
            rows.usual = self._usual_holders.get(rows.kind)
        if rows.usual is None:
            if len(self._usual_holders) > _MOST_HEADS:
                self._usual_holders.clear()
            # Held by a list, and by nobody else, as real samples are.
            fresh = _gather_map(_FreshSamples(rows), iter((0,)), 1)
            rows.usual = self._usual_holders[rows.kind] = rows.count_usual(fresh[0])
        return rows.usual

    def _ship_rows(self, task: Task, rows: Rows, space: Space) -> Done:
        """A batch whose head is known needs no pickling, and its bytes are where they belong."""
        outline = rows.outline
        head = self._heads.get(outline) if outline is not None else None
        if head is None or len(head) + rows.size_bytes > INLINE_BYTES >= rows.size_bytes:
            return self._ship(task, self._encode_rows(rows, outline), space)
        if rows.size_bytes <= INLINE_BYTES:
            return Done(task.serial, head, (), rows.take_alone(), 0, 0, None)
        if len(head) > HEAD_BYTES:
            return self._ship(task, self._encode_rows(rows, outline), space)
        spans = tuple((space.locate(offset), length) for offset, length in rows.locate())
        return Done(task.serial, head, spans, (), space.used_bytes, space.used_bytes, None)

    def _encode_rows(self, rows: Rows, outline: Any) -> Encoded:
        """The batch taken apart. Equal outlines have equal heads: pickled once, then known."""
        head = self._heads.get(outline) if outline is not None else None
        if head is not None:
            return Encoded(head, tuple(rows.buffers()))
        encoded = encode(rows.finish())
        if outline is not None and len(encoded.buffers) == len(rows.fields):
            if len(self._heads) > _MOST_HEADS:
                self._heads.clear()
            self._heads[outline] = encoded.head
        return encoded

    def _choose_gather(self, task: Task, stream: Stream) -> Gather:
        """How to get the next samples of a task, in torch's order of calls."""
        if not self._is_iterable:
            indices = iter(task.indices)
            return lambda most: _gather_map(stream.dataset, indices, most)
        samples = _iterate_stream(stream.fetcher, len(task.indices))
        return lambda most: list(itertools.islice(samples, most))

    def _refuse_short(self, task: Task, count: int) -> None:
        if self._is_iterable and self._job.drop_last and count < len(task.indices):
            raise StopIteration

    # -- the result -------------------------------------------------------------------------

    def _pack(self, task: Task, batch: Any, space: Space, copies: int = 1) -> Done:
        """A batch that was collated from a list; `copies` of it were on the heap at once."""
        encoded = encode(batch)
        del batch  # what nobody else holds may be given up while it is copied
        self._listed_bytes = copies * sum(buffer.nbytes for buffer in encoded.buffers)
        return self._ship(task, encoded, space)

    def _ship(self, task: Task, encoded: Encoded, space: Space) -> Done:
        head = encoded.head
        lengths = [buffer.nbytes for buffer in encoded.buffers]
        if sum(lengths) + len(head) <= INLINE_BYTES and not space.used_bytes:
            inline = tuple(bytearray(buffer.data) for buffer in encoded.buffers)
            return Done(task.serial, head, (), inline, 0, 0, None)
        if len(head) > HEAD_BYTES:
            buffers = (*encoded.buffers, np.frombuffer(head, np.uint8))
            encoded = Encoded(b"", buffers, encoded.wholes)
        return self._write(task, encoded, space)

    def _write(self, task: Task, encoded: Encoded, space: Space) -> Done:
        pours = [
            buffer.nbytes >= POUR_LEAST_BYTES and encoded.is_forsaken(number)
            for number, buffer in enumerate(encoded.buffers)
        ]
        poured = sum(
            b.nbytes for b, is_poured in zip(encoded.buffers, pours, strict=True) if is_poured
        )
        spans = [space.reserve(buffer) for buffer in encoded.buffers]
        if None in spans:
            # Too small: main gives another block, and what lies in the old one is copied
            # over before main hears `Done` and takes the old one back.
            size = estimate_size([buffer.nbytes for buffer in encoded.buffers])
            space = self._ask_for_room(task, size, poured)
            spans = [space.reserve(buffer) for buffer in encoded.buffers]
        placed = [span for span in spans if span is not None]
        assert len(placed) == len(spans)
        for span, buffer, is_poured in zip(placed, encoded.buffers, pours, strict=True):
            space.fill(span, buffer, pours=is_poured)
        self._poured_bytes = poured
        used = space.used_bytes
        return Done(task.serial, encoded.head, tuple(placed), (), used, used, None)

    def _ask_for_room(self, task: Task, size_bytes: int, poured_bytes: int = 0) -> Space:
        """A block that is large enough; tasks that arrive meanwhile wait in the inbox."""
        self.channel.send(Need(task.serial, size_bytes, poured_bytes))
        room: Room | None = None
        while room is None:
            for message in self.channel.receive():
                if isinstance(message, Room) and message.serial == task.serial:
                    room = message
                else:
                    self._put_aside(message)
                    if isinstance(message, Retire):
                        raise _Dismissed
        if not room.capacity_bytes:
            raise _NoRoom
        return Space(self._mapping, room.offset, room.capacity_bytes)


@final
class _FreshSamples:
    """A dataset whose samples nobody else holds."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitem__(self, index: int) -> Any:
        return self._rows.make_fresh()


def _collate_list(samples: list[Any], space: Space) -> Any:
    """torch's `default_collate`, its stacks written into the block where they fit."""
    return torch_compat.collate_privately(samples, space.take)


def _gather_map(dataset: Any, indices: Iterator[Any], most: int | None) -> list[Any]:
    """The next `most` samples, or as many as there are."""
    try:
        return [dataset[index] for index in itertools.islice(indices, most)]
    except StopIteration as stop:
        raise _StoppedInDataset(stop) from None


def _iterate_stream(fetcher: Any, length: int) -> Any:
    """Up to `length` samples of an iterable dataset, with torch's rules of ending."""
    if fetcher.ended:
        raise StopIteration
    iterator = fetcher.dataset_iter

    def samples() -> Any:
        for _ in range(length):
            try:
                yield next(iterator)
            except StopIteration:
                fetcher.ended = True
                return

    return samples()


def _wrap_stopped(stop: StopIteration, stream: int) -> Any:
    stop.__context__ = None
    try:
        raise stop
    except StopIteration:
        return _wrap_error(stream)


def _wrap_error(stream: int) -> Any:
    """The current exception as torch wraps it; as text alone if its class cannot travel."""
    wrapped = torch_compat.WorkerException(where=f"in DataLoader worker process {stream}")
    try:
        pickle.loads(pickle.dumps(wrapped))
    except Exception:
        wrapped.exc_type = RuntimeError
    return wrapped
