"""A run that is interrupted, and one that goes on from there, written down to be compared.

Run as a program it goes on in a fresh process: `python -m tests.resume.scene FILE` reads a scene
and a state, and prints what the rest of the run gave.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay import DataLoader
from tests.resume.datasets import DATASETS, noisy_collate, seed_by_worker

BUDGET = "1GiB"


@dataclass(frozen=True)
class Scene:
    """A loader, and when its run is interrupted."""

    dataset: str = "map"
    length: int = 30
    batch_size: int | None = 4
    num_workers: int = 2
    shuffle: bool = True
    drop_last: bool = False
    has_generator: bool = True
    persistent: bool = False
    seeding: str = "torch"
    backend: str = "process"
    collates: bool = False
    inits: bool = False
    every: int = 1
    before: int = 0
    """Whole epochs before the interruption."""
    taken: int = 3
    """Batches of the epoch that is interrupted; if it has no more, it is over."""
    after: int = 1
    """Whole epochs after the one that was interrupted."""
    most_workers: int | None = None
    """Processes that carry the streams."""

    def make(self) -> DataLoader[Any]:
        is_map = self.dataset in ("map", "owned", "failing")
        loader: DataLoader[Any] = DataLoader(
            DATASETS[self.dataset](self.length),
            batch_size=self.batch_size,
            shuffle=self.shuffle if is_map else None,
            drop_last=self.drop_last and self.batch_size is not None,
            num_workers=self.num_workers,
            generator=torch.Generator().manual_seed(5) if self.has_generator else None,
            persistent_workers=self.persistent and self.num_workers > 0,
            collate_fn=noisy_collate if self.collates else None,
            worker_init_fn=seed_by_worker if self.inits else None,
            seeding=self.seeding,
            worker_backend=self.backend,
            snapshot_every_n_steps=self.every,
            memory_budget=BUDGET,
        )
        loader._max_workers = self.most_workers
        return loader


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def take(iterator: Iterator[Any], most: int | None = None) -> list[str]:
    """Batches, or the errors in their place, to the end or so many."""
    taken: list[str] = []
    while most is None or len(taken) < most:
        try:
            taken.append(repr(next(iterator)))
        except StopIteration:
            break
        except ValueError as error:
            taken.append(str(error).splitlines()[-1])
    return taken


def undisturbed(scene: Scene) -> tuple[dict[str, Any], list[list[str]]]:
    """The state in the middle of a run, and what came after it."""
    seed(1)
    with scene.make() as loader:
        for _ in range(scene.before):
            take(iter(loader))
        iterator = iter(loader)
        is_over = len(take(iterator, scene.taken)) < scene.taken
        state = loader.state_dict()
        rest = take(iter(loader) if is_over else iterator)
        del iterator
        return state, [rest, *(take(iter(loader)) for _ in range(scene.after))]


def resumed(scene: Scene, state: dict[str, Any]) -> list[list[str]]:
    """What comes after it, begun from that state by a process that drew other numbers before."""
    seed(2)
    with scene.make() as loader:
        loader.load_state_dict(state)
        return [take(iter(loader)) for _ in range(1 + scene.after)]


def assert_resumes(scene: Scene) -> None:
    """That the head of one run and the tail of another make one undisturbed run."""
    if not scene.has_generator:
        scene = replace(scene, after=0)  # later epochs draw their seeds from the process
    state, rest = undisturbed(scene)
    assert resumed(scene, json.loads(json.dumps(state))) == rest


def main() -> None:
    warnings.simplefilter("ignore")
    jobs = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([resumed(Scene(**job["scene"]), job["state"]) for job in jobs]))


def write_jobs(path: Path, scenes: list[Scene]) -> list[list[list[str]]]:
    """Put down what `main` reads; returns what it should print."""
    runs = [undisturbed(scene) for scene in scenes]
    jobs = [
        {"scene": asdict(scene), "state": state}
        for scene, (state, _) in zip(scenes, runs, strict=True)
    ]
    path.write_text(json.dumps(jobs))
    return [rest for _, rest in runs]


if __name__ == "__main__":
    main()
