"""One contestant, alone in a process: makes its loader, takes batches for a while, tells.

    python -m forebay.bench.survive.job '{"workload": ..., "loader": ..., ...}'

Covers: what happens inside the memory group. Does not cover: the group itself, its limit
and the clock from outside (run.py). Speaks in lines of JSON on standard output; waits for a
line on standard input before the loader is made, so that the limit can be set to what the
job itself holds and the budget.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from forebay.bench.survive.workloads import WORKLOADS, Workload

TELL_EVERY_S = 0.5

FIRST_BATCHES = 8
"""Batches that are compared, and left out of the speed: loaders fill their queues there."""


def say(**facts: Any) -> None:
    """One line to whoever watches."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def make_loader(
    workload: Workload, dataset: Any, given: dict[str, Any]
) -> torch.utils.data.DataLoader[Any]:
    """The loader that the contestant asks for."""
    workers = workload.workers if given["num_workers"] is None else given["num_workers"]
    arguments: dict[str, Any] = {
        "batch_size": workload.batch_size,
        "num_workers": workers,
        "collate_fn": workload.collate,
        "persistent_workers": given["persistent"] and workers > 0,
    }
    if given["prefetch_factor"] is not None and workers:
        arguments["prefetch_factor"] = given["prefetch_factor"]
    if given["loader"] == "forebay":
        import forebay

        return forebay.DataLoader(dataset, memory_budget=given["budget_bytes"], **arguments)
    return torch.utils.data.DataLoader(dataset, **arguments)


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in a fixed order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for part in batch.values():
            yield from tensors_of(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from tensors_of(part)


def fingerprint(batch: Any, before: int) -> int:
    """A sum over shapes and all bytes."""
    for tensor in tensors_of(batch):
        before = zlib.crc32(repr((tensor.dtype, tuple(tensor.shape))).encode(), before)
        array = np.ascontiguousarray(tensor.numpy())
        before = zlib.crc32(array.view(np.uint8).reshape(-1).data, before)
    return before


def bytes_of(batch: Any) -> int:
    """The bytes of a batch's tensors."""
    return sum(tensor.nbytes for tensor in tensors_of(batch))


def main() -> None:
    """Run the contestant that the first argument describes."""
    given = json.loads(sys.argv[1])
    workload = WORKLOADS[given["workload"]]
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    dataset = workload.make()
    if given["loader"] == "forebay":
        importlib.import_module("forebay.loader")  # its code is the job's, not the loader's
    say(ready=time.monotonic())
    sys.stdin.readline()
    loader = make_loader(workload, dataset, given)
    say(began=time.monotonic())
    taken, digest = 0, 0
    kept: list[Any] = []
    counted, since_s, told_s = 0, 0.0, 0.0
    until_s = time.monotonic() + given["seconds"]
    for batch in loader:
        now_s = time.monotonic()
        taken += 1
        if taken <= FIRST_BATCHES:
            digest = fingerprint(batch, digest)
            since_s, until_s = time.monotonic(), time.monotonic() + given["seconds"]
        else:
            counted += 1
        if workload.keep_every and taken % workload.keep_every == 0:
            kept = [*kept, batch][-(workload.keep_mib // 8) :]
            say(kept=[time.monotonic(), sum(bytes_of(each) for each in kept)])
        if workload.think_s:
            time.sleep(workload.think_s)
        if now_s > until_s:
            break
        if now_s > told_s + TELL_EVERY_S:
            told_s = now_s
            say(taken=taken)
    took_s = time.monotonic() - since_s
    explain = loader.explain() if given["loader"] == "forebay" else ""  # type: ignore[attr-defined]
    say(
        ended=time.monotonic(),
        taken=taken,
        samples_per_s=counted * workload.batch_size / took_s if counted else 0.0,
        digest=f"{digest:08x}",
        explain=explain,
    )


if __name__ == "__main__":
    main()
