"""Run as a script: case 29 with a cache of so many bytes; prints bytes and counts as JSON.

200 samples of 2 MiB, 2 workers, 4 shuffled epochs. A process of its own, so that its pages are
in no worker's sum.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import psutil

from forebay import DataLoader, SharedCache
from tests.datasets.items import Blocks

EPOCHS = 4


def measure(memory: str, persistent: str) -> dict[str, object]:
    cache = SharedCache(Blocks(200, 2 << 20), memory)
    options: dict[str, Any] = {
        "shuffle": True,
        "num_workers": 2,
        "persistent_workers": persistent == "persistent",
    }
    private, hits, stores = [], [], []
    with DataLoader(cache, batch_size=2, memory_budget="256MiB", **options) as loader:
        for _ in range(EPOCHS):
            for number, (arrays, numbers) in enumerate(loader):
                assert (arrays == numbers[:, None]).all()
                if number % 50 == 49:
                    workers = psutil.Process().children(recursive=True)
                    private.append(sum(each.memory_full_info().uss for each in workers))
                    resident = max((each.memory_info().rss for each in workers), default=0)
                    stores.append(cache.stats().store_bytes)
            hits.append(cache.stats().hits)
    return {
        "private_bytes": max(private),
        "resident_bytes": resident,
        "store_bytes": max(stores),
        "hits": [after - before for before, after in zip([0, *hits], hits)],
        "entries": cache.stats().entries,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(measure(*sys.argv[1:])))
