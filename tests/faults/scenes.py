"""What happens on the stage: run as `python -m tests.faults.scenes NAME FACTS`.

Each function is one main process. It says where it is by printing a line.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import forebay
from tests.faults.datasets import Numbered, count_lines, note, wait_until

SLEEP_S = 60.0


def say(line: str) -> None:
    """Print a line in one piece, whatever interrupts."""
    os.write(1, f"{line}\n".encode())


class Sleeping(Numbered):
    """Sample 5 sleeps a minute and says so before."""

    def __init__(self, place: Path, length: int = 24) -> None:
        super().__init__(length, 100_000)
        self.place = place

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            (self.place / "asleep").touch()
            time.sleep(SLEEP_S)
        return super().__getitem__(index)


class Unpickling(Numbered):
    """Takes a minute to unpickle."""

    def __init__(self, place: Path) -> None:
        super().__init__(24)
        self.place = place

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        (self.place / "asleep").touch()
        time.sleep(SLEEP_S)


def make_loader(dataset: Any, **options: Any) -> Any:
    return forebay.DataLoader(dataset, **{"batch_size": 2, "num_workers": 2, **options})


def say_when_asleep(place: Path) -> None:
    wait_until((place / "asleep").exists, "a worker sleeps")
    say("asleep")


def note_exit(place: str, worker: int) -> None:
    note(Path(place) / "exits", worker)


# -- main is ended ---------------------------------------------------------------------------


def busy(place: str, method: str = "fork", *, ends_itself: bool = False) -> None:
    """One worker sleeps in its sample, main waits in `next`."""
    loader = make_loader(Sleeping(Path(place)), multiprocessing_context=method)
    iterator = iter(loader)
    kept = [next(iterator), next(iterator)]
    say_when_asleep(Path(place))
    if ends_itself:
        os._exit(7)
    kept += list(iterator)


def unpickling(place: str) -> None:
    """The zygote is still at unpickling the dataset."""
    loader = make_loader(Unpickling(Path(place)), multiprocessing_context="forkserver")
    iterator = iter(loader)
    say_when_asleep(Path(place))
    next(iterator)


# -- Ctrl-C ------------------------------------------------------------------------------------


def interrupted(place: str, method: str = "fork", *, in_next: bool = True) -> None:
    """Catches the interrupt, and ends in an orderly way."""
    exit_fn = functools.partial(note_exit, place)
    loader = make_loader(
        Sleeping(Path(place)), multiprocessing_context=method, worker_exit_fn=exit_fn
    )
    iterator = iter(loader)
    try:
        next(iterator)
        next(iterator)
        say_when_asleep(Path(place))
        if in_next:
            next(iterator)
        for _ in range(int(10 * SLEEP_S)):
            # In steps: an interrupt that comes in just before Python's one long sleep is seen
            # only after it, whatever the loader does.
            time.sleep(0.1)
    except KeyboardInterrupt:
        say("interrupted")


def uncaught(place: str, method: str = "fork") -> None:
    """Lets the interrupt through."""
    iterator = iter(make_loader(Sleeping(Path(place)), multiprocessing_context=method))
    next(iterator)
    next(iterator)
    say_when_asleep(Path(place))
    next(iterator)


def interrupted_at_start(place: str, method: str) -> None:
    """Interrupted before any worker is there."""
    iterator = iter(make_loader(Unpickling(Path(place)), multiprocessing_context=method))
    try:
        say("started")
        next(iterator)
    except KeyboardInterrupt:
        say("interrupted")


# -- scarcity -------------------------------------------------------------------------------------


def limited(place: str, limit: str, above_now: int, **options: Any) -> None:
    """An epoch under a resource limit a little above what is used now; every batch is kept."""
    number = getattr(resource, f"RLIMIT_{limit}")
    now = len(os.listdir("/proc/self/fd")) if limit == "NOFILE" else read_address_space()
    resource.setrlimit(number, (now + above_now, now + above_now))
    dataset = Numbered(options.pop("length"), options.pop("sample_bytes"))
    keeps = options.pop("keeps", False)
    if options.pop("warns", False):
        warnings.simplefilter("default", forebay.ScarcityWarning)
    kept: list[Any] = []
    try:
        for batch in make_loader(dataset, **options):
            check_whole(batch, 2 * len(kept))
            kept.append(batch if keeps else None)
    except (forebay.ForebayError, OSError) as error:
        say(f"{type(error).__name__}: {error}")
        kept.clear()
        return
    for number, batch in enumerate(kept):
        if keeps:
            check_whole(batch, 2 * number)
    say(f"{len(kept)} batches")


def no_more_files(place: str, kills: bool = False) -> None:
    """The training code opens all that it may in the middle of an epoch; then a worker dies."""
    warnings.simplefilter("default", forebay.ScarcityWarning)
    taken: list[int] = []
    kept: list[torch.Tensor] = []
    iterator: Any = iter(make_loader(Numbered(200, 100_000)))
    for batch in iterator:
        check_whole(batch, 2 * len(kept))
        kept.append(batch)
        if len(kept) == 5:
            number = len(os.listdir("/proc/self/fd")) + 8
            resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            if kills:
                os.kill(iterator._workers[0].pid, signal.SIGKILL)
    for number, batch in enumerate(kept):
        check_whole(batch, 2 * number)
    say(f"{len(kept)} batches")
    for fd in taken:
        os.close(fd)


def many_mappings(place: str, kind: str) -> None:
    """Batches of many tensors, all kept: what each adds to the address space's list."""

    def count() -> int:
        return Path("/proc/self/maps").read_text().count("\n")

    dataset = Pieces(12_800) if kind == "pieces" else Numbered(4000, 20_000)
    options: dict[str, Any] = {"collate_fn": as_they_are} if kind == "pieces" else {}
    iterator: Any = iter(make_loader(dataset, **options))
    kept = [next(iterator)]  # what starting adds is there
    counts = [count()]
    for batch in itertools.islice(iterator, 12 if kind == "pieces" else 1999):
        kept.append(batch)
        counts.append(count())
    added = max(after - before for before, after in itertools.pairwise(counts))
    say(f"{len(kept)} batches, at most {added} at once, {counts[-1] - counts[0]} in all")


class Pieces(Numbered):
    """Samples of very many tensors of 64 bytes."""

    def __init__(self, pieces: int) -> None:
        super().__init__(26, 64)
        self.pieces = pieces // 2  # of two samples a batch is made

    def __getitem__(self, index: int) -> Any:
        return [torch.full((16,), float(index)) for _ in range(self.pieces)]


def read_address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def check_whole(batch: torch.Tensor, first: int) -> None:
    for offset, row in enumerate(batch):
        assert bool((row == (first + offset) % 256).all())


def within_default(samples: list[Any]) -> Any:
    """A collate function of the user's that leaves the work to torch's."""
    return torch.utils.data.default_collate(samples)


def as_they_are(samples: list[Any]) -> Any:
    return samples


COLLATES = {"default": None, "within_default": within_default, "as_they_are": as_they_are}


def small_shared_memory(place: str, collates: list[str]) -> None:
    """Samples of 32 MiB where /dev/shm has 64 MiB."""
    free = os.statvfs("/dev/shm")
    say(f"{free.f_bavail * free.f_frsize // 2**20} MiB free")
    for name in collates:
        collate = COLLATES[name]
        loader = make_loader(Numbered(6, 32 * 2**20), collate_fn=collate, memory_budget="500MiB")
        for number, batch in enumerate(loader):
            check_whole(batch, 2 * number)
            del batch
        say(f"{number + 1} batches by {name}")


class LateAndLarge(Numbered):
    """Batch 6 is large, and made when the two after it are there; so it finds no room."""

    def __init__(self, place: Path) -> None:
        super().__init__(12)
        self.place = place

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 6:
            made = self.place / "made"
            wait_until(lambda: count_lines(made) == 2, "the next two batches are made")
            time.sleep(0.3)  # they are on their way
        elif index in {7, 8}:
            note(self.place / "made", index)
        return torch.full((63 * 2**20 if index == 6 else 12 * 2**20,), index, dtype=torch.uint8)


def evicting(place: str) -> None:
    """Ready batches must make room for the next one."""
    loader = make_loader(
        LateAndLarge(Path(place)), batch_size=1, num_workers=3, memory_budget="126MiB"
    )
    given = []
    iterator = iter(loader)
    for _ in range(12):
        try:
            batch = next(iterator)
        except forebay.ForebayError as error:
            given.append(type(error).__name__)
            continue
        assert bool((batch == batch[0, 0]).all())
        given.append(str(int(batch[0, 0])))
        del batch
    evicted = "went to disk and back" in loader.explain()
    say(f"{' '.join(given)}; {'evicted' if evicted else 'none evicted'}")


# -- the interpreter exits -----------------------------------------------------------------------

ALIVE: list[Any] = []
"""What lives until the interpreter ends."""


def alive_at_exit(place: str, method: str = "fork", ending: str = "falls off the end") -> None:
    """Iterators in their middle, persistent workers, kept batches, a finished loader."""
    exit_fn = functools.partial(note_exit, place)
    common = {"multiprocessing_context": method, "worker_exit_fn": exit_fn}
    once = make_loader(Numbered(64, 100_000), **common)
    persistent = make_loader(Numbered(64, 100_000), persistent_workers=True, **common)
    first, second, third = iter(once), iter(once), iter(persistent)
    batches = [next(iterator) for iterator in (first, second, third) for _ in range(3)]
    ALIVE.extend((once, persistent, first, second, third, batches))
    ALIVE.append(ALIVE)
    say("ready")
    if ending == "an error":
        message = "of the training code"
        raise ValueError(message)
    if ending == "sys.exit":
        sys.exit(4)


def held_by_a_script(place: str) -> None:
    """A script's own variable, which its functions refer to as well, holds an iterator."""
    script = (
        "import forebay\n"
        "iterator = iter(forebay.DataLoader(range(12), num_workers=2))\n"
        "def consume(): return int(next(iterator))\n"
        "print(consume())\n"
    )
    os.execv(sys.executable, [sys.executable, "-c", script])


def daemon_thread_waits(place: str) -> None:
    """A daemon thread is in `next`, for a sample that takes a minute, when main ends."""
    iterator = iter(make_loader(Sleeping(Path(place))))
    thread = threading.Thread(target=lambda: ALIVE.extend(iterator), daemon=True)
    thread.start()
    say_when_asleep(Path(place))


def forked_child_exits(place: str) -> None:
    """A child that the training code forks ends normally, with the iterator in its hands."""
    loader = make_loader(Numbered(24, 100_000))
    iterator = iter(loader)
    seen = [int(next(iterator)[0, 0])]
    pid = os.fork()
    if not pid:
        with contextlib.suppress(forebay.ForeignProcess):
            next(iterator)
        del iterator, loader
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    seen += [int(batch[0, 0]) for batch in iterator]
    assert seen == list(range(0, 24, 2)), seen
    say("whole")


if __name__ == "__main__":
    # A shell starts background jobs with SIGINT ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
