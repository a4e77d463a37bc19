"""Blocks never overlap, nothing is lost, and what counts as touched is never less than what is."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.transport.arena import Arena, Block, StaleBlockError
from forebay.units import MIB, PAGE_BYTES

RESERVE_BYTES = 64 * PAGE_BYTES
CAN_GIVE_BACK = hasattr(mmap, "MADV_REMOVE")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(RESERVE_BYTES)
    yield arena
    arena.close()


def write(arena: Arena, block: Block, length: int | None = None) -> None:
    count = block.capacity_bytes if length is None else length
    arena.mapping[block.offset : block.offset + count] = b"x" * count


def placed(arena: Arena, length_bytes: int) -> Block:
    block = arena.place(length_bytes)
    assert block is not None
    return block


def test_a_block_is_whole_pages_and_one_at_least(arena: Arena) -> None:
    assert placed(arena, 0).capacity_bytes == PAGE_BYTES
    block = placed(arena, PAGE_BYTES + 1)
    assert (block.offset % PAGE_BYTES, block.capacity_bytes) == (0, 2 * PAGE_BYTES)


def test_address_space_costs_nothing_until_it_is_written() -> None:
    arena = Arena(1024 * MIB)
    block = placed(arena, 512 * MIB)
    assert arena.read_resident_bytes() == 0
    write(arena, block, 3 * PAGE_BYTES)
    assert arena.read_resident_bytes() == 3 * PAGE_BYTES
    arena.close()


def test_a_dropped_block_is_the_next_of_its_size(arena: Arena) -> None:
    first, second = placed(arena, 9000), placed(arena, 9000)
    arena.drop(first)
    arena.drop(second)
    again = placed(arena, 9000)
    assert again.offset == second.offset
    assert again.generation > second.generation
    assert again.warm_bytes == again.capacity_bytes


def test_dropped_neighbours_serve_a_larger_block_without_new_pages(arena: Arena) -> None:
    blocks = [placed(arena, PAGE_BYTES) for _ in range(4)]
    for block in blocks:
        arena.drop(block)
    assert arena.estimate_growth(4 * PAGE_BYTES) == 0
    assert placed(arena, 4 * PAGE_BYTES).offset == 0
    assert arena.touched_bytes == 4 * PAGE_BYTES


def test_a_hole_that_is_a_little_too_small_is_stretched(arena: Arena) -> None:
    """Else one page that went back, or one batch a little longer, would cost all of its pages."""
    block = placed(arena, 8 * PAGE_BYTES)
    write(arena, block)
    arena.drop(block)
    assert arena.estimate_growth(10 * PAGE_BYTES) == 2 * PAGE_BYTES
    longer = placed(arena, 10 * PAGE_BYTES)
    assert (longer.offset, longer.warm_bytes) == (block.offset, 8 * PAGE_BYTES)
    assert arena.touched_bytes == 10 * PAGE_BYTES
    shorter = arena.shrink(longer, 3 * PAGE_BYTES, 9 * PAGE_BYTES)
    assert arena.touched_bytes == 9 * PAGE_BYTES
    arena.drop(shorter)


def test_a_stretched_block_that_nobody_wrote_to_leaves_its_cold_part_cold(arena: Arena) -> None:
    arena.drop(placed(arena, 8 * PAGE_BYTES))
    arena.drop_unused(placed(arena, 10 * PAGE_BYTES))
    assert arena.touched_bytes == 8 * PAGE_BYTES == arena.free_warm_bytes


@pytest.mark.skipif(not CAN_GIVE_BACK, reason="this system cannot punch holes into a mapping")
@pytest.mark.parametrize("pages", [8, 10])
def test_what_a_block_will_have_is_not_given_back_for_it(arena: Arena, pages: int) -> None:
    large, _, last = (placed(arena, n * PAGE_BYTES) for n in (8, 1, 4))
    arena.drop(large)
    arena.drop(last)
    growth = arena.estimate_growth(pages * PAGE_BYTES)
    arena.give_back(MIB, pages * PAGE_BYTES)
    assert arena.estimate_growth(pages * PAGE_BYTES) == growth < pages * PAGE_BYTES


def test_growth_is_told_before_it_happens(arena: Arena) -> None:
    arena.drop(placed(arena, 3 * PAGE_BYTES))
    for length in (1, 3 * PAGE_BYTES, 4 * PAGE_BYTES):
        told, before = arena.estimate_growth(length), arena.touched_bytes
        block = placed(arena, length)
        assert arena.touched_bytes - before == told
        arena.drop(block)


def test_no_block_is_handed_out_beyond_the_reserve(arena: Arena) -> None:
    assert arena.place(RESERVE_BYTES + 1) is None
    placed(arena, RESERVE_BYTES)
    assert arena.place(1) is None


@pytest.mark.parametrize("verb", ["drop", "drop_unused", "shrink", "split_off", "forget"])
def test_a_stale_block_raises_whatever_is_done_with_it(arena: Arena, verb: str) -> None:
    stale = placed(arena, 5000)
    arena.drop(stale)
    fresh = placed(arena, 5000)
    assert fresh.offset == stale.offset
    rest = {"shrink": (1, 1), "split_off": (stale.offset, PAGE_BYTES)}.get(verb, ())
    with pytest.raises(StaleBlockError, match=f"at {stale.offset} of generation"):
        getattr(arena, verb)(stale, *rest)
    arena.drop(fresh)


def test_an_untouched_tail_is_cold_again(arena: Arena) -> None:
    block = placed(arena, 10 * PAGE_BYTES)
    write(arena, block, 3 * PAGE_BYTES)
    kept = arena.shrink(block, PAGE_BYTES, 3 * PAGE_BYTES)
    assert kept.capacity_bytes == PAGE_BYTES
    assert arena.touched_bytes == 3 * PAGE_BYTES == arena.read_resident_bytes()
    assert arena.free_warm_bytes == 2 * PAGE_BYTES


def test_a_tail_that_was_warm_before_stays_counted(arena: Arena) -> None:
    first = placed(arena, 10 * PAGE_BYTES)
    write(arena, first)
    arena.drop(first)
    arena.shrink(placed(arena, 10 * PAGE_BYTES), PAGE_BYTES, PAGE_BYTES)
    assert arena.touched_bytes == 10 * PAGE_BYTES == arena.read_resident_bytes()


@pytest.mark.skipif(not CAN_GIVE_BACK, reason="this system cannot punch holes into a mapping")
def test_given_back_pages_are_gone_and_read_as_zeros(arena: Arena) -> None:
    block, kept = placed(arena, 8 * PAGE_BYTES), placed(arena, PAGE_BYTES)
    write(arena, block)
    write(arena, kept)
    arena.drop(block)
    assert arena.give_back(5 * PAGE_BYTES) == 5 * PAGE_BYTES
    assert arena.read_resident_bytes() == 4 * PAGE_BYTES
    assert arena.give_back(MIB) == 3 * PAGE_BYTES
    assert arena.touched_bytes == PAGE_BYTES == arena.read_resident_bytes()
    assert arena.mapping[kept.offset] == ord("x")
    assert arena.mapping[block.offset] == 0


def test_closing_twice_is_harmless_and_lets_go_of_the_descriptor() -> None:
    arena = Arena(RESERVE_BYTES)
    fd = arena.fd
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# -- whatever is done, in whatever order -----------------------------------------------------------


class ArenaLife(RuleBasedStateMachine):
    """Blocks placed, written, cut, taken apart, dropped; pages given back."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(RESERVE_BYTES)
        self.live: list[Block] = []
        self.marks: dict[int, bytes] = {}  # generation -> what was written to its first byte
        self.apart: list[tuple[Block, list[int]]] = []  # block, pages of it that are still held
        self.stale: list[Block] = []

    def teardown(self) -> None:
        self.arena.close()

    def pick(self, data: st.DataObject) -> Block:
        return self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))

    def mark(self, block: Block, touched_bytes: int) -> None:
        self.marks[block.generation] = bytes([block.generation % 255 + 1])
        self.arena.mapping[block.offset : block.offset + touched_bytes] = (
            self.marks[block.generation] * touched_bytes
        )

    @rule(pages=st.integers(1, 24), short=st.integers(0, PAGE_BYTES - 1))
    def place(self, pages: int, short: int) -> None:
        length = pages * PAGE_BYTES - short
        told, before = self.arena.estimate_growth(length), self.arena.touched_bytes
        block = self.arena.place(length)
        if block is None:
            return
        assert self.arena.touched_bytes - before == told
        assert block.capacity_bytes == pages * PAGE_BYTES
        self.live.append(block)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def write_and_shrink(self, data: st.DataObject) -> None:
        block = self.pick(data)
        used = data.draw(st.integers(1, block.capacity_bytes))
        touched = data.draw(st.integers(used, block.capacity_bytes))
        self.mark(block, touched)
        kept = self.arena.shrink(block, used, touched)
        assert kept.offset == block.offset
        assert used <= kept.capacity_bytes <= block.capacity_bytes
        self.live.append(kept)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), unused=st.booleans())
    def drop(self, data: st.DataObject, unused: bool) -> None:
        block = self.pick(data)
        if unused and block.generation not in self.marks:
            self.arena.drop_unused(block)
        else:
            self.arena.drop(block)
        self.stale.append(block)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def take_apart(self, data: st.DataObject) -> None:
        block = self.pick(data)
        pages = list(range(block.offset, block.offset + block.capacity_bytes, PAGE_BYTES))
        self.apart.append((block, pages))

    @precondition(lambda self: self.apart)
    @rule(data=st.data())
    def give_back_a_part(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.apart) - 1))
        block, pages = self.apart[at]
        page = pages.pop(data.draw(st.integers(0, len(pages) - 1)))
        self.arena.split_off(block, page, PAGE_BYTES)
        if not pages:
            self.arena.forget(block)
            del self.apart[at]
            self.stale.append(block)

    @rule(length=st.integers(0, RESERVE_BYTES), pages=st.integers(1, 24))
    def give_pages_back_for_a_block(self, length: int, pages: int) -> None:
        growth = self.arena.estimate_growth(pages * PAGE_BYTES)
        used = pages * PAGE_BYTES - growth
        others = self.arena.free_warm_bytes - used
        given = self.arena.give_back(length, pages * PAGE_BYTES)
        assert given <= others
        assert given >= min(length, others) or not CAN_GIVE_BACK
        assert self.arena.estimate_growth(pages * PAGE_BYTES) == growth

    @rule(length=st.integers(0, RESERVE_BYTES))
    def give_pages_back(self, length: int) -> None:
        free = self.arena.free_warm_bytes
        given = self.arena.give_back(length)
        assert given <= free
        assert given >= min(length, free) or not CAN_GIVE_BACK
        assert self.arena.free_warm_bytes == free - given

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def use_a_stale_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.stale))
        with pytest.raises(StaleBlockError):
            self.arena.drop(block)

    @invariant()
    def nothing_is_lost(self) -> None:
        arena = self.arena
        held = sum(block.capacity_bytes for block in self.live)
        held += sum(len(pages) * PAGE_BYTES for _, pages in self.apart)
        cold = arena._cold.total_bytes
        assert held + arena.free_warm_bytes + cold == arena.reserve_bytes
        assert arena.touched_bytes == arena.reserve_bytes - cold

    @invariant()
    def nothing_overlaps(self) -> None:
        arena = self.arena
        ranges = [(block.offset, block.capacity_bytes) for block in self.live]
        ranges += [(page, PAGE_BYTES) for _, pages in self.apart for page in pages]
        ranges += [*arena._cold, *arena._warm]
        ranges += [(offset, size) for size, all_ in arena._hot.items() for offset in all_]
        ranges.sort()
        for (offset, length), (following, _) in itertools.pairwise(ranges):
            assert offset + length <= following

    @invariant()
    def touched_is_never_less_than_resident(self) -> None:
        assert self.arena.read_resident_bytes() <= self.arena.touched_bytes

    @invariant()
    def nobody_wrote_into_what_lives(self) -> None:
        for block in self.live:
            mark = self.marks.get(block.generation)
            if mark is not None:
                assert self.arena.mapping[block.offset : block.offset + 1] == mark


TestArenaLife = ArenaLife.TestCase
TestArenaLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
