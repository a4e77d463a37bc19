"""The clean template process that workers are forked from.

Covers: the zygote's life: hatching (with the dataset, or bare), forking workers on order,
reaping them and telling main, ending when main does. Does not cover: which workers there
should be (crew.py).

    main -- start method of the user's --> zygote -- fork --> workers

Under fork the zygote is a snapshot of main that holds the dataset. Under spawn and
forkserver it is a fresh interpreter in which torch is imported once; the dataset arrives
pickled and is unpickled once, in a child of it, the *nest*, that then forks the workers:

    main -- spawn --> template (imports only) -- fork --> nest (dataset) -- fork --> workers

Sharing an unpickled dataset is an optimisation that must not change what it means. If
unpickling started a thread, opened a descriptor or touched the accelerator, that would be
shared by all workers, where under spawn each has its own. So the nest compares before and
after; when something changed it ends, and the template forks workers that unpickle for
themselves.

The zygote ignores SIGINT (the terminal sends it to the whole group, and main decides),
watches main's pidfd, and dies with it; workers get SIGKILL from the kernel when it dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import process as mp_process
from multiprocessing import reduction, resource_tracker
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, final

import torch

from forebay import torch_compat
from forebay.workers.channel import Channel, ChannelClosed
from forebay.workers.job import Job
from forebay.workers.messages import Exited, Hatched, Kill, Quit, Spoiled, Start, Started, Unable
from forebay.workers.space import Mapping
from forebay.workers.worker import run_worker

_WORKER_SCORE = 1000
"""Of `oom_score_adj`, the highest: as if it had the whole limit beside what it has. A worker is
replaced in milliseconds, and a training process is not."""

_ZYGOTE_SCORE = 900
"""After all workers, which it would take along, and before the training process."""

_PR_SET_PDEATHSIG = 1
_END_S = 5.0
"""torch's patience with workers at shutdown (MP_STATUS_CHECK_INTERVAL)."""


@final
class Sealed:
    """A job pickled once in main, unpickled where it is used."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self) -> Job:
        """The job; runs the user's `__setstate__`."""
        job = pickle.loads(self._data)
        assert isinstance(job, Job)
        return job

    def drop(self) -> None:
        """Nobody opens it any more: a large dataset's pickle is large too."""
        self._data = b""


@final
class Unsealed:
    """Becomes `Sealed` when multiprocessing pickles it for the new process.

    Only then may locks, queues and descriptors of the user's be pickled; doing it in one
    step of its own gives bytes that the other side may open later, or several times.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __reduce__(self) -> tuple[type[Sealed], tuple[bytes]]:
        return Sealed, (bytes(ForkingPickler.dumps(self._job)),)


@final
class ArenaHandle:
    """The arena's descriptor and size; the descriptor is handed on when pickled.

    Under fork nothing is pickled, and the mapping itself is inherited: a second one would
    cost its address space again, which `RLIMIT_AS` counts.
    """

    def __init__(self, fd: int, size_bytes: int, mapping: mmap.mmap | None = None) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._mapping = mapping

    def open(self) -> mmap.mmap:
        """The mapping in this process."""
        return self._mapping or mmap.mmap(self.fd, self.size_bytes)

    def __reduce__(self) -> Any:
        return _take_handle, (reduction.DupFd(self.fd), self.size_bytes)


def _take_handle(handed: Any, size_bytes: int) -> ArenaHandle:
    return ArenaHandle(handed.detach(), size_bytes)


def run_zygote(
    control: socket.socket, main_pid: int, job: Job | Sealed, arena: ArenaHandle
) -> None:
    """Entry point of the process, under every start method.

    Args:
        control: This side's end of the channel to main.
        main_pid: Whose death ends everything.
        job: The job itself under fork; sealed under spawn and forkserver.
        arena: Where batches go.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `interrupts_blocked`
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _volunteer(_ZYGOTE_SCORE)
    # A daemonic process may not have children by multiprocessing's rule; workers are ours.
    _allow_children()
    mapping = arena.open()
    if isinstance(job, Job):
        _Zygote(control, main_pid, job, mapping, Hatched(os.getpid(), True, ())).serve()
        return
    # The nest collects what unpickling left; a collection writes to the header of every object
    # that is not frozen, and so would copy a fourth of all that importing torch has made.
    gc.collect()
    gc.freeze()
    nest = _fork_nest(control, main_pid, job, mapping)
    if nest is not None:
        hatched = Hatched(os.getpid(), False, nest)
        _Zygote(control, main_pid, job, mapping, hatched).serve()


@contextlib.contextmanager
def interrupts_blocked(start_method: str) -> Iterator[None]:
    """For main while it starts the zygote, which inherits this.

    Ctrl-C must not end it with a traceback before it ignores the signal: seconds, under spawn.
    A fork server would hand a blocked signal on to all its children, also the user's: there
    nothing is blocked.
    """
    if start_method == "forkserver":
        yield
        return
    if start_method == "spawn":
        resource_tracker.ensure_running()  # starting it later would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _allow_children() -> None:
    mp_process.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # noqa: SLF001


# -- the nest ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Belongings:
    """What a process has that forked children would share."""

    threads: int
    descriptors: frozenset[tuple[int, str]]
    is_on_device: bool

    @classmethod
    def read(cls) -> _Belongings:
        return cls(_count_threads(), frozenset(_list_descriptors()), torch.cuda.is_initialized())

    def new_since(self, before: _Belongings) -> tuple[str, ...]:
        found = []
        if self.threads > before.threads:
            names = ", ".join(sorted(t.name for t in threading.enumerate()[1:])) or "native"
            found.append(f"{self.threads - before.threads} thread(s): {names}")
        found += [
            f"descriptor of {what}" for _, what in sorted(self.descriptors - before.descriptors)
        ]
        if self.is_on_device and not before.is_on_device:
            found.append("a CUDA context")
        return tuple(found)


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _list_descriptors() -> list[tuple[int, str]]:
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return []
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def _fork_nest(
    control: socket.socket, main_pid: int, sealed: Sealed, mapping: mmap.mmap
) -> tuple[str, ...] | None:
    """Fork the nest and wait for its end.

    Returns:
        None when the nest served (in the template, when all is over), else what kept it
        from sharing the dataset: then the caller serves.
    """
    verdict, answer = os.pipe()
    context = multiprocessing.get_context("fork")
    nest = context.Process(
        target=_run_nest, args=(control, main_pid, sealed, mapping, answer), name="forebay-nest"
    )
    nest.start()
    os.close(answer)
    told = _read_unless_over(verdict, main_pid)
    if told is None:
        nest.kill()
    found: tuple[str, ...] = pickle.loads(told) if told else ()
    if found:
        nest.join()
        return found
    control.close()
    sealed.drop()
    nest.join()
    return None


def _read_unless_over(fd: int, main_pid: int) -> bytes | None:
    """All that is written to `fd`; None when main ends first (unpickling may take minutes)."""
    main_pidfd = open_pidfd(main_pid)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if main_pidfd >= 0:
        poller.register(main_pidfd, select.POLLIN)
    told = b""
    try:
        while True:
            if main_pidfd in {ready for ready, _ in poller.poll()}:
                return None
            read = os.read(fd, 65536)
            if not read:
                return told
            told += read
    finally:
        os.close(fd)
        _close_fd(main_pidfd)


def _run_nest(
    control: socket.socket, main_pid: int, sealed: Sealed, mapping: mmap.mmap, answer: int
) -> None:
    _die_with_parent()
    before = _Belongings.read()
    try:
        job = sealed.open()
    except Exception:
        os.close(answer)
        channel = Channel(control, is_blocking=True)
        channel.send(Spoiled(torch_compat.WorkerException(where="in DataLoader worker process 0")))
        channel.close()
        return
    sealed.drop()
    gc.collect()
    found = _Belongings.read().new_since(before)
    with os.fdopen(answer, "wb") as file:
        if found:
            file.write(pickle.dumps(found))
    if not found:
        _Zygote(control, main_pid, job, mapping, Hatched(os.getpid(), True, ())).serve()


# -- serving ----------------------------------------------------------------------------------


@final
class _Child:
    """A worker process and the descriptor that tells of its end."""

    __slots__ = ("number", "pidfd", "process")

    def __init__(self, number: int, process: Any) -> None:
        self.number = number
        self.process = process
        self.pidfd = open_pidfd(process.pid)


@final
class _Zygote:
    def __init__(
        self,
        control: socket.socket,
        main_pid: int,
        job: Job | Sealed,
        mapping: mmap.mmap,
        hatched: Hatched,
    ) -> None:
        self._channel = Channel(control, is_blocking=True)
        self._channel.expect_fds()
        self._main_pidfd = open_pidfd(main_pid)
        self._job = job
        self._mapping = Mapping(mapping)
        self._hatched = hatched
        self._context = multiprocessing.get_context("fork")
        self._children: dict[int, _Child] = {}  # pidfd or pid -> child
        self._is_over = False

    def serve(self) -> None:
        """Until main says so, or is gone."""
        # Frozen objects are left alone by the collector of every child: a full collection
        # would write to each object's header, and so copy every page. For the same reason
        # nothing is collected here: under fork the objects are main's.
        gc.freeze()
        try:
            self._channel.send(self._hatched)
            while not self._is_over:
                self._wait()
        except ChannelClosed:
            pass
        finally:
            self._end_children()

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        if self._main_pidfd >= 0:
            poller.register(self._main_pidfd, select.POLLIN)
        for child in self._children.values():
            if child.pidfd >= 0:
                poller.register(child.pidfd, select.POLLIN)
        has_pidfds = all(child.pidfd >= 0 for child in self._children.values())
        ready = {fd for fd, _ in poller.poll(None if has_pidfds else 100)}
        if self._main_pidfd in ready:
            self._is_over = True
            return
        self._reap()
        if self._channel.fileno() in ready:
            for message in self._channel.receive():
                self._obey(message)

    def _obey(self, message: Any) -> None:
        if isinstance(message, Start):
            self._start(message, self._channel.take_fd())
        elif isinstance(message, Kill):
            for child in self._children.values():
                if child.number == message.worker:
                    child.process.kill()
        elif isinstance(message, Quit):
            self._is_over = True

    def _start(self, order: Start, fd: int) -> None:
        if fd < 0:
            self._channel.send(Unable(order.worker, os.strerror(errno.EMFILE)))
            return
        sock = socket.socket(fileno=fd)
        try:
            process = self._context.Process(
                target=_run_child,
                args=(sock, self._job, order.streams, self._mapping, os.getpid()),
                name=f"Process-{order.worker + 1}",  # as torch's workers are called
                daemon=True,
            )
            process.start()
        except OSError as error:
            self._channel.send(Unable(order.worker, str(error)))
            return
        finally:
            sock.close()
        child = _Child(order.worker, process)
        self._children[process.pid or 0] = child
        fds = (child.pidfd,) if child.pidfd >= 0 else ()
        self._channel.send(Started(order.worker, process.pid or 0), fds)

    def _reap(self) -> None:
        for pid, child in list(self._children.items()):
            if child.process.exitcode is not None:
                del self._children[pid]
                _close_fd(child.pidfd)
                self._channel.send(Exited(child.number, pid, child.process.exitcode))

    def _end_children(self) -> None:
        """Main is done with them, or gone: nobody would take what they make."""
        for child in self._children.values():
            child.process.kill()
        for child in self._children.values():
            child.process.join(_END_S)
            _close_fd(child.pidfd)
        self._channel.close()
        _close_fd(self._main_pidfd)


def _run_child(
    sock: socket.socket,
    job: Job | Sealed,
    streams: tuple[int, ...],
    mapping: Mapping,
    zygote_pid: int,
) -> None:
    _die_with_parent()
    if os.getppid() != zygote_pid:
        return  # the zygote ended before the line above took hold
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _volunteer(_WORKER_SCORE)
    if isinstance(job, Sealed):
        job = job.open()
    run_worker(sock, job, streams, mapping)


def _volunteer(score: int) -> None:
    """If the kernel must kill for memory, have it kill this process and not the training's.

    Anybody may raise its own score; without /proc nothing changes.
    """
    with contextlib.suppress(OSError, ValueError):
        path = Path("/proc/self/oom_score_adj")
        if int(path.read_text(encoding="ascii")) < score:
            path.write_text(str(score), encoding="ascii")


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies, however it dies (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def open_pidfd(pid: int | None) -> int:
    """A descriptor that becomes readable when `pid` ends; -1 where there are none."""
    if pid is None or not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _close_fd(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
