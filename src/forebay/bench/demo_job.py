"""One contestant of the demo, in a process of its own: train a real model, report each step.

    python -m forebay.bench.demo_job --contestant forebay --images DIR --steps 120 ...

Covers: building the loader by its name, warming up, the training loop, and one
JSON line on standard output for each step and each mark in time.
Does not cover: the memory group it runs in, and judging it (contestant.py, verdict.py).

Warming up matters for what is measured. Before the mark `baseline` the job
trains a few steps on one made-up batch, so model, gradients, optimizer and the
allocator of the training code are at their peak once while no loader exists.
That peak, less the one batch, is the job's own need. Then all of it is dropped and given
back to the system: as in a usual script, the loader starts its workers from a
process that has not trained yet. (Without this, every forked worker would keep
the old copy of pages that training rewrites, about 100 MiB here.)
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, final

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler

from forebay.bench.photos import TURNS, PhotoDataset
from forebay.bench.resnet import SmallResNet

WARM_STEPS: Final = 10
LEARNING_RATE: Final = 1e-3
SIZE_PX: Final = 224

Batch = tuple[torch.Tensor, torch.Tensor]
LoaderMaker = Callable[[PhotoDataset, argparse.Namespace], Iterable[Batch]]


def _torch_loader(dataset: PhotoDataset, options: argparse.Namespace) -> Iterable[Batch]:
    return DataLoader(dataset, **_shared_arguments(dataset, options))


def _torch_prefetch1_loader(dataset: PhotoDataset, options: argparse.Namespace) -> Iterable[Batch]:
    return DataLoader(dataset, prefetch_factor=1, **_shared_arguments(dataset, options))


def _forebay_loader(dataset: PhotoDataset, options: argparse.Namespace) -> Iterable[Batch]:
    import forebay  # the other contestants run without it

    arguments = _shared_arguments(dataset, options)
    loader: Iterable[Batch] = forebay.DataLoader(
        dataset, memory_budget=options.budget_bytes, **arguments
    )
    return loader


def _no_loader(_dataset: PhotoDataset, _options: argparse.Namespace) -> Iterable[Batch]:
    """Nothing to train on: what remains is the job's own need."""
    return ()


LOADERS: Final[dict[str, LoaderMaker]] = {
    "none": _no_loader,
    "torch": _torch_loader,
    "torch-prefetch1": _torch_prefetch1_loader,
    "forebay": _forebay_loader,
}


def _shared_arguments(dataset: PhotoDataset, options: argparse.Namespace) -> dict[str, Any]:
    """What all contestants are given alike.

    The sampler draws one permutation after another without an end of epoch in
    between, as a data set much larger than this one would look.
    """
    return {
        "batch_size": options.batch_size,
        "sampler": RandomSampler(dataset, num_samples=options.steps * options.batch_size),
        "num_workers": options.workers,
    }


@final
class Reporter:
    """Writes one JSON line for each thing that happened, with the time it happened at."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def mark(self, name: str) -> None:
        """A moment that the reader of the memory record needs."""
        self._write(event="mark", name=name)

    def step(self, number: int, loss: float, wait_s: float) -> None:
        """A step ended; `wait_s` is the time it spent asking the loader."""
        self._write(event="step", number=number, loss=loss, wait_s=wait_s)

    def end(self, digest: str, stats: dict[str, Any] | None) -> None:
        """All steps are done; `digest` tells whether two jobs saw the same batches."""
        self._write(event="end", digest=digest, stats=stats)

    def _write(self, **fields: object) -> None:
        self._out.write(json.dumps({"t_s": time.monotonic(), **fields}, default=str) + "\n")
        self._out.flush()


@final
class Training:
    """The model and one step of it."""

    def __init__(self) -> None:
        self._model = SmallResNet(TURNS)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)

    def step(self, pictures: torch.Tensor, turns: torch.Tensor) -> float:
        """Forward, backward, update; the loss before the update."""
        loss = functional.cross_entropy(self._model(pictures), turns)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


def main(arguments: list[str] | None = None) -> None:
    """Run one contestant; the exit status is that of Python: 0, or 1 with a traceback."""
    options = _parse(arguments)
    report = Reporter(_claim_stdout())
    torch.set_num_threads(options.threads)
    dataset = PhotoDataset(options.images, size_px=SIZE_PX)
    report.mark("warmup")
    _warm_up(options.batch_size)
    # The loader draws its own seed from the global generator: same start for all.
    _seed(options.seed)
    training = Training()
    report.mark("baseline")
    loader = LOADERS[options.contestant](dataset, options)
    digest = _train(training, loader, report)
    report.end(digest, _stats_of(loader))


def _warm_up(batch_size: int) -> None:
    """Train a throw-away model on one made-up batch, and give the memory back."""
    training = Training()
    pictures = torch.randn(batch_size, 3, SIZE_PX, SIZE_PX)
    turns = torch.randint(TURNS, (batch_size,))
    for _ in range(WARM_STEPS):
        training.step(pictures, turns)
    del training, pictures, turns
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _train(training: Training, loader: Iterable[Batch], report: Reporter) -> str:
    """Train on every batch; returns a digest of all that was seen."""
    digest = 0
    for number, (wait_s, (pictures, turns)) in enumerate(_timed(loader)):
        loss = training.step(pictures, turns)
        digest = _digest(digest, pictures, turns)
        report.step(number, loss, wait_s)
    return f"{digest:08x}"


def _timed(loader: Iterable[Batch]) -> Iterator[tuple[float, Batch]]:
    """Each batch with the seconds it took to get it; the first includes starting workers.

    Holds no batch while the consumer works, or it would count as one more.
    """
    started_s = time.monotonic()
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        wait_s = time.monotonic() - started_s
        yield wait_s, batch
        del batch
        started_s = time.monotonic()


def _digest(before: int, pictures: torch.Tensor, turns: torch.Tensor) -> int:
    """A checksum over every 256th pixel and all labels: cheap, and no two batches agree on it."""
    sparse = pictures[:, :, ::16, ::16].contiguous().numpy().tobytes()
    return zlib.crc32(turns.numpy().tobytes(), zlib.crc32(sparse, before))


def _stats_of(loader: Iterable[Batch]) -> dict[str, Any] | None:
    """What the loader says about itself, where it can."""
    stats = getattr(loader, "stats", None)
    return dataclasses.asdict(stats()) if callable(stats) else None


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def _claim_stdout() -> IO[str]:
    """Standard output for our lines alone; whoever prints is sent to standard error."""
    private = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return os.fdopen(private, "w", encoding="utf-8")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m forebay.bench.demo_job", description=__doc__)
    parser.add_argument("--contestant", choices=tuple(LOADERS), required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--budget-bytes", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
