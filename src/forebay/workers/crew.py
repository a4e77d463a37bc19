"""The workers alive now, as main sees them.

Covers: starting the zygote and through it the workers, talking to each, learning of their
ends, and ending them all. Does not cover: what they are told (flow/scheduler.py).

Nothing here waits for a worker to start: its socket exists before it does, and tasks wait
in it. What the zygote says (pids, exits) is read whenever somebody looks.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from multiprocessing import process as mp_process
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, final

from forebay.errors import NestedLoader
from forebay.transport.lease import own_fork
from forebay.workers.channel import Channel, ChannelClosed, make_channel_sockets
from forebay.workers.culprit import find_culprit, name_culprit
from forebay.workers.messages import (
    Exited,
    Hatched,
    Kill,
    Quit,
    Refresh,
    Retire,
    Spoiled,
    Start,
    Started,
    Unable,
)
from forebay.workers.zygote import ArenaHandle, Unsealed, interrupts_blocked, run_zygote

if TYPE_CHECKING:
    from forebay.transport.arena import Arena
    from forebay.workers.job import Job

RETIRE_S = 5.0
"""How long workers may take to leave before they are killed; torch's own patience."""

_HATCH_S = 300.0
"""Longest wait for a pid: unpickling a large dataset takes minutes."""

_FOLLOW_S = 2.0
"""Longest wait for a worker whose template ended: the kernel kills it in the same moment."""

_LOOK_S = 0.1
"""Longest single wait for the zygote's words: another thread may have read them meanwhile."""


@final
class WorkerProcess:
    """One worker, with the verbs of `multiprocessing.Process` that frameworks use on it."""

    def __init__(self, number: int, streams: tuple[int, ...], channel: Channel, crew: Crew) -> None:
        self.number = number
        self.streams = streams
        self.channel = channel
        self.name = f"Process-{number + 1}"
        self.daemon = True
        self.exitcode: int | None = None
        self.known_pid: int | None = None
        self.has_ended = False
        self.is_retired = False
        self.why_unable = ""  # why it could not be started
        self.is_spare = False  # started to take over streams, and carries none yet
        self._crew = crew
        self._pidfd = -1

    @property
    def pid(self) -> int | None:
        """Its process id; waits until the zygote has said it."""
        if self.known_pid is None:
            self._crew.wait_for(self._has_pid, _HATCH_S)
        return self.known_pid

    def _has_pid(self) -> bool:
        return self.known_pid is not None or self.has_ended

    def is_alive(self) -> bool:
        """Whether it still runs."""
        self._crew.read_control()
        return not self.has_ended

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds."""
        self._crew.wait_for(lambda: self.has_ended, timeout)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def started(self, pid: int, pidfd: int) -> None:
        """The zygote has forked it."""
        self.known_pid, self._pidfd = pid, pidfd

    def ended(self, exit_code: int | None) -> None:
        """It is gone; `exit_code` as far as known."""
        self.exitcode, self.has_ended = exit_code, True
        self._close_pidfd()

    def await_end(self, timeout_s: float) -> None:
        """Wait until the process is gone, of which the zygote will not tell any more."""
        if self._pidfd >= 0:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(timeout_s * 1000)

    def close(self) -> None:
        """Let go of descriptors."""
        self.channel.close()
        self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _signal(self, number: signal.Signals) -> None:
        if self.has_ended or self.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)  # never hits a reused pid
            else:
                os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class Heard:
    """A message of one worker."""

    worker: WorkerProcess
    message: Any


@final
class Crew:
    """One zygote and its workers.

    Args:
        context: The user's multiprocessing context.
        job: What workers make.
        arena: Where they put it.
        streams_of: For each worker the streams that it carries.

    Raises:
        NestedLoader: This process may not have children.
        Exception: What pickling the job raises, under spawn and forkserver.
    """

    def __init__(
        self, context: Any, job: Job, arena: Arena, streams_of: tuple[tuple[int, ...], ...]
    ) -> None:
        current = multiprocessing.current_process()
        if current.daemon:
            raise NestedLoader.about(current.name, job.num_streams)
        self.start_method: str = context.get_start_method()
        self.hatched: Hatched | None = None
        self.fault: BaseException | None = None
        self.changes = 0
        """How often channels came or were closed: pollers must be made anew then."""
        self._owner_pid = os.getpid()
        self._is_over = False
        # Guards reading the zygote's channel: frameworks ask workers whether they live, from
        # threads that do not hold the engine's lock. Taken after it, never before.
        self._control_lock = threading.Lock()
        self.workers: list[WorkerProcess] = []
        self._leaving: list[WorkerProcess] = []  # told to end, and not gone yet
        self._by_number: dict[int, WorkerProcess] = {}
        self._numbers = itertools.count()
        self._refresh: Refresh | None = None
        self._has_hatched = False  # any template of this crew
        self._context, self._job, self._arena = context, job, arena
        self._zygote, self._control = self._start_zygote()
        try:
            for streams in streams_of:
                self.workers.append(self._start_worker(streams))
        except BaseException:
            self._end_zygote()
            raise

    @property
    def zygote_pid(self) -> int:
        """The process that stands for the whole tree below it."""
        return self._zygote.pid or 0

    def register(self, poller: select.poll) -> None:
        """Have `poller` wake when anybody says something."""
        control = self._control.fileno()
        if control >= 0:
            poller.register(control, select.POLLIN)
        for worker in self._everybody():
            self.register_worker(poller, worker)

    def _everybody(self) -> list[WorkerProcess]:
        return [*self.workers, *self._leaving]

    def register_worker(self, poller: select.poll, worker: WorkerProcess) -> None:
        """The same for one worker; also when its socket takes what it did not take before."""
        fd = worker.channel.fileno()  # read once: the clock asks while others may close it
        if fd >= 0:
            wanted = select.POLLIN | (select.POLLOUT if worker.channel.has_unsent else 0)
            poller.register(fd, wanted)

    def wait(self, timeout_s: float, bell: int) -> None:
        """For the clock, without the engine's lock: until somebody speaks or `bell` rings."""
        poller = select.poll()
        self.register(poller)
        if bell >= 0:
            poller.register(bell, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def poll(self, poller: select.poll, timeout_s: float) -> set[int]:
        """Descriptors of those who have said something; waits at most so long for one."""
        return {fd for fd, _ in poller.poll(timeout_s * 1000)}

    def hear(self, ready: set[int]) -> list[Heard]:
        """What the workers whose descriptors are in `ready` have said, each in its order."""
        if self._control.fileno() in ready:
            self.read_control()
        heard = []
        for worker in self._everybody():
            if worker.channel.fileno() in ready:
                heard += [Heard(worker, message) for message in self._receive(worker)]
        # A worker's end may be known before its last words were read: read them now, since
        # whoever sees the end takes it that nothing more will come.
        for worker in self._everybody():
            if worker.has_ended and worker.channel.fileno() >= 0:
                heard += [Heard(worker, message) for message in self._receive(worker)]
        for worker in [worker for worker in self._leaving if worker.has_ended]:
            self._leaving.remove(worker)
            del self._by_number[worker.number]
            worker.close()
            self.changes += 1
        return heard

    # -- one more, one less ---------------------------------------------------------------

    def start_spare(self) -> WorkerProcess:
        """Start a worker that carries no stream yet; that it cannot be had is no fault."""
        worker = self._start_worker(())
        worker.is_spare = True
        self._leaving.append(worker)  # heard from here on; not one of the crew yet
        self.changes += 1
        return worker

    def install(self, worker: WorkerProcess, instead_of: WorkerProcess | None) -> None:
        """Make a spare worker one of the crew, in the place of another or beside the others."""
        worker.is_spare = False
        self._leaving.remove(worker)
        if instead_of is None:
            self.workers.append(worker)
        else:
            self.workers[self.workers.index(instead_of)] = worker
            self._leaving.append(instead_of)

    def dismiss(self, worker: WorkerProcess) -> None:
        """Have one worker end in an orderly way, at its next look at its messages."""
        worker.is_retired = True
        if worker in self.workers:
            self.workers.remove(worker)
            self._leaving.append(worker)
        self.tell(worker, Retire())

    def _receive(self, worker: WorkerProcess) -> list[Any]:
        """What a worker has said; all that it ever will when it has ended."""
        with contextlib.suppress(ChannelClosed):  # it may have said something before it died
            worker.channel.flush()
        messages: list[Any] = []
        try:
            while received := worker.channel.receive():
                messages += received
                if not worker.has_ended:
                    break
        except ChannelClosed:
            worker.channel.close()
            self.changes += 1
            if not worker.is_retired and not worker.has_ended:
                # The exit status follows from the zygote within milliseconds.
                self.wait_for(lambda: worker.has_ended, RETIRE_S)
        return messages

    def tell(self, worker: WorkerProcess, message: object) -> None:
        """Send `message`; to a worker that is gone it is simply lost."""
        with contextlib.suppress(ChannelClosed):
            worker.channel.send(message)

    def post(self, worker: WorkerProcess, message: object) -> None:
        """The same, sent with the next `flush`."""
        worker.channel.post(message)

    def refresh(self, dataset: Any) -> None:
        """Have all workers, also those started later, draw from this dataset."""
        try:
            self._refresh = Refresh(ForkingPickler.dumps(dataset).tobytes())
        except Exception:
            warnings.warn(
                "refresh_dataset sends the dataset to its workers, and it cannot be pickled."
                + _say_culprit(name_culprit(dataset, "dataset")),
                stacklevel=2,
            )
            raise
        for worker in self._everybody():
            self.tell(worker, self._refresh)

    def flush(self, worker: WorkerProcess) -> None:
        """Send what was posted, as far as the worker's socket takes it."""
        with contextlib.suppress(ChannelClosed):
            worker.channel.flush()

    def read_control(self) -> None:
        """Take in what the zygote has said. Any thread may ask."""
        with self._control_lock:
            if self._control.fileno() < 0:
                return
            try:
                for message in self._control.receive():
                    self._note(message)
            except ChannelClosed:
                self._control.close()
                self.changes += 1
                for worker in self._everybody():
                    if not worker.has_ended:
                        worker.await_end(_FOLLOW_S)
                        worker.ended(None)

    @property
    def has_lost_template(self) -> bool:
        """Whether the template ended although nobody asked it to, and the workers with it."""
        return self._control.fileno() < 0 and not self._is_over

    @property
    def is_stillborn(self) -> bool:
        """Whether the template ended before it could fork a worker: another would end likewise."""
        return self.has_lost_template and not self._has_hatched and self.start_method != "fork"

    def revive(self) -> None:
        """Start another template in the place of one that ended.

        Raises:
            OSError: The system has no process for it.
        """
        with self._control_lock:
            self._zygote.join(RETIRE_S)
            self._zygote.close()
            self.hatched = None
            self._zygote, self._control = self._start_zygote()
            self.changes += 1

    def wait_for(self, is_true: Any, timeout: float | None) -> None:
        """Read the zygote's words until `is_true()`, at most `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        self.read_control()
        while not is_true() and self._control.fileno() >= 0:
            left = _LOOK_S if until is None else min(_LOOK_S, until - time.monotonic())
            if left <= 0:
                return
            poller = select.poll()
            poller.register(self._control.fileno(), select.POLLIN)
            poller.poll(left * 1000)
            self.read_control()

    def kill(self) -> None:
        """End the zygote at once, and with it all workers; for any thread."""
        self._zygote.kill()

    def retire(self) -> None:
        """End all workers in an orderly way, then the zygote. Bounded; safe to call twice."""
        if os.getpid() != self._owner_pid or self._is_over:
            return
        self._is_over = True
        for worker in self._everybody():
            worker.is_retired = True
        if self._may_have_workers():
            for worker in self._everybody():
                self.tell(worker, Retire())
            self._drain_until_gone()
        self._end_zygote()

    def _may_have_workers(self) -> bool:
        """Whether a worker may have begun; unpickling a dataset first can take minutes."""
        self.read_control()
        is_open = self._control.fileno() >= 0
        return is_open and (self.start_method == "fork" or self.hatched is not None)

    def _end_zygote(self) -> None:
        """End it, and let go of all descriptors."""
        with contextlib.suppress(ChannelClosed):
            self._control.send(Quit())
        if self._may_have_workers():
            self._zygote.join(RETIRE_S)
        if self._zygote.is_alive():
            self._zygote.kill()
        self._zygote.join(RETIRE_S)
        self.read_control()
        self._control.close()
        for worker in self._everybody():
            if not worker.has_ended:
                worker.ended(None)
            worker.close()
        self._zygote.close()

    def _drain_until_gone(self) -> None:
        """Read what workers still say, so that none is stuck sending, until all have left."""
        until = time.monotonic() + RETIRE_S
        while not all(worker.has_ended for worker in self._everybody()):
            left = until - time.monotonic()
            if left <= 0 or self._control.fileno() < 0:
                for worker in self._everybody():
                    self._kill(worker)
                self.wait_for(lambda: all(w.has_ended for w in self._everybody()), RETIRE_S)
                return
            poller = select.poll()
            self.register(poller)
            self.hear({fd for fd, _ in poller.poll(left * 1000)})

    def _kill(self, worker: WorkerProcess) -> None:
        with contextlib.suppress(ChannelClosed):
            self._control.send(Kill(worker.number))

    # -- starting ---------------------------------------------------------------------------

    def _start_zygote(self) -> tuple[Any, Channel]:
        job, arena = self._job, self._arena
        if self.start_method == "fork":
            _collect_ahead()
        ours, theirs = make_channel_sockets()
        channel = Channel(ours, is_blocking=False)  # now: a fork then closes this end in the child
        channel.expect_fds()
        given = job if self.start_method == "fork" else Unsealed(job)
        handle = ArenaHandle(arena.fd, arena.reserve_bytes, arena.mapping)
        process = self._context.Process(
            target=run_zygote, args=(theirs, os.getpid(), given, handle), name="forebay-zygote"
        )
        process.daemon = True  # so that multiprocessing ends it when the interpreter exits
        try:
            with own_fork(), interrupts_blocked(self.start_method):
                process.start()
        except (TypeError, AttributeError, pickle.PicklingError):
            channel.close()
            warnings.warn(_PICKLE_HINT + _say_culprit(find_culprit(job)), stacklevel=2)
            raise
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
        _zygotes.add(process)
        return process, channel

    def _start_worker(self, streams: tuple[int, ...]) -> WorkerProcess:
        number = next(self._numbers)  # never used again
        ours, theirs = make_channel_sockets()
        worker = WorkerProcess(number, streams, Channel(ours, is_blocking=False), self)
        self._by_number[number] = worker
        with theirs, contextlib.suppress(ChannelClosed):
            self._control.send(Start(number, streams), (theirs.fileno(),))
        if self._refresh is not None:
            self.tell(worker, self._refresh)
        return worker

    def _note(self, message: Any) -> None:
        if isinstance(message, Hatched):
            self.hatched, self._has_hatched = message, True
        elif isinstance(message, Started):
            self._by_number[message.worker].started(message.pid, self._control.take_fd())
        elif isinstance(message, Exited):
            self._by_number[message.worker].ended(message.exit_code)
        elif isinstance(message, Spoiled):
            self.fault = _unwrap(message.error)
        elif isinstance(message, Unable):
            worker = self._by_number[message.worker]
            worker.why_unable = message.why
            worker.ended(None)


_FEW_COLLECTIONS = 2
"""Collections of the middle generation since the last full one that leave little pending: each
takes in some 7,000 new objects (thresholds 700 and 10), against 300,000 that torch makes."""


def _collect_ahead() -> None:
    """Have the full garbage collection that is pending run before the fork, not after.

    A full collection writes to the header of every object that is tracked, and so copies every
    page that lies under them: 44 MiB with torch and pandas imported, and all of a table of
    dicts, kept twice for as long as a fork lives. Right after one, the next comes by itself
    only when a fourth more objects are there.
    """
    if gc.isenabled() and gc.get_count()[2] > _FEW_COLLECTIONS:
        gc.collect()


_zygotes: weakref.WeakSet[Any] = weakref.WeakSet()


def _disown_zygotes() -> None:
    """In a child of the training code's: multiprocessing ends what it takes for its children.

    It does so when the child exits by `sys.exit` after a plain `os.fork`.
    """
    for zygote in list(_zygotes):
        mp_process._children.discard(zygote)  # type: ignore[attr-defined] # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_zygotes)


def _unwrap(error: Any) -> BaseException:
    try:
        error.reraise()
    except BaseException as raised:
        return raised
    raise AssertionError


def _say_culprit(name: str) -> str:
    return f" What cannot be pickled is {name}." if name else ""


_PICKLE_HINT = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
