"""What goes to disk comes back as it was, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.transport.arena import Arena
from forebay.transport.codec import decode
from forebay.transport.lease import Lender, Ready
from forebay.transport.spill import SpillFile
from forebay.units import MIB
from tests.parity.batches import counting
from tests.transport.parcels import seal

LARGE = 50_000  # float32s: 200 KB


@pytest.fixture
def spill() -> Iterator[SpillFile]:
    spill = SpillFile()
    yield spill
    spill.close()


def bring_back(spill: SpillFile, spilled: Any, arena: Arena) -> Ready:
    block = arena.place(spilled.size_bytes)
    assert block is not None
    return spill.read(spilled, block, arena)


def test_a_batch_comes_back_elsewhere_as_it_was(
    arena: Arena, lender: Lender, spill: SpillFile
) -> None:
    batch = {"x": counting(3, LARGE), "y": counting(1), "name": "a"}
    ready = seal(arena, batch)
    spilled = spill.write(ready, arena)
    assert arena.free_warm_bytes == ready.block.capacity_bytes == spill.spilled_bytes
    other = arena.place(ready.block.capacity_bytes)  # takes the place that it left
    assert other is not None
    arena.mapping[other.offset : other.offset + 100] = b"z" * 100
    back = bring_back(spill, spilled, arena)
    assert back.block.offset != ready.block.offset
    arrived = decode(back.head, lender.lend(back))
    assert arrived["x"].tolist() == batch["x"].tolist()  # type: ignore[attr-defined]
    assert arrived["y"].tolist() == batch["y"].tolist()  # type: ignore[attr-defined]
    assert spill.spilled_bytes == 0


def test_the_file_has_no_name_and_grows_no_further_than_what_lies_in_it(
    arena: Arena, spill: SpillFile
) -> None:
    for k in range(10):
        spilled = spill.write(seal(arena, counting(k, LARGE)), arena)
        ready = bring_back(spill, spilled, arena)
        arena.drop(ready.block)
    status = os.fstat(spill._fd)
    assert status.st_nlink == 0
    assert status.st_size == ready.block.capacity_bytes


def test_a_forgotten_batch_leaves_its_place_to_the_next(arena: Arena, spill: SpillFile) -> None:
    first = spill.write(seal(arena, counting(0, LARGE)), arena)
    spill.forget(first)
    assert spill.spilled_bytes == 0
    assert spill.write(seal(arena, counting(1, LARGE)), arena).position == first.position


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)


def test_on_a_full_disk_the_batch_stays_where_it_is(
    arena: Arena, lender: Lender, spill: SpillFile, full_disk: None
) -> None:
    ready = seal(arena, counting(2, LARGE))
    with pytest.raises(OSError, match="No space left"):
        spill.write(ready, arena)
    assert spill.spilled_bytes == 0
    assert decode(ready.head, lender.lend(ready)).tolist() == counting(2, LARGE).tolist()


def test_writes_and_reads_that_stop_short_are_continued(
    arena: Arena, lender: Lender, spill: SpillFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: write(fd, part[:7001], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read(fd, [parts[0][:5003]], at))
    ready = bring_back(spill, spill.write(seal(arena, counting(1, LARGE)), arena), arena)
    assert decode(ready.head, lender.lend(ready)).tolist() == counting(1, LARGE).tolist()


def test_a_file_that_was_cut_short_is_told(arena: Arena, spill: SpillFile) -> None:
    spilled = spill.write(seal(arena, counting(0, LARGE)), arena)
    os.ftruncate(spill._fd, 1000)
    with pytest.raises(OSError, match="ends 199704 bytes early"):
        bring_back(spill, spilled, arena)


@given(st.lists(st.tuples(st.sampled_from([20_000, 50_000, 90_000]), st.booleans()), max_size=12))
@settings(max_examples=20, deadline=None)
def test_batches_come_back_right_in_any_order(steps: list[tuple[int, bool]]) -> None:
    arena, spill = Arena(16 * MIB), SpillFile()
    lender = Lender(arena)
    away: list[Any] = []
    for k, (size, takes_one_back) in enumerate(steps):
        away.append((k, size, spill.write(seal(arena, counting(k, size)), arena)))
        if takes_one_back:
            away.append(away.pop(0))
            index, length, spilled = away.pop(len(away) // 2)
            ready = bring_back(spill, spilled, arena)
            tensor = decode(ready.head, lender.lend(ready))
            assert tensor.equal(counting(index, length))
    assert spill.spilled_bytes == sum(spilled.size_bytes for _, _, spilled in away)
    spill.close()
    arena.close()
