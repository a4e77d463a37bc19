"""What replacing workers that leak costs: the same leaking epoch with and without need for it.

    python benchmarks/leaking.py [--items 8000] [--rounds 3] [--leak-kib 256] [--budget 400MiB]

Every item leaks memory below Python, as a decoder does that is not closed. With a budget above
all that leaks no worker is replaced; with a small one they are, between two batches. Measured are
samples a second, in turns; order and values are checked as they come.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))

from record import Measure, Record, now_utc, read_commit, read_machine, read_versions, save

import forebay

ITEM_FLOATS = 262_144  # 1 MiB
BATCH = 4
MALLOC: Any = ctypes.CDLL(None).malloc
MALLOC.restype, MALLOC.argtypes = ctypes.c_void_p, [ctypes.c_size_t]


class Leaking(Dataset[torch.Tensor]):
    """Items of 1 MiB; each leaks so many bytes that nobody can free any more."""

    def __init__(self, length: int, leak_bytes: int) -> None:
        self.length, self.leak_bytes = length, leak_bytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        ctypes.memset(MALLOC(self.leak_bytes), 1, self.leak_bytes)
        return torch.full((ITEM_FLOATS,), float(index))


def measure(items: int, leak_bytes: int, budget: str) -> dict[str, float]:
    """One epoch."""
    dataset = Leaking(items, leak_bytes)
    seen = 0
    with forebay.DataLoader(dataset, BATCH, num_workers=2, memory_budget=budget) as loader:
        batches = iter(loader)
        next(batches)  # workers are there
        began = time.perf_counter()
        for number, batch in enumerate(batches, 1):
            assert int(batch[0, 0]) == number * BATCH
            seen += len(batch)
        took = time.perf_counter() - began
        lines = loader.explain().splitlines()
        peak = loader.stats().peak_footprint_bytes
    moves = [line for line in lines if line.startswith("streams went on in another process")]
    count = int(moves[0].split("process ")[1].split()[0]) if moves else 0
    return {"samples_s": seen / took, "peak_bytes": peak, "replaced": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--leak-kib", type=int, default=256)
    parser.add_argument("--budget", default="400MiB")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    leak_bytes = options.leak_kib * 1024
    ample = f"{2 * options.items * leak_bytes // 2**20 + 1024}MiB"
    measures = []
    for number in range(options.rounds):
        for contestant, budget in (("ample budget", ample), ("replacing", options.budget)):
            values = measure(options.items, leak_bytes, budget)
            measures.append(Measure("leaking", "native leak", contestant, number, values))
            print(
                f"round {number}, {contestant}: {values['samples_s']:.0f} samples/s, peak "
                f"{values['peak_bytes'] / 2**20:.0f} MiB, {values['replaced']:.0f} replaced",
                flush=True,
            )
    ample_s, replacing_s = (
        statistics.median(m.values["samples_s"] for m in measures if m.contestant == name)
        for name in ("ample budget", "replacing")
    )
    print(f"replacing costs {1 - replacing_s / ample_s:.1%} of the throughput")
    notes = {"leak": f"{options.leak_kib} KiB an item", "budget": options.budget}
    record = Record(
        now_utc(), read_commit(), "leaking", read_machine(), read_versions(), notes, tuple(measures)
    )
    print(save(record))


if __name__ == "__main__":
    main()
