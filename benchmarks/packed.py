"""Measure PackedList against a list of the same dicts, on this machine, now.

    python benchmarks/packed.py            a million records, half a minute

Covers: the time of an access in order (records made one after the other lie in the processor's
cache) and in random order, here and in a forked process, by how much that process grows, and the
peak of packing. Prints the median over rounds in which both take turns, and their ratio.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forebay import PackedList
from forebay.units import format_bytes

READS = 200_000
ROUNDS = 5


def records(count: int) -> Iterator[dict[str, Any]]:
    for i in range(count):
        yield {"id": i, "label": i % 1000, "weight": i / 3, "path": f"images/{i:08d}.jpg"}


def time_reads(data: Any, order: list[int]) -> float:
    """Nanoseconds a record, three of its fields looked at."""
    began = time.perf_counter()
    for i in order:
        record = data[i]
        _ = record["id"], record["label"], record["path"]
    return (time.perf_counter() - began) / len(order) * 1e9


def read_kib(file: str, *names: str) -> int:
    lines = Path(f"/proc/self/{file}").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))


def read_in_fork(data: Any, order: np.ndarray) -> tuple[float, int]:
    """Nanoseconds a record and bytes grown, in a forked process that reads every record once."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        gc.disable()
        before = read_kib("smaps_rollup", "Private_")
        spent_ns = time_reads(data, order)
        grown = read_kib("smaps_rollup", "Private_") - before
        os.write(writer, f"{spent_ns} {grown * 1024}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        spent, grown_bytes = answer.read().split()
    os.waitpid(pid, 0)
    return float(spent), int(grown_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description="PackedList beside a list")
    parser.add_argument("--count", type=int, default=1_000_000)
    count = parser.parse_args().count
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = read_kib("status", "VmHWM")
    began = time.perf_counter()
    packed = PackedList(records(count))
    spent_s = time.perf_counter() - began
    peak_bytes = (read_kib("status", "VmHWM") - before) * 1024
    print(
        f"packed {count:,} dicts in {spent_s:.1f} s into {format_bytes(packed.packed_bytes)}, "
        f"peak {peak_bytes / packed.packed_bytes:.2f} times that"
    )
    contestants = {"list": list(records(count)), "PackedList": packed}
    order = np.random.default_rng(0).permutation(count)
    places = {"in order": list(range(min(count, READS))), "random": order[:READS].tolist()}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for name, data in contestants.items():
            for way, where in places.items():
                times.setdefault((way, name), []).append(time_reads(data, where))
    for way in places:
        ours, theirs = (statistics.median(times[way, name]) for name in ("PackedList", "list"))
        print(f"{way}: list {theirs:.0f} ns, PackedList {ours:.0f} ns, {ours / theirs:.1f} times")
    gc.collect()
    gc.freeze()
    for name, data in contestants.items():
        spent_ns, grown_bytes = read_in_fork(data, order)
        print(f"forked, all once: {name} {spent_ns:.0f} ns, grows by {format_bytes(grown_bytes)}")


if __name__ == "__main__":
    main()
