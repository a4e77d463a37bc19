"""What following memory costs: the same run with the controller on and off, in turns.

    python benchmarks/control.py [--rounds 5] [--seconds 4] [--main-mib 500]

Measured is the processor time of the main process (its threads included) for a consumer that
sleeps, so that little else is in it; the difference of the two, as a part of one core. The
main process holds an array, since reading it is what costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))

from record import Measure, Record, now_utc, read_commit, read_machine, read_versions, save

import forebay
from forebay.flow.controller import Controller

LOOK = Controller.look


class Floats(Dataset[torch.Tensor]):
    """Batches of 2 MiB, with nothing to do for them."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32_768,), float(index))


def measure(seconds: float, *, is_on: bool) -> float:
    """Processor seconds of this process for each second of the run."""
    Controller.look = LOOK if is_on else lambda *_, **__: None  # type: ignore[method-assign]
    with forebay.DataLoader(Floats(), 16, num_workers=2, memory_budget="200MiB") as loader:
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        began, used = time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            next(batches)
            time.sleep(0.02)
        return (time.process_time() - used) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--main-mib", type=int, default=500)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    held = np.full(options.main_mib * 1024**2, 1, dtype=np.uint8)
    measures = []
    for number in range(options.rounds):
        for contestant, is_on in (("controller on", True), ("controller off", False)):
            used = measure(options.seconds, is_on=is_on)
            measures.append(
                Measure("control", "slow consumer", contestant, number, {"cores": used})
            )
            print(f"round {number}, {contestant}: {used:.2%} of a core", flush=True)
    on, off = (
        statistics.median(m.values["cores"] for m in measures if m.contestant == name)
        for name in ("controller on", "controller off")
    )
    print(f"control costs {on - off:.2%} of one core ({held.nbytes >> 20} MiB in main)")
    notes = {"main process": f"holds {held.nbytes >> 20} MiB"}
    record = Record(
        now_utc(), read_commit(), "control", read_machine(), read_versions(), notes, tuple(measures)
    )
    print(save(record))


if __name__ == "__main__":
    main()
