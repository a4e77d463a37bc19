"""A fetch's peak is seen, whatever else the process maps meanwhile."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.memory.peak import FaultMeter, read_faults
from forebay.memory.probe import Making, PeakMeter, Roots, trim_heap
from forebay.units import MIB


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """What other tests left must neither come free in the middle nor serve what is measured."""
    gc.collect()
    trim_heap()


@pytest.fixture
def meter() -> Iterator[PeakMeter]:
    meter = PeakMeter()
    yield meter
    meter.close()


@pytest.fixture
def shared() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, 50 * MIB) as mapping:
        yield mapping


def fill(mapping: mmap.mmap) -> None:
    for place in range(0, len(mapping), 4096):
        mapping[place] = 1


def take(length: int) -> mmap.mmap:
    """Private memory that goes when it is closed. What malloc gives out may lie in a hole that
    earlier tests left in the heap, and stay there."""
    held = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fill(held)
    return held


def make_transient() -> None:
    take(100 * MIB).close()


def test_a_transient_is_seen_after_it_was_freed(meter: PeakMeter) -> None:
    meter.start()
    make_transient()
    making = meter.stop()
    assert making.peak_bytes == pytest.approx(100 * MIB, rel=0.05)
    assert making.blur_bytes < MIB


def test_shared_pages_that_grow_below_the_peak_are_not_making(
    meter: PeakMeter, shared: mmap.mmap
) -> None:
    meter.start()
    held = take(100 * MIB)
    fill(shared)
    held.close()
    assert meter.stop().peak_bytes == pytest.approx(100 * MIB, rel=0.05)


def test_the_blur_covers_shared_pages_that_grow_after_the_peak(
    meter: PeakMeter, shared: mmap.mmap
) -> None:
    meter.start()
    make_transient()
    fill(shared)
    making = meter.stop()
    assert making.peak_bytes < 60 * MIB
    assert making.peak_bytes + making.blur_bytes == pytest.approx(100 * MIB, rel=0.05)


def test_what_was_poured_into_shared_pages_is_not_taken_off_the_peak(
    meter: PeakMeter, shared: mmap.mmap
) -> None:
    meter.start()
    make_transient()
    fill(shared)
    assert meter.stop(poured_bytes=len(shared)).peak_bytes == pytest.approx(100 * MIB, rel=0.05)


def test_faults_that_map_shared_pages_are_not_counted(shared: mmap.mmap) -> None:
    faults = FaultMeter()
    before = faults.stop()
    faults.start(0)  # how large the block will be is not known
    fill(shared)
    mapped = faults.stop()
    faults.start(len(shared))
    make_transient()
    anonymous = faults.stop()
    pages = len(shared) // 4096
    assert mapped - before < 0.1 * pages
    faults.close()
    # Huge pages may make them fewer, never more.
    assert read_faults() - anonymous >= 0.9 * pages
    assert anonymous >= mapped


def test_small_blocks_are_not_looked_at(shared: mmap.mmap) -> None:
    faults = FaultMeter()
    before = faults.stop()
    faults.start(4096)
    fill(shared)
    assert faults.stop() - before >= 0.9 * len(shared) // 4096


def test_shared_pages_that_go_make_no_phantom_peak(meter: PeakMeter, shared: mmap.mmap) -> None:
    fill(shared)
    meter.start()
    shared.madvise(mmap.MADV_REMOVE)
    assert meter.stop().peak_bytes < MIB


def test_what_a_fetch_keeps_is_private_afterwards(meter: PeakMeter) -> None:
    meter.start()
    before = meter.stop().private_bytes
    meter.start()
    held = take(100 * MIB)
    making = meter.stop()
    assert making.private_bytes - before == pytest.approx(len(held), rel=0.05)
    assert making.peak_bytes == pytest.approx(len(held), rel=0.05)


def test_an_earlier_peak_is_forgotten(meter: PeakMeter) -> None:
    make_transient()
    meter.start()
    assert meter.stop().peak_bytes < MIB


def test_a_fork_measures_itself(meter: PeakMeter) -> None:
    meter.start()
    pid = os.fork()
    if not pid:
        meter.start()
        make_transient()
        peak = meter.stop().peak_bytes
        os._exit(0 if abs(peak - 100 * MIB) < 5 * MIB else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert meter.stop().peak_bytes < 5 * MIB


def test_a_fork_leaves_descriptors_alone_whose_numbers_were_used_anew(meter: PeakMeter) -> None:
    before = {int(name) for name in os.listdir("/proc/self/fd")}
    meter.start()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            ours = {int(name) for name in os.listdir("/proc/self/fd")} - before
            null = os.open(os.devnull, os.O_RDONLY)
            taken = [fd for fd in ours if fd != null and _is_open(fd)]
            for fd in taken:
                os.dup2(null, fd)
            meter.start()
            code = 0 if taken and all(_is_open(fd) for fd in taken) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_stop_without_start_says_what_to_do(meter: PeakMeter) -> None:
    with pytest.raises(RuntimeError, match=r"call start\(\)"):
        meter.stop()


def test_with_clear_refs_closed_the_growth_that_stays_is_the_peak(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").symlink_to("/proc/self/status")
    meter = PeakMeter(Roots(proc=tmp_path))
    meter.start()
    make_transient()
    held = take(60 * MIB)
    making = meter.stop()
    meter.close()
    assert making.peak_bytes == pytest.approx(len(held), rel=0.05)
    assert meter.degraded is not None
    assert "clear_refs" in meter.degraded


def test_without_proc_nothing_is_seen_and_it_is_said(tmp_path: Path) -> None:
    meter = PeakMeter(Roots(proc=tmp_path))
    meter.start()
    assert meter.stop() == Making(0, 0)
    assert meter.degraded == "status cannot be read: peaks are not measured"


TRIM = """
from forebay.memory.probe import Probe, trim_heap
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
size = 64 << 10  # below the mmap threshold: these lie in the heap
blocks = [libc.malloc(size) for _ in range(1600)]
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks[:-1]:
    libc.free(block)  # the last one pins the top, so that the heap cannot shrink by itself
before = Probe().read_statm().anonymous_bytes
trim_heap()
print(before - Probe().read_statm().anonymous_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is glibc's")
def test_trimming_gives_freed_memory_back() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", TRIM], capture_output=True, timeout=60, check=True
    )
    assert int(answer.stdout) > 80 * MIB


def test_trimming_elsewhere_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.memory import peak

    find: Callable[[], object] = peak._find_malloc_trim
    peak._find_malloc_trim.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert find() is None
    trim_heap()
    peak._find_malloc_trim.cache_clear()
