"""One contestant starts workers that have to be told a large dataset.

Run as a program in a fresh process inside a memory cgroup (run.py does that):

    python benchmarks/starting.py --contestant torch --workers 4 --records 1000000

Under spawn nothing is inherited, so the dataset travels as a pickle. Prints one
line of JSON: the time from making the loader to its first batch, and the marks in
time at which the level and what has been added to it are to be read.
"""

from __future__ import annotations

import argparse
import gc
import json
import time

from contestants import make_loader
from workloads import BATCH_SAMPLES, SmallRecords

SETTLE_S = 0.3
FURTHER_BATCHES = 16  # every worker has answered


def measure_start(contestant: str, workers: int, records: int, context: str) -> dict[str, float]:
    """Start, take a first batch and some more, and wait for the readings."""
    dataset = SmallRecords(records)
    if contestant.startswith("forebay"):
        from forebay import DataLoader  # noqa: F401 - its code is not what starting costs
    gc.collect()
    time.sleep(SETTLE_S)
    level_s = time.monotonic()
    loader = make_loader(
        contestant,
        dataset,
        batch_size=BATCH_SAMPLES,
        num_workers=workers,
        multiprocessing_context=context,
    )
    batches = iter(loader)
    next(batches)
    first_s = time.monotonic()
    for _ in range(FURTHER_BATCHES):
        next(batches)
    time.sleep(SETTLE_S)
    return {"level_s": level_s, "first_batch_s": first_s - level_s, "ended_s": time.monotonic()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contestant", required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--context", choices=["spawn", "forkserver"], default="spawn")
    options = parser.parse_args()
    values = measure_start(options.contestant, options.workers, options.records, options.context)
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
