"""Private memory behind the arena's interface: what is there, what goes back, what stays."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from forebay.transport.arena import Arena, Block
from forebay.transport.pages import HUGE_BYTES, PrivatePages, SharedPages, open_pages
from forebay.units import GIB, MIB


def fill(arena: Arena, block: Block) -> None:
    view = (ctypes.c_char * block.capacity_bytes).from_buffer(arena.mapping, block.offset)
    ctypes.memset(view, 1, block.capacity_bytes)


@pytest.fixture
def arena() -> Any:
    arena = Arena(256 * MIB, is_private=True)
    yield arena
    arena.close()


def test_addresses_beyond_the_machines_memory_are_free() -> None:
    pages = open_pages(1024 * GIB, is_private=True)
    assert isinstance(pages, PrivatePages)
    assert pages.fd == -1
    pages.close()


def test_where_private_addresses_are_refused_shared_ones_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(PrivatePages, "__init__", refuse)
    pages = open_pages(MIB, is_private=True)
    assert isinstance(pages, SharedPages)
    pages.close()


@pytest.mark.parametrize("size_bytes", [4096, 100_000, 3 * MIB + 4096, 40 * MIB])
def test_what_is_resident_is_what_was_written(arena: Arena, size_bytes: int) -> None:
    assert arena.read_resident_bytes() == 0
    block = arena.place(size_bytes)
    assert block is not None
    assert arena.read_resident_bytes() == 0
    fill(arena, block)
    assert arena.read_resident_bytes() == block.capacity_bytes == arena.touched_bytes


def test_pages_go_back_in_whole_huge_ones(arena: Arena) -> None:
    block = arena.place(20 * MIB)
    assert block is not None
    fill(arena, block)
    arena.drop(block)
    given = arena.give_back(5 * MIB)
    assert 5 * MIB <= given < 5 * MIB + HUGE_BYTES
    assert arena.read_resident_bytes() == arena.touched_bytes == 20 * MIB - given


def test_what_went_back_can_be_placed_again(arena: Arena) -> None:
    for _ in range(3):
        block = arena.place(20 * MIB)
        assert block is not None
        fill(arena, block)
        arena.drop(block)
        assert arena.give_back(64 * MIB) == 20 * MIB
        assert arena.read_resident_bytes() == 0


def test_a_view_keeps_the_memory_after_the_end() -> None:
    arena = Arena(MIB, is_private=True)
    block = arena.place(8192)
    assert block is not None
    fill(arena, block)
    view = (ctypes.c_char * 8192).from_buffer(arena.mapping, block.offset)
    others = arena.place(100_000)
    assert others is not None
    fill(arena, others)
    arena.drop(others)
    arena.close()
    assert view.raw == b"\1" * 8192
    # The mapping lives as long as the view: what is not viewed must not live with it.
    assert arena.read_resident_bytes() == 8192
