"""Run as a script, inside a group of its own: a large parent, four forks; prints the readings.

The public report behind it: summed RSS said 500 GB on a machine of 128 GB, since each fork
is charged there with all that it shares with its parent.
"""

from __future__ import annotations

import json
import os

from forebay.memory.probe import Probe
from forebay.units import MIB
from tests.memory.fork_scene import touch

MAIN_BYTES = 600 * MIB
WORKER_BYTES = 40 * MIB
WORKERS = 4


def fork_worker(ready_fd: int, end: tuple[int, int]) -> int:
    pid = os.fork()
    if not pid:
        os.close(end[1])
        held = bytearray(WORKER_BYTES)
        touch(held, 3)
        os.write(ready_fd, b"w")
        os.read(end[0], 1)  # ends when main closes its end
        os._exit(0)
    return pid


def main() -> None:
    held = bytearray(MAIN_BYTES)
    touch(held, 1)
    probe = Probe()
    ready, end = os.pipe(), os.pipe()
    before_bytes = probe.read_own_group([os.getpid()])
    pids = [fork_worker(ready[1], end) for _ in range(WORKERS)]
    for _ in pids:
        os.read(ready[0], 1)
    footprint = probe.read_footprint(os.getpid(), pids)
    after_bytes = probe.read_own_group([os.getpid(), *pids])
    rss_bytes = sum(reading.rss_bytes for pid in pids if (reading := probe.read_process(pid)))
    os.close(end[1])
    for pid in pids:
        os.waitpid(pid, 0)
    assert before_bytes is not None, "others are in the group of this scene"
    assert after_bytes is not None
    print(json.dumps([footprint.workers_bytes, after_bytes - before_bytes, rss_bytes]))


if __name__ == "__main__":
    main()
