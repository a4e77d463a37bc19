"""One contestant feeds a consumer while somebody outside reads its memory.

Run as a program in a fresh process inside a memory cgroup (run.py does that):

    python benchmarks/feeding.py --line jpeg --contestant torch --photos FOLDER

Two lines. `jpeg`: real decoding, two workers, batches of 64 x 3 x 224 x 224
float32, a consumer that only touches them. `slow consumer`: 8.0 MB batches, four
workers, a consumer that needs 0.1 s a step. Prints one line of JSON: rates, and
the two marks in time between which the footprint is to be read.

Does not cover: reading that footprint (run.py) and comparing (report.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from contestants import make_loader
from torch.utils.data import ConcatDataset, Dataset
from transport import CEILING_TWO_PROCESSES, WORKERS
from workloads import BATCH_SAMPLES, GeneratedPhotos, PremadeBatches, touch

JPEG = "jpeg"
SLOW = "slow consumer"
SLOW_WORKERS = 4
STEP_S = 0.1
SETTLE_S = 0.1  # several readings from outside fall into it: the level is taken there
START_BATCHES = 8  # left out of the rate: workers start, and each makes a first batch
SEED = 7


def jpeg_dataset(photos: str | None, batches: int) -> Dataset[Any]:
    """Photographs from a folder, repeated until they fill `batches`; made here without one."""
    samples = batches * BATCH_SAMPLES
    if photos is None:
        return GeneratedPhotos(samples)
    from forebay.bench.photos import PhotoDataset

    once = PhotoDataset(Path(photos))
    return ConcatDataset([once] * -(-samples // len(once)))


def measure_feeding(line: str, contestant: str, photos: str | None, batches: int) -> dict[str, Any]:
    """Feed `batches` batches after the start; the rate without the start, and the marks."""
    torch.manual_seed(SEED)
    total = START_BATCHES + batches
    slow = line == SLOW
    dataset = PremadeBatches(total * BATCH_SAMPLES) if slow else jpeg_dataset(photos, total)
    if contestant.startswith("forebay"):
        from forebay import DataLoader  # noqa: F401 - its code is not what feeding costs
    gc.collect()
    time.sleep(SETTLE_S)
    level_s = time.monotonic()
    loader = make_loader(
        contestant,
        dataset,
        batch_size=BATCH_SAMPLES,
        shuffle=True,
        num_workers=SLOW_WORKERS if slow else WORKERS,
    )
    arrivals = _consume(loader, total, STEP_S if slow else 0.0)
    elapsed_s = arrivals[-1] - arrivals[START_BATCHES - 1]
    return {
        "level_s": level_s,
        "ended_s": arrivals[-1],
        "first_batch_s": arrivals[0] - level_s,
        "samples_per_s": batches * BATCH_SAMPLES / elapsed_s,
        "step_ms": elapsed_s / batches * 1000,
    }


def _consume(loader: Any, total: int, step_s: float) -> list[float]:
    """The times at which each of the first `total` batches had been used."""
    used = []
    for batch in loader:
        touch(batch[0] if isinstance(batch, list | tuple) else batch)
        if step_s:
            time.sleep(step_s)
        used.append(time.monotonic())
        if len(used) == total:
            break
    return used


def measure_bare_decoding(photos: str | None, batches: int) -> dict[str, Any]:
    """The ceiling: two processes decode into warm buffers, with no loader between."""
    context = multiprocessing.get_context("fork")
    times = context.SimpleQueue()
    together = context.Barrier(WORKERS)
    dataset = jpeg_dataset(photos, batches)
    each = batches // WORKERS

    def decode_alone(number: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED + number)
        buffer = torch.zeros((BATCH_SAMPLES, 3, 224, 224)).share_memory_()
        order = torch.randperm(batches * BATCH_SAMPLES).tolist()
        together.wait()
        started_s = time.monotonic()
        for batch in range(each):
            for row, index in enumerate(order[batch * BATCH_SAMPLES :][:BATCH_SAMPLES]):
                buffer[row].copy_(dataset[index][0])
        times.put((started_s, time.monotonic()))

    level_s = time.monotonic()
    processes = [context.Process(target=decode_alone, args=(n,)) for n in range(WORKERS)]
    for process in processes:
        process.start()
    spans = [times.get() for _ in processes]
    for process in processes:
        process.join()
    rate = sum(each * BATCH_SAMPLES / (ended_s - started_s) for started_s, ended_s in spans)
    return {
        "level_s": level_s,
        "ended_s": max(ended_s for _, ended_s in spans),
        "samples_per_s": rate,
        "step_ms": BATCH_SAMPLES / rate * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--line", choices=[JPEG, SLOW], required=True)
    parser.add_argument("--contestant", required=True)
    parser.add_argument("--photos", help="a folder of images; without it they are made here")
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    if options.contestant == CEILING_TWO_PROCESSES:
        values = measure_bare_decoding(options.photos, options.batches)
    else:
        values = measure_feeding(options.line, options.contestant, options.photos, options.batches)
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
