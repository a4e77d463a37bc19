"""Kill workers at random for many epochs, and see that every batch is torch's, once, in order.

    python -m tests.chaos.run [--kills 200] [--epochs 50] [--seed 0] [--out FILE]

`make chaos` runs it so; tests/chaos/test_chaos.py runs a short form. The schedule (which epoch of
which job, after which batch, how many milliseconds later, whom, by which signal) comes from the
seed alone. What the kernel does in that millisecond does not; so two runs are alike, not equal.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.utils.data

import forebay
from tests.chaos.jobs import JOBS, Job

EPOCHS_A_RUN = 2
"""Epochs with one loader: the second meets what the first has left behind."""

TIMEOUT_S = 3.0
"""For workers that are stopped; far longer than any batch takes."""

SETTLE_S = 5.0


@dataclass(frozen=True)
class Kill:
    """One kill of the schedule.

    Attributes:
        batch: After the delivery of which batch of the epoch.
        delay_ms: How much later.
        whom: "worker", "all" or "template".
        number: Which worker, modulo how many there are.
        signal: By its name.
    """

    batch: int
    delay_ms: float
    whom: str
    number: int
    signal: str


@dataclass
class Tally:
    """What came of it."""

    epochs: int = 0
    batches: int = 0
    kills: int = 0
    restarts: int = 0
    by_signal: Counter[str] = field(default_factory=Counter)
    by_victim: Counter[str] = field(default_factory=Counter)
    by_job: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0


def plan(rng: random.Random, kills: int, batches: int) -> list[Kill]:
    """The kills of one epoch."""
    return [
        Kill(
            batch=rng.randrange(batches),
            delay_ms=rng.choice([0.0, 0.0, rng.uniform(0, 5), rng.uniform(0, 40)]),
            whom=rng.choices(["worker", "all", "template"], [8, 1, 1])[0],
            number=rng.randrange(16),
            signal=rng.choices(["SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP"], [6, 2, 1, 1])[0],
        )
        for _ in range(kills)
    ]


class Killer:
    """Carries out kills from a thread of its own, so that they meet the loop anywhere."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._timers: list[threading.Timer] = []

    def strike(self, iterator: Any, kill: Kill) -> None:
        timer = threading.Timer(kill.delay_ms / 1000, self._send, (iterator, kill))
        self._timers.append(timer)
        timer.start()

    def _send(self, iterator: Any, kill: Kill) -> None:
        number = signal.Signals[kill.signal]
        workers = list(iterator._workers)
        crew = iterator._engine.crew
        if kill.whom == "template":
            pids, number = [crew.zygote_pid], signal.SIGKILL
        elif kill.whom == "all":
            pids, number = [worker.known_pid for worker in workers], signal.SIGKILL
        else:
            pids = [workers[kill.number % len(workers)].known_pid] if workers else []
        hit = 0
        for pid in pids:
            try:
                if pid:
                    os.kill(pid, number)
                    hit += 1
            except ProcessLookupError:
                continue
        if hit:
            self._tally.kills += 1
            self._tally.by_signal[number.name] += 1
            self._tally.by_victim[kill.whom] += 1

    def finish(self) -> None:
        """Until all have struck."""
        for timer in self._timers:
            timer.join()
        self._timers.clear()  # each holds an iterator, and this object


def digest(batch: Any) -> str:
    """Of every value in it, its type and its shape."""
    state = hashlib.blake2b(digest_size=16)
    _feed(state, batch)
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        state.update(value.contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key, each in value.items():
            state.update(str(key).encode())
            _feed(state, each)
    elif isinstance(value, (list, tuple)):
        state.update(f"{type(value).__name__}{len(value)}".encode())
        for each in value:
            _feed(state, each)
    else:
        state.update(repr(value).encode())


def make(kind: Any, job: Job, seed: int, **ours: Any) -> Any:
    """A loader of torch's or of ours: the same seed gives the same batches."""
    torch.manual_seed(seed)
    options = dict(job.options)
    if job.is_shuffled:
        options["shuffle"] = True
    generator = torch.Generator().manual_seed(seed)
    return kind(job.make_dataset(), generator=generator, **options, **ours)


def run_calm(job: Job, seed: int, epochs: int) -> list[list[str]]:
    """What the batches should be: torch's, or ours undisturbed where torch has no such seeding."""
    if job.seeding != "torch":
        with make(forebay.DataLoader, job, seed, seeding=job.seeding) as loader:
            return [[digest(batch) for batch in loader] for _ in range(epochs)]
    loader = make(torch.utils.data.DataLoader, job, seed)
    return [[digest(batch) for batch in loader] for _ in range(epochs)]


def run_hurt(
    job: Job, seed: int, method: str, kills: list[list[Kill]], tally: Tally
) -> Iterator[list[str]]:
    """The same with kills, an epoch at a time."""
    killer = Killer(tally)
    ours = {
        "seeding": job.seeding,
        "multiprocessing_context": method,
        "timeout": TIMEOUT_S,
        "memory_budget": job.budget,
    }
    with make(forebay.DataLoader, job, seed, **ours) as loader:
        loader._max_workers = job.most_processes
        before = 0
        for planned in kills:
            digests: list[str] = []
            iterator = iter(loader)
            for number, batch in enumerate(iterator):
                digests.append(digest(batch))
                for kill in planned:
                    if kill.batch == number:
                        killer.strike(iterator, kill)
            restarts = loader.stats().worker_restarts
            tally.restarts += restarts - before
            before = restarts if job.options.get("persistent_workers") else 0
            yield digests
        killer.finish()


def find_left() -> list[str]:
    """Processes of ours that live when all loaders are closed."""
    gc.collect()
    until = time.monotonic() + SETTLE_S
    while left := [
        f"{each.pid} {each.name()}"
        for each in psutil.Process().children(recursive=True)
        if each.status() != psutil.STATUS_ZOMBIE and not _is_multiprocessings(each)
    ]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return left + (["a mapping of an arena"] if "memfd:forebay" in mapped else [])


def _is_multiprocessings(process: psutil.Process) -> bool:
    line = " ".join(process.cmdline())
    return "forkserver" in line or "resource_tracker" in line


def run(kills: int, epochs: int, seed: int, methods: list[str], *, shows: bool) -> Tally:
    """All of it."""
    rng, tally, began = random.Random(seed), Tally(), time.monotonic()
    numbers = list(range(0, epochs, EPOCHS_A_RUN))
    for at, first in enumerate(numbers):
        job = JOBS[at % len(JOBS)]
        method = methods[at % len(methods)] if job.is_anywhere else "fork"
        span = min(EPOCHS_A_RUN, epochs - first)
        share = round((kills - tally.kills) / (len(numbers) - at))  # some met nobody
        counts = [share // span + (number < share % span) for number in range(span)]
        planned = [plan(rng, count, job.batches) for count in counts]
        calm = run_calm(job, seed + at, span)
        for number, (ours, theirs) in enumerate(
            zip(run_hurt(job, seed + at, method, planned, tally), calm)
        ):
            tally.epochs += 1
            tally.batches += len(ours)
            tally.by_job[f"{job.name} ({method})"] += 1
            if ours != theirs:
                wrong = f"{job.name}, {method}, seed {seed + at}, epoch {number}: {planned[number]}"
                tally.wrong.append(wrong)
            if shows:
                told = f"{tally.epochs:>3} of {epochs} epochs, {tally.kills} kills"
                print(f"{told}, {job.name} ({method}): {'the same' if ours == theirs else 'WRONG'}")
        tally.left += find_left()
    tally.seconds = round(time.monotonic() - began, 1)
    return tally


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.getLogger("forebay").setLevel(logging.ERROR)
    methods = ["fork", "forkserver", "spawn"]
    tally = run(given.kills, given.epochs, given.seed, methods, shows=True)
    record = {"seed": given.seed, "torch": torch.__version__, **vars(tally)}
    print(json.dumps(record, indent=1))
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if tally.wrong or tally.left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
