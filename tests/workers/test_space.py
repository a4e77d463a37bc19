"""Parts of a draft lie side by side, aligned, and what lies there already is not copied."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.transport.lease import SMALL_BYTES
from forebay.units import KIB, PAGE_BYTES
from forebay.workers.space import POUR_LEAST_BYTES, Mapping, Space, estimate_size
from tests.transport.parcels import bring

OFFSET = 4 * PAGE_BYTES
CAPACITY = 64 * PAGE_BYTES
LENGTHS = st.lists(st.integers(0, 3 * SMALL_BYTES), max_size=8)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, OFFSET + CAPACITY + PAGE_BYTES) as mapping:
        yield mapping


def space_in(memory: mmap.mmap, capacity_bytes: int = CAPACITY) -> Space:
    return Space(Mapping(memory), OFFSET, capacity_bytes)


def take(space: Space, length: int) -> torch.Tensor:
    part = space.take(length)
    assert part is not None
    return part


@given(LENGTHS)
@settings(deadline=None)
def test_parts_are_aligned_do_not_overlap_and_stay_inside(lengths: list[int]) -> None:
    with mmap.mmap(-1, OFFSET + CAPACITY) as memory:
        mapping = Mapping(memory)
        space = Space(mapping, OFFSET, CAPACITY)
        end = OFFSET
        for length in lengths:
            part = space.take(length) if length else None
            if part is None:
                assert not length or estimate_size([space.used_bytes, length]) > CAPACITY
                continue
            at = part.data_ptr() - mapping.address
            assert at % (PAGE_BYTES if length > SMALL_BYTES else 64) == 0
            assert end <= at
            assert at + length == OFFSET + space.used_bytes <= OFFSET + CAPACITY
            end = at + length
            del part
        del space, mapping


@given(LENGTHS)
def test_the_estimate_is_what_the_parts_take(lengths: list[int]) -> None:
    with mmap.mmap(-1, 2 * 1024 * KIB) as memory:
        space = Space(Mapping(memory), 0, estimate_size(lengths))
        for length in lengths:
            assert bring(space, np.zeros(length, np.uint8)) is not None
        assert space.used_bytes == estimate_size(lengths)


def test_a_buffer_is_copied_in_once(memory: mmap.mmap) -> None:
    space = space_in(memory)
    span = bring(space, np.frombuffer(b"forebay" * 10, np.uint8))
    assert span == (OFFSET, 70)
    assert memory[OFFSET : OFFSET + 70] == b"forebay" * 10


def test_what_was_written_into_the_draft_already_stays_where_it_is(memory: mmap.mmap) -> None:
    space = space_in(memory)
    take(space, 100)
    part = take(space, 200).fill_(7)
    used = space.used_bytes
    assert bring(space, part[50:150].numpy()) == (OFFSET + 128 + 50, 100)
    assert space.used_bytes == used


def test_what_lies_in_another_draft_is_copied(memory: mmap.mmap) -> None:
    mapping = Mapping(memory)
    before = take(Space(mapping, 0, OFFSET), 100).fill_(5)
    space = Space(mapping, OFFSET, CAPACITY)
    assert bring(space, before.numpy()) == (OFFSET, 100)
    assert memory[OFFSET + 99] == 5


def test_a_part_that_does_not_fit_is_refused_and_takes_nothing(memory: mmap.mmap) -> None:
    space = space_in(memory, PAGE_BYTES)
    take(space, 100)
    assert space.take(PAGE_BYTES) is None
    assert bring(space, np.zeros(PAGE_BYTES, np.uint8)) is None
    assert space.used_bytes == 100
    with pytest.raises(ValueError, match="5000 bytes do not fit into a block of 4096"):
        space.note_used(5000)


def test_empty_buffers_take_nothing(memory: mmap.mmap) -> None:
    space = space_in(memory)
    span = bring(space, np.zeros(0, np.uint8))
    assert span is not None
    assert span[1] == 0
    assert space.used_bytes == 0


def test_parts_are_writable_as_any_dtype(memory: mmap.mmap) -> None:
    part = take(space_in(memory), 40)
    part.view(torch.float64).copy_(torch.arange(5))
    assert np.frombuffer(memory[OFFSET : OFFSET + 40]).tolist() == [0, 1, 2, 3, 4]


def read_anonymous() -> int:
    """This process's anonymous resident bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * KIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages go back on Linux only")
@pytest.mark.parametrize("shift", [0, 40])
def test_a_forsaken_buffer_is_given_up_while_it_is_copied(shift: int) -> None:
    length = 2 * POUR_LEAST_BYTES
    whole = torch.randint(0, 256, (length + 100,), dtype=torch.uint8)
    expected = whole[shift : shift + length].clone()
    around = whole[:shift].tolist(), whole[shift + length :].tolist()
    with mmap.mmap(-1, length) as memory:
        space = Space(Mapping(memory), 0, length)
        before = read_anonymous()
        span = bring(space, whole.numpy()[shift : shift + length], pours=True)
        assert span == (0, length)
        assert before - read_anonymous() > 0.9 * length
        assert torch.equal(torch.frombuffer(memory, dtype=torch.uint8), expected)
        assert (whole[:shift].tolist(), whole[shift + length :].tolist()) == around
        del space
