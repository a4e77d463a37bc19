"""Run as a script: main with 200 MiB, a zygote, two workers of 30 MiB; prints the readings.

A process of its own, so that pytest's pages are in nobody's sum.
"""

from __future__ import annotations

import dataclasses
import json
import os

from forebay.memory.probe import Probe
from forebay.units import MIB, PAGE_BYTES

MAIN_BYTES = 200 * MIB
WORKER_BYTES = 30 * MIB


def touch(held: bytearray, value: int) -> None:
    """Write to each page, so that it is this process' own."""
    for place in range(0, len(held), PAGE_BYTES):
        held[place] = value


def work(ready_fd: int, end_fd: int) -> None:
    held = bytearray(WORKER_BYTES)
    touch(held, 3)
    os.write(ready_fd, b"w")
    os.read(end_fd, 1)  # ends when main closes its end


def template(ready_fd: int, end_fd: int) -> None:
    workers = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            work(ready_fd, end_fd)
            os._exit(0)
        workers.append(pid)
    os.write(ready_fd, b"z")
    for pid in workers:
        os.waitpid(pid, 0)


def main() -> None:
    held = bytearray(MAIN_BYTES)
    touch(held, 1)
    ready, ready_fd = os.pipe()
    end_fd, end = os.pipe()
    zygote = os.fork()
    if not zygote:
        os.close(end)
        template(ready_fd, end_fd)
        os._exit(0)
    seen = b""
    while len(seen) < 3:
        seen += os.read(ready, 3)
    shared = Probe().read_footprint(os.getpid(), [zygote])
    touch(held, 2)
    rewritten = Probe().read_footprint(os.getpid(), [zygote])
    os.close(end)
    os.waitpid(zygote, 0)
    gone = Probe().read_footprint(os.getpid(), [zygote])
    print(json.dumps([dataclasses.asdict(reading) for reading in (shared, rewritten, gone)]))


if __name__ == "__main__":
    main()
