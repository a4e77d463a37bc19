"""What a measurement was made on: the facts that a reader needs to weigh it.

Covers: processor, cores that may be used, memory, versions. Does not cover: anything that
names a person, a host or a place.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from forebay.units import format_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """One computer, as far as it matters; `str()` is one line for people."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    forebay: str

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.cores} usable cores, {format_bytes(self.memory_bytes)}, "
            f"{self.system}, Python {self.python}, torch {self.torch}, forebay {self.forebay}"
        )


def read_machine() -> Machine:
    """The computer that this runs on."""
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release().split('-')[0]}",
        python=platform.python_version(),
        torch=_version("torch"),
        forebay=_version("forebay"),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
