"""Run as a script: pack a stream, or read it in a forked worker; prints what memory it took.

A process of its own, so that only the scene is in the figures.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forebay.memory.packed import PackedList

COUNT = 200_000


def dicts(count: int = COUNT) -> Iterator[dict[str, Any]]:
    for i in range(count):
        yield {"id": i, "label": i % 1000, "weight": i / 3, "path": f"images/{i:08d}.jpg"}


def annotated_images() -> Iterator[Any]:
    """What a streaming parser of JSON hands out: 100 k of these would be a file of 150 MB."""
    for i in range(COUNT // 10):
        boxes = [
            {"bbox": [i % 640, box * 1.5, 32, 48.25], "category_id": box, "iscrowd": 0}
            for box in range(20)
        ]
        text = json.dumps({"file_name": f"{i:012d}.jpg", "id": i, "annotations": boxes})
        yield json.loads(text)


def changing() -> Iterator[dict[str, Any]]:
    for i, record in enumerate(dicts()):
        if i > COUNT // 2:
            record["label"] = str(record["label"])
        if i > COUNT * 3 // 4:
            record["extra"] = None
        yield record


def read_status(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def read_private_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if line.startswith("Private_")]
    return sum(int(words[1]) * 1024 for words in lines)


def pack(stream: Callable[[], Iterator[Any]]) -> dict[str, int]:
    PackedList(record for record, _ in zip(stream(), range(100)))  # what is imported late
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = read_status("VmHWM")
    packed = PackedList.from_iter(stream())
    peak_bytes = read_status("VmHWM") - before
    return {"packed_bytes": packed.packed_bytes, "peak_bytes": peak_bytes}


def grow_in_worker(data: Any, order: Any) -> int:
    """By how much a forked process grows that reads every record once."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        gc.disable()
        for i in order[:100]:
            dict(data[i])
        before = read_private_bytes()
        for i in order:
            record = data[i]
            assert record["id"] == i
            del record
        os.write(writer, str(read_private_bytes() - before).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="ascii") as answer:
        grown_bytes = int(answer.read())
    os.waitpid(pid, 0)
    return grown_bytes


def fork() -> dict[str, int]:
    count = 3 * COUNT  # the half MiB that any worker copies of the interpreter is little beside it
    packed = PackedList(dicts(count))
    records = list(dicts(count))
    # Not a list: its own integers would be copied, as the records' are.
    order = np.random.default_rng(0).permutation(count)
    gc.collect()
    gc.freeze()
    return {
        "packed_bytes": packed.packed_bytes,
        "grown_bytes": grow_in_worker(packed, order),
        "list_grown_bytes": grow_in_worker(records, order),
    }


if __name__ == "__main__":
    scene = sys.argv[1]
    streams: dict[str, Callable[[], Iterator[Any]]] = {
        "dicts": dicts,
        "annotations": annotated_images,
        "changing": changing,
    }
    print(json.dumps(fork() if scene == "fork" else pack(streams[scene])))
