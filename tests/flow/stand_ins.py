"""A crew without processes, and an engine without threads: every message is moved by the test.

A stand-in worker does what a real one does with its tasks, one step at a time, when it is told:
it writes its batch into its block, asks for room when the block is too small, and waits for the
answer. So a test decides in which order things happen, and sees when nothing can happen any more.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from forebay.flow.admission import Admission
from forebay.flow.flight import Delivered, End, Inline, Refused, Settings
from forebay.flow.order import Order
from forebay.flow.progress import Progress
from forebay.flow.scheduler import Scheduler
from forebay.memory.ledger import Ledger
from forebay.memory.planner import split_streams
from forebay.transport.arena import Arena
from forebay.transport.lease import INLINE_BYTES, Lender, Ready
from forebay.units import GIB
from forebay.workers.crew import Heard
from forebay.workers.messages import (
    DISCARD,
    Done,
    Failed,
    Made,
    Need,
    Resume,
    Room,
    StreamEnd,
    Task,
)


@dataclass(frozen=True)
class Batch:
    """What the sampler gives for a ticket: how large its batch is, or what happens instead."""

    size_bytes: int
    making_bytes: int = 0
    raises: bool = False
    is_poured: bool = False


class Channel:
    has_unsent = False


class Worker:
    """One stand-in worker."""

    def __init__(self, number: int, streams: tuple[int, ...], arena: Arena) -> None:
        self.number = number
        self.streams = streams
        self.channel = Channel()
        self.has_ended = self.is_retired = False
        self.why_unable = ""
        self.known_pid, self.exitcode = 1000 + number, None
        self.told: deque[Any] = deque()
        self.seen: list[Any] = []
        self.lengths: dict[int, int] = {}  # stream -> batches until it ends
        self._posted: list[Any] = []
        self._waiting: Task | None = None
        self._arena = arena

    @property
    def heap_bytes(self) -> int:
        """What the batch at hand takes beside its block: at its most while it waits for one."""
        return self._waiting.indices.making_bytes if self._waiting is not None else 0

    @property
    def can_step(self) -> bool:
        """Whether there is something to do: not while it waits for an answer."""
        if self._waiting is None:
            return bool(self.told)
        return any(self._is_answer(message) for message in self.told)

    def post(self, message: Any) -> None:
        self._posted.append(message)

    def flush(self) -> None:
        self.told.extend(self._posted)
        self._posted.clear()

    def step(self) -> Any:
        """Do one thing; what is said to main, or None."""
        if self._waiting is not None:
            room = next(message for message in self.told if self._is_answer(message))
            self.told.remove(room)
            task, self._waiting = self._waiting, None
            return self._write(task, room.offset, room.capacity_bytes)
        message = self.told.popleft()
        self.seen.append(message)
        if isinstance(message, Resume):
            return None
        return self._make(message)

    def _is_answer(self, message: Any) -> bool:
        assert self._waiting is not None
        return isinstance(message, Room) and message.serial == self._waiting.serial

    def _make(self, task: Task) -> Any:
        if task.capacity_bytes == DISCARD:
            return Done(task.serial, b"", (), (), 0, 0, None)
        left = self.lengths.get(task.stream)
        if left == 0:
            return StreamEnd(task.serial, task.stream)
        if left is not None:
            self.lengths[task.stream] = left - 1
        batch = task.indices
        if batch.raises:
            return Failed(task.serial, f"batch {task.serial} failed")
        if batch.size_bytes <= INLINE_BYTES:
            marked = bytearray([mark_of(task.serial)]) * batch.size_bytes
            return Done(task.serial, b"head", (), (marked,), 0, 0, None)
        if batch.size_bytes > task.capacity_bytes:
            self._waiting = task
            poured = batch.size_bytes if batch.is_poured else 0
            return Need(task.serial, batch.size_bytes, poured)
        return self._write(task, task.offset, task.capacity_bytes)

    def _write(self, task: Task, offset: int, capacity_bytes: int) -> Any:
        if not capacity_bytes:
            return None  # there is no room: the batch is dropped
        size = task.indices.size_bytes
        assert size <= capacity_bytes
        self._arena.mapping[offset : offset + size] = bytes([mark_of(task.serial)]) * size
        made = Made(task.indices.making_bytes, 0, -1) if task.is_metered else None
        return Done(task.serial, b"head", ((offset, size),), (), size, size, made)


class Crew:
    """The stand-in for the crew: what it hears is what the test lets it hear."""

    def __init__(self, arena: Arena, streams_of: Iterable[tuple[int, ...]]) -> None:
        self.workers = [Worker(n, streams, arena) for n, streams in enumerate(streams_of)]
        self.fault: BaseException | None = None
        self.changes = 0
        self._bell, self._rope = os.pipe()
        os.write(self._rope, b"!")  # the poller always finds that somebody has said something
        self._said: list[Heard] = []
        self.zygote_pid = 999
        self.start_method = "fork"
        self.hatched = None
        self.spares: list[Worker] = []
        self.told: list[tuple[int, Any]] = []  # what was said outside of tickets

    def tell(self, worker: Worker, message: Any) -> None:
        self.told.append((worker.number, message))

    def start_spare(self) -> Worker:
        spare = Worker(100 + len(self.spares), (), self.workers[0]._arena)
        self.spares.append(spare)
        return spare

    def register(self, poller: select.poll) -> None:
        poller.register(self._bell, select.POLLIN)

    def register_worker(self, poller: select.poll, worker: Worker) -> None:
        pass

    def poll(self, poller: select.poll, timeout_s: float) -> set[int]:
        return {fd for fd, _ in poller.poll(timeout_s * 1000)}

    def post(self, worker: Worker, message: object) -> None:
        worker.post(message)

    def flush(self, worker: Worker) -> None:
        worker.flush()

    def say(self, worker: Worker, message: Any) -> None:
        self._said.append(Heard(worker, message))  # type: ignore[arg-type]

    def hear(self, ready: set[int]) -> list[Heard]:
        said, self._said = self._said, []
        return said

    def close(self) -> None:
        os.close(self._bell)
        os.close(self._rope)


def mark_of(serial: int) -> int:
    """What every byte of a batch is."""
    return serial % 250 + 1


def make_progress(num_streams: int, *, in_order: bool = True) -> Progress:
    """The progress of a loader over a map-style dataset."""
    loader = SimpleNamespace(
        in_order=in_order,
        seeding="torch",
        dataset=None,
        num_workers=num_streams,
        persistent_workers=False,
        _dataset_kind=0,
    )
    return Progress(loader, None)


@dataclass
class Got:
    """A delivered batch: its marks, and the buffers while they are held."""

    mark: int
    buffers: list[Any] = field(default_factory=list)


class Rig:
    """A scheduler with everything around it, worked by hand."""

    def __init__(
        self,
        batches: Iterable[Batch],
        *,
        num_streams: int = 2,
        workers: int = 0,
        budget_bytes: int = GIB,
        is_bound: bool = True,
        lengths: Callable[[int], int] | None = None,
        **settings: Any,
    ) -> None:
        self.arena = Arena(4 * budget_bytes)
        self.lender = Lender(self.arena)
        self.ledger = Ledger(budget_bytes)
        self.crew = Crew(self.arena, split_streams(num_streams, workers or num_streams))
        if lengths is not None:
            for worker in self.crew.workers:
                worker.lengths = {stream: lengths(stream) for stream in worker.streams}
        self.admission = Admission(self.arena, self.lender, self.ledger)
        self.order = Order(num_streams, is_bound=is_bound, seed_of=None)
        usual: dict[str, Any] = {
            "num_streams": num_streams,
            "lead": 2 * num_streams,
            "most_ahead": 2 * num_streams,
            "may_run_ahead": False,
            "draws_strictly": True,
            "in_order": True,
            "batch_size": 8,
            "tokens": len(self.crew.workers),
        }
        self.scheduler = Scheduler(
            self.crew,  # type: ignore[arg-type]
            self.admission,
            self.order,
            Settings(**(usual | settings)),
            make_progress(num_streams, in_order=settings.get("in_order", True)),
        )
        if budget_bytes >= GIB:  # as if a batch had been made before: they begin at once
            self.scheduler.ahead.slow_start.end()
        self.held: deque[Got] = deque()
        self._is_waiting = False
        self.scheduler.start_epoch(iter(batches), is_first=True)

    @property
    def workers(self) -> list[Worker]:
        return self.crew.workers

    @property
    def steppable(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.can_step]

    @property
    def tasks(self) -> list[int]:
        """Serials of the tasks that workers have and have not begun."""
        return sorted(
            message.serial
            for worker in self.workers
            for message in worker.told
            if isinstance(message, Task)
        )

    def step(self, worker: Worker) -> None:
        """Let one worker do one thing, and main take it in as its clock does."""
        said = worker.step()
        if said is not None:
            self.crew.say(worker, said)
        self.scheduler.listen(0)
        self.scheduler.dispatch()

    def run_all(self) -> None:
        """Until no worker has anything to do."""
        while self.steppable:
            self.step(self.steppable[0])

    def ask(self) -> Delivered | None:
        """What `next` finds; None when it would have to wait."""
        if not self._is_waiting:
            self.admission.note_arrival()
        self.scheduler.listen(0)
        landed = self.scheduler.try_next()
        self._is_waiting = landed is None
        if landed is None:
            self.scheduler.dispatch()
            return None
        self.scheduler.note_delivery(0.0, 1.0)
        return landed

    def open(self, landed: Ready | Inline) -> Got:
        """The batch as the consumer holds it, and its bytes compared with what was written."""
        if isinstance(landed, Inline):
            buffers: list[Any] = list(landed.buffers)
        elif self.admission.should_copy_out(landed):
            buffers = self.lender.copy_out(landed)
        else:
            buffers = self.lender.lend(landed)
        content = bytes(memoryview(buffers[0]).cast("B"))
        assert content == content[:1] * len(content)
        return Got(content[0], buffers)

    def take(self) -> Got | Refused | Failed | End | None:
        """One whole `next`: None when it would have to wait."""
        landed = self.ask()
        if landed is None or isinstance(landed, (Refused, Failed, End)):
            self.scheduler.dispatch()
            return landed
        assert isinstance(landed, (Ready, Inline))
        got = self.open(landed)
        self.scheduler.dispatch()
        return got

    def take_now(self) -> Any:
        """The same when workers may do all they can before."""
        while (got := self.take()) is None:
            assert self.steppable, "nobody can do anything any more, and the consumer waits"
            self.step(self.steppable[0])
        return got

    def take_all(self) -> list[Any]:
        """The marks of all that is left, each let go at once; errors as they are."""
        found: list[Any] = []
        while not isinstance(got := self.take_now(), End):
            found.append(got.mark if isinstance(got, Got) else got)
            del got
        return found

    def close(self) -> None:
        self.held.clear()
        self.scheduler.close()
        self.crew.close()
        self.arena.close()
