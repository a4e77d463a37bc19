"""One loader, one workload, in a process of its own.

Run from the top of the repository, inside a memory cgroup (harness.py does both):

    python -m tests.budget.job --loader forebay --workload images --budget-mib 64 --out FOLDER

Writes `FOLDER/report.jsonl`: a line when the level may be taken, one for each
batch with its digest, and one at the end. All times are `time.monotonic()`
seconds, one clock for all processes of a machine.

The idea: this process is the consumer and knows what is its own. It says, batch
by batch, how many bytes it holds outside of shared memory; it finds that out
from the kernel's list of mappings, not from the loader.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import hashlib
import json
import sys
import time
import traceback
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.utils.data

from tests.budget.workloads import WORKLOADS, Workload

SEED = 20_261
SETTLE_S = 0.06  # long enough for several readings of the level from outside
HEAP_COPY_BYTES = 65_536  # smaller buffers are not looked up: their sum is noise here


def make_loader(name: str, budget_mib: int, arguments: dict[str, Any]) -> Any:
    if name == "torch":
        return torch.utils.data.DataLoader(**arguments)
    import forebay

    return forebay.DataLoader(**arguments, memory_budget=budget_mib * 1024**2)


def leaves(value: Any) -> Iterator[Any]:
    """The parts of a batch in a fixed order, containers before what they hold."""
    if isinstance(value, dict):
        yield f"dict:{len(value)}"
        for key, part in value.items():
            yield key
            yield from leaves(part)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__}:{len(value)}"
        for part in value:
            yield from leaves(part)
    else:
        yield value


def digest(batch: Any) -> str:
    """A fingerprint of types, shapes and every byte; makes no copy of a tensor."""
    seen = hashlib.sha1(usedforsecurity=False)
    for part in leaves(batch):
        if isinstance(part, torch.Tensor | np.ndarray):
            seen.update(f"{type(part).__name__} {part.dtype} {tuple(part.shape)}".encode())
            seen.update(np.ascontiguousarray(part).data.cast("B"))
        else:
            seen.update(repr(part).encode())
    return seen.hexdigest()


def shared_ranges() -> list[tuple[int, int]]:
    """The shared mappings of this process, in the order of their addresses."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split(maxsplit=2)[:2]
        if rights[3] == "s":
            start, end = span.split("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def private_bytes(batch: Any) -> int:
    """Bytes of the large buffers of `batch` that lie on this process's own heap."""
    buffers: dict[int, int] = {}
    for part in leaves(batch):
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()
            buffers[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, np.ndarray):
            buffers[part.ctypes.data] = part.nbytes
    large = {at: size for at, size in buffers.items() if size > HEAP_COPY_BYTES}
    if not large:
        return 0
    shared = shared_ranges()
    starts = [start for start, _ in shared]

    def is_shared(at: int) -> bool:
        place = bisect_right(starts, at) - 1
        return place >= 0 and at < shared[place][1]

    return sum(size for at, size in large.items() if not is_shared(at))


def object_bytes(value: Any) -> int:
    """What the Python objects of `value` take, each once; tensors and arrays left out."""
    seen: set[int] = set()
    todo, total = [value], 0
    while todo:
        part = todo.pop()
        if id(part) in seen or isinstance(part, torch.Tensor | np.ndarray):
            continue
        seen.add(id(part))
        total += sys.getsizeof(part)
        if isinstance(part, dict):
            todo += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            todo += part
    return total


class Holdings:
    """What the consumer itself holds, outside of shared memory.

    Kept buffers add up. Python objects are counted at their high-water mark, two
    batches at once (the new one is built while the old one lives): CPython's
    allocator rarely gives their pages back, and that is not the loader's doing.
    """

    def __init__(self, workload: Workload) -> None:
        self.keeps = workload.keeps
        self.kept: list[tuple[str, Any]] = []
        self._kept_bytes = 0
        self._objects_before = 0
        self._objects_peak = 0

    @property
    def intact(self) -> bool:
        """Whether every kept batch still is what it was when it came."""
        return all(digest(batch) == before for before, batch in self.kept)

    def take(self, fingerprint: str, batch: Any) -> int:
        """Counts `batch` as the one in hand; returns all that is held now."""
        own = private_bytes(batch)
        if self.keeps:
            self.kept.append((fingerprint, batch))
            self._kept_bytes += own
            own = self._kept_bytes
        objects = object_bytes(batch)
        self._objects_peak = max(self._objects_peak, self._objects_before + objects)
        self._objects_before = objects
        return own + self._objects_peak


def consume(loader: Any, workload: Workload, report: TextIO) -> bool:
    """Iterate to the end, a line for each batch; whether all that was kept is intact."""
    holdings = Holdings(workload)
    asked_s = time.monotonic()
    for batch in loader:
        delivered_s = time.monotonic()
        fingerprint = digest(batch)
        line = {
            "asked_s": asked_s,
            "delivered_s": delivered_s,
            "consumer_bytes": holdings.take(fingerprint, batch),
            "digest": fingerprint,
        }
        report.write(json.dumps(line) + "\n")
        time.sleep(workload.think_s)
        asked_s = time.monotonic()
    return holdings.intact


def settle() -> float:
    """Give back what is free, wait until it was seen from outside; returns the time."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    time.sleep(SETTLE_S)
    return time.monotonic()


def run(options: argparse.Namespace, report: TextIO) -> dict[str, Any]:
    workload = WORKLOADS[options.workload]
    torch.manual_seed(SEED)
    arguments = workload.loader_arguments(str(Path(options.out) / "starts"))
    if options.loader == "forebay":
        from forebay import DataLoader  # noqa: F401 - its code is loaded before the level is taken
    report.write(json.dumps({"level_s": settle()}) + "\n")
    try:
        loader = make_loader(options.loader, options.budget_mib, arguments)
        intact = consume(loader, workload, report)
    except Exception:
        return {"ended_s": time.monotonic(), "error": traceback.format_exc()}
    ended_s = time.monotonic()
    stats: Any = loader.stats() if hasattr(loader, "stats") else None
    return {
        "ended_s": ended_s,
        "error": None if intact else "a batch that the consumer kept was changed under its hands",
        "stats": stats and dataclasses.asdict(stats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loader", choices=["torch", "forebay"], required=True)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--budget-mib", type=int, default=0)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    with (Path(options.out) / "report.jsonl").open("w") as report:
        end = run(options, report)
        report.write(json.dumps(end, default=str) + "\n")


if __name__ == "__main__":
    main()
