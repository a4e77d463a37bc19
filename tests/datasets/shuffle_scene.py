"""Run as a script: what three workers hold privately while they shuffle; prints bytes.

A process of its own, so that its pages are in no worker's sum.
"""

from __future__ import annotations

import json
import sys
import warnings

import psutil

from forebay import DataLoader, ShuffleBuffer
from tests.datasets.streams import Arrays


def measure(memory: str) -> dict[str, int]:
    stream = ShuffleBuffer(Arrays(600), memory, most_samples=400, seed=0)
    highest = 0
    with DataLoader(stream, batch_size=None, num_workers=3) as loader:
        for number, _ in enumerate(loader):
            if number % 100 == 0:
                workers = psutil.Process().children(recursive=True)
                highest = max(highest, sum(each.memory_full_info().uss for each in workers))
    return {"private_bytes": highest, "samples": number + 1}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(measure(sys.argv[1])))
