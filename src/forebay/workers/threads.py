"""Workers that are threads of this process.

Covers: a crew with the interface of crew.py, whose workers run the very loop that worker
processes run (worker.py), and how they are talked to and ended. Does not cover: what they
are told (flow/scheduler.py), random generators (randomness.py).

Messages go through queues as they are: nothing is pickled, and an eventfd wakes whoever
polls. What a process may set for itself (signal handlers, the number of torch's threads,
global generators, the allocator) is the training code's here, and stays untouched.

A thread cannot be killed. One that is told to end does so before its next batch; if user
code holds it for longer, it is left behind: it writes to nothing that others use, and as a
daemon it does not keep the interpreter from exiting.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
import traceback
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast, final

from forebay import torch_compat
from forebay.workers.channel import ChannelClosed
from forebay.workers.crew import RETIRE_S, Heard
from forebay.workers.messages import Keep, Refresh, Retire, Task
from forebay.workers.space import Mapping
from forebay.workers.worker import Worker

if TYPE_CHECKING:
    from forebay.transport.arena import Arena
    from forebay.workers.crew import WorkerProcess
    from forebay.workers.job import Job
    from forebay.workers.messages import Hatched

_WAKE = (1).to_bytes(8, "little")  # what an eventfd wants to be written; a pipe takes it too


@final
class _Leave:
    """Told to a thread instead of a signal: end, and run no exit function."""


@final
class _Gone:
    """The last word of a thread."""


@final
class _Voice:
    """What all workers of a crew have said, and a descriptor that becomes readable then.

    It is rung only while somebody waits: a system call lets go of the interpreter lock, and
    with busy threads around that costs more than a small batch does. A worker appends before
    it looks whether somebody waits; who is going to wait says so before looking whether
    something was said: so either sees the other.

    Attributes:
        has_consumer: Somebody waits who will hear (under the engine's lock).
        has_clock: The clock waits.
    """

    def __init__(self) -> None:
        self.has_consumer = False
        self.has_clock = False
        self._said: deque[tuple[int, Any]] = deque()
        self._has_rung = False  # set after ringing, so that no ring is ever overlooked
        self._lock = threading.Lock()  # between ringing and closing: a number is used again
        if hasattr(os, "eventfd"):
            self._in = self._out = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self._in, self._out = os.pipe()
            os.set_blocking(self._in, False)
            os.set_blocking(self._out, False)

    def fileno(self) -> int:
        return self._in

    def say(self, worker: int, message: object) -> None:
        """For any worker thread."""
        self._said.append((worker, message))
        if not (self.has_consumer or self.has_clock) or self._has_rung:
            return
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._out >= 0:
                os.write(self._out, _WAKE)
        self._has_rung = True

    @property
    def is_silent(self) -> bool:
        """Whether there is nothing to hear."""
        return not self._said

    def has_words(self) -> bool:
        """Whether there is something to hear; the descriptor is silent again."""
        if self._has_rung:
            self._has_rung = False
            with contextlib.suppress(BlockingIOError):
                os.read(self._in, 4096)
        return bool(self._said)

    def hear(self) -> list[tuple[int, Any]]:
        """Everything said since the last call, in order."""
        return [self._said.popleft() for _ in range(len(self._said))]

    def close(self) -> None:
        with self._lock:
            for fd in {self._in, self._out} - {-1}:
                os.close(fd)
            self._in = self._out = -1


@final
class ThreadChannel:
    """A worker thread's connection: `Channel`'s verbs for the worker, `put` for main.

    Args:
        number: The worker.
        voice: Where it speaks.
    """

    has_unsent = False
    """A queue takes everything."""

    def __init__(self, number: int, voice: _Voice) -> None:
        self._number = number
        self._voice = voice
        self._inbox: SimpleQueue[list[Any]] = SimpleQueue()
        self.posted: list[Any] = []

    def put(self, messages: list[Any]) -> None:
        """Main says something."""
        self._inbox.put(messages)

    def send(self, message: object) -> None:
        """The worker says something."""
        self._voice.say(self._number, message)

    def receive(self) -> list[Any]:
        """All that waits for the worker; at least one message.

        Raises:
            ChannelClosed: It is to leave.
        """
        messages = self._inbox.get()
        for _ in range(self._inbox.qsize()):
            messages += self._inbox.get()
        if any(isinstance(message, _Leave) for message in messages):
            raise ChannelClosed
        return messages

    def has_waiting(self) -> bool:
        """Whether there is something to receive."""
        return not self._inbox.empty()


@final
class WorkerThread:
    """One worker, with the verbs of `multiprocessing.Process` that frameworks use on it."""

    def __init__(self, number: int, streams: tuple[int, ...], worker: Any, voice: _Voice) -> None:
        self.number = number
        self.streams = streams
        self.channel: ThreadChannel = worker.channel
        self.name = f"forebay-worker-{number}"
        self.daemon = True
        self.exitcode: int | None = None
        self.known_pid = os.getpid()
        self.has_ended = False  # as main has heard it: after all that the worker has said
        self.is_retired = False
        self.is_spare = False
        self.why_unable = ""
        self._is_told_to_leave = False
        self._thread = threading.Thread(
            target=self._work, args=(worker, voice), name=self.name, daemon=True
        )

    @property
    def pid(self) -> int:
        """The id of this process."""
        return self.known_pid

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether it still runs; in a forked child it does not."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds. In the thread itself: do not wait."""
        if self.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def terminate(self) -> None:
        """Have it end before its next batch. A thread cannot be interrupted."""
        self._is_told_to_leave = True
        self.channel.put([_Leave()])

    def kill(self) -> None:
        """The same: nothing is stronger."""
        self.terminate()

    def _work(self, worker: Any, voice: _Voice) -> None:
        try:
            self.exitcode = self._serve(worker)
        finally:
            voice.say(self.number, _Gone())

    def _serve(self, worker: Any) -> int:
        torch_compat.set_worker_thread_name()
        torch_compat.use_one_thread_here()
        try:
            worker.serve()
        except ChannelClosed:
            return -signal.SIGTERM if self._is_told_to_leave else 0
        except KeyboardInterrupt:
            return 0  # user code raised it: a worker process leaves quietly then
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # as in a process: it tells, and is gone
            traceback.print_exc()
            return 1
        return 0


@final
class ThreadCrew:
    """The interface of `Crew`, with threads of this process and no template.

    Args:
        job: What workers make.
        arena: Where they put it.
        streams_of: For each worker the streams that it carries.
    """

    zygote_pid = 0
    """There is none."""

    def __init__(self, job: Job, arena: Arena, streams_of: tuple[tuple[int, ...], ...]) -> None:
        torch_compat.tell_threads_apart()
        self.start_method = "thread"
        self.hatched: Hatched | None = None
        self.fault: BaseException | None = None
        self.changes = 0
        self._owner_pid = os.getpid()
        self._is_over = False
        self._voice = _Voice()
        self.workers: list[WorkerProcess] = []
        mapping = Mapping(arena.mapping)
        for number, streams in enumerate(streams_of):
            # Made here, not in the thread: datasets are copied as they are now.
            channel = ThreadChannel(number, self._voice)
            worker = Worker(channel, job, streams, mapping, in_thread=True)
            self.workers.append(_as_process(WorkerThread(number, streams, worker, self._voice)))
        for each in self.workers:
            try:
                _as_thread(each).start()
            except RuntimeError as error:  # the system has no more threads for us
                each.why_unable = str(error)
                self._voice.say(each.number, _Gone())

    def register(self, poller: select.poll) -> None:
        """Have `poller` wake when anybody says something."""
        if self._voice.fileno() >= 0:
            poller.register(self._voice.fileno(), select.POLLIN)

    def register_worker(self, poller: select.poll, worker: WorkerProcess) -> None:
        """Nothing: all speak through one descriptor."""

    def wait(self, timeout_s: float, bell: int) -> None:
        """For the clock, without the engine's lock: until somebody speaks or `bell` rings."""
        poller = select.poll()
        self.register(poller)
        if bell >= 0:
            poller.register(bell, select.POLLIN)
        self._voice.has_clock = True
        if self._voice.is_silent:  # a look alone: who reads the descriptor holds the lock
            poller.poll(timeout_s * 1000)
        self._voice.has_clock = False

    def poll(self, poller: select.poll, timeout_s: float) -> set[int]:
        """Descriptors of those who have said something; waits at most so long for one."""
        voice = self._voice
        if voice.has_words():
            return {voice.fileno()}
        if timeout_s <= 0:
            return set()
        voice.has_consumer = True
        if not voice.has_words():
            poller.poll(timeout_s * 1000)
        voice.has_consumer = False
        return {voice.fileno()} if voice.has_words() else set()

    def hear(self, ready: set[int]) -> list[Heard]:
        """What the workers have said, in order."""
        if self._voice.fileno() not in ready:
            return []
        heard = []
        for number, message in self._voice.hear():
            worker = self.workers[number]
            if isinstance(message, _Gone):
                worker.has_ended = True
            else:
                heard.append(Heard(worker, message))
        return heard

    def tell(self, worker: WorkerProcess, message: object) -> None:
        """Send `message`; to a worker that is gone it is simply lost."""
        self.post(worker, message)
        self.flush(worker)

    def post(self, worker: WorkerProcess, message: object) -> None:
        """The same, sent with the next `flush`."""
        if isinstance(message, Keep):
            return  # the heap is the training code's
        if isinstance(message, Task) and isinstance(message.indices, list):
            message = message._replace(indices=list(message.indices))  # a sampler's own, perhaps
        _as_thread(worker).channel.posted.append(message)

    def dismiss(self, worker: WorkerProcess) -> None:
        """Have one worker end in an orderly way."""
        worker.is_retired = True
        self.tell(worker, Retire())

    def refresh(self, dataset: Any) -> None:
        """Have all workers draw from this dataset."""
        for worker in self.workers:
            self.tell(worker, Refresh(dataset))

    def flush(self, worker: WorkerProcess) -> None:
        """Send what was posted."""
        channel = _as_thread(worker).channel
        if channel.posted:
            posted, channel.posted = channel.posted, []
            channel.put(posted)

    def read_control(self) -> None:
        """Nothing: threads say themselves that they end."""

    def wait_for(self, is_true: Any, timeout: float | None) -> None:
        """Wait until `is_true()`, at most `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not is_true() and (until is None or time.monotonic() < until):
            time.sleep(0.001)

    def kill(self) -> None:
        """Have all workers count as gone, which ends a wait for them; for any thread."""
        for worker in self.workers:
            worker.terminate()
            self._voice.say(worker.number, _Gone())

    def retire(self) -> None:
        """End all workers in an orderly way. Bounded; safe to call twice."""
        if os.getpid() != self._owner_pid or self._is_over:
            return
        self._is_over = True
        for worker in self.workers:
            worker.is_retired = True
            self.tell(worker, Retire())
        until = time.monotonic() + RETIRE_S
        for worker in self.workers:
            worker.join(max(0.0, until - time.monotonic()))
            worker.has_ended = True
        self._voice.close()


# The scheduler is written for the workers of crew.py; a test compares the two interfaces.


def _as_process(worker: WorkerThread) -> WorkerProcess:
    return cast("WorkerProcess", worker)


def _as_thread(worker: WorkerProcess) -> WorkerThread:
    return cast("WorkerThread", worker)
