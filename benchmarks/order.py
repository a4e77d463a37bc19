"""Random order over many samples: what it holds, and how soon the first index comes.

    python benchmarks/order.py [--samples 50000000] [--rounds 3]

Each measurement is a process of its own, in turns: `torch.randperm` alone (the floor), the first
batch of indices of torch's loader, and of forebay's, for a shuffled loader and for one of two
ranks. Bytes are the rise of the peak of resident memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).parent))

from record import Measure, Record, now_utc, read_commit, read_machine, read_versions, save

import forebay

LOADERS = {"torch": torch.utils.data.DataLoader, "forebay": forebay.DataLoader}
CONTESTANTS = ("randperm alone", *LOADERS)
ORDERS = ("shuffle", "two ranks")


class Numbers(torch.utils.data.Dataset[int]):
    """Its samples cost nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def read_peak() -> int:
    """Bytes: the most that was resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def open_order(contestant: str, order: str, length: int) -> Any:
    """Something whose first item is the first of the order."""
    if contestant not in LOADERS:
        return lambda: torch.randperm(length)
    numbers = Numbers(length)
    options: dict[str, Any] = {"shuffle": True}
    if order == "two ranks":
        options = {"sampler": DistributedSampler(numbers, 2, 1)}
    loader = LOADERS[contestant](numbers, batch_size=64, **options)
    return lambda: next(iter(loader))


def measure_here(contestant: str, order: str, length: int) -> dict[str, float]:
    """In this process."""
    open_order(contestant, order, 1000)()  # imports, and pages that any first use touches
    first = open_order(contestant, order, length)
    before, began = read_peak(), time.perf_counter()
    first()
    took = time.perf_counter() - began
    return {"first_s": took, "bytes_an_index": (read_peak() - before) / length}


def measure(contestant: str, order: str, length: int) -> dict[str, float]:
    """In a process of its own."""
    asked = [
        sys.executable,
        __file__,
        "--one",
        contestant,
        "--order",
        order,
        "--samples",
        str(length),
    ]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--order", choices=ORDERS, default=ORDERS[0], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_here(options.one, options.order, options.samples)))
        return
    measures = []
    for number in range(options.rounds):
        for order in ORDERS:
            for contestant in CONTESTANTS:
                values = measure(contestant, order, options.samples)
                measures.append(Measure("order", order, contestant, number, values))
                print(
                    f"round {number}, {order}, {contestant}: first after {values['first_s']:.2f} "
                    f"s, {values['bytes_an_index']:.1f} bytes an index",
                    flush=True,
                )
    for order in ORDERS:
        first = {
            name: statistics.median(
                m.values["first_s"]
                for m in measures
                if m.workload == order and m.contestant == name
            )
            for name in CONTESTANTS
        }
        floor = first["randperm alone"]
        print(
            f"{order}: first index at {first['forebay'] / floor:.2f} x randperm alone, "
            f"torch's at {first['torch'] / floor:.2f} x"
        )
    notes = {"samples": f"{options.samples:,}"}
    print(
        save(
            Record(
                now_utc(),
                read_commit(),
                "order",
                read_machine(),
                read_versions(),
                notes,
                tuple(measures),
            )
        )
    )


if __name__ == "__main__":
    main()
