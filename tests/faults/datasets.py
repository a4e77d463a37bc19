"""Datasets that do harm: to their own process, at a chosen sample, as often as told.

What happened already is kept in files, so that it works under every start method and outlives
the process that did it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from forebay.units import MIB

WAYS_TO_DIE = ("SIGKILL", "SIGSEGV", "SIGTERM", "exit 3")


def die(way: str) -> None:
    """End this process at once, in the way that is named."""
    if way == "exit 3":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[way])
    time.sleep(60)  # until the signal arrives


def try_claim(place: Path, name: str) -> bool:
    """Whether the caller is the first, of all processes, to claim `name`."""
    try:
        os.close(os.open(place / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def count_lines(path: Path) -> int:
    """How often something was noted in `path`."""
    return len(path.read_text().splitlines()) if path.exists() else 0


def note(path: Path, line: object) -> None:
    """Append a line; short ones of several processes never mix."""
    with path.open("a") as file:
        file.write(f"{line}\n")


def wait_until(is_true: Callable[[], Any], what: str, patience_s: float = 20.0) -> None:
    """Poll until it is true; say what was waited for when it never is."""
    until = time.monotonic() + patience_s
    while not is_true():
        if time.monotonic() > until:
            message = f"after {patience_s:g} s still not: {what}"
            raise AssertionError(message)
        time.sleep(0.01)


class Numbered(Dataset[Any]):
    """Sample i is a tensor of `sample_bytes` that holds i (modulo 256) everywhere."""

    def __init__(self, length: int, sample_bytes: int = 8) -> None:
        self.length = length
        self.sample_bytes = sample_bytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sample_bytes,), index % 256, dtype=torch.uint8)


class Deadly(Numbered):
    """One sample kills the process that makes it, the first time."""

    def __init__(
        self, place: Path, way: str, *, at: int, length: int = 24, sample_bytes: int = 8
    ) -> None:
        super().__init__(length, sample_bytes)
        self.place, self.way, self.at = place, way, at

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at and try_claim(self.place, "died"):
            die(self.way)
        return super().__getitem__(index)


class Gated(Numbered):
    """Samples from `at` on wait until a file named `open` is there; each says that it waits."""

    def __init__(self, place: Path, *, at: int, length: int = 24, sample_bytes: int = 8) -> None:
        super().__init__(length, sample_bytes)
        self.place, self.at = place, at

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.at and not (self.place / "open").exists():
            note(self.place / "waiting", index)
            wait_until((self.place / "open").exists, "the gate is open", 60)
        return super().__getitem__(index)

    def count_waiting(self) -> int:
        return count_lines(self.place / "waiting")

    def open_gate(self) -> None:
        (self.place / "open").touch()


class SlowFirst(Deadly):
    """The samples of batch 0 are made only after the deadly one has killed."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            wait_until((self.place / "died").exists, "the other worker has died")
            time.sleep(0.2)  # its end is known to main before this batch asks for room
        return super().__getitem__(index)


LARGE_BYTES = MIB
"""32 such samples make the batch in the middle of which a worker dies."""
